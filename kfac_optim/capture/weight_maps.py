"""What a layer does with its weight, as a function that is linear in both its input and the weight."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightMap(ABC):
    """Multiplies by a weight, and by its transpose.

    Inputs and gradients may have any leading dimensions, which come from the batch and from `torch.vmap`.
    """

    @abstractmethod
    def forward(self, layer_input: Tensor, weight: Tensor) -> Tensor:
        """Return the product, as the layer computes it, without a bias."""

    @abstractmethod
    def with_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        """Return the product with a bias added to it."""

    @abstractmethod
    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of that bias."""

    @abstractmethod
    def backward(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""

    @abstractmethod
    def weight_gradient(self, layer_input: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight, which itself can be differentiated."""


@dataclass(frozen=True)
class MatrixMap(WeightMap):
    """Multiplies `[..., in]` by the weight.

    Attributes:
        transposes: whether the weight is `[in, out]`; otherwise it is `[out, in]`.
    """

    transposes: bool

    def forward(self, layer_input: Tensor, weight: Tensor) -> Tensor:
        return layer_input @ weight if self.transposes else F.linear(layer_input, weight)

    def with_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        return output + bias

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, gradient.shape[-1]).sum(0)

    def backward(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return F.linear(gradient, weight) if self.transposes else gradient @ weight

    def weight_gradient(self, layer_input: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        rows, columns = (gradient, layer_input) if not self.transposes else (layer_input, gradient)
        return rows.reshape(-1, rows.shape[-1]).mT @ columns.reshape(-1, columns.shape[-1])


@dataclass(frozen=True)
class ConvolutionMap(WeightMap):
    """Convolves `[..., channels, *space]` with the weight, or does the transposed of that.

    Attributes:
        space: sizes of the input in space.
        stride: the stride along each dimension of space, as are `padding`, `dilation` and `output_padding`.
        padding: the zeros that are added on both sides.
        dilation: the dilation of the kernel.
        transposed: whether it is a transposed convolution.
        output_padding: what a transposed convolution adds to the size of its output.
        groups: the number of groups of channels.
    """

    space: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, layer_input: Tensor, weight: Tensor) -> Tensor:
        flat, lead = self._flat(layer_input)
        output: Tensor = torch.ops.aten.convolution(flat, weight, None, *self._numbers())
        return output.reshape(*lead, *output.shape[1:])

    def with_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        return output + bias.view(-1, *(1 for _ in self.space))

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return self._flat(gradient)[0].flatten(2).sum((0, 2))

    def backward(self, gradient: Tensor, weight: Tensor) -> Tensor:
        flat, lead = self._flat(gradient)
        channels = weight.shape[0] if self.transposed else weight.shape[1] * self.groups
        shape_alone = flat.new_empty(1).expand(len(flat), channels, *self.space)
        mask = (True, False, False)
        found: Tensor = torch.ops.aten.convolution_backward(flat, shape_alone, weight, None, *self._numbers(), mask)[0]
        return found.reshape(*lead, *found.shape[1:])

    def weight_gradient(self, layer_input: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        (flat, _), (flat_gradient, _) = self._flat(layer_input), self._flat(gradient)
        shape_alone = weight.detach()
        found: Tensor = torch.ops.aten.convolution_backward(
            flat_gradient, flat, shape_alone, None, *self._numbers(), (False, True, False)
        )[1]
        return found

    def _numbers(self) -> tuple[tuple[int, ...] | bool | int, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def _flat(self, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the tensor with one leading dimension, and those it had."""
        kept = len(self.space) + 1
        lead = tuple(tensor.shape[:-kept])
        return tensor.reshape(-1, *tensor.shape[-kept:]), lead
