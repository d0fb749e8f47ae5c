"""The criterion that an estimate names, when the training loop calls it: what it reads is where the likelihood sits.

So a residual may hold derivatives of the model, heads and masks may stand outside of it, and a loss may call the
criterion several times: each call is a term, and backward tells what it weighs. Where a loop calls another object (or a
function), the estimate goes by the output of the model.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributions, nn

from kfac_optim.capture.calls import ForwardCall
from kfac_optim.capture.graph_walk import Behind, look_behind
from kfac_optim.capture.loss_terms import Observation, RootCall
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.second_moments import on_host
from kfac_optim.fisher.criterion_term import CriterionTerm
from kfac_optim.fisher.extra_backward import ExtraBackward
from kfac_optim.fisher.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianWithScale,
    Likelihood,
    Outputs,
    Vectors,
)
from kfac_optim.utils.autograd import in_function_transform, on_gradient, on_gradient_first
from kfac_optim.utils.hooks import PicklableHook, drop_inert
from kfac_optim.utils.sharded_params import is_sharded
from kfac_optim.utils.warning import warn

Passes = Callable[[Likelihood, Outputs, torch.Generator], Iterator[Vectors]]
"""Gives the gradients of single terms of a loss."""


class CriterionTerms:
    """Takes the extra passes of an estimate at what the criterion reads.

    Args:
        window: takes the statistics; held weakly.
        likelihood: the likelihood of the loss.
        vectors: returns the gradients of single terms; `several` and `seed` are as in `ExtraBackward`.

    Attributes:
        remembers: whether the calls of a step are kept for `changes`.
    """

    def __init__(
        self, window: CaptureWindow, likelihood: Likelihood, vectors: Passes, several: bool, seed: Callable[[], int]
    ) -> None:
        self._window = weakref.ref(window)
        self._likelihood = likelihood
        self._vectors = vectors
        self._several = several
        self._seed = seed
        self._aligned: set[tuple[Any, ...]] = set()
        self._read_again: list[Outputs] | None = None
        self.remembers = False
        self._has_warned = False

    def watch(self, criterion: nn.Module) -> None:
        """Hook the criterion."""
        drop_inert(criterion)
        handle = criterion.register_forward_hook(PicklableHook(self._called), with_kwargs=True)
        window = self._window()
        assert window is not None
        weakref.finalize(window, handle.remove)

    def _called(self, criterion: nn.Module, args: Any, kwargs: dict[str, Any], loss: Any) -> None:
        if torch.compiler.is_compiling() or in_function_transform() or not isinstance(loss, Tensor):
            return
        if loss.dim() > 0 or not loss.requires_grad:
            return
        read = _read(criterion, args, kwargs)
        if read is None:
            return
        outputs, target = read
        if isinstance(target, Tensor) and target.requires_grad:
            on_gradient(loss, self._warn_of_target)
            return
        if not any(map(_has_graph, outputs)):
            return
        counts = _counts(criterion, outputs, target)
        divisor: float | Tensor = 1.0
        if self._likelihood.mean:
            divisor = _terms(criterion, outputs) if counts is None else counts.sum().clamp(min=1)
        elif not isinstance(criterion, nn.CrossEntropyLoss):
            divisor = 1 / _repeats(outputs[0], target)
        # Logits in shards may go with targets that are whole; what counts is then seen by gradients alone.
        counts = None if is_sharded(outputs[0]) else counts
        self.observe(outputs, self._of_criterion(outputs), divisor, loss, counts)

    def _warn_of_target(self, _: Tensor) -> None:
        """Say once, as a backward comes through the loss, that its target depends on what is trained."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                "kfac_optim: the criterion that estimate names was called with a target that depends on what is "
                "trained. Its term of the loss is left out of the curvature; or, where the model's own output is "
                "compared, it counts as if the target were given. Detach the target; or pass the output first and the "
                "target second; or, for squares, call it on the difference, "
                "criterion(one - other, torch.zeros_like(one))."
            )

    def changes(self, calls: Sequence[object | None], evaluate: Callable[[], object]) -> dict[tuple[int, int], Tensor]:
        """Return how residuals change, `[examples]` for each term and column, as `SampleSpace.acceleration` reads it.

        Args:
            calls: the calls of the criteria in the step's own evaluation.
            evaluate: evaluates the loss at other parameters.

        Raises:
            RuntimeError: criteria are called with other examples there.
        """
        self._read_again = []
        try:
            evaluate()
            read = self._read_again
        finally:
            self._read_again = None
        changes: dict[tuple[int, int], Tensor] = {}
        for place, term in enumerate(calls):
            if not isinstance(term, CriterionTerm) or term.factor is None:
                continue
            outputs = read[place] if place < len(read) else ()
            if [output.numel() for output in outputs] != [output.numel() for output in term.outputs]:
                raise RuntimeError(
                    "kfac_optim: LineSearch evaluates the closure again, and the criterion did not read there what it "
                    f"read at first ({len(calls)} calls at first, {len(read)} then). Have the closure do the same at "
                    "each call, or pass LineSearch(geodesic=False)."
                )
            changes |= {(term.number, column): change for column, change in enumerate(term.change(outputs))}
        return changes

    def _of_criterion(self, outputs: Outputs) -> Likelihood:
        """Return the likelihood of what the criterion reads, whose classes are where torch has them."""
        if isinstance(self._likelihood, Categorical):
            # Counted from the end, it stays where it is when rows are taken for positions of one example.
            return Categorical(self._likelihood.mean, 1 - outputs[0].dim() if outputs[0].dim() > 1 else -1)
        return self._likelihood

    def observe_residual(self, residual: Any, weight: float) -> None:
        """Note a term that no criterion computes: see `KFACOptimizer.observe`."""
        outputs, likelihood, scale = _observed(residual)
        if not any(map(_has_graph, outputs)) or any(each.requires_grad and not _has_graph(each) for each in outputs):
            raise ValueError(
                "kfac_optim: observe() was given a tensor that has no graph behind it, and is no result of a forward "
                "with gradients. Call it before backward() with what such a forward returned; of a Normal whose scale "
                "is trained, both mean and scale."
            )
        self.observe(outputs, likelihood, float(likelihood.terms(outputs)), weight * scale)

    def observe(
        self,
        outputs: Outputs,
        likelihood: Likelihood,
        divisor: float | Tensor,
        loss: Tensor | float,
        counts: Tensor | None = None,
    ) -> None:
        """Note a term of the loss.

        Args:
            outputs: what the loss reads.
            likelihood: the likelihood of these outputs.
            divisor: `M_c`, as in `CriterionTerm`.
            loss: the tensor whose gradient weighs the term; or a number that does.
            counts: which terms count by their targets, as in `CriterionTerm`.
        """
        window = self._window()
        if self._read_again is not None:
            self._read_again.append(tuple(output.detach() for output in outputs))
        if window is None or not window.listening:
            return
        window.tally.criterion.begin()
        if self.remembers:
            window.tally.criterion.terms.append(None)
        behind = look_behind(outputs, window, window.graphs.anchor)
        measures = bool(behind.calls) or behind.in_graphs
        if not measures and window.recorder is None:
            return
        calls = [call for call, _ in behind.calls] + (window.graphs.calls() if behind.in_graphs else [])
        seen = tuple(output.detach() for output in outputs)
        if not isinstance(likelihood, Categorical):  # logits `[classes]` are those of one example
            seen = tuple(_with_batch(output, calls) for output in seen)
        examples = 1 if seen[0].dim() < 2 else len(seen[0])
        kept = seen if self.remembers else ()
        number = window.tally.criterion.next_number()
        term = CriterionTerm(likelihood, number, examples, kept, divisor, counts=counts)
        if self.remembers and measures:
            window.tally.criterion.terms[-1] = term
        if isinstance(loss, Tensor):
            on_gradient(loss, _Weighed(window, term, behind))
        else:
            term.factor = torch.tensor(float(loss), device=outputs[0].device, dtype=torch.float64)
            observed = _Observed(window, behind)
            for output in filter(_has_graph, outputs):  # before the hook of a forward that has returned it
                on_gradient_first(output, observed)
        if window.recorder is not None:
            window.recorder.note_term(term, outputs)
        if measures:
            ExtraBackward(
                weakref.ref(window),
                likelihood,
                partial(self._vectors, likelihood),
                self._several,
                0,
                RootCall(0),
                behind.calls,
                behind.in_graphs,
                seen,
                self._seed,
                term,
                self._aligned,
            ).await_backward(outputs)


