"""What compiled graphs tell the capture window: forwards and layer calls by number, until their backward."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.capture.calls import ForwardCall, Ledger
from kfac_optim.capture.graph_ops import Tape
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.capture.model_calls import OutputPass, Roots
from kfac_optim.capture.scale_probe import ScaleProbe
from kfac_optim.utils.autograd import GradientEdge, accumulator, edge

# The most calls in graphs that are kept between two steps: some hundred forwards of a large model.
_MOST_CALLS = 20_000


class Commit(NamedTuple):
    """Holds what a graph has handed over in a pass of an estimate; the tensors are copies."""

    call: ForwardCall
    layer_input: Tensor
    gradient: Tensor


class GraphCalls:
    """Does for a window what the operators of `graph_ops` stand for.

    Graphs do not hold their calls, as eager ones do, so the calls are kept here; a backward may come as late as the
    next step, so they are kept for two steps.

    Args:
        ledger: commits the calls; held weakly, as it holds this object.
        roots: the forwards of the model.
        probe: keeps gradients on steps with statistics.
        forward_began: is called as a forward of the model begins, with whether it runs within another one; a bound
            method, held weakly.

    Attributes:
        tape: writes the operators into graphs.
        anchor: the place where passes of an estimate end; None where there are none. See `graph_ops`.
    """

    def __init__(self, ledger: Ledger, roots: Roots, probe: ScaleProbe, forward_began: Callable[[bool], None]) -> None:
        self._ledger = weakref.ref(ledger)
        self._roots = roots
        self._probe = probe
        self._forward_began = weakref.WeakMethod(forward_began)
        self.tape = Tape(self)
        self.anchor: GradientEdge | None = None
        self._commits: list[Commit] | None = None
        self._kept: dict[int, ForwardCall | OutputPass] = {}
        self._kept_before: dict[int, ForwardCall | OutputPass] = {}
        self._numbers = itertools.count()
        self._in_operator = False

    def begin_call(self, model: int, nested: bool) -> None:
        if not nested:
            self._roots.leave_all()  # a graph that raised has left its own behind
        if (forward_began := self._forward_began()) is not None:
            self._in_operator = True
            forward_began(nested)
            self._in_operator = False
        self._roots.enter(model)

    def end_call(self, terms: int) -> None:
        if (root := self._roots.leave()) is not None:
            root.terms = None if terms < 0 else terms

    def run_call(self, model: int, terms: int) -> int:
        if (ledger := self._ledger()) is None:
            return -1
        self._in_operator = True
        ledger.notice_lost_gradients()
        self._in_operator = False
        root = RootCall(model)
        root.terms = terms
        return self._keep(OutputPass(ledger, root))

    def trace_call(self, watch: int) -> None:
        # What stands for a sharded weight may not have been there when the watch was set up.
        ledger = self._ledger()
        if ledger is not None and (found := ledger.watch_of(watch)) is not None:
            found.node = accumulator(found.used) or found.node

    def note_call(self, watch: int, training: bool, examples: int, context: tuple[int, ...]) -> int:
        ledger = self._ledger()
        found = None if ledger is None else ledger.watch_of(watch)
        if ledger is None or found is None or not found.wanted():
            return -1
        self._probe.listen()
        found.awaits_gradient(ledger.shards)
        handed = None if examples < 0 else examples
        root = self._roots.of_layer(handed) or self._roots.of_graph_within_backward()
        return self._keep(ForwardCall(ledger, found, root, handed, None, training, context))

    def commit_call(self, call: int, layer_input: Tensor, gradient: Tensor) -> None:
        noted = self._kept.get(call) or self._kept_before.get(call)
        if noted is None:
            return
        if self.anchor is None or isinstance(noted, OutputPass):
            noted(gradient, layer_input)
        elif self._commits is None:
            noted.pass_by(gradient, layer_input, in_operator=True)
        else:  # graphs use the memory of both for something else afterwards
            self._commits.append(Commit(noted, layer_input.clone(), gradient.clone()))

    def expect_passes(self) -> None:
        """Note that an estimate runs passes of its own, whose gradients count in the place of the training loop's."""
        self.tape.anchor = torch.zeros((), device="cpu", requires_grad=True)
        self.anchor = edge(self.tape.anchor)

    @contextmanager
    def within_pass(self) -> Iterator[list[Commit]]:
        """Return a context for a pass of an estimate, which ends at the anchor; what it comes to is put in the list."""
        commits: list[Commit] = []
        self._commits = commits
        try:
            yield commits
        finally:
            self._commits = None

    def calls(self) -> list[ForwardCall]:
        """Return the calls of layers in graphs since the last step."""
        return [call for call in self._kept.values() if isinstance(call, ForwardCall)]

    def end(self, watches: Iterable[LayerWatch]) -> None:
        """Note that the window has closed."""
        self._kept, self._kept_before = {}, self._kept
        self.renew_nodes(watches)

    def renew_nodes(self, watches: Iterable[LayerWatch]) -> None:
        """Find the accumulators of the weights again, as a model that is moved gets others.

        Operators of graphs cannot ask for them themselves.
        """
        if not self._in_operator and (self._kept or self._kept_before):
            for watch in watches:
                watch.node = accumulator(watch.used) or watch.node  # a frozen weight has none

    def _keep(self, call: ForwardCall | OutputPass) -> int:
        """Keep a call of a graph until its backward; return the number by which the backward asks for it."""
        number = next(self._numbers)
        self._kept[number] = call
        if len(self._kept) > _MOST_CALLS:  # forwards that no step follows
            del self._kept[next(iter(self._kept))]
        return number
