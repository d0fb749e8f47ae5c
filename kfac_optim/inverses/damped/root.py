"""The inverse square root of each factor, damped relative to that factor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import batches
from kfac_optim.inverses.damped.base import DampedJob, identity_like, keep_inverses
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse, PairState, SymmetricInverse, dense_flops
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.linalg.products import sandwich
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Structure
from kfac_optim.utils.validation import check_number

RootState = PairState[SymmetricInverse]
"""The `inverse` of a side is the inverse root of its factor; condition numbers are in the 2-norm."""


@dataclass(frozen=True)
class InverseRoot(PairInverse[RootState]):
    """Multiplies the gradient by the inverse square roots of its factors: `(G + ε n_G I)^-½ ∇ (A + ε n_A I)^-½`.

    `n_F = tr F / d` is the mean eigenvalue of a factor, so that the damping ε has no unit. The λ of the param groups is
    not used. Where a gradient is mostly noise, of covariance near `A ⊗ G`, all directions get noise of the same size;
    the full inverse would give the most to those of the least curvature.

    Use it with `step_size=OrthogonalUpdates()`, and with `structure=(Structure.DENSE, Structure.IDENTITY)`, which
    leaves out `G` and its cost: orthogonal updates undo most of what `G` does.

    Refreshing costs what it does with `Eigen`, applying two matrix products. Where a factor is zero its root is 1.
    Condition numbers in `metrics()` are those of the damped factors, in the 2-norm.

    Args:
        damping: ε, above 0.

    Raises:
        TypeError: `damping` is no number.
        ValueError: it is out of range.
    """

    damping: float = 0.1

    follows_damping = True  # as no λ counts
    damps_jointly = True

    def __post_init__(self) -> None:
        check_number("damping of InverseRoot", self.damping, above=0)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> RootState:
        def start(factor: Factor, compute: torch.dtype) -> SymmetricInverse:
            return SymmetricInverse(identity_like(factor, compute))

        return PairState(spec, start, dtype=dtype, device=device)

    def refresh(self, states: Sequence[RootState], dampings: Sequence[float]) -> None:
        for structure, equal in batches(job for state in states for job in self._jobs(state)):
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
        a, g = (None if side is None else side.inverse for side in (state.a, state.g))
        return sandwich(g, grad.to(state.condition.dtype), a)

    def _jobs(self, state: RootState) -> list[DampedJob]:
        jobs = []
        for side, factor in enumerate((state.pair.a, state.pair.g)):
            if factor is not None and factor.elsewhere is None:
                mean = factor.trace().to(state.condition.dtype) / factor.dim
                damped = Damped(torch.ones_like(mean), torch.where(mean > 0, self.damping * mean, 1.0))
                jobs.append(DampedJob(state, side, factor, damped, state.side(side).inverse))
        return jobs

    def result(self, factor: FactorShape) -> tuple[int, int]:
        return factor.packed, factor.numel

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=EIGH_FLOPS, products=1)
