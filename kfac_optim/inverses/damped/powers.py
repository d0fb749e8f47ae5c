"""The inverse of each factor and its root, damped relative to that factor: two ways of preconditioning from one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, batches
from kfac_optim.inverses.damped.base import DampedJob, identity_like
from kfac_optim.inverses.damped.deflation import DeflatedState, Deflation, DeflationJob, Side, apply_sides, read_off
from kfac_optim.inverses.damped.relative import RelativelyDamped
from kfac_optim.inverses.pair_inverse import SymmetricInverse, SymmetricPowers
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.specs import FactorShape, LayerSpec, Sketched, Structure


class ThinPowers(NamedTuple):
    """Holds what a refresh read off the sketch of a factor: two deflations with one basis (see `Deflation`)."""

    basis: Tensor
    weights: Tensor
    scale: Tensor
    root_weights: Tensor
    root_scale: Tensor


Powers = SymmetricPowers | ThinPowers
PowersState = DeflatedState[Powers]


@dataclass(frozen=True)
class InverseAndRoot(RelativelyDamped[PowersState]):
    """Keeps the inverse and the inverse root of each factor, `(F + ε n_F I)^-1` and `(F + ε n_F I)^-½`.

    `SelectedUpdates` chooses between the two, and takes it where no inverse is named; `apply` is the full inverse.
    Damping, sketches, arguments and errors are those of `RelativelyDamped`: `damping` ε = 0.1, `rank` 32 and `sketch`
    64.
    """

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> PowersState:
        return DeflatedState(spec, self._start, dtype=dtype, device=device)

    def refresh(self, states: Sequence[PowersState], dampings: Sequence[float]) -> None:
        jobs = [job for state in states for job in self._jobs(state)]
        for structure, sketched in batches(job for job in jobs if isinstance(job, DeflationJob)):
            assert isinstance(structure, Sketched)
            read_off(structure, sketched)
        for structure, equal in batches(job for job in jobs if isinstance(job, _WholeJob)):
            _refresh_whole(structure, equal)

    def apply(self, state: PowersState, grad: Tensor, damping: float) -> Tensor:
        a, g = (_side(side, root=False) for side in (state.a, state.g))
        return apply_sides(a, g, grad, state.condition.dtype)

    def apply_root(self, state: PowersState, grad: Tensor) -> Tensor:
        """Multiply a gradient matrix `[groups, out, in]` by the inverse root of `A` alone."""
        return apply_sides(_side(state.a, root=True), None, grad, state.condition.dtype)

    def result(self, factor: FactorShape) -> tuple[int, int]:
        if isinstance(factor.structure, Sketched):
            numbers = factor.groups * (factor.dim * self.rank + 2 * (self.rank + 1))
            return numbers, numbers
        return 2 * factor.packed, 2 * factor.numel

    def _start(self, factor: Factor, dtype: torch.dtype) -> Powers:
        """Return what stands until there are powers: the identity."""
        if not isinstance(factor.structure, Sketched):
            return SymmetricPowers(identity_like(factor, dtype), identity_like(factor, dtype))
        basis = factor.packed.new_zeros(factor.groups, factor.dim, self.rank, dtype=dtype)
        weights, scale = basis.new_zeros(factor.groups, self.rank), basis.new_ones(factor.groups)
        return ThinPowers(basis, weights, scale, weights.clone(), scale.clone())

    def _jobs(self, state: PowersState) -> list[FactorJob]:
        jobs: list[FactorJob] = []
        for side, factor, damped in self.damped(state):
            kept = state.side(side)
            if isinstance(kept, ThinPowers):
                inverse = Deflation(kept.basis, kept.weights, kept.scale)
                root = Deflation(kept.basis, kept.root_weights, kept.root_scale)
                jobs.append(DeflationJob(state, side, factor, damped, [(1.0, inverse), (0.5, root)]))
            else:
                jobs.append(_WholeJob(state, side, factor, damped, kept.inverse, kept.root))
        return jobs


@dataclass(frozen=True, slots=True, eq=False)
class _WholeJob(DampedJob):
    """Says how a factor is damped, and where its inverse and its inverse root go."""

    root: Tensor


def _refresh_whole(structure: Structure | Sketched, jobs: Sequence[_WholeJob]) -> None:
    """Stack every group of every job, of one size, into one batch, and hand the parts back."""
    shift = torch.cat([job.damped.shift for job in jobs])[:, None]
    average = torch.cat([job.average() for job in jobs])
    if structure is Structure.DENSE:
        values, basis, attempts = eigendecomposition(average)
        values = values.clamp(min=0) + shift
        inverse, root = ((basis * (values**-power).unsqueeze(-2)) @ basis.mT for power in (1.0, 0.5))
    else:
        values = average + shift
        inverse, root, attempts = values.reciprocal(), values.rsqrt(), values.isfinite().all(-1).long()
    sizes = [len(job.inverse) for job in jobs]
    condition = values.amax(-1) / values.amin(-1)
    whole = (torch.split(each, sizes) for each in (inverse, root, attempts, condition))
    for job, new, new_root, *judged in zip(jobs, *whole, strict=True):
        usable = job.keep(new, *judged)
        torch.where(usable.view(-1, *(1,) * (new_root.dim() - 1)), new_root, job.root, out=job.root)


def _side(side: Powers | None, *, root: bool) -> Side | None:
    """Return the inverse of one factor, or the root of that; None for the identity."""
    if isinstance(side, SymmetricPowers):
        return SymmetricInverse(side.root if root else side.inverse)
    if isinstance(side, ThinPowers):
        weights, scale = (side.root_weights, side.root_scale) if root else (side.weights, side.scale)
        return Deflation(side.basis, weights, scale)
    return None
