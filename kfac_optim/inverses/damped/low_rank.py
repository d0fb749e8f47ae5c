"""Each damped factor as a few eigenvectors and one number for all the rest: thin products apply it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.batching import FactorJob, batches
from kfac_optim.inverses.damped.base import (
    DampedJob,
    damped_factors,
    identity_like,
    invert_by_cholesky,
    take_reciprocals,
)
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse, PairState, SymmetricInverse, side_of
from kfac_optim.linalg.eigen import Eigenpairs, leading_eigenpairs, random_basis
from kfac_optim.linalg.products import sandwich
from kfac_optim.linalg.sketches import nystrom, sketch_directions
from kfac_optim.specs import Cost, FactorShape, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.validation import check_integer


class Deflation(NamedTuple):
    """Represents an inverse `scale · (I - basis · diag(weights) · basisᵀ)`, of each group."""

    basis: Tensor
    """Eigenvectors as columns, `[groups, d, r]`; before the first refresh random ones, from which the iteration starts."""
    weights: Tensor
    """How much of each the inverse takes away, `[groups, r]`, from 0 to 1."""
    scale: Tensor
    """What the inverse multiplies all other directions by, `[groups]`."""


_Side = Deflation | SymmetricInverse


class LowRankState(PairState[_Side]):
    """Holds the factors of one block and the inverses of their damped forms.

    The condition number is that of the matrix that is inverted: of its largest eigenvalue over the one for the rest.

    Attributes:
        a: a `Deflation` where `A` is sketched, or dense and at least four ranks wide; else the inverse itself, as
            `Cholesky` has it.
        g: the same of `G`.
        cutoff: the smallest eigenvalue kept, over the damping, `[2]` for A and G, the largest of all groups; 0 where
            the inverse is exact.
    """

    def __init__(self, spec: LayerSpec, rank: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, partial(_identity, rank), dtype=dtype, device=device)
        self.cutoff = torch.zeros_like(self.condition)

    def counted(self) -> dict[str, Tensor]:
        return super().counted() | {"cutoff": self.cutoff}

    def counters(self) -> dict[str, Tensor]:
        return super().counters() | {"cutoff_A": self.cutoff[0], "cutoff_G": self.cutoff[1]}

    def measures(self, part: str) -> tuple[Tensor, ...]:
        return *super().measures(part), self.cutoff[side_of(part)]

    def ranges(self) -> dict[str, Any]:
        return super().ranges() | {"cutoff": value_checks.measured}


@dataclass(frozen=True)
class LowRank(PairInverse[LowRankState]):
    """Inverts each wide factor as `Cholesky` does, but only along its leading eigenvectors; the rest gets one number.

    A factor `F = U diag(d) Uᵀ + rest` of trace `t`, with r eigenpairs kept, counts as `U diag(d) Uᵀ + μ (I - U Uᵀ)`,
    where `μ = (t - Σ d) / (dim - r)` is the mean of all other eigenvalues: the trace stays what it is (Tipping &
    Bishop 1999, §3.2, of covariances). With its damping `γ` (π-balanced, Martens & Grosse 2015, §6.3) the inverse is
    `(I - U diag(1 - (μ+γ)/(d+γ)) Uᵀ) / (μ+γ)`. Eigenvalues of factors fall fast, and those below the damping hardly
    matter (Puiu 2022, arXiv:2206.15397): what `Cholesky` would do to a direction that is left out, of eigenvalue `e`,
    is off by the factor `(e+γ)/(μ+γ)`, and once the iteration has followed the factor no `e` exceeds the smallest
    eigenvalue kept. That one over `γ` is `cutoff_A` and `cutoff_G` in `metrics()`: below 1 no direction is then off by
    more than a factor of two.

    The eigenpairs follow the factor by subspace iteration on `F + γI` from those of the last refresh, the first time
    from random vectors (Halko, Martinsson & Tropp 2011, algorithm 4.4), and Rayleigh-Ritz.

    Refreshing costs about `2 (iterations + 1) r d²` operations, applying `4r` for each element of the gradient where
    `Cholesky` takes `2d`; an inverse is `r·d` numbers. Where that saves less than half of the products, on factors
    narrower than 4r, the inverse is that of `Cholesky`.

    With `sketch=k` factors of at least `4k` rows are not kept at all. Statistics sum the products `F Ω` with k fixed
    random directions, `2k` products for each element of a row in place of `d`, and a refresh reads the leading
    eigenpairs off them (Nyström, `linalg.nystrom`) in some `6 d k²` operations. Averages take `k/d` of the memory twice
    over. What is lost besides: eigenvalues come out somewhat too small, by about the sum of those beyond the first half
    of the k. On autoencoders, ResNets and transformers in training, `sketch=64` with `rank=32` turned preconditioned
    gradients by 1 to 4% of their length, and exact eigenpairs of that rank by up to 3%.

    Use it where layers are wide and steps cost much; the memory of inverses nearly vanishes too. Products want the full
    precision of float32: the small rest of a leading direction is a difference, so that TF32, which has 10 bits, would
    leave it off by a thousandth of the whole.

    Args:
        rank: r, of each factor and group.
        iterations: products with the factor at each refresh, before the one of Rayleigh-Ritz.
        sketch: k, at least the rank, and better twice that; None keeps whole factors.

    Raises:
        TypeError: one of them is no integer.
        ValueError: one of them is not positive, or the sketch has fewer directions than the rank.
    """

    rank: int = 32
    iterations: int = 2
    sketch: int | None = None

    def __post_init__(self) -> None:
        check_integer("rank of LowRank", self.rank)
        check_integer("iterations of LowRank", self.iterations)
        if self.sketch is not None:
            check_integer("sketch of LowRank (None keeps whole factors)", self.sketch)
            if self.sketch < self.rank:
                raise ValueError(
                    f"kfac_optim: sketch of LowRank must be at least its rank, {self.rank}, got {self.sketch}. Twice the "
                    "rank is a good choice."
                )

    def kept(self, wish: Kept, dim: int) -> Kept:
        if self.sketch is not None and wish is Structure.DENSE and dim >= 4 * self.sketch:
            return Sketched(self.sketch)
        return wish

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> LowRankState:
        return LowRankState(spec, self.rank, dtype=dtype, device=device)

    def refresh(self, states: Sequence[LowRankState], dampings: Sequence[float]) -> None:
        jobs = [job for state, damping in zip(states, dampings, strict=True) for job in _jobs(state, damping)]
        for structure, deflating in batches(job for job in jobs if isinstance(job, _DeflationJob)):
            if isinstance(structure, Sketched):
                _read_off(structure, deflating)
            else:
                self._follow(deflating)
        for structure, equal in batches(job for job in jobs if isinstance(job, DampedJob)):
            if structure is Structure.DENSE:
                invert_by_cholesky(equal)
            else:
                take_reciprocals(equal)

    def apply(self, state: LowRankState, grad: Tensor, damping: float) -> Tensor:
        a, g = state.a, state.g
        scales = [side.scale for side in (a, g) if isinstance(side, Deflation)]
        direction = grad.to(state.condition.dtype)
        if scales:
            scale = scales[0] if len(scales) == 1 else scales[0] * scales[1]
            direction = direction * scale.view(-1, 1, 1)
        return _from_right(a, _from_left(g, direction))

    def result(self, factor: FactorShape) -> tuple[int, int]:
        if _deflates(factor.structure, factor.dim, self.rank):
            numbers = factor.groups * (factor.dim * self.rank + self.rank + 1)
            return numbers, numbers
        return factor.packed, factor.numel

    def flops(self, spec: LayerSpec) -> Cost:
        refresh, per_element = 0.0, 0.0
        r = float(self.rank)
        for structure, groups, dim in spec.factors():
            if isinstance(structure, Sketched):
                refresh += groups * (6 * dim * structure.columns**2 + 2 * EIGH_FLOPS * structure.columns**3)
                per_element += 4 * r
            elif _deflates(structure, dim, self.rank):
                orthogonal = 4 * self.iterations * dim * r**2
                refresh += groups * (
                    2 * (self.iterations + 1) * r * dim**2 + orthogonal + 4 * dim * r**2 + EIGH_FLOPS * r**3
                )
                per_element += 4 * r
            elif structure is Structure.DENSE:
                refresh += groups * float(dim) ** 3
                per_element += 2 * dim
        return Cost(refresh=refresh, apply=per_element * spec.groups * spec.in_dim * spec.out_dim)

    def _follow(self, jobs: "Sequence[_DeflationJob]") -> None:
        """Stack every group of every job, of one size, into one batch, and hand the parts back."""
        matrix = torch.cat([job.damped.scaled(job.average()) for job in jobs])
        shift = torch.cat([job.damped.shift for job in jobs])
        start = torch.cat([job.deflation.basis for job in jobs])
        pairs = leading_eigenpairs(matrix, shift, start, self.iterations)
        _keep(jobs, pairs, matrix.diagonal(dim1=-2, dim2=-1).sum(-1), shift)


def _read_off(structure: Sketched, jobs: "Sequence[_DeflationJob]") -> None:
    """Read the leading eigenpairs off the sketches of every group of every job, of one size."""
    dtype = jobs[0].state.condition.dtype
    scales = torch.cat([job.damped.scale for job in jobs]).to(dtype)
    sketch = torch.cat([job.factor.sketch().to(dtype) for job in jobs]) * scales[:, None, None]
    traces = torch.cat([job.factor.trace().to(dtype) for job in jobs]) * scales
    shift = torch.cat([job.damped.shift for job in jobs])
    pairs = nystrom(sketch, sketch_directions(sketch.shape[1], structure.columns, like=sketch))
    rank = jobs[0].deflation.weights.shape[-1]
    leading = Eigenpairs(pairs.values[:, -rank:], pairs.vectors[..., -rank:], pairs.attempts)
    _keep(jobs, leading, traces, shift)


def _keep(jobs: "Sequence[_DeflationJob]", pairs: Eigenpairs, traces: Tensor, shift: Tensor) -> None:
    """Hand the parts of a batch back to its jobs; see `_DeflationJob.keep`."""
    sizes = [job.factor.groups for job in jobs]
    whole = (pairs.values, pairs.vectors, pairs.attempts, traces, shift)
    for job, *part in zip(jobs, *(torch.split(each, sizes) for each in whole), strict=True):
        job.keep(*part)


@dataclass(frozen=True, slots=True, eq=False)
class _DeflationJob(FactorJob):
    """Says how a wide factor is damped, and where what is computed goes."""

    state: LowRankState
    damped: Damped
    deflation: Deflation

    def keep(self, values: Tensor, vectors: Tensor, attempts: Tensor, traces: Tensor, shift: Tensor) -> None:
        """Take the groups that are usable, and leave the others at what they had last.

        Args:
            values: of the eigenpairs, ascending, `[groups, r]`.
            vectors: `[groups, d, r]`.
            attempts: `[groups]`, 0 where all failed.
            traces: of the factor, `[groups]`.
            shift: its damping, `[groups]`.
        """
        usable = self.settle(attempts)
        dim, rank = vectors.shape[1:]
        rest = shift + ((traces - values.sum(-1)) / (dim - rank)).clamp(min=0)
        basis, weights, scale = self.deflation
        damped = values + shift.unsqueeze(-1)
        # Rounding may put the mean of the rest above the smallest value kept.
        removed = (1 - rest.unsqueeze(-1) / damped).clamp(min=0)
        torch.where(usable[:, None, None], vectors, basis, out=basis)
        torch.where(usable[:, None], removed, weights, out=weights)
        torch.where(usable, rest.reciprocal(), scale, out=scale)
        for measure, measured in (
            (self.state.condition, damped[:, -1] / rest),
            (self.state.cutoff, values[:, 0] / shift),
        ):
            last = measure[self.side]
            measure[self.side] = torch.where(usable, measured, last).max()


def _jobs(state: LowRankState, damping: float) -> list[FactorJob]:
    jobs: list[FactorJob] = []
    for side, factor, share in damped_factors(state, damping):
        kept = state.side(side)
        if isinstance(kept, Deflation):
            jobs.append(_DeflationJob(state, side, factor, share, kept))
        else:
            jobs.append(DampedJob(state, side, factor, share, kept.inverse))
    return jobs


def _deflates(structure: Structure | Sketched, dim: int, rank: int) -> bool:
    """Return whether a factor is sketched, or thin products are at most half the operations of one with the inverse.

    Below that little is saved, and a good part of the curvature lost: in a network 64 wide, 32 eigenpairs of 65 take
    half as many steps again as the whole factor.
    """
    return isinstance(structure, Sketched) or (structure is Structure.DENSE and dim >= 4 * rank)


def _identity(rank: int, factor: Factor, dtype: torch.dtype) -> _Side:
    """Return what stands until there is an inverse."""
    if not _deflates(factor.structure, factor.dim, rank):
        return SymmetricInverse(identity_like(factor, dtype))
    basis = random_basis(factor.dim, rank, dtype=dtype, device=factor.device).repeat(factor.groups, 1, 1)
    return Deflation(basis, basis.new_zeros(factor.groups, rank), basis.new_ones(factor.groups))


def _from_left(side: _Side | None, matrix: Tensor) -> Tensor:
    """Multiply `[n, d, columns]` from the left by an inverse, in place where that is a `Deflation`, scale aside."""
    if not isinstance(side, Deflation):
        return sandwich(None if side is None else side.inverse, matrix, None)
    parts = side.weights.unsqueeze(-1) * (side.basis.mT @ matrix)
    return matrix.baddbmm_(side.basis.expand(len(matrix), -1, -1), parts, alpha=-1)


def _from_right(side: _Side | None, matrix: Tensor) -> Tensor:
    """Multiply `[n, rows, d]` from the right by an inverse, in place where that is a `Deflation`, scale aside."""
    if not isinstance(side, Deflation):
        return sandwich(None, matrix, None if side is None else side.inverse)
    parts = (matrix @ side.basis) * side.weights.unsqueeze(-2)
    return matrix.baddbmm_(parts, side.basis.mT.expand(len(matrix), -1, -1), alpha=-1)
