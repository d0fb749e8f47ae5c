"""A trust region whose size follows what steps do to the loss, so that it needs no unit of the loss."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from kfac_optim.blocks.state_keys import MOMENTUM
from kfac_optim.step.scalars import (
    Scalar,
    bounded,
    chosen,
    exponential,
    quotient,
    scalar_beside,
    scalars_beside,
    total,
    vector,
)
from kfac_optim.step.scaling import (
    covered_here,
    lengths,
    momenta,
    scale_all,
    scale_momentum,
    slope_of_decay,
    slopes,
    summed_terms,
)
from kfac_optim.step.step_size import Direction, Group, Proposal, Sized, StepSize
from kfac_optim.step.trust_region import follow, shortened, slope_ratio, trust_region_scale
from kfac_optim.utils.sharded_params import is_sharded

_SHARE = 0.25  # of what the new step promises, that momentum which goes uphill may take back
# Ordinary training holds nearly every step, at 1e-2 or more of what the rate makes it, as the region finds the length.
# Where noise has shrunk the region, steps may be as much shorter.
_IDLE = 1e-3


@dataclass(frozen=True)
class AdaptiveTrustRegion(StepSize):
    """Takes the user's learning rate and momentum, bounded by `kl_clip` times the square of a number `m` that is found.

    `m` is 1 at first, and stands for the unit of the loss: a loss of thousands of nats trains like a loss of one nat,
    once `m` is in the thousands. `m` grows where the region bounded the last step and the loss still falls along it as
    at first, and shrinks where the loss rises along it (`trust_region.follow`). The bound is that of `TrustRegion`
    before momentum, with `κ = m² kl_clip`. Where `m` is above 1, a step may also be up to `m` times as long as the
    learning rate makes it: of a loss `m` times as large the empirical Fisher is `m²` times as large and the gradient
    `m` times, so that steps without this get shorter the larger the loss is. Elsewhere no step is longer than the
    learning rate makes it, and a schedule of it is followed once it makes steps shorter than the region does.

    The damping is in the unit of the loss too: where `m` is above 1 it is `m` times that of the param groups, with `m`
    as of the last statistics. With `LevenbergMarquardt`, which finds the damping itself, it is that of the groups.

    Momentum that goes uphill is scaled, for good, so that it takes back no more than a quarter of what the new step
    promises.

    Momentum tells along which direction the last step went. Without momentum, the last direction of the preconditioned
    layers is kept in its place, and takes as much memory as momentum would. `kl_clip` may be edited and scheduled: `m`
    goes on from where it is. With `kl_clip=None` nothing is bounded, followed or kept.
    """

    bounds_steps = True

    def keeps_direction(self, groups: Sequence[Group]) -> bool:
        return any(group["kl_clip"] is not None for group in groups)

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return () if all(group["kl_clip"] is None for group in groups) else (3,)

    def loss_unit(self, memory: Tensor) -> float:
        return max(1.0, math.exp(float(memory[0])))

    def advice(self, scale: float) -> str:
        return (
            f"The last step was {scale:.0e} of what the rate makes it. Divide the learning rate by about "
            f"{1 / max(scale, sys.float_info.min):.0e}; where the loss hardly falls, raise kl_clip instead."
        )

    def size(self, proposal: Proposal) -> Sized:
        if proposal.kl_clip is None:
            return Sized(proposal.direction(), {"trust_region_scale": 1.0, "momentum_scale": 1.0})
        earlier = momenta(proposal)
        along = torch.cat([slopes(proposal, earlier), slope_of_decay(proposal)])
        promises = proposal.executor.gradients.sum_over_updaters(along)
        own = [*lengths(proposal.products), _added(proposal.products)]
        moving = [group for group, _ in proposal.products]
        own += [total([scalar_beside(group["lr"], own[0]) for group in moving]), len(moving)]
        summed = proposal.executor.stages.sums(own, promises)
        decrease, quadratic, added, rates, groups, slope, promised, decayed = summed
        multiplier, slope_before, held, share = scalars_beside(proposal.memory, decrease)
        # A schedule changes all rates between the steps that are compared, and what is remembered is free of them.
        # It is one number for all stages of a pipeline, as slopes are: otherwise their regions would part for good.
        rate = quotient(rates, groups)
        if isinstance(groups, Tensor) or groups == 0:  # nothing moves; of a tensor the host does not know it
            rate = chosen(groups > 0, rate, _mean_rate(proposal.groups, decrease))
        multiplier = follow(multiplier, slope_ratio(quotient(slope, rate), slope_before), held > 0)
        size = exponential(multiplier)
        kl_clip, longest = proposal.kl_clip * size * size, bounded(size, least=1.0)
        scale = trust_region_scale(quadratic, decrease, summed_terms(proposal), kl_clip, longest)
        allowed = _SHARE * scale * added
        kept = chosen(promised < -allowed, quotient(-allowed, promised), 1.0)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, earlier, kept)
        direction = proposal.direction()
        _keep_directions(proposal, direction)
        holds = scale < longest
        slope_after = kept * promised + scale * added + decayed
        short = shortened(share, scale < _IDLE * bounded(size, most=1.0))
        after = [multiplier, quotient(slope_after, rate), holds, short]
        return Sized(
            direction,
            {"trust_region_scale": scale, "momentum_scale": kept, "kl_clip": kl_clip},
            vector(after, proposal.memory),
        )


def _mean_rate(groups: Sequence[Group], like: Scalar) -> Scalar:
    return total([scalar_beside(group["lr"], like) for group in groups]) / len(groups)


def _added(products: Sequence[tuple[Group, Scalar]]) -> Scalar:
    """Return `Σ lr Δᵀ∇` of what is added to the momentum."""
    added = [
        scalar_beside(group["lr"], product) * product * (1 - group["dampening"] if group["momentum"] != 0 else 1)
        for group, product in products
    ]
    return total(added)


def _keep_directions(proposal: Proposal, direction: Direction) -> None:
    """Keep the direction of this step where torch keeps momentum, of the parameters that have none.

    It is zero of a parameter without a gradient, which the step does not move.
    """
    without = [group for group in proposal.groups if group["momentum"] == 0]
    if not without:
        return
    for each in without:
        for idle in (param for param in each["params"] if param.grad is None):
            if (before := proposal.momentum(idle)) is not None:
                proposal.state[idle][MOMENTUM] = _kept(proposal, idle, each, torch.zeros_like(before))
    for param, group in covered_here(proposal):
        if group["momentum"] == 0 and param in direction:
            proposal.state[param][MOMENTUM] = _kept(proposal, param, group, direction[param])


def _kept(proposal: Proposal, param: nn.Parameter, group: Group, part: Tensor) -> Tensor:
    new = -part if group["maximize"] else part
    if proposal.finite is None:
        # Of a sharded parameter it is a view of what ranks have sent, which torch cannot save.
        return new.clone() if is_sharded(param) else new
    before = proposal.momentum(param)
    return torch.where(proposal.finite, new, torch.zeros_like(new) if before is None else before)
