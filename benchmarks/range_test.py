"""Does the range test spare the tuning of rate and damping?

`kfac_optim.tuning.range_test` recommends both, from at most 140 steps on the model and the batches of a run as it
begins. The run then takes these numbers, and is held against that K-FAC whose rate `compare` has tuned by as many runs
as its trials: steps to the same target, as a multiple of the tuned runs' median. The target is the lowest that the
tuned runs reach of those that baselines have set; if they reach none, what they get to themselves in the median.

Each run is kept under --out, and what is there is not run again. A picture of each range test is left beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_high
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import UsageError
from benchmarks.compare import load, prepare
from benchmarks.contestants import CONTESTANTS
from benchmarks.examples import Batch, Examples
from benchmarks.harness import describe_machine, pin_threads, write_json
from benchmarks.problem import Problem
from benchmarks.problems import PROBLEMS
from benchmarks.study import Run, RunFolder, carry_out, run_once
from kfac_optim import KFACOptimizer
from kfac_optim.tuning import RangeTest, range_test

_BEGINNING = 0.01  # the rate that the optimizer has before the test, which does not depend on it
_STEPS, _QUICK_STEPS = 140, 56
_ALLOWED = 1.25  # times the steps of tuned runs


@dataclass(frozen=True, slots=True)
class Tuned:
    """Holds what tuned runs of one optimizer did on a problem.

    Attributes:
        steps: the steps of a run.
        setting: their rate, and the horizon of its decay where it decays.
        trials: how many runs it took to find it.
        target: the target of the problem's measure.
        arrival: steps to it, in the median.
    """

    optimizer: str
    steps: int
    setting: Mapping[str, float]
    trials: int
    target: float
    arrival: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Holds runs with recommended numbers beside tuned ones."""

    tuned: Tuned
    runs: Sequence[Run]
    arrival: float

    @property
    def ratio(self) -> float:
        return self.arrival / self.tuned.arrival


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    folder = RunFolder(args.out / "runs")
    judged: dict[tuple[str, str], Judged] = {}
    for name in args.problems:
        record = json.loads(_file(args.tuned, name).read_text())
        for optimizer in args.optimizers or [_usual(record)]:
            tuned = read_tuned(record, optimizer)
            problem = prepare(PROBLEMS[name].lasting(tuned.steps), args)
            examples = load(problem, args)
            runs = _runs(name, problem, examples, tuned, args, folder, console)
            arrivals = [each.steps_to(problem.aim, tuned.target) for each in runs]
            judged[name, optimizer] = Judged(tuned, runs, median(arrivals))
    console.print(table(judged))
    path = args.out / "range-test.json"
    write_json(path, make_report(judged) | {"commits_of_runs": sorted(folder.commits)}, torch.device("cpu"))
    console.print(f"Figures: {path}")


def read_tuned(record: Mapping[str, Any], optimizer: str) -> Tuned:
    """Read the best trial of an optimizer off what `compare` has left."""
    found = next((each for each in record["optimizers"] if each["name"] == optimizer), None)
    if found is None:
        raise UsageError(
            f"argument --optimizers: compare has tuned {', '.join(each['name'] for each in record['optimizers'])} on "
            f"{record['problem']}, got {optimizer!r}"
        )
    reached = [
        (target["value"], arrival["steps"]["median"])
        for target, arrival in zip(record["targets"], found["arrivals"], strict=True)
        if arrival["steps"]["median"] is not None
    ]
    if reached:
        target, arrival = min(reached)
    else:
        measures = [(each["readings"]["steps"], each["readings"][record["aim"]]) for each in found["runs"]]
        target = median_high(min(values) for _, values in measures)
        firsts = (
            next((step for step, value in zip(steps, values, strict=True) if value <= target), math.inf)
            for steps, values in measures
        )
        arrival = median(firsts)
    return Tuned(optimizer, record["steps"], found["setting"], len(found["trials"]), target, arrival)


