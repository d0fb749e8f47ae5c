"""`nn.ConvTranspose1d`, `nn.ConvTranspose2d`, `nn.ConvTranspose3d`, as the ordinary convolutions that they are.

A transposed convolution of stride `s` convolves, at stride 1 and with the kernel flipped, the input with `s - 1` zeros
between neighbours (Dumoulin & Visin 2016, §4). In that view it is linear in each patch, and K-FAC for convolutions
(Grosse & Martens 2016) applies: rows are output positions, columns `(channel, *flipped kernel)`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from kfac_optim.factors.patches import Patches, pad
from kfac_optim.layers.convolution.base import PatchAdapter, PatchStatistics, by_axis
from kfac_optim.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class ConvTransposeSpec(LayerSpec):
    """Describes a matrix whose weight lies transposed in the parameter."""

    taps: int = 1
    """Elements of the kernel: it is unpacked from in front of the bias, as `[groups, out, in_channels, taps]`."""


class ConvTransposeStatistics(PatchStatistics[_ConvTransposeNd]):
    """Rows are patches of the interleaved input, ordered `(channel, *kernel)` with the kernel flipped."""

    def patches(self, features: Tensor) -> Patches:
        module = self.module
        if self.call.context:
            stride, dilation, padding = self.context_by_axis()
        else:
            given = (module.stride, module.dilation, module.padding)
            stride, dilation, padding = (by_axis(each, self.ndim) for each in given)  # type: ignore[arg-type]
        interleaved = _interleaved(features, stride)
        # The output's size tells what padding its end has: `output_padding`, or the `output_size` of that forward.
        positions = self.call.gradient.shape[-self.ndim :]
        zeros: tuple[tuple[int, int], ...] = ()
        for axis in range(self.ndim):
            reach = dilation[axis] * (module.kernel_size[axis] - 1)
            before = reach - padding[axis]
            after = positions[axis] + reach - before - interleaved.shape[2 + axis]
            if not 0 <= after - before < max(stride[axis], dilation[axis]):  # as torch bounds `output_padding`
                self.refuse_positions(tuple(interleaved.shape[2:]), "interleaved input")
            zeros += ((before, after),)
        if min(map(min, zeros)) < 0:
            interleaved, zeros = pad(interleaved, zeros), ((0, 0),) * self.ndim
        return Patches(interleaved, zeros, module.kernel_size, (1,) * self.ndim, dilation, self.spec.groups)


class ConvTransposeAdapter(PatchAdapter[_ConvTransposeNd]):
    """Its weight is `[in, out/groups, *kernel]`."""

    functions: ClassVar = {
        nn.ConvTranspose1d: F.conv_transpose1d,
        nn.ConvTranspose2d: F.conv_transpose2d,
        nn.ConvTranspose3d: F.conv_transpose3d,
    }
    rows_of = ConvTransposeStatistics

    def context(
        self,
        module: _ConvTransposeNd,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> tuple[int, ...] | None:
        if groups != module.groups:
            return None
        ndim = len(module.kernel_size)
        return (*by_axis(stride, ndim), *by_axis(dilation, ndim), *by_axis(padding, ndim))

    def spec(self, module: _ConvTransposeNd, name: str, params: tuple[str, ...]) -> LayerSpec:
        taps, groups = math.prod(module.kernel_size), module.groups
        in_dim = module.in_channels // groups * taps + len(params) - 1
        return ConvTransposeSpec(name, params, in_dim, module.out_channels // groups, groups, taps=taps)

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        assert isinstance(spec, ConvTransposeSpec)
        weight, *bias = tensors
        weight = weight.reshape(spec.groups, -1, spec.out_dim, spec.taps)
        return super().pack(spec, [_flipped(weight).transpose(1, 2), *bias])

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(spec, ConvTransposeSpec)
        weight, *bias = super().unpack(spec, matrix)
        weight = weight.reshape(spec.groups, spec.out_dim, -1, spec.taps)
        return (_flipped(weight).transpose(1, 2), *bias)


def _interleaved(features: Tensor, stride: Sequence[int]) -> Tensor:
    """Put `s - 1` zeros between neighbours of `features`: `[batch, channels, *(s·(space - 1) + 1)]`."""
    space = [step * (size - 1) + 1 for step, size in zip(stride, features.shape[2:], strict=True)]
    interleaved = features.new_zeros(*features.shape[:2], *space)
    taken = [slice(None), slice(None), *(slice(None, None, step) for step in stride)]
    interleaved[tuple(taken)] = features
    return interleaved


def _flipped(weight: Tensor) -> Tensor:
    """Reverse the kernel of `[..., taps]` along every dimension of space, which reverses it as a whole."""
    return weight.flip(-1)
