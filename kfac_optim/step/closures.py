"""The closure of a step: it is run once for the gradients, and again by the rules that look at the loss elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.gauss_newton import ForwardRecorder
from kfac_optim.step.earlier_gradient import EarlierGradient
from kfac_optim.step.engine import Groups, State
from kfac_optim.step.execution import Executor
from kfac_optim.step.gate import params_of
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.reevaluation import Reevaluation
from kfac_optim.step.step_size import ClosureLoss, StepSize
from kfac_optim.step.trial import Judge, Trial
from kfac_optim.utils.random_state import random_state
from kfac_optim.utils.validation import check_loss

Closure = Callable[[], Any]


class Evaluation(NamedTuple):
    """Holds what the closure of a step gave."""

    loss: Any = None
    """What it returned; None where there is no closure."""
    elsewhere: ClosureLoss | None = None
    """The loss at other parameters, for a step size that searches."""
    trial: Trial | None = None
    """The step that is to be judged, where one is."""


@dataclass(frozen=True, slots=True, eq=False)
class Closures:
    """Runs the closures of one optimizer's steps.

    Attributes:
        step_size: the step size, which may search by the closure.
        judge: sees what steps do to the loss, where the damping adapts to it.
        recorder: the recorder of the model's forwards, where a choice asks for the curvature of the loss.
        window: the window, which holds what is captured.
        binding: knows the model.
        executor: the executor of the steps.
    """

    step_size: StepSize
    judge: Judge | None
    recorder: ForwardRecorder | None
    window: CaptureWindow
    binding: ModelBinding
    executor: Executor

    def run(self, closure: Closure | None, groups: Groups, state: State) -> Evaluation:
        """Run the closure of a step.

        Args:
            closure: returns the loss; None is a step without one.
            groups: the optimizer's param groups.
            state: the optimizer's state, for momentum buffers.

        Raises:
            RuntimeError: a choice needs a closure, the loss that it returns, or gradients of this loss alone.
            NotImplementedError: a step size searches on several processes.
        """
        judge, step, searches = self.judge, self.window.step, self.step_size.needs_closure
        if judge is not None:
            judge.check_call(closure, groups)
        if closure is None:
            if searches:
                raise RuntimeError(
                    f"kfac_optim: {self.step_size!r} evaluates the loss at other parameters: pass step() a closure "
                    "that evaluates the model, calls backward() and returns the loss."
                )
            return Evaluation()
        params = params_of(groups)
        tries = searches or (judge is not None and judge.rule.tries(step))
        random = random_state(params) if tries else None
        loss = self._evaluate(closure, params)
        if judge is not None:
            judge.check_loss(loss, groups)
        if random is None:
            return Evaluation(loss)
        asking: object = self.step_size if judge is None else judge.rule
        if (model := self.binding.model) is None:
            raise RuntimeError(
                f"kfac_optim: {asking!r} evaluates the closure again, and no call of a module that holds the "
                "parameters was seen since the optimizer was built. Pass the model: KFACOptimizer(model, ...)."
            )
        several = self.executor.several
        again = Reevaluation(closure, random, self.window, model, tuple(params), several=several, backward=not searches)
        if searches:
            return Evaluation(loss, elsewhere=self._elsewhere(again, loss))
        graded = any(param.grad is not None for param in params)
        return Evaluation(loss, trial=Trial(groups, state, loss, again, step) if graded else None)

    def end(self) -> None:
        """Let go of what was kept of the model's forwards."""
        if self.recorder is not None:
            self.recorder.drop()

    def _evaluate(self, closure: Closure, params: Sequence[nn.Parameter]) -> Any:
        """Run the closure and return its loss.

        Raises:
            RuntimeError: the step is judged by this loss, and the gradients are not those of this loss alone.
        """
        judged_by: StepSize | LevenbergMarquardt | None = None if self.judge is None else self.judge.rule
        if self.step_size.needs_closure:
            judged_by = self.step_size
            self.window.tally.criterion.end()  # what is evaluated again begins here, whatever called it before
        if judged_by is not None:
            self.end()  # of forwards before, as of an attack on the inputs
        earlier = EarlierGradient(() if judged_by is None else params)
        with torch.enable_grad(), earlier:
            loss = closure()
        if earlier.was_added_to:
            raise RuntimeError(
                f"kfac_optim: {judged_by!r} judges the step by the loss that the closure returns, but the gradients "
                "are those of an earlier backward as well. Call zero_grad() in the closure and have it run all "
                "micro-batches of the step, or turn off accumulation in the tool that calls step()."
            )
        return loss

    def _elsewhere(self, again: Reevaluation, loss: Any) -> ClosureLoss:
        """Return what a step size is to know of the loss, for it to look at other parameters."""
        if loss is None:
            raise RuntimeError(
                f"kfac_optim: the closure returned None, and {self.step_size!r} has to know the loss: return it from "
                "the closure."
            )
        check_loss(loss)
        if self.executor.several:
            raise NotImplementedError(
                f"kfac_optim: {self.step_size!r} evaluates the loss by itself, which wrappers of several processes do "
                "not allow. Use step_size=AdaptiveTrustRegion()."
            )
        terms, calls = self.window.terms, self.window.tally.criterion.terms
        return ClosureLoss(float(loss), again, None if terms is None else partial(terms.changes, calls))
