"""One optimizer step as a pipeline over blocks and an executor. Knows no layer type and no communication."""

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.blocks.block import SILENT_STEPS, KFACBlock
from kfac_optim.blocks.folding import fold_all
from kfac_optim.blocks.preconditioning import is_used
from kfac_optim.blocks.selection import holders
from kfac_optim.blocks.state_keys import UPDATED
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.second_moments import on_host
from kfac_optim.fisher.objective import Objective
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Admission, Agreement, Executor, Parts
from kfac_optim.step.group_checks import check
from kfac_optim.step.inner_step import sgd_step
from kfac_optim.step.refresher import Refresher
from kfac_optim.step.scalars import Scalar, scalars, total
from kfac_optim.step.scaling import by_group
from kfac_optim.step.step_size import ClosureLoss, Group, Proposal, Sized
from kfac_optim.step.trust_region import inner_product, square_sum
from kfac_optim.utils.autograd import profiled
from kfac_optim.utils.joined_tensors import Joins, joined
from kfac_optim.utils.streams import brought

Blocks = Sequence[KFACBlock]
Groups = Sequence[dict[str, Any]]
State = MutableMapping[Tensor, Any]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Holds what one step did.

    Attributes:
        measures: numbers of the step by name, over the preconditioned parameters; empty if there are none.
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


