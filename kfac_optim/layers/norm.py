"""Normalisation layers: `y = w ⊙ x̂ + b`, one small matrix for each feature.

The Fisher of feature j's weight and bias is `M Σ u uᵀ`, `u = g_j (x̂_j, 1)`, the unit-wise Fisher (Amari, Karakida &
Oizumi 2019; for batch normalisation Osawa et al. 2020, arXiv 2002.06015). So every feature is a group with gradient
matrix `[2, 1]`, `u` takes the place of `g`, and `A` is the identity: `λ` is added to the exact 2×2 block.

With weight sharing `expand` each position (token, pixel) is an example of its own; with `reduce` `u` is summed over
the positions of an example, which is the exact gradient of that example.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kfac_optim.calls import LayerCall
from kfac_optim.layers.base import LayerStatistics, WeightBiasAdapter, own_forward, weight_and_bias
from kfac_optim.rows import channel_rows
from kfac_optim.sampling import Draw, RowSample
from kfac_optim.specs import LayerSpec, Structure, WeightSharing

M = TypeVar("M", bound=nn.Module)
TrailingNorm = TypeVar("TrailingNorm", nn.LayerNorm, nn.RMSNorm)


class NormStatistics(LayerStatistics):
    """Unit-wise second moments.

    Args:
        spec: the layer.
        call: one call, with the input at every backward.
        dtype: of the moments.
        standardised: `x̂`, `[batch, shared, features]`.
        canonical: brings a gradient from the layout of the module to that of `standardised`.
    """

    keeps_input = True

    def __init__(
        self,
        spec: LayerSpec,
        call: LayerCall,
        dtype: torch.dtype,
        standardised: Tensor,
        canonical: Callable[[Tensor], Tensor],
    ) -> None:
        self.spec = spec
        self.call = call
        self.dtype = dtype
        self.standardised = standardised
        self.canonical = canonical
        self._sample: RowSample | None = None

    def subsample(self, draw: Draw) -> None:
        batch, shared, _ = self.standardised.shape
        self._sample = draw.rows(batch, shared, self.standardised.device)
        self.standardised = self._sampled(self.standardised)

    @property
    def weight(self) -> float:
        return 1.0 if self._sample is None else self._sample.weight

    @property
    def has_input(self) -> bool:
        return self.call.earlier is None and self.standardised.numel() > 0

    @property
    def count(self) -> float | Tensor:
        return self._rows * self.weight if self.weight > 1 else self._rows

    @property
    def _rows(self) -> int:
        batch, shared, _ = self.standardised.shape
        if not self.has_input:
            return 0
        return batch if self.spec.weight_sharing is WeightSharing.REDUCE else batch * shared

    def input_moment(self, structure: Structure) -> Tensor:
        shape = (self.spec.groups, 1, 1) if structure is Structure.DENSE else (self.spec.groups, 1)
        return self.standardised.new_ones(shape).mul_(self.count).to(self.dtype)

    def output_moment(self, structure: Structure) -> Tensor:
        moment = _moment(self._columns(self.call.gradient), structure)
        if self.call.earlier is not None:
            moment -= _moment(self._columns(self.call.earlier), structure)
        return moment.to(self.dtype)

    def rows(self) -> tuple[Tensor, Tensor]:
        u = torch.stack(self._columns(self.call.gradient), dim=-1).permute(2, 0, 1, 3).to(self.dtype)
        return u.new_ones(*u.shape[:-1], 1), u

    def _columns(self, gradient: Tensor) -> list[Tensor]:
        """`g x̂`, and `g` where there is a bias: each `[batch, shared, features]`."""
        g = self._sampled(self.canonical(gradient)).to(self.standardised.dtype)
        if self._sample is not None:
            g = g * self._sample.weight**0.5
        columns = [g * self.standardised, g][: self.spec.out_dim]
        if self.spec.weight_sharing is WeightSharing.REDUCE:
            columns = [column.sum(1, keepdim=True) for column in columns]
        return columns

    def _sampled(self, tensor: Tensor) -> Tensor:
        """The rows that are taken of all `[batch, shared, features]`."""
        return tensor if self._sample is None else self._sample.of(tensor.unsqueeze(0)).squeeze(0)


def _moment(columns: Sequence[Tensor], structure: Structure) -> Tensor:
    """`Σ u uᵀ` `[features, out, out]`, or its diagonal, of the columns of `u`."""
    if structure is Structure.DIAGONAL:
        return torch.stack([column.square().sum((0, 1)) for column in columns], dim=-1)
    size = range(len(columns))
    sums = {(i, j): (columns[i] * columns[j]).sum((0, 1)) for i in size for j in size if i <= j}
    return torch.stack([torch.stack([sums[min(i, j), max(i, j)] for j in size], dim=-1) for i in size], dim=-2)


class NormAdapter(WeightBiasAdapter[M]):
    """A layer whose `weight` and `bias` scale and shift each feature of a normalised input."""

    in_rows = True  # its matrices are never wide, and NormStatistics can take some of the rows
    family: ClassVar[type[nn.Module]]

    @abstractmethod
    def standardise(self, module: M, layer_input: Tensor, training: bool) -> Tensor:
        """`x̂`: what the layer, in that mode, makes of its input before `weight` and `bias`. Changes no buffer."""

    @abstractmethod
    def canonical(self, module: M, tensor: Tensor) -> Tensor:
        """Input, output or gradient as `[batch, shared, features]`."""

    def refusal(self, module: M) -> str | None:
        return own_forward(module, self.family) or super().refusal(module)

    def specs(self, module: M, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        params = weight_and_bias(trained)
        if not params:
            return ()
        return (
            LayerSpec(
                name=name,
                params=params,
                in_dim=1,
                out_dim=len(params),
                groups=module.get_parameter("weight").numel(),
                structure=(Structure.IDENTITY, Structure.DENSE),
            ),
        )

    def statistics(self, module: M, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        assert call.input is not None
        # In a narrower dtype an input far from zero has lost its variation.
        layer_input = call.input.to(torch.promote_types(dtype, torch.float32))
        standardised = self.canonical(module, self.standardise(module, layer_input, call.training))
        return NormStatistics(spec, call, dtype, standardised, lambda tensor: self.canonical(module, tensor))

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.flatten() for tensor in tensors], dim=1).unsqueeze(-1)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        return matrix.squeeze(-1).unbind(1)


class _TrailingNormAdapter(NormAdapter[TrailingNorm]):
    """Features are the trailing dimensions `normalized_shape`."""

    def unbatched_ndim(self, module: TrailingNorm) -> int:
        return len(module.normalized_shape)

    def canonical(self, module: TrailingNorm, tensor: Tensor) -> Tensor:
        leading = tensor.shape[: tensor.dim() - len(module.normalized_shape)]
        features = math.prod(module.normalized_shape)
        return tensor.reshape(leading[0] if leading else 1, math.prod(leading[1:]), features)


class LayerNormAdapter(_TrailingNormAdapter[nn.LayerNorm]):
    family = nn.LayerNorm

    def standardise(self, module: nn.LayerNorm, layer_input: Tensor, training: bool) -> Tensor:
        return F.layer_norm(layer_input, module.normalized_shape, eps=module.eps)


class RMSNormAdapter(_TrailingNormAdapter[nn.RMSNorm]):
    family = nn.RMSNorm

    def standardise(self, module: nn.RMSNorm, layer_input: Tensor, training: bool) -> Tensor:
        # Without an eps torch takes that of the dtype it computes in, which here may be wider than the layer's.
        widest = torch.promote_types(module.weight.dtype, torch.float32)
        eps = torch.finfo(widest).eps if module.eps is None else module.eps
        return F.rms_norm(layer_input, module.normalized_shape, eps=eps)


class _ChannelNormAdapter(NormAdapter[M]):
    """Features are channels, dimension 1 of an input that always has a batch dimension."""

    def unbatched_ndim(self, module: M) -> int:
        return -1

    def canonical(self, module: M, tensor: Tensor) -> Tensor:
        return channel_rows(tensor, 1).squeeze(0)


class GroupNormAdapter(_ChannelNormAdapter[nn.GroupNorm]):
    family = nn.GroupNorm

    def standardise(self, module: nn.GroupNorm, layer_input: Tensor, training: bool) -> Tensor:
        return F.group_norm(layer_input, module.num_groups, eps=module.eps)


class BatchNormAdapter(_ChannelNormAdapter[_BatchNorm]):
    """With statistics of the batch `x̂` is taken as given: an example's share in them is not differentiated."""

    family = _BatchNorm

    def standardise(self, module: _BatchNorm, layer_input: Tensor, training: bool) -> Tensor:
        mean, var = module.running_mean, module.running_var
        if training or (mean is None and var is None):
            return F.batch_norm(layer_input, None, None, training=True, eps=module.eps)
        return F.batch_norm(layer_input, _like(mean, layer_input), _like(var, layer_input), eps=module.eps)


class InstanceNormAdapter(_ChannelNormAdapter[_InstanceNorm]):
    family = _InstanceNorm

    def unbatched_ndim(self, module: _InstanceNorm) -> int:
        return int(module._get_no_batch_dim())  # type: ignore[no-untyped-call]

    def canonical(self, module: _InstanceNorm, tensor: Tensor) -> Tensor:
        return super().canonical(module, self._batched(module, tensor))

    def standardise(self, module: _InstanceNorm, layer_input: Tensor, training: bool) -> Tensor:
        layer_input = self._batched(module, layer_input)
        if training or not module.track_running_stats:
            return F.instance_norm(layer_input, eps=module.eps)
        mean, var = _like(module.running_mean, layer_input), _like(module.running_var, layer_input)
        return F.instance_norm(layer_input, mean, var, use_input_stats=False, eps=module.eps)

    def _batched(self, module: _InstanceNorm, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if tensor.dim() == self.unbatched_ndim(module) else tensor


def _like(statistic: Tensor | None, layer_input: Tensor) -> Tensor | None:
    return None if statistic is None else statistic.to(layer_input.dtype)
