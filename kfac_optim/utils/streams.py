"""Streams of accelerators, in which work is done in order."""

from collections.abc import Hashable

import torch


def current_stream(device: torch.device) -> Hashable:
    """Return what tells the stream that work on a device now goes to from others; None where there is but one."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
