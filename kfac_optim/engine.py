"""One optimizer step as a pipeline over blocks and an executor. Knows no layer type and no communication."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.optim.sgd import sgd
from torch.profiler import record_function

from kfac_optim.blocks import KFACBlock
from kfac_optim.capture import CaptureWindow
from kfac_optim.execution import Executor
from kfac_optim.loss_terms import LossCount
from kfac_optim.trust_region import inner_product, momentum_scale, trust_region_scale
from kfac_optim.validation import check_kfac_numbers

_GroupPair = tuple[dict[str, Any], Tensor, Tensor]
"""Two tensors to multiply, and the param group they belong to."""


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """Sums over the preconditioned parameters, as device scalars; reading them synchronises.

    Attributes:
        scale: trust-region scale `ν`, `[]`.
        momentum_scale: what the momentum of earlier steps was multiplied by, `[]`.
        inner: `Δᵀ∇` before `ν`, `[]`.
        direction_square: `‖Δ‖²`, `[]`.
        gradient_square: `‖∇‖²`, `[]`.
    """

    scale: Tensor
    momentum_scale: Tensor
    inner: Tensor
    direction_square: Tensor
    gradient_square: Tensor


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did.

    Attributes:
        measures: None when nothing was preconditioned.
        unpreconditioned: names of blocks whose gradient went to SGD as it was, for want of an inverse.
    """

    measures: StepMeasures | None
    unpreconditioned: tuple[str, ...]


def step(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Tensor, Any],
    blocks: Sequence[KFACBlock],
    window: CaptureWindow,
    executor: Executor,
    *,
    gradient_scale: Callable[[LossCount], float | Tensor],
    nonfinite_limit: int | None,
) -> StepRecord:
    """Fold statistics, refresh what is due, precondition, bound the step and update all parameters.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state, for momentum buffers.
        blocks: the preconditioned part of the model.
        window: what was captured since the last step.
        executor: who does the work.
        gradient_scale: what the output gradients behind `G` are multiplied by; those of parameters are not.
        nonfinite_limit: refused samples or failed refreshes in a row that are too many.

    Raises:
        RuntimeError: what cannot be stepped (see `KFACOptimizer.step`), and nothing is changed then; or too many
            setbacks of one layer in a row.
        ValueError: a number of a param group is out of range, or groups disagree on `kl_clip`.
    """
    kl_clip = check(groups, blocks)
    _follow_model(state, blocks)
    count = window.close()
    scale = gradient_scale(count)
    executor.wait()
    with record_function("kfac.fold"):
        for block in blocks:
            block.fold(count, scale)
    with record_function("kfac.refresh"):
        due = [block for block in blocks if block.refresh_due()]
        executor.refresh(due)
        for block in due:
            block.mark_refreshed()
        if nonfinite_limit is not None:
            _check_setbacks(due, nonfinite_limit)
    directions, record = _precondition(blocks, state, executor, kl_clip)
    with record_function("kfac.update"):
        for group in groups:
            params = executor.owned([param for param in group["params"] if param.grad is not None])
            _sgd(group, params, directions, state)
            executor.publish(params)
    for block in blocks:
        block.clock.step += 1
    return record


def check(groups: Sequence[Mapping[str, Any]], blocks: Sequence[KFACBlock]) -> float | None:
    """Refuse what cannot be stepped, before anything is changed; the `kl_clip` all groups agree on."""
    for i, group in enumerate(groups):
        check_kfac_numbers(group, f" in param group {i}")
    clips = {group["kl_clip"] for group in groups}
    if len(clips) > 1:
        raise ValueError(
            f"kfac_optim: the trust region is one for the whole model, but param groups disagree on kl_clip: "
            f"{', '.join(str(group['kl_clip']) for group in groups)}. Set the same value in every group."
        )
    for block in blocks:
        for param, name in zip(block.params, block.param_names, strict=True):
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"kfac_optim: {name!r} has a {param.grad.layout} gradient; preconditioning needs "
                    f"a dense one. Make it dense, or list '{block.name}' in skip_layers."
                )
    kl_clip: float | None = clips.pop()
    return kl_clip


