"""What convolutions share, transposed or not: at each position a linear layer over a patch of the input."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kfac_optim.capture.batches import examples_of
from kfac_optim.capture.function_modes import Function
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.patch_correlation import correlated_gram, correlation_pays
from kfac_optim.factors.patches import Patches
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import bordered, channel_rows, gram, on_host, sketch_of
from kfac_optim.factors.subsampling import RowSample
from kfac_optim.layers.base import StatisticsSink, WeightBiasAdapter
from kfac_optim.layers.noted_function import Noted, note_function
from kfac_optim.linalg.sketches import sketch_directions
from kfac_optim.specs import LayerSpec, Sketched, Structure, WeightSharing
from kfac_optim.utils.hooks import Handle

N = TypeVar("N", bound=_ConvNd)


class PatchStatistics(RowStatistics, Generic[N]):
    """Computes the statistics of a layer whose rows are patches of feature maps: a convolution, in one view or another.

    Rows are copies, `prod(kernel)` times as large as the input. They are made where rows are asked for. Moments are
    computed without rows. The diagonal of `A`, and `A` of means over positions, come from sums of what each element of
    the kernel sees; all of `A` comes from correlations where `correlation_pays`. Those count every position. Rows that
    are not active are made and subtracted again if they are few. If they are many, or if what they hold is so large
    that subtracting it would lose the digits of `A`, the active rows are made. An accelerator would have to be asked
    how many there are: there all are made.

    Args:
        module: the convolution, for its kernel and groups; for stride, padding and dilation where the context of the
            call does not tell them.
        spec: the layer; `spec`, `call` and `dtype` are as in `RowStatistics`.
    """

    rows_suffice = True

    def __init__(self, module: N, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(spec, call, dtype)
        self.module, self.ndim = module, len(module.kernel_size)

    @abstractmethod
    def patches(self, features: Tensor) -> Patches:
        """Give the patches of some of the examples of the input, `[batch, channels, *space]`."""

    def context_by_axis(self) -> list[tuple[int, ...]]:
        """Return what the context of the call says, a number for each dimension of space."""
        context, ndim = self.call.context, self.ndim
        return [context[start : start + ndim] for start in range(0, len(context), ndim)]

    def refuse_positions(self, seen: tuple[int, ...], whose: str) -> NoReturn:
        """Raise where what the kernel sees are not the positions of the output."""
        output, expected = (_by_times(each) for each in (self.call.gradient.shape[-self.ndim :], seen))
        raise RuntimeError(
            f"kfac_optim: the gradient of layer {self.spec.name!r} has {output} positions, not the {expected} of its "
            f"{whose}: a hook, or a forward that replaced the layer's own since the optimizer was built, changes "
            f"what it reads or returns. Build the optimizer after that, or list the layer in skip_layers."
        )

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return self._checked_patches(self._batched(layer_input)).rows()

    def sampled_input_rows(self, layer_input: Tensor, sample: RowSample) -> Tensor:
        return self._checked_patches(sample.of_batch(self._batched(layer_input))).rows(sample.positions)

    def mean_input_rows(self, layer_input: Tensor, active: Tensor | None) -> Tensor:
        patches = self._checked_patches(self._batched(layer_input))
        counts = math.prod(patches.positions) if active is None else active.sum(1, keepdim=True).clamp(min=1)
        return (patches.sums(active) / counts).unsqueeze(2).to(layer_input.dtype)

    def input_rows_along(self, layer_input: Tensor, directions: Tensor) -> Tensor:
        return self._checked_patches(self._batched(layer_input)).along(directions)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return channel_rows(self._batched(gradient), self.spec.groups)

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        """Return `Σ a aᵀ`, of which `A` is the mean, over the patches that `active` marks: the quickest way to it."""
        expand = self.spec.weight_sharing is WeightSharing.EXPAND
        drawn = self._sample is not None and self._sample.positions is not None
        if drawn or not expand or self.spec.blocks(0) > 1:
            return super()._input_moment_over(active, structure)
        assert self.call.input is not None, "the input was released after the first backward"
        features = self._batched(self.call.input)
        if self._sample is not None:
            features = self._sample.of_batch(features)
        patches = self._checked_patches(features.to(self.dtype))
        if structure is Structure.DIAGONAL:
            squares = replace(patches, features=patches.features.square()).total(active)
            if self.spec.has_bias:
                squares = torch.cat([squares, active.sum().to(squares).expand(len(squares), 1)], dim=-1)
            return squares.to(self.dtype)
        if not on_host(active):
            return super()._input_moment_over(active, structure)
        inactive = active.numel() - int(active.sum())
        if isinstance(structure, Sketched) and inactive == 0:
            return self._sketched(patches, structure)
        # To make rows takes several times as long as to correlate as many.
        if not isinstance(structure, Sketched) and 3 * inactive <= active.numel() and correlation_pays(patches):
            moment = self._correlated(patches)
            if inactive == 0:
                return moment
            excess = gram(patches.marked_rows(~active), structure, constant=self._constant)
            moment -= excess
            left, taken = (each.diagonal(dim1=1, dim2=2)[:, : patches.width].sum(1) for each in (moment, excess))
            if bool((taken <= left).all()):  # and so finite, and of the digits at most one lost
                return moment
        if inactive == 0:
            return gram(patches.rows(), structure, constant=self._constant)
        return gram(patches.marked_rows(active), structure, constant=self._constant)

    def _checked_patches(self, features: Tensor) -> Patches:
        patches = self.patches(features)
        if patches.positions != tuple(self.call.gradient.shape[-self.ndim :]):
            self.refuse_positions(patches.positions, "patches")
        return patches

    def _correlated(self, patches: Patches) -> Tensor:
        """Return `Σ a aᵀ` over all positions."""
        moment = correlated_gram(patches)
        if not self.spec.has_bias:
            return moment
        count = len(patches.features) * math.prod(patches.positions)
        return bordered(moment, patches.total(), count, self.bias_input)

    def _sketched(self, patches: Patches, structure: Sketched) -> Tensor:
        """Return the sketch of `Σ a aᵀ` over all positions."""
        directions = sketch_directions(self.spec.in_dim, structure.columns, like=patches.features)
        traces = replace(patches, features=patches.features.square()).total().sum(-1)
        if not self.spec.has_bias:
            return sketch_of(patches.products(patches.along(directions)), traces)
        along = patches.along(directions[:-1]) + self.bias_input * directions[-1]
        last = self.bias_input * along.sum((1, 2)).unsqueeze(1)
        products = torch.cat([patches.products(along), last], 1)
        return sketch_of(products, traces + along[0, ..., 0].numel() * self.bias_input)

    def _batched(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == self.ndim + 2 else tensor.unsqueeze(0)


class PatchAdapter(WeightBiasAdapter[N]):
    """Handles a convolution, in one view or another.

    A forward of its own may pad and crop as it likes, call torch's function several times, or hand it something
    computed from the weight. So there the function is looked at instead of the module: each call with the weight
    itself counts, as what that call does; what else is done with the weight has no statistics, rather than wrong ones.
    """

    in_rows = True
    functions: ClassVar[Mapping[type[nn.Module], Function]]
    """What torch's own module calls."""
    rows_of: type[PatchStatistics[N]]
    """What makes statistics of a call."""

    def unbatched_ndim(self, module: N) -> int:
        return len(module.kernel_size) + 1

    def statistics(self, module: N, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return self.rows_of(module, spec, call, dtype)

    @abstractmethod
    def context(self, module: N, *args: Any, **kwargs: Any) -> tuple[int, ...] | None:
        """Return what a call of the function did, as `LayerCall.context`; None if it is not the matrix of the layer.

        Args:
            module: the layer.
            args: positional arguments of the function, after the bias.
            kwargs: keyword arguments of the function.
        """

    def capture(self, module: N, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink) -> Handle:
        family = next((cls for cls in type(module).__mro__ if cls in self.functions), None)
        if family is None or not _overrides(module, family, ("forward", "_conv_forward")):
            return super().capture(module, specs, window, sink)
        watch, has_bias = self._watch(module, specs, sink), specs[0].has_bias
        read = partial(_read, self, module, has_bias)
        return note_function(window, module, watch, self.functions[family], read, has_bias=has_bias)


def _read(
    adapter: PatchAdapter[N],
    module: N,
    has_bias: bool,
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Noted:
    context, examples = adapter.context(module, *args, **kwargs), examples_of(input, adapter.unbatched_ndim(module))
    return Noted(weight, input, examples, bias if has_bias else None, context=context)  # a frozen bias is no part of it


def _overrides(module: nn.Module, family: type[nn.Module], methods: Collection[str]) -> bool:
    """Return whether the class of `module`, or it alone, replaces a method of `family`."""
    return any(name in vars(module) or getattr(type(module), name) is not getattr(family, name) for name in methods)


def by_axis(amount: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Read a number as torch's functions do, one for all dimensions of space or one for each."""
    amounts = (amount,) if isinstance(amount, int) else tuple(amount)
    return amounts * ndim if len(amounts) == 1 else amounts


def _by_times(sizes: Collection[int]) -> str:
    return "×".join(map(str, sizes))
