"""What is sent together: fixed parts of fixed size, in an order that all ranks share."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from kfac_optim.distributed.communication.message import Collective
from kfac_optim.distributed.communication.segments import batches
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.strategies import Exchange


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
    """Holds items that are sent together, in this order.

    Attributes:
        payload: what it holds.
        items: the items, in order; never cut.
        itemsize: bytes of a word.
        members: ranks of the group.
        collective: how it is sent: a reduce-scatter is followed by an all-to-all to owners, and an all-gather follows
            one from owners, as [Note: the way by segments] has it; an all-to-all alone goes directly.
        seconds: the seconds that this is predicted to take, as far as backward may hide it.
        later: seconds of what follows where backward has ended.
    """

    payload: Payload
    items: tuple[Item, ...]
    itemsize: int
    members: range
    collective: Collective
    seconds: float
    later: float = 0.0

    @property
    def segmented(self) -> bool:
        """Return whether it goes by segments."""
        return self.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)

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


_TO_OWNERS = (Payload.GRADIENTS, Payload.ROWS, Payload.SUMS)


def make_buckets(
    payload: Payload,
    items: Sequence[Item],
    *,
    limit: int,
    itemsize: int,
    members: range,
    cost: CostModel,
    exchange: Exchange | None = Exchange.DIRECT,
    largest: int = 0,
) -> tuple[PlannedBucket, ...]:
    """Return buckets of at most `limit` words, and how each is sent.

    Args:
        payload: what they hold.
        items: what is sent, in order.
        limit: words.
        itemsize: bytes of a word.
        members: ranks of the group.
        cost: the cost model, for collectives.
        exchange: the way between all ranks and owners; None is the one that is quicker for the slowest rank.
        largest: bytes of the largest bucket of other payloads, for sums.
    """
    filled = fill(items, limit)
    shares = [_shares(together, itemsize) for together in filled]
    ranks, cost = len(members), cost.among(members)
    if all(set(share) == {-1} for share in shares):
        ways = [(Collective.ALL_REDUCE, cost.communicating(Collective.ALL_REDUCE, s[-1], ranks), 0.0) for s in shares]
    else:
        cut = batches(shares)
        if payload is Payload.SUMS:  # which are made in float32 at least
            most = largest * itemsize / max(itemsize, torch.float32.itemsize)
            cut = batches(shares, max(most, *(sum(share.values()) for share in shares)), ranks)
        exchange = exchange or _quicker(shares, cut, ranks, cost)
        if exchange is Exchange.DIRECT:
            ways = [(Collective.ALL_TO_ALL, _direct(share, ranks, cost), 0.0) for share in shares]
        else:
            even = [cost.communicating(Collective.ALL_GATHER, sum(share.values()), ranks) for share in shares]
            pairs = list(zip(even, _between(shares, cut, ranks, cost), strict=True))
            scatter, gather = Collective.REDUCE_SCATTER, Collective.ALL_GATHER
            kind = scatter if payload in _TO_OWNERS else gather
            late = payload is Payload.SUMS  # the second message of gradients goes while backward goes on
            ways = [(kind, one, other) if late else (kind, one + other, 0.0) for one, other in pairs]
    return tuple(
        PlannedBucket(payload, together, itemsize, members, *way) for together, way in zip(filled, ways, strict=True)
    )


def _shares(items: Iterable[Item], itemsize: int) -> Mapping[int, float]:
    """Return the bytes of each owner."""
    return _together({item.rank: item.words * itemsize} for item in items)


def _together(shares: Iterable[Mapping[int, float]]) -> Mapping[int, float]:
    """Add up the bytes of each owner."""
    together: defaultdict[int, float] = defaultdict(float)
    for share in shares:
        for rank, size in share.items():
            together[rank] += size
    return together


def _direct(shares: Mapping[int, float], ranks: int, cost: CostModel) -> float:
    """Return the seconds of one all-to-all, which takes as long as the largest share."""
    whole, largest = sum(shares.values()), max(shares.values())
    return cost.communicating(Collective.ALL_TO_ALL, ranks * largest, ranks, mean=max(whole, largest))


def _between(shares: Sequence[Mapping[int, float]], cut: Sequence[slice], ranks: int, cost: CostModel) -> list[float]:
    """Return the seconds of each bucket's all-to-all between segments and owners, a part of that of its batch."""
    found: list[float] = []
    for batch in cut:
        together = _together(shares[batch])
        whole = sum(together.values())
        mean = whole / ranks
        seconds = cost.communicating(Collective.ALL_TO_ALL, max(mean, *together.values()), ranks, mean=mean)
        found += [seconds * sum(share.values()) / whole for share in shares[batch]]
    return found


def _quicker(shares: Sequence[Mapping[int, float]], cut: Sequence[slice], ranks: int, cost: CostModel) -> Exchange:
    """Return the way that is quicker for the slowest rank: all that passes its link, and every bucket's latency."""
    latency = cost.communicating(Collective.ALL_TO_ALL, 0.0, ranks)
    direct = _direct(_together(shares), ranks, cost) + (len(shares) - 1) * latency
    even = sum(cost.communicating(Collective.ALL_GATHER, sum(share.values()), ranks) for share in shares)
    segmented = even + sum(_between(shares, cut, ranks, cost))
    return Exchange.SEGMENTS if segmented < direct else Exchange.DIRECT
