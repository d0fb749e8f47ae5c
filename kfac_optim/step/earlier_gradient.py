"""Whether a closure has added its gradients to those of an earlier backward."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.blocks.model_binding import says_something
from kfac_optim.utils.autograd import Node, accumulator, after_node, version


class EarlierGradient:
    """Watches, while a closure runs, one gradient that is there before.

    Autograd adds to it in place, and each backward changes it once. Where it is another tensor afterwards, or was
    changed more often, something has dropped, zeroed or clipped it, and it is taken to be the closure's own.

    Args:
        params: of the optimizer; none has nothing watched.

    Attributes:
        was_added_to: whether the gradient holds that of an earlier backward as well, once the closure has run.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.was_added_to = False
        self._param = next((param for param in params if says_something(param.grad)), None)
        self._before: Tensor | None = None
        self._version = self._backwards = 0
        self._node: Node | None = None
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> None:
        if self._param is None or self._param.grad is None or (node := accumulator(self._param)) is None:
            return
        self._before, self._version = self._param.grad, version(self._param.grad)
        self._node, self._handle = node, after_node(node, self._count)

    def __exit__(self, *_: object) -> None:
        if self._handle is None or self._param is None or self._before is None:
            return
        self._handle.remove()
        is_there = self._param.grad is self._before
        changes = version(self._before) - self._version
        self.was_added_to = is_there and changes == self._backwards > 0
        self._param = self._before = self._node = None

    def _count(self, *_: Any) -> None:
        self._backwards += 1
