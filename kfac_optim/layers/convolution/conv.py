"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: a linear layer over the patches of the padded input."""

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kfac_optim.factors.patches import Patches, pad
from kfac_optim.layers.convolution.base import PatchAdapter, PatchStatistics, by_axis


class ConvStatistics(PatchStatistics[_ConvNd]):
    """Rows are patches, ordered `(channel, *kernel)` like the weight's own trailing dimensions."""

    def patches(self, features: Tensor) -> Patches:
        module = self.module
        if self.call.context:
            stride, dilation, before, after = self.context_by_axis()
            zeros = tuple(zip(before, after, strict=True))
            return Patches(features, zeros, module.kernel_size, stride, dilation, self.spec.groups)
        if module.padding_mode == "zeros":
            zeros = zeros_around(module.padding, module.kernel_size, by_axis(module.dilation, self.ndim))
        else:
            # What such a forward pads by was fixed with the module, in the order of F.pad: last first.
            amounts = module._reversed_padding_repeated_twice
            features = pad(features, tuple(zip(amounts[-2::-2], amounts[::-2], strict=True)), module.padding_mode)
            zeros = ((0, 0),) * self.ndim
        stride, dilation = (by_axis(each, self.ndim) for each in (module.stride, module.dilation))
        return Patches(features, zeros, module.kernel_size, stride, dilation, self.spec.groups)


def zeros_around(
    padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return what torch pads by, before and after along each dimension of space."""
    if padding == "same":
        reach = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in reach)
    amounts = by_axis(0 if isinstance(padding, str) else padding, len(kernel))  # "valid" is none
    return tuple((amount, amount) for amount in amounts)


class ConvAdapter(PatchAdapter[_ConvNd]):
    functions: ClassVar = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
    rows_of = ConvStatistics

    def context(
        self,
        module: _ConvNd,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> tuple[int, ...] | None:
        if groups != module.groups:
            return None
        ndim = len(module.kernel_size)
        dilations = by_axis(dilation, ndim)
        before, after = zip(*zeros_around(padding, module.kernel_size, dilations), strict=True)
        return (*by_axis(stride, ndim), *dilations, *before, *after)

    def groups(self, module: _ConvNd) -> int:
        return module.groups
