"""Buckets that are launched one after the other, as they are laid out once for many steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.launches import InFlight
from kfac_optim.distributed.communication.layouts import Contributions, Merged, ReduceBucket
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.communication.segments import batches, shares

B = TypeVar("B", ReduceBucket, ShareBucket)
T = TypeVar("T")


class LaidOut(NamedTuple, Generic[B]):
    """Holds buckets, and where those lie that go by segments in one batch."""

    buckets: tuple[B, ...]
    batches: list[slice]

    @classmethod
    def of(cls, buckets: tuple[B, ...], limit: float | None = None, ranks: int | None = None) -> "LaidOut[B]":
        """Cut buckets into `batches`, see [Note: the way by segments]; where they go directly there are none."""
        segmented = any(bucket.segmented for bucket in buckets)
        owned = [shares(bucket.owned_elements) for bucket in buckets]
        return cls(buckets, batches(owned, limit, ranks) if segmented else [])


def sums(
    communicator: Communicator, laid_out: LaidOut[ReduceBucket], give: Callable[[ReduceBucket], Contributions]
) -> Iterator[dict[str, Merged]]:
    """Sum buckets in their order, and give what this rank owns of each; a collective.

    Args:
        communicator: the communicator for the main line of the program.
        laid_out: the same on all ranks.
        give: gives what this rank has of a bucket.
    """
    if not laid_out.batches:
        yield from _waited([communicator.reduce(bucket, give(bucket)) for bucket in laid_out.buckets])
    for batch in laid_out.batches:
        together = laid_out.buckets[batch]
        segments = [communicator.reduce_to_segments(bucket, give(bucket)).wait() for bucket in together]
        yield from communicator.deliver(together, segments)


def shared(
    communicator: Communicator,
    laid_out: LaidOut[ShareBucket],
    give: Callable[[ShareBucket], Mapping[str, Tensor]],
    *,
    at_once: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Send buckets in their order, and give what came of each; a collective.

    Args:
        communicator: the communicator for the main line of the program.
        laid_out: the same on all ranks.
        give: gives the parcels of a bucket whose source this rank is.
        at_once: whether buckets that go directly are under way together, or one after another.
    """
    if laid_out.batches:
        for batch in laid_out.batches:
            yield from communicator.spread(laid_out.buckets[batch], give)
    elif at_once:
        yield from _waited([communicator.share(bucket, give(bucket)) for bucket in laid_out.buckets])
    else:
        yield from (communicator.share(bucket, give(bucket)).wait() for bucket in laid_out.buckets)


def _waited(flights: list[InFlight[T]]) -> Iterator[T]:
    """Wait for each, and hold it no longer."""
    while flights:
        yield flights.pop(0).wait()
