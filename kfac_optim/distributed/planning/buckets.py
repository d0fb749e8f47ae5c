"""What is sent together: fixed parts of fixed size, in an order that all ranks share."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kfac_optim.distributed.planning.costs import Collective, CostModel


class Payload(Enum):
    """Says what a bucket holds. Each kind has buckets of its own."""

    GRADIENTS = "gradients"
    """Gradients go to all ranks, or to the ranks that update (`Sharded`)."""
    SUMS = "factor sums"
    """Moments since the last refresh go to the ranks that refresh, as triangles, each with its mass."""
    INVERSES = "inverses"
    """Inverses go from the ranks that refresh to the ranks that precondition."""
    PRECONDITIONED = "preconditioned gradients"
    """Preconditioned gradients go from the ranks that make them to the others."""
    PARAMETERS = "parameters"
    """Parameters go from the ranks that update them to the others."""
    ROWS = "rows of gradients"
    """Rows of gradients go from the ranks that hold them to the ranks that precondition (`FullySharded`)."""
    DIRECTIONS = "rows of directions"
    """Rows of directions go back to the ranks that hold the parameters."""
    VOTES = "votes"
    """Control, to all: what ranks must agree on in each step."""
    SCALARS = "scalars"
    """Control, to all: sums over parameters that bound a step, where ranks have shares of them (not `Replicated`)."""
    TRACES = "traces"
    """Control, to all: what the owners of two parts of a layer need of one another before a refresh."""
    STATUS = "status"
    """Control, to all: how refreshes went."""

    @property
    def is_control(self) -> bool:
        """Return whether the payload goes in small all-reduces, in words of 8 bytes."""
        return self in (Payload.VOTES, Payload.SCALARS, Payload.TRACES, Payload.STATUS)


class Item(NamedTuple):
    """Describes numbers that lie in a row: a gradient, or all that one part of a block sends."""

    name: str
    words: int
    rank: int
    """The rank that it goes to or comes from; -1 if all ranks are alike."""
    position: int
    """The position of its layer in the model, in forward order."""


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Items that one collective, or one for each rank that is a root, takes in this order.

    Attributes:
        payload: what it holds.
        items: in order; never cut.
        itemsize: bytes of a word.
        members: ranks of the group.
        collective: how it is sent.
        seconds: that this is predicted to take.
    """

    payload: Payload
    items: tuple[Item, ...]
    itemsize: int
    members: range
    collective: Collective
    seconds: float

    @property
    def words(self) -> int:
        return sum(item.words for item in self.items)

    @property
    def size(self) -> int:
        """Return the bytes of the bucket."""
        return self.words * self.itemsize


def fill(items: Iterable[Item], limit: int) -> list[tuple[Item, ...]]:
    """Put items, in their order, into buckets of at most `limit` words; a larger item has a bucket of its own.

    Items of no words are left out. Without some of the items there are never more buckets.
    """
    buckets: list[list[Item]] = []
    used = 0
    for item in items:
        if not item.words:
            continue
        if not buckets or used + item.words > limit:
            buckets.append([])
            used = 0
        buckets[-1].append(item)
        used += item.words
    return [tuple(bucket) for bucket in buckets]


def make_buckets(
    payload: Payload, items: Sequence[Item], *, limit: int, itemsize: int, members: range, cost: CostModel
) -> tuple[PlannedBucket, ...]:
    """Return buckets of at most `limit` words, with the collective that the cost model finds quickest for each."""
    return tuple(
        PlannedBucket(
            payload, together, itemsize, members, *_transport(payload, together, itemsize, len(members), cost)
        )
        for together in fill(items, limit)
    )


def _transport(
    payload: Payload, items: Sequence[Item], itemsize: int, ranks: int, cost: CostModel
) -> tuple[Collective, float]:
    shares: defaultdict[int, float] = defaultdict(float)
    for item in items:
        shares[item.rank] += item.words * itemsize
    if set(shares) == {-1}:
        return cost.all_reducing(shares[-1], ranks)
    to_owners = payload in (Payload.GRADIENTS, Payload.ROWS, Payload.SUMS)
    return cost.rooted(Collective.REDUCE if to_owners else Collective.BROADCAST, shares.values(), ranks)
