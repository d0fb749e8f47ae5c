"""How many terms the loss of a step has: read off the model's forwards, or stated."""

import math
from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kfac_optim.specs import LossTerms

_BY_INPUT = (LossTerms.EXAMPLES, LossTerms.SUM)


class LossCount(NamedTuple):
    """The terms of a step's loss."""

    averaged: float | Tensor
    """`M`, the terms that the mean runs over; 1 for a summed loss; a tensor `[]` where it was stated as one."""
    summed: float
    """Terms that are summed instead; 1 for a mean, infinity where the number is unknown, 0 where nothing was seen."""


class RootCall:
    """One forward call of the whole model, whose loss terms count once in each window that has a backward through it.

    Attributes:
        model: identity of the model.
        terms: what the window's rule reads off the call; None where it finds nothing to read.
        counted_in: number of the window that counted it last.
        batched: whether any layer was handed a batch; `unbatched`: whether any was handed a single example.
        recomputes: whether layers ran without gradients inside; see [Note: recomputed layers].
    """

    __slots__ = ("batched", "counted_in", "model", "recomputes", "terms", "unbatched")

    def __init__(self, model: int) -> None:
        self.model = model
        self.terms: int | None = None
        self.counted_in = -1
        self.batched = False
        self.unbatched = False
        self.recomputes = False


def read_terms(rule: LossTerms, inputs: Any, output: Any) -> int | None:
    """The terms that stand in the model's arguments or its output; None where there is no tensor to read them off."""
    tensor = first_tensor(inputs) if rule in _BY_INPUT else first_tensor(output)
    if tensor is None:
        return None
    if rule in _BY_INPUT:
        return tensor.shape[0]
    return tensor.numel() // max(tensor.shape[-1], 1) if rule is LossTerms.POSITIONS else tensor.numel()


class LossTally:
    """The terms counted between two steps.

    Args:
        rule: what the mean in the loss runs over.
    """

    def __init__(self, rule: LossTerms) -> None:
        self._rule = rule
        self._number = 0
        self._counted: Counter[int] = Counter()
        self._single: dict[int, bool] = {}
        self._stated: float | Tensor | None = None
        self._rootless = False

    def name_loss(self, *, mean: bool) -> None:
        """The loss is known, and with it the terms of each call of the model."""
        self._rule = LossTerms.ELEMENTS if mean else LossTerms.SUM

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum, which has no number of terms."""
        return self._rule is LossTerms.SUM

    def count(self, root: RootCall | None) -> None:
        """A backward went through this call of the model; None for a layer that ran outside the model's forward."""
        if root is None or root.terms is None:
            self._rootless = True
        elif root.counted_in != self._number:
            root.counted_in = self._number
            self._counted[root.model] += 1 if self._is_single(root) else root.terms

    def has_counted(self, root: RootCall | None = None) -> bool:
        """Whether a backward went through this call of the model since the last step; None is any call."""
        return bool(self._counted) if root is None else root.counted_in == self._number

    def _is_single(self, root: RootCall) -> bool:
        """Whether the model got a single example without a batch dimension: it hands none to its layers then.

        Layers tell on statistics steps alone. On others the call is taken to be as the last one that was told of.
        """
        if self._rule not in _BY_INPUT:
            return False
        if root.batched or root.unbatched:
            self._single[root.model] = not root.batched
        return self._single.get(root.model, False)

    def state(self, terms: float | Tensor) -> None:
        """Add stated terms, which stand for all counted ones."""
        self._stated = terms if self._stated is None else self._stated + terms

    def summed(self) -> float:
        """`LossCount.summed` so far."""
        if not self.is_sum:
            return 1
        return math.inf if self._rootless else max(self._counted.values(), default=0)

    def result(self) -> LossCount:
        """The terms so far.

        Raises:
            RuntimeError: their number is unknown, and was not stated.
        """
        # Models that are called one after the other (an encoder, a decoder) see the terms of one loss.
        counted = max(self._counted.values(), default=0)
        if self.is_sum:
            return LossCount(averaged=1, summed=self.summed())
        if self._stated is not None:
            return LossCount(averaged=self._stated, summed=1)
        if self._rootless:
            raise RuntimeError(
                "kfac_optim: the number of terms in the loss's mean is unknown: a layer ran outside the model's "
                f"forward (a submodule or another method was called directly), or loss_terms={self._rule} finds no "
                "tensor with a dimension to read it off. Call optimizer.set_loss_terms(n) before backward(), with n "
                "the number of terms the loss is averaged over, or run the model through its own forward, or build the "
                "optimizer with model=<the module that is called>."
            )
        return LossCount(averaged=counted, summed=1)

    def reset(self) -> None:
        """Begin the next step."""
        self._number += 1
        self._stated, self._rootless = None, False
        self._counted.clear()


def first_tensor(*structures: Any, least_ndim: int = 1) -> Tensor | None:
    """The first tensor with a dimension; a scalar in front of the batch (a time, a temperature) is not the batch."""
    leaves = tree_leaves(structures)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() >= least_ndim), None)
