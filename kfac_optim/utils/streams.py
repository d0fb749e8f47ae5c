"""Streams of accelerators, in which work is done in order, and what goes from device to device."""

from collections.abc import Hashable

import torch
from torch import Tensor


def current_stream(device: torch.device) -> Hashable:
    """Return what tells the stream that work on a device now goes to from others; None where there is but one."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host waits for what comes to it, since it may read that at once."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")
