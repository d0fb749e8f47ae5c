"""The hooks on the modules of a model, which measure layers or wait for the shapes of a lazy module."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kfac_optim.blocks.attachment import Attachment, attach, by_module
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.hooks import Handle, PicklableHook, call_if_there, drop_inert

_NUMBERS = itertools.count(1)


class ModuleHooks:
    """Keeps the hooks of a model in step with its blocks.

    Args:
        window: takes the statistics.
        emitted: is called with each block that took statistics.
        grow: is called as a lazy module's first forward begins, with the module and its arguments; a bound method,
            held weakly.
    """

    def __init__(
        self,
        window: CaptureWindow,
        emitted: Callable[[KFACBlock], None],
        grow: Callable[[nn.Module, tuple[Any, ...]], None],
    ) -> None:
        self._window = window
        self._emitted = emitted
        self._grow = weakref.WeakMethod(grow)
        self._attached: dict[nn.Module, tuple[Sequence[Attachment], Handle]] = {}
        self._lazy: dict[nn.Module, Handle] = {}

    def follow(self, model: nn.Module, blocks: Iterable[KFACBlock]) -> None:
        """Hook the modules of these blocks and no others; modules that are hooked already keep their hooks."""
        for module in model.modules():
            drop_inert(module)
        wanted = by_module(blocks)
        gone = [module for module, (attached, _) in self._attached.items() if wanted.get(module) != attached]
        for module in gone:
            _, handle = self._attached.pop(module)
            handle.remove()
        new = {module: attachments for module, attachments in wanted.items() if module not in self._attached}
        for module, attachments in new.items():
            self._attached[module] = attachments, attach(module, attachments, self._window, self._emitted)
        if gone or new:
            self._window.hooked_layers = str(next(_NUMBERS))
        # A lazy module learns its shapes as its first forward begins, which is to count already.
        lazy = {module for module in model.modules() if any(map(is_lazy, module.parameters(recurse=False)))}
        for module in self._lazy.keys() - lazy:
            self._lazy.pop(module).remove()
        for module in lazy - self._lazy.keys():
            hook = PicklableHook(lambda *given, grow=self._grow: call_if_there(grow, *given))
            self._lazy[module] = module.register_forward_pre_hook(hook)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in (*(handle for _, handle in self._attached.values()), *self._lazy.values()):
            handle.remove()
        self._attached.clear()
        self._lazy.clear()
