"""Param groups and gradients that cannot be stepped are refused before anything is changed."""

from collections.abc import Sequence

import torch
from torch import nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.blocks.selection import holders
from kfac_optim.step.step_size import Group, StepSize
from kfac_optim.utils.sharded_params import is_sharded
from kfac_optim.utils.validation import check_kfac_numbers


def check(groups: Sequence[Group], blocks: Sequence[KFACBlock], step_size: StepSize) -> float | None:
    """Refuse what cannot be stepped, before anything is changed; return the `kl_clip` that all groups agree on."""
    kl_clip = check_groups(groups, step_size)
    for i, group in enumerate(groups):
        damps = l2(group) < 0 and step_size.preconditions
        if damps and any(group is each for block in blocks for each in block.groups):
            check_l2(group, i)
    for block in blocks:
        for place, param in enumerate(block.params):
            if (grad := param.grad) is not None and grad.layout is not torch.strided:
                name = block.param_names[place]
                raise RuntimeError(
                    f"kfac_optim: {name!r} has a {grad.layout} gradient; preconditioning needs "
                    f"a dense one. Make it dense, or pass skip_layers={holders([name])}."
                )
    return kl_clip


def check_groups(groups: Sequence[Group], step_size: StepSize) -> float | None:
    """Refuse numbers of param groups that do not go together; return the `kl_clip` that all groups agree on."""
    for i, group in enumerate(groups):
        check_kfac_numbers(group, f" in param group {i}")
        check_shards(group, i, None if step_size.takes_shards else step_size)
    step_size.check(groups)
    clips = {group["kl_clip"] for group in groups}
    if len(clips) > 1:
        raise ValueError(
            f"kfac_optim: the trust region is one for the whole model, but param groups disagree on kl_clip: "
            f"{', '.join(str(group['kl_clip']) for group in groups)}. Set the same value in every group."
        )
    kl_clip: float | None = clips.pop() if clips else None
    return kl_clip


def check_l2(group: Group, number: int) -> None:
    """Refuse a weight decay, edited to below 0, that is part of the curvature and leaves no damping of it."""
    decay, own = l2(group), group["preconditioner_damping"]
    damping = group["damping"] if own is None else own
    if decay < 0 and damping + decay <= 0:
        raise ValueError(
            f"kfac_optim: with l2_in_curvature=True weight_decay is added to the damping, and in param group {number} "
            f"damping={damping!r} and weight_decay={decay!r} leave none. Set weight_decay to 0 or more, or "
            "l2_in_curvature to False."
        )


def check_names(groups: Sequence[Group]) -> None:
    """Refuse param groups that were edited so that a parameter is in two, or names are not those of the parameters."""
    of_param: dict[nn.Parameter, int] = {}
    for i, group in enumerate(groups):
        for param in group["params"]:
            if groups[of_param.setdefault(param, i)] is not group:
                raise ValueError(
                    f"kfac_optim: a parameter {list(param.shape)} is in param groups {of_param[param]} and {i}. "
                    "Take it out of one of them."
                )
        names = group.get("param_names")
        if names is not None and len(names) != len(group["params"]):
            raise ValueError(
                f"kfac_optim: param group {i} has {len(group['params'])} parameters and {len(names)} 'param_names'. "
                "Change both lists alike, or delete 'param_names' from all param groups."
            )


def check_shards(group: Group, number: int, whole: object | None) -> None:
    """Refuse parameters that processes hold parts of, where a choice needs them whole.

    Args:
        group: a param group.
        number: the number of that param group.
        whole: the choice that needs whole parameters; None if only `fused` of the param group can need them.

    Raises:
        NotImplementedError: there are such parameters.
    """
    if whole is None and not group["fused"]:
        return
    named = zip(group["params"], group.get("param_names", ()) or [None] * len(group["params"]), strict=True)
    for param, name in named:
        if is_sharded(param):
            choice, remedy = (
                ("torch's fused SGD", "Leave fused at None")
                if whole is None
                else (repr(whole), "Use TrustRegion() and a fixed damping")
            )
            raise NotImplementedError(
                f"kfac_optim: {choice} needs whole parameters, and {'one' if name is None else repr(name)} of param "
                f"group {number}, {list(param.shape)}, is sharded, as by fully_shard. {remedy}."
            )
