"""Each damped factor is inverted by matrix products alone, from the previous inverse on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import Usable, averages, batches, mark
from kfac_optim.inverses.damped.base import DampedJob, damped_jobs, identity_like, keep_inverses, take_reciprocals
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import PairInverse, PairState, dense_flops
from kfac_optim.linalg.cholesky import damped_cholesky_inverse
from kfac_optim.linalg.newton import inverse_residuals, newton_schulz, newton_start
from kfac_optim.linalg.products import norm1, sandwich
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Structure
from kfac_optim.utils.validation import check_dtype, check_integer, check_number


class ConvergedInverse(NamedTuple):
    """Represents the inverse `X` of one damped factor `F`, with `F X = I`, as the iteration left it."""

    inverse: Tensor
    """`[groups, d, d]`, or `[groups, d]` for a diagonal factor; rounding may leave it a little asymmetric."""
    solved: Tensor
    """Whether it ever was computed, `[groups]` bool; until then it is the identity."""


class NewtonSchulzState(PairState[ConvergedInverse]):
    """Holds the factors of one block and the inverses of their damped forms; condition numbers are in the 1-norm.

    Attributes:
        fallbacks: matrices that were handed to Cholesky, `[]` int64.
    """

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, _unsolved, dtype=dtype, device=device)
        self.fallbacks = torch.zeros((), dtype=torch.int64, device=device)

    def counted(self) -> dict[str, Tensor]:
        return super().counted() | {"fallbacks": self.fallbacks}

    def counters(self) -> dict[str, Tensor]:
        return super().counters() | {"fallback_inverses": self.fallbacks}


@dataclass(frozen=True)
class NewtonSchulz(PairInverse[NewtonSchulzState]):
    """Inverts each damped factor by a fixed number of Newton steps `X ← ζ X (2I - F X)`.

    `A + π√λ I` and `G + (√λ/π) I`, `π = √((tr A / in) / (tr G / out))`. The iteration consists of matrix products,
    which accelerators do fastest, and waits for nothing. It starts from the previous inverse, scaled down where that
    has become too large to converge from, or from a multiple of the identity where that is nearer
    (`linalg.newton_start`); there the damping bounds the eigenvalues from below and sets `ζ` (`linalg.newton_schulz`).
    Afterwards `‖I - F X‖ / √d` in the Frobenius norm is taken in full precision: where it exceeds the tolerance the
    factor is inverted by Cholesky, and counted as `fallback_inverses` in `metrics()`; where that fails too the last
    good inverse stays. Whether any factor needs that is asked once for each size of factor, when all iterations are
    under way.

    At d = 256 and condition numbers of 1e2/1e3/1e4/1e5/1e6/1e8 a cold start takes 6/8/9/11/13/16 steps to a residual of
    1e-2 (10/13/16/19/22/29 with ζ = 1). The best residuals are 2e-6/2e-5/1e-4/1e-3/9e-3/none in float32, as with
    Cholesky, 4e-15 to 1e-9 in float64, and 3e-6/3e-3/none in bfloat16. A warm start, ten updates of decay 0.95 later,
    takes 5 steps at the second refresh and 2 to 4 at the next ones (condition numbers from 80 to 7e4, float32).

    Refreshing costs `(4 · steps + 8) · (in³ + out³)` operations where Cholesky takes `in³ + out³`, applying two matrix
    products. Products in float32 follow `torch.set_float32_matmul_precision`: with TF32 ill-conditioned factors fall
    back.

    Use it on accelerators whose matrix products are far faster than their factorisations, with `dtype=torch.bfloat16`
    where condition numbers are small. Use `Cholesky` on CPUs: this refresh takes 3 to 15 times as long.

    Args:
        steps: how many steps, of two products each, every factor takes at every refresh.
        tolerance: largest residual that is let through. With 1e-2 no eigenvalue of a factor narrower than 10,000 is off
            by its whole size.
        dtype: the dtype of the products in all but the last two steps, where it is narrower than the factors: with
            `torch.bfloat16` factors of condition numbers above 1e3 fall back. None is the factors' dtype.
    """

    steps: int = 10
    tolerance: float = 1e-2
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_integer("steps of NewtonSchulz", self.steps)
        check_number("tolerance of NewtonSchulz", self.tolerance, above=0)
        check_dtype("dtype of NewtonSchulz", self.dtype)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> NewtonSchulzState:
        return NewtonSchulzState(spec, dtype=dtype, device=device)

    def refresh(self, states: Sequence[NewtonSchulzState], dampings: Sequence[float]) -> None:
        begun = []
        for structure, equal in batches(damped_jobs(states, dampings)):
            if structure is Structure.DENSE and equal[0].factor.dim > 1:
                begun.append(self._iterate(equal))
            else:
                _mark_solved(equal, take_reciprocals(equal))
        for iterated in begun:
            _finish(iterated)

    def apply(self, state: NewtonSchulzState, grad: Tensor, damping: float) -> Tensor:
        a, g = (None if side is None else side.inverse for side in (state.a, state.g))
        # From the left `newton_schulz` inverts well only by the transpose.
        a = a.mT if a is not None and a.dim() == 3 else a
        return sandwich(g, grad.to(state.condition.dtype), a)

    def result(self, factor: FactorShape) -> tuple[int, int]:
        """Return the numbers of an inverse, which goes whole, as rounding may leave it asymmetric, and of `solved`."""
        return factor.numel + factor.groups, factor.numel

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=4.0 * self.steps + 8.0, products=1)

    def _iterate(self, jobs: Sequence[DampedJob]) -> "_Iterated":
        damped = Damped.joined(job.damped for job in jobs)
        matrix = damped.of(averages(jobs))
        start = newton_start(
            matrix,
            damped.shift,
            torch.cat([job.inverse for job in jobs]),
            torch.cat([_solved(job) for job in jobs]),
        )
        inverses = newton_schulz(matrix, start, self.steps, self.dtype)
        converged = inverse_residuals(matrix, inverses) <= self.tolerance  # not where it is NaN
        return _Iterated(jobs, inverses, converged, norm1(matrix))


class _Iterated(NamedTuple):
    """Holds what the iteration made of jobs of one size, n groups in all."""

    jobs: Sequence[DampedJob]
    inverses: Tensor
    """`[n, d, d]`."""
    converged: Tensor
    """Whether each is within tolerance, `[n]` bool."""
    norms: Tensor
    """1-norms of the damped factors, `[n]`."""


def _solved(job: DampedJob) -> Tensor:
    assert isinstance(job.state, NewtonSchulzState)
    return job.state.side(job.side).solved


def _mark_solved(jobs: Sequence[DampedJob], usable: Usable) -> None:
    mark(usable, jobs, [_solved(job) for job in jobs])


def _finish(iterated: _Iterated) -> None:
    """Invert by Cholesky what has not converged, and hand the parts back."""
    jobs, inverses, converged, norms = iterated
    attempts = converged.to(torch.int64)
    if not bool(converged.all()):
        left = (~converged).nonzero().squeeze(-1)
        # The factors are computed again: to keep them would take their memory at every refresh, and few fail.
        damped = Damped.joined(job.damped for job in jobs)
        unshifted = damped.scaled(averages(jobs))[left]
        inverses[left], attempts[left] = damped_cholesky_inverse(unshifted, damped.shift[left])
    _mark_solved(jobs, keep_inverses(jobs, inverses, attempts, norms * norm1(inverses)))
    for job, fell_back in zip(jobs, torch.split(~converged, [len(job.inverse) for job in jobs]), strict=True):
        assert isinstance(job.state, NewtonSchulzState)
        job.state.fallbacks += fell_back.sum()


def _unsolved(factor: Factor, dtype: torch.dtype) -> ConvergedInverse:
    inverse = identity_like(factor, dtype)
    return ConvergedInverse(inverse, torch.zeros(len(inverse), dtype=torch.bool, device=inverse.device))
