"""When a layer's input and output gradient become statistics. The one place that touches autograd.

A forward hook on the layer notes its input and sets a tensor hook on its *output*; the tensor hook commits.
(A module's full backward hook would break in-place activations and residual adds that follow the layer.)

[Note: the commit rule]
A forward call counts its rows once, however many backwards it gets; a forward without a backward counts
nothing; a backward that does not reach the layer's weight (`autograd.grad` with respect to inputs, the inner
pass of a gradient penalty) counts nothing. So evaluation, `no_grad` and recomputed forwards leave no trace.
When one forward gets several backwards before the step, the losses add up, and so do their gradients: the
call's gradient is the running sum, and what was counted for the earlier sum is taken back.

[Note: the lifetime of a call]
A `ForwardCall` is held by the hook on the layer's output, thus by the graph: a forward that never gets a
backward is freed with it. It drops the input as soon as it has committed (unless its statistics keep it), and keeps the
gradient, in case another backward comes, only until the window closes in `step()`.

[Note: recomputed layers]
Reentrant checkpointing runs layers without gradients inside the model's forward and again inside backward, when the
forward they belong to has ended. Such a forward leaves a hook on the model's output, which says whose backward it is.

[Note: hooks and their owner]
Modules hold hooks and hooks hold only weak references, so an optimizer that is dropped takes its statistics
along; a pickled or copied model carries inert hooks.
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kfac_optim.compiled import Tape
from kfac_optim.hooks import Handle, Handles, LayerHooks, ModeStack, PicklableHook, is_on
from kfac_optim.loss_terms import LossCount, LossTally, RootCall, first_tensor, read_terms
from kfac_optim.precision import without_autocast
from kfac_optim.specs import LossTerms

_MODULE_CALL = nn.Module._call_impl.__code__


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One forward call of a layer, as a backward through it leaves it."""

    input: Tensor | None
    """The layer's input. None from the second backward on, unless statistics of an earlier one kept it."""
    gradient: Tensor
    """Gradient with respect to the layer's output, summed over the backwards so far."""
    earlier: Tensor | None = None
    """The same sum before this backward, to be taken back; None at the first backward."""
    training: bool = True
    """Whether the layer was in training mode in its forward."""
    context: tuple[int, ...] = ()
    """What the adapter that noted the call wants back."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class LayerWatch:
    """What the window asks of one layer.

    Attributes:
        weight: the parameter that a backward must reach to count.
        wanted: whether the layer's next forward should be captured.
        emit: receives each committed call; whether further backwards through it need its input again.
        discard: forgets the calls emitted since the last step.
        unbatched_ndim: dimensions of an input without a batch dimension, for `watch_layer`.
        is_product: whether the layer's forward is a product with its weight, which the window's mode may see.
        number: of the watch, in compiled graphs.
        node: that accumulates into the weight's gradient, as it was when compiled graphs were last asked about.
    """

    weight: nn.Parameter
    wanted: Callable[[], bool]
    emit: Callable[[LayerCall], bool]
    discard: Callable[[], None]
    unbatched_ndim: int = -1
    is_product: bool = False
    number: int = field(default_factory=itertools.count().__next__)
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class _WatchHandle:
    watches: list[LayerWatch]
    watch: LayerWatch

    def remove(self) -> None:
        if self.watch in self.watches:
            self.watches.remove(self.watch)


class CaptureWindow:
    """Everything captured between two optimizer steps.

    Attributes:
        rule: what the mean in the loss runs over.
        listening: whether backward passes count; an estimate says which do.
        dropped_calls: calls whose input was changed in place before the backward, ever.
        mode: that forwards of the model run in, where it is wanted and in graphs that capture.
        mode_wanted: asked before each forward of the model that does not run in a graph.
        graph_began: told of each that does, where the graph captures.
        module_ran: told, within that mode, of a module whose forward is a product with this weight; whether the mode
            notes it.
        layer_ran: told, within that mode, of any other module with this weight.
        modes: those that forwards under way run in.
        capturing: whether graphs are to capture: they are traced once with it and once without.
        tape: what compiled graphs hold of the window.
    """

    def __init__(self, rule: LossTerms) -> None:
        self.rule = rule
        self.listening = False
        self.dropped_calls = 0
        self.mode: TorchFunctionMode | None = None
        self.mode_wanted: Callable[[], bool] = lambda: False
        self.graph_began: Callable[[], None] = lambda: None
        self.module_ran: Callable[[nn.Parameter], bool] = lambda _: False
        self.layer_ran: Callable[[nn.Parameter], None] = lambda _: None
        self.modes = ModeStack()
        self.capturing = False
        self.tape = Tape(self)
        self._watches: list[LayerWatch] = []
        self._hooks: list[LayerHooks] = []
        self._roots: list[RootCall] = []
        self._backward_root: RootCall | None = None
        self._last_root: RootCall | None = None
        self._open: list[ForwardCall] = []
        self._tally = LossTally(rule)
        self._traced: dict[int, ForwardCall] = {}
        self._traced_before: dict[int, ForwardCall] = {}
        self._calls = itertools.count()
        self._stale = False

    def watch_root(self, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> Handle:
        """Read the number of loss terms off every forward of `model`, and off one under way with these arguments."""
        hooks = _RootHooks(self, model)
        handle = Handles(
            model.register_forward_pre_hook(PicklableHook(hooks.enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(PicklableHook(hooks.leave), with_kwargs=True, always_call=True),
        )
        if args_under_way is not None:
            hooks.enter(model, args_under_way, {})
            for layer in self._hooks:  # torch has already listed the hooks to call before this forward
                layer.begin(model, args_under_way)
        return handle

    def is_under_way(self) -> bool:
        """Whether a forward of the model is running."""
        return bool(self._roots)

    def watch_layer(self, module: nn.Module, watch: LayerWatch) -> Handle:
        """Emit the calls of `module` that a backward reaches."""
        return Handles(self.watch_calls(watch), self.hook(module, _LayerHook(self, module, watch)))

    def hook(self, module: nn.Module, after: Callable[..., None], before: Callable[..., None] | None = None) -> Handle:
        """Call `before(module, args, kwargs)` and `after(module, args, kwargs, output)` around forwards of `module`.

        Where there is a `before`, `after` is called even if the forward raises. Neither is called within a forward of
        the model without gradients: torch's fast paths of evaluation are closed to modules with hooks.
        """
        hooks = LayerHooks(self._hooks, module, before, after)
        self._hooks.append(hooks)
        hooks.on()
        return hooks

    def note(
        self,
        watch: LayerWatch,
        layer_input: Tensor,
        output: Tensor,
        *,
        training: bool = True,
        unbatched: bool = False,
        context: tuple[int, ...] = (),
    ) -> "ForwardCall | None":
        """Within a forward: `output` came of `layer_input` and `watch.weight`; commit when a backward reaches both.

        Args:
            watch: the layer.
            layer_input: as `LayerCall.input` will hand it over.
            output: non-leaf, or a leaf that stands for it in the graph.
            training: whether the layer is in training mode.
            unbatched: whether the layer was handed a single example without a batch dimension.
            context: becomes `LayerCall.context`.

        Returns:
            The call, whose context may still be changed; None where it does not count, or is being traced.
        """
        if not watch.weight.requires_grad or not self.takes(output):
            return None
        if torch.compiler.is_compiling():
            self.note_in_graph(watch.number, layer_input, output, training, unbatched, context)
            return None
        if not watch.wanted():
            return None
        call = ForwardCall(self, watch, self._root_of_call(unbatched), layer_input, training, context)
        output.register_hook(call)  # type: ignore[no-untyped-call]
        return call

    def note_in_graph(
        self,
        watch: int,
        layer_input: Tensor,
        output: Tensor,
        training: bool,
        unbatched: bool,
        context: tuple[int, ...],
    ) -> None:
        """`note` for the watch of this number, in a forward that is being traced."""
        call, kept = self.tape.note(watch, training, unbatched, context), layer_input.detach()
        output.register_hook(lambda gradient: self.tape.commit(call, kept, gradient))  # type: ignore[no-untyped-call]

    def note_without_graph(self) -> None:
        """Within a forward without gradients: a layer ran that may run again. See [Note: recomputed layers]."""
        if self._roots:
            self._roots[-1].recomputes = True

    def takes(self, output: Tensor) -> bool:
        """Whether a call with this output may count: it is part of a graph of the training loop's own."""
        if torch.compiler.is_compiling():
            return self.captures() and output.requires_grad
        return torch.is_grad_enabled() and output.requires_grad and not _in_function_transform()

    def captures(self) -> bool:
        """Whether the graph that is being traced is one that captures."""
        return self.capturing and torch.is_grad_enabled()

    def watch_calls(self, watch: LayerWatch) -> Handle:
        """Like `watch_layer`, for a layer whose adapter notes the calls itself."""
        self._watches.append(watch)
        watch.node = _accumulator(watch.weight)
        return _WatchHandle(self._watches, watch)

    def set_loss_terms(self, terms: float | Tensor) -> None:
        """State the loss terms of the coming backward; counting is off until the window closes."""
        if self._stale:
            self.discard()
        self._tally.state(terms)

    def close(self) -> LossCount:
        """End the window and count the loss terms in it.

        Raises:
            RuntimeError: `M` is unknown: a layer was called outside the model's forward, or neither the model's input
                nor its output has a tensor to read it off.
        """
        if self._stale:
            self.discard()
        count = self._tally.result()
        self._end()
        return count

    def abandon(self) -> None:
        """End the window as if nothing had been captured in it."""
        self.discard()
        self._end()

    def mark_stale(self) -> None:
        """The gradients so far were thrown away: forget their statistics when the next forward call counts.

        Not at once: further backwards through the same forward go on from the same running sum, as when several
        losses are backpropagated one by one and their gradients combined by hand.
        """
        self._roots.clear()  # an interrupted forward (KeyboardInterrupt) leaves its own behind
        self.modes.leave()
        if self._open:  # else keep what set_loss_terms said of the backward to come
            self._stale = True

    def discard(self) -> None:
        """Forget everything captured and stated since the last step. Also runs inside backward."""
        for watch in self._watches:
            watch.discard()
        self._forget_calls()

    def begin_forward(self) -> None:
        """The model's outermost forward begins."""
        self.modes.leave()
        for hooks in self._hooks:
            if torch.is_grad_enabled():
                hooks.on()
            else:
                hooks.off()
        if self.mode is not None and torch.is_grad_enabled() and self.mode_wanted():
            self.modes.enter(self.mode)

    def end_forward(self) -> None:
        """The model's outermost forward ends, whether or not it failed."""
        self.modes.leave()
        for hooks in self._hooks:
            hooks.on()

    # -- told by compiled graphs -------------------------------------------------------------------------------

    def begin_call(self, model: int) -> None:
        self.graph_began()
        self._roots.append(self._roots[-1] if self._roots else RootCall(model))

    def end_call(self, terms: int) -> None:
        if self._roots:
            self._last_root = self._roots.pop()
            self._last_root.terms = None if terms < 0 else terms

    def note_call(self, watch: int, training: bool, unbatched: bool, context: tuple[int, ...]) -> int:
        found = next((each for each in self._watches if each.number == watch), None)
        if found is None or not found.wanted():
            return -1
        number = next(self._calls)
        root = self._root_of_call(unbatched)
        if root is None and _in_backward():  # a graph computes again what a checkpoint dropped
            root = self._last_root
        self._traced[number] = ForwardCall(self, found, root, None, training, context)
        return number

    def commit_call(self, call: int, layer_input: Tensor, gradient: Tensor) -> None:
        noted = self._traced.get(call) or self._traced_before.get(call)
        if noted is not None:
            noted(gradient, layer_input)

    # ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._forget_calls()
        self._roots.clear()
        self.modes.leave()
        self._backward_root = self._last_root = None
        if self._traced:
            for watch in self._watches:
                watch.node = _accumulator(watch.weight)
        # Graphs do not hold their calls, as eager ones do: a backward may come as late as the next step.
        self._traced, self._traced_before = {}, self._traced

    def _forget_calls(self) -> None:
        for call in self._open:
            call.release()
        self._open.clear()
        self._tally.reset()
        self._stale = False

    def _root_of_call(self, unbatched: bool) -> RootCall | None:
        """The forward of the model in which a layer is called, and by which kind of example."""
        root = self._current_root()
        if root is not None:
            root.unbatched |= unbatched
            root.batched |= not unbatched
        return root

    def _current_root(self) -> RootCall | None:
        if self._roots:
            return self._roots[-1]
        return self._backward_root if _in_backward() else None


