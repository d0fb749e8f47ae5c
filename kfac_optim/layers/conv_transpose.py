"""`nn.ConvTranspose1d`, `nn.ConvTranspose2d`, `nn.ConvTranspose3d`, as the ordinary convolutions that they are.

A transposed convolution of stride `s` convolves, at stride 1 and with the kernel flipped, the input with `s - 1` zeros
between neighbours (Dumoulin & Visin 2016, §4). In that view it is linear in each patch, and K-FAC for convolutions
(Grosse & Martens 2016) applies: rows are output positions, columns `(channel, *flipped kernel)`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from kfac_optim.calls import LayerCall
from kfac_optim.layers.base import LayerStatistics, PatchStatistics, WeightBiasAdapter, weight_and_bias
from kfac_optim.patches import Patches, pad
from kfac_optim.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class ConvTransposeSpec(LayerSpec):
    """A matrix whose weight lies transposed in the parameter."""

    taps: int = 1
    """Elements of the kernel: it is unpacked from in front of the bias, as `[groups, out, in_channels, taps]`."""


class ConvTransposeStatistics(PatchStatistics):
    """Rows are patches of the interleaved input, ordered `(channel, *kernel)` with the kernel flipped.

    Args:
        module: the transposed convolution, for its kernel, stride, padding and dilation.
        spec: as in `RowStatistics`, as are `call` and `dtype`.
    """

    def __init__(self, module: _ConvTransposeNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(len(module.kernel_size), spec, call, dtype)
        self.module = module

    def patches(self, features: Tensor) -> Patches:
        module, interleaved = self.module, self._interleaved(features)
        # The output's size tells what padding its end has: `output_padding`, or the `output_size` of that forward.
        positions = self.call.gradient.shape[-self.ndim :]
        zeros: tuple[tuple[int, int], ...] = ()
        for axis in range(self.ndim):
            reach = module.dilation[axis] * (module.kernel_size[axis] - 1)
            before = reach - int(module.padding[axis])
            zeros += ((before, positions[axis] + reach - before - interleaved.shape[2 + axis]),)
        if min(map(min, zeros)) < 0:
            interleaved, zeros = pad(interleaved, zeros), ((0, 0),) * self.ndim
        stride = (1,) * self.ndim
        return Patches(interleaved, zeros, module.kernel_size, stride, module.dilation, self.spec.groups)

    def _interleaved(self, features: Tensor) -> Tensor:
        """`[batch, channels, *(s·(space - 1) + 1)]`: `features` with `s - 1` zeros between neighbours."""
        stride = self.module.stride
        space = [step * (size - 1) + 1 for step, size in zip(stride, features.shape[2:], strict=True)]
        interleaved = features.new_zeros(*features.shape[:2], *space)
        taken = [slice(None), slice(None), *(slice(None, None, step) for step in stride)]
        interleaved[tuple(taken)] = features
        return interleaved


class ConvTransposeAdapter(WeightBiasAdapter[_ConvTransposeNd]):
    """Its weight is `[in, out/groups, *kernel]`."""

    in_rows = True

    def unbatched_ndim(self, module: _ConvTransposeNd) -> int:
        return len(module.kernel_size) + 1

    def specs(self, module: _ConvTransposeNd, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        params = weight_and_bias(trained)
        if not params:
            return ()
        taps = math.prod(module.kernel_size)
        return (
            ConvTransposeSpec(
                name=name,
                params=params,
                in_dim=module.in_channels // module.groups * taps + len(params) - 1,
                out_dim=module.out_channels // module.groups,
                groups=module.groups,
                taps=taps,
            ),
        )

    def statistics(
        self, module: _ConvTransposeNd, spec: LayerSpec, call: LayerCall, dtype: torch.dtype
    ) -> LayerStatistics:
        return ConvTransposeStatistics(module, spec, call, dtype)

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


def _flipped(weight: Tensor) -> Tensor:
    """`[..., taps]` with the kernel reversed along every dimension of space, which reverses it as a whole."""
    return weight.flip(-1)
