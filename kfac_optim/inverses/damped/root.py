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
    identity_side,
    read_off,
    result_numbers,
)
from kfac_optim.inverses.damped.relative import RelativelyDamped
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.specs import FactorShape, LayerSpec, Sketched, Structure

RootState = DeflatedState[Side]
"""A side is the inverse root of its factor, a `Deflation` where it is sketched."""


@dataclass(frozen=True)
class InverseRoot(RelativelyDamped[RootState]):
    """Multiplies the gradient by the inverse square roots of its factors: `(G + ε n_G I)^-½ ∇ (A + ε n_A I)^-½`.

    Where a gradient is mostly noise, of covariance near `A ⊗ G`, all directions get noise of the same size; the full
    inverse would give the most to those of the least curvature.

    It goes with `step_size=OrthogonalUpdates()`, which takes it where no inverse is named, and then keeps no `G`:
    orthogonal updates undo most of what `G` does. Damping, sketches, arguments and errors are those of
    `RelativelyDamped`: `damping` ε = 0.1, `rank` 32 and `sketch` 64.
    """

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> RootState:
        return DeflatedState(spec, partial(identity_side, self.rank, math.inf), dtype=dtype, device=device)

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
        for side, factor, damped in self.damped(state):
            kept = state.side(side)
            if isinstance(kept, Deflation):
                jobs.append(DeflationJob(state, side, factor, damped, [(0.5, kept)]))
            else:
                jobs.append(DampedJob(state, side, factor, damped, kept.inverse))
        return jobs

    def result(self, factor: FactorShape) -> tuple[int, int]:
        return result_numbers(factor, self.rank, math.inf)
