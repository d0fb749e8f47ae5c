"""What does the average of the iterates gain, at a constant rate and with one that falls to zero?

Problems of `compare`, trained by KFACOptimizer with momentum 0.9 and `average=IterateAverage()`, otherwise at its
defaults. At the end of each run the measures of the problem are read twice: of the trained parameters, and after
`optimizer.eval()` of their average. Medians over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.compare import load, prepare
from benchmarks.examples import Examples
from benchmarks.harness import pin_threads, write_json
from benchmarks.problem import Decay, Problem
from benchmarks.problems import PROBLEMS
from benchmarks.study import scheduled
from benchmarks.training import mean_over, train
from kfac_optim import IterateAverage, KFACOptimizer

_RATES = (0.01, 0.03, 0.1)


@dataclass(frozen=True, slots=True)
class Measures:
    training: float
    validation: float


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what one run ended with; `iterate` and `average` are None where it diverged."""

    lr: float
    decay: str
    seed: int
    iterate: Measures | None
    average: Measures | None


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    chosen = {name: prepare(PROBLEMS[name], args) for name in args.problems}
    rates = _RATES[-1:] if args.quick else _RATES
    seeds = range(1 if args.quick else args.seeds)
    settings = list(itertools.product(Decay, rates, seeds))
    found: dict[str, list[Run]] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(chosen) * len(settings))
        for name, problem in chosen.items():
            examples = load(problem, args)
            found[name] = []
            for decay, lr, seed in settings:
                progress.update(task, description=f"{name}: lr {lr:g}, {decay.value}, seed {seed}")
                found[name].append(run_one(problem, examples, decay, lr, seed))
                progress.advance(task)
    console.print(table(chosen, found))
    path: Path = args.out / "averaging.json"
    write_json(path, make_report(chosen, found), torch.device("cpu"))
    console.print(f"Figures: {path}")


def run_one(problem: Problem, examples: Examples, decay: Decay, lr: float, seed: int) -> Run:
    """Train from the weights and with the batches of ``seed``, and measure both."""
    torch.manual_seed(seed)
    model = problem.model(examples.outputs)
    optimizer = KFACOptimizer(model, lr=lr, momentum=0.9, loss_terms=problem.loss_terms, average=IterateAverage())
    schedule = LambdaLR(optimizer, lambda step: decay.factor(min(step / problem.steps, 1)))
    batches = itertools.islice(examples.draw(problem.batch.sizes(examples.count), seed), problem.steps)
    history = train(
        model, optimizer, scheduled(batches, schedule), problem.loss, period=problem.steps, observe=lambda _: None
    )
    iterate = _measures(model, problem, examples)
    optimizer.eval()
    average = _measures(model, problem, examples)
    if history.diverged:
        iterate = average = None
    return Run(lr, decay.value, seed, iterate, average)


def _measures(model: nn.Module, problem: Problem, examples: Examples) -> Measures | None:
    (training,) = mean_over(model, examples.training, problem.loss)
    (validation,) = mean_over(model, examples.validation, problem.score)
    return Measures(training, validation) if math.isfinite(training) and math.isfinite(validation) else None


def table(problems: Mapping[str, Problem], found: Mapping[str, Sequence[Run]]) -> Table:
    made = Table(title="At the end of the run: trained parameters → their average")
    for heading in ("problem, steps", "decay of the rate", "rate"):
        made.add_column(heading, no_wrap=True)
    for heading in ("training loss", "validation measure"):
        made.add_column(heading, justify="right")
    for name, runs in found.items():
        for (decay, lr), some in itertools.groupby(runs, key=lambda each: (each.decay, each.lr)):
            of_both = [(each.iterate, each.average) for each in some]
            cells = [
                " → ".join(_median_in_words(of_one, measure) for of_one in zip(*of_both, strict=True))
                for measure in ("training", "validation")
            ]
            made.add_row(f"{name}, {problems[name].steps}", decay, f"{lr:g}", *cells)
    return made


def _median_in_words(seeds: Sequence[Measures | None], measure: str) -> str:
    """Say the median over seeds; one that has diverged counts as infinite."""
    middle = median(math.inf if each is None else getattr(each, measure) for each in seeds)
    return f"{middle:.4g}" if math.isfinite(middle) else "diverged"


def make_report(problems: Mapping[str, Problem], found: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    return {
        "benchmark": "averaging",
        "average": repr(IterateAverage()),
        "problems": [
            {
                "name": name,
                "title": problem.title,
                "steps": problem.steps,
                "units": problem.units,
                "runs": [asdict(run) for run in found[name]],
            }
            for name, problem in problems.items()
        ],
    }
