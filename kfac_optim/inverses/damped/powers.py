"""The inverse of each factor and its root, damped relative to that factor: two ways of preconditioning from one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, averages, batches
from kfac_optim.inverses.damped.base import DampedJob, identity_like
from kfac_optim.inverses.damped.deflation import (
    DeflatedState,
    Deflation,
    DeflationJob,
    Side,
    apply_sides,
    check_sketch,
    read_off,
    sketched_if_wide,
    sketched_refresh,
)
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse, SymmetricInverse, SymmetricPowers
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.specs import Cost, FactorShape, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils.validation import check_number


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
class InverseAndRoot(PairInverse[PowersState]):
    """Keeps the inverse and the inverse root of each factor, `(F + ε n_F I)^-1` and `(F + ε n_F I)^-½`.

    `n_F = tr F / d` is the mean eigenvalue of a factor, so that the damping ε has no unit; the λ of the param groups is
    not used. `SelectedUpdates` chooses between the two, and takes this representation where none is named; `apply` is
    the full inverse.

    Of factors of at least `4·sketch` rows the products with so many random directions are kept, and both powers have r
    eigenvectors and one number for the rest, as with `LowRank(sketch=…)`. Refreshing the others costs what it does with
    `Eigen`. A factor that is zero counts as the identity. Condition numbers in `metrics()` are those of the damped
    factors, in the 2-norm.

    Args:
        damping: ε, above 0.
        rank: r, of wide factors.
        sketch: how many directions, at least the rank; None keeps all factors whole.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: it is out of range.
    """

    damping: float = 0.1
    rank: int = 32
    sketch: int | None = 64

    follows_damping = True  # as no λ counts
    damps_jointly = True

    def __post_init__(self) -> None:
        check_number("damping of InverseAndRoot", self.damping, above=0)
        check_sketch("InverseAndRoot", self.sketch, self.rank)

    def kept(self, wish: Kept, dim: int) -> Kept:
        return sketched_if_wide(self.sketch, wish, dim)

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
        return apply_sides(a, g, [grad], state.condition.dtype)[0]

    def apply_root(self, state: PowersState, grad: Tensor) -> Tensor:
        """Multiply a gradient matrix `[groups, out, in]` by the inverse root of `A` alone."""
        return apply_sides(_side(state.a, root=True), None, [grad], state.condition.dtype)[0]

    def result(self, factor: FactorShape) -> tuple[int, int]:
        if isinstance(factor.structure, Sketched):
            numbers = factor.groups * (factor.dim * self.rank + 2 * (self.rank + 1))
            return numbers, numbers
        return 2 * factor.packed, 2 * factor.numel

    def flops(self, spec: LayerSpec) -> Cost:
        refresh, per_element = 0.0, 0.0
        for structure, groups, dim, _ in spec.factors():
            if isinstance(structure, Sketched):
                refresh += groups * sketched_refresh(dim, structure.columns)
                per_element += 4.0 * self.rank
            elif structure is Structure.DENSE:
                refresh += EIGH_FLOPS * groups * float(dim) ** 3
                per_element += 2 * dim
        return Cost(refresh=refresh, apply=per_element * spec.groups * spec.in_dim * spec.out_dim)

    def _start(self, factor: Factor, dtype: torch.dtype) -> Powers:
        """Return what stands until there are powers: the identity."""
        if not isinstance(factor.structure, Sketched):
            return SymmetricPowers(identity_like(factor, dtype), identity_like(factor, dtype))
        basis = factor.packed.new_zeros(factor.groups, factor.dim, self.rank, dtype=dtype)
        weights, scale = basis.new_zeros(factor.groups, self.rank), basis.new_ones(factor.groups)
        return ThinPowers(basis, weights, scale, weights.clone(), scale.clone())

    def _jobs(self, state: PowersState) -> list[FactorJob]:
        jobs: list[FactorJob] = []
        for side, factor in enumerate((state.pair.a, state.pair.g)):
            if factor is None or factor.elsewhere is not None:
                continue
            mean = factor.trace().to(state.condition.dtype) / factor.dim
            damped = Damped(torch.ones_like(mean), torch.where(mean > 0, self.damping * mean, 1.0))
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
    average = averages(jobs)
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