class ForwardCall:
    """Tensor hook on one output of a layer: commits the call when a backward reaches the weight.

    In a compiled graph, which hands the input over with the gradient, it holds none.
    """

    __slots__ = ("_committed", "_gradient", "_input", "_root", "_training", "_version", "_watch", "_window", "context")

    def __init__(
        self,
        window: CaptureWindow,
        watch: LayerWatch,
        root: RootCall | None,
        layer_input: Tensor | None,
        training: bool,
        context: tuple[int, ...],
    ) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)
        self._root = root
        self._input = None if layer_input is None else layer_input.detach()
        self._version = 0 if layer_input is None else _version(layer_input)
        self._gradient: Tensor | None = None
        self._committed = False
        self._training = training
        self.context = context

    @torch.no_grad()
    def __call__(self, gradient: Tensor, layer_input: Tensor | None = None) -> None:
        window, watch, traced = self._window(), self._watch(), layer_input is not None
        if window is None or watch is None or not window.listening:
            return
        if not _reaches(watch.weight, watch.node if traced else None):
            return
        if self._committed and self._gradient is None:
            return  # the call was counted in a window that has closed
        if window._stale and not self._committed:
            window.discard()
        if not traced:
            layer_input, self._input = self._input, None
            if layer_input is not None and _version(layer_input) != self._version:
                self._committed = True
                window.dropped_calls += 1
                return
        earlier, gradient = self._gradient, gradient.detach()
        if earlier is not None:
            gradient = earlier + gradient
            window._stale = False
        if not self._committed:
            self._committed = True
            window._open.append(self)
        self._gradient = gradient
        window._tally.count(self._root)
        with without_autocast((gradient.device.type,)), torch.profiler.record_function("kfac.statistics"):
            keep = watch.emit(LayerCall(layer_input, gradient, earlier, self._training, self.context))
        if keep and not traced:
            self._input = layer_input

    def release(self) -> None:
        self._gradient = self._input = None


