"""Buckets that are launched one after the other, as they are laid out once for many steps."""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kfac_optim.distributed.communication.launches import InFlight
from kfac_optim.distributed.communication.layouts import ReduceBucket
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.communication.segments import batches

B = TypeVar("B", ReduceBucket, ShareBucket)
T = TypeVar("T")


class LaidOut(NamedTuple, Generic[B]):
    """Holds buckets, and where those lie that go by segments in one batch."""

    buckets: tuple[B, ...]
    batches: list[slice]

    @classmethod
    def of(cls, buckets: tuple[B, ...]) -> "LaidOut[B]":
        """Cut buckets into batches, see [Note: the way by segments]."""
        segmented = any(bucket.segmented for bucket in buckets)
        return cls(buckets, batches([bucket.owned_elements for bucket in buckets]) if segmented else [])


def arrivals(laid_out: LaidOut[B], launch: Callable[[B], InFlight[T]], *, at_once: bool = True) -> Iterator[T]:
    """Launch buckets in their order, and give what came of each; a collective.

    Those that go by segments are never held beyond the size of the largest of them, twice.

    Args:
        laid_out: the same on all ranks.
        launch: launches one.
        at_once: whether buckets that go directly are under way together, or one after another.
    """
    buckets = laid_out.buckets
    if not laid_out.batches:
        if at_once:
            yield from _waited([launch(bucket) for bucket in buckets])
        else:
            yield from (launch(bucket).wait() for bucket in buckets)
        return
    for batch in laid_out.batches:
        flights = []
        for bucket in buckets[batch]:
            flights.append(launch(bucket))
            if isinstance(bucket, ReduceBucket):
                flights[-1].event.settle()
        if isinstance(buckets[0], ReduceBucket):
            for flight in flights:
                flight.event.advance()
        yield from _waited(flights)


def _waited(flights: list[InFlight[T]]) -> Iterator[T]:
    """Wait for each, and hold it no longer."""
    while flights:
        yield flights.pop(0).wait()
