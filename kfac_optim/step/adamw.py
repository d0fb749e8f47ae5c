"""AdamW's update, and means of gradients, kept in the optimizer's state as torch's Adam keeps them."""

from collections import defaultdict
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, SECOND_MOMENT
from kfac_optim.factors.second_moments import on_host
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
    wide = torch.promote_types(param.dtype, torch.float32)
    mean_share, square_share = (_share(new[ADAM_STEPS], beta, wide) for beta in (group["momentum"], beta2))
    root = (new[SECOND_MOMENT].to(wide) / square_share).sqrt_()
    update: Tensor = (new[MOMENTUM].to(wide) / mean_share).div_(root.add_(eps))
    return update.to(param.dtype)


def _share(steps: Tensor, beta: float, dtype: torch.dtype) -> Tensor | float:
    """Return `1 - βᵗ`, what an average that began with zero has taken in; as a number where nothing is waited for."""
    if on_host(steps):
        return 1 - float(beta) ** steps.item()
    share: Tensor = 1 - beta ** steps.double()
    return share.to(dtype)


def mean_before(proposal: Proposal, param: nn.Parameter) -> Tensor | None:
    """Return the mean that `take_into_means` has left; None if there is none.

    Torch's momentum, of another rule, is a sum; the count of steps marks a mean.
    """
    held = proposal.state[param]
    return _kept(held, MOMENTUM, param) if {MOMENTUM, ADAM_STEPS} <= held.keys() else None


def take_into_means(
    proposal: Proposal, groups: Mapping[nn.Parameter, Group], means: Mapping[nn.Parameter, Tensor | None]
) -> dict[nn.Parameter, Tensor]:
    """Take the gradients of parameters into their momentum, and return what updates are made of.

    Args:
        proposal: the step.
        groups: the param group of each parameter, with the momentum and whether it is Nesterov's.
        means: what `mean_before` has of each.
    """
    found: dict[nn.Parameter, Tensor] = {}
    alike: defaultdict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for param, group in groups.items():
        alike[id(group), param.dtype, param.device].append(param)
    for params in alike.values():
        group, before = groups[params[0]], []
        for param in params:
            if (mean := means[param]) is None:  # torch's momentum is perhaps of the negative; the count marks a mean
                proposal.state[param][ADAM_STEPS], mean = _no_steps(param), torch.zeros_like(param)
            before.append(mean)
        gradients = [regularised(param, group).to(param.dtype) for param in params]
        after = torch._foreach_lerp(before, gradients, 1 - group["momentum"])
        used = torch._foreach_lerp(after, gradients, 1 - group["momentum"]) if group["nesterov"] else after
        for param, old, new, each in zip(params, before, after, used, strict=True):
            proposal.state[param][MOMENTUM] = if_taken(proposal, new, old)
            found[param] = each
    return found


def if_taken(proposal: Proposal, new: Tensor, before: Tensor) -> Tensor:
    """Return what is to be kept of a step that is perhaps not taken."""
    return new if proposal.finite is None else torch.where(proposal.finite, new, before.to(new.dtype))


def _kept(held: Mapping[str, Tensor], key: str, param: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's state, in the dtype of the parameter, which may have been changed."""
    return held[key].to(param.dtype)


def _no_steps(param: nn.Parameter) -> Tensor:
    """Return the count of a mean that nothing was taken into, `[]`, in the dtype that torch's Adam has it in."""
    return torch.zeros((), dtype=torch.float32, device=param.device)
