"""Factors of equal sizes are refreshed in one batch, and each takes its part of what was computed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, averages_of
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.second_moments import on_host
from kfac_optim.inverses.pair_inverse import PairState
from kfac_optim.specs import Sketched, Structure

# Elements of the matrices that one batched call takes: 256 MiB of float32.
_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True, eq=False)
class FactorJob:
    """Names one factor to solve for, on side 0 (A) or 1 (G) of the block whose state takes the result."""

    state: PairState[Any]
    side: int
    factor: Factor

    def settle(self, attempts: Tensor) -> Tensor:
        """Count failures and retries, and return whether each group's new result replaces the old one, `[groups]` bool.

        Args:
            attempts: how many attempts each group took, `[groups]`; 0 where all failed.
        """
        failed, in_a_row = attempts == 0, self.state.failed_in_a_row
        self.state.failed += failed.sum()
        in_a_row[self.side] = torch.where(failed.any(), in_a_row[self.side] + 1, 0)
        self.state.retried += (attempts > 1).sum()
        return (attempts > 0) & self.held()

    def held(self) -> Tensor:
        """Return which groups ever had a sample, `[groups]` bool; the others keep what they began with."""
        return self.state.pair.held_groups().expand(self.factor.groups)

    def last_measured(self, largest: Tensor) -> Tensor:
        """Return what stands for each group where it has no new measure, `[groups]`.

        That is the largest of all groups, but 0 for one that has no sample where others have: it has no measure yet.
        """
        if self.factor.mass.dim() == 0:
            return largest.expand(self.factor.groups)
        held = self.held()
        return torch.where(held | ~held.any(), largest, 0)


J = TypeVar("J", bound=FactorJob)

Usable = Tensor | None
"""A mask says which groups of all jobs replace their old results, `[n]` bool; None where all do."""


def settle(jobs: Sequence[FactorJob], attempts: Tensor) -> Usable:
    """Count what came of each group of each job; see `FactorJob.settle`.

    Nearly always all were solved at the first attempt, and there is nothing to count. A host sees that in a few calls
    for all jobs; an accelerator is not asked, and counts for all jobs at once.

    Args:
        jobs: the jobs of one batch.
        attempts: how many attempts each group of all jobs took, `[n]`.
    """
    if (masses := _masses(jobs)) is not None:
        if not on_host(attempts):
            if len(attempts) == len(jobs):
                return _settle_there(jobs, attempts, masses)
        elif bool((attempts == 1).all()) and bool((masses > 0).all()):
            torch._foreach_zero_([job.state.failed_in_a_row[job.side] for job in jobs])
            return None
    parts = torch.split(attempts, [job.factor.groups for job in jobs])
    return torch.cat([job.settle(part) for job, part in zip(jobs, parts, strict=True)])


def _masses(jobs: Sequence[FactorJob]) -> Tensor | None:
    """Return the masses of both factors of each job's block, `[2, jobs]`, that of a single one twice.

    None where a factor has several masses, or one that another rank keeps.
    """
    pairs = [job.state.pair for job in jobs]
    factors = [[factor for factor in (pair.a, pair.g) if factor is not None] for pair in pairs]
    if any(type(pair) is not FactorPair for pair in pairs):
        return None
    if any(factor.elsewhere is not None or factor.mass.dim() > 0 for pair in factors for factor in pair):
        return None
    return torch.stack([pair[side].mass for side in (0, -1) for pair in factors]).view(2, -1)


def _settle_there(jobs: Sequence[FactorJob], attempts: Tensor, masses: Tensor) -> Tensor:
    """Do as `FactorJob.settle` for each job of one group, in a few operators for all."""
    failed = attempts == 0
    counts = torch.stack([failed, attempts > 1]).to(jobs[0].state.failed.dtype).unbind(1)
    for side in (0, 1):  # a state counts for both of its factors
        some = [(job.state, count.unbind()) for job, count in zip(jobs, counts, strict=True) if job.side == side]
        if some:
            torch._foreach_add_([state.failed for state, _ in some], [count for _, (count, _) in some])
            torch._foreach_add_([state.retried for state, _ in some], [count for _, (_, count) in some])
    in_a_row = [job.state.failed_in_a_row[job.side] for job in jobs]
    torch._foreach_copy_(in_a_row, list(torch.where(failed, torch.stack(in_a_row) + 1, 0).unbind()))
    return ~failed & (masses > 0).all(0)


def take(usable: Usable, held: Sequence[Tensor], new: Tensor) -> None:
    """Replace what jobs hold by what was computed of their groups, where that is usable.

    Args:
        usable: what `settle` returned.
        held: what each job holds, `[groups, ...]`; it may be of a narrower dtype.
        new: the results of the groups of all jobs, `[n, ...]`.
    """
    if usable is not None:
        kept = torch.cat(list(held))
        new = torch.where(usable.view(-1, *(1,) * (new.dim() - 1)), new.to(kept.dtype), kept)
    torch._foreach_copy_(list(held), list(torch.split(new, [len(each) for each in held])))


def mark(usable: Usable, jobs: Sequence[FactorJob], flags: Sequence[Tensor]) -> None:
    """Mark groups that have a result from now on.

    Args:
        usable: what `settle` returned.
        jobs: the jobs of one batch.
        flags: the flags of each job, `[groups]` bool; if the block's groups share the job's factor, one for each of
            these groups.
    """
    if usable is None:
        for flag in flags:
            flag.fill_(True)
    else:
        for flag, taken in zip(flags, torch.split(usable, [job.factor.groups for job in jobs]), strict=True):
            flag.logical_or_(taken)


def take_largest(usable: Usable, jobs: Sequence[FactorJob], held: Sequence[Tensor], new: Tensor) -> None:
    """Replace what was measured of a factor by the largest of its groups, where a new measure is usable.

    Args:
        usable: what `settle` returned.
        jobs: the jobs of one batch.
        held: what was measured of each job's block, `[2]` for A and G.
        new: the new measures of the groups of all jobs, `[n]`.
    """
    places = [each[job.side] for job, each in zip(jobs, held, strict=True)]
    if usable is not None:
        kept = torch.cat([job.last_measured(place) for job, place in zip(jobs, places, strict=True)])
        new = torch.where(usable, new, kept)
    if len(new) == len(jobs):
        torch._foreach_copy_(places, list(new.unbind()))
    else:
        torch._foreach_copy_(places, [part.max() for part in torch.split(new, [job.factor.groups for job in jobs])])


def averages(jobs: Sequence[FactorJob]) -> Tensor:
    """Return the averages of all groups of jobs of one batch as `averages_of` does, in the dtype of the computation."""
    return averages_of([job.factor for job in jobs]).to(jobs[0].state.condition.dtype)


def batches(jobs: Iterable[J]) -> Iterator[tuple[Structure | Sketched, list[J]]]:
    """Return jobs of one structure, size, dtype and device: what one batched call can take.

    A batch has at most `_AT_ONCE` elements of full matrices, unless one job alone has more. So a refresh needs a few
    times that as working memory, however many layers are alike.
    """
    alike: defaultdict[tuple[Any, ...], list[J]] = defaultdict(list)
    for job in jobs:
        factor = job.factor
        alike[factor.structure, factor.dim, job.state.condition.dtype, factor.device].append(job)
    for (structure, dim, *_), equal in alike.items():
        columns = structure.columns if isinstance(structure, Sketched) else dim
        batch, matrices = [equal[0]], equal[0].factor.groups
        for job in equal[1:]:
            if (matrices + job.factor.groups) * dim * columns > _AT_ONCE:
                yield structure, batch
                batch, matrices = [], 0
            batch.append(job)
            matrices += job.factor.groups
        yield structure, batch
