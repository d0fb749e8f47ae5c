"""Inverses by Newton-Schulz iteration, which consists of matrix products alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.linalg.cholesky import shift_diagonal
from kfac_optim.linalg.eigen import _POLISHING_STEPS


class NewtonStart(NamedTuple):
    """A start is where a Newton iteration for `F⁻¹` begins."""

    inverse: Tensor
    """`X₀`, `[n, d, d]`, all eigenvalues of `F X₀` below 2."""
    gap: Tensor
    """`δ`, `[n]`: the eigenvalues of `F X₀` lie in `[δ, 2 - δ]`; it is set to 1 where the smallest is unknown."""


def newton_start(matrix: Tensor, least: Tensor, previous: Tensor, usable: Tensor) -> NewtonStart:
    """Return the previous inverse if it promises fewer steps, otherwise a multiple of the identity, without waiting.

    The identity is scaled by `2 / (u + l)`, with `u` a norm of `F` and `l` the bound below. The previous inverse `P` is
    scaled so that the eigenvalues `μ` of `F P` get the mean 1, and once more, by `1 / (1 + b)`, unless `b < 1` for `b =
    (tr (I - F P)⁸)^⅛`, which no `|1 - μ|` exceeds. A running average that forgets the share `1 - w` has `F ⪰ w F_old`,
    so that from there about `log₂((1 + b)·mean/w)` plain steps lead to where errors are squared, and from the identity
    half of `log₂(u/l)` accelerated ones.

    Args:
        matrix: `F`, positive definite, `[n, d, d]`.
        least: a positive lower bound on its eigenvalues, `[n]`, as the damping is.
        previous: positive definite but for rounding, `[n, d, d]`.
        usable: whether `previous` is an inverse of anything, `[n]` bool.
    """
    least = least.to(matrix.dtype)
    largest = torch.minimum(matrix.abs().sum(-1).amax(-1), matrix.square().sum((-2, -1)).sqrt())
    scale = 2 / (largest + least)
    product = matrix @ previous
    mean = product.diagonal(dim1=-2, dim2=-1).mean(-1)
    usable = usable & (mean > 0)
    mean = torch.where(usable, mean, 1)
    fourth = _from_identity(product / mean[:, None, None])
    for _ in range(2):
        fourth = fourth @ fourth
    # F P is similar to a symmetric matrix: its eigenvalues are real.
    bound = (fourth * fourth.mT).sum((-2, -1)).clamp(min=0).pow(1 / 8)
    steps = 2 * mean.clamp(min=1) * (1 + bound)  # two to the power of what is said above, with w = ½
    warm = usable & (steps.square() * least < largest)  # not where the bound is NaN
    rescaled = previous * (torch.where(bound < 1, 1, 1 / (1 + bound)) / mean)[:, None, None]
    identity = torch.diag_embed(scale.unsqueeze(-1).expand(matrix.shape[:2]))
    return NewtonStart(
        inverse=torch.where(warm[:, None, None], rescaled, identity), gap=torch.where(warm, 1, scale * least)
    )


def newton_schulz(matrix: Tensor, start: NewtonStart, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Iterate `X ← ζ X (2I - F X)` for `steps` steps: matrix products only, and no host synchronisation.

    Each step squares the errors `1 - μ` of the eigenvalues of `F X`, so that small ones only double at first. Where
    they are known to lie in `[δ, 2 - δ]` the best `ζ = 2 / (1 + 2δ - δ²)` makes that fourfold, and tends to 1 as the
    errors vanish (Pan & Schreiber 1991); with `δ = 1` it is 1.

    Rounding makes a condition number κ an error of κ units in `F X`, and of κ² in `X F`. So `X` inverts from the right,
    its transpose from the left, and taking its symmetric part would spoil it. What comes out must be checked
    (`inverse_residuals`): it may have diverged.

    Args:
        matrix: `F`, positive definite, `[n, d, d]`.
        start: `X₀` and `δ`.
        steps: how many steps, of two products `[d, d] × [d, d]` each.
        dtype: the dtype of the products of all but the last two steps, where it is narrower than that of `matrix`. `X`
            is kept in the dtype of `matrix`, and so are the sums.
    """
    inverse, gap = start
    full = matrix.dtype
    early = full if dtype is None or torch.promote_types(dtype, full) != full else dtype
    for step in range(steps):
        precision = early if step < steps - _POLISHING_STEPS else full
        factor = inverse.to(precision)
        error = _from_identity((matrix.to(precision) @ factor).to(full))
        spread = 1 + 2 * gap - gap.square()
        inverse = (inverse + (factor @ error.to(precision)).to(full)) * (2 / spread)[:, None, None]
        gap = 2 * gap * (2 - gap) / spread
    return inverse


def inverse_residuals(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Return `‖I - F X‖ / √d` in the Frobenius norm, `[n]`, which bounds the error of the eigenvalues of `F X`."""
    return _from_identity(matrix @ inverse).square().mean((-2, -1)).mul(matrix.shape[-1]).sqrt()


def _from_identity(product: Tensor) -> Tensor:
    """Return `I - product`, `[n, d, d]`."""
    return shift_diagonal(-product, torch.ones_like(product[:, 0, 0]))
