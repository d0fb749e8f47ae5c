"""A step that is judged after it was taken: by the change of the loss on its examples, and taken back if need be."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks import l2
from kfac_optim.capture import CaptureWindow
from kfac_optim.loss_terms import LossCount
from kfac_optim.quadratic import reduction_ratio
from kfac_optim.replay import ForwardRecorder, KeptForward, Objective, RandomState
from kfac_optim.trust_region import inner_product


class Trial:
    """Begun before a step is taken.

    Args:
        groups: the optimizer's param groups.
        loss: before the step.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], loss: float) -> None:
        self._groups = groups
        self._before = {
            param: param.detach().clone() for group in groups for param in group["params"] if param.grad is not None
        }
        self._loss = loss + self._penalty(self._before)

    def rose(self, loss: float) -> bool:
        """Whether the step made the loss what it is now by raising it, or made it a number that is not finite."""
        return not self._after(loss) <= self._loss

    def ratio(self, loss: float, objective: Objective, count: LossCount, predicted: float | None) -> float | None:
        """`ρ`: what the step did to the loss over what the quadratic model says that it does.

        Args:
            loss: after the step.
            objective: whose curvature before the step makes the model.
            count: terms of the loss.
            predicted: by the model; None where nobody has computed it.
        """
        if predicted is None:
            predicted = self._predicted(objective, count)
        return reduction_ratio(self._loss, self._after(loss), predicted)

    def undo(self, state: MutableMapping[Tensor, Any]) -> None:
        """Take the step back; momentum, which led into it, starts anew."""
        for param, value in self._before.items():
            with torch.no_grad():
                param.copy_(value)
            if param in state:
                state[param].pop("momentum_buffer", None)

    def _after(self, loss: float) -> float:
        return loss + self._penalty({param: param.detach() for param in self._before})

    def _predicted(self, objective: Objective, count: LossCount) -> float:
        """`∇hᵀδ + ½ δᵀ (C + η) δ`."""
        step = {param: param.detach() - value for param, value in self._before.items()}
        device = next(iter(step)).device
        total = objective.curvature(self._before, [step], count).reshape(()).to(device) / 2
        for group in self._groups:
            params = [param for param in group["params"] if param in step]
            moved = [step[param] for param in params]
            total = total + inner_product(moved, [param.grad for param in params if param.grad is not None], device)
            if eta := l2(group):
                held = [self._before[param] for param in params]
                total = total + eta * (inner_product(moved, held, device) + inner_product(moved, moved, device) / 2)
        return float(total)

    def _penalty(self, values: Mapping[nn.Parameter, Tensor]) -> float:
        """`½ η ‖θ‖²`, where weight decay is part of the curvature."""
        total = 0.0
        for group in self._groups:
            if eta := l2(group):
                held = [values[param] for param in group["params"] if param in values]
                total += sum(float(value.double().square().sum()) for value in held) * eta / 2
        return total


def evaluate_again(
    closure: Callable[[], Any],
    window: CaptureWindow,
    recorder: ForwardRecorder,
    random: RandomState,
    model: nn.Module,
    params: Iterable[nn.Parameter],
) -> float:
    """The loss where the parameters stand now, on the examples of the last evaluation; nothing else is changed.

    Raises:
        RuntimeError: the closure saw other examples than before.
    """
    before, recorder.kept = recorder.kept, []
    held = {param: param.grad for param in {**dict.fromkeys(params), **dict.fromkeys(model.parameters())}}
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for param in held:
            param.grad = None
        with random.replayed(), window.muted(), torch.enable_grad():
            loss = closure()
        if not _same_inputs(before, recorder.kept):
            raise RuntimeError(
                "kfac_optim: LevenbergMarquardt evaluates the closure a second time, to see what the step did to the "
                "loss, and the model was called with other inputs than the first time. Draw the batch before step(), "
                "outside the closure."
            )
        return float(loss)
    finally:
        recorder.kept = before
        for param, grad in held.items():
            param.grad = grad
        for registered, old in buffers:  # a forward may change a buffer in place, or put another in its place
            registered.update(old)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _same_inputs(before: Sequence[KeptForward], after: Sequence[KeptForward]) -> bool:
    if len(before) != len(after):
        return False
    pairs = [(one.inputs(), other.inputs()) for one, other in zip(before, after, strict=True)]
    return all(
        len(left) == len(right) and all(a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True))
        for left, right in pairs
    )
