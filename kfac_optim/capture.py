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
backward is freed with it. It drops the input as soon as it has committed, and keeps the gradient, in case
another backward comes, only until the window closes in `step()`.

[Note: recomputed layers]
Reentrant checkpointing runs layers without gradients inside the model's forward and again inside backward, when the
forward they belong to has ended. Such a forward leaves a hook on the model's output, which says whose backward it is.

[Note: hooks and their owner]
Modules hold hooks and hooks hold only weak references, so an optimizer that is dropped takes its statistics
along; a pickled or copied model carries inert hooks.
"""

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from kfac_optim.specs import LossTerms

_BY_INPUT = (LossTerms.EXAMPLES, LossTerms.SUM)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One forward call of a layer, as a backward through it leaves it."""

    input: Tensor | None
    """The layer's input; None from the second backward on, when its rows are counted already."""
    gradient: Tensor
    """Gradient with respect to the layer's output, summed over the backwards so far."""
    earlier: Tensor | None = None
    """The same sum before this backward, to be taken back; None at the first backward."""
    training: bool = True
    """Whether the layer was in training mode in its forward."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class LayerWatch:
    """What the window asks of one layer.

    Attributes:
        weight: the parameter that a backward must reach to count.
        unbatched_ndim: dimensions of an input without a batch dimension.
        wanted: whether the layer's next forward should be captured.
        emit: receives each committed call.
        discard: forgets the calls emitted since the last step.
    """

    weight: nn.Parameter
    unbatched_ndim: int
    wanted: Callable[[], bool]
    emit: Callable[[LayerCall], None]
    discard: Callable[[], None]


class LossCount(NamedTuple):
    """The terms of a step's loss."""

    averaged: float
    """`M`, the terms that the mean runs over; 1 for a summed loss."""
    summed: float
    """Terms that are summed instead; 1 for a mean, infinity where the number is unknown."""


