"""Damped inverses by Cholesky factorisation, with a larger shift where one fails."""

from collections.abc import Callable

import torch
from torch import Tensor

# A failed factorisation is tried again with ten times the shift, three times: a shift that is 1000 times
# the one asked for (or 1000 rounding units of the matrix) says that the factor is beyond repair.
_RETRIES = 3


_RETRY_GROWTH = 10.0


def shift_diagonal(matrix: Tensor, shift: Tensor) -> Tensor:
    """Return `matrix + shift·I`, out of place.

    Args:
        matrix: `[..., d, d]`.
        shift: `[...]`.
    """
    shifted = matrix.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return shifted


def damped_cholesky_inverse(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return inverse of `matrix + shift·I` by Cholesky factorisation, retried with a larger shift where it fails.

    Arguments and result are those of `damped_cholesky_root`, whose root times its transpose this is.
    """
    return _with_retries(_try_inverse, matrix, shift)


def damped_cholesky_root(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return `R` with `R Rᵀ = (matrix + shift·I)⁻¹`, upper triangular, retried with a larger shift where it fails.

    The test for failure is one host synchronisation per call.

    Args:
        matrix: symmetric positive semi-definite, `[n, d, d]`.
        shift: damping per matrix, `[n]`, non-negative.

    Returns:
        The roots `[n, d, d]`, and the attempts each one took `[n]` (int64): 1 is a clean success, more
        means that the shift was raised by ten for each further attempt, 0 that every attempt failed and the
        root is not to be used.
    """
    return _with_retries(_try_root, matrix, shift)


def _with_retries(
    attempt_one: Callable[[Tensor], tuple[Tensor, Tensor]], matrix: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    d = matrix.shape[-1]
    result, usable = attempt_one(shift_diagonal(matrix, shift))
    attempts = torch.where(usable, 1, 0)
    # A shift of zero cannot grow; one rounding unit of the mean eigenvalue can.
    unit = torch.finfo(matrix.dtype).eps * d * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    retry_shift = torch.maximum(shift, unit)
    for attempt in range(2, 2 + _RETRIES):
        failed = (attempts == 0).nonzero().squeeze(-1)
        if len(failed) == 0:
            break
        retry_shift = retry_shift * _RETRY_GROWTH
        result[failed], usable = attempt_one(shift_diagonal(matrix[failed], retry_shift[failed]))
        attempts[failed] = torch.where(usable, attempt, 0)
    return result, attempts


def _try_root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return upper triangular inverse roots `[n, d, d]` and whether each is usable `[n]`."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), 1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    root = torch.linalg.solve_triangular(factor, identity, upper=False).mT
    return root.contiguous(), (info == 0) & root.isfinite().flatten(1).all(1)


def _try_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return inverses `[n, d, d]` and whether each is usable `[n]`."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    # cholesky_inverse raises on a zero pivot.
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), 1)
    inverse = torch.cholesky_inverse(factor)
    # A positive definite matrix is bounded by its diagonal, so a finite diagonal is a finite matrix.
    finite = inverse.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    return inverse, (info == 0) & finite
