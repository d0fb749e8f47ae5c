"""The inverse of each factor and its root, damped relative to that factor: two ways of preconditioning from one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, traces_of
from kfac_optim.inverses.batching import FactorJob, averages, batches, settle, take, take_largest
from kfac_optim.inverses.damped.base import identity_like
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


# The damping is at least so many times the smallest normal number, 1e-32 in float32. A network that fits its data has
# gradients so small that the inverse of their mean square would overflow; with this bound neither that inverse does,
# nor its product with an ordinary one of the other factor.
_LEAST = 2.0**20

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
    `Eigen`. A factor that is zero counts as the identity, and the damping of one that nearly is stays at 1e-32 in
    float32. Condition numbers in `metrics()` are those of the damped factors, in the 2-norm.

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
        jobs = (
            FactorJob(state, side, factor)
            for state in states
            for side, factor in enumerate((state.pair.a, state.pair.g))
            if factor is not None and factor.elsewhere is None
        )
        for structure, equal in batches(jobs):
            mean = traces_of([job.factor for job in equal]).to(equal[0].state.condition.dtype) / equal[0].factor.dim
            least = _LEAST * torch.finfo(mean.dtype).tiny
            shift = torch.where(mean > 0, (self.damping * mean).clamp(min=least), 1.0)
            if isinstance(structure, Sketched):
                shares = torch.split(shift, [job.factor.groups for job in equal])
                read_off(structure, [_thin_job(job, share) for job, share in zip(equal, shares, strict=True)])
            else:
                _refresh_whole(structure, equal, shift)

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


def _thin_job(job: FactorJob, shift: Tensor) -> DeflationJob:
    """Say where both powers of a sketched factor go, which is damped by `shift`, `[groups]`."""
    assert isinstance(job.state, DeflatedState)
    kept = job.state.side(job.side)
    inverse = Deflation(kept.basis, kept.weights, kept.scale)
    root = Deflation(kept.basis, kept.root_weights, kept.root_scale)
    damped = Damped(torch.ones_like(shift), shift)
    return DeflationJob(job.state, job.side, job.factor, damped, [(1.0, inverse), (0.5, root)])


def _refresh_whole(structure: Structure, jobs: Sequence[FactorJob], shift: Tensor) -> None:
    """Stack every group of every job, of one size, into one batch, and hand the parts back.

    Args:
        structure: the structure of the factors.
        jobs: the jobs of one batch.
        shift: the damping of the groups of all jobs, `[n]`.
    """
    average, shift = averages(jobs), shift.unsqueeze(-1)
    if structure is Structure.DENSE:
        values, basis, attempts = eigendecomposition(average)
        values = values.clamp(min=0) + shift
        inverse, root = ((basis * (values**-power).unsqueeze(-2)) @ basis.mT for power in (1.0, 0.5))
    else:
        values = average + shift
        inverse, root, attempts = values.reciprocal(), values.rsqrt(), values.isfinite().all(-1).long()
    attempts = torch.where(shift.isfinite().squeeze(-1), attempts, 0)
    usable, kept = settle(jobs, attempts), [job.state.side(job.side) for job in jobs]
    take(usable, [each.inverse for each in kept], inverse)
    take(usable, [each.root for each in kept], root)
    take_largest(usable, jobs, [job.state.condition for job in jobs], values.amax(-1) / values.amin(-1))


def _side(side: Powers | None, *, root: bool) -> Side | None:
    """Return the inverse of one factor, or the root of that; None for the identity."""
    if isinstance(side, SymmetricPowers):
        return SymmetricInverse(side.root if root else side.inverse)
    if isinstance(side, ThinPowers):
        weights, scale = (side.root_weights, side.root_scale) if root else (side.weights, side.scale)
        return Deflation(side.basis, weights, scale)
    return None