def _observed(residual: Any) -> tuple[Outputs, Likelihood, float]:
    """Return what an observation consists of, its likelihood, and what the curvature of that is multiplied by."""
    if isinstance(residual, Tensor):
        return (residual,), Gaussian(mean=True), 1.0
    if isinstance(residual, distributions.Independent):
        outputs, likelihood, scale = _observed(residual.base_dist)
        # Its likelihood is a sum over an event, and the mean runs over events.
        return outputs, likelihood, scale * residual.event_shape.numel() / residual.base_dist.event_shape.numel()
    if isinstance(residual, distributions.Categorical):
        return (residual.logits,), Categorical(mean=True, class_dim=-1), 1.0
    if isinstance(residual, distributions.Bernoulli):
        return (residual.logits,), Bernoulli(mean=True), 1.0
    if isinstance(residual, distributions.Normal):
        if residual.scale.requires_grad:
            return (residual.loc, residual.scale), GaussianWithScale(mean=True), 1.0
        scale = float(residual.scale.flatten()[0])
        if bool((residual.scale == scale).all()):
            return (residual.loc,), Gaussian(mean=True), 1 / (2 * scale**2)
        raise ValueError(
            "kfac_optim: observe() was given a Normal with several scales that are no result of the model. Observe the "
            "residual (mean - target) / scale of the loss, with half the weight."
        )
    raise TypeError(
        "kfac_optim: observe() takes a tensor of residuals, or a Categorical, Bernoulli or Normal of "
        f"torch.distributions, got {type(residual).__name__}."
    )


