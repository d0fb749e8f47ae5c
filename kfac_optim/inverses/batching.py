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
        """Count what came of each group; `[groups]` bool, whether its new result replaces the old one.

        Args:
            attempts: that each group took, `[groups]`; 0 where all failed.
        """
        failed, in_a_row = attempts == 0, self.state.failed_in_a_row
        self.state.failed += failed.sum()
        in_a_row[self.side] = torch.where(failed.any(), in_a_row[self.side] + 1, 0)
        self.state.retried += (attempts > 1).sum()
        return (attempts > 0) & self.state.pair.held()


J = TypeVar("J", bound=FactorJob)

Usable = Sequence[Tensor] | None
"""A mask for each job says which groups replace their old results, `[groups]` bool; None where all of all jobs do."""


def settle(jobs: Sequence[FactorJob], attempts: Tensor) -> Usable:
    """Count what came of each group of each job; see `FactorJob.settle`.

    Nearly always all were solved at the first attempt, and there is nothing to count. A host sees that in a few calls
    for all jobs; an accelerator is not asked.

    Args:
        jobs: of one batch.
        attempts: of the groups of all jobs, `[n]`.
    """
    if on_host(attempts) and bool((attempts == 1).all()) and _all_are_held(jobs):
        torch._foreach_zero_([job.state.failed_in_a_row[job.side] for job in jobs])
        return None
    parts = torch.split(attempts, [job.factor.groups for job in jobs])
    return [job.settle(part) for job, part in zip(jobs, parts, strict=True)]


def _all_are_held(jobs: Sequence[FactorJob]) -> bool:
    """Return whether samples were accepted of all factors of the blocks, where each has one mass, which is here."""
    pairs = [job.state.pair for job in jobs]
    factors = [factor for pair in pairs for factor in (pair.a, pair.g) if factor is not None]
    if any(type(pair) is not FactorPair for pair in pairs):
        return False
    if any(factor.elsewhere is not None or factor.mass.dim() > 0 for factor in factors):
        return False
    return bool((torch.stack([factor.mass for factor in factors]) > 0).all())


def take(usable: Usable, held: Sequence[Tensor], new: Tensor) -> None:
    """Replace what jobs hold by what was computed of their groups, where that is usable.

    Args:
        usable: as `settle` returns it.
        held: of each job, `[groups, ...]`; it may be of a narrower dtype.
        new: of the groups of all jobs, `[n, ...]`.
    """
    parts = torch.split(new, [len(each) for each in held])
    if usable is None:
        torch._foreach_copy_(list(held), list(parts))
        return
    for each, part, taken in zip(held, parts, usable, strict=True):
        torch.where(taken.view(-1, *(1,) * (part.dim() - 1)), part.to(each.dtype), each, out=each)


def mark(usable: Usable, flags: Sequence[Tensor]) -> None:
    """Mark groups that have a result from now on.

    Args:
        usable: as `settle` returns it.
        flags: of each job, `[groups]` bool.
    """
    if usable is None:
        for flag in flags:
            flag.fill_(True)
    else:
        for flag, taken in zip(flags, usable, strict=True):
            flag.logical_or_(taken)


def take_largest(usable: Usable, jobs: Sequence[FactorJob], held: Sequence[Tensor], new: Tensor) -> None:
    """Replace what was measured of a factor by the largest of its groups, where a new measure is usable.

    Args:
        usable: as `settle` returns it.
        jobs: of one batch.
        held: of each job, `[2]` for A and G.
        new: of the groups of all jobs, `[n]`.
    """
    places = [each[job.side] for job, each in zip(jobs, held, strict=True)]
    parts = torch.split(new, [job.factor.groups for job in jobs])
    if usable is not None:
        parts = tuple(torch.where(*each) for each in zip(usable, parts, places, strict=True))
    torch._foreach_copy_(places, [part.max() for part in parts])


def averages(jobs: Sequence[FactorJob]) -> Tensor:
    """Return the averages of all groups of jobs of one batch as `averages_of` does, in the dtype of the computation."""
    return averages_of([job.factor for job in jobs]).to(jobs[0].state.condition.dtype)


def batches(jobs: Iterable[J]) -> Iterator[tuple[Structure | Sketched, list[J]]]:
    """Return jobs of one structure, size, dtype and device: what one batched call can take.

    No more than make `_AT_ONCE` elements of full matrices, or one job that has more: what a refresh needs besides what
    it leaves is so much a few times over, however many layers are alike.
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
