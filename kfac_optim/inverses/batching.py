"""Factors of equal sizes, refreshed in one batch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, averages_of
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

    def average(self) -> Tensor:
        """Give the average in the dtype of the computation; that of a dense factor is unpacked at each call."""
        return self.factor.average.to(self.state.condition.dtype)

    def settle(self, attempts: Tensor) -> Tensor:
        """Count what came of each group; `[groups]` bool, whether its new result replaces the old one.

        Args:
            attempts: that each group took, `[groups]`; 0 where all failed.
        """
        held, in_a_row = self.state.pair.held(), self.state.failed_in_a_row
        if on_host(attempts) and bool((attempts == 1).all()):  # as nearly always: there is nothing to count
            in_a_row[self.side] = 0
            return held.expand(len(attempts))
        failed = attempts == 0
        self.state.failed += failed.sum()
        in_a_row[self.side] = torch.where(failed.any(), in_a_row[self.side] + 1, 0)
        self.state.retried += (attempts > 1).sum()
        return (attempts > 0) & held


J = TypeVar("J", bound=FactorJob)


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