def _version(tensor: Tensor) -> int:
    """Counts the changes in place; inference tensors allow none and have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def _accumulator(weight: nn.Parameter) -> Node | None:
    """The node that accumulates into `weight.grad`. Not to be had within an operator of a compiled graph."""
    return torch.autograd.graph.get_gradient_edge(weight).node if weight.requires_grad else None


def _reaches(weight: nn.Parameter, node: Node | None = None) -> bool:
    """Whether the backward that is running accumulates into `weight.grad`, by its node if that is known."""
    node = node or _accumulator(weight)
    if node is None or not weight.requires_grad:
        return False
    try:
        # Private, but the only way to ask; torch's own checkpointing and FSDP rely on it.
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad(loss, weights): nothing is accumulated
        return False
    return reached


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _LayerHook:
    __slots__ = ("_name", "_watch", "_window")

    def __init__(self, window: CaptureWindow, module: nn.Module, watch: LayerWatch) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)
        self._name = next((name for name, param in module._parameters.items() if param is watch.weight), None)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window, watch = self._window(), self._watch()
        if window is None or watch is None:
            return
        if torch.compiler.is_compiling() and not window.captures():
            return
        if not torch.is_grad_enabled():
            window.note_without_graph()
            return
        in_mode = is_on(window.mode)
        if not (in_mode or torch.compiler.is_compiling() or watch.wanted()):
            return
        if not isinstance(output, Tensor) or is_parametrized(module):
            return
        if self._name is not None and module._parameters.get(self._name) is not watch.weight:
            return  # torch.func.functional_call runs the module with something else for its weight
        if in_mode:
            if not watch.is_product:
                window.layer_ran(watch.weight)
            elif window.module_ran(watch.weight):
                return
        layer_input = first_tensor(args, kwargs, least_ndim=0 if watch.unbatched_ndim == 0 else 1)
        if layer_input is not None:
            unbatched = layer_input.dim() == watch.unbatched_ndim
            window.note(watch, layer_input, output, training=module.training, unbatched=unbatched)


class _RootHooks:
    def __init__(self, window: CaptureWindow, model: nn.Module) -> None:
        self._window = weakref.ref(window)
        self._number = id(model)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if window.captures():
                window.tape.begin(self._number)
                if window.mode is not None and not is_on(window.mode):
                    window.mode.__enter__()  # type: ignore[no-untyped-call]
        elif window is not None:
            if window._roots and window._roots[0].model == id(model) and not _is_nested(model):
                window._roots.clear()  # left behind by an interrupted forward
            if not window._roots:
                window.begin_forward()
            # A model that calls itself is one forward: the outermost counts.
            window._roots.append(window._roots[-1] if window._roots else RootCall(id(model)))

    def leave(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if window.captures():
                if window.mode is not None and is_on(window.mode):
                    window.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                terms = read_terms(window.rule, (args, kwargs), output)
                window.tape.end(-1 if terms is None else terms)
            return
        if window is None or not window._roots:
            return
        root = window._last_root = window._roots.pop()
        if not window._roots:
            window.end_forward()
        root.terms = read_terms(window.rule, (args, kwargs), output)
        if root.recomputes and torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(functools.partial(_enter_backward, self._window, root))  # type: ignore[no-untyped-call]


def _enter_backward(window_ref: "weakref.ref[CaptureWindow]", root: RootCall, _gradient: Tensor) -> None:
    if (window := window_ref()) is not None:
        window._backward_root = root


def _is_nested(model: nn.Module) -> bool:
    """Whether the call of `model` that is beginning is inside another one."""
    calls, frame = 0, cast(FrameType | None, sys._getframe())
    while frame is not None:
        calls += frame.f_code is _MODULE_CALL and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls > 1


def _in_function_transform() -> bool:
    """Whether `torch.func` is at work (`grad`, `vmap`, …): its passes are not the training loop's."""
    return torch._C._functorch.peek_interpreter_stack() is not None
