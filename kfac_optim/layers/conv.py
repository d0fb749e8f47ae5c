"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: a linear layer over the patches of the padded input."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from kfac_optim.capture import LayerCall
from kfac_optim.layers.base import LayerStatistics, RowStatistics, WeightBiasAdapter
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
        # [batch, channels, *space] → windows [batch, channels, *positions, *kernel], a view of the padded input
        windows = self._pad(self._batched(layer_input))
        kernel, stride, dilation = self.module.kernel_size, self.module.stride, self.module.dilation
        for axis in range(self.ndim):
            span = dilation[axis] * (kernel[axis] - 1) + 1
            windows = windows.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
        batch, channels = windows.shape[:2]
        shared = math.prod(windows.shape[2 : 2 + self.ndim])
        # split channels into groups, then [groups, batch, *positions, channels/groups, *kernel]
        windows = windows.reshape(batch, self.spec.groups, channels // self.spec.groups, *windows.shape[2:])
        positions = range(3, 3 + self.ndim)
        offsets = range(3 + self.ndim, 3 + 2 * self.ndim)
        patches = windows.permute(1, 0, *positions, 2, *offsets)
        return patches.reshape(self.spec.groups, batch, shared, -1)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        # [batch, out, *positions] → [groups, batch, shared, out/groups]
        gradient = self._batched(gradient)
        batch, shared = gradient.shape[0], math.prod(gradient.shape[2:])
        return gradient.reshape(batch, self.spec.groups, self.spec.out_dim, shared).permute(1, 0, 3, 2)

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
    def groups(self, module: _ConvNd) -> int:
        return module.groups

    def unbatched_ndim(self, module: _ConvNd) -> int:
        return len(module.kernel_size) + 1

    def statistics(self, module: _ConvNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return ConvStatistics(module, spec, call, dtype)
