"""Products of matrices, symmetric ones without their upper half, and norms."""

import torch
from torch import Tensor

WHOLE = 256
"""The width up to which a product of a matrix with itself is taken whole."""


def sandwich(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return `left @ middle @ right`.

    Args:
        left: `[n, rows, rows]`, `[n, rows]` for a diagonal matrix, None for the identity; n may be 1.
        middle: `[n, rows, columns]`.
        right: a matrix over `columns`, in the same form.
    """
    product = middle
    if left is not None:
        product = left @ middle if left.dim() == 3 else left.unsqueeze(-1) * middle
    if right is None:
        return product
    if right.dim() == 3:
        return product @ right
    # In place where the product is ours: to make another takes as long as the multiplication.
    own = product is not middle and product.dtype == right.dtype
    return product.mul_(right.unsqueeze(-2)) if own else product * right.unsqueeze(-2)


def symmetric_product(rows: Tensor, out: Tensor) -> None:
    """Write `rowsᵀ rows` of `[n, rows, d]` into `out`, `[n, d, d]`; a CPU copies the upper triangle from the lower.

    That leaves out most of half the operations: of 2048 rows 1024 wide it takes 0.73 of the time of the whole product
    on a CPU with AVX-512 (float32, two threads), of 512 rows 1000 wide 0.77, 500 wide 0.92. Up to a width of 256 it is
    taken whole.
    """
    if rows.shape[-1] <= WHOLE or rows.device.type != "cpu":
        torch.matmul(rows.mT, rows, out=out)
        return
    for matrix, into in zip(rows, out, strict=True):
        _fill_symmetric(matrix, into)


def _fill_symmetric(rows: Tensor, out: Tensor) -> None:
    """Write `rowsᵀ rows` into `out`, `[d, d]`."""
    d = rows.shape[-1]
    if d <= WHOLE:
        torch.mm(rows.mT, rows, out=out)
        return
    half = (d // 2 + 15) // 16 * 16  # rows that start at whole vectors
    first, second = rows[:, :half], rows[:, half:]
    _fill_symmetric(first, out[:half, :half])
    _fill_symmetric(second, out[half:, half:])
    torch.mm(second.mT, first, out=out[half:, :half])
    out[:half, half:] = out[half:, :half].mT


def frobenius_norm(matrix: Tensor) -> Tensor:
    """Return the norms of `[n, rows, columns]`, `[n, 1, 1]`, to divide by: zeros stay zeros.

    The squares are summed in float64, as in float32 they may vanish or overflow. A matrix whose squares vanish there
    too is divided by too much, and stays small. A norm beyond the range of the dtype is infinite, so that nothing is
    left of the matrix.
    """
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    least = max(torch.finfo(matrix.dtype).tiny, torch.finfo(torch.float64).tiny ** 0.5)
    return norm.clamp(min=least).to(matrix.dtype)


def norm1(matrix: Tensor) -> Tensor:
    """Return largest column sum of magnitudes of `[..., d, d]`, `[...]`."""
    return matrix.abs().sum(-2).amax(-1)


def _mirror_lower(matrix: Tensor, *, out: Tensor) -> None:
    """Make `out` `matrix` `[..., d, d]`, the part above the diagonal replaced by the mirror image of that below."""
    lower = torch.ones(matrix.shape[-2:], dtype=torch.bool, device=matrix.device).tril()
    torch.where(lower, matrix, matrix.mT, out=out)
