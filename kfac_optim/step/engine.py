"""One optimizer step as a pipeline over blocks and an executor. Knows no layer type and no communication."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.optim.sgd import sgd
from torch.profiler import record_function

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.gauss_newton import Objective
from kfac_optim.step.execution import Agreement, Executor, Parts, Refresher
from kfac_optim.step.scaling import by_group
from kfac_optim.step.step_size import Group, Proposal, Sized, StepSize
from kfac_optim.step.trust_region import inner_product, square_sum
from kfac_optim.utils.sharded_params import is_sharded, local
from kfac_optim.utils.validation import check_kfac_numbers


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Holds what one step did.

    Attributes:
        measures: of the step by name, device scalars over the preconditioned parameters; empty where there are none.
            `inner` is `Δᵀ∇`, `direction_square` `‖Δ‖²` and `gradient_square` `‖∇‖²`, all before a step size is chosen;
            the rest is what the step size tells.
        memory: what the step size remembers from now on, `[4]`.
        count: terms of the loss.
        unpreconditioned: names of blocks whose gradient went to SGD as it was, for want of an inverse.
    """

    measures: Mapping[str, Tensor]
    memory: Tensor
    count: LossCount
    unpreconditioned: tuple[str, ...]


def step(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Tensor, Any],
    blocks: Sequence[KFACBlock],
    window: CaptureWindow,
    executor: Executor,
    refresher: Refresher,
    agreement: Agreement,
    step_size: StepSize,
    objective: Objective | None,
    memory: Tensor,
    *,
    gradient_scale: Callable[[LossCount], float | Tensor],
    damps_by_unit: bool,
    nonfinite_limit: int | None,
    finite: Tensor | None = None,
) -> StepRecord:
    """Fold statistics, refresh what is due, precondition, bound the step and update all parameters.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state, for momentum buffers.
        blocks: the preconditioned part of the model.
        window: what was captured since the last step.
        executor: who does the work.
        refresher: when it recomputes inverses.
        agreement: what all workers know of this step.
        step_size: how far the step goes.
        objective: the loss of this step, where it is known; `check` was asked already.
        memory: what the step size remembers of earlier steps, `[4]`.
        gradient_scale: what the output gradients behind `G` are multiplied by; those of parameters are not.
        damps_by_unit: whether the damping is in the unit of the loss that the step size finds.
        nonfinite_limit: refused samples or failed refreshes in a row that are too many.
        finite: `[]` bool, whether the gradients are, where only the device knows: if not, parameters and momentum stay
            as they are. No block has taken statistics then, every momentum is there, and `fused` is on. None is yes.

    Raises:
        RuntimeError: what cannot be stepped (see `KFACOptimizer.step`), and nothing is changed then; or too many
            setbacks of one layer in a row.
        ValueError: a number of a param group is out of range, or groups disagree on `kl_clip`.
    """
    kl_clip = check(groups, blocks, step_size)
    trained = [param for group in groups for param in group["params"] if param.grad is not None]
    _follow_model(state, blocks)
    count = window.close()._replace(summed=agreement.summed)
    scale = gradient_scale(count)
    with record_function("kfac.fold"):
        for block in blocks:
            if block in agreement.sampled:
                block.fold(count, scale)
        executor.statistics.settle()
        if agreement.sampled and kl_clip is not None and damps_by_unit:
            unit = step_size.loss_unit(memory)
            for block in blocks:
                block.clock.use_unit(unit)
    with record_function("kfac.refresh"):
        collected = refresher.collect(blocks)
        refreshed = refresher.refresh([block for block in blocks if block.refresh_due()])
        for block in refreshed:
            block.drop_refresh()  # by now what is under way would be older
            # Until a sample was accepted there is nothing behind a refresh, and it does not count.
            if block.is_ready or executor.statistics.has_statistics(block):
                block.clock.note_refresh(block.damping)
        if nonfinite_limit is not None:
            _check_setbacks([*collected, *refreshed], executor, nonfinite_limit)
    proposal, measures, unpreconditioned = _precondition(
        groups, blocks, state, executor, agreement, kl_clip, count, objective, memory, finite
    )
    sized = _AS_IT_IS
    if proposal.covered or (objective is not None and trained):
        with record_function("kfac.step_size"):
            sized = step_size.size(proposal)
        if sized.memory is not None:
            before = memory.to(sized.memory.device, non_blocking=True)
            memory = sized.memory if finite is None else torch.where(finite, sized.memory, before)
    with record_function("kfac.update"):
        for group in groups:
            params = executor.gradients.owned([param for param in group["params"] if param.grad is not None])
            _sgd(group, params, sized, state, finite)
        executor.publish()
    for block in blocks:
        block.clock.advance()
    return StepRecord({**measures, **sized.measures}, memory, count, tuple(unpreconditioned))


_AS_IT_IS = Sized({}, lambda _: {}, {})


def check(groups: Sequence[Group], blocks: Sequence[KFACBlock], step_size: StepSize) -> float | None:
    """Refuse what cannot be stepped, before anything is changed; the `kl_clip` all groups agree on."""
    kl_clip = check_groups(groups, step_size)
    for block in blocks:
        for param, name in zip(block.params, block.param_names, strict=True):
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"kfac_optim: {name!r} has a {param.grad.layout} gradient; preconditioning needs "
                    f"a dense one. Make it dense, or list '{block.name}' in skip_layers."
                )
    return kl_clip