class _Directions(NamedTuple):
    """Holds the preconditioned gradients of one step.

    Attributes:
        graded: blocks that have a gradient on some rank.
        covered: those of them whose gradients are preconditioned, by whatever worker.
        blocks: the covered ones whose direction is known here.
        grads: the gradients of these.
        parts: their directions.
        unpreconditioned: as of `StepRecord`.
    """

    graded: Blocks
    covered: Blocks
    blocks: Blocks
    grads: Sequence[Parts]
    parts: Sequence[Parts]
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
        agreement, finite, objective = admission.agreement, admission.finite, self.objective
        kl_clip = check(groups, blocks, self.choices.step_size)
        by_rows = [block for block in blocks if block.inverse.takes_rows]
        if by_rows:
            kl_clip = None  # the curvature is exact, and its damping bounds the step
        count = self.window.close()._replace(summed=agreement.summed)
        if objective is not None:
            objective.loss_scale = admission.loss_scale
        is_sampled = self._fold(blocks, count, admission)
        if is_sampled:
            follows = kl_clip is not None and self.choices.adapt_damping is None
            unit = self.choices.step_size.loss_unit(memory) if follows else 1.0
            for block in blocks:
                block.clock.use_unit(unit)
        clocks = [(block.clock, copy.copy(block.clock)) for block in by_rows]
        self._refresh(blocks)
        try:
            directions = self._precondition(blocks, agreement)
        except (RuntimeError, ValueError):  # of rows without their residuals, which are not seen before
            for clock, as_it_was in clocks:
                vars(clock).update(vars(as_it_was))
            raise
        products, measures = self._measure(groups, directions, memory.device, admission.joins)
        proposal = Proposal(
            groups=groups,
            state=state,
            graded=directions.graded,
            covered=directions.covered,
            blocks=directions.blocks,
            parts=directions.parts,
            products=products,
            kl_clip=kl_clip,
            count=count,
            executor=self.executor,
            objective=objective,
            memory=memory,
            joins=admission.joins,
            finite=finite,
            closure=closure,
        )
        try:
            sized = self._size(proposal)
        except BaseException:  # of the closure: the statistics are folded, and the step that they are of is over
            for block in blocks:
                block.state.end_step()
                block.clock.advance()
            raise
        for block in by_rows:
            block.state.end_step()
        self._update(groups, state, sized, finite)
        for block in blocks:
            if block not in agreement.sampled:
                if not block.is_ready:
                    block.silent += block.wants_statistics()
                elif block.clock.missed:
                    block.wait_on()
                elif block in agreement.graded and block.is_overdue() and _may_be_used(block, agreement):
                    block.note_missed()
            block.clock.advance()
        remembered = _remembered(memory, sized.memory, finite)
        return StepRecord({**measures, **sized.measures}, remembered, count, directions.unpreconditioned)

    def _fold(self, blocks: Blocks, count: LossCount, admission: Admission) -> bool:
        """Take the statistics of this step into the averages; return whether any rank took some."""
        with profiled("kfac.fold"):
            sampled = [block for block in blocks if block in admission.agreement.sampled]
            shares, is_sampled = self.executor.loss_shares(sampled, count)
            for share in shares:
                scale = self.choices.estimate.scale(share.terms, admission.loss_scale * share.ranks)
                fold_all(share.blocks, share.terms, scale, self.executor.statistics.tell_counts)
            self.executor.statistics.settle()
        return is_sampled

    def _refresh(self, blocks: Blocks) -> None:
        """Recompute the inverses that are due, and take over those that were computed in the background."""
        with profiled("kfac.refresh"):
            collected = self.refresher.collect(blocks)
            refreshed = self.refresher.refresh([block for block in blocks if block.refresh_due()])
            for block in refreshed:
                block.drop_refresh()  # by now what is under way would be older
                # Until a sample was accepted there is nothing behind a refresh, and it does not count.
                if block.is_ready or self.executor.statistics.has_statistics(block):
                    block.clock.note_refresh(block.damping)
            if self.choices.nonfinite_limit is not None:
                _check_setbacks([*collected, *refreshed], self.executor, self.choices.nonfinite_limit)

    def _precondition(self, blocks: Blocks, agreement: Agreement) -> _Directions:
        """Return the preconditioned gradients; those as they are where the step size preconditions itself."""
        with profiled("kfac.precondition"):
            graded = [block for block in blocks if block in agreement.graded]
            covered, unpreconditioned = _covered(graded, agreement)
            here = self.executor.gradients.gradients(covered)
            active, grads = [block for block, _ in here], [parts for _, parts in here]
            parts: Sequence[Parts] = grads
            if self.choices.step_size.preconditions:
                parts = self.executor.gradients.precondition(active, grads)
        return _Directions(graded, covered, active, grads, parts, tuple(unpreconditioned))

    def _measure(
        self, groups: Groups, directions: _Directions, device: torch.device, joins: Joins
    ) -> tuple[list[tuple[Group, Scalar]], dict[str, Scalar]]:
        """Return `Δᵀ∇` of each param group and the measures of a `StepRecord`; both are empty without a direction.

        Args:
            groups: all param groups.
            directions: of this step. They are set to zero where their square overflows on the host.
            device: where sums are made if no block has a direction.
            joins: joins gradients.
        """
        covered, apart = directions.covered, self.executor.gradients.apart
        if not (self.choices.step_size.preconditions and (covered or apart)):
            return [], {}
        # Of every group that has covered blocks, also where these are preconditioned by other workers.
        summed = groups if apart else [group for block in covered for group in block.groups]
        device = covered[0].params[0].device if covered else device
        products, measures = _products(summed, device, directions, self.executor, joins)
        square = measures["direction_square"]
        if not isinstance(square, Tensor) and not math.isfinite(square):
            for part in (each for of_block in directions.parts for each in of_block):
                part.zero_()
            products = [(group, 0.0) for group, _ in products]
        return products, measures

    def _size(self, proposal: Proposal) -> Sized:
        """Ask the step size for the step; without a direction, where it needs none, parameters follow gradients."""
        step_size, executor = self.choices.step_size, self.executor
        asked = bool(proposal.covered) or executor.gradients.apart or executor.stages.several
        if not asked and (step_size.needs_objective or step_size.needs_closure or step_size.directs_all):
            asked = any(param.grad is not None for group in proposal.groups for param in group["params"])
        if not asked:
            return _AS_IT_IS
        with profiled("kfac.step_size"):
            return step_size.size(proposal)

    def _update(self, groups: Groups, state: State, sized: Sized, finite: Tensor | None) -> None:
        """Take the step, and share parameters with the ranks that did not update them."""
        with profiled("kfac.update"):
            for group in groups:
                trained = [param for param in group["params"] if param.grad is not None]
                sgd_step(group, self.executor.gradients.owned(trained), sized, state, finite)
            self.executor.publish()


