"""Autocast kept out of our own arithmetic, and gradients looked at for numbers that are not finite."""

import functools
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from kfac_optim.utils.joined_tensors import Joins
from kfac_optim.utils.streams import brought


def without_autocast(device_types: Iterable[str]) -> ExitStack:
    """Return a context in which autocast is off on these kinds of device, whatever the caller has on."""
    stack = ExitStack()
    for device_type in device_types:
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def as_autocast(tensor: Tensor) -> Tensor:
    """Return the tensor as autocast hands it to a product: in the narrow dtype, where it is on and the tensor wide."""
    kind = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64 and kind != "meta"
    return tensor.to(torch.get_autocast_dtype(kind)) if is_cast and torch.is_autocast_enabled(kind) else tensor


@functools.cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over tensors of `dtype` are taken in; to ask torch costs as much as a short sum."""
    return torch.promote_types(dtype, torch.float32)


def rounding_of_products(dtype: torch.dtype, device_type: str) -> float:
    """Return the relative rounding of products whose results have this dtype, on this kind of device.

    Those of float32 may be made in fewer bits, which leaves no trace in the dtype.
    """
    if dtype is torch.float32:
        if device_type != "cpu":  # convolutions in TensorFloat-32 are the default there
            return torch.finfo(torch.float16).eps
        onednn = torch.backends.mkldnn
        allowed = {onednn.fp32_precision, onednn.matmul.fp32_precision, onednn.conv.fp32_precision}  # type: ignore[attr-defined]
        if "bf16" in allowed:
            return torch.finfo(torch.bfloat16).eps
        if "tf32" in allowed:
            return torch.finfo(torch.float16).eps
    return torch.finfo(dtype).eps


def largest_rounding(gradients: Iterable[Tensor | None]) -> float:
    """Return the largest `rounding_of_products` of the gradients of one pass: it goes on into all that follow."""
    kinds = {(part.dtype, part.device.type) for part in gradients if part is not None}
    return max((rounding_of_products(*kind) for kind in kinds), default=0.0)


def all_finite(gradients: Sequence[Tensor], joins: Joins | None = None) -> bool:
    """Return whether every element is finite, but for those on the meta device. The host waits once.

    Args:
        gradients: tensors of any layout.
        joins: joins them, where others need the same ones joined.
    """
    filled = gradients
    if not all(g.layout is torch.strided and not g.is_meta for g in gradients):
        dense = (g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients)
        filled = [g for g in dense if not g.is_meta]
    if not filled:
        return True
    if all(g.device.type != "cpu" for g in filled):
        return bool(finite_on_device(filled))
    # By far the fastest reduction there. A finite sum hides nothing; one that is not may have overflowed.
    sums = [g.sum(dtype=at_least_float32(g.dtype)) for g in (joins or Joins()).of(filled)]
    if len(sums) > 1:
        device, widest = sums[0].device, functools.reduce(torch.promote_types, (each.dtype for each in sums))
        sums = [torch.stack([brought(each, device).to(widest) for each in sums]).sum()]
    total = sums[0].item()
    return total - total == 0 or all(bool(g.isfinite().all()) for g in filled)


def finite_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of dense gradients, at least one, are finite, `[]` bool; nobody waits for it.

    A few launches for all of them, where the CPU's way would take one for each.
    """
    filled = [gradient for gradient in gradients if gradient.numel() > 0]
    if not filled:
        return torch.ones((), dtype=torch.bool, device=gradients[0].device)
    return nn.utils.get_total_norm(filled, math.inf).isfinite()