def _follow_model(state: MutableMapping[Tensor, Any], blocks: Sequence[KFACBlock]) -> None:
    """Take momentum and statistics to where the model was moved since the last step."""
    for param, held in state.items():
        buffer = held.get("momentum_buffer") if isinstance(held, dict) else None  # users keep notes of their own there
        if buffer is not None and buffer.device != param.device:
            held["momentum_buffer"] = buffer.to(param.device)
    for block in blocks:
        block.follow()


def _check_setbacks(blocks: Sequence[KFACBlock], limit: int) -> None:
    """Raise where a layer has had too many in a row. One host synchronisation."""
    if not blocks:
        return
    device = blocks[0].params[0].device
    counts = [count.to(device, non_blocking=True) for block in blocks for count in block.inverse.setbacks(block.state)]
    numbers = torch.stack(counts).tolist()
    for block, refused, failed in zip(blocks, numbers[::2], numbers[1::2], strict=True):
        if refused >= limit:
            raise RuntimeError(
                f"kfac_optim: the statistics of layer {block.name!r} were not finite {refused} times in a row "
                f"(nonfinite_limit={limit}). Look for inputs or output gradients that overflow {block.dtype} when they "
                f"are squared: lower the loss scale or normalise the input, pass factor_dtype=torch.float64, or list "
                f"the layer in skip_layers."
            )
        if failed >= limit:
            raise RuntimeError(
                f"kfac_optim: the inverse of layer {block.name!r} could not be computed {failed} times in a row "
                f"(nonfinite_limit={limit}). Raise damping, pass factor_dtype=torch.float64, or list the layer in "
                f"skip_layers."
            )


def _precondition(
    blocks: Sequence[KFACBlock], state: MutableMapping[Tensor, Any], executor: Executor, kl_clip: float | None
) -> tuple[dict[nn.Parameter, Tensor], StepRecord]:
    """The scaled preconditioned gradient of every parameter that has one."""
    active: list[KFACBlock] = []
    grads: list[Tensor] = []
    unpreconditioned: list[str] = []
    with record_function("kfac.precondition"):
        for block in blocks:
            grad = block.gradient()
            if grad is None:
                continue
            if not block.is_ready or block.is_parametrized:
                # Without statistics because the loss did not use it: nothing to precondition, nothing to report.
                # Looking synchronises, for blocks that have no inverse yet.
                if block.is_parametrized or grad.is_meta or grad.any():
                    unpreconditioned.append(block.name)
                continue
            active.append(block)
            grads.append(grad)
        if not active:
            return {}, StepRecord(None, tuple(unpreconditioned))
        matrices = executor.precondition(active, grads)
    with record_function("kfac.trust_region"):
        device = active[0].params[0].device
        inner, decrease, quadratic = _inner_products(active, matrices, grads, device)
        buffers, momentum_decrease = _momentum(active, state, device)
        sums = torch.stack(
            [
                quadratic,
                decrease,
                momentum_decrease,
                inner,
                inner_product(matrices, matrices, device),
                inner_product(grads, grads, device),
            ]
        )
        sums = executor.all_reduce_scalars(sums)
        quadratic, decrease, momentum_decrease, inner, direction_square, gradient_square = sums.unbind()
        scale = held = torch.ones_like(inner)
        if kl_clip is not None:
            summed = max(block.clock.summed_terms for block in active)
            scale = trust_region_scale(quadratic, decrease, summed, kl_clip)
            held = momentum_scale(momentum_decrease, summed, kl_clip)
            _scale(matrices, scale)
            _scale(buffers, held)
        directions = {
            param: part
            for block, matrix in zip(active, matrices, strict=True)
            for param, part in zip(block.params, block.split(matrix), strict=True)
            if param.grad is not None
        }
    measures = StepMeasures(scale, held, inner, direction_square, gradient_square)
    return directions, StepRecord(measures, tuple(unpreconditioned))


