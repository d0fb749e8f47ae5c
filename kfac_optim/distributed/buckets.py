"""What is sent together: fixed parts of fixed size, in an order that all ranks share."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kfac_optim.distributed.costs import Collective, CostModel


class Payload(Enum):
    """What a bucket holds. Each kind has buckets of its own."""

    GRADIENTS = "gradients"
    """To all ranks, or to those that update (`Sharded`)."""
    SUMS = "factor sums"
    """Moments since the last refresh as triangles, each with its mass, to those that refresh."""
    INVERSES = "inverses"
    """From those that refresh to those that precondition."""
    PRECONDITIONED = "preconditioned gradients"
    """From those that precondition to the others."""
    PARAMETERS = "parameters"
    """From those that update to the others."""


class Item(NamedTuple):
    """Numbers that lie in a row: a gradient, or all that one part of a block sends."""

    name: str
    words: int
    rank: int
    """Where it goes to or comes from; -1 where all ranks are alike."""
    position: int
    """Of its layer in the model, in forward order."""


class Segment(NamedTuple):
    """Consecutive words of an item."""

    name: str
    start: int
    words: int
    rank: int
    position: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments that one collective, or one for each rank that is a root, takes in this order.

    Attributes:
        payload: what it holds.
        segments: in order.
        itemsize: bytes of a word.
        members: ranks of the group.
        collective: how it is sent.
        seconds: that this is predicted to take.
    """

    payload: Payload
    segments: tuple[Segment, ...]
    itemsize: int
    members: range
    collective: Collective
    seconds: float

    @property
    def words(self) -> int:
        return sum(segment.words for segment in self.segments)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.words * self.itemsize


def fill(items: Iterable[Item], limit: int) -> list[tuple[Segment, ...]]:
    """Items in their order, in buckets of at most `limit` words.

    An item that fits into a bucket is never cut; what is larger fills whole buckets, and the last shares its own.
    """
    full: list[tuple[Segment, ...]] = []
    open_: list[Segment] = []
    used = 0
    for name, words, rank, position in items:
        start = 0
        while start < words:
            if open_ and used + (words - start) > limit:
                full.append(tuple(open_))
                open_, used = [], 0
            taken = min(limit, words - start)
            open_.append(Segment(name, start, taken, rank, position))
            start, used = start + taken, used + taken
    return [*full, tuple(open_)] if open_ else full


def make_buckets(
    payload: Payload, items: Sequence[Item], *, limit: int, itemsize: int, members: range, cost: CostModel
) -> tuple[Bucket, ...]:
    """Buckets of at most `limit` bytes, with the collective that the cost model finds quickest for each."""
    return tuple(
        Bucket(payload, segments, itemsize, members, *_transport(payload, segments, itemsize, len(members), cost))
        for segments in fill(items, max(limit // itemsize, 1))
    )


def _transport(
    payload: Payload, segments: Sequence[Segment], itemsize: int, ranks: int, cost: CostModel
) -> tuple[Collective, float]:
    shares: defaultdict[int, float] = defaultdict(float)
    for segment in segments:
        shares[segment.rank] += segment.words * itemsize
    if set(shares) == {-1}:
        return cost.all_reducing(shares[-1], ranks)
    to_owners = payload in (Payload.GRADIENTS, Payload.SUMS)
    return cost.rooted(Collective.REDUCE if to_owners else Collective.BROADCAST, shares.values(), ranks)
