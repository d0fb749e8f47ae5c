"""The default: each damped factor is inverted by Cholesky factorisation, two matrix products apply it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_optim.damping import Damped, factored_tikhonov
from kfac_optim.factors import Factor
from kfac_optim.inverses.base import FactorPair, Inverse
from kfac_optim.layers.base import LayerStatistics
from kfac_optim.linalg import damped_cholesky_inverse
from kfac_optim.specs import Cost, LayerSpec, Structure


class CholeskyState:
    """Factors of one block and the inverses of their damped forms.

    Attributes:
        pair: the running averages.
        a_inverse: `[groups, in, in]`, `[groups, in]` for a diagonal factor, None for the identity.
        g_inverse: likewise over `out`.
        retried: factorisations that needed a larger shift, `[]` int64.
        failed: factorisations given up, whose old inverse was kept, `[]` int64.
        condition: largest 1-norm condition number of the damped factors at the last refresh, `[2]` for A and G.
    """

    __slots__ = ("a_inverse", "condition", "failed", "g_inverse", "pair", "retried")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.pair = FactorPair(spec, dtype=dtype, device=device)
        compute = torch.promote_types(dtype, torch.float32)
        self.a_inverse, self.g_inverse = (
            None if factor is None else _identity_like(factor, compute) for factor in (self.pair.a, self.pair.g)
        )
        self.retried = torch.zeros((), dtype=torch.int64, device=device)
        self.failed = torch.zeros((), dtype=torch.int64, device=device)
        self.condition = torch.ones(2, dtype=compute, device=device)


class Cholesky(Inverse[CholeskyState]):
    """Inverse of each factor with π-balanced factored damping (Martens & Grosse 2015, §6.3).

    `A + π√λ I` and `G + (√λ/π) I`, `π = √((tr A / in) / (tr G / out))`. Refreshing costs about `in³ + out³`
    operations, applying two matrix products. Factors narrower than float32 are inverted in float32.
    """

    def __repr__(self) -> str:
        return "Cholesky()"

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> CholeskyState:
        return CholeskyState(spec, dtype=dtype, device=device)

    def accumulate(self, state: CholeskyState, stats: LayerStatistics) -> None:
        state.pair.accumulate(stats)

    def has_pending(self, state: CholeskyState) -> bool:
        return state.pair.has_pending()

    def discard(self, state: CholeskyState) -> None:
        state.pair.discard()

    def has_statistics(self, state: CholeskyState) -> bool:
        return bool(state.pair.held())

    def fold(self, state: CholeskyState, loss_terms: float, decay: float) -> None:
        state.pair.fold(loss_terms, decay)

    def refresh(self, states: Sequence[CholeskyState], dampings: Sequence[float]) -> None:
        jobs: defaultdict[tuple[Any, ...], list[_Job]] = defaultdict(list)
        for state, damping in zip(states, dampings, strict=True):
            for job in _jobs(state, damping):
                key = (job.factor.structure, job.inverse.shape[-1], job.inverse.dtype, job.inverse.device)
                jobs[key].append(job)
        for (structure, *_), equal in jobs.items():
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

    def factors(self, state: CholeskyState) -> tuple[Tensor | None, Tensor | None]:
        a, g = state.pair.a, state.pair.g
        return (None if a is None else a.average), (None if g is None else g.average)

    def counters(self, state: CholeskyState) -> dict[str, Tensor]:
        return {
            "refused_statistics": state.pair.refused,
            "retried_refreshes": state.retried,
            "failed_refreshes": state.failed,
            "condition_A": state.condition[0],
            "condition_G": state.condition[1],
        }

    def flops(self, spec: LayerSpec) -> Cost:
        dims = (spec.in_dim, spec.out_dim)
        dense = [dim for dim, kept in zip(dims, spec.structure, strict=True) if kept is Structure.DENSE]
        return Cost(
            refresh=spec.groups * sum(float(dim) ** 3 for dim in dense),
            apply=spec.groups * 2.0 * spec.in_dim * spec.out_dim * sum(dense),
        )

    def tensors(self, state: CholeskyState) -> dict[str, Any]:
        nested: dict[str, Any] = {
            "factors": state.pair.tensors(),
            "retried": state.retried,
            "failed": state.failed,
            "condition": state.condition,
        }
        for name, inverse in (("A_inverse", state.a_inverse), ("G_inverse", state.g_inverse)):
            if inverse is not None:
                nested[name] = inverse
        return nested

    def load(self, state: CholeskyState, tensors: Mapping[str, Any]) -> None:
        state.pair.load(tensors["factors"])
        state.retried.copy_(tensors["retried"])
        state.failed.copy_(tensors["failed"])
        state.condition.copy_(tensors["condition"])
        for name, inverse in (("A_inverse", state.a_inverse), ("G_inverse", state.g_inverse)):
            if inverse is not None:
                inverse.copy_(tensors[name])


class _Job:
    """One factor to invert: where it is, how it is damped, and where the result and the counts go."""

    __slots__ = ("damped", "factor", "inverse", "side", "state")

    def __init__(self, state: CholeskyState, side: int, factor: Factor, inverse: Tensor, damped: Damped) -> None:
        self.state, self.side, self.factor, self.inverse, self.damped = state, side, factor, inverse, damped


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
        usable = (tries > 0) & job.state.pair.held()
        job.inverse.copy_(torch.where(usable[:, None, None], inverse, job.inverse))
        job.state.failed += (tries == 0).sum()
        job.state.retried += (tries > 1).sum()
        kept = job.state.condition[job.side]
        job.state.condition[job.side] = torch.where(usable, condition, kept).max()


def _invert_diagonal(jobs: list[_Job]) -> None:
    for job in jobs:
        diagonal = _scaled(job) + job.damped.shift[:, None]
        held = job.state.pair.held()
        job.inverse.copy_(torch.where(held, diagonal.reciprocal(), job.inverse))
        condition = (diagonal.amax(-1) / diagonal.amin(-1)).max()
        job.state.condition[job.side] = torch.where(held, condition, job.state.condition[job.side])


def _scaled(job: _Job) -> Tensor:
    average = job.factor.average.to(job.inverse.dtype)
    return average * job.damped.scale.view(-1, *(1,) * (average.dim() - 1))


def _norm1(matrices: Tensor) -> Tensor:
    """Largest column sum of magnitudes, `[n]`."""
    return matrices.abs().sum(-2).amax(-1)


def _identity_like(factor: Factor, dtype: torch.dtype) -> Tensor:
    average = factor.average
    ones = torch.ones(average.shape[:2], dtype=dtype, device=average.device)
    return torch.diag_embed(ones) if factor.structure is Structure.DENSE else ones
