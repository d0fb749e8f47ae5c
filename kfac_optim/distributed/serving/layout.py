"""Tensors of any dtypes, side by side in one buffer of bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of the widest dtype


class Layout:
    """Says where each of some tensors lies in a buffer.

    Args:
        like: tensors of the same shapes and dtypes.

    Attributes:
        size: bytes of the buffer.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        end = 0
        for tensor in like:
            length = tensor.numel() * tensor.element_size()
            self._places.append((end, length, tensor.dtype, tensor.shape))
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        self.size = end

    def buffer(self) -> Tensor:
        """Return a new buffer, `[size]` uint8, on the CPU."""
        return torch.empty(self.size, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer, no copies."""
        return [buffer[start : start + length].view(dtype).view(shape) for start, length, dtype, shape in self._places]

    def pack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors, from whatever device, into a buffer."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor.detach())
