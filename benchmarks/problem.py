"""What optimizers are compared on, as a type: data, model, loss, batches, steps, and the measure that they race for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from torch import nn

from benchmarks.examples import Examples
from benchmarks.training import LossFunction
from kfac_optim import Estimate, LossTerms


class Aim(Enum):
    """Says which measure a target is set for. Both are means, and the lower the better."""

    TRAINING = "training"
    VALIDATION = "validation"


class Decay(Enum):
    """Says how the learning rate decays over a run, of all optimizers alike."""

    NONE = "none"
    COSINE = "cosine"
    """Falls to zero at the last step. How many steps that are is then part of every search space, as ``horizon``."""

    def factor(self, part: float) -> float:
        """Return the factor of the learning rate after ``part`` of the run, in [0, 1]."""
        return 1.0 if self is Decay.NONE else 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True, slots=True)
class FixedBatch:
    size: int

    def sizes(self, examples: int) -> Iterator[int]:
        return itertools.repeat(self.size)

    def __str__(self) -> str:
        return str(self.size)


@dataclass(frozen=True, slots=True)
class GrowingBatch:
    """Grows from ``first`` to all examples in ``steps`` steps, exponentially (Martens & Grosse 2015, section 13)."""

    first: int
    steps: int

    def sizes(self, examples: int) -> Iterator[int]:
        for step in itertools.count():
            grown = self.first * (examples / self.first) ** (step / (self.steps - 1))
            yield min(round(grown), examples)

    def __str__(self) -> str:
        return f"{self.first}, growing to all in {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Problem:
    """Says what to train, and how it is measured.

    Attributes:
        title: what it is, in words.
        folder: the name of its data's folder under ``--data-dir``; None where it reads none.
        load: ``(folder or None) → examples``.
        model: ``(outputs) → network``, initialised.
        small_model: a small one of the same kind, for ``--quick`` and the tests.
        loss: trained on, and the training measure; ``terms`` terms for each example and position are summed in it.
        score: the validation measure.
        units: the units of the two measures, in words, ``(training, validation)``.
        loss_terms: what the loss's mean runs over.
        named_loss: K-FAC's estimate that knows which loss it is.
        batch: examples in each step.
        steps: the steps of a run.
        period: steps between two readings.
        aim: which measure the target is set for.
        floor: no target is set below it.
        decay: the decay of the learning rate.
        weight_decay: the weight decay of every optimizer that is not to tune its own.
        tunes_weight_decay: whether it is part of the search spaces.
        full_batch_steps: the steps of an optimizer that needs all training examples in each; None where they are too
            many.
    """

    title: str
    folder: str | None
    load: Callable[[Path | None], Examples]
    model: Callable[[int], nn.Module]
    small_model: Callable[[int], nn.Module]
    loss: LossFunction
    score: LossFunction
    units: tuple[str, str]
    named_loss: Estimate
    batch: FixedBatch | GrowingBatch
    steps: int
    period: int
    aim: Aim
    floor: float = 0.0
    loss_terms: LossTerms = LossTerms.EXAMPLES
    terms: int = 1
    decay: Decay = Decay.NONE
    weight_decay: float = 0.0
    tunes_weight_decay: bool = False
    full_batch_steps: int | None = None

    def lasting(self, steps: int) -> Problem:
        """Return the same with so many steps in a run, and at least one reading; full-batch runs are scaled alike."""
        full = self.full_batch_steps
        full = None if full is None else max(1, round(full * steps / self.steps))
        return replace(self, steps=steps, period=min(self.period, steps), full_batch_steps=full)

    def quick(self) -> Problem:
        """Return the same with a small model and few steps, which shows that it runs."""
        full_batch_steps = None if self.full_batch_steps is None else 4
        return replace(
            self,
            title=f"{self.title}, made small",
            model=self.small_model,
            batch=FixedBatch(32),
            steps=20,
            period=5,
            full_batch_steps=full_batch_steps,
        )
