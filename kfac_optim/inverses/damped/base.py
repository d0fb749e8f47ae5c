"""What the representations that invert each damped factor by itself have in common."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, traces_of
from kfac_optim.inverses.batching import FactorJob, Usable, averages, batches, settle, take, take_largest
from kfac_optim.inverses.damping import Damped, factored_tikhonov
from kfac_optim.inverses.pair_inverse import P, PairState
from kfac_optim.linalg.cholesky import damped_cholesky_inverse
from kfac_optim.linalg.products import norm1
from kfac_optim.specs import Structure


@dataclass(frozen=True, slots=True, eq=False)
class DampedJob(FactorJob):
    """Says how the factor is damped, and where its inverse goes.

    Attributes:
        damped: the factor's share of λ.
        inverse: the last good one, to be replaced: `[groups, d, d]`, or `[groups, d]` of a diagonal factor.
    """

    damped: Damped
    inverse: Tensor


def damped_factors(states: Sequence[P], dampings: Sequence[float]) -> Iterator[tuple[P, int, Factor, Damped]]:
    """Share the λ of each block among all its factors, for blocks of equal shapes in one go.

    Returns:
        Block by block the state, the side of a factor that is kept here, the factor, and its share.
    """
    found: list[list[tuple[P, int, Factor, Damped]]] = [[] for _ in states]
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, (state, damping) in enumerate(zip(states, dampings, strict=True)):
        pair, like = state.pair, state.condition
        shapes = [None if each is None else (each.structure, each.dim, each.groups) for each in (pair.a, pair.g)]
        # Where one factor serves all groups of the other, shares are those of the groups together.
        alone = index if len({groups for _, _, groups in filter(None, shapes)}) > 1 else None
        alike[damping, like.dtype, like.device, *shapes, alone].append(index)
    for members in alike.values():
        equal = [states[index] for index in members]
        sides = [
            (side, [factor for factor in factors if factor is not None])
            for side, factors in enumerate(([each.pair.a for each in equal], [each.pair.g for each in equal]))
        ]
        sides = [(side, factors) for side, factors in sides if factors]
        traces = [traces_of(factors).to(equal[0].condition.dtype) for _, factors in sides]
        shares = factored_tikhonov(traces, [factors[0].dim for _, factors in sides], dampings[members[0]])
        for (side, factors), share in zip(sides, shares, strict=True):
            parts = (torch.split(each, factors[0].groups) for each in share)
            for index, factor, *part in zip(members, factors, *parts, strict=True):
                if factor.elsewhere is None:
                    found[index].append((states[index], side, factor, Damped(*part)))
    return itertools.chain.from_iterable(found)


def damped_jobs(states: Sequence[PairState[Any]], dampings: Sequence[float]) -> list[DampedJob]:
    """Return a job for each factor that is kept here; its results go to the inverses of its block's state."""
    return [
        DampedJob(state, side, factor, share, state.side(side).inverse)
        for state, side, factor, share in damped_factors(states, dampings)
    ]


def keep_inverses(jobs: Sequence[DampedJob], inverses: Tensor, attempts: Tensor, conditions: Tensor) -> Usable:
    """Take the groups that are usable, and leave the others at their last good inverse.

    Args:
        jobs: the jobs of one batch.
        inverses: the inverses of the groups of all jobs, shaped like those to be replaced.
        attempts: `[n]`, 0 where all failed.
        conditions: condition numbers, `[n]`.
    """
    usable = settle(jobs, attempts)
    take(usable, [job.inverse for job in jobs], inverses)
    take_largest(usable, jobs, [job.state.condition for job in jobs], conditions)
    return usable


def invert(jobs: Iterable[DampedJob]) -> None:
    """Invert all jobs, those of one structure and size in one batch."""
    for structure, equal in batches(jobs):
        if structure is Structure.DENSE:
            _invert_by_cholesky(equal)
        else:
            take_reciprocals(equal)


def take_reciprocals(jobs: Sequence[DampedJob]) -> Usable:
    """Invert diagonal factors, and 1×1 matrices; see `keep_inverses`."""
    damped = Damped.joined(job.damped for job in jobs).of(averages(jobs))
    diagonal = damped.flatten(1)
    finite = diagonal.isfinite().all(-1).to(torch.int64)
    return keep_inverses(jobs, damped.reciprocal(), finite, diagonal.amax(-1) / diagonal.amin(-1))


def _invert_by_cholesky(jobs: Sequence[DampedJob]) -> None:
    """Stack every group of every job, dense and of one size, into one batch, invert, and hand the parts back."""
    damped = Damped.joined(job.damped for job in jobs)
    stack = damped.scaled(averages(jobs))
    inverses, attempts = damped_cholesky_inverse(stack, damped.shift)
    keep_inverses(jobs, inverses, attempts, (norm1(stack) + damped.shift) * norm1(inverses))


def identity_like(factor: Factor, dtype: torch.dtype) -> Tensor:
    """Return the inverse that stands until there is one, `[groups, d, d]`, or `[groups, d]` of a diagonal factor."""
    ones = torch.ones(factor.groups, factor.dim, dtype=dtype, device=factor.device)
    return torch.diag_embed(ones) if factor.structure is Structure.DENSE else ones
