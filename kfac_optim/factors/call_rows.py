"""The rows of one call of a layer: which of them count, which were drawn, and what weight sharing makes of them."""

from abc import abstractmethod
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.second_moments import active_rows, mean_over_shared
from kfac_optim.factors.subsampling import Draw, RowSample
from kfac_optim.specs import LayerSpec, WeightSharing


class CallRows(LayerStatistics):
    """Holds the inputs and output gradients of one call as rows; layer families say what these rows are.

    A row is active when its `g` is not exactly zero in every group; see `RowStatistics`. Where a family says
    `rows_by_group`, a row is active in each group whose `g` is not zero there, and masks of rows, written
    `[batch, shared]` below, are `[groups, batch, shared]` if the spec has several groups.

    Args:
        spec: the layer.
        call: the call, in the layout of the module.
        dtype: the dtype of the moments, and of the products that make them.
    """

    rows_by_group = False
    """Whether each group has rows of its own, so that one may count in some groups and not in others."""

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        self.spec = spec
        self.call = call
        self.dtype = dtype
        self._sample: RowSample | None = None

    @abstractmethod
    def input_rows(self, layer_input: Tensor) -> Tensor:
        """Return canonical `a` `[groups, batch, shared, in]`, without the bias column unless `bias_in_rows`."""

    @abstractmethod
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Return canonical `g`, `[groups, batch, shared, out]`; zero where a shorter example has no position."""

    def sampled_input_rows(self, layer_input: Tensor, sample: RowSample) -> Tensor:
        """Give the rows of `input_rows` that `sample` names. A family whose rows are copies makes no others."""
        return sample.of(self.input_rows(layer_input))

    def mean_input_rows(self, layer_input: Tensor, active: Tensor | None) -> Tensor:
        """Return `mean_over_shared` of `input_rows`. A family whose rows are copies makes none."""
        return mean_over_shared(self.input_rows(layer_input), active)

    def input_rows_along(self, layer_input: Tensor, directions: Tensor) -> Tensor:
        """Multiply `input_rows` by `directions` `[in, k]`. A family whose rows are copies makes none."""
        return self.input_rows(layer_input) @ directions

    @property
    def term(self) -> int:
        return self.call.term

    @property
    def bias_input(self) -> int:
        """Return what the bias is multiplied by: 1, or 0 if this call did not add it."""
        return 1

    @property
    def bias_in_rows(self) -> bool:
        """Return whether `input_rows` have the bias column, as they must where only some positions have the bias."""
        return False

    def subsample(self, draw: Draw) -> None:
        rows = self.gradient_rows(self.call.gradient)
        self._sample = draw.rows(rows.shape[1], rows.shape[2], rows.device)

    @property
    def weight(self) -> float:
        return 1.0 if self._sample is None else self._sample.weight

    @property
    def positions(self) -> int:
        """Return positions of all examples: the most rows that can be active."""
        return self.active.numel()

    @cached_property
    def active(self) -> Tensor:
        """Return which rows count, `[batch, shared]` bool."""
        reach = self.call.gradient if self.call.reach is None else self.call.reach
        return self._active_in(reach)

    @cached_property
    def _number_active(self) -> int:
        """Return how many rows count. The host waits for the device to say."""
        return int(self.active.sum())

    @cached_property
    def active_before(self) -> Tensor | None:
        """Return which rows counted before this backward, `[batch, shared]` bool; None at the first."""
        return None if self.call.earlier is None else self._active_in(self.call.earlier)

    def _active_in(self, gradient: Tensor) -> Tensor:
        by_group = self.rows_by_group and self.spec.groups > 1
        return active_rows(self._sampled_gradient_rows(gradient), by_group=by_group)

    def _shared_mask(self, active: Tensor) -> Tensor:
        """Return which rows `active` marks after weight sharing: `[batch, shared]` or `[batch, 1]`."""
        return active.any(-1, keepdim=True) if self.spec.weight_sharing is WeightSharing.REDUCE else active

    def _shared_inputs(self, active: Tensor | None) -> Tensor:
        """Return `a` after weight sharing, without the column of ones that a bias adds.

        Only rows that `active` marks are meaningful; None marks all.
        """
        assert self.call.input is not None, "the input was released after the first backward"
        reduce = self.spec.weight_sharing is WeightSharing.REDUCE
        if self._sample is not None:
            a = self.sampled_input_rows(self.call.input, self._sample).to(self.dtype)
            return mean_over_shared(a, active) if reduce else a
        if reduce:
            return self.mean_input_rows(self.call.input.to(self.dtype), active)
        return self.input_rows(self.call.input.to(self.dtype))

    def _shared_gradients(self, gradient: Tensor) -> Tensor:
        g = self._sampled_gradient_rows(gradient).to(self.dtype)
        return g.sum(2, keepdim=True) if self.spec.weight_sharing is WeightSharing.REDUCE else g

    def _sampled_gradient_rows(self, gradient: Tensor) -> Tensor:
        return self._latest_rows if gradient is self.call.gradient else self._sampled(self.gradient_rows(gradient))

    @cached_property
    def _latest_rows(self) -> Tensor:
        """Give the rows of the latest sum of gradients: asked for twice, and a copy where only some are taken."""
        return self._sampled(self.gradient_rows(self.call.gradient))

    def _sampled(self, rows: Tensor) -> Tensor:
        return rows if self._sample is None else self._sample.of(rows)

    def _homogeneous(self, a: Tensor) -> Tensor:
        """Return `a` `[..., in]` with its last column, where there is a bias."""
        return a if self._constant is None else F.pad(a, (0, 1), value=self._constant)

    @property
    def _constant(self) -> int | None:
        """Return what stands in the last column behind `input_rows`; None where they are whole."""
        return self.bias_input if self.spec.has_bias and not self.bias_in_rows else None
