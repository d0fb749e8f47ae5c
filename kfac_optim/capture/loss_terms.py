"""How many terms the loss of a step has is read off the forwards of the model, or stated."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.capture.batches import first_tensor
from kfac_optim.capture.criterion_calls import CriterionCalls
from kfac_optim.specs import LossTerms

_BY_INPUT = (LossTerms.EXAMPLES, LossTerms.SUM)


class LossCount(NamedTuple):
    """Holds the terms of a step's loss."""

    averaged: float | Tensor
    """`M`, the terms that the mean runs over; a tensor `[]` where it was stated as one. It is 1 for a summed loss, or
    the share of a rank's loss in what the gradients are of, where ranks do not take their mean."""
    summed: float
    """Terms that are summed instead; 1 for a mean, 0 where nothing was seen."""
    assumed: bool = False
    """Whether `averaged` was read off layers, for want of a forward of the model that shows it."""
    by_criterion: bool = False
    """Whether the output gradients behind the statistics are scaled as the criterion was seen to scale its terms."""
    mixed: bool = False
    """Whether some gradients are scaled so, and others come from a forward whose output no criterion read."""
    repeated: bool = False
    """Whether a call of the criterion had a second backward, though it is weighed as its first one had it."""
    missed: bool = False
    """Whether no backward came to something observed, though one came to the forward that it was computed from."""


@dataclass(slots=True, eq=False)
class RootCall:
    """Stands for one forward of the whole model, whose loss terms count once in a window with a backward through it.

    Layers that run outside any forward of the model share one such call in each backward.

    Attributes:
        model: identity of the model; `_OUTSIDE` where there is none.
        terms: what the window's rule reads off the call; None where it finds nothing to read.
        of_layers: what the rule reads off the layers in the call, if it finds no `terms`.
        layers: identities of the layers that took part, where it stands for no forward of a model.
        counted_in: number of the window that counted it last.
        batched: whether any layer was handed a batch; `unbatched`: whether any was handed a single example.
        recomputes: whether layers ran without gradients inside; see [Note: recomputed layers].
        number: the number of the forward among those since the last step.
        by_criterion: whether what the criterion reads was computed from it, so that its own output does not count.
        is_mapped: whether the outermost `torch.vmap` at work in it runs over what the model was handed.
        handed: the first dimensions of the tensors that the model was handed, but for empty ones; none where that is
            not known.
    """

    model: int
    number: int = 0
    by_criterion: bool = False
    terms: int | None = None
    of_layers: int = 0
    layers: set[int] = field(default_factory=set)
    counted_in: int = -1
    batched: bool = False
    unbatched: bool = False
    recomputes: bool = False
    is_mapped: bool = False
    handed: tuple[int, ...] = ()

    def maps_examples(self, slices: int, rows: int) -> bool:
        """Return whether a `torch.vmap` in the forward runs over the examples, and not over what each of them has.

        What tells is which of the two the model was handed; where that is both, which one came first.

        Args:
            slices: how many slices it runs over.
            rows: the first dimension of a slice.
        """
        return slices in self.handed and (rows not in self.handed or slices in (rows, self.handed[0]))

    def note_examples(self, examples: int | None) -> None:
        """Note that a layer in the call was handed a batch, or (None) a single example without a batch dimension."""
        self.unbatched |= examples is None
        self.batched |= examples is not None


_OUTSIDE = 0


def read_terms_of_inputs(rule: LossTerms, inputs: Any) -> int | None:
    """Read the terms off the arguments of a forward that has not ended; None where it takes the output to tell."""
    return read_terms(rule, inputs, None) if rule in _BY_INPUT else None


def read_terms(rule: LossTerms, inputs: Any, output: Any) -> int | None:
    """Read the terms off the model's arguments or its output; None if there is no tensor to read them off."""
    tensor = first_tensor(inputs) if rule in _BY_INPUT else first_tensor(output)
    if tensor is None:
        return None
    if rule in _BY_INPUT:
        return tensor.size(0)
    if tensor.is_nested:
        numel = tensor.values().numel() if tensor.layout is torch.jagged else tensor.numel()
        return numel // max(tensor.size(-1), 1) if rule is LossTerms.POSITIONS else numel
    return _terms_of_output(rule, tensor.shape)


def _terms_of_output(rule: LossTerms, shape: Sequence[int]) -> int:
    return math.prod(shape[:-1] if rule is LossTerms.POSITIONS else shape)


