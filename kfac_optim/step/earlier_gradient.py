"""Whether a closure has added its gradients to those of an earlier backward."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.blocks.preconditioning import says_something
from kfac_optim.utils.autograd import Node, accumulator, before_node


class EarlierGradient:
    """Watches, while a closure runs, one parameter that has a gradient before.

    Args:
        params: the parameters of the optimizer; without any, nothing is watched.

    Attributes:
        was_added_to: whether the gradient was still there when a backward of the closure came to it: then it holds that
            of an earlier backward as well. One that was zeroed in place is not there.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.was_added_to = False
        self._param = next((param for param in params if param.requires_grad and says_something(param.grad)), None)
        self._node: Node | None = None
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> None:
        if self._param is not None and (node := accumulator(self._param)) is not None:
            self._node, self._handle = node, before_node(node, self._look)

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _look(self, _: Any) -> None:
        if self._param is not None:
            self.was_added_to = says_something(self._param.grad)
        self._let_go()  # later backwards of the closure may add to its own

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._param = self._node = self._handle = None
