"""How many steps does it take at each batch size, with SGD and with K-FAC?

At every batch size both optimizers are tried with the same number of settings. A run has --steps steps, or as many more
as it takes to see --examples examples; where rates decay, a trial's horizon shortens it. The target of each measure,
training and validation, is one for all batch sizes: what SGD's best trials reach at half of them (the median over batch
sizes of the lowest measure). At each batch size the trial with the fewest steps to it is repeated with other seeds.
(After Figure 6 of Ba, Grosse & Martens 2017, and Shallue et al. 2019.)
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.compare import arrival_in_words, load, prepare, seeds, trials
from benchmarks.contestants import CONTESTANTS
from benchmarks.harness import leave, pin_threads
from benchmarks.options import BATCH_SIZES, EXAMPLES, QUICK_EXAMPLES
from benchmarks.plots import plot_batch_sizes
from benchmarks.problem import Aim, FixedBatch, Problem
from benchmarks.problems import PROBLEMS
from benchmarks.scores import Arrival, Target, best_trials, tuning_target
from benchmarks.study import Run, RunFolder, Runs, Study

_OPTIMIZERS = ("SGD", "KFAC-default")
_BASELINE = "SGD"
_QUICK_SIZES = (16, 64)
_POINTS = 40  # of a curve in the JSON, at most

Repeats = Mapping[tuple[int, Aim], Runs]
"""Holds runs by batch size and by the measure that the trial was chosen for."""


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    problem = prepare(PROBLEMS[args.problem], args)
    examples = load(problem, args)
    sizes = sorted(set(args.batch_sizes or (_QUICK_SIZES if args.quick else BATCH_SIZES)))
    studies = {
        size: Study(
            f"{args.problem}-{size}",
            of_size(problem, size, at_least(args)),
            examples,
            {name: CONTESTANTS[name] for name in _OPTIMIZERS},
            trials(args),
            args.search_seed,
            RunFolder(args.out / "runs"),
        )
        for size in sizes
    }
    tuned = {size: study.tune(console) for size, study in studies.items()}
    targets = {aim: set_target(tuned.values(), aim, floor(problem, aim)) for aim in Aim}
    repeats = {
        (size, aim): study.repeat(best_trials(tuned[size], aim, target.value), seeds(args), console)
        for size, study in studies.items()
        for aim, target in targets.items()
    }
    console.print(*(result_table(repeats, aim, target) for aim, target in targets.items()))
    report = {
        "benchmark": "batch-size",
        "problem": args.problem,
        "commits_of_runs": sorted(set().union(*(study.folder.commits for study in studies.values()))),
        "title": problem.title,
        "steps": {str(size): study.problem.steps for size, study in studies.items()},
        "trials": trials(args),
        "search_seed": args.search_seed,
        "measures": [
            {
                "aim": aim.value,
                "units": units,
                "target": targets[aim].value,
                "batch_sizes": [size_report(size, repeats[size, aim], aim, targets[aim]) for size in sizes],
            }
            for aim, units in zip((Aim.TRAINING, Aim.VALIDATION), problem.units, strict=True)
        ],
    }
    console.print(leave(args.out, args.problem, report, plot_batch_sizes))


def at_least(args: argparse.Namespace) -> int:
    """Return how many examples a run must see."""
    if args.examples is not None:
        return int(args.examples)
    if args.steps is not None:
        return 0
    return QUICK_EXAMPLES if args.quick else EXAMPLES


def of_size(problem: Problem, size: int, examples: int) -> Problem:
    """Return the problem in batches of ``size``, with whole periods to see ``examples``, and not shorter than it is."""
    steps = max(problem.steps, math.ceil(examples / size))
    steps = math.ceil(steps / problem.period) * problem.period
    return replace(problem, batch=FixedBatch(size), steps=steps)


def set_target(tuned: Iterable[Runs], aim: Aim, floor: float) -> Target:
    """Set the target: what the baseline's trials reach at half of the batch sizes or more."""
    of_sizes = [tuning_target(runs, [_BASELINE], aim, floor) for runs in tuned]
    return Target(_BASELINE, statistics.median_high(of_sizes))


def floor(problem: Problem, aim: Aim) -> float:
    """Return the problem's floor for the measure it aims at, and 0 for the other."""
    return problem.floor if aim is problem.aim else 0.0


def size_report(size: int, runs: Runs, aim: Aim, target: Target) -> dict[str, Any]:
    return {
        "batch_size": size,
        "optimizers": [
            {
                "name": name,
                "setting": repeats[0].setting,
                "arrival": Arrival.of(repeats, aim, target).as_json(),
                "runs": [thinned(run).curve() for run in repeats],
            }
            for name, repeats in runs.items()
        ],
    }


def thinned(run: Run) -> Run:
    """Return the run with at most ``_POINTS`` of its readings, evenly spread."""
    return replace(run, readings=run.readings[:: math.ceil(len(run.readings) / _POINTS)])


def result_table(repeats: Repeats, aim: Aim, target: Target) -> Table:
    table = Table(
        title=f"{aim.value} measure: steps to {target.value:.4g}, which SGD reaches at half of the batch sizes",
        caption="Medians over seeds, from the lowest to the highest; × of SGD at the same batch size; of those that "
        "miss the target in the median, how many seeds reach it.",
        box=box.SIMPLE,
    )
    table.add_column("batch size", justify="right")
    for name in _OPTIMIZERS:
        table.add_column(f"{name}, steps", justify="right")
        table.add_column("seconds", justify="right")
    for (size, chosen_for), runs in repeats.items():
        if chosen_for is aim:
            sgd = Arrival.of(runs[_BASELINE], aim, target)
            arrivals = ((name, Arrival.of(runs[name], aim, target)) for name in _OPTIMIZERS)
            cells = (word for name, each in arrivals for word in arrival_in_words(each, len(runs[name]), sgd))
            table.add_row(str(size), *cells)
    return table
