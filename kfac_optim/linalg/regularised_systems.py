"""Least squares with a ridge, `min ‖ρ x - s‖² + λ ‖x‖²`, by the way that loses the fewest digits.

A matrix is factored once, for as many right sides as are asked for.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Solver = Callable[[Tensor], Tensor]
"""Gives the solution for a right side `[n]`."""


def gram_solver(gram: Tensor, ridge: float) -> Solver:
    """Return what solves `(K + λI) x = right` for a positive semidefinite `K` `[n, n]`.

    Cholesky does it; where rounding makes the matrix indefinite, eigenvalues do, and those below rounding count as
    zero.

    Args:
        gram: `K`, in float64; it is changed.
        ridge: `λ`, at least 0.
    """
    diagonal = gram.diagonal()
    diagonal += ridge
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) == 0:
        return lambda right: torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
    diagonal -= ridge
    values, vectors = torch.linalg.eigh(gram)
    smallest = len(gram) * torch.finfo(gram.dtype).eps * values[-1].abs()
    kept = values > smallest
    inverse = torch.where(kept, 1 / torch.where(kept, values + ridge, 1), 1 / ridge if ridge > 0 else 0.0)
    return lambda right: vectors @ (inverse * (vectors.mT @ right))


def tall_solver(rows: Tensor, ridge: float) -> Solver:
    """Return what finds the `x` `[d]` that minimises `‖ρ x - s‖² + λ ‖x‖²`, for more rows than columns.

    By QR of `ρ` and of the ridge below it, whose error grows with `σ/√λ` and not with its square.

    Args:
        rows: `ρ` `[n, d]`.
        ridge: `λ`, at least 0; with 0 the shortest solution is found by singular values.
    """
    if ridge <= 0:
        driver = "gelsd" if rows.device.type == "cpu" else None
        return lambda right: torch.linalg.lstsq(rows, right.unsqueeze(-1), driver=driver)[0].squeeze(-1)
    root = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device) * ridge**0.5
    q, r = torch.linalg.qr(torch.cat([rows, root]))
    q = q[: len(rows)]
    return lambda right: torch.linalg.solve_triangular(r, (q.mT @ right).unsqueeze(-1), upper=True).squeeze(-1)
