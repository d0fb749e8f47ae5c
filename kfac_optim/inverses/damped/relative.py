"""What the representations have in common that damp each factor relative to that factor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.damped.deflation import DeflatedState, check_sketch, sketched_if_wide, sketched_refresh
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse
from kfac_optim.specs import Cost, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils.validation import check_number

S = TypeVar("S", bound=DeflatedState[Any])


@dataclass(frozen=True)
class RelativelyDamped(PairInverse[S]):
    """Makes something of `F + ε n_F I` for each factor by itself, where `n_F = tr F / d` is its mean eigenvalue.

    So the damping ε has no unit, and the λ of the param groups is not used. Of factors of at least `4·sketch` rows the
    products with so many random directions are kept, and what is made has r eigenvectors and one number for the rest,
    as with `LowRank(sketch=…)`. Refreshing the others costs what it does with `Eigen`. A factor that is zero counts as
    the identity. Condition numbers in `metrics()` are those of the damped factors, in the 2-norm.

    Args:
        damping: ε, above 0.
        rank: r, of wide factors.
        sketch: how many directions, at least the rank; None keeps all factors whole.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: it is out of range.
    """

    damping: float = 0.1
    rank: int = 32
    sketch: int | None = 64

    follows_damping = True  # as no λ counts
    damps_jointly = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_number(f"damping of {name}", self.damping, above=0)
        check_sketch(name, self.sketch, self.rank)

    def kept(self, wish: Kept, dim: int) -> Kept:
        return sketched_if_wide(self.sketch, wish, dim)

    def damped(self, state: S) -> Iterator[tuple[int, Factor, Damped]]:
        """Yield side, factor and damping of each factor of the block that is kept here."""
        for side, factor in enumerate((state.pair.a, state.pair.g)):
            if factor is not None and factor.elsewhere is None:
                mean = factor.trace().to(state.condition.dtype) / factor.dim
                shift = torch.where(mean > 0, self.damping * mean, 1.0)
                yield side, factor, Damped(torch.ones_like(mean), shift)

    def flops(self, spec: LayerSpec) -> Cost:
        refresh, per_element = 0.0, 0.0
        for structure, groups, dim in spec.factors():
            if isinstance(structure, Sketched):
                refresh += groups * sketched_refresh(dim, structure.columns)
                per_element += 4.0 * self.rank
            elif structure is Structure.DENSE:
                refresh += EIGH_FLOPS * groups * float(dim) ** 3
                per_element += 2 * dim
        return Cost(refresh=refresh, apply=per_element * spec.groups * spec.in_dim * spec.out_dim)
