"""The loss of a step's examples at other parameters, by the closure; nothing else is changed by it."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.random_state import RandomState
from kfac_optim.utils.tensor_storage import held_once


class WithoutBackward(TorchFunctionMode):
    """Has `loss.backward()` do nothing: where the loss alone is asked for, gradients would double the cost.

    A closure may look at gradients after it, and change them: it sees copies of those of the first evaluation.

    Args:
        gradients: the gradient of each parameter, or None.
    """

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward and not (kwargs or {}).get("create_graph"):
            for param, grad in self._gradients.items():
                param.grad = None if grad is None else grad.clone()
            return None  # one with create_graph is a part of the loss
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class Reevaluation:
    """Evaluates the closure again.

    Attributes:
        closure: returns the loss.
        random: the generators before the closure was first called.
        window: the window, in which a second evaluation leaves nothing.
        model: the model, with the buffers that a forward may change.
        params: the parameters of the optimizer.
        several: whether a wrapper may write to what it made gradients views of.
        backward: whether the closure's backward is run.
    """

    closure: Callable[[], Any]
    random: RandomState
    window: CaptureWindow
    model: nn.Module
    params: tuple[nn.Parameter, ...]
    several: bool = False
    backward: bool = True

    def loss(self) -> Any:
        """Return what the closure returns at the present parameters; gradients and buffers stay as they are."""
        held = {param: param.grad for param in dict.fromkeys((*self.params, *self.model.parameters()))}
        if self.several:
            held = {param: None if grad is None else grad.clone() for param, grad in held.items()}
        buffers = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        dense = [buffer for buffer in self.model.buffers() if buffer.layout is torch.strided]
        values = [(buffer, held_once(buffer).clone()) for buffer in dense]
        try:
            for param in held:
                param.grad = None
            torch.clear_autocast_cache()  # which may hold casts of the parameters as they were before
            with ExitStack() as stack:
                stack.enter_context(self.random.replayed())
                stack.enter_context(torch.enable_grad())
                if not self.backward:
                    stack.enter_context(WithoutBackward(held))
                stack.enter_context(self.window.muted())  # last, as it takes off what an interrupted forward left on
                return self.closure()
        finally:
            torch.clear_autocast_cache()
            for param, grad in held.items():
                param.grad = grad
            for registered, old in buffers:  # a forward may change a buffer in place, or put another in its place
                registered.update(old)
            with torch.no_grad():
                for buffer, value in values:
                    held_once(buffer).copy_(value)

    @torch.no_grad()
    def loss_at(self, values: Mapping[nn.Parameter, Tensor]) -> float:
        """Return the loss at other values of some parameters, which are put back afterwards."""
        before = {param: param.detach().clone() for param in values}
        try:
            for param, value in values.items():
                param.copy_(value)
            return float(self.loss())
        finally:
            for param, value in before.items():
                param.copy_(value)
