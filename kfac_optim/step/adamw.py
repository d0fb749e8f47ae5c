"""AdamW's update, and means of gradients, kept in the optimizer's state as torch's Adam keeps them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, SECOND_MOMENT
from kfac_optim.step.step_size import Group, Proposal


def adamw_update(proposal: Proposal, param: nn.Parameter, group: Group, *, beta2: float, eps: float) -> Tensor:
    """Return the update of AdamW at a rate of 1, without the decay (Kingma & Ba 2015, algorithm 1).

    Args:
        proposal: the step.
        param: the parameter, whose state takes in the gradient.
        group: its param group, whose momentum is β₁.
        beta2: the decay of the average of squared gradients.
        eps: what is added to its root.
    """
    gradient, held = regularised(param, group).to(param.dtype), proposal.state[param]
    if SECOND_MOMENT not in held:  # what momentum there is was made by another rule
        held[ADAM_STEPS] = _no_steps(param)
        held[SECOND_MOMENT], held[MOMENTUM] = torch.zeros_like(param), torch.zeros_like(param)
    new = {
        MOMENTUM: _kept(held, MOMENTUM, param).lerp(gradient, 1 - group["momentum"]),
        # Not by lerp, which makes NaN of a square that overflows; so it stays infinite, as in torch's Adam.
        SECOND_MOMENT: (_kept(held, SECOND_MOMENT, param) * beta2).addcmul(gradient, gradient, value=1 - beta2),
        ADAM_STEPS: held[ADAM_STEPS] + 1,
    }
    for key, tensor in new.items():
        held[key] = if_taken(proposal, tensor, held[key])
    # In float64, as 1 - β₂ᵗ is a small difference at first, and at least in float32, where eps is not zero.
    taken, wide = new[ADAM_STEPS].double(), torch.promote_types(param.dtype, torch.float32)
    root = (new[SECOND_MOMENT].to(wide) / (1 - beta2**taken).to(wide)).sqrt()
    correction: Tensor = 1 - group["momentum"] ** taken
    update: Tensor = new[MOMENTUM].to(wide) / correction.to(wide) / (root + eps)
    return update.to(param.dtype)


def mean_before(proposal: Proposal, param: nn.Parameter) -> Tensor | None:
    """Return the mean that `take_into_mean` has left; None if there is none.

    Torch's momentum, of another rule, is a sum; the count of steps marks a mean.
    """
    held = proposal.state[param]
    return _kept(held, MOMENTUM, param) if {MOMENTUM, ADAM_STEPS} <= held.keys() else None


def take_into_mean(proposal: Proposal, param: nn.Parameter, group: Group) -> Tensor:
    """Take the gradient of a layer's parameter into its momentum, and return what the update is made of.

    Args:
        proposal: the step.
        param: the parameter.
        group: its param group, with the momentum and whether it is Nesterov's.
    """
    momentum, held = group["momentum"], proposal.state[param]
    new = regularised(param, group).to(param.dtype)
    before = mean_before(proposal, param)
    if before is None:  # torch's momentum is perhaps of the negative; the count, which stays 0 here, marks a mean
        held[ADAM_STEPS], before = _no_steps(param), torch.zeros_like(param)
    mean = before.lerp(new, 1 - momentum)
    held[MOMENTUM] = if_taken(proposal, mean, before)
    return mean.lerp(new, 1 - momentum) if group["nesterov"] else mean


def if_taken(proposal: Proposal, new: Tensor, before: Tensor) -> Tensor:
    """Return what is to be kept of a step that is perhaps not taken."""
    return new if proposal.finite is None else torch.where(proposal.finite, new, before.to(new.dtype))


def _kept(held: Mapping[str, Tensor], key: str, param: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's state, in the dtype of the parameter, which may have been changed."""
    return held[key].to(param.dtype)


def _no_steps(param: nn.Parameter) -> Tensor:
    """Return the count of a mean that nothing was taken into, `[]`, in the dtype that torch's Adam has it in."""
    return torch.zeros((), dtype=torch.float32, device=param.device)
