"""Gradients of an estimate's own, backpropagated through the graph of the training loop.

When the loop's backward comes to the output of the model, and before it goes on, passes of the estimate's own run from
there to the outputs of the layers. So they come only where a backward comes, need no second forward (no dropout mask,
no buffer of a normalisation layer is touched), accumulate nothing into `.grad`, and the graph is there.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_optim.autograd import GradientEdge, on_gradient, pull_back, running_edge
from kfac_optim.calls import ForwardCall, Ledger
from kfac_optim.likelihoods import Likelihood, Outputs, Vectors
from kfac_optim.loss_terms import RootCall


@dataclass(eq=False)
class Estimation:
    """The passes through one forward of the model.

    Attributes:
        ledger: that the calls come to stand in, held weakly.
        likelihood: of the loss.
        vectors: gradients of single terms with respect to the outputs, whose outer products make the Fisher.
        terms: of the loss.
        root: the forward.
        calls: of layers in it, and where their gradients pass.
        outputs: of the model, detached.
        seed: of random numbers.
    """

    ledger: "weakref.ref[Ledger]"
    likelihood: Likelihood
    vectors: Callable[[Outputs, torch.Generator], Iterator[Vectors]]
    terms: int
    root: RootCall
    calls: Sequence[tuple[ForwardCall, GradientEdge]]
    outputs: Outputs
    seed: int
    _arrived: set[int] = field(default_factory=set)

    def await_backward(self, outputs: Outputs) -> None:
        """Run when a backward comes to `outputs`, those of the model as they are in the graph.

        It comes to each at another time, and what it has passed is gone. So each has passes of its own: between two
        outputs `H` is zero.
        """
        for place, output in enumerate(outputs):
            on_gradient(output, _Arrival(self, place, output.output_nr))

    def arrive(self, place: int, at: GradientEdge, gradient: Tensor) -> None:
        ledger = self.ledger()
        if ledger is None or not ledger.listening:
            return
        if place in self._arrived:
            ledger.keep(call for call, _ in self.calls)
            return
        reached = [(call, there) for call, there in self.calls if call.is_reached()]
        if reached:
            self._arrived.add(place)
            self.root.terms = self.terms
            with ledger.shards.passing_within_backward():
                self._run(place, at, gradient, [(call, there) for call, there in reached if call.open()])
        if len(self._arrived) == len(self.outputs):
            for call, _ in self.calls:
                call.release()

    def _run(
        self, place: int, at: GradientEdge, gradient: Tensor, calls: Sequence[tuple[ForwardCall, GradientEdge]]
    ) -> None:
        used = self.likelihood.used(gradient)
        generator = torch.Generator(self.outputs[0].device).manual_seed(self.seed)
        for vectors in self.vectors(self.outputs, generator) if calls else ():
            vector = vectors[place]
            if vector is None:
                continue
            found = pull_back([at], [vector * used.to(vector.dtype)], [there for _, there in calls])
            for (call, _), of_layer in zip(calls, found, strict=True):
                if of_layer is not None:
                    call.take(of_layer)


@dataclass(frozen=True, slots=True)
class _Arrival:
    estimation: Estimation
    place: int
    output_nr: int

    def __call__(self, gradient: Tensor) -> None:
        self.estimation.arrive(self.place, running_edge(self.output_nr), gradient)
