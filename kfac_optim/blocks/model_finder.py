"""Finding the model when the optimizer was given parameters alone: it is what is called and holds them."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kfac_optim.utils.dynamo import inline_only
from kfac_optim.utils.hooks import weakly


class ModelFinder:
    """Watches every module call of the process until it is removed.

    Called with an outermost module that holds any of the parameters, `found` learns of it before its forward runs. A
    model that already ran inside a compiled function calls no modules there, and is never found.

    Args:
        params: the parameters to look for.
        found: is called with such a module and its arguments, at each of its calls; a bound method, held weakly.
        under_way: whether a forward of a known model is running, whose inner modules are of no interest.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        found: Callable[[nn.Module, tuple[Any, ...]], None],
        under_way: Callable[[], bool],
    ) -> None:
        self._params = set(params)
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that hold none of them
        self._stays = False
        self._found = weakly(found)
        self._under_way = under_way
        self._handle = register_module_forward_pre_hook(self._look)

    def look_for(self, params: Iterable[nn.Parameter], *, stays: bool) -> None:
        """Look for these parameters instead.

        Args:
            params: the parameters to look for.
            stays: whether to be removed late, if ever: then other modules are to notice little of it, graphs nothing.
        """
        self._params = set(params)
        self._others.clear()
        self._stays = stays

    @inline_only
    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._stays and (torch.compiler.is_compiling() or module in self._others):
            return
        if self._under_way():
            return
        held = list(module.parameters())
        if any(param in self._params for param in held):
            self._found(module, args)
        elif self._stays and all(isinstance(each, nn.Parameter) for each in held):
            self._others.add(module)  # with others in the place of its own, as in `functional_call`, it may yet be one

    def remove(self) -> None:
        self._handle.remove()
