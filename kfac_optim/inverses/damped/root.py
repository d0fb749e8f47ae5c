"""The inverse square root of each factor, damped relative to that factor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kfac_optim.inverses.batching import FactorJob, batches
from kfac_optim.inverses.damped.base import DampedJob, keep_inverses
from kfac_optim.inverses.damped.deflation import (
    DeflatedState,
    Deflation,
    DeflationJob,
    Side,
    apply_sides,
    check_sketch,
    identity_side,
    read_off,
    result_numbers,
    sketched_if_wide,
    sketched_refresh,
)
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.specs import Cost, FactorShape, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils.validation import check_number

RootState = DeflatedState[Side]
"""A side is the inverse root of its factor, a `Deflation` where it is sketched; condition numbers are in the 2-norm."""


@dataclass(frozen=True)
class InverseRoot(PairInverse[RootState]):
    """Multiplies the gradient by the inverse square roots of its factors: `(G + ε n_G I)^-½ ∇ (A + ε n_A I)^-½`.

    `n_F = tr F / d` is the mean eigenvalue of a factor, so that the damping ε has no unit. The λ of the param groups is
    not used. Where a gradient is mostly noise, of covariance near `A ⊗ G`, all directions get noise of the same size;
    the full inverse would give the most to those of the least curvature.

    Use it with `step_size=OrthogonalUpdates()`, and with `structure=(Structure.DENSE, Structure.IDENTITY)`, which
    leaves out `G` and its cost: orthogonal updates undo most of what `G` does.

    Of factors of at least `4·sketch` rows the products with so many random directions are kept, and the roots have r
    eigenvectors and one number for the rest, as with `LowRank(sketch=…)`. Refreshing the others costs what it does with
    `Eigen`, applying them two matrix products. Where a factor is zero its root is 1. Condition numbers in `metrics()`
    are those of the damped factors, in the 2-norm.

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
        check_number("damping of InverseRoot", self.damping, above=0)
        check_sketch("InverseRoot", self.sketch, self.rank)

    def kept(self, wish: Kept, dim: int) -> Kept:
        return sketched_if_wide(self.sketch, wish, dim)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> RootState:
        return RootState(spec, partial(identity_side, self.rank, math.inf), dtype=dtype, device=device)

    def refresh(self, states: Sequence[RootState], dampings: Sequence[float]) -> None:
        jobs = [job for state in states for job in self._jobs(state)]
        for structure, sketched in batches(job for job in jobs if isinstance(job, DeflationJob)):
            assert isinstance(structure, Sketched)
            read_off(structure, sketched)
        for structure, equal in batches(job for job in jobs if isinstance(job, DampedJob)):
            shift = torch.cat([job.damped.shift for job in equal])[:, None]
            average = torch.cat([job.average() for job in equal])
            if structure is Structure.DENSE:
                values, basis, attempts = eigendecomposition(average)
                values = values.clamp(min=0) + shift
                roots = (basis * values.rsqrt().unsqueeze(-2)) @ basis.mT
            else:
                values = average + shift
                roots, attempts = values.rsqrt(), values.isfinite().all(-1).long()
            keep_inverses(equal, roots, attempts, values.amax(-1) / values.amin(-1))

    def apply(self, state: RootState, grad: Tensor, damping: float) -> Tensor:
        return apply_sides(state.a, state.g, grad, state.condition.dtype)

    def _jobs(self, state: RootState) -> list[FactorJob]:
        jobs: list[FactorJob] = []
        for side, factor in enumerate((state.pair.a, state.pair.g)):
            if factor is not None and factor.elsewhere is None:
                mean = factor.trace().to(state.condition.dtype) / factor.dim
                damped = Damped(torch.ones_like(mean), torch.where(mean > 0, self.damping * mean, 1.0))
                kept = state.side(side)
                if isinstance(kept, Deflation):
                    jobs.append(DeflationJob(state, side, factor, damped, [(0.5, kept)]))
                else:
                    jobs.append(DampedJob(state, side, factor, damped, kept.inverse))
        return jobs

    def result(self, factor: FactorShape) -> tuple[int, int]:
        return result_numbers(factor, self.rank, math.inf)

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
