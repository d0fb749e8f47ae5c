"""Which trial of each optimizer is repeated: found by new trials, or read from a result of `compare`.

What trials cost does not count, so that those of older code serve as well, as long as it took the same steps. Repeats
are always run anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arguments import UsageError
from benchmarks.problem import Aim
from benchmarks.scores import best_trials, tuning_target
from benchmarks.study import Run, Study

_ORIGIN = ("command", "machine", "date", "commit")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Holds the trials of each optimizer, and the best of them.

    Attributes:
        target: the measure by the steps to which trials are chosen.
        best: number of the trial that is repeated, by optimizer.
        trials: the trials of each optimizer, in order, as `compare` writes them.
        origins: what made those of earlier results, and of which ``optimizers`` they are; nothing if all are new.
    """

    target: float
    best: Mapping[str, int]
    trials: Mapping[str, Sequence[Mapping[str, Any]]]
    origins: Sequence[Mapping[str, Any]] = ()


def by_trials(study: Study, baselines: Sequence[str], console: Console) -> Tuning:
    """Run the trials of all optimizers."""
    aim = study.problem.aim
    tuned = study.tune(console)
    target = tuning_target(tuned, baselines, aim, study.problem.floor)
    trials = {name: [_summary(run, aim, target) for run in runs] for name, runs in tuned.items()}
    return Tuning(target, best_trials(tuned, aim, target), trials)


def with_earlier(study: Study, baselines: Sequence[str], file: Path, console: Console) -> Tuning:
    """Take the trials of an earlier result, and run those of optimizers that have tried other settings there.

    Raises:
        UsageError: there is none, it is of another study, or lacks the trials of a baseline.
    """
    report = _read(study, file)
    found = {each["name"]: each for each in report["optimizers"]}
    settings = {name: [trial["setting"] for trial in each["trials"]] for name, each in found.items()}
    new = [name for name in study.contestants if settings.get(name) != study.settings(name)]
    if missing := [name for name in baselines if name in new]:
        raise UsageError(
            f"argument --trials-of: {str(file)!r} lacks these trials of {missing[0]}, and baselines set the targets; "
            "leave --trials-of out"
        )
    aim, target = study.problem.aim, report["tuning_target"]
    tuned = study.tune(console, new) if new else {}
    best = {name: found[name]["trial"] for name in study.contestants if name not in new}
    trials = {name: found[name]["trials"] for name in best}
    of_now = {name: [_summary(run, aim, target) for run in runs] for name, runs in tuned.items()}
    return Tuning(target, best | best_trials(tuned, aim, target), trials | of_now, _origins(report, list(best)))


def _origins(report: Mapping[str, Any], taken: Sequence[str]) -> list[dict[str, Any]]:
    """Return what made the trials of some optimizers: the report, or an earlier result that it took them from."""
    earlier: list[dict[str, Any]] = report.get("trials_of", [])
    own = set(taken).difference(*(each["optimizers"] for each in earlier))
    origins = [*earlier, {what: report[what] for what in _ORIGIN} | {"optimizers": own}]
    chosen = [{**each, "optimizers": [name for name in taken if name in each["optimizers"]]} for each in origins]
    return [each for each in chosen if each["optimizers"]]


def _read(study: Study, file: Path) -> dict[str, Any]:
    """Return a result of `compare` for the same problem, searched in the same way."""
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"argument --trials-of: no result can be read from {str(file)!r}: {error}") from None
    if not isinstance(report, dict) or report.get("benchmark") != "compare":
        raise UsageError(f"argument --trials-of: {str(file)!r} is no result of compare")
    problem = study.problem
    wanted = {
        "problem": study.name,
        "batch_size": str(problem.batch),
        "steps": problem.steps,
        "aim": problem.aim.value,
        "floor": problem.floor,
        "trials": study.trials,
        "search_seed": study.search_seed,
    }
    for what, value in wanted.items():
        if report[what] != value:
            raise UsageError(
                f"argument --trials-of: {str(file)!r} has {what.replace('_', ' ')} {report[what]!r}, this study has "
                f"{value!r}; pass the arguments of that one, or leave --trials-of out"
            )
    return report


def _summary(run: Run, aim: Aim, target: float) -> dict[str, Any]:
    """Return a trial with what it is chosen by: steps to ``target``, None for a miss, and the lowest measure."""
    steps = run.steps_to(aim, target)
    chosen_by = {"steps": steps if math.isfinite(steps) else None, "lowest": run.lowest(aim)}
    return {"setting": run.setting, "ending": run.ending.value, **chosen_by}