def check_groups(groups: Sequence[Group], step_size: StepSize) -> float | None:
    """Refuse numbers of param groups that do not go together; the `kl_clip` all groups agree on."""
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


def check_shards(group: Group, number: int, whole: object | None) -> None:
    """Refuse parameters that processes hold parts of, where a choice needs them whole.

    Args:
        group: a param group.
        number: of it.
        whole: the choice; None is none but those of the param group.

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


def _follow_model(state: MutableMapping[Tensor, Any], blocks: Sequence[KFACBlock]) -> None:
    """Take momentum and statistics to where the model was moved since the last step."""
    for param, held in state.items():
        buffer = held.get("momentum_buffer") if isinstance(held, dict) else None  # users keep notes of their own there
        if buffer is not None and buffer.device != param.device:
            held["momentum_buffer"] = buffer.to(param.device)
    for block in blocks:
        block.follow()


def _check_setbacks(blocks: Sequence[KFACBlock], executor: Executor, limit: int) -> None:
    """Raise where a layer has had too many in a row."""
    for block, (refused, failed) in zip(blocks, executor.statistics.setbacks(blocks), strict=True):
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
    groups: Sequence[dict[str, Any]],
    blocks: Sequence[KFACBlock],
    state: MutableMapping[Tensor, Any],
    executor: Executor,
    agreement: Agreement,
    kl_clip: float | None,
    count: LossCount,
    objective: Objective | None,
    memory: Tensor,
    finite: Tensor | None,
) -> tuple[Proposal, Mapping[str, Tensor], list[str]]:
    """Precondition the gradients; return them, their measures, and blocks whose gradient had no inverse to meet."""
    covered: list[KFACBlock] = []
    unpreconditioned: list[str] = []
    with record_function("kfac.precondition"):
        for block in blocks:
            if block not in agreement.graded:
                continue
            refused = any(use.is_refused() for use in block.uses) or block in agreement.unaccounted
            if block.is_ready and not refused:
                covered.append(block)
            # Without statistics because the loss did not use it: nothing to precondition, nothing to report.
            # Looking synchronises, for blocks that have no inverse yet.
            elif refused or _is_used(block):
                unpreconditioned.append(block.name)
        here = executor.gradients.gradients(covered)
        active, grads = [block for block, _ in here], [parts for _, parts in here]
        parts = executor.gradients.precondition(active, grads)
    products: list[tuple[Group, Tensor]] = []
    measures: dict[str, Tensor] = {}
    if covered:
        products, measures = _measure(covered, active, grads, parts, executor)
    proposal = Proposal(
        groups, state, covered, active, grads, parts, products, kl_clip, count, executor, objective, memory, finite
    )
    return proposal, measures, unpreconditioned


def _is_used(block: KFACBlock) -> bool:
    return any(
        param.grad is not None and (param.grad.is_meta or bool(local(param.grad).any())) for param in block.params
    )


def _measure(
    covered: Sequence[KFACBlock],
    blocks: Sequence[KFACBlock],
    grads: Sequence[Parts],
    parts: Sequence[Parts],
    executor: Executor,
) -> tuple[list[tuple[Group, Tensor]], dict[str, Tensor]]:
    """Return `Δᵀ∇` of each param group, as weight and bias may be of several, and the measures of a `StepRecord`."""
    device = covered[0].params[0].device
    # Of every group that has covered blocks, also where these are preconditioned by other workers.
    groups: dict[int, Group] = {id(group): group for block in covered for group in block.groups}
    directions, gradients = list(chain.from_iterable(parts)), list(chain.from_iterable(grads))
    pairs = zip((group for block in blocks for group in block.groups), directions, gradients, strict=True)
    found = {id(group): inner_product(lefts, rights, device) for group, lefts, rights in by_group(pairs)}
    nothing = inner_product([], [], device)
    sums = [found.get(key, nothing) for key in groups]
    sums += [square_sum(directions, device), square_sum(gradients, device)]
    *by_groups, direction_square, gradient_square = executor.gradients.sum_over_updaters(torch.stack(sums)).unbind()
    products = list(zip(groups.values(), by_groups, strict=True))
    measures = {
        "inner": torch.stack(by_groups).sum(),
        "direction_square": direction_square,
        "gradient_square": gradient_square,
    }
    return products, measures


def _sgd(
    group: Group,
    params: Sequence[nn.Parameter],
    sized: Sized,
    state: MutableMapping[Tensor, Any],
    finite: Tensor | None,
) -> None:
    """Take torch's own SGD step on the direction, or on the raw gradient where there is none."""
    numbers = {**group, **sized.sgd(group)}
    # Where weight decay is part of the curvature, it is in the direction already.
    decayed = {param for param in params if group["l2_in_curvature"] and param in sized.direction}
    undecayed = {**numbers, "weight_decay": 0.0}
    _update([param for param in params if param not in decayed], numbers, sized.direction, state, finite)
    _update([param for param in params if param in decayed], undecayed, sized.direction, state, finite)


def _update(
    params: Sequence[nn.Parameter],
    numbers: Mapping[str, Any],
    direction: Mapping[nn.Parameter, Tensor],
    state: MutableMapping[Tensor, Any],
    finite: Tensor | None,
) -> None:
    if not params:
        return
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
