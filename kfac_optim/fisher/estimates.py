"""Which output gradients make `G`.

All are on one scale: `A ⊗ G` stands for the Fisher of the loss as the user wrote it. `Empirical` needs to be told
nothing. The others name the loss once, `estimate=MonteCarlo(nn.CrossEntropyLoss())`; the training loop stays as it is,
but a factor on the loss is seen only where the loop calls the very object that is named.

| | of which targets | backward passes more | use it |
|---|---|---|---|
| `Empirical` | those of the training | none | the default: where the loss is not known, or not one of these |
| `MonteCarlo` | drawn from the predictions | 1 | first, where the loss is known |
| `CurvaturePropagation` | none: random signs | 1 | as `MonteCarlo`, where predictions are nearly certain |
| `ExactGGN` | none | one per output element, and one | for a few outputs, and to test the others by |

The passes are made on statistics steps alone: with a larger `factor_update_period` they cost little. Steps taken by
`MonteCarlo` and by `Empirical` are about equally good on classifiers; on deep autoencoders (`python -m benchmarks
autoencoders`) `MonteCarlo` is far ahead.
"""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from kfac_optim.capture.batches import tensors_in
from kfac_optim.capture.calls import ForwardCall
from kfac_optim.capture.graph_walk import look_behind, mark
from kfac_optim.capture.loss_terms import LossCount, RootCall, read_terms
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.criteria import CriterionTerms
from kfac_optim.fisher.extra_backward import ExtraBackward
from kfac_optim.fisher.likelihoods import Likelihood, Outputs, Vectors
from kfac_optim.fisher.named_losses import likelihood_of
from kfac_optim.specs import LossTerms
from kfac_optim.utils.autograd import GradientEdge, edge
from kfac_optim.utils.validation import check_integer, check_kind


class Estimate(ABC):
    """Decides which backward passes make `G`."""

    @abstractmethod
    def arm(self, window: CaptureWindow) -> None:
        """Prepare `window` for the coming steps. Called once, when the optimizer is built."""

    @abstractmethod
    def scale(self, count: LossCount, loss_scale: float) -> float | Tensor:
        """Return what the output gradients are multiplied by, against those of the loss as the user wrote it.

        Args:
            count: the terms of the step's loss.
            loss_scale: what the training loop multiplies its loss by.
        """


class Empirical(Estimate):
    """Takes the training loss's own gradients: no extra pass, no knowledge of the loss.

    The resulting `A ⊗ G` approximates the empirical Fisher, which is not the Fisher: it vanishes with the
    residuals, so near a perfect fit steps are bounded by the damping and the trust region (Kunstner et al. 2019).

    Use it where the loss is none of those that the others know, and where steps must be cheap.
    """

    def __repr__(self) -> str:
        return "Empirical()"

    def arm(self, window: CaptureWindow) -> None:
        window.listening = True

    def scale(self, count: LossCount, loss_scale: float) -> float | Tensor:
        return loss_scale


