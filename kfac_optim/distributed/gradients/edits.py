"""Were gradients changed between backward and step, where each rank has the mean of some of them alone?"""

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from kfac_optim.distributed.planning.plan import AFTER_CLIPPING, CLIP_LAST
from kfac_optim.utils.autograd import after_backward, on_accumulated, version
from kfac_optim.utils.hooks import Handle, weakly
from kfac_optim.utils.sharded_params import is_part


class EditWatch:
    """Watches the gradient of one parameter, since clipping by the norm changes all of them."""

    def __init__(self) -> None:
        self._param: nn.Parameter | None = None
        self._handle: Handle | None = None
        self._left: tuple[weakref.ref[Tensor], int] | None = None  # the gradient as backward has left it

    def follow(self, params: Sequence[nn.Parameter]) -> None:
        """Watch one of these from now on."""
        param = next((each for each in params if each.requires_grad and not is_part(each)), None)
        if param is self._param:
            return
        if self._handle is not None:
            self._handle.remove()
        self._param, self._handle, self._left = param, None, None
        if param is not None:
            self._handle = on_accumulated(param, weakly(self._arrived))

    def note(self) -> None:
        """Take the gradient as it is for what the step is to get."""
        grad = None if self._param is None else self._param.grad
        self._left = None if grad is None else (weakref.ref(grad), version(grad))

    def forget(self) -> None:
        """Forget the gradient, which was dropped."""
        self._left = None

    def finds_edit(self, expected: int) -> bool:
        """Return whether the gradient was changed in place more often than expected since backward left it."""
        if self._left is None:
            return False
        (left, before), self._left = self._left, None
        grad = left()
        return grad is not None and version(grad) > before + expected

    def _arrived(self, _param: Tensor) -> None:
        after_backward(weakly(self.note))


class LateGradients:
    """Notices gradients that a backward adds after the norm of all was taken, and before the step.

    Attributes:
        found: whether there are some.
    """

    def __init__(self) -> None:
        self.found = self._listens = False
        self._params: list[nn.Parameter] = []
        self._handles: list[Handle] = []

    def begin(self, params: Sequence[nn.Parameter]) -> None:
        """Listen to the gradients of these until `end`."""
        trained = [param for param in params if param.requires_grad]
        if list(map(id, trained)) != list(map(id, self._params)):
            for handle in self._handles:
                handle.remove()
            self._params, self._handles = trained, [on_accumulated(param, weakly(self._arrived)) for param in trained]
        self._listens = True

    def end(self) -> None:
        """Take notice that the gradients were dropped, or that no step will use them."""
        self.found = self._listens = False

    def begin_forward(self) -> None:
        """Take notice that a forward of the model begins: by then gradients may have been dropped unseen."""
        if self._listens and all(param.grad is None for param in self._params):
            self.end()

    def named(self, call: str) -> str:
        """Say what a vote is for, so that all ranks raise where one rank refuses the gradients."""
        return call + AFTER_CLIPPING if self.found else call

    def refuse(self) -> None:
        """Refuse gradients that were added to the mean on its owner, and on other ranks to their own; after a vote."""
        if self.found:
            raise RuntimeError(
                "kfac_optim: a backward has added to the gradients after optimizer.clip_grad_norm_(). Under Sharded() "
                "that brings the mean of each gradient to one process, and what is added afterwards is not averaged "
                f"with it. {CLIP_LAST}"
            )

    def _arrived(self, _param: Tensor) -> None:
        self.found |= self._listens
