"""A power of a damped factor as a few eigenvectors and one number for all the rest: thin products apply it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, settle, take, take_largest
from kfac_optim.inverses.damped.base import identity_like
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairState, SymmetricInverse, side_of
from kfac_optim.linalg.eigen import Eigenpairs, random_basis
from kfac_optim.linalg.products import sandwich
from kfac_optim.linalg.sketches import nystrom, sketch_directions
from kfac_optim.specs import FactorShape, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.validation import check_integer


class Deflation(NamedTuple):
    """Represents an inverse, or a root of it, `scale · (I - basis · diag(weights) · basisᵀ)`, of each group."""

    basis: Tensor
    """Eigenvectors as columns, `[groups, d, r]`; before the first refresh random ones or zeros, of weight 0."""
    weights: Tensor
    """How much of each the inverse takes away, `[groups, r]`, from 0 to 1."""
    scale: Tensor
    """What the inverse multiplies all other directions by, `[groups]`."""


Side = Deflation | SymmetricInverse

S = TypeVar("S", bound=NamedTuple)


class DeflatedState(PairState[S]):
    """Holds the factors of one block and the inverses of their damped forms, or other powers of these.

    The condition number of a `Deflation` is that of the damped matrix: of its largest eigenvalue over the one for the
    rest.

    Attributes:
        cutoff: the smallest eigenvalue kept, over the damping, `[2]` for A and G, the largest of all groups; 0 where
            the inverse is exact.
    """

    def __init__(
        self,
        spec: LayerSpec,
        start: Callable[[Factor, torch.dtype], S],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, start, dtype=dtype, device=device)
        self.cutoff = torch.zeros_like(self.condition)

    def counted(self) -> dict[str, Tensor]:
        return super().counted() | {"cutoff": self.cutoff}

    def counters(self) -> dict[str, Tensor]:
        return super().counters() | {"cutoff_A": self.cutoff[0], "cutoff_G": self.cutoff[1]}

    def measures(self, part: str) -> tuple[Tensor, ...]:
        return *super().measures(part), self.cutoff[side_of(part)]

    def ranges(self) -> dict[str, Any]:
        return super().ranges() | {"cutoff": value_checks.measured}


def read_off(structure: Sketched, jobs: "Sequence[DeflationJob]") -> None:
    """Read the leading eigenpairs off the sketches of every group of every job, of one size."""
    dtype = jobs[0].state.condition.dtype
    scales = torch.cat([job.damped.scale for job in jobs]).to(dtype)
    sketch = torch.cat([job.factor.sketch().to(dtype) for job in jobs]) * scales[:, None, None]
    traces = torch.cat([job.factor.trace().to(dtype) for job in jobs]) * scales
    shift = torch.cat([job.damped.shift for job in jobs])
    pairs = nystrom(sketch, sketch_directions(sketch.shape[1], structure.columns, like=sketch))
    rank = jobs[0].basis.shape[-1]
    leading = Eigenpairs(pairs.values[:, -rank:], pairs.vectors[..., -rank:], pairs.attempts)
    hand_back(jobs, leading, traces, shift)


def hand_back(jobs: "Sequence[DeflationJob]", pairs: Eigenpairs, traces: Tensor, shift: Tensor) -> None:
    """Take the groups that are usable, and leave the others at what they had last.

    Args:
        jobs: the jobs of one batch.
        pairs: the leading ones of the groups of all jobs, ascending.
        traces: the traces of the factors, `[n]`.
        shift: their damping, `[n]`.
    """
    usable, values = settle(jobs, pairs.attempts), pairs.values
    dim, rank = pairs.vectors.shape[1:]
    rest = shift + ((traces - values.sum(-1)) / (dim - rank)).clamp(min=0)
    damped = values + shift.unsqueeze(-1)
    take(usable, [job.basis for job in jobs], pairs.vectors)
    for number, (power, _) in enumerate(jobs[0].powers):
        kept = [job.powers[number][1] for job in jobs]
        # Rounding may put the mean of the rest above the smallest value kept.
        removed = (1 - (rest.unsqueeze(-1) / damped) ** power).clamp(min=0)
        take(usable, [each.weights for each in kept], removed)
        take(usable, [each.scale for each in kept], rest**-power)
    take_largest(usable, jobs, [job.state.condition for job in jobs], damped[:, -1] / rest)
    take_largest(usable, jobs, [job.state.cutoff for job in jobs], values[:, 0] / shift)


@dataclass(frozen=True, slots=True, eq=False)
class DeflationJob(FactorJob):
    """Says how a wide factor is damped, which powers of its inverse are needed, and where what is computed goes."""

    state: DeflatedState[Any]
    damped: Damped
    powers: Sequence[tuple[float, Deflation]]
    """Each power with what stands for it, the same powers in all jobs of a batch; all have one basis."""

    @property
    def basis(self) -> Tensor:
        return self.powers[0][1].basis


def is_deflated(structure: Structure | Sketched, dim: int, from_width: float) -> bool:
    """Return whether a factor is kept as a `Deflation`: if it is sketched, or dense and wide enough."""
    return isinstance(structure, Sketched) or (structure is Structure.DENSE and dim >= from_width)


def apply_sides(a: Side | None, g: Side | None, columns: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Multiply a gradient matrix by `g` from the left and by `a` from the right, in this dtype.

    Whole inverses come first and take the scales along; thin products change the result in place. To make one more
    matrix as large as the gradient, or to pass over it once more, may take as long as a product.

    Args:
        a: the inverse over `in`.
        g: the inverse over `out`.
        columns: the matrix, in parts `[groups, out, in_i]` side by side; in one part where `a` is whole.
        dtype: the dtype of the computation.

    Returns:
        The parts of the result, new tensors.
    """
    left, right = (side.inverse if isinstance(side, SymmetricInverse) else None for side in (g, a))
    scales = [side.scale for side in (g, a) if isinstance(side, Deflation)]
    scale = scales[0] * scales[1] if len(scales) > 1 else scales[0] if scales else None
    if scale is not None and left is not None:
        left, scale = left * scale.view(-1, *(1,) * (left.dim() - 1)), None
    elif scale is not None and right is not None:
        right, scale = right * scale.view(-1, *(1,) * (right.dim() - 1)), None
    found = [sandwich(left, part.to(dtype), right) for part in columns]
    if scale is not None:
        found = [part * scale.view(-1, 1, 1) for part in found]
    if isinstance(g, Deflation):
        for part in found:
            along = g.weights.unsqueeze(-1) * (g.basis.mT @ part)
            part.baddbmm_(g.basis.expand(len(part), -1, -1), along, alpha=-1)
    if isinstance(a, Deflation):
        bases = torch.split(a.basis, [part.shape[-1] for part in found], 1)
        along = functools.reduce(torch.add, (part @ basis for part, basis in zip(found, bases, strict=True)))
        along = along * a.weights.unsqueeze(-2)
        for part, basis in zip(found, bases, strict=True):
            part.baddbmm_(along, basis.mT.expand(len(part), -1, -1), alpha=-1)
    return found


