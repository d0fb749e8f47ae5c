"""`nn.Bilinear`: a linear layer over all products of a number of the first input and one of the second.

`y_k = x₁ᵀ W_k x₂ + b_k` is linear in `a = x₁ ⊗ x₂`, so that `A` holds the second moments of these products, and
`A ⊗ G` is K-FAC as for any linear layer (Martens & Grosse 2015).
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import linear_rows
from kfac_optim.factors.subsampling import RowSample
from kfac_optim.layers.base import StatisticsSink, WeightBiasAdapter, own_forward
from kfac_optim.layers.noted_function import Noted, note_function
from kfac_optim.specs import LayerSpec, Sketched, Structure, WeightSharing
from kfac_optim.utils.hooks import Handle


class BilinearStatistics(RowStatistics):
    """Makes rows of the products of both inputs, which stand side by side in the call's input.

    Args:
        width: numbers of the first input.
        spec: the layer; `spec`, `call` and `dtype` are as in `RowStatistics`.
    """

    def __init__(self, width: int, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(spec, call, dtype)
        self.width = width

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return _products(*self._both(layer_input))

    def sampled_input_rows(self, layer_input: Tensor, sample: RowSample) -> Tensor:
        first, second = self._both(layer_input)
        return _products(sample.of(first), sample.of(second))

    def input_rows_along(self, layer_input: Tensor, directions: Tensor) -> Tensor:
        first, second = self._both(layer_input)
        along = first @ directions.view(self.width, -1)  # [..., in₂ · k]
        return (along.view(*second.shape, directions.shape[1]) * second.unsqueeze(-1)).sum(-2)

    def _both(self, layer_input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of both inputs, `[1, batch, shared, in₁]` and `[1, batch, shared, in₂]`."""
        wide = layer_input.to(torch.promote_types(layer_input.dtype, self.dtype))  # products of narrow numbers overflow
        rows = linear_rows(wide)
        return rows[..., : self.width], rows[..., self.width :]

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        whole = self.spec.weight_sharing is WeightSharing.EXPAND and self.spec.blocks(0) == 1
        if structure is not Structure.DIAGONAL or not whole or self.call.input is None:
            return super()._input_moment_over(active, structure)
        # The squares of products are the products of squares, so that no row of them is made.
        both = self._both(self.call.input)
        first, second = both if self._sample is None else (self._sample.of(each) for each in both)
        # Rows that do not count may hold anything.
        first, second = (torch.where(active.unsqueeze(-1), each, 0).square().flatten(0, 2) for each in (first, second))
        squares = first.mT @ second
        moment = squares.flatten().to(self.dtype)
        if self._constant is not None:
            moment = torch.cat([moment, (active.sum() * self._constant**2).to(moment).view(1)])
        return moment.unsqueeze(0)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return linear_rows(gradient)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Return `x₁ ⊗ x₂` of each row, `[..., in₁ · in₂]`."""
    return (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)


class BilinearAdapter(WeightBiasAdapter[nn.Bilinear]):
    """Takes its weight `[out, in₁, in₂]` for a matrix `[out, in₁ · in₂]`."""

    in_rows = True

    def refusal(self, module: nn.Bilinear) -> str | None:
        return own_forward(module, nn.Bilinear) or super().refusal(module)

    def unbatched_ndim(self, module: nn.Bilinear) -> int:
        return 1

    def statistics(self, module: nn.Bilinear, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return BilinearStatistics(module.in1_features, spec, call, dtype)

    def capture(
        self, module: nn.Bilinear, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        watch, has_bias = self._watch(module, specs, sink), specs[0].has_bias
        return note_function(window, module, watch, F.bilinear, partial(_read, has_bias), has_bias=has_bias)


def _read(has_bias: bool, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Noted:
    both = torch.cat([input1.detach(), input2.detach()], dim=-1)
    examples = None if input1.dim() == 1 else len(input1)
    return Noted(weight, both, examples, bias if has_bias else None)  # a frozen bias is no part of the matrix
