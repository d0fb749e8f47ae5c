"""Layers that scale, and perhaps shift, each feature of what they make of their input, whatever class they are of.

They are known by what they do: a forward that gives back the shape of its input, and in which every output is affine in
the one weight of its feature (and in the one bias), `y_j = s_j(x) w_j + c_j(x) + b_j`. Examples are the RMSNorms of
Hugging Face, Gemma's, whose weight is off by one, timm's norms of channels, and learned scales. `s` takes the
place of the normalised input: it is the difference of two forwards, with ones and with zeros for the weight. All else
is as for torch's own norms.
"""

import copy
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_optim.factors.second_moments import channel_rows
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.layers.norm import NormAdapter
from kfac_optim.specs import LayerSpec

# How far outputs of a probe may be from affine, in units of the largest: probes are made in float64, forwards may
# compute in float32.
_CLOSE = 1e-4

# Features beyond which a layer is not probed: its forward might be a costly one.
_WIDEST = 2**17


class ScaleAdapter(NormAdapter[nn.Module]):
    """Handles a layer known by `scale_adapter`.

    Args:
        scale: name of its weight `[features]`.
        shift: name of its bias, where it has one.
        channels: whether features are dimension 1 of examples, or else the last one.
    """

    def __init__(self, scale: str, shift: str | None, *, channels: bool) -> None:
        self.scale, self.shift, self.channels = scale, shift, channels

    def refusal(self, module: nn.Module) -> str | None:
        names = [self.scale] if self.shift is None else [self.scale, self.shift]
        if any(module._parameters.get(name) is None for name in names) or "forward" in vars(module):
            name = type(module).__name__
            return f"{name} was changed after the optimizer was built: its weight, its bias or its forward"
        return None

    def specs(self, module: nn.Module, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        if self.scale not in trained:
            return ()
        params = (self.scale,) if self.shift is None or self.shift not in trained else (self.scale, self.shift)
        return (self.spec(module, name, params),)

    def unbatched_ndim(self, module: nn.Module) -> int:
        return -1 if self.channels else 1

    def canonical(self, module: nn.Module, tensor: Tensor) -> Tensor:
        if self.channels:
            return channel_rows(tensor, 1).squeeze(0)
        return tensor.reshape(len(tensor), math.prod(tensor.shape[1:-1]), tensor.shape[-1])

    def standardiser(
        self, module: nn.Module, layer_input: Tensor, dtype: torch.dtype, training: bool
    ) -> Callable[[Tensor], Tensor]:
        weight = module.get_parameter(self.scale)
        ones = torch.ones(weight.shape, dtype=dtype, device=layer_input.device)
        values = {self.scale: ones} if self.shift is None else {self.scale: ones, self.shift: ones - ones}
        above = _stand_in(module, values)
        below = _stand_in(module, {**values, self.scale: ones - ones})
        return lambda some: _forward(above, some.to(dtype)) - _forward(below, some.to(dtype))


def scale_adapter(module: nn.Module) -> LayerAdapter[Any] | None:
    """Return the adapter of a layer that scales features, found out by a few forwards of random numbers on the host.

    Args:
        module: any. One with children or buffers, or without exactly one or two parameters `[features]`, has none.
    """
    params = {name: param for name, param in module._parameters.items() if param is not None}
    if not 1 <= len(params) <= 2 or module._modules or "forward" in vars(module):
        return None
    if any(buffer is not None for buffer in module._buffers.values()) or module._forward_pre_hooks:
        return None
    if any(is_lazy(param) or param.dim() != 1 or not param.is_floating_point() for param in params.values()):
        return None
    sizes = {param.numel() for param in params.values()}
    if len(sizes) != 1 or not 1 < min(sizes) <= _WIDEST:  # one number may multiply any number of features
        return None
    (features,) = sizes
    for channels in (False, True):
        shape = (2, features, 3, 2) if channels else (2, 3, features)
        for scale in params:
            shift = next((name for name in params if name != scale), None)
            try:
                found = _scales(module, features, shape, scale, shift, axis=1 if channels else -1)
            except Exception:  # of anybody's forward, called with what it may not be made for
                found = False
            if found:
                return ScaleAdapter(scale, shift, channels=channels)
    return None


def _scales(module: nn.Module, features: int, shape: tuple[int, ...], scale: str, shift: str | None, axis: int) -> bool:
    """Return whether the output is `s ⊙ w + c + b` on random input, with `s` and `c` that `w` and `b` do not change."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")

    def output(weight: Tensor, bias: Tensor) -> Tensor:
        values = {scale: weight} if shift is None else {scale: weight, shift: bias}
        return _forward(_stand_in(module, values), x)

    def over(vector: Tensor) -> Tensor:
        return vector if axis == -1 else vector.view(-1, *[1] * (len(shape) - 2))

    x, zeros = 2 * draw(*shape) + 1, torch.zeros(features, dtype=torch.float64, device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        at_zero = output(zeros, zeros)
        if not isinstance(at_zero, Tensor) or at_zero.shape != x.shape:
            return False
        slope = output(zeros + 1, zeros) - at_zero
        weight, bias = draw(features), draw(features)
        expected = at_zero + slope * over(weight) + (0 if shift is None else over(bias))
        actual = output(weight, bias)
    of_feature = slope.abs().movedim(axis, -1).flatten(0, -2).amax(0)
    return float(of_feature.min()) > 0 and float((actual - expected).abs().max()) <= _CLOSE * float(of_feature.max())


def _stand_in(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Return a module like this one, without its hooks, that has these values for its parameters."""
    stand_in = copy.copy(module)
    stand_in._parameters = {**values}  # type: ignore[dict-item]
    return stand_in


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """Run the forward of a module's class, which calls no hook."""
    output: Tensor = type(module).forward(module, x)
    return output.to(x.dtype)