@dataclass(eq=False)
class Observation:
    """Stands for a tensor that the training loop has said to be a term of the loss.

    Attributes:
        forwards: the forwards of the model from which it was computed.
        arrived: whether a backward has come to it.
    """

    forwards: Collection[RootCall]
    arrived: bool = False


class LossTally:
    """Counts the loss terms between two steps.

    Args:
        rule: what the mean in the loss runs over.

    Attributes:
        by_criterion: whether a backward has come through the criterion itself, which then says what its terms weigh.
        by_output: whether one has come to the output of a model that no criterion has read.
        repeated: whether one has come through a call of the criterion that had one before.
        criterion: the calls of criteria, which have a lifetime of their own: `reset` leaves them.
        observed: what the training loop has observed since the last step.
        tells: whether this process tells the terms to other stages of a pipeline, as its last.
        of_last_stage: the terms that the last stage of a pipeline has told this one; None where it has told none.
        told_differs: whether the terms that it told at the last step with statistics were not those counted here.
    """

    def __init__(self, rule: LossTerms) -> None:
        self._rule = rule
        self._number = -1
        self._single: dict[int, bool] = {}
        self._stated: float | Tensor | None = None
        self._is_superseded = False
        self.criterion = CriterionCalls()
        self.tells = self.told_differs = False
        self.of_last_stage: float | None = None
        self.reset()

    def name_loss(self, *, mean: bool) -> None:
        """Take note of the loss, and with it of the terms of each call of the model."""
        self._rule = LossTerms.ELEMENTS if mean else LossTerms.SUM

    @property
    def is_sum(self) -> bool:
        """Return whether the loss is a sum, which has no number of terms."""
        return self._rule is LossTerms.SUM

    @property
    def counts_always(self) -> bool:
        """Return whether terms are counted at steps without statistics too: another stage may take some at any step."""
        return self.is_sum or (self.tells and self._rule not in _BY_INPUT)

    def next_draw(self) -> int:
        """Return the number of a draw of random targets, counted since the last step or dropped gradient."""
        self._draws += 1
        return self._draws - 1

    def count(self, root: RootCall) -> None:
        """Count the terms of a call of the model that a backward went through."""
        if root.counted_in == self._number:
            return
        root.counted_in = self._number
        if root.terms is None:
            self._unread.append(root)
        else:
            self._counted[root.model] += 1 if self._is_single(root) else root.terms

    def pass_by(self, root: RootCall) -> None:
        """Note that a backward goes on through a forward in a graph, after the passes of an estimate if any come."""
        self.by_output |= not self.has_counted(root)

    def count_layer(
        self, layer: int, root: RootCall | None, examples: int | None, shape: Sequence[int], backward: int, made_in: int
    ) -> RootCall:
        """Count by a layer whose output a backward came to.

        Where no terms can be read off a call of the model, its layers show them: the batch is the largest that any was
        handed, for it may have been folded into other dimensions, or be missing, in some; and the output of the model
        is that of the last layer that ran, to which the backward comes first.

        Args:
            layer: identity of the layer.
            root: the call of the model that the layer was part of, or what an earlier backward through the layer's call
                returned; None outside of any.
            examples: how many examples the layer was handed; None for a single one without a batch dimension.
            shape: the shape of the layer's output.
            backward: number of the backward that is running.
            made_in: number of the backward in which the layer was called, as where a checkpoint computes it again; -1
                outside of any.

        Returns:
            The call of the model, or what stands for it.
        """
        if root is None or root.model == _OUTSIDE:
            root = self._outside_of_models(root, self._outermost(backward, made_in))
            root.layers.add(layer)
        if root.terms is None:
            if self._rule in _BY_INPUT:
                root.of_layers = max(root.of_layers, 1 if examples is None else examples)
            elif root.of_layers == 0:
                root.of_layers = _terms_of_output(self._rule, shape)
        self.count(root)
        return root

    def _outermost(self, backward: int, made_in: int) -> int:
        """Return the number of the outermost backward around this one.

        A reentrant checkpoint runs a backward of its own within that of the loss.
        """
        if -1 < made_in < backward:
            self._around[backward] = made_in
        while backward in self._around:
            backward = self._around[backward]
        return backward

    def _outside_of_models(self, earlier: RootCall | None, backward: int) -> RootCall:
        """Return what stands for the model when layers run outside of any: one call for all layers of one backward.

        Args:
            earlier: what stood for it when a backward came to the layer's call before, which this one then goes on
                from; None where this is the first.
            backward: the number of this one, or of that around it.
        """
        known = self._outside.get(backward)
        root = earlier or known or RootCall(_OUTSIDE)
        if known is not None and known is not root:
            root.of_layers, known.of_layers = max(root.of_layers, known.of_layers), 0
            root.layers |= known.layers
        self._outside[backward] = root
        return root

    def has_counted(self, root: RootCall | None = None) -> bool:
        """Return whether a backward went through this call of the model since the last step; None asks for any call."""
        return bool(self._counted or self._unread) if root is None else root.counted_in == self._number

    def _is_single(self, root: RootCall) -> bool:
        """Return whether the model got a single example without a batch dimension: then it hands none to its layers.

        Layers show it on statistics steps alone. On others the call is taken to be like the last one that was shown.
        """
        if self._rule not in _BY_INPUT:
            return False
        if root.batched or root.unbatched:
            self._single[root.model] = not root.batched
        return self._single.get(root.model, False)

    def state(self, terms: float | Tensor) -> None:
        """Add stated terms, which stand for all counted ones."""
        if self._is_superseded and not self.has_counted():
            self._stated = None
        self._stated = terms if self._stated is None else self._stated + terms
        self._is_superseded = False

    def supersede(self) -> None:
        """Have the next statement replace what was stated for a backward that has not come, unless it comes first."""
        self._is_superseded = True

    def summed(self) -> float:
        """Return `LossCount.summed` so far."""
        return self._most()[0] if self.is_sum else 1

    def told(self) -> float | Tensor | None:
        """Return the terms to tell the other stages of a pipeline, if this is its last; None where there are none.

        It alone has the output that the loss reads, and the targets. Inputs have as many examples in each stage.
        """
        if self.is_sum or self._stated is not None:
            return self._stated
        return None if self._rule in _BY_INPUT else self._most()[0] or None

    def take(self, told: float | None) -> None:
        """Take the terms that the last stage of a pipeline tells at the step."""
        self.of_last_stage = told
        if self.has_counted():
            self.told_differs = told not in (None, self._most()[0])

    def awaits_told(self) -> bool:
        """Return whether the terms will be others once the last stage has told them, as far as is known."""
        return self.told_differs and self.of_last_stage is None and self._stated is None

    def result(self) -> LossCount:
        """Return the terms so far."""
        missed = any(not each.arrived and any(map(self.has_counted, each.forwards)) for each in self.observed)
        seen = self.by_criterion, self.by_criterion and self.by_output, self.repeated, missed
        if self.is_sum:
            return LossCount(1, self.summed(), False, *seen)
        stated = self.of_last_stage if self._stated is None else self._stated
        if stated is not None:
            return LossCount(stated, 1, False, *seen)
        averaged, assumed = self._most()
        if self.by_criterion:
            averaged, assumed = max(averaged, 1), False
        return LossCount(averaged, 1, assumed, *seen)

    def counted(self) -> int | None:
        """Return the terms that the loss is taken to be the mean of; None if that was stated, or no backward came."""
        if self.is_sum or self._stated is not None or self.of_last_stage is not None or self.by_criterion:
            return None
        return self._most()[0] if self.has_counted() else None

    def _most(self) -> tuple[int, bool]:
        """Return the terms of the model that has most of them, and whether layers had to tell some of these.

        Models that are called one after the other (an encoder, a decoder) see the terms of one loss. So do layers
        outside of any model to which backwards of their own come (an actor, a critic): terms add up where several
        come to one layer.
        """
        of_layers: Counter[int] = Counter()
        of_layer: Counter[int] = Counter()
        for root in self._unread:
            if root.layers:
                of_layer.update(dict.fromkeys(root.layers, root.of_layers))
            else:
                of_layers[root.model] += root.of_layers
        of_layers[_OUTSIDE] += max(of_layer.values(), default=0)
        models = {*self._counted, *of_layers}
        totals = ((self._counted[model] + of_layers[model], of_layers[model] > 0) for model in models)
        # Of two models with as many terms, the one that was seen to have them.
        return max(totals, key=lambda total: (total[0], not total[1]), default=(0, False))

    def reset(self) -> None:
        """Begin the next step."""
        self._number += 1
        self._counted: Counter[int] = Counter()
        self._unread: list[RootCall] = []
        self._outside: dict[int, RootCall] = {}
        self._around: dict[int, int] = {}  # the number of the backward around a nested one
        self.observed: list[Observation] = []
        self.by_criterion = self.by_output = self.repeated = False
        self._is_superseded = False
        self.of_last_stage = None
        self._stated = None
        self._draws = 0
