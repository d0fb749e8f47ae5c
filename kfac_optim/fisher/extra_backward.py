"""Gradients of an estimate's own, backpropagated through the graph of the training loop.

When the loop's backward comes to the output of the model, and before it goes on, passes of the estimate's own run from
there to the outputs of the layers. So they come only where a backward comes, need no second forward (no dropout mask,
no buffer of a normalisation layer is touched), accumulate nothing into `.grad`, and the graph is there.

A compiled graph is one node of it, with layers inside. There a pass goes through the whole backward of the graph, whose
operators hand over what it comes to at the layers (`capture.graph_ops`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_optim.capture.calls import Drawn, ForwardCall
from kfac_optim.capture.graph_calls import Commit, GraphCalls
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.criterion_term import Chunk, CriterionTerm
from kfac_optim.fisher.likelihoods import Likelihood, Outputs, Vectors
from kfac_optim.utils.autograd import GradientEdge, edge, on_gradient, pull_back, running_edge
from kfac_optim.utils.precision import at_least_float32, largest_rounding
from kfac_optim.utils.random_state import normal_like
from kfac_optim.utils.sharded_params import is_sharded, whole


@dataclass(eq=False)
class ExtraBackward:
    """Takes the extra passes of backward through one forward of the model.

    Attributes:
        window: the window that the calls come to stand in, held weakly.
        likelihood: the likelihood of the loss.
        vectors: gradients of single terms with respect to the outputs, whose outer products make the Fisher.
        several: whether these are several for one forward; one more pass then tells where any of them comes to.
        terms: how many terms the loss has.
        root: the forward.
        calls: the calls of layers in it, and where their gradients pass; None is at the only output.
        in_graphs: whether there are calls in compiled graphs as well, which the first pass finds.
        outputs: the outputs of the model, detached; empty once no pass will come, as a loss that the training loop
            keeps would keep them too.
        seed: returns the seed of random numbers; asked when the first backward comes.
        term: what the criterion says of the outputs, where these are what it reads; None at the output of the model.
        aligned: terms whose rows were seen to belong to their examples; terms that are seen are added.
    """

    window: "weakref.ref[CaptureWindow]"
    likelihood: Likelihood
    vectors: Callable[[Outputs, torch.Generator], Iterator[Vectors]]
    several: bool
    terms: int
    root: RootCall
    calls: Sequence[tuple[ForwardCall, GradientEdge | None]]
    in_graphs: bool
    outputs: Outputs
    seed: Callable[[], int]
    term: CriterionTerm | None = None
    aligned: set[tuple[Any, ...]] = field(default_factory=set)
    _arrived: set[int] = field(default_factory=set)
    _found: list[ForwardCall] = field(default_factory=list)
    _drawn: int | None = None
    _awaited: int = 0

    def await_backward(self, outputs: Outputs) -> None:
        """Run when a backward comes to `outputs`, those of the model as they are in the graph.

        It comes to each at another time, and what it has passed is gone. So each has passes of its own: between two
        outputs `H` is zero.
        """
        if len(outputs) == 1:
            # The output's node holds us by its hook: with that node in turn, as where the last layer's output is the
            # model's, a forward without a backward would wait for the garbage collector.
            own = edge(outputs[0])
            self.calls = [(call, None if _is_same(there, own) else there) for call, there in self.calls]
        for place, output in enumerate(outputs):
            if output.grad_fn is not None:  # otherwise it is given, and no backward comes to it
                self._awaited += 1
                on_gradient(output, partial(self.arrive, place, output.output_nr))

    def arrive(self, place: int, output_nr: int, gradient: Tensor) -> None:
        """Run the passes of one output, to which a backward has come; `output_nr` is its number at its node."""
        window = self.window()
        if window is None or not window.listening:
            return
        if self.root.by_criterion:  # a criterion has read what follows
            self.outputs = ()
            return
        if self.term is not None and self.term.factor is None:
            return  # the loss does not hold what the criterion returned
        if place in self._arrived:
            window.keep((*(call for call, _ in self.calls), *self._found))
            return
        reached = [(call, there) for call, there in self.calls if call.is_reached()]
        in_graphs = self.in_graphs and window.is_reached()
        if reached or in_graphs:
            self._arrived.add(place)
            window.keep(call for call, _ in reached)
            if window.is_stale():
                window.discard()
            if self.term is None:
                self.root.terms = self.terms
                window.tally.by_output = True
            else:
                window.tally.by_criterion = True
            at = running_edge(output_nr)
            with window.shards.passing_within_backward():
                calls = [(call, there or at) for call, there in reached if call.open()]
                self._run(place, gradient, _Passes(at, calls, window.graphs if in_graphs else None))
        if len(self._arrived) == self._awaited:
            self.outputs = ()
            for call, _ in self.calls if self.term is None else ():
                call.release()

    def _run(self, place: int, gradient: Tensor, passes: "_Passes") -> None:
        if not passes.calls and passes.graphs is None:
            return
        if self._drawn is None:
            self._drawn = self.seed()
        used = self.likelihood.used(gradient) if self.term is None else self.term.used(gradient)
        shape = gradient.shape

        def weighed(vectors: Vectors) -> Tensor | None:
            vector = vectors[place]
            if vector is None:
                return None
            vector = vector.reshape(shape) * used.to(vector.dtype)
            return vector if self.term is None else self.term.weighed(vector)

        generator = torch.Generator(self.outputs[0].device).manual_seed(self._drawn)
        reach: Sequence[Tensor | None] | None = None
        if self.several:  # by numbers that do not cancel, as signs may
            reach = passes.run(weighed(tuple(normal_like(output, generator) for output in self.outputs)))
            self._join_positions(place, passes, shape, generator)
        vectors = map(weighed, self.vectors(self.outputs, generator))
        columns: Iterable[list[Tensor | None]] = map(passes.run, vectors)
        residuals = None
        chunks: dict[RootCall | None, Chunk] = {}
        count = 0
        if self.term is not None and self.several:
            residuals = self.term.residuals(self.outputs, place, gradient)
            kind = self.term.number, self.term.examples, shape, len(passes.calls)
            if kind not in self.aligned:
                known = list(vectors)
                columns = held = [passes.run(vector) for vector in known]
                if self.term.accounts_for(passes.run(self.term.combined(known, residuals)), held, residuals):
                    self.aligned.add(kind)
                else:
                    residuals, chunks, count = None, self.term.chunks(passes.calls), len(held)
        for column, of_layers in enumerate(columns):
            rounding = largest_rounding(of_layers)
            for number, (call, of_layer) in enumerate(zip(passes.calls, of_layers, strict=True)):
                if of_layer is None:
                    continue
                if self.term is None:
                    drawn = Drawn(call.term, column)
                else:
                    drawn = self.term.drawn(column, residuals, chunks.get(call.root), count)
                call.take(of_layer, None if reach is None else reach[number], drawn._replace(rounding=rounding))
        self._found.extend(passes.found or ())
        for call in passes.found or ():
            call.release()

    def _join_positions(self, place: int, passes: "_Passes", shape: torch.Size, generator: torch.Generator) -> None:
        """Take rows of what the criterion reads for positions of one example where they interact in the model.

        So it is with logits `[examples, positions, classes]` that were flattened for the criterion: a column of `B` for
        several positions of an example at once would count products of their gradients. Rows stay examples where they
        do not interact, as that takes fewer passes, and where those of all batches of the layers interact as well.
        """
        output = self.outputs[place]
        rows = len(output) if output.dim() > 1 else 1
        batches = [call.batch() or 0 for call in passes.calls]
        fewer = {batch for batch in batches if 0 < batch < rows and rows % batch == 0}
        if len(set(batches)) > 1:
            fewer.discard(1)  # what all examples share, such as the token of a class
        if self.term is None or not fewer or shape[0] != rows or is_sharded(output):
            return
        noise = normal_like(output, generator).reshape(rows, -1)
        reach = passes.run(noise.reshape(shape))

        def mixed(groups: int) -> set[int]:
            """Return the batches of layers where an element comes of several of so many groups of rows."""
            powers = torch.randperm(groups, generator=generator, device=noise.device) % 4
            scales = (0.5**powers).repeat_interleave(rows // groups).unsqueeze(1)
            scaled = passes.run((noise * scales.to(noise.dtype)).reshape(shape))
            each = zip(batches, reach, scaled, strict=True)
            return {batch for batch, one, other in each if not _comes_of_one_each(one, other)}

        # Layers of other batches were handed something else, such as the positions that all examples have.
        for examples in sorted(fewer & mixed(rows), reverse=True):
            if examples not in mixed(examples):
                self.outputs = self.term.regroup(self.outputs, examples)
                return


def _comes_of_one_each(gradient: Tensor | None, scaled: Tensor | None) -> bool:
    """Return whether one example alone makes each element: with all examples scaled by powers of two, so is that."""
    if gradient is None or scaled is None or gradient.numel() == 0:
        return True
    dtype = at_least_float32(gradient.dtype)
    one, other = whole(gradient).to(dtype), whole(scaled).to(dtype)
    clear = one.abs() > 1e-3 * one.abs().amax()  # the rest may be rounding
    powers = (other[clear] / one[clear]).log2()
    return bool(((powers - powers.round()).abs() < 1e-3).all())  # NaN where the sign has changed


class _Passes:
    """Runs passes from one place of the graph to the outputs of layers, within the backward that has come there.

    Args:
        at: the place.
        calls: the calls of layers that are no part of a compiled graph, and where their gradients pass.
        graphs: hears from compiled graphs what a pass comes to in them; None where passes need not go through graphs.

    Attributes:
        calls: these, and those that the first pass has come to in graphs.
        found: the latter; None until then.
    """

    def __init__(
        self,
        at: GradientEdge,
        calls: Sequence[tuple[ForwardCall, GradientEdge]],
        graphs: GraphCalls | None,
    ) -> None:
        self.calls = [call for call, _ in calls]
        self.found: list[ForwardCall] | None = None
        self.graphs = graphs
        self._at = at
        self._ends = [there for _, there in calls]

    def run(self, vector: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of one pass at the outputs of `calls`, None where they are zero."""
        if vector is None:
            return [None] * len(self.calls)
        if self.graphs is None or self.graphs.anchor is None:
            return pull_back([self._at], [vector], self._ends)
        with self.graphs.within_pass() as commits:
            *gradients, _ = pull_back([self._at], [vector], [*self._ends, self.graphs.anchor])
        return gradients + self._of_graphs([each for each in commits if each.call.is_reached()])

    def _of_graphs(self, commits: Sequence[Commit]) -> list[Tensor | None]:
        if self.found is None:
            self.found = [call for call, layer_input, _ in commits if call.open(layer_input)]
            self.calls += self.found
        known = {call: gradient for call, _, gradient in commits}
        if not all(call in known for call in self.found):
            # Calls that a checkpoint dropped are made again in each pass, and come in the same order.
            known = dict(zip(self.found, (gradient for _, _, gradient in commits), strict=True))
        return [known[call] for call in self.found]


def _is_same(one: GradientEdge | None, other: GradientEdge) -> bool:
    return one is not None and one.node is other.node and one.output_nr == other.output_nr