def recommend(
    problem: Problem, examples: Examples, optimizer: str, seed: int, steps: int, advance: Callable[[], object]
) -> RangeTest:
    """Test a run of ``seed`` as it begins."""
    torch.manual_seed(seed)
    model = problem.model(examples.outputs)
    made = CONTESTANTS[optimizer].optimizer(model, problem, {"lr": _BEGINNING})
    assert isinstance(made, KFACOptimizer)
    loader = _Loader(problem, examples, seed)
    return range_test(made, loader, lambda batch: problem.loss(model(batch[0]), batch[1]), steps=steps, advance=advance)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Holds the batches of a run, which can be iterated again."""

    problem: Problem
    examples: Examples
    seed: int

    def __iter__(self) -> Iterator[Batch]:
        return self.examples.draw(self.problem.batch.sizes(self.examples.count), self.seed)


def _runs(
    name: str,
    problem: Problem,
    examples: Examples,
    tuned: Tuned,
    args: argparse.Namespace,
    folder: RunFolder,
    console: Console,
) -> list[Run]:
    steps = _QUICK_STEPS if args.quick else _STEPS
    rest = {each: value for each, value in tuned.setting.items() if each != "lr"}

    def run_one(optimizer: str, trial: int, seed: int, advance: Callable[[float], object]) -> Run:
        result = recommend(problem, examples, optimizer, seed, steps, lambda: advance(1))
        console.print(f"{name}, {optimizer}, seed {seed}\n{result}", highlight=False, markup=False)
        picture = args.out / f"{name}-{optimizer}-{seed}.png"
        result.plot(picture)
        console.print(f"Plot: {picture}", highlight=False)
        setting = {**rest, "lr": result.lr, "damping": result.damping}
        return run_once(problem, examples, CONTESTANTS[optimizer], optimizer, trial, seed, setting, advance)

    terms = {
        "problem": problem.title,
        "steps": problem.steps,
        "steps of the test": steps,
        "rest of the setting": rest,
        "recommended": ["lr", "damping"],
        "machine": describe_machine(torch.device("cpu")),
    }
    wanted = {(tuned.optimizer, 0, seed): terms for seed in range(1, (1 if args.quick else args.seeds) + 1)}
    found = carry_out(name, "runs as recommended", wanted, run_one, problem.steps + steps, folder, console)
    return list(itertools.chain.from_iterable(found.values()))


def _usual(record: Mapping[str, Any]) -> str:
    """Return the K-FAC that is nearest to the default one of those that were tuned."""
    tuned = [each["name"] for each in record["optimizers"] if each["name"].startswith("KFAC")]
    if not tuned:
        raise UsageError(f"argument --tuned: compare has tuned no K-FAC on {record['problem']}; run it with one first")
    return next((name for name in ("KFAC-default", "KFAC-named") if name in tuned), tuned[0])


def _file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    if not path.exists():
        raise UsageError(f"argument --tuned: there are no tuned runs of {name} in {folder}; run compare {name} first")
    return path


def table(judged: Mapping[tuple[str, str], Judged]) -> Table:
    made = Table(title="Runs as the range test recommends, beside tuned ones")
    made.add_column("problem, steps", no_wrap=True)
    for heading in ("optimizer", "recommended rate", "damping", "tuned rate", "steps", "tuned", "ratio"):
        made.add_column(heading, justify="right")
    for (name, optimizer), each in judged.items():
        first = each.runs[0].setting
        made.add_row(
            f"{name}, {each.tuned.steps}",
            optimizer,
            f"{first['lr']:.2g}",
            f"{first['damping']:.2g}",
            f"{each.tuned.setting['lr']:.2g}",
            f"{each.arrival:g}",
            f"{each.tuned.arrival:g}",
            f"{each.ratio:.2f}",
        )
    near = sum(each.ratio <= _ALLOWED for each in judged.values())
    made.caption = f"{near} of {len(judged)} take at most {_ALLOWED} times the steps"
    return made


def make_report(judged: Mapping[tuple[str, str], Judged]) -> dict[str, Any]:
    return {
        "benchmark": "range-test",
        "allowed": _ALLOWED,
        "problems": [
            {
                "name": name,
                "optimizer": optimizer,
                "steps_of_a_run": each.tuned.steps,
                "target": each.tuned.target,
                "tuned": {"setting": each.tuned.setting, "trials": each.tuned.trials, "steps": each.tuned.arrival},
                "recommended": [{"seed": run.seed, "setting": run.setting} for run in each.runs],
                "steps": each.arrival if math.isfinite(each.arrival) else None,
                "ratio": each.ratio if math.isfinite(each.ratio) else None,
            }
            for (name, optimizer), each in judged.items()
        ],
    }
