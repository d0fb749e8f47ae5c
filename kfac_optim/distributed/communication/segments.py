"""Numbers in a row cut into equal segments, one for each rank, and the pieces of the row that ranks own.

[Note: the way by segments] An owner that takes whole pieces from all P ranks moves P − 1 times what it owns, so that
its link is busy the longer the more ranks there are. So for many ranks a row is reduced in two steps: each rank gets
the sum of one segment, `(P−1)/P` of the row, and then the segments go to the owners of what lies in them, `1/P` of the
row where owners have equally much. The way back is the same two steps in turn: from owners to segments, and all
segments to all. Every link moves about the same, `1 + 1/P` of what reduce-scatter and all-gather alone move, and no
rank holds more than the row twice.

A row that has one owner would go over that owner's link alone, while all others wait. So several rows go between
segments and owners in one message, as long as no rank owns more of them than one row may hold: then it holds that much
of them twice at the most, in segments and as what it owns.

[Note: what sums hold] A row that is put together to be summed, as factors are, is a buffer too. Where the first step is
an all-to-all of segments, as on the CPU, a rank holds the row and as much of what comes; beside these it keeps its
segments of the rows that wait for the same second message. So a batch of sums also ends where all of that would be more
than the largest bucket of the plan twice. A row of the size of that bucket is held twice, whatever the batches are, for
tensors are not cut. On accelerators a reduce-scatter holds less, and batches are the same.
"""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


class Batching:
    """Says of rows, one after the other, which of them go between segments and owners in one message.

    Args:
        limit: what one rank may own of a batch; of a larger row it may own all.
        ranks: how many sum rows that they put together, see [Note: what sums hold]; None where rows are no buffers of
            ours, or are not summed.
    """

    def __init__(self, limit: float = 0.0, ranks: int | None = None) -> None:
        self._limit = limit
        self._ranks = ranks
        self._largest = 0.0
        self._kept = 0.0
        self._owned: defaultdict[int, float] = defaultdict(float)

    def begins(self, owned: Mapping[int, float]) -> bool:
        """Return whether the next row begins a new batch.

        Args:
            owned: what ranks own of it.
        """
        whole = sum(owned.values())
        self._largest = max(self._largest, whole)
        limit = max(self._limit, self._largest)
        is_new = not self._owned or any(self._owned[rank] + size > limit for rank, size in owned.items())
        is_new |= self._ranks is not None and self._kept + 2 * whole > 2 * limit
        if is_new:
            self._owned.clear()
            self._largest, self._kept = whole, 0.0
        for rank, size in owned.items():
            self._owned[rank] += size
        self._kept += 0.0 if self._ranks is None else math.ceil(whole / self._ranks)
        return is_new


def batches(rows: Sequence[Mapping[int, float]], limit: float | None = None, ranks: int | None = None) -> list[slice]:
    """Cut rows, in their order, into those that go between segments and owners in one message.

    Args:
        rows: what ranks own of each.
        limit: what one rank may own of a batch, see `Batching`; None is the largest of these rows.
        ranks: how many ranks sum rows that they put together, see `Batching`.
    """
    batching = Batching(max((sum(row.values()) for row in rows), default=0.0) if limit is None else limit, ranks)
    starts = [number for number, row in enumerate(rows) if batching.begins(row)]
    return [slice(*ends) for ends in itertools.pairwise([*starts, len(rows)])]


def shares(owned: Sequence[int]) -> dict[int, float]:
    """Return what each rank owns, those left out that own nothing."""
    return {rank: size for rank, size in enumerate(owned) if size}


def splits(sizes: Sequence[int]) -> list[slice]:
    """Return where parts of these sizes lie one after the other."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def filled_up(row: Tensor, elements: int) -> Tensor:
    """Return a row of so many elements, the last ones zeros: equal segments are what a reduce-scatter takes."""
    return row if len(row) == elements else torch.cat([row, row.new_zeros(elements - len(row))])


def by_row(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return, row by row, what came of several rows in one message, put together of what each rank has sent.

    Args:
        received: what came of every rank, one after the other: its parts of all rows in their order, `[elements]`.
        sizes: elements of each row from each rank.

    Returns:
        Of each row the parts of all ranks, in their order; where there is one row it is `received`.
    """
    if len(sizes) == 1:
        return [received]
    places = splits([size for of_rank in zip(*sizes, strict=True) for size in of_rank])
    rows = ([received[place] for place in places[number :: len(sizes)]] for number in range(len(sizes)))
    return [torch.cat(parts) for parts in rows]


def to_owners(layouts: Sequence[Segments], rank: int, segments: list[Tensor]) -> Tensor:
    """Return the segments that a rank has of several rows as they go to owners: by owners, of each row after row.

    Args:
        layouts: the layouts of the rows.
        rank: the rank whose segments these are.
        segments: one of each row; taken out of the list as they are copied.
    """
    counts = [layout.for_owners(rank) for layout in layouts]
    if len(layouts) == 1 and len(runs := layouts[0].within(rank)) <= 1:
        return segments.pop() if runs else segments.pop()[:0]
    sent = segments[0].new_empty(sum(map(sum, counts)))
    places = splits([size for of_owner in zip(*counts, strict=True) for size in of_owner])
    for number, layout in enumerate(layouts):
        segment, own = segments.pop(0), places[number :: len(layouts)]
        filled = [place.start for place in own]
        for owner, start, stop in layout.within(rank):
            sent[filled[owner] : filled[owner] + stop - start] = segment[start:stop]
            filled[owner] += stop - start
    return sent
