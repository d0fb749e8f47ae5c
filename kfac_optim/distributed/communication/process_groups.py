"""Process groups of our own, beside those that the training loop launches on.

[Note: groups are kept] Our groups are made once for each group that trains, shared by all optimizers that train on it,
one after the other or at the same time, and never given back: they end with the world, by the program's own
`torch.distributed.destroy_process_group()`. Giving them back would need an agreement of all ranks on when, and each
rank lets go of its optimizers when its garbage collector comes by. Making new ones is no way either: torch 2.13 names
a group after its ranks and the number of groups there are, so that the new one would find the addresses of the old one
in the store, and wait for it.

All ranks come to a step in the same order, and what an optimizer launches within a step goes through one group for all
optimizers. What is launched in backward comes in an order that is each rank's own, as soon as a backward goes through
the models of two optimizers: so each optimizer has a group to itself for that, on loan.
"""

import gc
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from kfac_optim.distributed.communication.launches import CollectiveError, listed_ranks
from kfac_optim.distributed.communication.message import Message

Observer = Callable[[Message], None]


class GroupLoan:
    """Lends a process group to one holder, until it is given back, or nobody holds the loan any more.

    Attributes:
        group: the process group.
    """

    __slots__ = ("__weakref__", "_lent", "group")

    def __init__(self, lent: "_LentGroup") -> None:
        self._lent = lent
        self.group = lent.group

    def give_back(self) -> None:
        """Give the group back; the holder launches nothing on it any more."""
        self._lent.loan = None

    def counting(self, observe: Observer | None) -> Observer:
        """Return `observe` as the communicator of the group is to be given it, which must report every launch."""

        def count(message: Message) -> None:
            self._lent.launched += 1
            if observe is not None:
                observe(message)

        return count


