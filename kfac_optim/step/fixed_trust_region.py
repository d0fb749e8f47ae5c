"""The trust region of Ba, Grosse & Martens (2017, §5): a bound on each step that stays as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import regularised, to_matrix
from kfac_optim.linalg.products import sandwich
from kfac_optim.step.execution import Parts
from kfac_optim.step.scaling import by_group, covered_here, lengths, scalar, scale_all, scale_momentum, summed_terms
from kfac_optim.step.step_size import Group, Proposal, Sized, StepSize
from kfac_optim.step.trust_region import inner_product, momentum_scale, shortened, trust_region_scale
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.validation import check_flag


@dataclass(frozen=True)
class TrustRegion(StepSize):
    """Takes the user's learning rate and momentum, bounded by `kl_clip` (Ba, Grosse & Martens 2017, §5).

    The bound is in units of the loss and stays as it is: `kl_clip` must suit the loss.

    Before momentum the bound is on what this step adds, `lr² Δᵀ F Δ ≤ κ`, as in the paper; old momentum is left alone
    while it goes downhill. After momentum it is on the whole step `s`, momentum included: `sᵀ F s ≤ κ`, with `F` the
    undamped factors, at the cost of two matrix products for each layer and step; momentum and preconditioned gradient
    are then scaled by the same number. That holds steps within `κ` for good, where momentum 0.9 may otherwise make
    them ten times as long. On several processes `F` has the examples of all until the last refresh, and since then
    those of one. `Placement.FACTORS`, `Auto` and FSDP2 do not go with it: no process may have all that is needed.

    Args:
        after_momentum: what is bounded.
    """

    after_momentum: bool = False

    def __post_init__(self) -> None:
        check_flag("after_momentum of TrustRegion", self.after_momentum, optional=False)

    @property
    def takes_shards(self) -> bool:
        return not self.after_momentum

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return () if self.after_momentum or all(group["kl_clip"] is None for group in groups) else (1,)

    def totals(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return (2,) if self.after_momentum and any(group["kl_clip"] is not None for group in groups) else ()

    def advice(self, scale: float) -> str:
        return (
            "Training may be slow where the loss is large. Raise kl_clip tenfold and look at "
            "metrics()['trust_region_scale'], or leave step_size at its default, which finds how far steps may go."
        )

    def size(self, proposal: Proposal) -> Sized:
        bound = self._bound_step if self.after_momentum else self._bound_gradient
        scale, held = bound(proposal)
        measures = {"trust_region_scale": scale, "momentum_scale": held}
        if proposal.kl_clip is None:
            return Sized(proposal.direction(), lambda _: {}, measures)
        measures["kl_clip"] = torch.full_like(scale, proposal.kl_clip)
        memory = proposal.memory.to(scale.device, non_blocking=True)
        share = shortened(memory[3], scale < 1)
        return Sized(proposal.direction(), lambda _: {}, measures, torch.cat([memory[:3], share.reshape(1)]))

    def _bound_gradient(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(proposal.products[0][1])
        if proposal.kl_clip is None:
            return one, one
        decrease, quadratic = lengths(proposal.products)
        summed = summed_terms(proposal)
        scale = trust_region_scale(quadratic, decrease, summed, proposal.kl_clip)
        buffers = _buffers(proposal)
        promised = proposal.executor.gradients.sum_over_updaters(_promised(buffers, one.device).reshape(1))[0]
        held = momentum_scale(promised, summed, proposal.kl_clip)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, [(group, buffer) for group, buffer, _ in buffers], held)
        return scale, held

    def _bound_step(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(proposal.products[0][1])
        if proposal.kl_clip is None:
            return one, one
        executor = proposal.executor
        steps, curved, grads = [], [], []
        for block, grad, parts in zip(proposal.blocks, proposal.grads, proposal.parts, strict=True):
            if executor.statistics.keeps(block):  # each block counts once
                steps.append(to_matrix(block, _whole_step(proposal, block, parts)))
                curved.append(_times_factors(block, steps[-1]))
                grads.append(to_matrix(block, grad))
        sums = torch.stack([inner_product(steps, curved, one.device), inner_product(steps, grads, one.device)])
        quadratic, decrease = executor.sum_over_ranks(sums).unbind()
        summed = summed_terms(proposal)
        scale = trust_region_scale(quadratic, decrease, summed, proposal.kl_clip)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, [(group, buffer) for group, buffer, _ in _buffers(proposal)], scale)
        return scale, scale


def _buffers(proposal: Proposal) -> list[tuple[Group, Tensor, Tensor]]:
    """Return momentum of the parameters that are updated here and covered, with its param group and `∇h`.

    Of each the part that is here.
    """
    return [
        (group, local(buffer), local(regularised(param, group)))
        for param, group in covered_here(proposal)
        if param.grad is not None and group["momentum"] != 0 and (buffer := proposal.momentum(param)) is not None
    ]


def _promised(buffers: Sequence[tuple[Group, Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return the decrease `Σ lr μ bᵀ∇` that momentum `b` promises, `[]`."""
    decrease = torch.zeros((), device=device)
    for group, lefts, rights in by_group(buffers):
        sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
        rate = sign * group["momentum"] * scalar(group["lr"], device)
        decrease = decrease + inner_product(lefts, rights, device) * rate
    return decrease


def _whole_step(proposal: Proposal, block: KFACBlock, parts: Parts) -> Parts:
    """Return what torch's SGD is about to take from the parameters, but for weight decay."""
    steps = []
    for param, group, part in zip(block.params, block.groups, parts, strict=True):
        mu, buffer = group["momentum"], proposal.momentum(param)
        step = part * (1 + mu if group["nesterov"] else 1)
        if mu != 0 and buffer is not None:
            added = 1 - group["dampening"]
            sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
            carried = sign * mu * buffer.to(part.dtype)
            step = part + mu * (carried + part) if group["nesterov"] else added * part + carried
        steps.append(step * scalar(group["lr"], step.device) * (param.grad is not None))
    return steps


def _times_factors(block: KFACBlock, matrix: Tensor) -> Tensor:
    """Return `G S A`, with the averages as they are.

    To unpack these at every step takes `in² + out²` writes, few beside the products.
    """
    a, g = (None if factor is None else factor.to(matrix.dtype) for factor in block.state.factors())
    return sandwich(g, matrix, a)