class Handle(Protocol):
    """Takes hooks off a module."""

    def remove(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class _LayerHandle:
    watches: list[LayerWatch]
    watch: LayerWatch
    hook: RemovableHandle | None

    def remove(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        if self.watch in self.watches:
            self.watches.remove(self.watch)


class RootCall:
    """One forward call of the whole model, whose loss terms count once in each window that has a backward through it.

    Attributes:
        terms: what the window's rule reads off the call; None where it finds nothing to read.
        counted_in: number of the window that counted it last.
        batched: whether any layer was handed a batch; `unbatched`: whether any was handed a single example.
        recomputes: whether layers ran without gradients inside; see [Note: recomputed layers].
    """

    __slots__ = ("batched", "counted_in", "recomputes", "terms", "unbatched")

    def __init__(self) -> None:
        self.terms: int | None = None
        self.counted_in = -1
        self.batched = False
        self.unbatched = False
        self.recomputes = False


class CaptureWindow:
    """Everything captured between two optimizer steps.

    Attributes:
        rule: what the mean in the loss runs over.
        listening: whether backward passes count; an estimate says which do.
        dropped_calls: calls whose input was changed in place before the backward, ever.
    """

    def __init__(self, rule: LossTerms) -> None:
        self.rule = rule
        self.listening = False
        self.dropped_calls = 0
        self._watches: list[LayerWatch] = []
        self._roots: list[RootCall] = []
        self._backward_root: RootCall | None = None
        self._open: list[ForwardCall] = []
        self._number = 0
        self._counted = 0
        self._stated: int | None = None
        self._rootless = False
        self._stale = False

    def watch_root(self, model: nn.Module) -> tuple[Handle, ...]:
        """Read the number of loss terms off every forward of `model`."""
        hooks = _RootHooks(self)
        return (
            model.register_forward_pre_hook(PicklableHook(hooks.enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(PicklableHook(hooks.leave), with_kwargs=True, always_call=True),
        )

    def watch_layer(self, module: nn.Module, watch: LayerWatch) -> Handle:
        """Emit the calls of `module` that a backward reaches."""
        self._watches.append(watch)
        # First among the module's hooks: the output is then the layer's own, and the root call still open
        # when the model is this very layer.
        hook = module.register_forward_hook(PicklableHook(_LayerHook(self, watch)), prepend=True, with_kwargs=True)
        return _LayerHandle(self._watches, watch, hook)

    def note(self, watch: LayerWatch, layer_input: Tensor, output: Tensor, *, training: bool = True) -> None:
        """Within a forward: `output` came of `layer_input` and `watch.weight`; commit when a backward reaches both."""
        if not torch.is_grad_enabled() or _in_function_transform():
            return
        if not (output.requires_grad and watch.weight.requires_grad and watch.wanted()):
            return
        root = self._current_root()
        if root is not None:
            unbatched = layer_input.dim() == watch.unbatched_ndim
            root.unbatched |= unbatched
            root.batched |= not unbatched
        output.register_hook(ForwardCall(self, watch, root, layer_input, training))  # type: ignore[no-untyped-call]

    def watch_calls(self, watch: LayerWatch) -> Handle:
        """Like `watch_layer`, for a layer whose adapter notes the calls itself."""
        self._watches.append(watch)
        return _LayerHandle(self._watches, watch, None)

    def set_loss_terms(self, terms: int) -> None:
        """State the loss terms of the coming backward; counting is off until the window closes."""
        if self._stale:
            self.discard()
        self._stated = (self._stated or 0) + terms

    def close(self) -> LossCount:
        """End the window and count the loss terms in it.

        Raises:
            RuntimeError: `M` is unknown: a layer was called outside the model's forward, or neither the model's input
                nor its output has a tensor to read it off.
        """
        if self._stale:
            self.discard()
        if self.rule is LossTerms.SUM:
            count = LossCount(averaged=1, summed=math.inf if self._rootless else self._counted)
        elif self._stated is not None:
            count = LossCount(averaged=self._stated, summed=1)
        elif self._rootless:
            raise RuntimeError(
                "kfac_optim: the number of terms in the loss's mean is unknown: a layer ran outside the model's "
                f"forward (a submodule or another method was called directly), or loss_terms={self.rule} finds no "
                "tensor with a dimension to read it off. Call optimizer.set_loss_terms(n) before backward(), with n "
                "the number of terms the loss is averaged over, or run the model through its own forward, or build the "
                "optimizer with model=<the module that is called>."
            )
        else:
            count = LossCount(averaged=self._counted, summed=1)
        self._forget_calls()
        self._roots.clear()
        self._backward_root = None
        return count

    def mark_stale(self) -> None:
        """The gradients so far were thrown away: forget their statistics when the next forward call counts.

        Not at once: further backwards through the same forward go on from the same running sum, as when several
        losses are backpropagated one by one and their gradients combined by hand.
        """
        self._roots.clear()  # an interrupted forward (KeyboardInterrupt) leaves its own behind
        if self._open:  # else keep what set_loss_terms said of the backward to come
            self._stale = True

    def discard(self) -> None:
        """Forget everything captured and stated since the last step. Also runs inside backward."""
        for watch in self._watches:
            watch.discard()
        self._forget_calls()

    def _forget_calls(self) -> None:
        for call in self._open:
            call.release()
        self._open.clear()
        self._number += 1
        self._counted, self._stated, self._rootless, self._stale = 0, None, False, False

    def _current_root(self) -> RootCall | None:
        if self._roots:
            return self._roots[-1]
        recomputing = torch._C._current_graph_task_id() != -1
        return self._backward_root if recomputing else None

    def _count(self, root: RootCall | None) -> None:
        if root is None or root.terms is None:
            self._rootless = True
        elif root.counted_in != self._number:
            root.counted_in = self._number
            # A model that gets a single example without a batch dimension hands none to its layers.
            single = self.rule in _BY_INPUT and root.unbatched and not root.batched
            self._counted += 1 if single else root.terms


class ForwardCall:
    """Tensor hook on one output of a layer: commits the call when a backward reaches the weight."""

    __slots__ = ("_committed", "_gradient", "_input", "_root", "_training", "_version", "_watch", "_window")

    def __init__(
        self, window: CaptureWindow, watch: LayerWatch, root: RootCall | None, layer_input: Tensor, training: bool
    ) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)
        self._root = root
        self._input: Tensor | None = layer_input.detach()
        self._version = _version(layer_input)
        self._gradient: Tensor | None = None
        self._committed = False
        self._training = training

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> None:
        window, watch = self._window(), self._watch()
        if window is None or watch is None or not window.listening or not _reaches(watch.weight):
            return
        gradient = gradient.detach()
        if not self._committed:
            if window._stale:
                window.discard()
            layer_input, self._input = self._input, None
            self._committed = True
            if layer_input is None or _version(layer_input) != self._version:
                window.dropped_calls += 1
                return
            call = LayerCall(layer_input, gradient, training=self._training)
            window._open.append(self)
        elif self._gradient is not None:
            window._stale = False
            call = LayerCall(None, self._gradient + gradient, self._gradient, self._training)
        else:
            return  # the call was counted in a window that has closed
        window._count(self._root)
        self._gradient = call.gradient
        with torch.profiler.record_function("kfac.statistics"):
            watch.emit(call)

    def release(self) -> None:
        self._gradient = None


def _version(tensor: Tensor) -> int:
    """Counts the changes in place; inference tensors allow none and have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def _reaches(weight: nn.Parameter) -> bool:
    """Whether the backward that is running accumulates into `weight.grad`."""
    if not weight.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        # Private, but the only way to ask; torch's own checkpointing and FSDP rely on it.
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad(loss, weights): nothing is accumulated
        return False
    return reached


class _LayerHook:
    __slots__ = ("_watch", "_window")

    def __init__(self, window: CaptureWindow, watch: LayerWatch) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window, watch = self._window(), self._watch()
        if window is None or watch is None:
            return
        if not torch.is_grad_enabled():
            if window._roots:
                window._roots[-1].recomputes = True  # or is evaluated; see [Note: recomputed layers]
            return
        if not isinstance(output, Tensor) or is_parametrized(module):
            return
        layer_input = _first_tensor(args, kwargs)
        if layer_input is not None:
            window.note(watch, layer_input, output, training=module.training)


class _RootHooks:
    def __init__(self, window: CaptureWindow) -> None:
        self._window = weakref.ref(window)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        window = self._window()
        if window is not None:
            # A model that calls itself is one forward: the outermost counts.
            window._roots.append(window._roots[-1] if window._roots else RootCall())

    def leave(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window = self._window()
        if window is None or not window._roots:
            return
        root = window._roots.pop()
        by_input = window.rule in _BY_INPUT
        tensor = _first_tensor(args, kwargs) if by_input else _first_tensor(output)
        if tensor is None:
            root.terms = None
        elif by_input:
            root.terms = tensor.shape[0]
        elif window.rule is LossTerms.POSITIONS:
            root.terms = tensor.numel() // max(tensor.shape[-1], 1)
        else:
            root.terms = tensor.numel()
        if root.recomputes and torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(functools.partial(_enter_backward, self._window, root))  # type: ignore[no-untyped-call]


def _enter_backward(window_ref: "weakref.ref[CaptureWindow]", root: RootCall, _gradient: Tensor) -> None:
    if (window := window_ref()) is not None:
        window._backward_root = root


def _in_function_transform() -> bool:
    """Whether `torch.func` is at work (`grad`, `vmap`, …): its passes are not the training loop's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _first_tensor(*structures: Any) -> Tensor | None:
    """The first tensor with a dimension; a scalar in front of the batch (a time, a temperature) is not the batch."""
    return next((leaf for leaf in tree_leaves(structures) if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


class PicklableHook:
    """A module hook that neither pickles nor copies what it calls."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert_hook, ()


def _do_nothing(*args: Any) -> None:
    pass


def _inert_hook() -> Callable[..., None]:
    return _do_nothing
