"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: a linear layer over the patches of the padded input."""

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from kfac_optim.calls import LayerCall
from kfac_optim.layers.base import LayerStatistics, PatchStatistics, WeightBiasAdapter
from kfac_optim.patches import Patches, pad
from kfac_optim.specs import LayerSpec


class ConvStatistics(PatchStatistics):
    """Rows are patches, ordered `(channel, *kernel)` like the weight's own trailing dimensions.

    Args:
        module: the convolution, for its kernel, stride, padding, dilation and groups.
        spec: as in `RowStatistics`, as are `call` and `dtype`.
    """

    def __init__(self, module: _ConvNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(len(module.kernel_size), spec, call, dtype)
        self.module = module

    def patches(self, features: Tensor) -> Patches:
        module = self.module
        # torch keeps the amounts for every kind of padding ('same' and 'valid' too) in the order of F.pad: last first
        amounts = module._reversed_padding_repeated_twice
        zeros = tuple(zip(amounts[-2::-2], amounts[::-2], strict=True))
        if module.padding_mode != "zeros":
            features = pad(features, zeros, module.padding_mode)
            zeros = ((0, 0),) * self.ndim
        return Patches(features, zeros, module.kernel_size, module.stride, module.dilation, self.spec.groups)


class ConvAdapter(WeightBiasAdapter[_ConvNd]):
    in_rows = True

    def groups(self, module: _ConvNd) -> int:
        return module.groups

    def unbatched_ndim(self, module: _ConvNd) -> int:
        return len(module.kernel_size) + 1

    def statistics(self, module: _ConvNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return ConvStatistics(module, spec, call, dtype)