class NamedLoss(Estimate):
    """Knows the loss and does not look at its targets; it takes extra passes of backward on statistics steps.

    They run within the training loop's own `backward()`, through its own graph, before it goes on from the model's
    output. Under `torch.compile` they run the backward of the compiled graph, from what the criterion reads: call the
    very `criterion` that is named here, outside of what is compiled. Checkpointing with `use_reentrant=True` allows no
    such pass, unless it is part of a compiled graph: there use `Empirical`.

    Args:
        criterion: `nn.CrossEntropyLoss`, `nn.MSELoss`, `nn.BCEWithLogitsLoss`, `nn.GaussianNLLLoss` (of a model that
            returns means and variances; one that returns means alone has to be trained by this very object), or a
            `Likelihood`. It sets the number of loss terms; with ignored targets state it by `set_loss_terms`. If the
            loss is multiplied by a number or a weight, call this very object, which tells the factor; where you do not,
            the loss is taken to be the plain mean, or sum, and of a mean `set_loss_terms(terms / factor)` states the
            factor. Terms whose gradient is exactly zero are left out. Targets that are probabilities of classes are
            taken to sum to 1 in each term.
        loss_terms: what the mean runs over, where your loss is not put together as `criterion` says: EXAMPLES for
            squares summed over the outputs of an example and averaged over examples.
        class_dim: the dimension of the classes, where the logits have more than two dimensions: -1 for language models,
            1 for segmentation.
        outputs: takes what the loss reads from what the model returns; where it is not given, the first tensor with a
            dimension (for `nn.GaussianNLLLoss` the first two). It must hand out the very tensors that the loss is
            computed from: a backward does not come to what it computes of them, as by `torch.cat`.
        seed: the seed of the random numbers, which are the optimizer's own: those of training stay as they were, and a
            run that is resumed draws what the uninterrupted one does.

    Raises:
        TypeError: an unknown loss.
        ValueError: an option of the loss that cannot be honoured.
    """

    def __init__(
        self,
        criterion: nn.Module | Likelihood,
        *,
        loss_terms: LossTerms | None = None,
        class_dim: int | None = None,
        outputs: Callable[[Any], Tensor | Outputs] | None = None,
        seed: int = 0,
    ) -> None:
        check_integer(f"seed of {type(self).__name__}", seed, at_least=0)
        if class_dim is not None and (isinstance(class_dim, bool) or not isinstance(class_dim, int)):
            raise TypeError(f"kfac_optim: class_dim of {type(self).__name__} must be an integer, got {class_dim!r}.")
        if outputs is not None and not callable(outputs):
            raise TypeError(
                f"kfac_optim: outputs of {type(self).__name__} must be a function of what the model returns, got "
                f"{outputs!r}."
            )
        if loss_terms is not None:
            check_kind(f"loss_terms of {type(self).__name__}", loss_terms, LossTerms)
        self.criterion = criterion
        self._called: tuple[nn.Module, ...] = (criterion,) if isinstance(criterion, nn.Module) else ()
        self.likelihood = likelihood_of(criterion, class_dim)
        self.loss_terms = loss_terms
        self.seed = seed
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.criterion!r})"

    def with_terms(self, loss_terms: LossTerms) -> Self:
        """Return the estimate with these loss terms, unless it was given others."""
        if self.loss_terms is not None:
            return self
        made = copy.copy(self)
        made.loss_terms = loss_terms
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that knows the criterion that the training loop has as well as the copy of it.

        Where a loop copies its model and optimizer, it goes on calling its own criterion, unless it copies that too.
        """
        made = copy.copy(self)
        memo[id(self)] = made
        for name, value in vars(self).items():
            setattr(made, name, value if name == "_called" else copy.deepcopy(value, memo))
        known = (*self._called[:1], self.criterion, made.criterion)  # of copies of copies the first is the loop's own
        made._called = tuple(dict.fromkeys(each for each in known if isinstance(each, nn.Module)))
        return made

    several = False
    """Whether `vectors` gives several for one forward, whose statistics add up."""

    @abstractmethod
    def vectors(self, likelihood: Likelihood, outputs: Outputs, generator: torch.Generator) -> Iterator[Vectors]:
        """Return gradients of single terms of the loss with respect to `outputs`, one pass of backward for each."""

    def arm(self, window: CaptureWindow) -> None:
        window.listening = True
        summed = not self.likelihood.mean if self.loss_terms is None else self.loss_terms is LossTerms.SUM
        window.tally.name_loss(mean=not summed)
        window.estimate = watcher = _Watcher(self, window)
        window.terms_of = self.terms_of
        window.graphs.expect_passes()
        window.terms = terms = CriterionTerms(window, self.likelihood, self.vectors, self.several, watcher.seed)
        for criterion in self._called:
            terms.watch(criterion)

    def scale(self, count: LossCount, loss_scale: float) -> float | Tensor:
        if count.by_criterion:  # what the criterion was multiplied by is in them, by its root, and so is their number
            return (count.averaged * loss_scale) ** 0.5
        # Gradients of single terms have not been divided by their number.
        return count.averaged

    def terms(self, outputs: Outputs) -> int:
        """Tell what the mean, or sum, of the loss runs over."""
        if self.loss_terms in (None, LossTerms.SUM):
            return self.likelihood.terms(outputs)
        terms = read_terms(self.loss_terms, outputs, outputs)
        assert terms is not None
        return terms

    def terms_of(self, output: Any) -> int | None:
        """Tell the same of what the model returned; None where what the loss reads is not there."""
        outputs = self.outputs_of(output)
        return self.terms(outputs) if self.fit(outputs) else None

    def fit(self, outputs: Outputs) -> bool:
        """Return whether these are what the loss reads, and parts of a graph."""
        return len(outputs) == self.likelihood.outputs and all(output.requires_grad for output in outputs)

    def outputs_of(self, output: Any) -> Outputs:
        """Return what the loss reads of what the model returned; empty if it is not there."""
        if self._outputs is not None:
            return self._checked(self._outputs(output))
        found = (each for each in tensors_in(output) if each.dim() > 0 and each.is_floating_point())
        return tuple(islice(found, self.likelihood.outputs))

    def _checked(self, chosen: Any) -> Outputs:
        """Return what `outputs` has chosen, if it is as many tensors as the loss reads, or none."""
        several = (chosen,) if isinstance(chosen, Tensor) else chosen
        if not isinstance(several, tuple | list) or not all(isinstance(each, Tensor) for each in several):
            raise TypeError(
                f"kfac_optim: outputs of {type(self).__name__} must return a tensor, or a tuple of them, and returned "
                f"{chosen!r}."
            )
        if several and len(several) != (wanted := self.likelihood.outputs):
            raise ValueError(
                f"kfac_optim: outputs of {type(self).__name__} must return what one term of the loss reads, and "
                f"returned {len(several)} tensors, where {self.criterion!r} reads {wanted}. If the loss has several "
                "terms, leave outputs out, and compute each of them by a call of that very object."
            )
        return tuple(several)


class _Watcher:
    """Sets up the passes for each forward of the model."""

    def __init__(self, estimate: NamedLoss, window: CaptureWindow) -> None:
        self._estimate = estimate
        self._window = weakref.ref(window)

    def __call__(self, root: RootCall, calls: Sequence[tuple[ForwardCall, GradientEdge]], output: Any) -> None:
        window = self._window()
        if window is None or not (calls or window.tally.is_sum or window.graphs.calls()):
            return
        outputs = self._estimate.outputs_of(output)
        if not self._estimate.fit(outputs):
            return
        root.terms = self._estimate.terms(outputs)
        in_graphs = bool(window.graphs.calls())
        if not calls and not in_graphs:
            return
        # What is behind other outputs gets no gradient here. Held by a hook on these, it would hold them in turn.
        behind = look_behind(outputs, window, window.graphs.anchor)
        in_graphs &= behind.in_graphs
        reached = {call for call, _ in behind.calls}
        calls = [(call, there) for call, there in calls if call in reached]
        if not calls and not in_graphs:
            return
        for output in outputs if in_graphs else ():
            mark(edge(output), root)  # a criterion cannot ask the calls in graphs whose forward it reads
        detached = tuple(o.detach() for o in outputs)
        ExtraBackward(
            weakref.ref(window),
            self._estimate.likelihood,
            partial(self._estimate.vectors, self._estimate.likelihood),
            self._estimate.several,
            root.terms,
            root,
            calls,
            in_graphs,
            detached,
            self.seed,
        ).await_backward(outputs)

    def seed(self) -> int:
        """Return a seed of random numbers: one for each forward that a backward comes to, each step and each source.

        Their examples are others. Forwards without a backward draw nothing, so that an evaluation changes nothing.
        """
        window = self._window()
        assert window is not None, "passes are made by the window's own forwards"
        stream, source = (self._estimate.seed, window.step, window.tally.next_draw()), window.source
        return hash((*stream, source) if source else stream) % 2**63


class MonteCarlo(NamedLoss):
    """Takes gradients at targets drawn from the model's own predictions: the Fisher, in expectation, by one pass.

    Use it wherever the loss is one of those known: unlike the empirical Fisher it does not vanish with the residuals
    (Martens & Grosse 2015, §5; Kunstner et al. 2019).
    """

    def vectors(self, likelihood: Likelihood, outputs: Outputs, generator: torch.Generator) -> Iterator[Vectors]:
        yield likelihood.sample(outputs, generator)


class CurvaturePropagation(NamedLoss):
    """Takes `B v`, `B Bᵀ` the loss's Hessian, `v` random signs: the generalised Gauss-Newton matrix, in expectation.

    It takes one pass, as `MonteCarlo` does. Use it instead of `MonteCarlo` where the predictions are nearly certain:
    `CurvaturePropagation` then has the smaller variance (Martens, Sutskever & Swersky 2012).
    """

    def vectors(self, likelihood: Likelihood, outputs: Outputs, generator: torch.Generator) -> Iterator[Vectors]:
        yield likelihood.propagate(outputs, generator)


class ExactGGN(NamedLoss):
    """Takes the generalised Gauss-Newton matrix without noise: a pass for each element of an output, and one more.

    Use it for small outputs, and to test the others by. Each pass is made for all examples at once: they are taken to
    lie along the first dimension of what the loss reads, and not to interact in the model. Where the loop calls the
    criterion that is named, logits `[examples, positions, classes]` may be flattened for it: a few more passes find out
    whether positions interact, as by attention, and then one is made for each class of each position, as for logits
    that are not flattened.

    It is not exact where examples are repeated, or lie along another dimension: in stacked, expanded or transposed
    outputs (`output.T`), and in time-major ones `[time, examples, …]`. Have the loss read the examples first, as by
    `output.transpose(0, 1)`; or take `MonteCarlo` or `CurvaturePropagation`, which are right in expectation there too.
    """

    several = True

    def vectors(self, likelihood: Likelihood, outputs: Outputs, generator: torch.Generator) -> Iterator[Vectors]:
        return likelihood.columns(outputs)
