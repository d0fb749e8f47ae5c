"""Minimising a quadratic model of the loss along a few directions, and judging it by what the loss did.

Along `Σ wᵢ vᵢ` the model is `q(w) = bᵀw + ½ wᵀ M w`, with `bᵢ = vᵢᵀ∇h` and `Mᵢⱼ = vᵢᵀ (C + λI) vⱼ`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Losses are float32 as a rule: a mean of rounded terms is off by some units of 6e-8.
_ROUNDING = 1e-6


def rounding_of(tensors: Iterable[Tensor]) -> float:
    """Return the relative change of a loss that is lost in rounding, where these tensors make it, at least 1e-6."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return max([_ROUNDING, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])


def minimum(curvature: Tensor, slope: Tensor) -> Tensor:
    """Return the `w` that minimises `slopeᵀw + ½ wᵀ curvature w`, on the device (Martens & Grosse 2015, §7).

    The second weight is 0, and the model is minimised along the first direction alone, where the second direction is
    zero or, but for rounding, the same as the first, or where the model is not curved along it or its numbers are not
    finite. Where the model is not curved along the first, or its numbers are not finite, both weights are 0.

    Args:
        curvature: symmetric, positive semi-definite but for rounding, `[k, k]`, k 1 or 2.
        slope: `[k]`.

    Returns:
        `[k]`.
    """
    length = curvature.diagonal().clamp(min=0).sqrt()
    curved = (length > 0) & length.isfinite() & slope.isfinite()
    # In units of the lengths, both directions are of size 1.
    unit = torch.where(curved, 1 / length, 0.0)
    target = torch.where(curved, -slope * unit, 0.0)
    if len(slope) == 1:
        return target * unit
    overlap = curvature[0, 1] * unit[0] * unit[1]
    determinant = 1 - overlap.square()
    apart = curved.all() & (determinant > math.sqrt(torch.finfo(slope.dtype).eps))  # not where it is NaN
    both = torch.stack([target[0] - overlap * target[1], target[1] - overlap * target[0]]) / determinant
    alone = torch.stack([target[0], torch.zeros_like(target[0])])
    return torch.where(apart, both, alone) * unit


def change(curvature: Tensor, slope: Tensor, weights: Tensor) -> Tensor:
    """Return `slopeᵀw + ½ wᵀ curvature w`, `[]`."""
    return slope @ weights + weights @ curvature @ weights / 2


def reduction_ratio(before: float, after: float, predicted: float, *, rounding: float = _ROUNDING) -> float | None:
    """Return `ρ`, the change of the loss over the change that the model predicted.

    Args:
        before: the loss at θ.
        after: the loss at θ + δ, of the same examples.
        predicted: `q(δ)`.
        rounding: the relative change that is lost in rounding, as `rounding_of` has it.

    Returns:
        -∞ where one of them is not finite; None where `ρ` says nothing: the loss fell though a rise was predicted, or
        what was predicted is lost in the rounding of the loss.
    """
    if not (math.isfinite(after) and math.isfinite(predicted)):
        return -math.inf
    actual = after - before
    lost = abs(predicted) <= rounding * max(abs(before), abs(after))
    return None if lost or actual < 0 < predicted else actual / predicted
