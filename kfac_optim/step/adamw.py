"""AdamW's update, and means of gradients, kept in the optimizer's state as torch's Adam keeps them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, SECOND_MOMENT
from kfac_optim.factors.second_moments import on_host
from kfac_optim.factors.small_calls import SMALL
from kfac_optim.step.step_size import Group, Proposal
from kfac_optim.utils.sharded_params import like, local, local_as
from kfac_optim.utils.streams import brought


def adamw_updates(
    proposal: Proposal, groups: Mapping[nn.Parameter, Group], *, beta2: float, eps: float
) -> dict[nn.Parameter, Tensor]:
    """Return the updates of AdamW at a rate of 1, without the decay (Kingma & Ba 2015, algorithm 1).

    Args:
        proposal: the step.
        groups: the parameters, whose states take in the gradients, each with its param group, whose momentum is β₁.
        beta2: the decay of the averages of squared gradients.
        eps: what is added to their roots.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for params in _alike(groups):
        for param, update in zip(params, _updates(proposal, params, groups[params[0]], beta2, eps), strict=True):
            found[param] = update
    return found


def _updates(
    proposal: Proposal, params: Sequence[nn.Parameter], group: Group, beta2: float, eps: float
) -> Sequence[Tensor]:
    """Return the updates of parameters of one group, dtype and device."""
    dtype, states = params[0].dtype, [proposal.state[param] for param in params]
    for param, held in zip(params, states, strict=True):
        if SECOND_MOMENT not in held:  # what momentum there is was made by another rule
            held[ADAM_STEPS] = _no_steps(param)
            held[SECOND_MOMENT], held[MOMENTUM] = torch.zeros_like(param), torch.zeros_like(param)
    gradients = [gradient_here(param, group) for param in params]
    before = {key: [local(held[key]).to(dtype) for held in states] for key in (MOMENTUM, SECOND_MOMENT)}
    # Not by lerp, which makes NaN of a square that overflows; so it stays infinite, as in torch's Adam.
    squares = torch._foreach_mul(before[SECOND_MOMENT], beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    means = torch._foreach_lerp(before[MOMENTUM], gradients, 1 - group["momentum"])
    # Of a checkpoint they may have come from another device.
    taken = [brought(held[ADAM_STEPS], params[0].device) for held in states]
    steps = torch._foreach_add(taken, 1)
    for key, new in ((MOMENTUM, means), (SECOND_MOMENT, squares)):
        kept = all_if_taken(proposal, new, [local(held[key]) for held in states])
        for param, held, tensor in zip(params, states, kept, strict=True):
            held[key] = like(param, tensor)
    for held, tensor in zip(states, all_if_taken(proposal, steps, [held[ADAM_STEPS] for held in states]), strict=True):
        held[ADAM_STEPS] = tensor
    # In float64, as 1 - β₂ᵗ is a small difference at first, and at least in float32, where eps is not zero.
    wide = torch.promote_types(dtype, torch.float32)
    counts = torch.stack([*steps])
    mean_shares, square_shares = (_shares(counts, beta, wide) for beta in (group["momentum"], beta2))
    roots = torch._foreach_sqrt(torch._foreach_div([square.to(wide) for square in squares], square_shares))
    torch._foreach_add_(roots, max(eps, _least_root(dtype, beta2)))
    updates = torch._foreach_div([mean.to(wide) for mean in means], mean_shares)
    torch._foreach_div_(updates, roots)
    return [like(param, update.to(dtype)) for param, update in zip(params, updates, strict=True)]


def _least_root(dtype: torch.dtype, beta2: float) -> float:
    """Return the root below which averages of squares vanish in a dtype: 0.008 in float16, elsewhere below `eps`."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return math.sqrt(smallest / (1 - beta2))


def _shares(steps: Tensor, beta: float, dtype: torch.dtype) -> list[float] | list[Tensor]:
    """Return `1 - βᵗ`, what averages that began with zero have taken in; as numbers where nothing is waited for."""
    if on_host(steps):
        return [1 - float(beta) ** each for each in steps.tolist()]
    shares: Tensor = 1 - beta ** steps.double()
    return list(shares.to(dtype).unbind())


def _alike(groups: Mapping[nn.Parameter, Group]) -> Iterable[list[nn.Parameter]]:
    """Return the parameters, those together that have one group, dtype and device."""
    alike: defaultdict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for param, group in groups.items():
        alike[id(group), param.dtype, param.device].append(param)
    return alike.values()


def gradient_here(param: nn.Parameter, group: Group) -> Tensor:
    """Return `∇h` in the dtype of the parameter, as `grad_dtype` may be another; of a sharded one the part here."""
    return local_as(regularised(param, group), param).to(param.dtype)


def mean_before(proposal: Proposal, param: nn.Parameter) -> Tensor | None:
    """Return the mean that `take_into_means` has left, of a sharded parameter the part here; None if there is none.

    Torch's momentum, of another rule, is a sum; the count of steps marks a mean.
    """
    held = proposal.state[param]
    # In the dtype of the parameter, which may have been changed.
    return local(held[MOMENTUM]).to(param.dtype) if {MOMENTUM, ADAM_STEPS} <= held.keys() else None


def take_into_means(
    proposal: Proposal, groups: Mapping[nn.Parameter, Group], means: Mapping[nn.Parameter, Tensor | None]
) -> dict[nn.Parameter, Tensor]:
    """Take the gradients of parameters into their momentum, and return what updates are made of, the parts here.

    Args:
        proposal: the step.
        groups: the param group of each parameter, with the momentum and whether it is Nesterov's.
        means: what `mean_before` has of each.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for params in _alike(groups):
        group, before = groups[params[0]], []
        for param in params:
            if (mean := means[param]) is None:  # torch's momentum is perhaps of the negative; the count marks a mean
                proposal.state[param][ADAM_STEPS], mean = _no_steps(param), torch.zeros_like(local(param))
            before.append(mean)
        gradients = [gradient_here(param, group) for param in params]
        after = torch._foreach_lerp(before, gradients, 1 - group["momentum"])
        used = torch._foreach_lerp(after, gradients, 1 - group["momentum"]) if group["nesterov"] else after
        for param, kept, each in zip(params, all_if_taken(proposal, after, before), used, strict=True):
            proposal.state[param][MOMENTUM] = like(param, kept)
            found[param] = each
    return found


def if_taken(proposal: Proposal, new: Tensor, before: Tensor) -> Tensor:
    """Return what is to be kept of a step that is perhaps not taken."""
    return new if proposal.finite is None else torch.where(proposal.finite, new, before.to(new.dtype))


def all_if_taken(proposal: Proposal, new: Sequence[Tensor], before: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `if_taken` of tensors of one dtype; `new` may be overwritten.

    Small ones go together: for one alone the launch takes longer than the work.
    """
    if proposal.finite is None:
        return new
    small = [pair for pair in zip(new, before, strict=True) if pair[0].numel() <= SMALL]
    if small:
        sides = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*small, strict=True))
        parts = torch.split(if_taken(proposal, *sides), [tensor.numel() for tensor, _ in small])
        kept = [part.view_as(tensor) for part, (tensor, _) in zip(parts, small, strict=True)]
        torch._foreach_copy_([tensor for tensor, _ in small], kept)
    pairs = zip(new, before, strict=True)
    return [each if each.numel() <= SMALL else if_taken(proposal, each, old) for each, old in pairs]


def _no_steps(param: nn.Parameter) -> Tensor:
    """Return the count of a mean that nothing was taken into, `[]`, in the dtype that torch's Adam has it in."""
    return torch.zeros((), dtype=torch.float32, device=param.device)
