"""The capture window: what hooks on the model and its layers note in forwards, to be committed in backwards.

A forward hook on the layer notes its input and sets a tensor hook on its *output*; the tensor hook commits, by the
rule of `calls.py`. (A module's full backward hook would break in-place activations and residual adds that follow the
layer.) In compiled graphs operators stand for both, see `compiled.py`, and tell the window.

[Note: hooks and their owner]
Modules hold hooks and hooks hold only weak references, so an optimizer that is dropped takes its statistics
along; a pickled or copied model carries inert hooks.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from kfac_optim.capture.calls import ForwardCall, LayerWatch, Ledger
from kfac_optim.capture.graph_ops import Tape
from kfac_optim.capture.loss_terms import LossCount, RootCall, examples_of, first_tensor, read_terms
from kfac_optim.capture.model_calls import OutputPass, Roots, on_output_gradients, outputs_with_gradient
from kfac_optim.capture.scale_probe import ScaleProbe
from kfac_optim.specs import LossTerms
from kfac_optim.utils.autograd import GradientEdge, accumulator, edge, in_function_transform, no_view, on_gradient
from kfac_optim.utils.hooks import Handle, Handles, LayerHooks, ModeStack, PicklableHook, is_on

# Of calls in graphs that are kept between two steps; some hundred forwards of a large model.
_MOST_CALLS = 20_000


_NO_MODE = BaseTorchFunctionMode()


class Recorder(Protocol):
    """Keeps forwards of the model."""

    def begin(self, model: nn.Module) -> None:
        """The outermost begins."""

    def end(self, root: RootCall, model: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """It has ended, without an output where it failed."""

    def drop(self) -> None:
        """The gradients through those kept so far were thrown away, or used."""


class CaptureWindow(Ledger):
    """Everything captured between two optimizer steps: a ledger, and the hooks that fill it.

    Attributes:
        mode: that forwards of the model run in, where it is wanted and in graphs that capture.
        mode_wanted: asked before each forward of the model that does not run in a graph.
        graph_began: told of each that does, where the graph captures.
        module_ran: told, within that mode, of a module whose forward is a product with this weight; whether the mode
            notes it.
        layer_ran: told, within that mode, of any other module with this weight.
        roots: forwards of the model.
        modes: those that forwards under way run in.
        capturing: whether graphs are to capture: they are traced once with it and once without.
        scaled: whether a GradScaler was seen to scale the loss, by a number that only the step tells.
        probe: keeps a gradient, to tell what becomes of it before the step.
        offered: whether a GradScaler has begun a step that has not come yet.
        left_out: steps that did not come, as the scaler has found an overflow, ever.
        estimate: told of each forward of the model that has ended, with the calls in it, the places where their
            gradients pass and the output, by an estimate that backpropagates gradients of its own. None where those of
            the training loop count.
        recorder: told of each forward of the model, where forwards are to be run again.
        step: number of the optimizer step, for those that draw random numbers.
        worker: number of this process among those that train the model, likewise.
        tape: what compiled graphs hold of the window.
    """

    def __init__(self, rule: LossTerms) -> None:
        super().__init__(rule)
        self.call_nobody()
        self.roots = Roots()
        self.modes = ModeStack()
        self.capturing = False
        self.scaled = False
        self.probe = ScaleProbe()
        self.offered = False
        self.left_out = 0
        self._in_operator = False
        self.step = self.worker = 0
        self.tape = Tape(self)
        self._hooks: list[LayerHooks] = []
        self._traced: dict[int, ForwardCall | OutputPass] = {}
        self._traced_before: dict[int, ForwardCall | OutputPass] = {}
        self._calls = itertools.count()

    def call_nobody(self) -> None:
        """Let go of all that is told or asked of forwards."""
        self.mode: TorchFunctionMode | None = None
        self.mode_wanted: Callable[[], bool] = lambda: False
        self.graph_began: Callable[[], None] = lambda: None
        self.module_ran: Callable[[nn.Parameter], bool] = lambda _: False
        self.layer_ran: Callable[[nn.Parameter], None] = lambda _: None
        self.estimate: Callable[[RootCall, Sequence[tuple[ForwardCall, GradientEdge]], Any], None] | None = None
        self.recorder: Recorder | None = None

    def watch_root(self, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> Handle:
        """Read the number of loss terms off every forward of `model`, and off one under way with these arguments."""
        if isinstance(model, torch.jit.ScriptModule):  # which takes no hooks, and has no layer to listen to
            return Handles()
        hooks = _RootHooks(self, model)
        handle = Handles(
            model.register_forward_pre_hook(PicklableHook(hooks.enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(PicklableHook(hooks.leave), with_kwargs=True, always_call=True),
        )
        if args_under_way is not None:
            hooks.enter(model, args_under_way, {})
            self.catch_up(model, args_under_way)
        return handle

    def hooked(self) -> Collection[LayerHooks]:
        """Give the hooks that are put on layers now."""
        return frozenset(self._hooks)

    def catch_up(self, module: nn.Module, args: tuple[Any, ...], known: Collection[LayerHooks] = ()) -> None:
        """Hooks but those `known` were put on a module whose forward has begun, when torch has listed those to call."""
        for layer in self._hooks:
            if layer not in known:
                layer.begin(module, args)

    def watch_layer(
        self, module: nn.Module, watch: LayerWatch, *, unbatched_ndim: int = -1, is_product: bool = False
    ) -> Handle:
        """Note the calls of `module`, whose output is one tensor, and take those that a backward reaches.

        Args:
            module: the layer.
            watch: what is asked of it.
            unbatched_ndim: dimensions of an input without a batch dimension.
            is_product: whether its forward is a product with its weight, which the window's mode may see.
        """
        hook = _LayerHook(self, module, watch, unbatched_ndim, is_product)
        return Handles(self.watch_calls(watch), self.hook(module, hook))

    def hook(self, module: nn.Module, after: Callable[..., Any], before: Callable[..., None] | None = None) -> Handle:
        """Call `before(module, args, kwargs)` and `after(module, args, kwargs, output)` around forwards of `module`.

        Where there is a `before`, `after` is called even if the forward raises. Neither is called within a forward of
        the model without gradients: torch's fast paths of evaluation are closed to modules with hooks. What `after`
        returns, unless it is None, takes the place of the output.
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
        examples: int | None,
        training: bool = True,
        context: tuple[int, ...] = (),
    ) -> ForwardCall | None:
        """Note in a forward that `output` came of `layer_input` and `watch.used`; commit when a backward reaches both.

        Args:
            watch: the layer.
            layer_input: as `LayerCall.input` will hand it over.
            output: non-leaf, or a leaf that stands for it in the graph.
            examples: that the layer was handed; None for a single one without a batch dimension.
            training: whether the layer is in training mode.
            context: becomes `LayerCall.context`.

        Returns:
            The call, whose context may still be changed; None where it does not count, or is being traced.
        """
        if not watch.weight.requires_grad or not self.takes(output):
            return None
        if torch.compiler.is_compiling():
            if layer_input.is_nested:
                return None
            if watch.sharded is not None:
                self.tape.trace(watch.number)
            number = self.tape.note(watch.number, training, -1 if examples is None else examples, context)
            self.tape.watch_used(number, layer_input.detach(), output)
            return None
        if not watch.wanted():
            return None
        call = ForwardCall(self, watch, self.roots.of_layer(examples), examples, layer_input, training, context)
        self.probe.listen()
        verifies = watch.awaits_gradient(self.shards)
        if self.estimate is None:
            on_gradient(output, call)
        else:
            self.roots.expect(call, edge(output))
            if verifies:
                on_gradient(output, call.verification())
        return call

    def note_output(
        self,
        watch: LayerWatch,
        layer_input: Tensor,
        output: Tensor,
        *,
        examples: int | None,
        training: bool = True,
        context: tuple[int, ...] = (),
    ) -> Tensor:
        """Note a call as `note` does, with an `output` that nothing was made of yet.

        Returns:
            What is to be used in the place of `output` from now on.
        """
        output = no_view(output)
        if not torch.compiler.is_compiling():
            self.note(watch, layer_input, output, examples=examples, training=training, context=context)
            return output
        if not watch.weight.requires_grad or not self.takes(output) or layer_input.is_nested:
            return output
        if watch.sharded is not None:
            self.tape.trace(watch.number)
        return self.note_in_graph(watch.number, layer_input, output, training, examples, context)

    def note_in_graph(
        self,
        watch: int,
        layer_input: Tensor,
        output: Tensor,
        training: bool,
        examples: int | None,
        context: tuple[int, ...],
    ) -> Tensor:
        """`note_output` for the watch of this number, in a forward that is being traced."""
        call = self.tape.note(watch, training, -1 if examples is None else examples, context)
        return self.tape.watch(call, layer_input.detach(), output)

    def takes(self, output: Tensor) -> bool:
        """Whether a call with this output may count: it is part of a graph of the training loop's own."""
        if torch.compiler.is_compiling():
            return self.captures() and output.requires_grad
        return torch.is_grad_enabled() and output.requires_grad and not in_function_transform()

    def captures(self) -> bool:
        """Whether the graph that is being traced is one that captures."""
        return self.capturing and self.estimate is None and torch.is_grad_enabled()

    def close(self) -> LossCount:
        count = super().close()
        self._end()
        return count

    def abandon(self) -> None:
        """End the window as if nothing had been captured in it."""
        self.discard()
        self._end()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context in which forwards and backwards of the model leave nothing behind."""
        estimate, listening = self.estimate, self.listening
        self.estimate, self.listening = None, False
        try:
            yield
        finally:
            self.estimate, self.listening = estimate, listening
            self.abandon()

    def mark_stale(self) -> None:
        # An interrupted forward (KeyboardInterrupt) leaves its own behind.
        self.roots.leave_all()
        self.modes.leave()
        self._renew_nodes()
        if self.recorder is not None:
            self.recorder.drop()
        super().mark_stale()

    def begin_forward(self) -> None:
        """The model's outermost forward begins."""
        self._notice_what_is_gone()
        self.modes.leave()
        for hooks in self._hooks:
            if torch.is_grad_enabled():
                hooks.on()
            else:
                hooks.off()
        if self.mode is not None and torch.is_grad_enabled() and self.mode_wanted():
            self.modes.enter(self.mode)

    def await_sum(self, root: RootCall, output: Any) -> None:
        """Count the terms of a summed loss when a backward comes to the model's output, also on ordinary steps."""
        if self.loss_is_sum and root.terms is not None and torch.is_grad_enabled():
            on_output_gradients(output, OutputPass(self, root))

    def await_sum_in_graph(self, model: int, terms: int | None, output: Any) -> None:
        """`await_sum` for a forward that is being traced."""
        if terms is not None:
            call = self.tape.run(model, terms)
            for tensor in outputs_with_gradient(output):
                self.tape.watch_used(call, call, tensor)

    def end_forward(self) -> None:
        """The model's outermost forward ends, whether or not it failed."""
        self.modes.leave()
        for hooks in self._hooks:
            hooks.on()

    # -- told by compiled graphs -------------------------------------------------------------------------------

    def begin_call(self, model: int, nested: bool) -> None:
        if not nested:
            self._in_operator = True
            self._notice_what_is_gone()
            self._in_operator = False
            self.roots.leave_all()  # a graph that raised has left its own behind
        self.graph_began()
        self.roots.enter(model)

    def end_call(self, terms: int) -> None:
        if (root := self.roots.leave()) is not None:
            root.terms = None if terms < 0 else terms

    def run_call(self, model: int, terms: int) -> int:
        root = RootCall(model)
        root.terms = terms
        return self._keep(OutputPass(self, root))

    def trace_call(self, watch: int) -> None:
        # What stands for a sharded weight may not have been there when the watch was set up.
        for each in self._watches:
            if each.number == watch:
                each.node = accumulator(each.used) or each.node

    def note_call(self, watch: int, training: bool, examples: int, context: tuple[int, ...]) -> int:
        found = next((each for each in self._watches if each.number == watch), None)
        if found is None or not found.wanted():
            return -1
        self.probe.listen()
        found.awaits_gradient(self.shards)
        handed = None if examples < 0 else examples
        root = self.roots.of_layer(handed) or self.roots.of_graph_within_backward()
        return self._keep(ForwardCall(self, found, root, handed, None, training, context))

    def _keep(self, call: ForwardCall | OutputPass) -> int:
        """Keep what a graph has told of until its backward; the number by which that asks for it."""
        number = next(self._calls)
        self._traced[number] = call
        if len(self._traced) > _MOST_CALLS:  # forwards that no step follows
            del self._traced[next(iter(self._traced))]
        return number

    def commit_call(self, call: int, layer_input: Tensor, gradient: Tensor) -> None:
        noted = self._traced.get(call) or self._traced_before.get(call)
        if noted is not None:
            noted(gradient, layer_input)

    # ----------------------------------------------------------------------------------------------------------

    def _notice_what_is_gone(self) -> None:
        """Forget what was captured for a step that a GradScaler has left out, or whose gradients were dropped since."""
        if self.offered:
            self.offered = False
            self.left_out += 1
            self.abandon()
        self.notice_lost_gradients()

    def _end(self) -> None:
        self.roots.end()
        self.modes.leave()
        # Graphs do not hold their calls, as eager ones do: a backward may come as late as the next step.
        self._traced, self._traced_before = {}, self._traced
        self._renew_nodes()

    def _renew_nodes(self) -> None:
        """Operators of graphs cannot ask for these themselves; a model that is moved gets others."""
        if not self._in_operator and (self._traced or self._traced_before):
            for watch in self._watches:
                watch.node = accumulator(watch.used) or watch.node  # a frozen weight has none


