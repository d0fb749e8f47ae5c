"""The ranks that train together, and what is launched on groups of our own with the same ranks."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import largest
from kfac_optim.distributed.communication.process_groups import (
    GroupLoan,
    OwnGroups,
    device_of,
    own_groups,
    ranks_of,
    timeout_of,
    world,
)
from kfac_optim.distributed.config import DistributedConfig


class TrainingGroup:
    """Knows the ranks that train together, and has one or two communicators on them.

    The group is the user's, or that of what wraps the model; if neither names one by the first step, it is the world.

    Args:
        config: the user's choices.

    Attributes:
        rank: the number of this process in the group.
        early: launches sums that are sent during backward; None until some rank knows of a wrapper.
        delivery: launches what brings gradients to owners during backward; None until it is needed.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._group = config.group
        self.rank = dist.get_rank(config.group)
        self._own: OwnGroups | None = None
        self._main: Communicator | None = None
        self._loans: list[GroupLoan] = []
        self.early: Communicator | None = None
        self.delivery: Communicator | None = None

    @property
    def is_known(self) -> bool:
        """Return whether the user, a wrapper or a first step has said which ranks train."""
        return self._group is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that train."""
        return world() if self._group is None else self._group

    @property
    def main(self) -> Communicator:
        """Return the communicator for collectives that all ranks reach at the same place in the program."""
        assert self._main is not None, "no step was begun"
        return self._main

    def train_on(self, group: dist.ProcessGroup, whose: str) -> None:
        """Train on the ranks on which `whose` wraps the model.

        Raises:
            RuntimeError: other ranks are known already.
        """
        wrapped, known = ranks_of(group), ranks_of(self.group)
        if self.is_known and wrapped != known:
            if self._config.group is not None:
                reason = "its DistributedConfig(group=...) names"
                advice = "Leave group out, then it is that of the wrapper; or wrap the model on the same ranks"
            else:
                reason = "its optimizer has begun to train it on"
                advice = "Wrap the model before the first step, always on the same ranks; or build another optimizer"
            raise RuntimeError(
                f"kfac_optim: the model is wrapped by {whose} on the ranks {wrapped}, but {reason} the ranks {known}. "
                f"{advice}."
            )
        self._group, self.rank = group, dist.get_rank(group)

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """Have a communicator for the device of the parameters; the first time this is a collective.

        Raises:
            RuntimeError: the parameters lie on several devices.
            CollectiveError: some rank never came.
        """
        devices = {param.device for param in params}
        if len(devices) > 1:
            raise RuntimeError(
                f"kfac_optim: parameters lie on {', '.join(sorted(map(str, devices)))}; several processes train models "
                "on one device each. Place the model on one, or pass distributed=False."
            )
        # A rank without parameters takes part too: the others learn from its vote that it trains nothing.
        (device,) = devices or {device_of(self.group)}
        if self._own is None:
            self._group = self.group
            timeout = self._config.timeout or timeout_of(self._group, device)
            self._own = own_groups(self._group, timeout)
            self._main = Communicator(self._own.main, device, timeout, self._config.observe)
        for communicator in (self._main, self.early, self.delivery):
            if communicator is not None:
                communicator.device = device  # a model may be moved, and its blocks follow it

    def open_early(self, *, wrapped: bool) -> None:
        """Have a communicator for backward as soon as any rank knows of a wrapper; a collective, until there is one.

        Backward reaches the layers in an order of each rank's own, so that what it launches needs a group to itself.
        """
        if self.early is not None:
            return
        main = self.main
        (found,) = largest(main, [int(wrapped)], "overlap", ())
        if found:
            self.early = self._borrow()

    def open_delivery(self) -> None:
        """Have a communicator for the second messages of gradients in backward; a collective, until there is one."""
        if self.delivery is None:
            self.delivery = self._borrow()

    def _borrow(self) -> Communicator:
        """Return a communicator on a group that nothing else is launched on; a collective."""
        main = self.main
        assert self._own is not None
        loan = self._own.borrow(lambda numbers: largest(main, numbers, "overlap", ()))
        self._loans.append(loan)
        return Communicator(loan.group, main.device, main.timeout, loan.counting(self._config.observe))

    def give_up(self, words: str) -> None:
        """Have other ranks that wait for this one give up too, and tell them why."""
        if self._main is not None:
            self._main.give_up(words)

    def close(self) -> None:
        """Launch nothing any more."""
        for loan in self._loans:
            loan.give_back()
