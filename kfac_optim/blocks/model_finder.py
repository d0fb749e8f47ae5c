"""Finding the model when the optimizer was given parameters alone: it is what is called and holds them."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kfac_optim.utils.hooks import weakly


class ModelFinder:
    """Watches every module call of the process until it is removed.

    Called with an outermost module that holds any of the parameters, `found` learns of it before its forward runs. A
    model that already ran inside a compiled function calls no modules there, and is never found.

    Args:
        params: to look for.
        found: is called with such a module and its arguments, at each of its calls; a bound method, held weakly.
        under_way: whether a forward of a known model is running, whose inner modules are of no interest.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        found: Callable[[nn.Module, tuple[Any, ...]], None],
        under_way: Callable[[], bool],
    ) -> None:
        self.look_for(params)
        self._found = weakly(found)
        self._under_way = under_way
        self._handle = register_module_forward_pre_hook(self._look)

    def look_for(self, params: Iterable[nn.Parameter]) -> None:
        """Look for these parameters instead."""
        self._params = set(params)
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that hold none of them

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._under_way() or module in self._others:
            return
        if any(param in self._params for param in module.parameters()):
            self._found(module, args)
        else:
            self._others.add(module)

    def remove(self) -> None:
        self._handle.remove()
