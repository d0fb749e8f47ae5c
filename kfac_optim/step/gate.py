"""The gate before a step: refuse bad input, unscale gradients, let all workers agree, and decide if a step is taken."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.blocks.replaced_params import refuse_replaced
from kfac_optim.blocks.state_keys import UPDATED
from kfac_optim.capture import gradient_check
from kfac_optim.capture.scale_probe import ScaleChange
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.objective import Objective
from kfac_optim.step import group_checks
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Admission, Agreement, Executor, Trained
from kfac_optim.step.loss_scale import LossScale, ScalerSource, read_loss_scale, spread_overflow, unscale
from kfac_optim.step.skipped_steps import SkippedSteps, fused_kernels_look
from kfac_optim.step.user_warnings import UserWarnings
from kfac_optim.utils.joined_tensors import Joins
from kfac_optim.utils.precision import all_finite, finite_on_device
from kfac_optim.utils.sharded_params import local

Gradients = Mapping[nn.Parameter, Tensor]
"""`.grad` of each parameter that has one."""


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of all param groups, in their order."""
    return [param for group in groups for param in group["params"]]


def group_of(groups: Iterable[dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the param group of each parameter."""
    return {param: group for group in groups for param in group["params"]}


def names_of(binding: ModelBinding, groups: Iterable[Mapping[str, Any]]) -> dict[nn.Parameter, str]:
    """Return the fully qualified names of parameters: as the model has them, or else as the groups were given them."""
    names = binding.names()
    for group in groups:  # torch keeps the names of named parameters there
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            names.setdefault(param, name)
    return names


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """Decides whether a step is taken. A step that is refused by an error leaves everything as it was.

    Attributes:
        choices: the user's choices.
        window: holds what was captured since the last step.
        binding: knows the blocks and the model.
        executor: lets all workers agree.
        objective: the loss of the step, if a choice evaluates its curvature.
        skipped: counts the steps that are not taken.
        scaler: knows the `GradScaler` that the user has named.
        warnings: tells the user what was noticed.
    """

    choices: Choices
    window: CaptureWindow
    binding: ModelBinding
    executor: Executor
    objective: Objective | None
    skipped: SkippedSteps
    scaler: ScalerSource
    warnings: UserWarnings

    def admit(self, optimizer: Optimizer, *, judged: bool, is_first: bool) -> Admission | None:
        """Prepare the step of an optimizer.

        Args:
            optimizer: the optimizer, with its groups and state, and where `GradScaler` leaves its findings.
            judged: whether the step is judged after it was taken.
            is_first: whether no step was taken before.

        Returns:
            None if a gradient is not finite: then the step is skipped, and only counts have changed.

        Raises:
            RuntimeError: the step cannot be taken, or too many steps in a row were skipped.
            ValueError: a number of a param group is out of range.
        """
        groups = optimizer.param_groups
        params = params_of(groups)
        gradients = {param: param.grad for param in params if param.grad is not None}
        self._settle_model(params)
        if is_first or not gradients:
            refuse_replaced(self.binding.model, params, self.binding.coverage)
        if self.executor.several and self.binding.model is None and not gradients:
            self.warnings.no_gradients()
        if self.objective is not None and gradients and (judged or self.choices.step_size.needs_objective):
            self.objective.check(gradients, before_step=self.choices.step_size.needs_objective)
        self.window.drop_stale()
        _follow_model(optimizer.state, self.binding.coverage.blocks)
        self.binding.sum_rows()
        gradient_check.conclude(block.check for block in self.binding.coverage.blocks)
        handed, scale = "found_inf" in optimizer.__dict__, self._loss_scale(optimizer.__dict__)
        if scale.in_gradients:
            group_checks.check(groups, self.binding.coverage.blocks, self.choices.step_size)
            unscale(gradients.values(), scale.factor)
        self.window.scaled |= scale.factor != 1
        finite, joins = None, Joins()
        if not handed and scale.factor == 1 and self._may_defer(groups, gradients, optimizer.state):
            finite = finite_on_device(list(gradients.values()))
        else:
            self.skipped.look()
        names = partial(names_of, self.binding, groups)
        parts = [local(gradient) for gradient in gradients.values()]
        is_finite = finite is not None or (not scale.overflowed and all_finite(parts, joins))
        kl_clip = next((group["kl_clip"] for group in groups), None)
        device = next((param.device for param in params), torch.device("cpu"))
        here = not is_finite
        stages, tally = self.executor.stages, self.window.tally
        is_finite, summed, terms = stages.agree(
            finite=is_finite,
            summed=tally.summed(),
            terms=tally.told(),
            kl_clip=kl_clip,
            step_size=self.choices.step_size,
            device=device,
        )
        if not stages.is_last:
            tally.take(terms)
            self.warnings.untold_terms(tally.counted(), self.window.rule)
        agreement = self.executor.agree(
            Trained(self.binding.coverage.blocks, params, names),
            finite=is_finite,
            summed=summed,
            rescaled=scale.in_gradients,
            counted=None if self.window.estimate is not None else tally.counted(),
        )
        checkpoint.warn_of_missed(agreement.restarted)
        if not agreement.finite:
            if handed and (scaler := self.scaler.find()) is not None:
                spread_overflow(scaler, optimizer)
            self.window.abandon()
            self.skipped.skip()
            self.skipped.check_limit(self.choices.nonfinite_limit, gradients, names, here=here)
            return None
        if finite is None:
            self.skipped.take()
        else:
            self.skipped.defer(finite)
        # Between ranks gradients have been averaged since.
        return Admission(agreement, scale.factor, finite, Joins() if self.executor.several else joins)

    def prepare_state(self, optimizer: Optimizer) -> Agreement:
        """Let all workers agree on which keeps what, for a step that asks for the state alone; see `new_state`."""
        params = params_of(optimizer.param_groups)
        self._settle_model(params)
        trained = Trained(self.binding.coverage.blocks, params, partial(names_of, self.binding, optimizer.param_groups))
        return self.executor.agree_on_state(trained)

    def _settle_model(self, params: Sequence[nn.Parameter]) -> None:
        """Take in what the forwards have shown of the model, and leave to SGD what is not measured."""
        if self.binding.settle():
            self.executor.attach(self.binding.model)
            self.warnings.coverage(self.binding)
        if self.warnings.unread:
            self.warnings.unread_layers(self.binding.coverage.blocks)
        for reason in self.binding.exclude_unmeasured():
            self.warnings.unmeasured(reason)
        self.executor.check(self.binding.coverage.blocks, params)

    def _loss_scale(self, handed: Mapping[str, Any]) -> LossScale:
        """Return the scale of this step's loss, and with it of the output gradients behind `G`.

        Args:
            handed: attributes of the optimizer, where `GradScaler` leaves what it found.
        """
        blocks = self.binding.coverage.blocks
        pending = any(block.has_pending() for block in blocks)
        pending |= self.objective is not None and self.objective.is_hooked
        scale = read_loss_scale(handed, self.scaler.find, measured=pending)
        if scale is None:
            found = ScaleChange()
            if pending:
                found = self.window.probe.measure(min((block.clock.gradient_scale for block in blocks), default=1.0))
                for block in blocks:
                    block.clock.gradient_scale = found.known
            self.warnings.unknown_scale(found)
            scale = LossScale(1 / found.scale)
        self.window.probe.end()
        return scale

    def _may_defer(self, groups: Sequence[Mapping[str, Any]], gradients: Gradients, state: Mapping[Any, Any]) -> bool:
        """Return whether this step need not wait for an accelerator to say that the gradients are finite.

        That is so if the step changes nothing but parameters and momentum, and torch's fused kernels change them, as
        these kernels look at the gradients themselves. Too many such steps in a row would put off the error that
        `nonfinite_limit` asks for.
        """
        limit = self.choices.nonfinite_limit
        return (
            not (self.executor.several or self.executor.stages.several)
            and self.objective is None
            and (limit is None or self.skipped.deferred < limit)
            and fused_kernels_look(groups, gradients, state)
            and not any(block.has_pending() for block in self.binding.coverage.blocks)
        )


def _follow_model(state: MutableMapping[Tensor, Any], blocks: Sequence[KFACBlock]) -> None:
    """Take momentum and statistics to where the model was moved since the last step.

    The sums of a step that were captured before the move are dropped.
    """
    for param, held in state.items():
        if isinstance(param, Tensor) and isinstance(held, dict):  # users keep notes of their own there
            device = param.device
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and tensor.device != device and name in UPDATED:
                    held[name] = tensor.to(device)
    for block in blocks:
        block.follow()
