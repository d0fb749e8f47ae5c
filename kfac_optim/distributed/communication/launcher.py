"""Launches collectives of one process group, waits for them, and says what was under way where one fails."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.launches import CollectiveError, Event, InFlight, listed_ranks
from kfac_optim.distributed.communication.loans import Loan
from kfac_optim.distributed.communication.message import Collective, Message, all_reduction
from kfac_optim.utils.text import listed

# How often a rank that waits looks whether another has given up: gloo tells only those that were to hear from a rank
# that is gone, not those that wait for them in turn.
_LOOKOUT = timedelta(seconds=1)

# How long a rank that gives up waits for all others that wait to do so too.
_ROLL_CALL = timedelta(seconds=3)

# Key in the store of a process group.
_GIVEN_UP = "kfac_optim/given-up"


def has_reduce_scatter(device: torch.device) -> bool:
    """Return whether a reduce-scatter saves anything there; see [Note: one form for each device].

    What is on paper alone (meta) is taken to be on the CPU.
    """
    return device.type not in ("cpu", "meta")


def begin(
    group: dist.ProcessGroup,
    message: Message,
    sent: Tensor,
    received: Tensor,
    observe: Callable[[Message], None] | None,
) -> dist.Work:
    """Launch an all-to-all, and leave it to the caller to wait for its end, by the future of what is returned.

    Args:
        group: the group that `message` belongs to.
        message: the message, as this rank sees it.
        sent: what this rank sends; lent until the end.
        received: what takes the answers; lent until the end.
        observe: is told of the message; None where nobody needs to know.
    """
    to, from_ = list(message.to), list(message.from_)
    work: dist.Work | None = dist.all_to_all_single(received, sent, from_, to, group=group, async_op=True)
    assert work is not None, "only a rank outside of the group gets none"
    if observe is not None:
        observe(message)
    return work


class Launcher:
    """Launches messages of one process group.

    [Note: one order] All ranks must call its methods in the same order. A `Reducer` does so whatever its hooks do, if
    nothing else is launched between the first report of a round and its end; what has to be then goes through another
    communicator.

    Args:
        group: a process group of our own, see `process_groups`.
        device: the device that all tensors lie on.
        timeout: how long an event waits on the CPU; on accelerators that of the group counts.
        observe: is called with every message that was launched, for traces.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        observe: Callable[[Message], None] | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self.timeout = timeout
        self._names = dist.get_process_group_ranks(group)  # the world's, by which the user knows ranks
        self._observe = observe

    def all_reduce(
        self,
        name: str,
        values: Tensor,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        layers: Sequence[str] = (),
    ) -> InFlight[Tensor]:
        """Reduce a few numbers to all ranks, the same bits on each.

        Args:
            name: a name for error messages and traces.
            values: the numbers, of one shape and dtype on all ranks; left as they are.
            operation: `SUM`, `MAX`, …
            layers: the layers that the numbers are about, for error messages.
        """
        result = values.detach().clone(memory_format=torch.contiguous_format)
        message = all_reduction(name, self.rank, self.world_size, result.numel(), result.itemsize)
        event = self._launch(
            message,
            layers,
            lambda loan: dist.all_reduce(loan.lend(result), op=operation, group=self.group, async_op=True),
        )
        return InFlight(result, event)

    def exchange(
        self,
        message: Message,
        names: Sequence[str],
        sent: Tensor,
        received: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Event:
        """Launch a message that is no all-reduce.

        Args:
            message: the message of this rank; a reduce-scatter is summed by the caller, as an all-to-all of the parts.
            names: the names of layers, for error messages.
            sent: what `message.to` counts, `[sum(message.to)]`; of an all-gather this rank's part.
            received: what `message.from_` counts, to be written to.
            finish: is called when all has come.
        """
        if message.collective is Collective.ALL_GATHER:
            return self._launch(
                message,
                names,
                lambda loan: self._gather(message, loan, sent, received),
                finish,
            )
        to, from_ = list(message.to), list(message.from_)
        return self._launch(
            message,
            names,
            lambda loan: dist.all_to_all_single(
                loan.lend(received), loan.lend(sent), from_, to, group=self.group, async_op=True
            ),
            finish,
        )

    def begin(self, message: Message, sent: Tensor, received: Tensor) -> dist.Work:
        """Launch an all-to-all whose end is seen to by who calls; see `begin`."""
        return begin(self.group, message, sent, received, self._observe)

    def scatter(
        self,
        message: Message,
        names: Sequence[str],
        given: Tensor,
        total: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Event:
        """Launch a reduce-scatter of equal parts."""
        return self._launch(
            message,
            names,
            lambda loan: dist.reduce_scatter_single(
                loan.lend(total), loan.lend(given), group=self.group, async_op=True
            ),
            finish,
        )

    def _gather(self, message: Message, loan: Loan, sent: Tensor, received: Tensor) -> dist.Work | None:
        """Launch an all-gather."""
        work: dist.Work | None
        if self.device.type == "cpu":
            # Of one tensor to write to, gloo would make views of its own, and keep those.
            parts = [loan.lend(part) for part in torch.split(received, list(message.from_))]
            work = dist.all_gather(parts, loan.lend(sent), group=self.group, async_op=True)
        else:
            work = dist.all_gather_single(received, sent, group=self.group, async_op=True)
        return work

    def _launch(
        self,
        message: Message,
        names: Sequence[str],
        launch: Callable[[Loan], dist.Work | None],
        finish: Callable[[], None] | None = None,
    ) -> Event:
        """Launch what is lent its tensors, and make the event that waits for the end, and then finishes."""
        loan = Loan()
        with self._blaming(message.name, names):
            work = launch(loan)
        assert work is not None, "only a rank outside of the group gets none"
        if self._observe is not None:
            self._observe(message)

        under_way = [work]

        def wait() -> None:
            with self._blaming(message.name, names):
                if self.device.type == "cpu":
                    self._wait_on_host(under_way[0])
                else:
                    under_way[0].wait()  # makes the stream wait; with a time-out it would be the host
            under_way.clear()
            loan.end()  # and with it what was sent is gone, before more is made of what came
            if finish is not None:
                finish()

        return Event(wait, lambda: not under_way or under_way[0].is_completed())

    def _wait_on_host(self, work: dist.Work) -> None:
        """Wait until it is done, the time is out, or another rank has given up."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _LOOKOUT))
                return
            except RuntimeError as error:
                if work.is_completed():
                    work.wait()  # it may have come just after the look-out had ended; otherwise it raises as it failed
                    return
                if left <= _LOOKOUT:
                    raise
                if self.group.get_group_store().check([_GIVEN_UP]):
                    raise RuntimeError("another rank gave up") from error

    @contextmanager
    def _blaming(self, bucket: str, names: Sequence[str]) -> Iterator[None]:
        """Turn an error of `torch.distributed` into one that says what was under way, and which ranks are missing."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - start
            layers = f" (layers {listed(names)})" if names else ""
            among = f" of {self.world_size}"
            if self._names != list(range(self.world_size)):
                among = f" (of {listed_ranks(self._names)})"
            raise CollectiveError(
                f"kfac_optim: on rank {self._names[self.rank]}{among} the collective of {bucket!r}{layers} failed "
                f"after {seconds:.1f} s (time-out {self.timeout.total_seconds():g} s): {error}. "
                f"{self._call_the_roll()} Look for the first error in the logs of the other ranks; where one was only "
                f"slow, raise the time-out. To go on, start all ranks again from the last checkpoint."
            ) from error

    def give_up(self, words: str = "") -> None:
        """Have other ranks that wait for this one give up too; the first words that a rank leaves are told."""
        store = self.group.get_group_store()
        store.set(f"{_GIVEN_UP}/{self.rank}", "")
        store.compare_set(_GIVEN_UP, "", words)

    def _call_the_roll(self) -> str:
        """Give up, and say in a sentence which ranks have not done so within three seconds."""
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _ROLL_CALL.total_seconds()
        try:
            store = self.group.get_group_store()
            self.give_up()
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [rank for rank in silent if not store.check([f"{_GIVEN_UP}/{rank}"])]
            words = store.get(_GIVEN_UP).decode().removesuffix(".")
        except RuntimeError as error:
            return f"Which ranks are missing is not known, as the store of the process group is gone too ({error})."
        told = [f"Before that {words}."] if words else []
        if silent:
            absent = listed_ranks([self._names[rank] for rank in silent])
            told.append(f"No word from {absent}: gone, or at another place in the program.")
        return " ".join(told) or "All ranks gave up in a collective."
