"""Pure functions on stacks of symmetric matrices `[..., d, d]`."""

import torch
from torch import Tensor

# A failed factorisation is tried again with ten times the shift, three times: a shift that is 1000 times
# the one asked for (or 1000 rounding units of the matrix) says that the factor is beyond repair.
_RETRIES = 3
_RETRY_GROWTH = 10.0


def shift_diagonal(matrix: Tensor, shift: Tensor) -> Tensor:
    """`matrix + shift·I`, out of place.

    Args:
        matrix: `[..., d, d]`.
        shift: `[...]`.
    """
    shifted = matrix.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return shifted


def damped_cholesky_inverse(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `matrix + shift·I` by Cholesky factorisation, retried with a larger shift where it fails.

    The test for failure is one host synchronisation per call.

    Args:
        matrix: symmetric positive semi-definite, `[n, d, d]`.
        shift: damping per matrix, `[n]`, non-negative.

    Returns:
        The inverses `[n, d, d]`, and the attempts each one took `[n]` (int64): 1 is a clean success, more
        means that the shift was raised by ten for each further attempt, 0 that every attempt failed and the
        inverse is not to be used.
    """
    d = matrix.shape[-1]
    inverse, usable = _try_inverse(shift_diagonal(matrix, shift))
    attempts = torch.where(usable, 1, 0)
    # A shift of zero cannot grow; one rounding unit of the mean eigenvalue can.
    unit = torch.finfo(matrix.dtype).eps * d * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    retry_shift = torch.maximum(shift, unit)
    for attempt in range(2, 2 + _RETRIES):
        failed = (attempts == 0).nonzero().squeeze(-1)
        if len(failed) == 0:
            break
        retry_shift = retry_shift * _RETRY_GROWTH
        inverse[failed], usable = _try_inverse(shift_diagonal(matrix[failed], retry_shift[failed]))
        attempts[failed] = torch.where(usable, attempt, 0)
    return inverse, attempts


def _try_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses `[n, d, d]` and whether each is usable `[n]`."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    # cholesky_inverse raises on a zero pivot, so what failed is replaced before it gets there.
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = torch.cholesky_inverse(torch.where((info == 0)[:, None, None], factor, identity))
    # A positive definite matrix is bounded by its diagonal, so a finite diagonal is a finite matrix.
    finite = inverse.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    return inverse, (info == 0) & finite


def eigendecomposition(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors; a matrix that fails is tried again by itself.

    `torch.linalg.eigh` raises for the whole batch when one matrix does not converge, or is not finite. Then each is
    decomposed alone; what fails alone, in float64; and then with all eigenvalues shifted by a rounding error of
    the matrix, which leads the iteration another way. The test for failure is one host synchronisation per call.

    Args:
        matrix: symmetric, `[n, d, d]`.

    Returns:
        The eigenvalues in ascending order `[n, d]`, the eigenvectors as columns `[n, d, d]`, and the attempts each
        matrix took `[n]` (int64): 1 is a clean success, more one with the means above, 0 that every attempt failed,
        or the matrix is not finite, and the decomposition is not to be used.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    finite = _all_finite(matrix)
    values, vectors, usable = _try_eigh(torch.where(finite[:, None, None], matrix, identity))
    attempts = torch.where(finite & usable, 1, 0)
    for i in (finite & ~usable).nonzero().squeeze(-1).tolist():
        values[i], vectors[i], attempts[i] = _eigh_alone(matrix[i : i + 1])
    return values, vectors, attempts


def _eigh_alone(matrix: Tensor) -> tuple[Tensor, Tensor, int]:
    """`eigendecomposition` of one matrix `[1, d, d]` that failed in a batch."""
    rounding = torch.finfo(matrix.dtype).eps * matrix.shape[-1] * matrix.abs().amax((-2, -1))
    ways = [(matrix.dtype, 0.0), (torch.float64, 0.0), (torch.float64, 1.0)]
    for attempt, (dtype, units) in enumerate(dict.fromkeys(ways), start=1):
        shift = units * rounding.to(dtype)
        values, vectors, usable = _try_eigh(shift_diagonal(matrix.to(dtype), shift))
        if usable:
            return (values[0] - shift).to(matrix.dtype), vectors[0].to(matrix.dtype), attempt
    return values[0].to(matrix.dtype), vectors[0].to(matrix.dtype), 0


def _try_eigh(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues `[n, d]`, eigenvectors `[n, d, d]`, and whether each decomposition is usable `[n]`."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but missing from torch's __all__
        ones = torch.ones_like(matrix[..., 0])
        return ones, torch.diag_embed(ones), torch.zeros_like(ones[:, 0], dtype=torch.bool)
    return values, vectors, values.isfinite().all(-1) & _all_finite(vectors)


def _all_finite(matrices: Tensor) -> Tensor:
    """Whether every element of each matrix is finite, `[n]`."""
    return matrices.isfinite().flatten(1).all(1)
