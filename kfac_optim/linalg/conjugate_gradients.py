"""Conjugate gradients for symmetric positive systems that are known by their products alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = Sequence[Tensor]
"""A vector in parts."""


def conjugate_gradients(
    product: Callable[[Vector], Vector],
    right: Vector,
    precondition: Callable[[Vector], Vector],
    *,
    tolerance: float,
    most: int,
) -> tuple[list[Tensor], int]:
    """Solve `M x = right` by preconditioned conjugate gradients (Hestenes & Stiefel 1952), from zero on.

    The host waits for the size of the residual in each iteration.

    Args:
        product: returns `M v`.
        right: the right side.
        precondition: applies a symmetric positive approximation of `M⁻¹`.
        tolerance: iterations end once the residual is at most this share of the right side's.
        most: iterations at most.

    Returns:
        The solution, and the number of iterations.
    """
    x = [torch.zeros_like(part) for part in right]
    residual = [part.clone() for part in right]
    z = precondition(residual)
    direction = [part.clone() for part in z]
    rho = _inner(residual, z)
    goal = tolerance * float(_inner(right, right)) ** 0.5
    for iteration in range(most):
        if not float(_inner(residual, residual)) ** 0.5 > goal:
            return x, iteration
        pushed = product(direction)
        step = rho / _inner(direction, pushed)
        for part, along, back, of_residual in zip(x, direction, pushed, residual, strict=True):
            part += step * along
            of_residual -= step * back
        z = precondition(residual)
        before, rho = rho, _inner(residual, z)
        direction = [part + rho / before * along for part, along in zip(z, direction, strict=True)]
    return x, most


def _inner(left: Vector, right: Vector) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
