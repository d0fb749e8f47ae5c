"""Wide factors in blocks along their diagonal: rows, gradient matrices and moments, cut and put together again.

The blocks take the place of groups in the canonical layout. Blocks all have one width: where that does not divide the
factor's, zeros fill up the last one (see `level_padding` for its moment).
"""

import torch.nn.functional as F
from torch import Tensor

from kfac_optim.specs import LayerSpec


def cut(tensor: Tensor, axis: int, blocks: int) -> Tensor:
    """Cut `[1, …, d, …]` into `[blocks, …, ⌈d / blocks⌉, …]`, consecutive parts of one axis, the last filled by zeros.

    Args:
        tensor: the tensor, of one group.
        axis: the axis to cut, counted from the end, so below 0.
        blocks: how many blocks.
    """
    if blocks == 1:
        return tensor
    width = -(-tensor.shape[axis] // blocks)
    if missing := blocks * width - tensor.shape[axis]:
        tensor = F.pad(tensor, (0, 0) * (-1 - axis) + (0, missing))
    parts = tensor.reshape(*tensor.shape[:axis], blocks, width, *tensor.shape[axis:][1:])
    return parts.movedim(axis - 1, 0).squeeze(1)


def joined(tensor: Tensor, axis: int, dim: int) -> Tensor:
    """Undo `cut`: return `[1, …, dim, …]`."""
    if len(tensor) == 1:
        return tensor
    return tensor.unsqueeze(1).movedim(0, axis - 1).flatten(axis - 1, axis).narrow(axis, 0, dim)


def matrix_by_blocks(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """Return a gradient matrix `[groups, out, in]` of the layer as `spec.by_blocks()` has it."""
    return cut(cut(matrix, -1, spec.blocks(0)), -2, spec.blocks(1))


def matrix_of_layer(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """Undo `matrix_by_blocks`."""
    if spec.blocks(0) > 1:
        return joined(matrix, -1, spec.in_dim)
    return joined(matrix, -2, spec.out_dim) if spec.blocks(1) > 1 else matrix


def level_padding(moment: Tensor, dim: int) -> Tensor:
    """Put the mean of the diagonal where the last block, narrower than the others, has zeros on it; in place.

    The zeros of the rows would otherwise be eigenvalues that count in traces and mix with others that vanish. With the
    mean, that of `dim` true ones, neither the mean nor the range of eigenvalues changes. It is linear in the moment, so
    sums and averages keep it.

    Args:
        moment: `[blocks, width, width]`, or its diagonal `[blocks, width]`.
        dim: the width of the whole factor.
    """
    diagonal, missing = _padded_diagonal(moment, dim)
    if missing:
        diagonal[-1, -missing:] = diagonal.sum() / dim
    return moment


def clear_padding(moment: Tensor, dim: int) -> Tensor:
    """Put zeros where `level_padding` has put the mean; in place."""
    diagonal, missing = _padded_diagonal(moment, dim)
    if missing:
        diagonal[-1, -missing:] = 0
    return moment


def _padded_diagonal(moment: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return the diagonal `[blocks, width]`, a view, and how many of its last elements are none of the factor's."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1) if moment.dim() == 3 else moment
    return diagonal, diagonal.numel() - dim
