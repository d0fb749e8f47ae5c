"""DistributedDataParallel: which wrapper a model is in, and whether this backward is the last before a step."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.gradients.ddp import OwnersHook
from kfac_optim.distributed.gradients.sharded_gradients import ShardedGradients


class Wrappers:
    """Knows the wrappers that forwards of one model run in; a later one may replace the first.

    Args:
        to_owners: whether gradients go to owners alone.
        observe: is called with every message, for traces.
    """

    def __init__(self, *, to_owners: bool, observe: Callable[[Message], None] | None) -> None:
        self._to_owners = to_owners
        self._observe = observe
        self._hooks: weakref.WeakKeyDictionary[DistributedDataParallel, OwnersHook | None] = weakref.WeakKeyDictionary()
        self._latest: weakref.ref[DistributedDataParallel] | None = None
        self._stranger: weakref.ref[DistributedDataParallel] | None = None
        self._flow: ShardedGradients | None = None
        self._is_held = False  # whether forwards of the model run the wrapper, and not the other way round
        self._reduces: bool | None = None

    @property
    def latest(self) -> DistributedDataParallel | None:
        """Return the wrapper whose forward was the last."""
        return None if self._latest is None else self._latest()

    def find(self, model: nn.Module | None) -> DistributedDataParallel | None:
        """Return the wrapper among a model and its modules that is not known yet; None if there is none."""
        modules = () if model is None else model.modules()
        found = next((module for module in modules if isinstance(module, DistributedDataParallel)), None)
        self._is_held = found is not None and found is not model
        return None if found in self._hooks else found

    def begin_forward(self, model: nn.Module) -> DistributedDataParallel | None:
        """Note the wrapper in which a forward of `model` begins; return it if it is not known yet, otherwise None."""
        # Private, but torch asks it for the same reason, as it compiles what a wrapper holds.
        under_way = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if under_way is None and self._is_held:
            under_way = self.latest
        if under_way is None or _is(self._stranger, under_way):
            return None
        if under_way not in self._hooks and set(under_way.parameters()).isdisjoint(model.parameters()):
            self._stranger = weakref.ref(under_way)  # the model is called by another
            return None
        wrapper: DistributedDataParallel = under_way
        if torch.is_grad_enabled():
            self._reduces = bool(wrapper.require_backward_grad_sync)
        if wrapper not in self._hooks:
            return wrapper
        if wrapper is not self.latest:
            self._latest = weakref.ref(wrapper)
        return None

    def take_reduces(self) -> bool | None:
        """Return whether the last forward has asked the wrapper to average gradients; None if none ran in a wrapper.

        The wrapper then forgets it, so that the next call speaks of later forwards alone.
        """
        reduces, self._reduces = self._reduces, None
        return reduces

    def add(self, wrapper: DistributedDataParallel, *, may_have_a_hook: bool) -> None:
        """Listen to a wrapper that is not known yet.

        Args:
            wrapper: the wrapper to listen to.
            may_have_a_hook: whether one that has another communication hook is left with that: gradients are then the
                mean on all ranks, before they go to owners.
        """
        hook, earlier = None, OwnersHook.of(wrapper)
        if self._to_owners and earlier is not None and earlier.is_in_use:
            raise RuntimeError(
                "kfac_optim: two optimizers with Sharded() are to train in this DistributedDataParallel, which brings "
                "gradients to the owners of one at a time. Before the other is built, call remove_hooks() on the one "
                "that is done, on all ranks."
            )
        if self._to_owners and not (may_have_a_hook and earlier is None and wrapper._comm_hooks):
            hook = earlier or OwnersHook(wrapper)
            hook.flow, hook.observe, hook.user = self._flow, self._observe, weakref.ref(self)
        self._hooks[wrapper] = hook
        self._latest = weakref.ref(wrapper)

    def release(self) -> None:
        """Have gradients be the mean on all ranks from now on, for whoever trains in these wrappers next."""
        for hook in self._of_all():
            hook.release()
        self._hooks = weakref.WeakKeyDictionary(dict.fromkeys(self._hooks))

    def synchronise(self) -> bool:
        """Return whether the backward that is running reduces gradients; under `no_sync` it does not."""
        wrapper = self.latest
        return wrapper is not None and bool(wrapper.require_backward_grad_sync)

    def use(self, flow: ShardedGradients | None) -> None:
        """Bring gradients to other owners from now on; None brings them to all ranks."""
        self._flow = flow
        for hook in self._of_all():
            hook.flow = flow

    def take_shadowed(self) -> None:
        """Make what came while this rank shadowed the others' backward its gradients."""
        for hook in self._of_all():
            hook.take_shadowed()

    def _of_all(self) -> list[OwnersHook]:
        return [hook for hook in self._hooks.values() if hook is not None]


def _is(reference: weakref.ref[Any] | None, found: object) -> bool:
    return reference is not None and reference() is found
