"""One collective as one rank takes part in it: what plans are made of, and what a communicator hands to torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction


class Collective(Enum):
    """Names an operation of a whole process group."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True)
class Message:
    """Says what one rank sends and receives in one collective.

    Attributes:
        name: the name of the bucket, for traces.
        collective: the operation.
        rank: the rank that takes part.
        to: elements for each rank; what is for itself may be in it, and does not count.
        from_: elements from each rank, likewise.
        itemsize: bytes of an element.
    """

    name: str
    collective: Collective
    rank: int
    to: tuple[int, ...]
    from_: tuple[int, ...]
    itemsize: int

    @property
    def sent_bytes(self) -> float:
        """Return what the rank sends to others; an all-reduce sends `2(P - 1)/P` of its size, as a ring does."""
        return self._crossing(self.to)

    @property
    def received_bytes(self) -> float:
        """Return what the rank receives from others."""
        return self._crossing(self.from_)

    def _crossing(self, elements: Sequence[int]) -> float:
        if self.collective is Collective.ALL_REDUCE:
            # The elements are those of the ring's equal segments, together.
            return float(Fraction(2 * (len(elements) - 1) * elements[0] * self.itemsize, len(elements)))
        return (sum(elements) - elements[self.rank]) * self.itemsize


def all_reduction(name: str, rank: int, ranks: int, elements: int, itemsize: int) -> Message:
    """Return the message of an all-reduce of so many elements."""
    everyone = (elements,) * ranks
    return Message(name, Collective.ALL_REDUCE, rank, everyone, everyone, itemsize)


def together(messages: Sequence[Message]) -> Message:
    """Return one message in the place of several of the same kind, which lies by ranks, and then in their order."""
    first, last = messages[0], messages[-1]
    return replace(
        first,
        name=first.name if first is last else f"{first.name} to {last.name}",
        to=tuple(map(sum, zip(*(each.to for each in messages), strict=True))),
        from_=tuple(map(sum, zip(*(each.from_ for each in messages), strict=True))),
    )
