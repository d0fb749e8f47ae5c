"""Each damped factor as a few eigenvectors and one number for all the rest: thin products apply it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from kfac_optim.inverses.batching import FactorJob, averages, batches
from kfac_optim.inverses.damped.base import DampedJob, damped_factors, invert
from kfac_optim.inverses.damped.deflation import (
    DeflatedState,
    Deflation,
    DeflationJob,
    Side,
    apply_sides,
    check_sketch,
    hand_back,
    identity_side,
    is_deflated,
    read_off,
    result_numbers,
    sketched_if_wide,
    sketched_refresh,
)
from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse
from kfac_optim.linalg.eigen import leading_eigenpairs
from kfac_optim.specs import Cost, FactorShape, Kept, LayerSpec, Sketched, Structure
from kfac_optim.utils.validation import check_integer

LowRankState = DeflatedState[Side]
"""A side is a `Deflation` where the factor is sketched, or dense and wide enough, otherwise the inverse itself."""


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
    eigenpairs off them (Nyström, `linalg.nystrom`) in some `6 d k²` operations. Averages take `2k/d` of the memory of
    a whole factor's triangle. Besides, the eigenvalues come out somewhat too small, by about the sum of those beyond
    the first k/2. In an autoencoder, ResNet-20 and a transformer in training, preconditioned gradients with
    `sketch=64` and `rank=32` had cosines of 0.96 to 1.00 with those of whole factors, with exact eigenpairs of that
    rank 0.97 to 1.00. Narrower factors stay whole.

    Use it where layers are wide and steps cost much; the memory of inverses nearly vanishes too. Products need the full
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
        check_sketch("LowRank", self.sketch, self.rank)
        check_integer("iterations of LowRank", self.iterations)

    @property
    def _from_width(self) -> int:
        """Return the width from which on thin products take the place of those with the inverse.

        Where four ranks are narrower, they are more than half the operations, and a good part of the curvature is lost:
        in a network 64 wide, 32 eigenpairs of 65 take half as many steps again as the whole factor. With sketches it is
        the width from which on these are kept.
        """
        return 4 * (self.rank if self.sketch is None else self.sketch)

    def __repr__(self) -> str:
        chosen = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        usual = [f"{field.name}={field.default}" for field in fields(self)]
        return f"LowRank({', '.join(each for each in chosen if each not in usual)})"

    def kept(self, wish: Kept, dim: int) -> Kept:
        return sketched_if_wide(self.sketch, wish, dim)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> LowRankState:
        return LowRankState(spec, partial(identity_side, self.rank, self._from_width), dtype=dtype, device=device)

    def refresh(self, states: Sequence[LowRankState], dampings: Sequence[float]) -> None:
        jobs = _jobs(states, dampings)
        for structure, deflating in batches(job for job in jobs if isinstance(job, DeflationJob)):
            if isinstance(structure, Sketched):
                read_off(structure, deflating)
            else:
                self._follow(deflating)
        invert(job for job in jobs if isinstance(job, DampedJob))

    def apply(self, state: LowRankState, grad: Tensor, damping: float) -> Tensor:
        return apply_sides(state.a, state.g, [grad], state.condition.dtype)[0]

    def apply_to_columns(self, state: LowRankState, columns: Sequence[Tensor], damping: float) -> list[Tensor] | None:
        if not isinstance(state.a, Deflation):
            return None
        return apply_sides(state.a, state.g, columns, state.condition.dtype)

    def result(self, factor: FactorShape) -> tuple[int, int]:
        return result_numbers(factor, self.rank, self._from_width)

    def flops(self, spec: LayerSpec) -> Cost:
        refresh, per_element = 0.0, 0.0
        r = float(self.rank)
        for structure, groups, dim, _ in spec.factors():
            if isinstance(structure, Sketched):
                refresh += groups * sketched_refresh(dim, structure.columns)
                per_element += 4 * r
            elif is_deflated(structure, dim, self._from_width):
                orthogonal = 4 * self.iterations * dim * r**2
                refresh += groups * (
                    2 * (self.iterations + 1) * r * dim**2 + orthogonal + 4 * dim * r**2 + EIGH_FLOPS * r**3
                )
                per_element += 4 * r
            elif structure is Structure.DENSE:
                refresh += groups * float(dim) ** 3
                per_element += 2 * dim
        return Cost(refresh=refresh, apply=per_element * spec.groups * spec.in_dim * spec.out_dim)

    def _follow(self, jobs: Sequence[DeflationJob]) -> None:
        """Stack every group of every job, of one size, into one batch, and hand the parts back."""
        damped = Damped.joined(job.damped for job in jobs)
        matrix = damped.scaled(averages(jobs))
        start = torch.cat([job.basis for job in jobs])
        pairs = leading_eigenpairs(matrix, damped.shift, start, self.iterations)
        hand_back(jobs, pairs, matrix.diagonal(dim1=-2, dim2=-1).sum(-1), damped.shift)


def _jobs(states: Sequence[LowRankState], dampings: Sequence[float]) -> list[FactorJob]:
    jobs: list[FactorJob] = []
    for state, side, factor, share in damped_factors(states, dampings):
        kept = state.side(side)
        if isinstance(kept, Deflation):
            jobs.append(DeflationJob(state, side, factor, share, [(1.0, kept)]))
        else:
            jobs.append(DampedJob(state, side, factor, share, kept.inverse))
    return jobs
