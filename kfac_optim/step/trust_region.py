"""KL trust region: one scalar that bounds how far a step moves the model's predictive distribution."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kfac_optim.step.scalars import Flag, Scalar, bounded, chosen, finite, larger, quotient, root
from kfac_optim.utils.precision import at_least_float32
from kfac_optim.utils.streams import brought


def trust_region_scale(
    quadratic: Scalar, decrease: Scalar, summed_terms: float, kl_clip: Scalar, longest: Scalar = 1.0
) -> Scalar:
    """Return `ν = min(1, √(κ / sᵀFs))` for the step `s = lr Δ` (Ba, Grosse & Martens 2017, §5).

    `sᵀFs` is taken as the larger of two estimates. One is the paper's, `lr² Δᵀ∇`, which trusts the factors: exact if
    they were the Fisher. The other is `(sᵀ∇)²`, which needs no factors: the Fisher of the batch's own gradients is
    `E[g gᵀ]`, and `E[(sᵀg)²] ≥ (E[sᵀg])²`. It holds the step where the factors underestimate the curvature, by few
    samples in wide layers, by averages that lag, by inverses that are stale; the first estimate then only shrinks as
    the square root of the error. In other words no step may promise to lower the loss by more than `√κ`. (For a loss
    that is a sum of N terms the Fisher is a sum too, and the second estimate is `(sᵀ∇)² / N`.)

    Args:
        quadratic: `lr² Δᵀ∇` summed over every covered parameter.
        decrease: `sᵀ∇ = lr Δᵀ∇` summed in the same way.
        summed_terms: N for a summed loss, 1 for a mean.
        kl_clip: `κ`, positive, in nats.
        longest: what the scale may be at most.

    Returns:
        A number in [0, `longest`].
    """
    # A step of zero (no gradient) divides to inf and clamps to the longest; one whose sums overflow is not taken.
    scale = root(quotient(kl_clip, larger(quadratic, decrease * decrease / summed_terms)))
    return finite(bounded(scale, most=longest))


def momentum_scale(decrease: Scalar, summed_terms: float, kl_clip: float) -> Scalar:
    """Return the factor in (0, 1] for the momentum `b` of earlier steps.

    The bound on the new step is of no use where the momentum of earlier ones, taken before the curvature rose, goes on
    uphill. So it too may not raise the loss by more than `√κ`: where `lr μ bᵀ∇ < 0` it is scaled to that, for good
    (compare the gradient restart of O'Donoghue & Candès 2015). Momentum that goes downhill is left alone.

    Args:
        decrease: `lr μ bᵀ∇` summed over every covered parameter.
        summed_terms: N for a summed loss, 1 for a mean.
        kl_clip: `κ`, positive, in nats.
    """
    bound = math.sqrt(kl_clip * summed_terms)
    return chosen(decrease < -bound, quotient(-bound, decrease), 1.0)


def slope_ratio(slope: Scalar, slope_before: Scalar) -> Scalar:
    """Compare what the last step promised with what it left, in [-1, 1].

    The last step went along `b`. What it promised is the slope of the loss along `b` at its start, and the slope at its
    end is `bᵀ∇` of the gradient that came next, on examples that `b` has not seen. The ratio has no unit: 1 where the
    loss falls at the end as it did at the start, 0 where the step went just far enough, below 0 where it went too far.

    Args:
        slope: `Σ lr bᵀ∇` over every covered parameter, with the present gradient, over the mean `lr` of their groups.
        slope_before: the same with the gradient and the rates that led into the last step; not above 0 where there is
            none.
    """
    return bounded(finite(chosen(slope_before > 0, quotient(slope, slope_before), 0.0)), -1.0, 1.0)


def follow(multiplier: Scalar, ratio: Scalar, held: Flag) -> Scalar:
    """Adapt what multiplies a trust region to the slope ratio of the last step.

    The square makes the region deaf to small ratios, which noise makes of gradients that have nothing to do with each
    other. A region that did not hold the last step does not grow.

    Args:
        multiplier: its logarithm.
        ratio: what `slope_ratio` returned.
        held: whether the region held the last step.

    Returns:
        The new logarithm.
    """
    magnitude: Scalar = ratio.abs() if isinstance(ratio, Tensor) else abs(ratio)
    change, (least, most) = _PACE * ratio * magnitude, _RANGE
    return bounded(multiplier + chosen(held, change, bounded(change, most=0.0)), least, most)


def shortened(share: Scalar, short: Flag) -> Scalar:
    """Bring the share of too short steps up to date: an average in which 98 of them in a row make 0.95.

    Args:
        share: the share until the last step.
        short: whether this step was too short.
    """
    return chosen(short, share + 0.03 * (1 - share), share - 0.03 * share)


_PACE = 0.4  # in a step the multiplier grows by half or shrinks by a third at the most
_RANGE = math.log(1e-3), math.log(1e12)  # pure noise may not shrink a region to nothing, and squares must be finite


def inner_product(left: Sequence[Tensor], right: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return `Σ ⟨leftᵢ, rightᵢ⟩`, `[]` on `device`.

    Args:
        left: tensors of any shapes, on any devices.
        right: one for each of `left`, of the same shape and device.
        device: the device of the scalar.
    """
    products = [_dot(a, b) for a, b in zip(left, right, strict=True)]
    return _sum([brought(product, device) for product in products], device)


def square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return `Σ ‖tensorᵢ‖²`, `[]` on `device`, at least float32; on an accelerator few launches for many tensors.

    Args:
        tensors: tensors of any shapes and floating dtypes, on any devices.
        device: the device of the scalar.
    """
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    squares: list[Tensor] = []
    for tensor in tensors:
        if tensor.device.type == "cpu":  # norms take longer there, and lose more digits
            squares.append(brought(_dot(tensor, tensor), device))
        else:
            alike[tensor.device, tensor.dtype].append(tensor)
    for (_, dtype), some in alike.items():
        norms = torch._foreach_norm(some, 2, dtype=at_least_float32(dtype))
        squares.append(brought(torch.stack(norms).square().sum(), device))
    return _sum(squares, device)


def _sum(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of tensors `[]` on one device, `[]`."""
    if len(numbers) == 1:
        return numbers[0]
    return torch.stack([*numbers]).sum() if numbers else torch.zeros((), device=device)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    if not left.is_contiguous():  # where both lie alike in memory, read along it and copy nothing
        strides = left.stride()
        order = sorted(range(left.dim()), key=lambda axis: -strides[axis])
        left, right = left.permute(order), right.permute(order)
    if left.dim() != 1:
        left, right = left.reshape(-1), right.reshape(-1)
    if left.dtype != right.dtype or left.dtype != at_least_float32(left.dtype):
        dtype = at_least_float32(torch.promote_types(left.dtype, right.dtype))
        left, right = left.to(dtype), right.to(dtype)
    return torch.dot(left, right)