_AS_IT_IS = Sized({}, {})


def follow_model(state: State, blocks: Blocks) -> None:
    """Take momentum and statistics to where the model was moved since the last step.

    The sums of a step that were captured before the move are dropped.
    """
    for param, held in state.items():
        if isinstance(param, Tensor) and isinstance(held, dict):  # users keep notes of their own there
            device = param.device
            for name in UPDATED:
                if name in held and isinstance(tensor := held[name], Tensor) and tensor.device != device:
                    held[name] = tensor.to(device)
    for block in blocks:
        block.follow()


def _check_setbacks(blocks: Blocks, executor: Executor, limit: int) -> None:
    """Raise if a layer's statistics were refused, or its refresh failed, too many times in a row."""
    for block, (refused, failed) in zip(blocks, executor.statistics.setbacks(blocks), strict=True):
        if refused >= limit:
            raise RuntimeError(
                f"kfac_optim: the statistics of layer {block.name!r} were not finite {refused} times in a row "
                f"(nonfinite_limit={limit}). Look for inputs or output gradients that overflow {block.dtype} when they "
                f"are squared: lower the loss scale or normalise the input, pass factor_dtype=torch.float64, or pass "
                f"skip_layers={holders(block.param_names)}. Where you call set_loss_terms(n), see "
                "that n is above 0."
            )
        if failed >= limit:
            raise RuntimeError(
                f"kfac_optim: the inverse of layer {block.name!r} could not be computed {failed} times in a row "
                f"(nonfinite_limit={limit}). Raise damping, pass factor_dtype=torch.float64, or pass "
                f"skip_layers={holders(block.param_names)}."
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
            if not refused and block.is_overdue():
                block.note_missed()
    return covered, unpreconditioned


def _may_be_used(block: KFACBlock, agreement: Agreement) -> bool:
    """Return whether the loss may have used a block whose calls can be captured.

    Gradients are looked at where one process has all of them on the host; elsewhere each counts as not zero.
    """
    if block in agreement.unaccounted or any(use.is_refused() for use in block.uses):
        return False
    return agreement.used is not None or not on_host(block.params[0]) or is_used(block)


def _products(
    summed: Iterable[Group], device: torch.device, directions: _Directions, executor: Executor, joins: Joins
) -> tuple[list[tuple[Group, Scalar]], dict[str, Scalar]]:
    """Return `Δᵀ∇` of each param group, as weight and bias may be of several, and the measures of a `StepRecord`.

    Args:
        summed: the param groups, the same on all ranks that sum; some may come more than once.
        device: where sums are made.
        directions: those that are known here.
        executor: sums over ranks.
        joins: joins gradients.
    """
    groups: dict[int, Group] = {id(group): group for group in summed}
    pairs = [
        pair
        for block, left, right in zip(directions.blocks, directions.parts, directions.grads, strict=True)
        if executor.gradients.makes_for_sums(block)
        for pair in zip(block.groups, left, right, strict=True)
    ]
    found: dict[int, Tensor] = {}
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    for group, left, right in by_group(pairs):
        left, right = joined(left), joins.of(right)
        found[id(group)] = inner_product(left, right, device)
        lefts += left
        rights += right
    sums = [found[key] if key in found else inner_product([], [], device) for key in groups]
    sums += [square_sum(lefts, device), square_sum(rights, device)]
    *by_groups, direction_square, gradient_square = scalars(executor.gradients.sum_over_updaters(torch.stack(sums)))
    products = list(zip(groups.values(), by_groups, strict=True))
    squares = {"direction_square": direction_square, "gradient_square": gradient_square}
    return products, {"inner": total(by_groups), **squares}


def _remembered(before: Tensor, after: Tensor | None, finite: Tensor | None) -> Tensor:
    """Return what a step size remembers: what it said, if it said anything and the step is taken."""
    if after is None:
        return before
    return after if finite is None else torch.where(finite, after, brought(before, after.device))
