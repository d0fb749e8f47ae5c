"""The training loop of every benchmark that compares optimizers: same weights and batches, another optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.data import Split

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps ``(outputs, targets) → []``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds losses and accuracies over whole splits after ``steps`` steps and ``seconds`` of training."""

    steps: int
    seconds: float
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_accuracy: float


@dataclass(slots=True)
class History:
    """Holds what a run has left.

    Attributes:
        batch_losses: loss of each mini-batch before its step.
        seconds: time of the training steps alone, by the clock of `train`; evaluation and observation are not counted.
        diverged: whether a loss was not finite, which ends the run.
        stopped: set by whoever observes the run to end it.
    """

    batch_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    diverged: bool = False
    stopped: bool = False

    @property
    def steps(self) -> int:
        return len(self.batch_losses)

    @property
    def highest_rise(self) -> float:
        """Return the highest mini-batch loss over the first one: 1 where training never got worse than it began."""
        # Not `max` alone: it is blind to a nan that is not the first.
        return math.inf if self.diverged else max(self.batch_losses) / self.batch_losses[0]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_function: LossFunction,
    *,
    period: int,
    observe: Callable[[History], None],
    average: Callable[[Tensor], Tensor] = lambda losses: losses,
    clock: Callable[[], float] = time.perf_counter,
) -> History:
    """Train on all of ``batches``, calling ``observe(history)`` after every ``period`` steps.

    A batch is ``(inputs [batch, ...], targets)``. The run ends early once a loss is not finite, or the observer stops
    it. Losses are averaged by ``average`` over the processes that train the model together, which so end alike.
    ``clock`` gives seconds: those that pass on the wall, unless told otherwise.
    """
    history = History()
    pending: list[Tensor] = []  # read back only when observed: no step waits for its own loss
    started = clock()
    for inputs, targets in batches:
        pending.append(_step(model, optimizer, inputs, targets, loss_function))
        if len(pending) == period:
            history.batch_losses += average(torch.stack(pending)).tolist()
            history.seconds += clock() - started
            pending.clear()
            if not all(map(math.isfinite, history.batch_losses[-period:])):
                history.diverged = True
                return history
            observe(history)
            if history.stopped:
                return history
            started = clock()
    if pending:
        history.batch_losses += average(torch.stack(pending)).tolist()
    history.seconds += clock() - started
    history.diverged = not all(map(math.isfinite, history.batch_losses))
    return history


def _step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, loss_function: LossFunction
) -> Tensor:
    """Return the batch's loss before the step, ``[]``. Optimizers that measure their own step need the closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return optimizer.step(closure).detach()  # type: ignore[arg-type, attr-defined, no-any-return]


@torch.no_grad()
def mean_over(model: nn.Module, split: Split, *functions: LossFunction, batch_size: int = 1024) -> list[float]:
    """Return each of ``functions``, means over examples, over a whole split; leaves the model in training mode."""
    model.eval()
    totals = [0.0] * len(functions)
    for inputs, targets in zip(
        torch.split(split.inputs, batch_size), torch.split(split.targets, batch_size), strict=True
    ):
        outputs = model(inputs)
        for number, function in enumerate(functions):
            totals[number] += function(outputs, targets).item() * len(targets)
    model.train()
    return [total / len(split) for total in totals]
