"""Symmetric matrices kept as their lower triangles."""

import torch
from torch import Tensor

from kfac_optim.linalg.products import _mirror_lower


def triangle_size(dim: int) -> int:
    """Return elements of a packed symmetric `[d, d]` matrix: `d(d + 1) / 2`."""
    return dim * (dim + 1) // 2


def pack_triangle(matrix: Tensor) -> Tensor:
    """Return one triangle of each symmetric matrix, `[..., d, d]`, as a row of `triangle_size(d)` elements, `[..., t]`.

    In the rectangular full packed format (Gustavson et al. 2010): the left half of the columns keeps its lower
    triangle, and the upper triangle of the last quarter of the matrix fills the place above it. That takes slices
    alone, no index tensors (which would be four times as large as a float32 matrix), and no host synchronisation.
    Bits are copied, never computed with, so that `unpack_triangle` gives a symmetric matrix back exactly.
    """
    d = matrix.shape[-1]
    low, rows, column = _triangle_blocks(d)
    columns = d - low
    packed = matrix.new_empty(*matrix.shape[:-2], rows, columns)
    packed[..., rows - d :, :] = matrix[..., :, :columns]
    if low > 0:
        free = packed[..., :low, column:]
        upper = torch.ones(low, low, dtype=torch.bool, device=matrix.device).triu()
        torch.where(upper, matrix[..., columns:, columns:], free, out=free)
    return packed.flatten(-2)


def unpack_triangle(packed: Tensor, dim: int) -> Tensor:
    """Return the symmetric matrices, `[..., d, d]`, that `pack_triangle` made into `[..., triangle_size(d)]`."""
    low, rows, column = _triangle_blocks(dim)
    columns = dim - low
    packed = packed.reshape(*packed.shape[:-1], rows, columns)
    matrix = packed.new_empty(*packed.shape[:-2], dim, dim)
    left = packed[..., rows - dim :, :]
    _mirror_lower(left[..., :columns, :], out=matrix[..., :columns, :columns])
    if low > 0:
        matrix[..., columns:, :columns] = left[..., columns:, :]
        matrix[..., :columns, columns:] = left[..., columns:, :].mT
        _mirror_lower(packed[..., :low, column:].mT, out=matrix[..., columns:, columns:])
    return matrix


def packed_diagonal(packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the diagonal of the matrices that `pack_triangle` made into `[..., triangle_size(d)]`, in two parts.

    Both are views: the first `[..., d - d // 2]`, the rest `[..., d // 2]`.
    """
    low, rows, column = _triangle_blocks(dim)
    rectangle = packed.view(*packed.shape[:-1], rows, dim - low)
    left, last = rectangle[..., rows - dim :, :], rectangle[..., :low, column:]
    return left.diagonal(dim1=-2, dim2=-1), last.diagonal(dim1=-2, dim2=-1)


def _triangle_blocks(dim: int) -> tuple[int, int, int]:
    """Return the rectangle that `d(d + 1) / 2` elements fill.

    Size of the last diagonal block, which is put above the others; rows; and the column at which that block starts.
    Even `d = 2k`: `k`, `2k + 1` rows of `k`, in which the columns stand one row lower. Odd `d = 2k + 1`: `k`, `2k + 1`
    rows of `k + 1`, in which the block starts one column further right.
    """
    low = dim // 2
    return low, dim + 1 - dim % 2, dim % 2
