"""When a forward call of a layer becomes statistics, and what one step has of them.

[Note: the commit rule]
A forward call counts its rows once, however many backwards it gets; a forward without a backward counts
nothing; a backward that does not reach the layer's weight (`autograd.grad` with respect to inputs, the inner
pass of a gradient penalty) counts nothing. So evaluation, `no_grad` and recomputed forwards leave no trace.
When one forward gets several backwards before the step, the losses add up, and so do their gradients: the
call's gradient is the running sum, and what was counted for the earlier sum is taken back.

[Note: the lifetime of a call]
A `ForwardCall` is held by the hook on the layer's output, thus by the graph: a forward that never gets a
backward is freed with it. It drops the input as soon as it has committed, and takes no hold of the gradient: that would
have a step's memory grow by all output gradients. Only where the graph is retained, so that another backward may come,
it keeps the gradient, and the input where its statistics need that, until the window closes in `step()`. Compiled
graphs hand the input over with the gradient and hold no call: the window does, for two steps, see `graph_calls.py`.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.capture.layer_watch import LayerWatch, WatchHandle
from kfac_optim.capture.loss_terms import LossCount, LossTally, RootCall
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.second_moments import without_ragged
from kfac_optim.factors.whole_calls import whole_call
from kfac_optim.specs import LossTerms
from kfac_optim.utils.autograd import (
    accumulator,
    graph_is_kept,
    in_backward,
    profiled,
    reaches,
    running_backward,
    version,
)
from kfac_optim.utils.hooks import Handle
from kfac_optim.utils.precision import without_autocast
from kfac_optim.utils.sharded_params import Shards


class Drawn(NamedTuple):
    """Says where a gradient comes from that an estimate hands over; the fields are those of `LayerCall`."""

    term: int = 0
    column: int = 0
    examples: int | None = None
    residual: Tensor | None = None
    told_apart: bool = True
    rounding: float = 0.0


class Ledger:
    """Keeps the calls that backwards have committed since the last step, and the terms of their loss.

    Attributes:
        rule: what the mean in the loss runs over.
        listening: whether backward passes count; an estimate says which do.
        dropped_calls: calls whose input was changed in place before the backward, and backwards that came back through
            a graph that was not retained, ever.
        shards: parameters that are kept in shards.
        tally: the terms of the loss since the last step.
    """

    def __init__(self, rule: LossTerms) -> None:
        self.rule = rule
        self.listening = False
        self.dropped_calls = 0
        self.shards = Shards()
        self._watches: list[LayerWatch] = []
        self._removed: list[LayerWatch] = []  # since the last step, which may yet forget what these have emitted
        self._open: list[ForwardCall] = []
        self.tally = LossTally(rule)
        self._stale = False

    def watch_calls(self, watch: LayerWatch) -> Handle:
        """Take the calls of a layer whose adapter notes them."""
        self._watches.append(watch)
        watch.sharded = self.shards.of(watch.weight)
        watch.weight = self.shards.known(watch.weight)
        watch.node = accumulator(watch.used)
        return WatchHandle(self._watches, watch, self._removed)

    def watch_of(self, number: int) -> LayerWatch | None:
        """Return the watch that compiled graphs know by this number, if it still is there."""
        return next((each for each in self._watches if each.number == number), None)

    def set_loss_terms(self, terms: float | Tensor) -> None:
        """State the loss terms of the coming backward; counting is off until the window closes."""
        self.drop_stale()
        self.tally.state(terms)

    def close(self) -> LossCount:
        """End the window and count the loss terms in it."""
        self.drop_stale()
        count = self.tally.result()
        self._forget_calls()
        self.tally.criterion.restart()
        return count

    def so_far(self) -> LossCount | None:
        """Return the terms as if the step came now; None if further layers may show others, or another stage tell."""
        count = self.tally.result()
        return None if count.assumed or self.tally.awaits_told() else count

    def pass_through(self, root: RootCall, *, in_graph: bool) -> None:
        """Note that a backward goes through the output of a forward of the model, whose layers may not be captured.

        Args:
            root: the forward.
            in_graph: whether an operator of a compiled graph says so.
        """
        if not self.listening:
            return
        if not self.is_reached(in_graph=in_graph):
            return
        self.count(root)

    def count(self, root: RootCall) -> None:
        """Count the terms of a forward that a backward comes to, and forget those of gradients that are gone."""
        self.go_on(root)
        self.tally.count(root)

    def go_on(self, root: RootCall | None) -> None:
        """Forget what belongs to gradients that were thrown away, unless a backward goes on through that forward."""
        if self._stale and not (root is not None and self.tally.has_counted(root)):
            self.discard()
        self._stale = False

    def is_reached(self, *, in_graph: bool = False) -> bool:
        """Return whether the backward that is running accumulates into a weight; `in_graph` as of `pass_through`."""
        return any(reaches(watch.used, watch.node if in_graph else None) for watch in self._watches)

    def keep(self, calls: Iterable["ForwardCall"]) -> None:
        """Keep calls that are committed, as a backward goes on through their forward."""
        if any(call in self._open for call in calls):
            self._stale = False

    def mark_stale(self) -> None:
        """Forget the statistics so far when the next forward call counts, as their gradients were thrown away.

        Not at once: further backwards through the same forward go on from the same running sum, as when several
        losses are backpropagated one by one and their gradients combined by hand.
        """
        self.tally.criterion.drop()
        if self._open or self.tally.has_counted():
            self._stale = True
        else:  # what set_loss_terms has said may be about the backward to come
            self.tally.supersede()

    def notice_lost_gradients(self) -> None:
        """Notice, as a forward begins, that gradients are gone: they were thrown away, though nobody has said so.

        So it is after `model.zero_grad()`, as where a `GradScaler` has left a step out.
        """
        if in_backward() or not (self._open or self.tally.has_counted()):
            return
        # On a step without statistics terms may be counted, and no layer says that it had a gradient.
        watches = [call._watch() for call in self._open] if self._open else self._watches
        if all(watch is not None and watch.has_lost_gradient() for watch in watches):
            self.mark_stale()

    def is_stale(self) -> bool:
        """Return whether what was captured belongs to gradients that were thrown away."""
        return self._stale

    def drop_stale(self) -> None:
        """Drop, as the step has come, what belongs to gradients that were thrown away."""
        if self._stale:
            self.discard()

    def discard(self) -> None:
        """Forget everything captured and stated since the last step. Also runs inside backward."""
        for watch in (*self._watches, *self._removed):
            watch.discard()
        self._forget_calls()

    def _forget_calls(self) -> None:
        for call in self._open:
            call.release()
        self._open.clear()
        self._removed.clear()
        self.tally.reset()
        self._stale = False


class ForwardCall:
    """Is called as a hook on one output of a layer, and commits the call when a backward reaches the weight.

    Args:
        ledger: the ledger that the call may come to stand in; held weakly, as is `watch`.
        watch: the layer.
        root: the forward of the model that it is part of; None outside of any.
        examples: how many examples the layer was handed; None for a single one without a batch dimension.
        layer_input: None in a compiled graph, which hands it over with each gradient; `open` takes it as well then.
        training: whether the layer is in training mode; `context` and `term` are those of `LayerCall`.
    """

    __slots__ = (
        *("_committed", "_examples", "_gradient", "_input", "_is_for_check", "_ledger", "_made_in"),
        *("_root", "_training", "_version", "_watch", "context", "term"),
    )

    def __init__(
        self,
        ledger: Ledger,
        watch: LayerWatch,
        root: RootCall | None,
        examples: int | None,
        layer_input: Tensor | None,
        training: bool,
        context: tuple[int, ...],
        term: int = 0,
    ) -> None:
        self._ledger: Callable[[], Ledger | None] = weakref.ref(ledger)
        self._watch = weakref.ref(watch)
        self._root = root
        self._made_in = running_backward()
        self._examples = examples
        self._input = None if layer_input is None else layer_input.detach()
        self._version = 0 if layer_input is None else version(layer_input)
        self._gradient: Tensor | None = None
        self._committed = self._is_for_check = False
        self._training = training
        self.context = context
        self.term = term

    @torch.no_grad()
    def __call__(self, gradient: Tensor, layer_input: Tensor | None = None) -> None:
        ledger, watch, traced = self._ledger(), self._watch(), layer_input is not None
        if ledger is None or watch is None or not ledger.listening:
            return
        if not reaches(watch.used, watch.node if traced else None):
            return
        if self._committed and self._gradient is None:
            # The call was counted in a window that has closed, or in a backward that was to be the last: only a layer
            # that had autograd save nothing for it sees another.
            ledger.dropped_calls += self in ledger._open
            watch.verify(None)
            return
        if not self._committed:
            ledger.go_on(self._root)
        if not traced:
            layer_input, self._input = self._input, None
            if layer_input is not None and version(layer_input) != self._version:
                self._committed = True
                ledger.dropped_calls += 1
                watch.verify(None)
                return
        layer_input, gradient = without_ragged(layer_input), without_ragged(gradient.detach())
        earlier = self._gradient
        verifies = watch.awaits_gradient(ledger.shards)
        if verifies:
            self._verify(watch, layer_input, gradient, in_operator=traced)
        if earlier is not None:
            gradient = earlier + gradient
            ledger._stale = False
        if not self._committed:
            self._committed = True
            ledger._open.append(self)
        kept = graph_is_kept()
        # A graph uses the memory of what it has handed over for something else.
        self._gradient = None if not kept else gradient.clone() if traced else gradient
        counted = self._examples, gradient.shape, running_backward(), self._made_in
        self._root = ledger.tally.count_layer(id(watch.weight), self._root, *counted)
        with without_autocast((gradient.device.type,)), profiled("kfac.statistics"):
            shown = None if self._is_for_check else layer_input
            call = LayerCall(shown, gradient, earlier, self._training, self.context, term=self.term, is_last=not kept)
            keep = watch.emit(whole_call(call, watch.used))
        if (keep or verifies) and kept and not traced:
            # Statistics that did not ask for the input are what they are without the check.
            self._input, self._is_for_check = layer_input, not keep

    def _verify(self, watch: LayerWatch, layer_input: Tensor | None, gradient: Tensor, *, in_operator: bool) -> None:
        call = None
        if layer_input is not None:
            call = LayerCall(layer_input, gradient, None, self._training, self.context, in_operator)
            call = whole_call(call, watch.used)
        with without_autocast((gradient.device.type,)):
            watch.verify(call)

    def verification(self) -> "Callable[[Tensor], None]":
        """Return a hook on the output that hands over the training loop's own gradients, where others are committed."""
        layer_input, version_then = self._input, self._version

        def verify(gradient: Tensor) -> None:
            same = layer_input is not None and version(layer_input) == version_then
            self.pass_by(gradient, layer_input if same else None, in_operator=False)

        return verify

    @torch.no_grad()
    def pass_by(self, gradient: Tensor, layer_input: Tensor | None, *, in_operator: bool) -> None:
        """Hand over a gradient of the training loop's own, which does not count but is to be checked."""
        ledger, watch = self._ledger(), self._watch()
        if ledger is None or watch is None or not ledger.listening:
            return
        if not reaches(watch.used, watch.node if in_operator else None):
            return
        if in_operator and self._root is not None:
            ledger.tally.pass_by(self._root)
        if watch.awaits_gradient(ledger.shards):
            layer_input, gradient = without_ragged(layer_input), without_ragged(gradient.detach())
            self._verify(watch, layer_input, gradient, in_operator=in_operator)

    @property
    def root(self) -> RootCall | None:
        """Return the forward of the model that the call is part of; None outside of any."""
        return self._root

    def is_of(self, ledger: Ledger) -> bool:
        """Return whether the call would stand in this ledger."""
        return self._ledger() is ledger

    def batch(self) -> int | None:
        """Return the first dimension of the layer's input; where that is gone, the examples that it was handed."""
        return self._examples if self._input is None else next(iter(self._input.shape), None)

    def is_reached(self) -> bool:
        """Return whether the backward that is running accumulates into the layer's weight."""
        watch = self._watch()
        return watch is not None and reaches(watch.used)

    def open(self, layer_input: Tensor | None = None) -> bool:
        """Commit the call, whose gradients an estimate will hand over; whether it counts, or does already."""
        if layer_input is not None:
            self._input, self._version = layer_input, version(layer_input)
        if (ledger := self._ledger()) is None or self._input is None:
            return False
        if self._committed:
            return True
        if version(self._input) != self._version:
            self._committed, self._input = True, None
            ledger.dropped_calls += 1
            return False
        if ledger._stale:
            ledger.discard()
        self._committed = True
        ledger._open.append(self)
        if self._root is not None:
            ledger.tally.count(self._root)
        return True

    @torch.no_grad()
    def take(self, gradient: Tensor, reach: Tensor | None, drawn: "Drawn") -> None:
        """Take one of the gradients of an opened call, whose outer products add up; `reach` as in `LayerCall`."""
        watch = self._watch()
        if watch is not None:
            with without_autocast((gradient.device.type,)), profiled("kfac.statistics"):
                layer_input, gradient = without_ragged(self._input), without_ragged(gradient.detach())
                reach = without_ragged(reach)
                call = LayerCall(layer_input, gradient, None, self._training, self.context, False, reach, *drawn)
                watch.emit(whole_call(call, watch.used))

    def withdraw(self) -> None:
        """Take the call back before any backward has come to it, as somebody else notes it."""
        self._ledger = lambda: None
        self._input = None

    def release(self) -> None:
        """Drop the tensors; further backwards through the call do not count."""
        self._gradient = self._input = None