class _LayerHook:
    __slots__ = ("_is_product", "_name", "_unbatched_ndim", "_watch", "_window")

    def __init__(
        self, window: CaptureWindow, module: nn.Module, watch: LayerWatch, unbatched_ndim: int, is_product: bool
    ) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)
        self._name = next((name for name, param in module._parameters.items() if param is watch.weight), None)
        self._unbatched_ndim = unbatched_ndim
        self._is_product = is_product

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Tensor | None:
        window, watch = self._window(), self._watch()
        if window is None or watch is None:
            return None
        if torch.compiler.is_compiling() and not window.captures():
            return None
        if not torch.is_grad_enabled():
            window.roots.layer_without_graph()
            return None
        in_mode = is_on(window.mode)
        if not (in_mode or torch.compiler.is_compiling() or watch.wanted()):
            return None
        if not isinstance(output, Tensor) or is_parametrized(module):
            return None
        if self._name is not None and module._parameters.get(self._name) is not watch.used:
            return None  # torch.func.functional_call runs the module with something else for its weight
        if in_mode:
            if not self._is_product:
                window.layer_ran(watch.weight)
            elif window.module_ran(watch.weight):
                return None
        layer_input = first_tensor(args, kwargs, least_ndim=0 if self._unbatched_ndim == 0 else 1)
        if layer_input is None:
            return None
        examples = examples_of(layer_input, self._unbatched_ndim)
        return window.note_output(watch, layer_input, output, examples=examples, training=module.training)


