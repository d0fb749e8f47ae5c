"""One optimizer step as a pipeline over blocks and an executor. Knows no layer type and no communication."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.folding import fold_all
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.objective import Objective
from kfac_optim.step.choices import Choices
from kfac_optim.step.directions import measure, precondition
from kfac_optim.step.execution import Admission, Executor
from kfac_optim.step.group_checks import check
from kfac_optim.step.inner_step import sgd_step
from kfac_optim.step.refresher import Refresher
from kfac_optim.step.scalars import Scalar
from kfac_optim.step.setbacks import check_setbacks
from kfac_optim.step.step_size import ClosureLoss, Proposal, Sized
from kfac_optim.step.turns import pass_step
from kfac_optim.utils.autograd import profiled
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
            and left out where the step size preconditions itself; `bounded_square` is the part of `direction_square`
            that the trust region scales, left out where that is all of it. The rest is what the step size tells.
        memory: what the step size remembers from now on, `[4]`.
        count: terms of the loss.
        unpreconditioned: names of blocks whose gradient went to SGD as it was, for want of an inverse.
        stale: names of blocks that the loss uses, and whose statistics were waited for in vain.
    """

    measures: Mapping[str, Scalar]
    memory: Tensor
    count: LossCount
    unpreconditioned: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Engine:
    """Takes the steps of one optimizer.

    Attributes:
        choices: the user's choices.
        window: what was captured since the last step.
        executor: the executor, which does the work.
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
        bounded = [block for block in blocks if not block.inverse.takes_rows] if by_rows else blocks
        if by_rows and not (bounded and self.choices.step_size.bounds_steps):
            kl_clip = None  # the curvature is exact, and its damping bounds the step
        count = self.window.close()._replace(summed=agreement.summed)
        if objective is not None:
            objective.loss_scale = admission.loss_scale
        is_sampled = self.executor.stages.any(self._fold(blocks, count, admission))
        if is_sampled:
            follows = kl_clip is not None and self.choices.adapt_damping is None
            unit = self.choices.step_size.loss_unit(memory) if follows else 1.0
            for block in bounded:
                block.clock.use_unit(unit)
        clocks = [(block.clock, copy.copy(block.clock)) for block in by_rows]
        self._refresh(blocks)
        try:
            directions = precondition(blocks, agreement, self.executor, self.choices.step_size)
        except (RuntimeError, ValueError):  # of rows without their residuals, which are not seen before
            for clock, as_it_was in clocks:
                vars(clock).update(vars(as_it_was))
            raise
        products, measures = measure(
            groups, directions, memory.device, admission.joins, self.executor, self.choices.step_size
        )
        exact = directions.of(by_rows) if by_rows and kl_clip is not None else None
        if exact is not None:  # the trust region is one of the others
            directions = directions.of(bounded)
            products, of_bounded = measure(
                groups, directions, memory.device, admission.joins, self.executor, self.choices.step_size
            )
            if measures:
                measures["bounded_square"] = of_bounded.get("direction_square", 0.0)
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
        if exact is not None:
            by_block = dict(zip(exact.blocks, exact.parts, strict=True))
            others = self.executor.gradients.direction(by_block, exact.covered)
            sized = replace(sized, direction={**sized.direction, **others})
        for block in by_rows:
            block.state.end_step()
        self._update(groups, state, sized, finite)
        stale = pass_step(blocks, agreement)
        remembered = _remembered(memory, sized.memory, finite)
        return StepRecord({**measures, **sized.measures}, remembered, count, directions.unpreconditioned, tuple(stale))

    def _fold(self, blocks: Blocks, count: LossCount, admission: Admission) -> bool:
        """Take the statistics of this step into the averages; return whether any rank took some."""
        with profiled("kfac.fold"):
            sampled = [block for block in blocks if block in admission.agreement.sampled]
            for block in blocks:
                if block.joint and block not in admission.agreement.sampled:
                    block.joint.clear()  # no gradient came to these rows, which are not those of a later step
            shares, is_sampled = self.executor.loss_shares(sampled, count)
            for share in shares:
                scale = self.choices.estimate.scale(share.terms, admission.loss_scale * share.scale)
                fold_all(share.blocks, share.terms, scale, self.executor.statistics.tell_counts)
            self.executor.statistics.settle()
        return is_sampled

    def _refresh(self, blocks: Blocks) -> None:
        """Recompute the inverses that are due, and take over those that were computed in the background."""
        with profiled("kfac.refresh"):
            collected = self.refresher.collect(blocks)
            refreshed = self.refresher.refresh([block for block in blocks if block.refresh_due()])
            for block in refreshed:
                block.under_way = None  # by now what is under way would be older
                # Until a sample was accepted there is nothing behind a refresh, and it does not count.
                if block.is_ready or self.executor.statistics.has_statistics(block):
                    block.clock.note_refresh(block.damping)
            if self.choices.nonfinite_limit is not None:
                check_setbacks([*collected, *refreshed], self.executor, self.choices.nonfinite_limit)

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


def _remembered(before: Tensor, after: Tensor | None, finite: Tensor | None) -> Tensor:
    """Return what a step size remembers: what it said, if it said anything and the step is taken."""
    if after is None:
        return before
    return after if finite is None else torch.where(finite, after, brought(before, after.device))
