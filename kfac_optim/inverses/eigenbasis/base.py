"""What the representations in the eigenbases of the factors have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, averages, batches, mark, settle, take
from kfac_optim.inverses.damping import factored_tikhonov
from kfac_optim.inverses.pair_inverse import PairInverse, PairState
from kfac_optim.inverses.state import Result
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.specs import FactorShape, LayerSpec, Part, Sketched, Structure


class Spectrum(NamedTuple):
    """Represents one factor as `basis · diag(values) · basisᵀ`."""

    values: Tensor
    """Eigenvalues, none negative, `[groups, d]`."""
    basis: Tensor | None
    """Eigenvectors as columns, `[groups, d, d]`; None for a diagonal factor, which is its own eigenvalues."""


class EigenState(PairState[Spectrum]):
    """Holds the factors of one block and their eigendecompositions.

    Attributes:
        solved: `[groups]` bool, whether any factor of the group was ever decomposed. Until then both stand as
            identities and λ does not count, so that the gradient comes back whatever λ is.
    """

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, _unit_spectrum, dtype=dtype, device=device)
        self.solved = torch.zeros(spec.groups, dtype=torch.bool, device=device)

    def stacked(self, others: Sequence[Self]) -> Self | None:
        if (whole := super().stacked(others)) is not None:
            whole.solved = torch.cat([self.solved, *(each.solved for each in others)])
        return whole

    def to_stack(self) -> list[Tensor]:
        return [self.solved, *super().to_stack()]

    def computed(self) -> dict[str, Tensor]:
        return {"solved": self.solved, **super().computed()}

    def results(self, part: str) -> tuple[Result, ...]:
        return *super().results(part), Result(self.solved)

    def eigenvalues(self) -> Tensor:
        """Return `s_G s_Aᵀ`, `[groups, out, in]`; the axis of an identity factor has size 1."""
        return outer(
            None if self.g is None else self.g.values, None if self.a is None else self.a.values, like=self.condition
        )


E = TypeVar("E", bound=EigenState)


class EigenbasisInverse(PairInverse[E]):
    """Divides the gradient by one number for each pair of eigenvectors of `A` and `G`."""

    follows_damping = True
    damps_jointly = True

    def refresh(self, states: Sequence[E], dampings: Sequence[float]) -> None:
        for structure, equal in batches(job for state in states for job in _eigen_jobs(state)):
            _decompose(structure, equal)
        for state, damping in zip(states, dampings, strict=True):
            _measure_condition(state, damping)

    def damped(self, state: E, damping: float) -> Tensor:
        """Return what to divide by in the eigenbasis, `[groups, out, in]` or of size 1 along an axis."""
        return divisor(state.eigenvalues(), state.solved, damping)

    def result(self, factor: FactorShape) -> tuple[int, int]:
        """Return the numbers of basis and eigenvalues."""
        values = factor.groups * factor.dim
        numbers = values + (factor.numel if factor.structure is Structure.DENSE else 0)
        return numbers, numbers

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """Give the parts of both sides; `solved` goes with each."""
        return tuple(replace(part, sent=part.sent + spec.groups) for part in super().parts(spec))

    def apply(self, state: E, grad: Tensor, damping: float) -> Tensor:
        a, g = state.a, state.g
        grad = grad.to(state.condition.dtype)
        if g is not None and g.basis is not None:
            grad = g.basis.mT @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis
        grad = grad / self.damped(state, damping)
        if g is not None and g.basis is not None:
            grad = g.basis @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis.mT
        return grad


def divisor(values: Tensor, solved: Tensor, damping: float) -> Tensor:
    """Return `values` `[groups, rows, columns]` with λ added, or one rounding unit of the largest if λ is below that.

    Where `values` are zero, gradients are rounding noise, which a smaller divisor would make longer than all else; the
    trust region would not see it, as that noise adds nothing to `Δᵀ∇`. A group with a value that has overflowed has λ
    alone, and one that is not `solved` `[groups]` has 1.
    """
    info = torch.finfo(values.dtype)
    unit = (info.eps * values.amax((1, 2), keepdim=True)).nan_to_num(nan=0.0, posinf=0.0)
    least = unit.clamp(min=min(damping, info.max))  # which refuses a λ that the dtype does not hold
    return torch.where(solved[:, None, None], values + least, 1.0)


def outer(g_values: Tensor | None, a_values: Tensor | None, *, like: Tensor) -> Tensor:
    """Return `g aᵀ` of values `[groups, d]`, in the dtype of `like`; None stands for the identity, of axis size 1."""
    values = torch.ones((), dtype=like.dtype, device=like.device)
    if g_values is not None:
        values = values * g_values.unsqueeze(-1)
    if a_values is not None:
        values = values * a_values.unsqueeze(-2)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class EigenJob(FactorJob):
    """A job is one factor to decompose, and knows where the decomposition goes."""

    state: EigenState
    spectrum: Spectrum


def _decompose(structure: Structure | Sketched, jobs: Sequence[EigenJob]) -> None:
    """Stack every group of every job into one batch, decompose, and take what is usable."""
    whole, basis = averages(jobs), None
    if structure is Structure.DENSE:
        values, basis, attempts = eigendecomposition(whole)
    else:
        values, attempts = whole, whole.isfinite().all(-1).long()
    usable = settle(jobs, attempts)
    take(usable, [job.spectrum.values for job in jobs], values.clamp(min=0))
    if basis is not None:
        take(usable, [job.spectrum.basis for job in jobs if job.spectrum.basis is not None], basis)
    mark(usable, jobs, [job.state.solved for job in jobs])


def _eigen_jobs(state: EigenState) -> list[EigenJob]:
    return [
        EigenJob(state, side, factor, state.side(side))
        for side, factor in enumerate((state.pair.a, state.pair.g))
        if factor is not None and factor.elsewhere is None
    ]


def _measure_condition(state: EigenState, damping: float) -> None:
    """Measure the condition numbers of the sides that are kept here."""
    sides = ((state.pair.a, state.a), (state.pair.g, state.g))
    present = [
        (side, factor, spectrum.values)
        for side, (factor, spectrum) in enumerate(sides)
        if factor is not None and spectrum is not None
    ]
    traces = [
        values.sum(-1) if factor.elsewhere is None else factor.trace().to(state.condition.dtype)
        for _, factor, values in present
    ]
    shares = factored_tikhonov(traces, [values.shape[-1] for _, _, values in present], damping)
    for (side, factor, values), share in zip(present, shares, strict=True):
        if factor.elsewhere is None:
            damped = values * share.scale[:, None] + share.shift[:, None]
            state.condition[side] = (damped.amax(-1) / damped.amin(-1)).max()


def _unit_spectrum(factor: Factor, dtype: torch.dtype) -> Spectrum:
    """Return the spectrum of the identity."""
    ones = torch.ones(factor.groups, factor.dim, dtype=dtype, device=factor.device)
    return Spectrum(ones, torch.diag_embed(ones) if factor.structure is Structure.DENSE else None)
