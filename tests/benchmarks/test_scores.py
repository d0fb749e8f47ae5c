"""Targets and times to them, on curves made up."""

import math

import pytest

from benchmarks.problem import Aim
from benchmarks.scores import Arrival, Spread, Target, best_target, best_trials, tuning_target, typical_lowest
from benchmarks.study import Ending, Reading, Run


def made(*training: float, trial: int = 0, seed: int = 0) -> Run:
    """Readings after every 10 steps of half a second each; validation runs the other way."""
    readings = tuple(Reading(10 * i, 5.0 * i, loss, -loss) for i, loss in enumerate(training))
    return Run("any", trial, seed, {"lr": 0.1}, Ending.FINISHED, readings)


def test_the_time_to_a_target_is_that_of_the_first_reading_at_it_or_below() -> None:
    run = made(4.0, 3.0, 2.0, 2.5, 1.0)
    assert run.steps_to(Aim.TRAINING, 2.0) == 20
    assert run.seconds_to(Aim.TRAINING, 2.0) == 10.0
    assert run.steps_to(Aim.TRAINING, 1.9) == 40
    assert run.steps_to(Aim.TRAINING, 0.9) == math.inf
    assert run.seconds_to(Aim.TRAINING, 0.9) == math.inf
    assert run.steps_to(Aim.VALIDATION, -4.0) == 0
    assert (run.lowest(Aim.TRAINING), run.lowest(Aim.VALIDATION)) == (1.0, -4.0)


def test_a_run_without_readings_reaches_nothing() -> None:
    assert made().lowest(Aim.TRAINING) == math.inf
    assert made().steps_to(Aim.TRAINING, 1e9) == math.inf


@pytest.mark.parametrize(
    ("lowest", "expected"), [([1.0, 2.0, 3.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 3.0), ([1.0, 2.0], 2.0), ([5.0], 5.0)]
)
def test_the_setter_of_a_target_reaches_it_in_the_median(lowest: list[float], expected: float) -> None:
    runs = [made(9.0, value, seed=seed) for seed, value in enumerate(lowest)]
    assert typical_lowest(runs, Aim.TRAINING) == expected
    arrival = Arrival.of(runs, Aim.TRAINING, Target("any", expected))
    assert arrival.steps == Spread(10, 10, 10 if expected == max(lowest) else math.inf)
    assert arrival.reached == sum(value <= expected for value in lowest)


def test_a_miss_counts_as_infinite_in_median_and_spread() -> None:
    runs = [made(9.0, 1.0), made(9.0, 9.0, 1.0), made(9.0, 9.0, 9.0, 2.0)]
    arrival = Arrival.of(runs, Aim.TRAINING, Target("any", 1.0))
    assert arrival.steps == Spread(20, 10, math.inf)
    assert arrival.as_json() == {
        "steps": {"median": 20, "low": 10, "high": None},
        "seconds": {"median": 10.0, "low": 5.0, "high": None},
        "reached": 2,
    }
    assert Arrival.of(runs[1:], Aim.TRAINING, Target("any", 1.0)).steps.median == math.inf


def test_the_best_baseline_sets_the_target_and_no_other_optimizer() -> None:
    repeated = {"SGD": [made(9.0, 3.0)], "Muon": [made(9.0, 2.0)], "KFAC": [made(9.0, 1.0)]}
    assert best_target(repeated, ["SGD", "Muon"], Aim.TRAINING, 0.0) == Target("Muon", 2.0)
    assert best_target(repeated, ["SGD", "Muon"], Aim.VALIDATION, -math.inf) == Target("SGD", -9.0)


def test_the_best_trial_is_the_first_at_the_target_and_else_the_lowest() -> None:
    tuned = {
        "SGD": [made(9.0, 4.0, 3.0, trial=0), made(9.0, 9.0, 2.0, trial=1)],
        "KFAC": [made(9.0, 9.0, 0.5, trial=0), made(9.0, 2.0, 1.9, trial=1), made(9.0, 2.1, 0.1, trial=2)],
        "AdamW": [made(9.0, 5.0, 5.0, trial=0), made(9.0, 8.0, 2.5, trial=1)],
    }
    target = tuning_target(tuned, ["SGD", "AdamW"], Aim.TRAINING, 0.0)
    assert target == 2.0, "K-FAC sets none"
    assert best_trials(tuned, Aim.TRAINING, target) == {"SGD": 1, "KFAC": 1, "AdamW": 1}


def test_below_the_floor_only_the_time_to_the_floor_counts() -> None:
    slow, fast = made(9.0, 4.0, 0.9, 0.1), made(9.0, 1.0, 0.5, 0.4)
    repeated = {"SGD": [made(9.0, 9.0, 3.0)], "Muon": [slow], "SOAP": [fast]}
    names = list(repeated)
    assert best_target(repeated, names, Aim.TRAINING, 0.0) == Target("Muon", 0.1)
    assert best_target(repeated, names, Aim.TRAINING, 1.0) == Target("SOAP", 1.0)
    assert best_target(repeated, names, Aim.TRAINING, 3.5) == Target("SOAP", 3.5)
    tuned = {"SGD": [made(9.0, 4.0, 0.9, 0.1, trial=0), made(9.0, 1.0, 0.5, 0.4, trial=1)]}
    assert best_trials(tuned, Aim.TRAINING, tuning_target(tuned, ["SGD"], Aim.TRAINING, 0.0)) == {"SGD": 0}
    assert best_trials(tuned, Aim.TRAINING, tuning_target(tuned, ["SGD"], Aim.TRAINING, 1.0)) == {"SGD": 1}
