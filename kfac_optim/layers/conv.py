"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: a linear layer over the patches of the padded input."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from kfac_optim.calls import LayerCall
from kfac_optim.layers.base import LayerStatistics, RowStatistics, WeightBiasAdapter
from kfac_optim.rows import channel_rows, patch_rows
from kfac_optim.sampling import RowSample
from kfac_optim.specs import LayerSpec


class ConvStatistics(RowStatistics):
    """Rows are patches, ordered `(channel, *kernel)` like the weight's own trailing dimensions.

    Args:
        module: the convolution, for its kernel, stride, padding, dilation and groups.
        spec: as in `RowStatistics`, as are `call` and `dtype`.
    """

    def __init__(self, module: _ConvNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(spec, call, dtype)
        self.module = module
        self.ndim = len(module.kernel_size)

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return self._patches(self._batched(layer_input), None)

    def sampled_input_rows(self, layer_input: Tensor, sample: RowSample) -> Tensor:
        return self._patches(self._batched(layer_input)[sample.examples], sample.positions)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return channel_rows(self._batched(gradient), self.spec.groups)

    def _patches(self, features: Tensor, positions: Tensor | None) -> Tensor:
        module, padded = self.module, self._pad(features)
        return patch_rows(padded, module.kernel_size, module.stride, module.dilation, self.spec.groups, positions)

    def _batched(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == self.ndim + 2 else tensor.unsqueeze(0)

    def _pad(self, layer_input: Tensor) -> Tensor:
        # torch keeps the amounts for every kind of padding ('same' and 'valid' too) in the order of F.pad
        amounts = self.module._reversed_padding_repeated_twice
        if not any(amounts):
            return layer_input
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return F.pad(layer_input, amounts, mode=mode)


class ConvAdapter(WeightBiasAdapter[_ConvNd]):
    in_rows = True

    def groups(self, module: _ConvNd) -> int:
        return module.groups

    def unbatched_ndim(self, module: _ConvNd) -> int:
        return len(module.kernel_size) + 1

    def statistics(self, module: _ConvNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return ConvStatistics(module, spec, call, dtype)
