"""From the layouts of modules to canonical rows `[groups, batch, shared, d]`, and their second moments."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_optim.specs import Structure


def gram(rows: Tensor, structure: Structure, active: Tensor | None = None) -> Tensor:
    """`Σ r rᵀ` over batch and shared axes of `[groups, batch, shared, d]`, or the diagonal of it.

    Only over the rows that `active` `[batch, shared]` marks, where it is given: what the others hold, be it not finite,
    does not matter.
    """
    rows = rows.flatten(1, 2)
    if active is not None:
        # What is left out costs nothing on the host; how much that is an accelerator would have to be asked.
        marked = active.flatten()
        rows = rows[:, marked] if on_host(marked) else torch.where(marked.unsqueeze(-1), rows, 0)
    if structure is Structure.DIAGONAL:
        return rows.square().sum(1)
    return rows.mT @ rows


def active_rows(gradients: Tensor) -> Tensor:
    """`[batch, shared]` bool: the rows of `[groups, batch, shared, d]` that are not exactly zero in every group."""
    # By far the fastest way to ask, and a NaN is not zero.
    return gradients.abs().amax(-1).amax(0) != 0


def mean_over_shared(rows: Tensor, active: Tensor | None = None) -> Tensor:
    """`[groups, batch, 1, d]`: means of the rows that `active` `[batch, shared]` marks; of none it is 0."""
    if active is None:
        return rows.mean(2, keepdim=True)
    marked = active.unsqueeze(-1)
    return torch.where(marked, rows, 0).sum(2, keepdim=True) / marked.sum(1, keepdim=True).clamp(min=1)


def on_host(tensor: Tensor) -> bool:
    """Whether reading `tensor` waits for no accelerator."""
    return tensor.device.type == "cpu"


def total(numbers: Tensor) -> int | Tensor:
    """`Σ numbers`: at once on the host, else as a device scalar `[]`."""
    summed = numbers.sum()
    return int(summed) if on_host(summed) else summed


def linear_rows(tensor: Tensor) -> Tensor:
    """`[d]`, `[batch, d]` or `[batch, *shared, d]` as `[1, batch, shared, d]`."""
    if tensor.dim() == 1:
        return tensor.view(1, 1, 1, -1)
    return tensor.reshape(1, tensor.shape[0], math.prod(tensor.shape[1:-1]), tensor.shape[-1])


def channel_rows(tensor: Tensor, groups: int) -> Tensor:
    """`[batch, channels, *space]` as `[groups, batch, shared, channels/groups]`."""
    batch, channels = tensor.shape[:2]
    shared = math.prod(tensor.shape[2:])
    return tensor.reshape(batch, groups, channels // groups, shared).permute(1, 0, 3, 2)


def patch_rows(
    features: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """What a convolution's kernel sees at each position.

    Args:
        features: input with its padding, `[batch, channels, *space]`.
        kernel: its size along each dimension of space.
        stride: of the positions.
        dilation: of the kernel.
        groups: into which the channels fall.

    Returns:
        `[groups, batch, positions, channels/groups · prod(kernel)]`, columns ordered `(channel, *kernel)`.
    """
    ndim = len(kernel)
    # windows [batch, channels, *positions, *kernel], a view
    windows = features
    for axis in range(ndim):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        windows = windows.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
    batch, channels = windows.shape[:2]
    shared = math.prod(windows.shape[2 : 2 + ndim])
    # split channels into groups, then [groups, batch, *positions, channels/groups, *kernel]
    windows = windows.reshape(batch, groups, channels // groups, *windows.shape[2:])
    patches = windows.permute(1, 0, *range(3, 3 + ndim), 2, *range(3 + ndim, 3 + 2 * ndim))
    return patches.reshape(groups, batch, shared, channels // groups * math.prod(kernel))
