"""Kronecker factors of one step's rows, as a preconditioner of conjugate gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from kfac_optim.inverses.sample_rows import SampleRows


def kronecker_guess(rows: SampleRows, ridge: float) -> Callable[[Tensor], Tensor]:
    """Return a function that applies `(R ⊗ L / tr L + λI)⁻¹`, with `L = Σ J Jᵀ` and `R = Σ Jᵀ J` over all rows.

    Args:
        rows: the rows of the block.
        ridge: `λ`.
    """
    left, right = rows.moments()
    traces = left.diagonal(dim1=1, dim2=2).sum(-1).clamp(min=torch.finfo(left.dtype).tiny)
    (s_left, u_left), (s_right, u_right) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    spectrum = s_left.clamp(min=0).unsqueeze(-1) * s_right.clamp(min=0).unsqueeze(-2) / traces.view(-1, 1, 1)
    floor = torch.finfo(left.dtype).eps * spectrum.amax((1, 2), keepdim=True)
    divisor = (spectrum + ridge).clamp(min=floor.clamp(min=torch.finfo(left.dtype).tiny))

    def apply(matrix: Tensor) -> Tensor:
        solved: Tensor = u_left @ ((u_left.mT @ matrix @ u_right) / divisor) @ u_right.mT
        return solved

    return apply
