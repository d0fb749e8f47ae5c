"""`nn.Linear`, with any leading dimensions: the first is the batch, the others are shared."""

import math

import torch
from torch import Tensor, nn

from kfac_optim.capture import LayerCall
from kfac_optim.layers.base import LayerStatistics, RowStatistics, WeightBiasAdapter
from kfac_optim.specs import LayerSpec


class LinearStatistics(RowStatistics):
    def input_rows(self, layer_input: Tensor) -> Tensor:
        return _canonical(layer_input)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return _canonical(gradient)


class LinearAdapter(WeightBiasAdapter[nn.Linear]):
    def unbatched_ndim(self, module: nn.Linear) -> int:
        return 1

    def statistics(self, module: nn.Linear, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return LinearStatistics(spec, call, dtype)


def _canonical(tensor: Tensor) -> Tensor:
    """`[d]`, `[batch, d]` or `[batch, *shared, d]` as `[1, batch, shared, d]`."""
    if tensor.dim() == 1:
        return tensor.view(1, 1, 1, -1)
    return tensor.reshape(1, tensor.shape[0], math.prod(tensor.shape[1:-1]), tensor.shape[-1])
