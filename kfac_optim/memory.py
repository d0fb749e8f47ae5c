"""Tensors that give up their memory and get it back, where nothing on this process reads them."""

import torch
from torch import Tensor


def drop(tensor: Tensor) -> None:
    """Let `tensor` stand on the meta device, in place: all that hold it see that. Views of it must not be left."""
    torch.utils.swap_tensors(tensor, torch.empty_like(tensor, device="meta"))  # type: ignore[no-untyped-call]


def hold(tensor: Tensor, device: torch.device) -> None:
    """Give `tensor` memory on `device`, all zero, in place, where it has none."""
    if tensor.is_meta:
        torch.utils.swap_tensors(tensor, torch.zeros_like(tensor, device=device))  # type: ignore[no-untyped-call]


def copy_held(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, unless one of them has no memory."""
    if not (target.is_meta or source.is_meta):
        target.copy_(source)
