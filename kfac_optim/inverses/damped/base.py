"""What the representations that invert each damped factor by itself have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, averages
from kfac_optim.inverses.damping import Damped, factored_tikhonov
from kfac_optim.inverses.pair_inverse import PairState
from kfac_optim.linalg.cholesky import damped_cholesky_inverse
from kfac_optim.linalg.products import norm1
from kfac_optim.specs import Structure


@dataclass(frozen=True, slots=True, eq=False)
class DampedJob(FactorJob):
    """Says how the factor is damped, and where its inverse goes.

    Attributes:
        damped: the factor's share of λ.
        inverse: the last good one, to be replaced: `[groups, d, d]`, or `[groups, d]` of a diagonal factor.
    """

    damped: Damped
    inverse: Tensor

    def keep(self, inverse: Tensor, attempts: Tensor, condition: Tensor) -> Tensor:
        """Take the groups that are usable, `[groups]` bool, and leave the others at their last good inverse.

        Args:
            inverse: like the one to be replaced.
            attempts: `[groups]`, 0 where all failed.
            condition: condition number, `[groups]`.
        """
        usable = self.settle(attempts)
        taken = usable.view(-1, *(1,) * (inverse.dim() - 1))
        torch.where(taken, inverse.to(self.inverse.dtype), self.inverse, out=self.inverse)
        last = self.state.condition[self.side]
        self.state.condition[self.side] = torch.where(usable, condition, last).max()
        return usable


def damped_factors(state: PairState[Any], damping: float) -> list[tuple[int, Factor, Damped]]:
    """Return side and share of λ of each factor of the block that is kept here; λ is shared among all."""
    present = [(side, factor) for side, factor in enumerate((state.pair.a, state.pair.g)) if factor is not None]
    traces = [factor.trace().to(state.condition.dtype) for _, factor in present]
    shares = factored_tikhonov(traces, [factor.dim for _, factor in present], damping)
    return [
        (side, factor, share) for (side, factor), share in zip(present, shares, strict=True) if factor.elsewhere is None
    ]


def damped_jobs(state: PairState[Any], damping: float) -> list[DampedJob]:
    """Return a job for each factor of the block that is kept here; its results go to the inverses of the state."""
    return [
        DampedJob(state, side, factor, share, state.side(side).inverse)
        for side, factor, share in damped_factors(state, damping)
    ]


def keep_inverses(jobs: Sequence[DampedJob], inverses: Tensor, attempts: Tensor, conditions: Tensor) -> list[Tensor]:
    """Split what was computed for all groups of all jobs, `[n, d, d]` and `[n]`; see `DampedJob.keep`."""
    sizes = [len(job.inverse) for job in jobs]
    parts = (torch.split(whole, sizes) for whole in (inverses, attempts, conditions))
    return [job.keep(*part) for job, *part in zip(jobs, *parts, strict=True)]


def take_reciprocals(jobs: Sequence[DampedJob]) -> list[Tensor]:
    """Invert diagonal factors, and 1×1 matrices; see `DampedJob.keep`."""
    taken: list[Tensor] = []
    for job in jobs:
        damped = job.damped.of(job.average())
        diagonal = damped.flatten(1)
        finite = diagonal.isfinite().all(-1).to(torch.int64)
        taken.append(job.keep(damped.reciprocal(), finite, diagonal.amax(-1) / diagonal.amin(-1)))
    return taken


def invert_by_cholesky(jobs: Sequence[DampedJob]) -> None:
    """Stack every group of every job, dense and of one size, into one batch, invert, and hand the parts back."""
    damped = Damped.joined(job.damped for job in jobs)
    stack = damped.scaled(averages(jobs))
    inverses, attempts = damped_cholesky_inverse(stack, damped.shift)
    keep_inverses(jobs, inverses, attempts, (norm1(stack) + damped.shift) * norm1(inverses))


def identity_like(factor: Factor, dtype: torch.dtype) -> Tensor:
    """Return the inverse that stands until there is one, `[groups, d, d]`, or `[groups, d]` of a diagonal factor."""
    ones = torch.ones(factor.groups, factor.dim, dtype=dtype, device=factor.device)
    return torch.diag_embed(ones) if factor.structure is Structure.DENSE else ones
