"""A step that is judged after it was taken: by the change of the loss on its examples, and taken back if need be."""

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.blocks.state_keys import MOMENTUM
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.fisher.gauss_newton import ForwardRecorder, KeptForward
from kfac_optim.fisher.objective import Objective
from kfac_optim.step.engine import StepRecord
from kfac_optim.step.execution import Executor
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.quadratic import reduction_ratio, rounding_of
from kfac_optim.step.reevaluation import Reevaluation
from kfac_optim.step.scaling import penalty
from kfac_optim.step.trust_region import inner_product
from kfac_optim.utils.validation import check_loss


class Trial:
    """Stands for a step that is about to be taken.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state, for momentum buffers.
        loss: the loss before the step, of this process's examples; a number or a tensor of one element.
        again: evaluates that loss at the parameters that the model has when it is asked.
        step: the number of the step.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: MutableMapping[Tensor, Any],
        loss: float | Tensor,
        again: Reevaluation,
        step: int,
    ) -> None:
        self.groups = groups
        self.again = again
        self.step = step
        self._state = state
        self._before = {
            param: param.detach().clone() for group in groups for param in group["params"] if param.grad is not None
        }
        self._penalty_before = self._penalty(self._before)
        self._rounding = rounding_of([*self._before, *([loss] if isinstance(loss, Tensor) else [])])
        self.loss = float(loss)

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """Give the parameters that the step moves."""
        return list(self._before)

    def rose(self, loss: float) -> bool:
        """Return whether the step raised the loss to what it is now, or made it a number that is not finite."""
        return not self._after(loss) <= self.loss + self._penalty_before

    def ratio(
        self, loss: float, objective: Objective, count: LossCount, predicted: float | None, executor: Executor
    ) -> float | None:
        """Return `ρ`: what the step did to the loss over what the quadratic model says that it does.

        Args:
            loss: the loss after the step.
            objective: the loss whose curvature before the step makes the model.
            count: terms of the loss.
            predicted: the change of the loss that the model predicts; None where nobody has computed it.
            executor: the executor of the step.
        """
        if predicted is None:
            predicted = self._predicted(objective, count, executor)
        before, after = self.loss + self._penalty_before, self._after(loss)
        return reduction_ratio(before, after, predicted, rounding=self._rounding)

    @torch.no_grad()
    def undo(self, blocks: Iterable[KFACBlock]) -> None:
        """Take the step back; momentum, which led into it, starts from zero, that of an inverse of `blocks` too."""
        for param, value in self._before.items():
            param.copy_(value)
            if param in self._state:
                self._state[param].pop(MOMENTUM, None)
        for block in blocks:
            block.state.forget_step()

    def _after(self, loss: float) -> float:
        return loss + self._penalty({param: param.detach() for param in self._before})

    def _predicted(self, objective: Objective, count: LossCount, executor: Executor) -> float:
        """Return `∇hᵀδ + ½ δᵀ (C + η) δ`."""
        step = {param: param.detach() - value for param, value in self._before.items()}
        device = next(iter(step)).device
        total = executor.mean_over_examples(objective.curvature(self._before, [step], count)).reshape(()).to(device) / 2
        for group in self.groups:
            params = [param for param in group["params"] if param in step]
            moved = [step[param] for param in params]
            total = total + inner_product(moved, [param.grad for param in params if param.grad is not None], device)
            if eta := l2(group):
                held = [self._before[param] for param in params]
                total = total + eta * (inner_product(moved, held, device) + inner_product(moved, moved, device) / 2)
        return float(total)

    def _penalty(self, values: Mapping[nn.Parameter, Tensor]) -> float:
        return penalty(self.groups, values)


@dataclass(slots=True, eq=False)
class Judge:
    """Sees what steps do to the loss, adapts the damping by it, and takes steps back.

    Attributes:
        rule: the user's choice.
        recorder: the recorder of the model's forwards.
        objective: the loss whose quadratic model is judged.
        executor: the executor of the steps: what it averages over processes, they all decide by.
        damps_steps: whether the step size uses the damping, beside the inverses.
        ratio: `ρ` of the last step that was judged; None where it said nothing.
        rejected: steps that were taken back.
    """

    rule: LevenbergMarquardt
    recorder: ForwardRecorder
    objective: Objective
    executor: Executor
    damps_steps: bool
    ratio: float | None = None
    rejected: int = 0

    def check_call(self, closure: object, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a step without a closure, and numbers that the rule does not go with."""
        self.rule.check(groups)
        own = [group["preconditioner_damping"] for group in groups]
        if not self.damps_steps and groups and None not in own:
            raise ValueError(
                f"kfac_optim: {self.rule} adapts damping, but the inverses take preconditioner_damping in its place "
                f"({', '.join(map(repr, own))} in the param groups), so that no step would change. Set "
                "preconditioner_damping to None, or pass step_size=QuadraticModel(), which uses both."
            )
        if closure is None:
            raise RuntimeError(
                f"kfac_optim: {self.rule} has to see what a step does to the loss: pass step() a closure that "
                "evaluates the model, calls backward() and returns the loss."
            )

    def check_loss(self, loss: object, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a closure that did not return the loss, and gradients that the rule does not go with."""
        self.rule.check_gradients(groups)
        if loss is None:
            raise RuntimeError(
                f"kfac_optim: the closure returned None, and {self.rule} has to see what a step does to the loss: "
                "return it from the closure."
            )
        check_loss(loss)

    def evaluate_again(self, trial: Trial, blocks: Iterable[KFACBlock]) -> float:
        """Return the loss at the present parameters, on the examples of the last evaluation; nothing else is changed.

        Raises:
            RuntimeError: the closure saw other examples than before. The step is taken back.
        """
        device = trial.params[0].device
        try:
            with self.recorder.set_aside() as before:  # as `zero_grad` in the closure drops what is kept
                loss = trial.again.loss()
                differ = float(not _same_inputs(before, self.recorder.kept))
            if float(self.executor.mean_over_examples(torch.tensor(differ, device=device))) > 0:
                raise RuntimeError(
                    "kfac_optim: LevenbergMarquardt evaluates the closure a second time, to see what the step did to "
                    "the loss, and the model was called with other inputs than the first time. Draw the batch before "
                    "step(), outside the closure; or do without it, if inputs are computed from the parameters and "
                    "detached. The step has been taken back."
                )
            return float(loss)
        except BaseException:
            trial.undo(blocks)
            raise

    def decide(self, trial: Trial, loss: float, record: StepRecord | None, blocks: Sequence[KFACBlock]) -> bool:
        """Adapt the damping by what the step did to the loss, which is now `loss`; or take the step back.

        Returns:
            Whether the step stays.
        """
        assert record is not None
        losses = torch.tensor([trial.loss, loss], dtype=torch.float64, device=next(iter(trial.params)).device)
        trial.loss, loss = self.executor.mean_over_examples(losses).tolist()
        rejected = self.rule.reject and trial.rose(loss)
        self.ratio = -math.inf if rejected else None
        if rejected:
            trial.undo(blocks)
            self.rejected += 1
            for block in blocks:
                if block.is_ready:
                    block.clock.call_for_refresh()
        elif self.rule.adapts_at(trial.step):
            predicted = record.measures.get("predicted_change")
            change = None if predicted is None else float(predicted)
            self.ratio = trial.ratio(loss, self.objective, record.count, change, self.executor)
        if rejected or self.rule.adapts_at(trial.step):
            for group in trial.groups:
                group["damping"] = self.rule.adapted(group["damping"], self.ratio)
        return not rejected


def _same_inputs(before: Sequence[KeptForward], after: Sequence[KeptForward]) -> bool:
    if len(before) != len(after):
        return False
    pairs = [(_data(one), _data(other)) for one, other in zip(before, after, strict=True)]
    return all(
        len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True)) for left, right in pairs
    )


def _data(forward: KeptForward) -> list[Tensor]:
    """Return the inputs that have no graph. The others were computed from parameters, and the step has moved them."""
    return [each for each in forward.inputs() if each.grad_fn is None]


def _same(left: Tensor, right: Tensor) -> bool:
    """Compare tensors; NaN equals NaN, as it may mark missing data."""
    if left is right:
        return True
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
