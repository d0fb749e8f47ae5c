"""Gradients of an estimate's own, backpropagated through the graph of the training loop.

When the loop's backward comes to the output of the model, and before it goes on, passes of the estimate's own run from
there to the outputs of the layers. So they come only where a backward comes, need no second forward (no dropout mask,
no buffer of a normalisation layer is touched), accumulate nothing into `.grad`, and the graph is there.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_optim.capture.calls import Drawn, ForwardCall, Ledger
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.fisher.criterion_term import CriterionTerm
from kfac_optim.fisher.likelihoods import Likelihood, Outputs, Vectors
from kfac_optim.utils.autograd import GradientEdge, edge, on_gradient, pull_back, running_edge
from kfac_optim.utils.random_state import normal_like


@dataclass(eq=False)
class ExtraBackward:
    """Takes the extra passes of backward through one forward of the model.

    Attributes:
        ledger: that the calls come to stand in, held weakly.
        likelihood: of the loss.
        vectors: gradients of single terms with respect to the outputs, whose outer products make the Fisher.
        several: whether these are several for one forward; one more pass then tells where any of them comes to.
        terms: of the loss.
        root: the forward.
        calls: of layers in it, and where their gradients pass; None is at the only output.
        outputs: of the model, detached.
        seed: of random numbers; asked when the first backward comes.
        term: what the criterion says of the outputs, where these are what it reads; None at the output of the model.
        aligned: terms whose rows were seen to belong to their examples; terms that are seen are added.
    """

    ledger: "weakref.ref[Ledger]"
    likelihood: Likelihood
    vectors: Callable[[Outputs, torch.Generator], Iterator[Vectors]]
    several: bool
    terms: int
    root: RootCall
    calls: Sequence[tuple[ForwardCall, GradientEdge | None]]
    outputs: Outputs
    seed: Callable[[], int]
    term: CriterionTerm | None = None
    aligned: set[tuple[Any, ...]] = field(default_factory=set)
    _arrived: set[int] = field(default_factory=set)
    _drawn: int | None = None

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
            on_gradient(output, partial(self.arrive, place, output.output_nr))

    def arrive(self, place: int, output_nr: int, gradient: Tensor) -> None:
        """Run the passes of one output, to which a backward has come; `output_nr` is its number at its node."""
        ledger = self.ledger()
        if ledger is None or not ledger.listening:
            return
        if self.root.by_criterion if self.term is None else self.term.factor is None:
            return  # a criterion has read what follows, or the loss does not hold what this one returned
        if place in self._arrived:
            ledger.keep(call for call, _ in self.calls)
            return
        reached = [(call, there) for call, there in self.calls if call.is_reached()]
        if reached:
            self._arrived.add(place)
            if ledger.is_stale():
                ledger.discard()
            if self.term is None:
                self.root.terms = self.terms
                ledger.tally.by_output = True
            else:
                ledger.tally.by_criterion = True
            at = running_edge(output_nr)
            with ledger.shards.passing_within_backward():
                self._run(place, at, gradient, [(call, there or at) for call, there in reached if call.open()])
        if self.term is None and len(self._arrived) == len(self.outputs):
            for call, _ in self.calls:
                call.release()

    def _run(
        self, place: int, at: GradientEdge, gradient: Tensor, calls: Sequence[tuple[ForwardCall, GradientEdge]]
    ) -> None:
        if not calls:
            return
        if self._drawn is None:
            self._drawn = self.seed()
        used = self.likelihood.used(gradient)
        shape = gradient.shape

        def weighed(vectors: Vectors) -> Tensor | None:
            vector = vectors[place]
            if vector is None:
                return None
            vector = vector.reshape(shape) * used.to(vector.dtype)
            return vector if self.term is None else self.term.weighed(vector)

        def at_layers(vector: Tensor | None) -> list[Tensor | None]:
            if vector is None:
                return [None] * len(calls)
            return pull_back([at], [vector], [there for _, there in calls])

        generator = torch.Generator(self.outputs[0].device).manual_seed(self._drawn)
        reach: list[Tensor | None] = [None] * len(calls)
        if self.several:  # by numbers that do not cancel, as signs may
            reach = at_layers(weighed(tuple(normal_like(output, generator) for output in self.outputs)))
        vectors = map(weighed, self.vectors(self.outputs, generator))
        columns: Iterable[list[Tensor | None]] = map(at_layers, vectors)
        residuals = None
        if self.term is not None and self.several:
            residuals = self.term.residuals(self.outputs, place, gradient)
            kind = self.term.number, shape, len(calls)
            if kind not in self.aligned:
                known = list(vectors)
                columns = held = [at_layers(vector) for vector in known]
                if self.term.accounts_for(at_layers(self.term.combined(known, residuals)), held, residuals):
                    self.aligned.add(kind)
                else:
                    residuals = None
        for column, of_layers in enumerate(columns):
            drawn = Drawn() if self.term is None else self.term.drawn(column, residuals)
            for (call, _), of_layer, reached in zip(calls, of_layers, reach, strict=True):
                if of_layer is not None:
                    call.take(of_layer, reached, drawn)


def _is_same(one: GradientEdge | None, other: GradientEdge) -> bool:
    return one is not None and one.node is other.node and one.output_nr == other.output_nr