def _inner_products(
    blocks: Sequence[KFACBlock], matrices: Sequence[Tensor], grads: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`Σ Δᵀ∇`, `Σ lr Δᵀ∇` and `Σ lr² Δᵀ∇`, each `[]`; weight and bias may have different learning rates."""
    pairs: list[_GroupPair] = []
    for block, matrix, grad in zip(blocks, matrices, grads, strict=True):
        whole = all(group is block.group for group in block.groups)
        parts = ((matrix,), (grad,)) if whole else tuple(block.unpack(m) for m in (matrix, grad))
        pairs += zip(block.groups, *parts, strict=False)
    inner = torch.zeros((), device=device)
    decrease = torch.zeros((), device=device)
    quadratic = torch.zeros((), device=device)
    for group, lefts, rights in _by_group(pairs):
        product = inner_product(lefts, rights, device)
        lr = _scalar(group["lr"], device)
        inner = inner + product
        decrease = decrease + product * lr
        quadratic = quadratic + product * lr**2
    return inner, decrease, quadratic


def _momentum(
    blocks: Sequence[KFACBlock], state: MutableMapping[Tensor, Any], device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Momentum buffers `b` of the blocks' parameters, and the decrease `Σ lr μ bᵀ∇` that they promise, `[]`."""
    buffers: list[Tensor] = []
    decrease = torch.zeros((), device=device)
    pairs: list[_GroupPair] = []
    for block in blocks:
        for param, group in zip(block.params, block.groups, strict=True):
            buffer = state[param].get("momentum_buffer") if param in state else None
            if param.grad is not None and buffer is not None and group["momentum"] != 0:
                pairs.append((group, buffer, param.grad))
    for group, lefts, rights in _by_group(pairs):
        buffers += lefts
        sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
        rate = sign * group["momentum"] * _scalar(group["lr"], device)
        decrease = decrease + inner_product(lefts, rights, device) * rate
    return buffers, decrease


def _by_group(pairs: Iterable[_GroupPair]) -> Iterable[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """Each param group, whose numbers multiply all its products, and the two sides of its pairs."""
    found: dict[int, tuple[dict[str, Any], list[Tensor], list[Tensor]]] = {}
    for group, left, right in pairs:
        _, lefts, rights = found.setdefault(id(group), (group, [], []))
        lefts.append(left)
        rights.append(right)
    return found.values()


def _scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device, non_blocking=True))


def _scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    return value.reshape(()).to(device) if isinstance(value, Tensor) else value


def _sgd(
    group: Mapping[str, Any],
    params: Sequence[nn.Parameter],
    directions: Mapping[nn.Parameter, Tensor],
    state: MutableMapping[Tensor, Any],
) -> None:
    """Take torch's own SGD step on the directions, or on the raw gradient where there is none."""
    # torch's foreach path of Nesterov adds the momentum to the gradients in place; `.grad` belongs to the user.
    overwritten = group["nesterov"] and group["foreach"] is not False
    grads: list[Tensor] = []
    for param in params:
        assert param.grad is not None
        raw = param.grad.clone() if overwritten and param not in directions else param.grad
        grads.append(directions.get(param, raw))
    if group["fused"]:
        for param in params:
            _device_dtype_check_for_fused(param)
    has_momentum = group["momentum"] != 0
    buffers = [state[param].get("momentum_buffer") for param in params] if has_momentum else []
    sgd(
        list(params),
        grads,
        buffers,
        has_sparse_grad=any(grad.is_sparse for grad in grads),
        foreach=group["foreach"],
        fused=group["fused"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    for param, buffer in zip(params, buffers, strict=False):
        state[param]["momentum_buffer"] = buffer
