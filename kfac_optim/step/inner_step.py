"""The inner step: torch's own SGD, on the direction in the place of the gradient."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.optim.sgd import sgd

from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, PREFERENCE, SECOND_MOMENT
from kfac_optim.step.step_size import Group, Sized

State = MutableMapping[Tensor, Any]
Pair = tuple[Tensor, Tensor]
"""A parameter, and what it is moved along."""


def sgd_step(group: Group, params: Sequence[nn.Parameter], sized: Sized, state: State, finite: Tensor | None) -> None:
    """Take torch's own SGD step on the direction, or on the raw gradient where there is none.

    On raw gradients the step is that of `optim.SGD` to the bit, but where torch's fused kernel does not move them.
    Directions on a CPU go through torch's fused kernel, which takes one call for all of them and rounds a little
    differently, unless the group says how they should go.
    """
    numbers = {**group, **sized.sgd(group)}
    if isinstance(numbers["weight_decay"], Tensor):  # torch takes it as `alpha`, which must be `[]`
        numbers["weight_decay"] = numbers["weight_decay"].reshape(())
    # Where weight decay is part of the curvature, it is in the direction already.
    of_direction = {**numbers, "weight_decay": 0.0} if group["l2_in_curvature"] else numbers
    may_fuse = numbers["foreach"] is None and numbers["fused"] is None
    may_fuse = may_fuse and not any(isinstance(numbers[name], Tensor) for name in ("lr", "weight_decay"))
    has_momentum = numbers["momentum"] != 0
    raw, directed, fused = list[Pair](), list[Pair](), list[Pair]()
    for param in params:
        direction = sized.direction.get(param)
        if direction is None:
            assert param.grad is not None
            raw.append((param, param.grad))
        elif may_fuse and _suits_fused_cpu(param, direction, state[param] if has_momentum else None):
            fused.append((param, direction))
        else:
            directed.append((param, direction))
    # torch's foreach path of Nesterov adds the momentum to the gradients in place; `.grad` belongs to the user.
    if numbers["nesterov"] and numbers["foreach"] is not False:
        raw = [(param, grad.clone()) for param, grad in raw]
    if numbers["fused"]:
        for param in params:
            _device_dtype_check_for_fused(param)
    for pairs, own in ((raw, numbers), (directed, of_direction), (fused, {**of_direction, "fused": True})):
        if pairs:
            _update(pairs, own, state, finite)


def _suits_fused_cpu(param: nn.Parameter, direction: Tensor, held: Mapping[str, Any] | None) -> bool:
    """Return whether torch's fused kernel can move a parameter: it reads all tensors side by side, as they lie.

    Args:
        param: the parameter.
        direction: the direction that it moves along, in its dtype.
        held: its state, where it has momentum.
    """
    if not param.is_cpu or type(param) is not nn.Parameter or param.dtype not in _FUSED:
        return False
    if not (param.is_contiguous() and direction.is_contiguous()):
        return False
    if held is None:
        return True
    momentum = held.get(MOMENTUM)
    return momentum is not None and momentum.dtype == param.dtype and momentum.is_contiguous()


_FUSED = (torch.float32, torch.float64)


def _is_left_by_fused(param: Tensor) -> bool:
    """Return whether torch's fused kernel may leave elements where they are, and their momentum as it was allocated.

    On a CPU that of torch 2.13 does so with 16-bit numbers, 8 to 32 at a time, as many as a vector of the processor
    has. It is right about the rest at the end, and so about parameters that fill no vector.
    """
    return param.is_cpu and param.dtype not in _FUSED and param.numel() >= 8


def _update(pairs: Sequence[Pair], numbers: Mapping[str, Any], state: State, finite: Tensor | None) -> None:
    if numbers["fused"] and (left := [pair for pair in pairs if _is_left_by_fused(pair[0])]):
        _update(left, {**numbers, "fused": False}, state, finite)
        pairs = [pair for pair in pairs if not _is_left_by_fused(pair[0])]
    params, grads = [param for param, _ in pairs], [grad for _, grad in pairs]
    has_momentum = numbers["momentum"] != 0
    buffers = [state[param].get(MOMENTUM) for param in params] if has_momentum else []
    without = len([buffer for buffer in buffers if buffer is None])
    if numbers["fused"] and 0 < without < len(buffers):  # torch's fused kernels take momentum of all or of none
        for has_none in (True, False):
            some = [pair for pair, buffer in zip(pairs, buffers, strict=True) if (buffer is None) == has_none]
            _update(some, numbers, state, finite)
        return
    sgd(
        params,
        grads,
        buffers,
        has_sparse_grad=bool([grad for grad in grads if grad.is_sparse]),
        foreach=numbers["foreach"],
        fused=numbers["fused"],
        found_inf=None if finite is None else (~finite).float(),  # with it torch's fused kernels change nothing
        weight_decay=numbers["weight_decay"],
        momentum=numbers["momentum"],
        lr=numbers["lr"],
        dampening=numbers["dampening"],
        nesterov=numbers["nesterov"],
        maximize=numbers["maximize"],
    )
    if without:
        for param, buffer in zip(params, buffers, strict=True):
            state[param][MOMENTUM] = buffer


def take_on_means(groups: Sequence[Group], state: State) -> None:
    """Make momentum of the means of gradients that `SelectedUpdates` keeps, and drop what it keeps beside them."""
    for group in groups:
        for param in group["params"]:
            held = state.get(param, {})
            if not isinstance(held.get(ADAM_STEPS), Tensor):
                continue
            for key in (ADAM_STEPS, SECOND_MOMENT, PREFERENCE):
                held.pop(key, None)
            if group["maximize"] and held.get(MOMENTUM) is not None:  # torch's momentum is of the negative gradient
                held[MOMENTUM] = -held[MOMENTUM]
