"""Calls of torch's own function with the weight of one module, noted in the place of calls of the module.

A forward of its own may do anything with what the function gives, scale it for one: the gradient that comes to the
function's output is then the right one, and that of the module's output is not.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.capture.function_modes import Function, substitute, traceable
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.noted_outputs import note_lookup
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.autograd import in_function_transform, is_cast_of
from kfac_optim.utils.hooks import Handle, Handles, is_on


class Noted(NamedTuple):
    """Says what is noted of a call of the function.

    Attributes:
        weight: what it was handed for the weight.
        input: the input, as `LayerCall.input` will hand it over.
        examples: how many examples it was handed, as for `CaptureWindow.note`.
        bias: what it was handed for the bias.
        is_lookup: whether rows of the weight are looked up by an input of integers.
        context: the context, as in `LayerCall`; None where the call is not the matrix of the layer.
    """

    weight: Tensor
    input: Tensor
    examples: int | None
    bias: Tensor | None = None
    is_lookup: bool = False
    context: tuple[int, ...] | None = ()


Read = Callable[..., Noted | None]
"""Called with what the function is called with; None where that is not to be noted."""


def note_function(
    window: CaptureWindow,
    module: nn.Module,
    watch: LayerWatch,
    function: Function,
    read: Read,
    *,
    has_bias: bool = False,
) -> Handle:
    """Note the calls of `function` with the weight of `module` within its forwards.

    Args:
        window: takes the calls.
        module: the layer.
        watch: what is asked of it.
        function: torch's own.
        read: says what is noted.
        has_bias: whether calls count only where the module's own bias is added.
    """
    noted = _NotedCalls(window, module, watch, function, read, has_bias)
    return Handles(window.watch_calls(watch), substitute(window, module, {function: noted}, noted.wanted))


class _NotedCalls:
    """Runs the function. Hooks hold it, so it holds the window and the watch weakly."""

    def __init__(
        self,
        window: CaptureWindow,
        module: nn.Module,
        watch: LayerWatch,
        function: Function,
        read: Read,
        has_bias: bool,
    ) -> None:
        self._window = weakref.ref(window)
        self._module = module
        self._watch = weakref.ref(watch)
        self._function = function
        self._read = read
        self._has_bias = has_bias

    def wanted(self) -> bool:
        # Where the window's mode is on it takes the call for a use by somebody else, until `layer_ran` says otherwise.
        window, watch = self._window(), self._watch()
        return window is not None and watch is not None and (is_on(window.listener.mode) or watch.wanted())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = traceable(self._function)(*args, **kwargs)
        window, watch, module = self._window(), self._watch(), self._module
        noted = self._read(*args, **kwargs)
        if window is None or watch is None or noted is None or not is_cast_of(noted.weight, watch.used):
            return output
        # The mode knows no casts of a weight.
        looked_at = noted.weight is watch.used and is_on(window.listener.mode) and output.requires_grad
        if looked_at and window.listener.layer_ran(watch.weight):
            return output
        own_bias = noted.bias is not None and is_cast_of(noted.bias, module._parameters.get("bias"))
        if self._has_bias != own_bias or noted.context is None:
            return output
        if noted.is_lookup and not torch.compiler.is_compiling() and in_function_transform():
            return note_lookup(window, watch, noted.input, output, training=module.training)
        examples, context, training = noted.examples, noted.context, module.training
        return window.note_output(watch, noted.input, output, examples=examples, training=training, context=context)