def result_numbers(factor: FactorShape, rank: int, from_width: float) -> tuple[int, int]:
    """Return numbers of what is computed for one factor, as `PairInverse.result` has them."""
    if is_deflated(factor.structure, factor.dim, from_width):
        numbers = factor.groups * (factor.dim * rank + rank + 1)
        return numbers, numbers
    return factor.packed, factor.numel


def sketched_refresh(dim: int, columns: int) -> float:
    """Return the operations of reading eigenpairs off the sketch of one factor."""
    return 6.0 * dim * columns**2 + 2 * EIGH_FLOPS * columns**3


def sketched_if_wide(sketch: int | None, wish: Kept, dim: int) -> Kept:
    """Return what is kept of a factor: a sketch where it has at most a quarter of the columns."""
    if sketch is not None and wish is Structure.DENSE and dim >= 4 * sketch:
        return Sketched(sketch)
    return wish


def check_sketch(whose: str, sketch: int | None, rank: int) -> None:
    """Raise unless `sketch` is None, or an integer that is at least the rank."""
    check_integer(f"rank of {whose}", rank)
    if sketch is None:
        return
    check_integer(f"sketch of {whose} (None keeps whole factors)", sketch)
    if sketch < rank:
        raise ValueError(
            f"kfac_optim: sketch of {whose} must be at least its rank, {rank}, got {sketch}. Twice the rank is a good "
            "choice."
        )


def identity_side(rank: int, from_width: float, factor: Factor, dtype: torch.dtype) -> Side:
    """Return what stands until there is an inverse."""
    if not is_deflated(factor.structure, factor.dim, from_width):
        return SymmetricInverse(identity_like(factor, dtype))
    basis = random_basis(factor.dim, rank, dtype=dtype, device=factor.device).repeat(factor.groups, 1, 1)
    return Deflation(basis, basis.new_zeros(factor.groups, rank), basis.new_ones(factor.groups))
