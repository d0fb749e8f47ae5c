"""Least squares with a ridge, `min ‖ρ x - s‖² + λ ‖x‖²`, by the way that loses the fewest digits."""

import torch
from torch import Tensor


def solve_gram(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Solve `(K + λI) x = right` for a positive semidefinite `K` `[n, n]`.

    Cholesky does it; where rounding makes the matrix indefinite, eigenvalues do, and those below rounding count as
    zero.

    Args:
        gram: `K`, in float64; it is changed.
        right: `[n]` or `[n, k]`.
        ridge: `λ`, at least 0.
    """
    columns = right.reshape(len(gram), -1)
    diagonal = gram.diagonal()
    diagonal += ridge
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) == 0:
        solved: Tensor = torch.cholesky_solve(columns, factor)
        return solved.reshape(right.shape)
    diagonal -= ridge
    values, vectors = torch.linalg.eigh(gram)
    smallest = len(gram) * torch.finfo(gram.dtype).eps * values[-1].abs()
    kept = values > smallest
    inverse = torch.where(kept, 1 / torch.where(kept, values + ridge, 1), 1 / ridge if ridge > 0 else 0.0)
    found: Tensor = vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ columns))
    return found.reshape(right.shape)


def solve_tall(rows: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Return the `x` `[d]` that minimises `‖ρ x - s‖² + λ ‖x‖²`, for more rows than columns.

    By QR of `ρ` and of the ridge below it, whose error grows with `σ/√λ` and not with its square.

    Args:
        rows: `ρ` `[n, d]`.
        right: `s` `[n]`.
        ridge: `λ`, at least 0; with 0 the shortest solution is found by singular values.
    """
    if ridge <= 0:
        driver = "gelsd" if rows.device.type == "cpu" else None
        shortest: Tensor = torch.linalg.lstsq(rows, right.unsqueeze(-1), driver=driver)[0]
        return shortest.squeeze(-1)
    root = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device) * ridge**0.5
    q, r = torch.linalg.qr(torch.cat([rows, root]))
    solved: Tensor = torch.linalg.solve_triangular(r, (q[: len(rows)].mT @ right).unsqueeze(-1), upper=True)
    return solved.squeeze(-1)
