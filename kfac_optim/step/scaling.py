"""Sums over a proposed step, and the scaling of its directions and of the momentum."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import l2
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.step.scalars import Scalar, chosen, scalar_beside, total
from kfac_optim.step.step_size import Group, Proposal
from kfac_optim.step.trust_region import inner_product
from kfac_optim.utils.joined_tensors import joined
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.streams import brought


def summed_terms(proposal: Proposal) -> float:
    """Return the terms of the step's summed loss; those of the last statistics if none were seen in this step."""
    return proposal.count.summed or max((block.clock.summed_terms for block in proposal.covered), default=1)


def covered_here(proposal: Proposal) -> list[tuple[nn.Parameter, Group]]:
    """Return the covered parameters that are updated here, in whole or in part, with their param groups."""
    params = [param for block in proposal.covered for param in block.params]
    groups = [group for block in proposal.covered for group in block.groups]
    if (owned := proposal.executor.gradients.owned(params)) is params:
        return list(zip(params, groups, strict=True))
    here = set(owned)
    return [(param, group) for param, group in zip(params, groups, strict=True) if param in here]


class Momenta(NamedTuple):
    """Holds what is here of the momentum of one param group."""

    group: Group
    buffers: list[Tensor]
    counted: list[Tensor]
    """The buffers that sums over ranks take: of copies they take one."""
    gradients: list[Tensor]
    """The gradients `∇h` beside `counted`."""


def penalty(groups: Iterable[Group], values: Mapping[nn.Parameter, Tensor]) -> float:
    """Return `½ η ‖θ‖²` of some parameters, where weight decay is part of the curvature.

    Args:
        groups: the param groups.
        values: `θ`.
    """
    total = 0.0
    for group in groups:
        if eta := l2(group):
            held = [values[param] for param in group["params"] if param in values]
            total += sum(float(value.detach().abs().double().square().sum()) for value in held) * eta / 2
    return total


def momenta(proposal: Proposal) -> list[Momenta]:
    """Return the momentum of the parameters that are covered and updated here.

    Where the group has no momentum, it is the direction of the last step.
    """
    counts = proposal.executor.gradients.counts
    found: dict[int, Momenta] = {}
    for param, group in covered_here(proposal):
        if param.grad is None or (buffer := proposal.momentum(param)) is None:
            continue
        if (of_group := found.get(id(group))) is None:
            of_group = found[id(group)] = Momenta(group, [], [], [])
        here = local(buffer)
        of_group.buffers.append(here)
        if counts(param):
            of_group.counted.append(here)
            of_group.gradients.append(local(regularised(param, group)))
    return list(found.values())


def lengths(products: Sequence[tuple[Group, Scalar]]) -> tuple[Scalar, Scalar]:
    """Return `Σ lr Δᵀ∇` and `Σ lr² Δᵀ∇` of the products of a proposal."""
    rates = [(scalar_beside(group["lr"], product), product) for group, product in products]
    return total([rate * product for rate, product in rates]), total([rate * rate * product for rate, product in rates])


def slopes(proposal: Proposal, held: Iterable[Momenta]) -> Tensor:
    """Return `Σ lr bᵀ∇` along the momentum `b`, and `Σ lr μ bᵀ∇` that momentum promises for this step, `[2]`."""
    found: list[Tensor] = []
    device = (proposal.covered[0].params[0] if proposal.covered else proposal.memory).device
    for group, _, counted, gradients in held:
        if not counted:
            continue
        product = inner_product(joined(counted), proposal.joins.of(gradients), device)
        sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
        slope = product * (sign * scalar_beside(group["lr"], product))
        found.append(torch.stack([slope, slope * group["momentum"]]))
    return sum(found[1:], start=found[0]) if found else torch.zeros(2, device=device)


def slope_of_decay(proposal: Proposal) -> Tensor:
    """Return `Σ lr (1 - d) η θᵀ∇`, `[1]`: what decoupled weight decay adds to `slopes` as momentum takes it up."""
    device = (proposal.covered[0].params[0] if proposal.covered else proposal.memory).device
    counts = proposal.executor.gradients.counts
    pairs = [
        (group, local(param.detach()), local(param.grad))
        for param, group in (covered_here(proposal) if any(map(_has_decay, proposal.groups)) else ())
        if _has_decay(group) and param.grad is not None and counts(param)
    ]
    total = torch.zeros((), device=device)
    for group, lefts, rights in by_group(pairs):
        product = inner_product(joined(lefts), proposal.joins.of(rights), device)
        rate = (-1 if group["maximize"] else 1) * (1 - group["dampening"]) * scalar_beside(group["lr"], product)
        total = total + product * rate * scalar_beside(group["weight_decay"], product)
    return total.view(1)


def _has_decay(group: Group) -> bool:
    """Return whether momentum takes up weight decay beside the direction; a tensor is not looked at."""
    decay = group["weight_decay"]
    return group["momentum"] != 0 and not group["l2_in_curvature"] and (isinstance(decay, Tensor) or decay != 0)


def by_group(pairs: Iterable[tuple[Group, Tensor, Tensor]]) -> Iterable[tuple[Group, list[Tensor], list[Tensor]]]:
    """Return each param group, whose numbers multiply all its products, and the two sides of its pairs."""
    found: dict[int, tuple[Group, list[Tensor], list[Tensor]]] = {}
    last, lefts, rights = None, list[Tensor](), list[Tensor]()
    for group, left, right in pairs:
        if group is not last:
            last, lefts, rights = found.setdefault(id(group), (group, [], []))
        lefts.append(left)
        rights.append(right)
    return found.values()


def scale_momentum(proposal: Proposal, held: Iterable[Momenta], factor: Scalar) -> None:
    """Scale momentum for good, and so not where the step will not be taken."""
    if proposal.finite is not None:
        factor = chosen(proposal.finite, factor, 1.0)
    scale_all([buffer for each in held if each.group["momentum"] != 0 for buffer in each.buffers], factor)


def scale_all(tensors: Iterable[Tensor], factor: Scalar) -> None:
    """Multiply all by one number, wherever they are."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in _undivided(tensors):
        by_device[tensor.device].append(tensor)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, brought(factor, device) if isinstance(factor, Tensor) else factor)


def _undivided(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return tensors that do not overlap; in the place of those that are together all of another, that one."""
    parts: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for tensor in tensors:
        if (whole := tensor._base) is None:
            yield tensor
        else:
            parts.setdefault(id(whole), (whole, []))[1].append(tensor)
    for whole, divided in parts.values():
        if sum(map(Tensor.numel, divided)) == whole.numel():
            yield whole
        else:
            yield from divided
