"""Numbers in a row cut into equal segments, one for each rank, and the pieces of the row that ranks own.

[Note: the way by segments] An owner that takes whole pieces from all P ranks moves P − 1 times what it owns, so that
its link is busy the longer the more ranks there are. So for many ranks a row is reduced in two steps: each rank gets
the sum of one segment, `(P−1)/P` of the row, and then the segments go to the owners of what lies in them, `1/P` of the
row where owners have equally much. The way back is the same two steps in turn: from owners to segments, and all
segments to all. Every link moves about the same, `1 + 1/P` of what reduce-scatter and all-gather alone move, and no
rank holds more than the row twice.

A row that has one owner would go over that owner's link alone, while all others wait. So the messages between segments
and owners of several rows are under way together, as long as no rank owns more of them than one row may hold.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Neighbouring elements of one owner."""

    owner: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segments:
    """Lays out a row.

    Attributes:
        pieces: owner and number of elements of each piece, in the order of the row.
        ranks: number of ranks, each of which has a segment.
    """

    pieces: tuple[tuple[int, int], ...]
    ranks: int

    @cached_property
    def elements(self) -> int:
        """Return the elements of the row."""
        return sum(size for _, size in self.pieces)

    @cached_property
    def length(self) -> int:
        """Return the elements of a segment; the last ones may have fewer, or none."""
        return -(-self.elements // self.ranks)

    def segment(self, rank: int) -> slice:
        """Return where the segment of `rank` lies in the row."""
        return slice(min(rank * self.length, self.elements), min((rank + 1) * self.length, self.elements))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the elements of each segment."""
        places = map(self.segment, range(self.ranks))
        return tuple(place.stop - place.start for place in places)

    @cached_property
    def _runs(self) -> tuple[Run, ...]:
        """Return the pieces, neighbours of one owner joined."""
        runs: list[Run] = []
        start = 0
        for owner, size in self.pieces:
            if runs and runs[-1].owner == owner:
                runs[-1] = runs[-1]._replace(stop=start + size)
            elif size:
                runs.append(Run(owner, start, start + size))
            start += size
        return tuple(runs)

    @cached_property
    def _owned(self) -> tuple[tuple[Run, ...], ...]:
        runs: list[list[Run]] = [[] for _ in range(self.ranks)]
        for run in self._runs:
            runs[run.owner].append(run)
        return tuple(map(tuple, runs))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(run.start for run in self._runs)

    def owned(self, owner: int) -> tuple[Run, ...]:
        """Return where the pieces of `owner` lie in the row."""
        return self._owned[owner]

    def within(self, rank: int) -> tuple[Run, ...]:
        """Return the runs in the segment of `rank`, counted from its start, those of one owner after another."""
        place = self.segment(rank)
        if place.start == place.stop:
            return ()
        first = bisect.bisect_right(self._starts, place.start) - 1
        last = bisect.bisect_left(self._starts, place.stop)
        cut = (
            Run(owner, max(start, place.start) - place.start, min(stop, place.stop) - place.start)
            for owner, start, stop in self._runs[first:last]
        )
        return tuple(sorted(cut, key=lambda run: run.owner))

    def for_owners(self, rank: int) -> tuple[int, ...]:
        """Return how many elements of the segment of `rank` each owner has."""
        counts = [0] * self.ranks
        for owner, start, stop in self.within(rank):
            counts[owner] += stop - start
        return tuple(counts)

    def from_segments(self, owner: int) -> tuple[int, ...]:
        """Return how many elements of `owner` lie in each segment."""
        counts = [0] * self.ranks
        for _, start, stop in self._owned[owner]:
            for rank in range(start // self.length, (stop - 1) // self.length + 1):
                place = self.segment(rank)
                counts[rank] += min(stop, place.stop) - max(start, place.start)
        return tuple(counts)

    @cached_property
    def at_home(self) -> tuple[int, ...]:
        """Return how many elements of each rank's segment it owns itself."""
        counts = [0] * self.ranks
        for owner, start, stop in self._runs:
            place = self.segment(owner)
            counts[owner] += max(0, min(stop, place.stop) - max(start, place.start))
        return tuple(counts)

    def crossing(self) -> int:
        """Return how many elements go from segments to owners, or back, in all."""
        return self.elements - sum(self.at_home)


def sections(sizes: Sequence[int]) -> Segments:
    """Return the layout of a row in which each rank owns one section, in the order of ranks."""
    return Segments(tuple(enumerate(sizes)), len(sizes))


def batches(rows: Sequence[Sequence[float]]) -> list[slice]:
    """Cut rows, in their order, into those whose messages between segments and owners are under way together.

    Args:
        rows: of each row what every rank owns of it.

    Returns:
        Where each batch lies: no rank owns more of one than the largest row has in all.
    """
    limit = max(map(sum, rows), default=0.0)
    found: list[slice] = []
    start, owned = 0, [0.0] * (len(rows[0]) if rows else 0)
    for number, row in enumerate(rows):
        owned = [before + more for before, more in zip(owned, row, strict=True)]
        if max(owned) > limit:
            found.append(slice(start, number))
            start, owned = number, list(row)
    return [*found, slice(start, len(rows))] if rows else []


def splits(sizes: Sequence[int]) -> list[slice]:
    """Return where parts of these sizes lie one after the other."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def filled_up(row: Tensor, elements: int) -> Tensor:
    """Return a row of so many elements, the last ones zeros: equal segments are what a reduce-scatter takes."""
    return row if len(row) == elements else torch.cat([row, row.new_zeros(elements - len(row))])
