"""Lines between ranks that train and statistics workers, on which messages travel while both work.

A message is a broadcast of gloo, whatever the ranks train on: its own threads carry it, without a pause of the program
and without a kernel that waits on an accelerator, and a receiver can see whether it has come. Buffers are on the CPU.
A line has one sender, so that messages come in the order in which they were sent. Lines are kept, as process groups
are (see `process_groups`), and serve one optimizer after the other.

[Note: gloo by itself] Lines are no process groups that torch knows. It names a group of some ranks after how many each
of them has, and here one rank is in more of them than its neighbours: the next group that they make together would
then have another name on each, and never be there.
"""

import gc
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.communication.process_groups import world
from kfac_optim.distributed.statistics_workers import Role

_LOOKOUT = timedelta(seconds=1)  # so that an interrupt by the user is noticed


class Line:
    """Carries messages from one rank to some others, of which this is one.

    Args:
        source: the rank that sends.
        targets: the ranks that receive.
        timeout: how long a message may be under way, or be waited for.
    """

    def __init__(self, source: int, targets: Sequence[int], timeout: timedelta) -> None:
        self.source, self.timeout = source, timeout
        self._ranks = sorted({source, *targets})
        name = f"kfac_optim/line/{source}/{'-'.join(map(str, self._ranks))}/{timeout.total_seconds()}"
        self._store = PrefixStore(name, world().get_group_store())
        rank = dist.get_rank()
        try:  # see [Note: gloo by itself]
            self._gloo = ProcessGroupGloo(self._store, self._ranks.index(rank), len(self._ranks), timeout)
        except RuntimeError as error:
            raise CollectiveError(
                f"kfac_optim: rank {rank} came to where ranks that train and statistics workers meet, and not all of "
                f"the ranks {self._ranks} came within {timeout.total_seconds():g} s ({error}). Look for the first "
                "error in the logs of the others, and see that workers call optimizer.serve(...)."
            ) from error

    def post(self, buffer: Tensor) -> dist.Work:
        """Begin to send `buffer`, or to receive into it; neither is to be touched until that is over."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._ranks.index(self.source), 0
        work: dist.Work = self._gloo.broadcast([buffer], options)  # type: ignore[attr-defined]
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a message.

        Raises:
            RuntimeError: it took longer than the time-out, or a rank is gone.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _LOOKOUT))
                return
            except RuntimeError:
                if work.is_completed() or left <= _LOOKOUT:
                    raise

    def tell(self, key: str, words: str) -> None:
        """Leave words where all ranks of the line find them."""
        self._store.set(f"kfac_optim/{key}", words)

    def told(self, key: str) -> str:
        """Return what a rank has left."""
        words: bytes = self._store.get(f"kfac_optim/{key}")
        return words.decode()


class Lines:
    """Holds the lines of one division of the ranks.

    Args:
        role: the role of this rank.
        timeout: how long a message may be under way, or be waited for.

    Attributes:
        orders: the line from the first rank that trains to the workers; None on other ranks that train.
        answers: the line from the first worker to the ranks that train; None on other workers.
        lost: whether a message has failed, so that the next ones would be taken for others.
    """

    def __init__(self, role: Role, timeout: timedelta) -> None:
        first, leader = role.trainers[0], role.workers[0]
        rank = dist.get_rank()
        self.orders = Line(first, role.workers, timeout) if rank == first or role.serves else None
        self.answers = Line(leader, role.trainers, timeout) if rank == leader or not role.serves else None
        self.lost = False
        self._holder: weakref.ref[object] | None = None

    def lend(self, holder: object) -> None:
        """Lend the lines to one holder, until it gives them back or is gone.

        Raises:
            CollectiveError: they are lost.
            RuntimeError: another holds them.
        """
        if self.lost:
            raise CollectiveError(
                "kfac_optim: ranks that train and statistics workers have lost each other, as an earlier error said. "
                "Start all ranks again from the last checkpoint."
            )
        if self._holder is not None and self._holder() is not None:
            gc.collect()
        if self._holder is not None and self._holder() is not None:
            raise RuntimeError(
                "kfac_optim: another optimizer still is served by the statistics workers, which serve one at a time. "
                "Call dismiss_workers() on it first."
            )
        self._holder = weakref.ref(holder)

    def give_back(self) -> None:
        """Let another have the lines."""
        self._holder = None


def lines_of(role: Role, timeout: timedelta, holder: object) -> Lines:
    """Lend the lines of this division of the ranks; the first time that is a collective of all ranks.

    Raises:
        CollectiveError: some rank never came, or the lines are lost.
        RuntimeError: another optimizer holds them.
    """
    known = _LINES.setdefault(world(), {})
    key = len(role.workers), timeout
    if key not in known:
        known[key] = Lines(role, timeout)
    known[key].lend(holder)
    return known[key]


_LINES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Lines]] = weakref.WeakKeyDictionary()