class _Weighed:
    """Is called as a hook on what the criterion returned, and notes what the loss multiplies it by.

    The backward comes here before it comes to what the criterion read, and to the output of the model.
    """

    def __init__(self, window: CaptureWindow, term: CriterionTerm, behind: Behind) -> None:
        self._window = weakref.ref(window)
        self._term = term
        self._behind = behind

    def __call__(self, gradient: Tensor) -> None:
        window = self._window()
        if window is None or not window.listening:
            return
        measures = bool(self._behind.calls) or self._behind.in_graphs
        in_graphs = self._behind.in_graphs and window.is_reached()
        if measures and not in_graphs and not any(call.is_reached() for call, _ in self._behind.calls):
            return
        for root in _forwards(self._behind):
            root.by_criterion = True
        factor = _as_minimised(gradient.detach(), window.signs())
        if self._term.factor is None:
            self._term.factor = factor
        elif not window.is_stale() or (on_host(factor) and not torch.equal(factor, self._term.factor)):
            window.tally.repeated = True


def _as_minimised(factor: Tensor, signs: set[bool]) -> Tensor:
    """Return what the loss that is minimised multiplies a term by.

    Args:
        factor: what the loss of the backward multiplies it by.
        signs: whether layers ascend. Where some do and some do not, no sign is right for all of them, and each term
            counts by its size.
    """
    if len(signs) > 1:
        return factor.abs()
    return -factor if True in signs else factor


class _Observed:
    """Is called as a hook on what was observed. Where no backward comes to it, the model's own output counts."""

    def __init__(self, window: CaptureWindow, behind: Behind) -> None:
        self._window = weakref.ref(window)
        self._calls = [call for call, _ in behind.calls]
        self._in_graphs = behind.in_graphs
        self._observation = Observation(_forwards(behind))
        window.tally.observed.append(self._observation)

    def __call__(self, _gradient: Tensor) -> None:
        window = self._window()
        if window is None or not window.listening:
            return
        if any(call.is_reached() for call in self._calls) or (self._in_graphs and window.is_reached()):
            self._observation.arrived = True
            for root in self._observation.forwards:
                root.by_criterion = True


def _has_graph(output: Tensor) -> bool:
    """Return whether a backward comes to an output; what has no graph is given, as a variance that is known."""
    return output.grad_fn is not None


def _forwards(behind: Behind) -> set[RootCall]:
    """Return the forwards of the model behind something."""
    return {root for call, _ in behind.calls if (root := call.root) is not None}.union(behind.forwards)


def _read(criterion: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Outputs, Any] | None:
    """Return what the criterion reads of the model, and the target; None where they are not tensors."""
    named = dict(zip(("input", "target", "var"), args, strict=False)) | kwargs
    outputs = [named.get("input")]
    if isinstance(criterion, nn.GaussianNLLLoss):
        outputs.append(_for_each(outputs[0], named.get("var")))
    if not all(isinstance(output, Tensor) for output in outputs):
        return None
    return tuple(output for output in outputs if isinstance(output, Tensor)), named.get("target")


def _for_each(mean: Any, variance: Any) -> Any:
    """Return a variance for each mean, as the loss takes it, where it is given and no result of the model."""
    if not isinstance(mean, Tensor) or (isinstance(variance, Tensor) and _has_graph(variance)):
        return variance
    if isinstance(variance, float):
        return torch.full_like(mean.detach(), variance)
    given = variance.detach()  # a parameter may be trained itself
    return (given.unsqueeze(-1) if given.shape == mean.shape[:-1] else given).expand_as(mean)


def _counts(criterion: nn.Module, outputs: Outputs, target: Any) -> Tensor | None:
    """Return which terms count by their targets, with the dimension of the classes; None where targets do not tell."""
    if not isinstance(criterion, nn.CrossEntropyLoss) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return (target != criterion.ignore_index).unsqueeze(1 if outputs[0].dim() > 1 else 0)


def _terms(criterion: nn.Module, outputs: Outputs) -> float:
    """Return what a criterion with the reduction "mean" divides the sum of its terms by, if all of them count."""
    logits = outputs[0]
    if not isinstance(criterion, nn.CrossEntropyLoss):
        return logits.numel()
    return logits.numel() / max(1, logits.shape[1 if logits.dim() > 1 else 0])


def _repeats(output: Tensor, target: Tensor) -> float:
    """Return how often a sum over elements has each of the output, which more than one target may be compared with."""
    shape: torch.Size = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
    return shape.numel() / output.numel() if output.numel() else 1.0


def _with_batch(output: Tensor, calls: Sequence[ForwardCall]) -> Tensor:
    """Return `[examples, …]`: a criterion often reads one number for each example, `[examples]`."""
    if output.dim() > 1:
        return output
    if output.numel() == 1 or any(call.batch() == len(output) for call in calls):
        return output.reshape(-1, 1)
    return output
