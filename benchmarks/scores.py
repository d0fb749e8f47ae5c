"""What runs are judged by: targets, steps and seconds to them, medians over seeds with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.problem import Aim
from benchmarks.study import Run, Runs


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds the spread over seeds; infinite where a run missed the target."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name; None is infinite: JSON has no such number."""
        numbers = {"median": self.median, "low": self.low, "high": self.high}
        return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """Holds a value of the measure, and the optimizer that set it."""

    setter: str
    value: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """Says how one optimizer got to a target.

    Attributes:
        reached: how many of its runs got there.
    """

    steps: Spread
    seconds: Spread
    reached: int

    @staticmethod
    def of(runs: Sequence[Run], aim: Aim, target: Target) -> Arrival:
        steps = [run.steps_to(aim, target.value) for run in runs]
        seconds = [run.seconds_to(aim, target.value) for run in runs]
        return Arrival(Spread.of(steps), Spread.of(seconds), sum(map(math.isfinite, steps)))

    def as_json(self) -> dict[str, Any]:
        return {"steps": self.steps.as_json(), "seconds": self.seconds.as_json(), "reached": self.reached}


def typical_lowest(runs: Sequence[Run], aim: Aim) -> float:
    """Return the lowest measure of each run, in the median over seeds: of two middle ones the higher.

    So at least half of the runs get there, and the time of the optimizer that sets a target by it is finite.
    """
    return statistics.median_high([run.lowest(aim) for run in runs])


def target_of(setter: str, runs: Sequence[Run], aim: Aim, floor: float) -> Target:
    """Return as a target what ``setter`` reaches in the median over seeds, but not below ``floor``."""
    return Target(setter, max(typical_lowest(runs, aim), floor))


def best_target(runs: Mapping[str, Sequence[Run]], baselines: Iterable[str], aim: Aim, floor: float) -> Target:
    """Return the target of the baseline that gets lowest; of several at the floor, of the one with fewest seconds."""

    def rank(target: Target) -> tuple[float, float]:
        return target.value, Arrival.of(runs[target.setter], aim, target).seconds.median

    return min((target_of(name, runs[name], aim, floor) for name in baselines), key=rank)


def best_trial(runs: Sequence[Run], aim: Aim, target: float) -> Run:
    """Return the run with the fewest steps to ``target``; of those that miss it, the one with the lowest measure."""
    return min(runs, key=lambda run: (run.steps_to(aim, target), run.lowest(aim)))


def tuning_target(tuned: Runs, baselines: Iterable[str], aim: Aim, floor: float) -> float:
    """Return the measure by which trials are chosen: the lowest that any baseline reaches, but not below ``floor``."""
    return max(floor, min(run.lowest(aim) for name in baselines for run in tuned[name]))


def best_trials(tuned: Runs, aim: Aim, target: float) -> dict[str, int]:
    """Return the number of each optimizer's best trial, by its name."""
    return {name: best_trial(runs, aim, target).trial for name, runs in tuned.items()}
