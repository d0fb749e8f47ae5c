"""Each factor is eigendecomposed: the product of both is damped exactly, by the λ of the present step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.damping import factored_tikhonov
from kfac_optim.factors import Factor
from kfac_optim.inverses.base import FactorJob, PairInverse, PairState, batches, dense_flops
from kfac_optim.linalg import eigendecomposition
from kfac_optim.specs import Cost, LayerSpec, Structure

# Per d³ of one dense factor, on the scale where a Cholesky inverse is 1. Fewer are counted (about 9), but at a lower
# rate: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13, float32, d from 64 to 1024).
_EIGH_FLOPS = 25.0


class Spectrum(NamedTuple):
    """One factor as `basis · diag(values) · basisᵀ`."""

    values: Tensor
    """Eigenvalues, none negative, `[groups, d]`."""
    basis: Tensor | None
    """Eigenvectors as columns, `[groups, d, d]`; None for a diagonal factor, which is its own eigenvalues."""


class EigenState(PairState):
    """Factors of one block and their eigendecompositions.

    Attributes:
        a: of `A`, None for the identity.
        g: of `G`, None for the identity.
        solved: `[groups]` bool, whether any factor of the group was ever decomposed. Until then both stand as
            identities and λ does not count, so that the gradient comes back whatever λ is.
    """

    __slots__ = ("a", "g", "solved")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.a, self.g = (
            None if factor is None else _identity_like(factor, self.condition.dtype)
            for factor in (self.pair.a, self.pair.g)
        )
        self.solved = torch.zeros(spec.groups, dtype=torch.bool, device=device)

    def results(self) -> dict[str, Tensor]:
        named = {"solved": self.solved}
        for name, spectrum in (("A", self.a), ("G", self.g)):
            if spectrum is not None:
                named[f"{name}_values"] = spectrum.values
                if spectrum.basis is not None:
                    named[f"{name}_basis"] = spectrum.basis
        return named


class Eigen(PairInverse[EigenState]):
    """Inverse of `A ⊗ G + λI` in the eigenbasis of the factors (Pauloski et al. 2020, arXiv 2007.00784).

    With `A = Q_A diag(s_A) Q_Aᵀ` and `G = Q_G diag(s_G) Q_Gᵀ` a gradient becomes
    `Q_G [(Q_Gᵀ ∇ Q_A) / (s_G s_Aᵀ + λ)] Q_Aᵀ`, negative eigenvalues taken as 0. λ is not split over the factors, which
    makes the damping exact, and it may change at every step without a refresh. Refreshing costs several times what
    it does with `Cholesky`, applying four matrix products instead of two. Factors narrower than float32 are
    decomposed in float32.

    Condition numbers in `metrics()` are those of the factors as `Cholesky` would damp them at the last refresh, in
    the 2-norm: `A + π√λ I` and `G + (√λ/π) I`.
    """

    def __repr__(self) -> str:
        return "Eigen()"

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> EigenState:
        return EigenState(spec, dtype=dtype, device=device)

    def refresh(self, states: Sequence[EigenState], dampings: Sequence[float]) -> None:
        for structure, equal in batches(job for state in states for job in _jobs(state)):
            if structure is Structure.DENSE:
                _decompose_dense(equal)
            else:
                _take_diagonal(equal)
        for state, damping in zip(states, dampings, strict=True):
            _measure_condition(state, damping)

    def apply(self, state: EigenState, grad: Tensor, damping: float) -> Tensor:
        a, g = state.a, state.g
        grad = grad.to(state.condition.dtype)
        if g is not None and g.basis is not None:
            grad = g.basis.mT @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis
        grad = grad / _damped_eigenvalues(state, damping)
        if g is not None and g.basis is not None:
            grad = g.basis @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis.mT
        return grad

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=_EIGH_FLOPS, products=2)


def _damped_eigenvalues(state: EigenState, damping: float) -> Tensor:
    """`s_G s_Aᵀ + λ`, `[groups, out, in]`; the axis of an identity factor has size 1."""
    values = torch.ones((), dtype=state.condition.dtype, device=state.condition.device)
    if state.g is not None:
        values = values * state.g.values.unsqueeze(-1)
    if state.a is not None:
        values = values * state.a.values.unsqueeze(-2)
    return values + (state.solved.to(values.dtype) * damping)[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class _Job(FactorJob):
    """Where the decomposition goes."""

    state: EigenState
    spectrum: Spectrum

    def keep(self, values: Tensor, basis: Tensor | None, attempts: Tensor) -> None:
        """Take the groups that are usable, and leave the others at their last good decomposition.

        Args:
            values: `[groups, d]`.
            basis: `[groups, d, d]`, None for a diagonal factor.
            attempts: `[groups]`, 0 where all failed.
        """
        usable = self.settle(attempts)
        old_values, old_basis = self.spectrum
        old_values.copy_(torch.where(usable[:, None], values.clamp(min=0), old_values))
        if basis is not None and old_basis is not None:
            old_basis.copy_(torch.where(usable[:, None, None], basis, old_basis))
        self.state.solved.logical_or_(usable)


def _jobs(state: EigenState) -> list[_Job]:
    sides = ((state.pair.a, state.a), (state.pair.g, state.g))
    return [
        _Job(state, side, factor, spectrum)
        for side, (factor, spectrum) in enumerate(sides)
        if factor is not None and spectrum is not None
    ]


def _decompose_dense(jobs: list[_Job]) -> None:
    """Stack every group of every job into one batch, decompose, and hand the parts back."""
    whole = eigendecomposition(torch.cat([job.average() for job in jobs]))
    sizes = [job.factor.average.shape[0] for job in jobs]
    for job, values, basis, tries in zip(jobs, *(torch.split(part, sizes) for part in whole), strict=True):
        job.keep(values, basis, tries)


def _take_diagonal(jobs: list[_Job]) -> None:
    for job in jobs:
        values = job.average()
        job.keep(values, None, values.isfinite().all(-1).long())


def _measure_condition(state: EigenState, damping: float) -> None:
    present = [(side, spectrum.values) for side, spectrum in enumerate((state.a, state.g)) if spectrum is not None]
    traces = [values.sum(-1) for _, values in present]
    shares = factored_tikhonov(traces, [values.shape[-1] for _, values in present], damping)
    for (side, values), share in zip(present, shares, strict=True):
        damped = values * share.scale[:, None] + share.shift[:, None]
        state.condition[side] = (damped.amax(-1) / damped.amin(-1)).max()


def _identity_like(factor: Factor, dtype: torch.dtype) -> Spectrum:
    average = factor.average
    ones = torch.ones(average.shape[:2], dtype=dtype, device=average.device)
    return Spectrum(ones, torch.diag_embed(ones) if factor.structure is Structure.DENSE else None)
