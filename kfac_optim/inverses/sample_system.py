"""The linear system of one Gauss-Newton step in sample space, factored once and solved for several right sides."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kfac_optim.inverses.kronecker_guess import kronecker_guess
from kfac_optim.inverses.sample_rows import SampleRows
from kfac_optim.linalg.conjugate_gradients import conjugate_gradients
from kfac_optim.linalg.regularised_systems import gram_solver, tall_solver
from kfac_optim.utils.warning import warn

# Conjugate gradients end at such a residual, as a share of the right side.
_TOLERANCE = 1e-8
_MOST_ITERATIONS = 1000


class SampleSystem:
    """Applies `ρᵀ(ρρᵀ + λI)⁻¹`, to one number for each row of `ρ`.

    Where the blocks have fewer parameters than there are rows, the least-squares problem is solved by QR. Above
    `dense_limit` both of rows and of parameters it is solved by conjugate gradients, preconditioned by Kronecker
    factors of the same rows.

    Args:
        rows: the rows of each block.
        ridge: `λ`.
        shapes: the shapes of the matrices of the blocks, `[groups, out, in]`.
        dense_limit: rows up to which their matrix is formed.
    """

    def __init__(
        self, rows: Sequence[SampleRows], ridge: float, shapes: Sequence[torch.Size], dense_limit: int
    ) -> None:
        self.rows = rows
        self.ridge = ridge
        self._shapes = shapes
        self._dense_limit = dense_limit

    def along(self, vector: Sequence[Tensor]) -> Tensor:
        """Return `ρ` times a vector in the parts of the blocks, `[rows]`."""
        return total([each.along(part) for each, part in zip(self.rows, vector, strict=True)])

    def solve(self, target: Tensor) -> list[Tensor]:
        """Return `ρᵀ(ρρᵀ + λI)⁻¹ target`, by block; the target is `[rows]`."""
        return self._solver(target)

    @cached_property
    def _solver(self) -> Callable[[Tensor], list[Tensor]]:
        rows, sizes = self.rows, [shape.numel() for shape in self._shapes]
        if sum(sizes) < rows[0].count and sum(sizes) <= self._dense_limit:
            solve_tall = tall_solver(torch.cat([each.dense() for each in rows], 1), self.ridge)

            def by_parameters(target: Tensor) -> list[Tensor]:
                parts = torch.split(solve_tall(target), sizes)
                return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

            return by_parameters
        if rows[0].count <= self._dense_limit:
            solve_gram = gram_solver(total([each.gram() for each in rows]), self.ridge)

            def by_rows(target: Tensor) -> list[Tensor]:
                weights = solve_gram(target)
                return [each.combined(weights) for each in rows]

            return by_rows
        guess = [kronecker_guess(each, self.ridge) for each in rows]

        def product(vector: Sequence[Tensor]) -> list[Tensor]:
            along = self.along(vector)
            return [each.combined(along) + self.ridge * part for each, part in zip(rows, vector, strict=True)]

        def by_iterations(target: Tensor) -> list[Tensor]:
            parts, iterations = conjugate_gradients(
                product,
                [each.combined(target) for each in rows],
                lambda vector: [apply(part) for apply, part in zip(guess, vector, strict=True)],
                tolerance=_TOLERANCE,
                most=_MOST_ITERATIONS,
            )
            if iterations == _MOST_ITERATIONS:
                warn(
                    "kfac_optim: the conjugate gradients of SampleSpace did not reach a residual of "
                    f"{_TOLERANCE:g} in {iterations} iterations, and the step is not exact. Raise damping, or raise "
                    f"dense_limit, which is {self._dense_limit}, to the number of residuals."
                )
            return parts

        return by_iterations


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return sum(parts[1:], start=parts[0])
