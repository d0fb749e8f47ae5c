"""The capture window: what hooks on the model and its layers note in forwards, to be committed in backwards.

A forward hook on the layer notes its input and sets a tensor hook on its *output*; the tensor hook commits, by the
rule of `calls.py`. (A module's full backward hook would break in-place activations and residual adds that follow the
layer.) In compiled graphs operators stand for both, see `graph_ops.py`, and tell the window.

[Note: hooks and their owner]
Modules hold hooks and hooks hold only weak references, so an optimizer that is dropped takes its statistics
along; a pickled or copied model carries inert hooks.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.capture.calls import ForwardCall, Ledger
from kfac_optim.capture.graph_calls import GraphCalls
from kfac_optim.capture.graph_walk import mark
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.listeners import ForwardKeeper, ForwardListener, TermObserver
from kfac_optim.capture.loss_terms import LossCount, RootCall
from kfac_optim.capture.model_calls import OutputPass, Roots, on_output_gradients, outputs_with_gradient
from kfac_optim.capture.scale_probe import ScaleProbe
from kfac_optim.capture.weight_uses import Noted
from kfac_optim.specs import LossTerms
from kfac_optim.utils.autograd import GradientEdge, edge, in_function_transform, no_view, on_gradient
from kfac_optim.utils.dynamo import traces_without_effects
from kfac_optim.utils.hooks import Handle, Idle, LayerHooks, ModeStack


class CaptureWindow(Ledger):
    """Holds everything captured between two optimizer steps: a ledger, and the hooks that fill it.

    Attributes:
        listener: hears of forwards while they run.
        roots: the forwards of the model.
        modes: the modes that forwards under way run in.
        capturing: whether graphs are to capture; they are traced once with it and once without.
        hooked_layers: a text that changes as layers get hooks or lose them: a graph that captures is then traced anew.
        idle: is on while a forward of the model runs whose layers have nothing to tell.
        scaled: whether a GradScaler was seen to scale the loss, by a number that only the step tells.
        probe: keeps two gradients, to find what they were multiplied by before the step.
        left_out: how many steps did not come because a scaler has found an overflow.
        estimate: is called after each forward of the model with the calls in it, the places where their gradients pass,
            and the output, by an estimate that backpropagates gradients of its own; None where those of the training
            loop count.
        recorder: keeps forwards that are to be run again; None where none are.
        terms: takes the terms of the loss that the training loop states; None where the loss is not named.
        aside: whether the optimizer itself runs a backward that can be differentiated; its products do not belong to
            the loss.
        terms_of: reads the terms of a named loss off what the model returned; None where the loss is not named.
        step: the number of the optimizer step, for those that draw random numbers.
        signs: returns the values of `maximize` that the layers' param groups have now. If all are True, the loss that
            is minimised is the negative of the backward's; if they differ, a term counts by its absolute value.
        source: the number of the process whose examples this one sees, also for those that draw random numbers.
        graphs: what compiled graphs tell.
        outside: is called as a layer runs outside of any forward of the model; None where nobody needs to know.
    """

    def __init__(self, rule: LossTerms) -> None:
        super().__init__(rule)
        self.call_nobody()
        self.roots = Roots()
        self.modes = ModeStack()
        self.capturing = self.aside = False
        self.idle = Idle()
        self.hooked_layers = "0"  # a text, as graphs take a number that has changed for one that may be any
        self.scaled = False
        self.probe = ScaleProbe()
        self.left_out = 0
        self.step = self.source = 0
        self.graphs = GraphCalls(self, self.roots, self.probe, self._forward_began_in_graph)
        self._offered = False
        self._hooks: list[LayerHooks] = []
        self._are_off = False

    def call_nobody(self) -> None:
        """Let go of all that hears of forwards."""
        self.listener = ForwardListener()
        self.estimate: Callable[[RootCall, Sequence[tuple[ForwardCall, GradientEdge]], Any], None] | None = None
        self.recorder: ForwardKeeper | None = None
        self.terms: TermObserver | None = None
        self.outside: Callable[[], None] | None = None
        self.terms_of: Callable[[Any], int | None] | None = None
        self.signs: Callable[[], set[bool]] = set

    def hooked(self) -> Collection[LayerHooks]:
        """Give the hooks that are put on layers now."""
        return frozenset(self._hooks)

    def catch_up(self, module: nn.Module, args: tuple[Any, ...], known: Collection[LayerHooks] = ()) -> None:
        """Call the hooks, but for `known`, that were put on a module whose forward has begun."""
        for layer in self._hooks:
            if layer not in known:
                layer.begin(module, args)

    def hook(self, module: nn.Module, after: Callable[..., Any], before: Callable[..., None] | None = None) -> Handle:
        """Call `before(module, args, kwargs)` and `after(module, args, kwargs, output)` around forwards of `module`.

        Where there is a `before`, `after` is called even if the forward raises. Neither is called within a forward of
        the model without gradients: torch's fast paths of evaluation are closed to modules with hooks. What `after`
        returns, unless it is None, takes the place of the output.
        """
        hooks = LayerHooks(self._hooks, module, before, after, self.idle)
        self._hooks.append(hooks)
        self.idle.on = False  # the layer may need the very forward that has just shown it
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
            layer_input: the input as `LayerCall.input` will hand it over.
            output: non-leaf, or a leaf that stands for it in the graph.
            examples: how many examples the layer was handed; None for a single one without a batch dimension.
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
                self.graphs.tape.trace(watch.number)
            number = self.graphs.tape.note(watch.number, training, -1 if examples is None else examples, context)
            self.graphs.tape.watch_used(number, layer_input.detach(), output)
            return None
        if not watch.wanted():
            return None
        self.begin_layer()
        call = ForwardCall(self, watch, self.roots.of_layer(examples), examples, layer_input, training, context)
        self.probe.listen()
        verifies = watch.awaits_gradient(self.shards)
        if self.estimate is None:
            on_gradient(output, call)
        else:
            at = edge(output)
            self.roots.expect(call, at)
            mark(at, call)
            if verifies:
                on_gradient(output, call.verification())
        return call

    def note_use(
        self,
        watch: LayerWatch,
        tensor: Tensor,
        root: RootCall | None,
        context: tuple[int, ...],
        *,
        examples: int | None,
        training: bool = True,
    ) -> Noted:
        """Note one of several uses of a weight, in a forward or in its derivatives, that is part of a graph already.

        Args:
            watch: the weight.
            tensor: what is multiplied by it, or by its transpose.
            root: the forward of the model that it is part of, or derived from.
            context: becomes `LayerCall.context`.
            examples: how many examples there are, as in `note`.
            training: whether the layer is in training mode.
        """
        if not watch.weight.requires_grad or not watch.wanted():
            return None, None
        self.begin_layer()
        if root is not None:
            root.note_examples(examples)
            if root.terms is None and self.rule is LossTerms.EXAMPLES:
                root.terms = examples  # `torch.vmap` hides the batch from the forward of the model
        call = ForwardCall(self, watch, root, examples, tensor, training, context, 0 if root is None else root.number)
        self.probe.listen()
        verifies = watch.awaits_gradient(self.shards)
        if self.estimate is None:
            return call, call
        return call, call.verification() if verifies else None

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
            What stands for `output` from now on.
        """
        output = no_view(output)
        if torch.compiler.is_compiling():
            if not watch.weight.requires_grad or not self.takes(output) or layer_input.is_nested:
                return output
            if watch.sharded is not None:
                self.graphs.tape.trace(watch.number)
            return self.note_in_graph(watch.number, layer_input, output, training, examples, context)
        self.note(watch, layer_input, output, examples=examples, training=training, context=context)
        return output

    def note_in_graph(  # pragma: traced
        self,
        watch: int,
        layer_input: Tensor,
        output: Tensor,
        training: bool,
        examples: int | None,
        context: tuple[int, ...],
    ) -> Tensor:
        """Do what `note_output` does for the watch of this number, in a forward that is being traced."""
        call = self.graphs.tape.note(watch, training, -1 if examples is None else examples, context)
        return self.graphs.tape.watch(call, layer_input.detach(), output)

    def takes(self, output: Tensor) -> bool:
        """Return whether a call with this output may count: it is part of a graph of the training loop's own."""
        if torch.compiler.is_compiling():
            return self.captures() and output.requires_grad
        return torch.is_grad_enabled() and output.requires_grad and not in_function_transform()

    def captures(self) -> bool:  # pragma: traced
        """Return whether the graph that is being traced is one that captures."""
        # To read the name is what has a graph that captures be traced anew where other layers have hooks.
        reads = self.capturing and torch.is_grad_enabled() and self.hooked_layers != ""
        return reads and not traces_without_effects()

    def close(self) -> LossCount:
        count = super().close()
        self._end()
        return count

    def discard(self) -> None:
        super().discard()
        self.probe.forget()

    def abandon(self) -> None:
        """End the window as if nothing had been captured in it."""
        self.discard()
        self._end()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Return a context in which forwards and backwards of the model leave nothing behind."""
        estimate, listening = self.estimate, self.listening
        self.estimate, self.listening = None, False
        try:
            yield
        finally:
            self.estimate, self.listening = estimate, listening
            self.abandon()
            self.probe.end()

    def offer_step(self) -> None:
        """Note that a GradScaler begins a step, which does not come if the scaler finds an overflow."""
        self._offered = True

    def take_step(self) -> None:
        """Note that a step has come, whoever has begun it."""
        self._offered = False

    def set_loss_terms(self, terms: float | Tensor) -> None:
        self._notice_missing_step()  # whose end would take with it what is said of the next
        super().set_loss_terms(terms)

    def mark_stale(self) -> None:
        self._notice_missing_step()  # graphs without statistics tell of no forward
        # An interrupted forward (KeyboardInterrupt) leaves its own behind.
        self.roots.leave_all()
        self.modes.leave()
        self.idle.on = False
        self.graphs.renew_nodes(self._watches)
        if self.recorder is not None:
            self.recorder.drop()
        super().mark_stale()

    def begin_layer(self) -> None:
        """Note that a layer runs; outside of any forward of the model it is what shows that gradients are gone."""
        if not (self.roots.is_under_way() or self._stale or self.modes):
            self.notice_what_is_gone()

    def begin_forward(self) -> None:
        """Note that the model's outermost forward begins."""
        self.outside = None
        self.notice_what_is_gone()
        self.modes.leave()
        if torch.is_grad_enabled():
            self._put_hooks_on()
        else:
            self._are_off = True
            for hooks in self._hooks:
                hooks.off()
        mode = self.listener.mode
        if mode is not None and torch.is_grad_enabled():
            self.capturing = self.listener.begin_forward()  # also for parts of the model that are compiled
            self.idle.on = not self.capturing
            if not self.idle.on:
                self.modes.enter(mode)

    def _put_hooks_on(self) -> None:
        if self._are_off:
            self._are_off = False
            for hooks in self._hooks:
                hooks.on()

    def _forward_began_in_graph(self, nested: bool) -> None:
        if not nested:
            self.notice_what_is_gone()
        self.listener.look()

    def await_terms(self, root: RootCall, output: Any) -> None:
        """Count terms when a backward comes to the model's output, where those of ordinary steps count as well."""
        if self.tally.counts_always and root.terms is not None and torch.is_grad_enabled():
            on_output_gradients(output, OutputPass(self, root))

    def await_terms_in_graph(self, model: int, terms: int | None, output: Any) -> None:  # pragma: traced
        """Do what `await_terms` does for a forward that is being traced."""
        if terms is not None and not traces_without_effects():
            call = self.graphs.tape.run(model, terms)
            for tensor in outputs_with_gradient(output):
                self.graphs.tape.watch_used(call, call, tensor)

    def end_forward(self) -> None:
        """Note that the model's outermost forward ends, whether or not it failed."""
        self.modes.leave()
        self.idle.on = False
        self._put_hooks_on()

    def notice_what_is_gone(self) -> None:
        """Forget what was captured for a step that a GradScaler has left out, or whose gradients were dropped since."""
        self._notice_missing_step()
        self.notice_lost_gradients()

    def _notice_missing_step(self) -> None:
        if self._offered:
            self._offered = False
            self.left_out += 1
            self.abandon()

    def _end(self) -> None:
        self._offered = False  # Lightning asks as if a scaler did, after the step has begun
        self.roots.end()
        self.modes.leave()
        self.idle.on = False
        self.graphs.end(self._watches)