class _LentGroup:
    """Holds a group that is lent, with the number of collectives that this rank has launched on it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.launched = 0
        self.loan: weakref.ref[GroupLoan] | None = None

    def is_lent(self) -> bool:
        return self.loan is not None and self.loan() is not None


class OwnGroups:
    """Holds the groups of all optimizers that train on the same ranks with the same time-out; see `own_groups`.

    Attributes:
        main: the group for collectives that all ranks launch at the same place in the program.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout: timedelta) -> None:
        self._ranks = list(ranks)
        self._backend = backend
        self._timeout = timeout
        self._lent: list[_LentGroup] = []
        self.main = self._make(timeout)

    def borrow(self, largest: Callable[[Sequence[int]], Sequence[int]]) -> GroupLoan:
        """Lend a group for collectives that are launched in backward; a collective, as all ranks take the same one.

        A collective on it that is launched in backward may wait for ranks that are longer on their way to the step, and
        then for as long as one that is launched in the step: so its own time-out is twice as long.

        Args:
            largest: gives, of each number, the largest on any rank; a collective.
        """
        chosen = self._free(largest)
        if chosen is None and self._lent:
            gc.collect()  # garbage may hold loans, and groups cost threads and open files
            chosen = self._free(largest)
        if chosen is None:
            chosen = _LentGroup(self._make(2 * self._timeout))
            self._lent.append(chosen)
        loan = GroupLoan(chosen)
        chosen.loan = weakref.ref(loan)
        return loan

    def _free(self, largest: Callable[[Sequence[int]], Sequence[int]]) -> _LentGroup | None:
        """Return the first group that no rank has lent, the same on all ranks."""
        numbers = [number for each in self._lent for number in (each.is_lent(), each.launched, -each.launched)]
        found = largest(numbers) if numbers else ()
        # Where one rank has launched what another never will, as a backward whose step never came may leave behind,
        # the next collectives would be matched with that.
        free = (
            each
            for each, lent, most, least in zip(self._lent, found[::3], found[1::3], found[2::3], strict=True)
            if not lent and most == -least
        )
        return next(free, None)

    def _make(self, timeout: timedelta) -> dist.ProcessGroup:
        backend = None if self._backend == dist.get_backend_config() else self._backend
        ranks, key = self._ranks, self._key()
        try:
            if ranks == list(range(dist.get_world_size())):
                with suppress(RuntimeError):  # torch's store of a faked group holds nothing
                    world().get_group_store().set(f"{key}/{dist.get_rank()}", "")
                made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
            else:
                self._count_alike(key, timeout)
                made = dist.new_group(
                    ranks, backend=backend, timeout=timeout, use_local_synchronization=True, sort_ranks=False
                )
        except RuntimeError as error:
            absent = self._absent(key)
            self._take_back(key)
            raise CollectiveError(
                f"kfac_optim: rank {dist.get_rank()} came to a step for which a process group of the ranks {ranks} is "
                f"made, and {absent} did not come within {timeout.total_seconds():g} s ({error}). Look for "
                "the first error in the logs of the other ranks, and see that all ranks step the same optimizers in "
                "the same order, with the same time-outs."
            ) from error
        return made

    def _absent(self, key: str) -> str:
        """Name the ranks that did not come, as far as the store knows."""
        store = world().get_group_store()
        with suppress(RuntimeError):  # it is gone too
            if absent := [rank for rank in self._ranks if not store.check([f"{key}/{rank}"])]:
                return listed_ranks(absent)
        return "some of them"

    def _take_back(self, key: str) -> None:
        """Forget that this rank has come: ranks that did not come have not counted this group, and meet it later."""
        _MADE[world()]["-".join(map(str, self._ranks))] -= 1
        with suppress(RuntimeError):
            world().get_group_store().delete_key(f"{key}/{dist.get_rank()}")

    def _key(self) -> str:
        """Return under which key of the store ranks say that they have come to make the next group of these ranks."""
        made = _MADE.setdefault(world(), Counter())
        ranks = "-".join(map(str, self._ranks))
        made[ranks] += 1
        digest = hashlib.sha256(ranks.encode()).hexdigest()[:16]  # there may be thousands
        return f"kfac_optim/group {made[ranks]} of {digest}"

    def _count_alike(self, key: str, timeout: timedelta) -> None:
        """Wait for all ranks, and be in as many groups as the rank that is in most.

        torch 2.13 names a group of some ranks after the number of groups that a rank is in: where one is in more groups
        of the user's than another, they would wait for each other under different names. So the others make groups of
        one rank, which ask nobody.
        """
        store, rank, names = world().get_group_store(), dist.get_rank(), dist.distributed_c10d._world.pg_names
        everyone = [f"{key}/{each}" for each in self._ranks]
        store.set(f"{key}/{rank}", str(len(names)))
        store.wait(everyone, timeout)
        most = max(map(int, store.multi_get(everyone)))
        while len(names) < most:
            dist.new_group([rank], backend=self._backend, use_local_synchronization=True)


def own_groups(parent: dist.ProcessGroup, timeout: timedelta) -> OwnGroups:
    """Return groups of the same ranks, in the same order, for this package alone; see [Note: groups are kept].

    Where there are none yet this is a collective, so it comes at a place in the program that all ranks reach.

    Args:
        parent: the group that trains.
        timeout: the time-out of collectives.

    Raises:
        CollectiveError: some rank never came; it is named.
    """
    of_world = _GROUPS.setdefault(world(), {})
    key = (*ranks_of(parent), dist.get_backend_config(parent), timeout)
    if key not in of_world:
        of_world[key] = OwnGroups(ranks_of(parent), dist.get_backend_config(parent), timeout)
    return of_world[key]


# How many groups of the same ranks were made, and all groups, by their world: a world that is formed again has none.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, OwnGroups]] = weakref.WeakKeyDictionary()


def world() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "an optimizer of several processes was built, or asked for a group"
    return group


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a group, in its order.

    Raises:
        RuntimeError: the group was destroyed.
    """
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise RuntimeError(
            "kfac_optim: the process group on which this model trains was destroyed. Call remove_hooks() on the "
            "optimizer that was built on it, wrap the model again, or name a current group by "
            "DistributedConfig(group=...), and build another optimizer."
        ) from None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which tensors can be sent."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or "gloo" in dist.get_backend(group) else accelerator


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of tensors on `device` may take: torch's default if the backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return found
