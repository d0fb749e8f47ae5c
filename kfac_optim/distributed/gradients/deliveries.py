"""The second of two messages by which gradients of a wrapper's buckets go to their owners while backward goes on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.loans import Loan
from kfac_optim.distributed.communication.message import Message, together
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.communication.segments import Batching, by_row, shares, to_owners
from kfac_optim.distributed.gradients.continuation import continued, continues_at_once


class Segment:
    """Holds a bucket, and the mean of this rank's segment of it as soon as that is there.

    Args:
        row: lays the bucket out.
        buffer: the buffer of the bucket.
        take: is called with the means of what this rank owns of the bucket.

    Attributes:
        mean: the mean of the segment; None until it is there, and again when it was sent.
        done: ends when what this rank owns of the bucket is the mean.
    """

    def __init__(self, row: OwnedRow, buffer: Tensor, take: Callable[[Tensor], None]) -> None:
        self.row = row
        self.take = take
        self.mean: Tensor | None = None
        self._buffer = buffer
        self._error: Exception | None = None
        self._ended: torch.futures.Future[Tensor] = torch.futures.Future(devices=_devices(buffer))
        self.done = self._ended if continues_at_once(buffer.device) else self._ended.then(self._result)

    def finish(self, error: Exception | None = None) -> None:
        """End, well or by an error, which the wrapper then raises; at once where all is done at once."""
        if error is not None and continues_at_once(self._buffer.device):
            raise error  # pragma: cuda
        if not self._ended.done():
            self._error = error
            # A tensor, as on an accelerator the wrapper then waits for the kernels behind it as well.
            self._ended.set_result(self._buffer)

    def _result(self, _: torch.futures.Future[Tensor]) -> Tensor:
        if self._error is not None:
            raise self._error
        return self._buffer


class _Coming(NamedTuple):
    """Holds a segment, and the future that ends when its mean is there."""

    segment: Segment
    arrival: torch.futures.Future[Any]


class Deliveries:
    """Brings segments to their owners, those of several buckets in one message.

    [Note: the second message] By segments a bucket takes two messages, and all ranks must launch all messages of one
    process group in one order. The wrapper has the first ones launched in the order of its buckets, on its group.
    Within backward nothing may wait, where another rank may wait for this one's share of a normalisation; and what is
    called when the first message has ended is called whenever each rank happens to see that. So the second ones go
    through a group of their own, each when the first ones of its batch have ended and the second one before it was
    launched, which is one order on all ranks. What is kept until then is no more than one bucket, see
    [Note: the way by segments].

    Args:
        communicator: a communicator on a group on which nothing else is launched.
        limit: what one rank may own of a batch, see `Batching`.
    """

    def __init__(self, communicator: Communicator, limit: float) -> None:
        self._communicator = communicator
        self._limit = limit
        self._launched: torch.futures.Future[Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a backward; of one that raised nothing is left."""
        self._batching = Batching(self._limit)
        self._filling: list[_Coming] = []

    def next(self, row: OwnedRow) -> None:
        """Take notice that a row is coming: what does not go with it need not wait for more."""
        if self._batching.begins(shares(row.owned_elements)):
            self.close()

    def add(self, segment: Segment, arrival: torch.futures.Future[Any]) -> None:
        """Send a segment on, as soon as it is there."""
        self._filling.append(_Coming(segment, arrival))

    def close(self) -> None:
        """Have no more segments go with those that were added."""
        coming, self._filling = self._filling, []
        if not coming:
            return
        segments = [each.segment for each in coming]
        waited = [each.arrival for each in coming]
        if self._launched is not None:
            waited.append(self._launched)
        device = self._communicator.device
        ready = torch.futures.collect_all(waited)
        self._launched = continued(ready, device, lambda ready: self._launch(segments, ready))

    def _launch(self, segments: list[Segment], ready: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
        """Launch one message; called on all ranks in one order, by whatever thread."""
        try:
            for arrival in ready.wait():
                arrival.wait()
            rank = self._communicator.rank
            rows = [each.row for each in segments]
            messages = [row.messages(rank)[1] for row in rows]
            means = []
            for each in segments:
                assert each.mean is not None, "it has arrived"
                means.append(each.mean)
                each.mean = None
            sent = to_owners([row.segments for row in rows], rank, means)
            message = together(messages)
            received = [sent.new_empty(sum(message.from_))]
            loan = Loan()
            work = self._communicator.begin(message, loan.lend(sent), loan.lend(received[0]))
            del sent, means  # what follows may be called at once
        except Exception as error:
            _fail(segments, error)
            return
        device = self._communicator.device
        continued(work.get_future(), device, lambda ended: _take(segments, messages, received, loan, ended))


def _take(
    segments: list[Segment],
    messages: list[Message],
    received: list[Tensor],
    loan: Loan,
    ended: torch.futures.Future[Any],
) -> None:
    try:
        ended.wait()
        loan.end()
        sections = by_row(received.pop(), [each.from_ for each in messages])
        for each in segments:
            each.take(sections.pop(0))
            each.finish()
    except Exception as error:
        _fail(segments, error)


def _fail(segments: list[Segment], error: Exception) -> None:
    for each in segments:
        each.finish(error)


def _devices(tensor: Tensor) -> list[int | str | torch.device]:
    return [] if tensor.device.index is None else [tensor.device]
