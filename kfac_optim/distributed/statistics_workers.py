"""Statistics workers: the user's choice of ranks that measure and refresh for those that train."""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from kfac_optim.distributed.communication.process_groups import OwnGroups, device_of, timeout_of, world
from kfac_optim.utils.validation import check_flag, check_integer


class Role(NamedTuple):
    """Says what this rank does. Ranks are those of the world."""

    serves: bool
    """Whether it is a statistics worker; the others train."""
    group: dist.ProcessGroup
    """The ranks that do the same: those that train wrap the model by `DistributedDataParallel` on it."""
    trainers: tuple[int, ...]
    """The ranks that train: the first of all."""
    workers: tuple[int, ...]
    """The statistics workers: the last of all."""


@dataclass(frozen=True)
class StatisticsWorkers:
    """Has the last ranks measure and refresh, while the others train and never do either (Ba, Grosse & Martens 2017).

    The ranks that train send their parameters every `factor_update_period` steps. A worker takes a mini-batch of its
    own, whose statistics go into the running averages; where a refresh is due it inverts, and sends the inverses. One
    such round is under way at a time: where the next is due before that, it begins as soon as the first has come back.
    The ranks that train take inverses over between two steps, all of them at the same step. So `factor_update_period=1`
    keeps workers at work without a pause. Several workers share statistics and refreshes as ranks that train do.

        workers = StatisticsWorkers(ranks=1, max_staleness=20)
        role = workers.role()
        if not role.serves:
            model = DistributedDataParallel(model, process_group=role.group)
        optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, distributed=DistributedConfig(workers=workers))
        if role.serves:
            optimizer.serve(batches, lambda batch: criterion(model(batch[0]), batch[1]))
        else:
            ...  # the training loop
            optimizer.dismiss_workers()

    The first inverses are waited for, as nothing can be preconditioned before; so is a round that has taken
    `max_staleness` steps. A worker that is gone, or slower than the time-out, is an error that names its rank, on all
    ranks that train. A worker raises as well if no order has come for that long. So the time-out is to be longer than
    the longest pause of the training, such as an evaluation.

    Args:
        ranks: how many workers there are, at least 1.
        max_staleness: the steps after which a round is waited for if it is not back; 0 waits at once. An inverse is
            made of parameters that are at most so many steps old when it is taken over.
        deterministic: whether every round is taken over after exactly `max_staleness` steps, so that a run does not
            depend on how fast the machines are; otherwise it is at the first step that finds it on all ranks.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number is out of range.
    """

    ranks: int = 1
    max_staleness: int = 10
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_integer("ranks of StatisticsWorkers", self.ranks)
        check_integer("max_staleness of StatisticsWorkers", self.max_staleness, at_least=0)
        check_flag("deterministic of StatisticsWorkers", self.deterministic, optional=False)

    def role(self) -> Role:
        """Return what this rank does; the first time it is a collective of all ranks, which makes the groups.

        Raises:
            RuntimeError: there is no process group.
            ValueError: no rank is left to train.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"kfac_optim: {self} needs several processes, and there is no process group. Call "
                "kfac_optim.distributed.initialize(), under torchrun, before."
            )
        total = dist.get_world_size()
        if self.ranks >= total:
            raise ValueError(
                f"kfac_optim: {self} leaves none of {total} ranks to train. Start at least {self.ranks + 1} processes, "
                "or have fewer workers."
            )
        known = _ROLES.setdefault(world(), {})
        if self.ranks not in known:
            ranks = tuple(range(total))
            trainers, workers = ranks[: -self.ranks], ranks[-self.ranks :]
            serves = dist.get_rank() in workers
            mine = workers if serves else trainers
            timeout = timeout_of(world(), device_of(world()))
            group = OwnGroups(mine, dist.get_backend_config(), timeout).main
            known[self.ranks] = Role(serves, group, trainers, workers)
        return known[self.ranks]


# By their world: a world that is formed again has none. Groups are kept, see `process_groups`.
_ROLES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Role]] = weakref.WeakKeyDictionary()
