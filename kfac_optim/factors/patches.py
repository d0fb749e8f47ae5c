"""What the kernel of a convolution sees at each position of feature maps: as rows, and summed without making rows."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.second_moments import channel_rows, on_host


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Cuts feature maps into patches, whose columns are ordered `(channel, *kernel)`.

    Attributes:
        features: `[batch, channels, *space]`.
        zeros: how many zeros are put around them along each dimension of space, before and after; not below 0.
        kernel: its size along each dimension of space.
        stride: the stride of the positions along each dimension of space.
        dilation: the dilation of the kernel along each dimension of space.
        groups: how many groups the channels fall into.
    """

    features: Tensor
    zeros: tuple[tuple[int, int], ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def channels(self) -> int:
        """Count the channels of one group."""
        return self.features.shape[1] // self.groups

    @property
    def width(self) -> int:
        """Return columns of a patch in one group."""
        return self.channels * math.prod(self.kernel)

    @property
    def spans(self) -> tuple[int, ...]:
        """Return how far the kernel reaches along each dimension of space."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def positions(self) -> tuple[int, ...]:
        """Return how many positions there are along each dimension of space."""
        space = zip(self.features.shape[2:], self.zeros, self.spans, self.stride, strict=True)
        return tuple((size + sum(zeros) - span) // step + 1 for size, zeros, span, step in space)

    def rows(self, positions: Tensor | None = None) -> Tensor:
        """Return canonical rows `[groups, batch, positions, width]`.

        Args:
            positions: the positions to take of each example, `[batch, wanted]`, counted along the last dimension of
                space first; all where it is None. Only their patches are copied.
        """
        windows = self._windows()
        if positions is not None:
            # As torch.unravel_index, which copies the sizes to the device and waits for that.
            places: list[Tensor] = []
            for size in reversed(self.positions):
                places.insert(0, positions % size)
                positions = positions // size
            examples = torch.arange(len(windows), device=windows.device).unsqueeze(1)
            taken = windows.movedim(1, 1 + self.ndim)[(examples, *places)]  # [batch, wanted, channels, *kernel]
            return taken.reshape(*taken.shape[:2], self.groups, self.width).permute(2, 0, 1, 3)
        # split channels into groups, then [groups, batch, *positions, channels/groups, *kernel]
        windows = windows.reshape(len(windows), self.groups, self.channels, *windows.shape[2:])
        space, kernel = range(3, 3 + self.ndim), range(3 + self.ndim, 3 + 2 * self.ndim)
        by_position = windows.permute(1, 0, *space, 2, *kernel)
        return by_position.reshape(self.groups, len(self.features), math.prod(self.positions), self.width)

    def along(self, directions: Tensor) -> Tensor:
        """Multiply all rows by `directions` `[width, k]`, without making rows: `[groups, batch, positions, k]`."""
        kernels = directions.T.reshape(-1, self.channels, *self.kernel).repeat(self.groups, *[1] * (1 + self.ndim))
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.ndim - 1]
        seen = convolve(self.padded(), kernels, stride=self.stride, dilation=self.dilation, groups=self.groups)
        return channel_rows(seen, self.groups)

    def products(self, along: Tensor) -> Tensor:
        """Sum the outer products of all rows with `along` `[groups, batch, positions, k]`, without making rows.

        That is what backward does for the kernels of a convolution with the output gradient `along`.

        Returns:
            `[groups, width, k]`.
        """
        columns = along.shape[-1]
        padded, kernel = self.padded(), (self.groups * columns, self.channels, *self.kernel)
        gradient = along.permute(1, 0, 3, 2).reshape(len(padded), self.groups * columns, *self.positions)
        none = [0] * self.ndim
        kernels: Tensor = torch.ops.aten.convolution_backward(
            gradient, padded, padded.new_empty(kernel), None, self.stride, none, self.dilation, False, none,
            self.groups, (False, True, False),
        )[1]  # fmt: skip
        return kernels.reshape(self.groups, columns, self.width).mT

    def columns(self) -> Tensor:
        """Return all rows as columns, `[groups, width, batch · positions]`, by `(*kernel, channel)`, in longer runs."""
        windows = self._windows()
        windows = windows.reshape(len(windows), self.groups, self.channels, *windows.shape[2:])
        space, kernel = range(3, 3 + self.ndim), range(3 + self.ndim, 3 + 2 * self.ndim)
        return windows.permute(1, *kernel, 2, 0, *space).reshape(self.groups, self.width, -1)

    def marked_rows(self, marked: Tensor) -> Tensor:
        """Return the patches that `marked` `[batch, positions]` has, `[groups, 1, marked, width]`. Waits for a device.

        Only their patches are copied.
        """
        places = marked.view(-1, *self.positions).nonzero(as_tuple=True)
        taken = self._windows().movedim(1, 1 + self.ndim)[places]  # [marked rows, channels, *kernel]
        return taken.reshape(-1, self.groups, self.width).transpose(0, 1).unsqueeze(1)

    def sums(self, active: Tensor | None = None) -> Tensor:
        """Return each example's sum of its patches, or of those that `active` `[batch, positions]` marks.

        What the others hold does not matter, even if it is not finite.

        Returns:
            `[groups, batch, width]`, at least float32: bfloat16 would stop counting at 256.
        """
        dtype = torch.promote_types(self.features.dtype, torch.float32)
        padded = self.padded()
        if active is None or _are_all(active):
            # One dimension of space after the other, so that all but the first have little left to sum.
            sums = padded
            for axis, count in enumerate(self.positions):
                parts = [
                    sums[:, :, self._seen(axis, tap, count)].sum(2, dtype=dtype) for tap in range(self.kernel[axis])
                ]
                sums = torch.stack(parts, dim=-1)
        else:
            marked = active.view(-1, 1, *self.positions)
            space = tuple(range(2, 2 + self.ndim))
            parts = []
            for taps in itertools.product(*map(range, self.kernel)):
                seen = [self._seen(axis, tap, self.positions[axis]) for axis, tap in enumerate(taps)]
                parts.append(torch.where(marked, padded[(slice(None),) * 2 + tuple(seen)], 0).sum(space, dtype=dtype))
            sums = torch.stack(parts, dim=-1)
        return sums.reshape(len(padded), self.groups, self.width).transpose(0, 1)

    def total(self, active: Tensor | None = None) -> Tensor:
        """Return `sums` of all examples, `[groups, width]`."""
        if active is not None and not _are_all(active):
            return self.sums(active).sum(1)
        dtype = torch.promote_types(self.features.dtype, torch.float32)
        return replace(self, features=self.features.sum(0, keepdim=True, dtype=dtype)).sums().squeeze(1)

    def padded(self) -> Tensor:
        """Return the features with the zeros around them."""
        return pad(self.features, self.zeros)

    def _seen(self, axis: int, tap: int, positions: int) -> slice:
        """Return what one element of the kernel sees along one dimension of space."""
        start, step = self.dilation[axis] * tap, self.stride[axis]
        return slice(start, start + step * (positions - 1) + 1, step)

    def _windows(self) -> Tensor:
        """Return the windows of the kernel, `[batch, channels, *positions, *kernel]`, a view."""
        windows = self.padded()
        for axis, (span, step, dilation) in enumerate(zip(self.spans, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(2 + axis, span, step)[..., ::dilation]
        return windows


def _are_all(active: Tensor) -> bool:
    """Return whether all are, if that can be seen without waiting for an accelerator."""
    return on_host(active) and bool(active.all())


def pad(features: Tensor, amounts: Sequence[tuple[int, int]], mode: str = "constant") -> Tensor:
    """Pad `features` before and after along each dimension of space; an amount below 0 crops."""
    in_order = [each for pair in reversed(amounts) for each in pair]  # of F.pad: the last dimension first
    if any(amount > 0 for amount in in_order):
        features = F.pad(features, [max(amount, 0) for amount in in_order], mode=mode)
    # Only now: a crop may be longer than the features, but not than those with the padding of their other end.
    if any(amount < 0 for amount in in_order):
        features = F.pad(features, [min(amount, 0) for amount in in_order])
    return features
