"""The default: each damped factor is inverted by Cholesky factorisation, two matrix products apply it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.damping import Damped, factored_tikhonov
from kfac_optim.factors import Factor
from kfac_optim.inverses.base import FactorJob, PairInverse, PairState, batches, dense_flops
from kfac_optim.linalg import damped_cholesky_inverse
from kfac_optim.specs import Cost, LayerSpec, Structure


class CholeskyState(PairState):
    """Factors of one block and the inverses of their damped forms; condition numbers are in the 1-norm.

    Attributes:
        a_inverse: `[groups, in, in]`, `[groups, in]` for a diagonal factor, None for the identity.
        g_inverse: likewise over `out`.
    """

    __slots__ = ("a_inverse", "g_inverse")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.a_inverse, self.g_inverse = (
            None if factor is None else _identity_like(factor, self.condition.dtype)
            for factor in (self.pair.a, self.pair.g)
        )

    def results(self) -> dict[str, Tensor]:
        named = {"A_inverse": self.a_inverse, "G_inverse": self.g_inverse}
        return {name: inverse for name, inverse in named.items() if inverse is not None}


class Cholesky(PairInverse[CholeskyState]):
    """Inverse of each factor with π-balanced factored damping (Martens & Grosse 2015, §6.3).

    `A + π√λ I` and `G + (√λ/π) I`, `π = √((tr A / in) / (tr G / out))`. Refreshing costs about `in³ + out³`
    operations, applying two matrix products. Factors narrower than float32 are inverted in float32.
    """

    def __repr__(self) -> str:
        return "Cholesky()"

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> CholeskyState:
        return CholeskyState(spec, dtype=dtype, device=device)

    def refresh(self, states: Sequence[CholeskyState], dampings: Sequence[float]) -> None:
        jobs = [job for state, damping in zip(states, dampings, strict=True) for job in _jobs(state, damping)]
        for structure, equal in batches(jobs):
            if structure is Structure.DENSE:
                _invert_dense(equal)
            else:
                _invert_diagonal(equal)

    def apply(self, state: CholeskyState, grad: Tensor, damping: float) -> Tensor:
        grad = grad.to(state.condition.dtype)
        if state.g_inverse is not None:
            dense = state.g_inverse.dim() == 3
            grad = state.g_inverse @ grad if dense else state.g_inverse.unsqueeze(-1) * grad
        if state.a_inverse is not None:
            dense = state.a_inverse.dim() == 3
            grad = grad @ state.a_inverse if dense else grad * state.a_inverse.unsqueeze(-2)
        return grad

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=1.0, products=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Job(FactorJob):
    """How the factor is damped, and where its inverse goes."""

    inverse: Tensor
    damped: Damped


def _jobs(state: CholeskyState, damping: float) -> list[_Job]:
    present = [
        (side, factor, inverse)
        for side, (factor, inverse) in enumerate(((state.pair.a, state.a_inverse), (state.pair.g, state.g_inverse)))
        if factor is not None and inverse is not None
    ]
    compute = state.condition.dtype
    traces = [factor.trace().to(compute) for _, factor, _ in present]
    dims = [inverse.shape[-1] for _, _, inverse in present]
    damped = factored_tikhonov(traces, dims, damping)
    return [
        _Job(state, side, factor, inverse, share)
        for (side, factor, inverse), share in zip(present, damped, strict=True)
    ]


def _invert_dense(jobs: list[_Job]) -> None:
    """Stack every group of every job into one batch, invert, and hand the parts back."""
    stack = torch.cat([_scaled(job) for job in jobs])
    shift = torch.cat([job.damped.shift for job in jobs])
    inverses, attempts = damped_cholesky_inverse(stack, shift)
    conditions = (_norm1(stack) + shift) * _norm1(inverses)
    sizes = [job.inverse.shape[0] for job in jobs]
    parts = (torch.split(whole, sizes) for whole in (inverses, attempts, conditions))
    for job, inverse, tries, condition in zip(jobs, *parts, strict=True):
        usable = job.settle(tries)
        job.inverse.copy_(torch.where(usable[:, None, None], inverse, job.inverse))
        kept = job.state.condition[job.side]
        job.state.condition[job.side] = torch.where(usable, condition, kept).max()


def _invert_diagonal(jobs: list[_Job]) -> None:
    for job in jobs:
        diagonal = _scaled(job) + job.damped.shift[:, None]
        usable = job.settle(diagonal.isfinite().all(-1).to(torch.int64))
        job.inverse.copy_(torch.where(usable[:, None], diagonal.reciprocal(), job.inverse))
        kept = job.state.condition[job.side]
        job.state.condition[job.side] = torch.where(usable, diagonal.amax(-1) / diagonal.amin(-1), kept).max()


def _scaled(job: _Job) -> Tensor:
    average = job.average()
    return average * job.damped.scale.view(-1, *(1,) * (average.dim() - 1))


def _norm1(matrices: Tensor) -> Tensor:
    """Largest column sum of magnitudes, `[n]`."""
    return matrices.abs().sum(-2).amax(-1)


def _identity_like(factor: Factor, dtype: torch.dtype) -> Tensor:
    average = factor.average
    ones = torch.ones(average.shape[:2], dtype=dtype, device=average.device)
    return torch.diag_embed(ones) if factor.structure is Structure.DENSE else ones
