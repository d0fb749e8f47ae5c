"""The inner step: torch's own SGD, on the direction in the place of the gradient."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.optim.sgd import sgd

from kfac_optim.step.step_size import Group, Sized

State = MutableMapping[Tensor, Any]


def sgd_step(group: Group, params: Sequence[nn.Parameter], sized: Sized, state: State, finite: Tensor | None) -> None:
    """Take torch's own SGD step on the direction, or on the raw gradient where there is none."""
    numbers = {**group, **sized.sgd(group)}
    # Where weight decay is part of the curvature, it is in the direction already.
    decayed = {param for param in params if param in sized.direction} if group["l2_in_curvature"] else set()
    undecayed = {**numbers, "weight_decay": 0.0}
    others = [param for param in params if param not in decayed] if decayed else params
    _update(others, numbers, sized.direction, state, finite)
    _update(
        [param for param in params if param in decayed] if decayed else (), undecayed, sized.direction, state, finite
    )


def _update(
    params: Sequence[nn.Parameter],
    numbers: Mapping[str, Any],
    direction: Mapping[nn.Parameter, Tensor],
    state: State,
    finite: Tensor | None,
) -> None:
    if not params:
        return
    if numbers["fused"] and numbers["momentum"] != 0:  # torch's fused kernels take momentum of all or of none
        without = [param for param in params if state[param].get("momentum_buffer") is None]
        if 0 < len(without) < len(params):
            _update(without, numbers, direction, state, finite)
            params = [param for param in params if param not in set(without)]
    # torch's foreach path of Nesterov adds the momentum to the gradients in place; `.grad` belongs to the user.
    overwritten = numbers["nesterov"] and numbers["foreach"] is not False
    grads: list[Tensor] = []
    for param in params:
        assert param.grad is not None
        raw = param.grad.clone() if overwritten and param not in direction else param.grad
        grads.append(direction.get(param, raw))
    if numbers["fused"]:
        for param in params:
            _device_dtype_check_for_fused(param)
    has_momentum = numbers["momentum"] != 0
    buffers = [state[param].get("momentum_buffer") for param in params] if has_momentum else []
    sgd(
        list(params),
        grads,
        buffers,
        has_sparse_grad=any(grad.is_sparse for grad in grads),
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
    for param, buffer in zip(params, buffers, strict=False):
        state[param]["momentum_buffer"] = buffer