class _RootHooks:
    def __init__(self, window: CaptureWindow, model: nn.Module) -> None:
        self._window = weakref.ref(window)
        self._number = id(model)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if window.captures():
                nested = is_on(window.mode)
                window.tape.begin(self._number, nested)
                # A model that calls itself must not leave the mode that its outermost call has entered.
                mode = _NO_MODE if nested or window.mode is None else window.mode
                mode.__enter__()  # type: ignore[no-untyped-call]
        elif window is not None:
            window.roots.leave_interrupted(model)
            if not window.roots.is_under_way():
                window.begin_forward()
                if window.recorder is not None:
                    window.recorder.begin(model)
            window.roots.enter(id(model))

    def leave(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if window.captures():
                _NO_MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # whichever it is
                terms = read_terms(window.rule, (args, kwargs), output)
                window.tape.end(-1 if terms is None else terms)
            elif window.loss_is_sum and window.estimate is None and torch.is_grad_enabled():
                window.await_sum_in_graph(self._number, read_terms(window.rule, (args, kwargs), output), output)
            return
        if window is None or (root := window.roots.leave()) is None:
            return
        if not window.roots.is_under_way():
            window.end_forward()
            if window.recorder is not None:
                window.recorder.end(root, model, args, kwargs, output)
            if window.estimate is not None:
                window.estimate(root, window.roots.take_expected(), output)
                window.await_sum(root, output)
                return
        root.terms = read_terms(window.rule, (args, kwargs), output)
        window.await_sum(root, output)
        if root.recomputes and torch.is_grad_enabled():
            window.roots.await_backward(root, output)
