"""One optimizer step as a pipeline over blocks and an executor. Knows no layer type and no communication."""

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.blocks.block import SILENT_STEPS, KFACBlock
from kfac_optim.blocks.folding import fold_all
from kfac_optim.blocks.preconditioning import is_used
from kfac_optim.blocks.state_keys import UPDATED
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.objective import Objective
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Admission, Agreement, Executor, Parts
from kfac_optim.step.inner_step import sgd_step
from kfac_optim.step.refresher import Refresher
from kfac_optim.step.scalars import Scalar, scalars, total
from kfac_optim.step.scaling import by_group
from kfac_optim.step.step_size import ClosureLoss, Group, Proposal, Sized, StepSize
from kfac_optim.step.trust_region import inner_product, square_sum
from kfac_optim.utils.autograd import profiled
from kfac_optim.utils.joined_tensors import Joins, joined
from kfac_optim.utils.sharded_params import is_sharded
from kfac_optim.utils.validation import check_kfac_numbers

Blocks = Sequence[KFACBlock]
Groups = Sequence[dict[str, Any]]
State = MutableMapping[Tensor, Any]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Holds what one step did.

    Attributes:
        measures: of the step by name, numbers over the preconditioned parameters; empty where there are none.
            `inner` is `Δᵀ∇`, `direction_square` `‖Δ‖²` and `gradient_square` `‖∇‖²`, all before a step size is chosen,
            and left out where the step size preconditions itself;
            the rest is what the step size tells.
        memory: what the step size remembers from now on, `[4]`.
        count: terms of the loss.
        unpreconditioned: names of blocks whose gradient went to SGD as it was, for want of an inverse.
    """

    measures: Mapping[str, Scalar]
    memory: Tensor
    count: LossCount
    unpreconditioned: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Engine:
    """Takes the steps of one optimizer.

    Attributes:
        choices: the user's choices.
        window: what was captured since the last step.
        executor: who does the work.
        refresher: how refreshes that are due are carried out.
        objective: the loss of a step, where a choice asks for its curvature.
    """

    choices: Choices
    window: CaptureWindow
    executor: Executor
    refresher: Refresher
    objective: Objective | None

    def step(
        self,
        groups: Groups,
        state: State,
        blocks: Blocks,
        admission: Admission,
        memory: Tensor,
        closure: ClosureLoss | None = None,
    ) -> StepRecord:
        """Fold statistics, refresh what is due, precondition, bound the step and update all parameters.

        Args:
            groups: the optimizer's param groups.
            state: the optimizer's state, for momentum buffers.
            blocks: the preconditioned part of the model.
            admission: what all ranks know of the step. Where only the device knows whether the gradients are finite, no
                block has taken statistics, every momentum is there, and `fused` is on: then parameters and momentum
                stay as they are if a gradient is not.
            memory: what the step size remembers of earlier steps, `[4]`.
            closure: the loss of the step, where the step size needs it.

        Raises:
            RuntimeError: what cannot be stepped (see `KFACOptimizer.step`), and nothing is changed then; or too many
                setbacks of one layer in a row.
            ValueError: a number of a param group is out of range, or groups disagree on `kl_clip`.
        """
        step_size, executor, objective = self.choices.step_size, self.executor, self.objective
        agreement, finite = admission.agreement, admission.finite
        kl_clip = check(groups, blocks, step_size)
        by_rows = [block for block in blocks if block.inverse.takes_rows]
        if by_rows:
            kl_clip = None  # the curvature is exact, and its damping bounds the step
        trained = [param for group in groups for param in group["params"] if param.grad is not None]
        count = self.window.close()._replace(summed=agreement.summed)
        if objective is not None:
            objective.loss_scale = admission.loss_scale
        with profiled("kfac.fold"):
            sampled = [block for block in blocks if block in agreement.sampled]
            shares, is_sampled = executor.loss_shares(sampled, count)
            for share in shares:
                scale = self.choices.estimate.scale(share.terms, admission.loss_scale * share.ranks)
                fold_all(share.blocks, share.terms, scale, executor.statistics.tell_counts)
            executor.statistics.settle()
            if is_sampled and kl_clip is not None and self.choices.adapt_damping is None:
                unit = step_size.loss_unit(memory)
                for block in blocks:
                    block.clock.use_unit(unit)
        clocks = [(block.clock, copy.copy(block.clock)) for block in by_rows]
        with profiled("kfac.refresh"):
            self._refresh(blocks)
        with profiled("kfac.precondition"):
            graded = [block for block in blocks if block in agreement.graded]
            covered, unpreconditioned = _covered(graded, agreement)
            here = executor.gradients.gradients(covered)
            active, grads = [block for block, _ in here], [parts for _, parts in here]
            try:
                parts = executor.gradients.precondition(active, grads) if step_size.preconditions else grads
            except (RuntimeError, ValueError):  # of rows without their residuals, which are not seen before
                for clock, as_it_was in clocks:
                    vars(clock).update(vars(as_it_was))
                raise
        joins = admission.joins
        is_summed = bool(covered) or executor.gradients.apart
        # Of every group that has covered blocks, also where these are preconditioned by other workers.
        summed = groups if executor.gradients.apart else [group for block in covered for group in block.groups]
        products: list[tuple[Group, Scalar]] = []
        measures: dict[str, Scalar] = {}
        if is_summed and step_size.preconditions:
            device = (covered[0].params[0] if covered else memory).device
            products, measures = _measure(summed, device, active, grads, parts, executor, joins)
        products = _held_back(products, measures, parts)
        proposal = Proposal(
            *(groups, state, graded, covered, active, parts, products, kl_clip, count),
            *(executor, objective, memory, joins, finite, closure),
        )
        sized = _AS_IT_IS
        if (
            is_summed
            or executor.stages.several
            or (trained and (step_size.needs_objective or step_size.needs_closure or step_size.directs_all))
        ):
            with profiled("kfac.step_size"):
                try:
                    sized = step_size.size(proposal)
                except (
                    BaseException
                ):  # of the closure: the statistics are folded, and the step that they are of is over
                    for block in blocks:
                        block.state.end_step()
                        block.clock.advance()
                    raise
            for block in by_rows:
                block.state.end_step()
            if sized.memory is not None:
                before = memory.to(sized.memory.device, non_blocking=True)
                memory = sized.memory if finite is None else torch.where(finite, sized.memory, before)
        with profiled("kfac.update"):
            for group in groups:
                params = executor.gradients.owned([param for param in group["params"] if param.grad is not None])
                sgd_step(group, params, sized, state, finite)
            executor.publish()
        for block in blocks:
            if not block.is_ready and block not in agreement.sampled:
                block.silent += block.wants_statistics()
            block.clock.advance()
        return StepRecord({**measures, **sized.measures}, memory, count, tuple(unpreconditioned))

    def _refresh(self, blocks: Blocks) -> None:
        collected = self.refresher.collect(blocks)
        refreshed = self.refresher.refresh([block for block in blocks if block.refresh_due()])
        for block in refreshed:
            block.drop_refresh()  # by now what is under way would be older
            # Until a sample was accepted there is nothing behind a refresh, and it does not count.
            if block.is_ready or self.executor.statistics.has_statistics(block):
                block.clock.note_refresh(block.damping)
        if self.choices.nonfinite_limit is not None:
            _check_setbacks([*collected, *refreshed], self.executor, self.choices.nonfinite_limit)


_AS_IT_IS = Sized({}, lambda _: {}, {})


def check(groups: Sequence[Group], blocks: Blocks, step_size: StepSize) -> float | None:
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


def follow_model(state: State, blocks: Blocks) -> None:
    """Take momentum and statistics to where the model was moved since the last step.

    The sums of a step that were captured before the move are dropped.
    """
    for param, held in state.items():
        if isinstance(held, dict):  # users keep notes of their own there
            device = param.device
            for name in UPDATED:
                if name in held and isinstance(tensor := held[name], Tensor) and tensor.device != device:
                    held[name] = tensor.to(device)
    for block in blocks:
        block.follow()


def _check_setbacks(blocks: Blocks, executor: Executor, limit: int) -> None:
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


def _covered(graded: Blocks, agreement: Agreement) -> tuple[list[KFACBlock], list[str]]:
    """Return the blocks that are preconditioned, and the names of those whose gradient has no inverse to meet."""
    covered: list[KFACBlock] = []
    unpreconditioned: list[str] = []
    for block in graded:
        refused = any(use.is_refused() for use in block.uses) or block in agreement.unaccounted
        if block.is_ready and not refused:
            covered.append(block)
        # Without statistics because the loss did not use it: nothing to precondition, nothing to report.
        # Looking synchronises, for blocks that have no inverse yet.
        elif refused or (is_used(block) if agreement.used is None else block in agreement.used):
            if block.silent < SILENT_STEPS:
                unpreconditioned.append(block.name)
            block.silent = 0  # the loss uses it after all
    return covered, unpreconditioned


def _held_back(
    products: list[tuple[Group, Scalar]], measures: Mapping[str, Scalar], parts: Sequence[Parts]
) -> list[tuple[Group, Scalar]]:
    """Return the products; where the square of the direction overflows on the host, it is a direction of zero."""
    square = measures.get("direction_square", 0.0)
    if isinstance(square, Tensor) or math.isfinite(square):
        return products
    for part in (each for of_block in parts for each in of_block):
        part.zero_()
    return [(group, 0.0) for group, _ in products]


def _measure(
    summed: Iterable[Group],
    device: torch.device,
    blocks: Blocks,
    grads: Sequence[Parts],
    parts: Sequence[Parts],
    executor: Executor,
    joins: Joins,
) -> tuple[list[tuple[Group, Scalar]], dict[str, Scalar]]:
    """Return `Δᵀ∇` of each param group, as weight and bias may be of several, and the measures of a `StepRecord`.

    Args:
        summed: the param groups, the same on all ranks that sum; some may come more than once.
        device: where sums are made.
        blocks: whose direction is known here.
        grads: the gradients of these.
        parts: their directions.
        executor: sums over ranks.
        joins: joins gradients.
    """
    groups: dict[int, Group] = {id(group): group for group in summed}
    pairs = [
        pair
        for block, left, right in zip(blocks, parts, grads, strict=True)
        if executor.gradients.makes_for_sums(block)
        for pair in zip(block.groups, left, right, strict=True)
    ]
    found: dict[int, Tensor] = {}
    directions: list[Tensor] = []
    gradients: list[Tensor] = []
    for group, lefts, rights in by_group(pairs):
        lefts, rights = joined(lefts), joins.of(rights)
        found[id(group)] = inner_product(lefts, rights, device)
        directions += lefts
        gradients += rights
    sums = [found[key] if key in found else inner_product([], [], device) for key in groups]
    sums += [square_sum(directions, device), square_sum(gradients, device)]
    *by_groups, direction_square, gradient_square = scalars(executor.gradients.sum_over_updaters(torch.stack(sums)))
    products = list(zip(groups.values(), by_groups, strict=True))
    squares = {"direction_square": direction_square, "gradient_square": gradient_square}
    return products, {"inner": total(by_groups), **squares}
