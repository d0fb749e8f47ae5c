"""A loss of two terms: a pair of factors for each, and the exact inverse of the sum of their Kronecker products."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.several_pairs import PairPerTerm
from kfac_optim.inverses.batching import FactorJob, batches
from kfac_optim.inverses.damped.base import identity_like
from kfac_optim.inverses.damping import Damped, factored_tikhonov
from kfac_optim.inverses.eigenbasis.base import outer
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, PairInverse, PairState, dense_flops
from kfac_optim.linalg.cholesky import damped_cholesky_root
from kfac_optim.linalg.eigen import eigendecomposition
from kfac_optim.linalg.products import norm1, sandwich
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure

_TERMS = 2


class Pencil(NamedTuple):
    """Diagonalises the damped factors of both terms on one side of a layer at once: `KᵀF₁K = I` and `KᵀF₂K = diag s`.

    Where one term alone has statistics it is the first, and `s` is zero.
    """

    frame: Tensor
    """`K` `[groups, d, d]`; of a diagonal factor its diagonal `[groups, d]`."""
    ratios: Tensor
    """`s`, `[groups, d]`."""


class SumOfTermsState(PairState[Pencil]):
    """Holds the factors of both terms of one block, and what diagonalises them; conditions are those of the first."""

    pair: PairPerTerm

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, _identity, dtype=dtype, device=device)
        self.pair = PairPerTerm(spec, _TERMS, dtype=dtype, device=device)


@dataclass(frozen=True)
class SumOfTerms(PairInverse[SumOfTermsState]):
    """Inverts `A₁ ⊗ G₁ + A₂ ⊗ G₂`, a pair of factors for each of two terms of a loss, exactly (arXiv 2405.15603, §3).

    It is for losses of two calls of a criterion, such as a residual inside of a domain and one on its boundary: inputs
    and output gradients of the two have little in common, and one pair of factors for both is neither's. The criterion
    is named by the estimate, as by `ExactGGN(criterion)`: `Empirical` sees no calls, and has terms only where a loss
    holds derivatives, one for each forward of the model; else there is one pair, with √λ on each factor. Each factor
    gets √λ on its diagonal, as in the paper, so that the sum gets 2λ in all: shares by the sizes of the factors, which
    `Cholesky` has, differ from term to term, and made the error of a physics-informed network 4.9 times as large after
    300 steps and 2.6 times after 653. With the damped factors, `R Rᵀ = A₁⁻¹`, `RᵀA₂R =
    E S Eᵀ` and `K_A = R E`, likewise of `G`, a gradient becomes

        K_G [(K_Gᵀ ∇ K_A) / (1 + s_G s_Aᵀ)] K_Aᵀ.

    Refreshing costs about twice what it does with `Eigen`, applying four matrix products instead of two. Until a term
    has had statistics it counts nothing, and the inverse is that of one pair; one that has had some keeps its last
    average where the loss leaves it out. On several processes a term may have examples on some ranks alone, where all
    ranks call the criterion in the same order. More than two terms are refused at their first backward, with a
    ValueError.

    `factors()` gives one pair whose product has the trace of the sum. Condition numbers in `metrics()` are those of
    the first term's damped factors, in the 1-norm.
    """

    keeps_terms = True

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> SumOfTermsState:
        return SumOfTermsState(spec, dtype=dtype, device=device)

    def refresh(self, states: Sequence[SumOfTermsState], dampings: Sequence[float]) -> None:
        jobs = [job for state, damping in zip(states, dampings, strict=True) for job in _jobs(state, damping)]
        for structure, equal in batches(jobs):
            (_solve if structure is Structure.DENSE else _divide)(equal)
        for state in states:
            _take([job for job in jobs if job.state is state])

    def apply(self, state: SumOfTermsState, grad: Tensor, damping: float) -> Tensor:
        a, g = (None if side is None else side.frame for side in (state.a, state.g))
        back_a, back_g = (None if frame is None else _transposed(frame) for frame in (a, g))
        ratios = outer(*(None if side is None else side.ratios for side in (state.g, state.a)), like=state.condition)
        return sandwich(g, sandwich(back_g, grad.to(state.condition.dtype), a) / (1 + ratios), back_a)

    def result(self, factor: FactorShape) -> tuple[int, int]:
        """Return the numbers of a frame, which is not symmetric, and of its ratios."""
        numbers = factor.numel + factor.groups * factor.dim
        return numbers, numbers

    def flops(self, spec: LayerSpec) -> Cost:
        # The products beside the eigendecomposition take as long as that: 17 ms in all at a width of 256, `Eigen` 9 ms.
        return dense_flops(spec, per_cube=2 * EIGH_FLOPS, products=2)

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """Return one part, as both sides are taken over together."""
        shapes = [factor for factor in spec.factors() if factor.structure is not Structure.IDENTITY]
        numbers = sum(self.result(factor)[0] for factor in shapes)
        sums, held = list(shapes), numbers + sum(factor.packed for factor in shapes)
        if spec.opposed:
            sums += [factor for factor in spec.transposed().factors() if factor.structure is not Structure.IDENTITY]
            held += _TERMS * sum(factor.packed for factor in shapes)
        return (Part("", self.flops(spec).refresh, tuple(sums) * _TERMS, sent=numbers, held=held),)


def _identity(factor: Factor, dtype: torch.dtype) -> Pencil:
    return Pencil(
        identity_like(factor, dtype), torch.zeros(factor.groups, factor.dim, dtype=dtype, device=factor.device)
    )


def _transposed(frame: Tensor) -> Tensor:
    return frame.mT if frame.dim() == 3 else frame


@dataclass(frozen=True, slots=True, eq=False)
class _PencilJob(FactorJob):
    """Names one side of a block, and keeps what was computed of it until the other side is there.

    Attributes:
        first: factor of the first term that has statistics, in the dtype of the computation; undamped, but scaled.
        shift: its damping, `[groups]`.
        second: damped factor of the other term; zero without one.
        found: frames, ratios, attempts and conditions.
    """

    first: Tensor
    shift: Tensor
    second: Tensor
    found: list[Tensor] = field(default_factory=list)


def _jobs(state: SumOfTermsState, damping: float) -> list[_PencilJob]:
    """Return a job for each side that is not the identity."""
    pairs = state.pair.of_terms
    held = [_was_seen(pair) for pair in pairs]
    sides = [side for side, factor in enumerate((pairs[0].a, pairs[0].g)) if factor is not None]
    by_term = [_shares(pair, damping, state.condition.dtype) for pair in pairs]
    jobs = []
    for side, (factor, one, share), (_, two, other_share) in zip(sides, *by_term, strict=True):
        of_first, of_second = (each.view(-1, *(1,) * (one.dim() - 1)) for each in held)
        first = torch.where(of_first, share.scaled(one), other_share.scaled(two))
        shift = torch.where(held[0], share.shift, other_share.shift)
        second = torch.where(of_first & of_second, other_share.of(two), 0)
        jobs.append(_PencilJob(state, side, factor, first, shift, second))
    return jobs


def _was_seen(pair: FactorPair) -> Tensor:
    """Return whether the term had any gradient, `[]` bool, or `[groups]` where each has rows of its own.

    Where `A` is the identity nothing else tells: ranks add zeros to `G` for what the others see (`FactorPair.age`).
    """
    held = pair.held_groups()
    if pair.a is not None or pair.g is None:
        return held
    has_gradient = pair.g.trace() > 0
    return held & (has_gradient if held.dim() > 0 else has_gradient.any())


def _shares(pair: FactorPair, damping: float, dtype: torch.dtype) -> list[tuple[Factor, Tensor, Damped]]:
    """Return factor, average and share of λ of each side of one term that is not the identity."""
    present = [factor for factor in (pair.a, pair.g) if factor is not None]
    traces, dims = [factor.trace().to(dtype) for factor in present], [factor.dim for factor in present]
    shares = factored_tikhonov(traces, dims, damping, balanced=False)
    return [(factor, factor.average.to(dtype), share) for factor, share in zip(present, shares, strict=True)]


def _solve(jobs: Sequence[_PencilJob]) -> None:
    """Stack every group of every job, dense and of one size, into one batch, and hand the parts back."""
    first, shift, second = (torch.cat([getattr(job, name) for job in jobs]) for name in ("first", "shift", "second"))
    root, rooted = damped_cholesky_root(first, shift)
    whitened = root.mT @ second @ root
    ratios, turn, turned = eigendecomposition((whitened + whitened.mT) / 2)
    attempts = torch.where((rooted == 0) | (turned == 0), 0, torch.maximum(rooted, turned))
    conditions = (norm1(first) + shift) * norm1(root @ root.mT)
    _hand_back(jobs, root @ turn, ratios.clamp(min=0), attempts, conditions)


def _divide(jobs: Sequence[_PencilJob]) -> None:
    """Do the same for diagonal factors."""
    first = torch.cat([job.first + job.shift.unsqueeze(-1) for job in jobs])
    second = torch.cat([job.second for job in jobs])
    finite = (first.isfinite() & second.isfinite()).all(-1).to(torch.int64)
    _hand_back(jobs, first.rsqrt(), second / first, finite, first.amax(-1) / first.amin(-1))


def _hand_back(jobs: Sequence[_PencilJob], *found: Tensor) -> None:
    sizes = [len(job.first) for job in jobs]
    for job, *parts in zip(jobs, *(torch.split(each, sizes) for each in found), strict=True):
        job.found.extend(parts)


def _take(jobs: Sequence[_PencilJob]) -> None:
    """Replace frames and ratios of one block's sides, which belong together: a group where one fails keeps both."""
    usable = [job.settle(job.found[2]) for job in jobs]
    if len({len(each) for each in usable}) > 1:  # all groups share one factor
        usable = [each.all(0, keepdim=True) for each in usable]
    both = torch.stack(usable).all(0)
    for job in jobs:
        frame, ratios, _, condition = job.found
        kept = job.state.side(job.side)
        taken = both.expand(len(frame))
        kept.frame.copy_(torch.where(taken.view(-1, *(1,) * (frame.dim() - 1)), frame, kept.frame))
        kept.ratios.copy_(torch.where(taken.unsqueeze(-1), ratios, kept.ratios))
        last = job.last_measured(job.state.condition[job.side])
        job.state.condition[job.side] = torch.where(taken, condition, last).max()
