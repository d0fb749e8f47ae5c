"""Parameters that functions multiply by, in modules of no known kind: their uses are watched, not the modules."""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import ADDS_BIAS
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import linear_rows
from kfac_optim.layers.base import LayerAdapter, StatisticsSink
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.hooks import Handle, Handles


class ProductStatistics(RowStatistics):
    """Computes the statistics of one product `[batch, *shared, in]` to `[batch, *shared, out]`, as of `nn.Linear`.

    Where the block's bias was not added (see `ADDS_BIAS`), the bias column of `a` is zero, and where it was added to
    some positions, as in a pass that carries derivatives (`taylor.laplacian`), it is 1 there and 0 elsewhere; a product
    with the transpose has none, and its `g` is zero there.
    """

    rows_suffice = rows_may_wait = True

    def input_rows(self, layer_input: Tensor) -> Tensor:
        rows = linear_rows(layer_input)
        if not self.bias_in_rows:
            return rows
        column = rows.new_zeros(rows.shape[2], 1)
        column[: self.call.context[1]] = 1
        return torch.cat([rows, column.expand(*rows.shape[:3], 1)], dim=-1)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        rows = linear_rows(gradient)
        missing = self.spec.out_dim - rows.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows  # to pad by nothing is a copy

    @property
    def bias_input(self) -> int:
        return int(self.call.context == ADDS_BIAS)

    @property
    def bias_in_rows(self) -> bool:
        return len(self.call.context) > 1 and self.spec.has_bias


class ProductAdapter(LayerAdapter[nn.Module]):
    """Handles a weight `[out, in]`, or `[in, out]` if `transposes`, and perhaps a bias `[out]`."""

    in_rows = True

    def __init__(self, *, transposes: bool) -> None:
        self.transposes = transposes

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def specs(self, module: nn.Module, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        return ()  # only its use tells what a bare parameter is

    def capture(
        self, module: nn.Module, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        return Handles()

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        weight, *bias = tensors
        return super().pack(spec, [weight.mT if self.transposes else weight, *bias])

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        weight, *bias = super().unpack(spec, matrix)
        return (weight.mT if self.transposes else weight, *bias)
