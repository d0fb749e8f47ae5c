"""Normalisation layers: `y = w ⊙ x̂ + b`, one small matrix for each feature; see `norm_statistics`."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.second_moments import batched, channel_moments, channel_rows
from kfac_optim.layers.base import WeightBiasAdapter, own_forward
from kfac_optim.layers.norm_statistics import ByChannel, ByExample, NormStatistics, Standardiser
from kfac_optim.specs import LayerSpec, Structure

M = TypeVar("M", bound=nn.Module)
TrailingNorm = TypeVar("TrailingNorm", nn.LayerNorm, nn.RMSNorm)


class NormAdapter(WeightBiasAdapter[M]):
    """Handles a layer whose `weight` and `bias` scale and shift each feature of a normalised input."""

    in_rows = True  # its matrices are never wide, and NormStatistics can take some of the rows
    packs_several = True
    has_matrix = False
    family: ClassVar[type[nn.Module]]

    @abstractmethod
    def standardiser(self, module: M, layer_input: Tensor, dtype: torch.dtype, training: bool) -> Standardiser:
        """Return what the layer, in that mode, does before `weight` and `bias`: it makes `x̂` of examples of its input.

        It changes no buffer.

        Args:
            module: the layer.
            layer_input: all examples.
            dtype: the dtype of `x̂`.
            training: whether the layer was in training mode.
        """

    @abstractmethod
    def canonical(self, module: M, tensor: Tensor) -> Tensor:
        """Return examples of input, output or gradient as `[examples, shared, features]`."""

    def refusal(self, module: M) -> str | None:
        return own_forward(module, self.family) or super().refusal(module)

    def spec(self, module: M, name: str, params: tuple[str, ...]) -> LayerSpec:
        features, kept = module.get_parameter(params[0]).numel(), (Structure.IDENTITY, Structure.DENSE)
        return LayerSpec(name, params, 1, len(params), features, kept)

    def statistics(self, module: M, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        assert call.input is not None
        unbatched_ndim = self.unbatched_ndim(module)
        # In a narrower dtype an input far from zero has lost its variation.
        exact = torch.promote_types(dtype, torch.float32)
        standardise = self.standardiser(module, batched(call.input, unbatched_ndim), exact, call.training)
        return NormStatistics(spec, call, dtype, standardise, lambda some: self.canonical(module, some), unbatched_ndim)

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.flatten() for tensor in tensors], dim=1).unsqueeze(-1)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        return matrix.squeeze(-1).unbind(1)


class _TrailingNormAdapter(NormAdapter[TrailingNorm]):
    """Features are the trailing dimensions `normalized_shape`."""

    def unbatched_ndim(self, module: TrailingNorm) -> int:
        return len(module.normalized_shape)

    def canonical(self, module: TrailingNorm, tensor: Tensor) -> Tensor:
        between = tensor.shape[1 : tensor.dim() - len(module.normalized_shape)]
        return tensor.reshape(len(tensor), math.prod(between), math.prod(module.normalized_shape))


class LayerNormAdapter(_TrailingNormAdapter[nn.LayerNorm]):
    family = nn.LayerNorm

    def standardiser(
        self, module: nn.LayerNorm, layer_input: Tensor, dtype: torch.dtype, training: bool
    ) -> Standardiser:
        key = LayerNormAdapter, dtype, module.normalized_shape, module.eps
        return ByExample(key, lambda some: F.layer_norm(some.to(dtype), module.normalized_shape, eps=module.eps))


class RMSNormAdapter(_TrailingNormAdapter[nn.RMSNorm]):
    family = nn.RMSNorm

    def standardiser(self, module: nn.RMSNorm, layer_input: Tensor, dtype: torch.dtype, training: bool) -> Standardiser:
        # Without an eps torch takes that of the dtype it computes in, which here may be wider than the layer's.
        widest = torch.promote_types(module.weight.dtype, torch.float32)
        eps = torch.finfo(widest).eps if module.eps is None else module.eps
        key = RMSNormAdapter, dtype, module.normalized_shape, eps
        return ByExample(key, lambda some: F.rms_norm(some.to(dtype), module.normalized_shape, eps=eps))


class _ChannelNormAdapter(NormAdapter[M]):
    """Features are channels, dimension 1 of examples."""

    def unbatched_ndim(self, module: M) -> int:
        return -1

    def canonical(self, module: M, tensor: Tensor) -> Tensor:
        return channel_rows(tensor, 1).squeeze(0)


class GroupNormAdapter(_ChannelNormAdapter[nn.GroupNorm]):
    family = nn.GroupNorm

    def standardiser(
        self, module: nn.GroupNorm, layer_input: Tensor, dtype: torch.dtype, training: bool
    ) -> Standardiser:
        key = GroupNormAdapter, dtype, module.num_groups, module.eps
        return ByExample(key, lambda some: F.group_norm(some.to(dtype), module.num_groups, eps=module.eps))


class BatchNormAdapter(_ChannelNormAdapter[_BatchNorm]):
    """Takes `x̂` as given, also with statistics of the batch: an example's share in them is not differentiated."""

    family = _BatchNorm

    def standardiser(self, module: _BatchNorm, layer_input: Tensor, dtype: torch.dtype, training: bool) -> Standardiser:
        mean, variance = module.running_mean, module.running_var
        if training or mean is None or variance is None:
            mean, variance = channel_moments(layer_input, dtype)
        else:  # a copy, as a forward in training moves the mean in place while rows wait
            mean, variance = mean.to(dtype, copy=True), variance.to(dtype)
        shape = (-1, *[1] * (layer_input.dim() - 2))
        shift, scale = mean.view(shape), (variance + module.eps).rsqrt().to(dtype).view(shape)
        return ByChannel(shift, scale, dtype)


class InstanceNormAdapter(_ChannelNormAdapter[_InstanceNorm]):
    family = _InstanceNorm

    def unbatched_ndim(self, module: _InstanceNorm) -> int:
        return int(module._get_no_batch_dim())  # type: ignore[no-untyped-call]

    def standardiser(
        self, module: _InstanceNorm, layer_input: Tensor, dtype: torch.dtype, training: bool
    ) -> Standardiser:
        if training or not module.track_running_stats:
            key = InstanceNormAdapter, dtype, module.eps
            return ByExample(key, lambda some: F.instance_norm(some.to(dtype), eps=module.eps))
        mean, var = _like(module.running_mean, dtype), _like(module.running_var, dtype)
        return lambda some: F.instance_norm(some.to(dtype), mean, var, use_input_stats=False, eps=module.eps)


def _like(statistic: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if statistic is None else statistic.to(dtype)
