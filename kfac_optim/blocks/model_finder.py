"""Finding the model when the optimizer was given parameters alone: it is what is called and holds them."""

from collections.abc import Callable, Iterable
from typing import Any

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
        self.params = set(params)
        self._found = weakly(found)
        self._under_way = under_way
        self._handle = register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._under_way() and any(param in self.params for param in module.parameters()):
            self._found(module, args)

    def remove(self) -> None:
        self._handle.remove()
