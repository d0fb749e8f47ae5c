"""Does K-FAC train at its defaults, whatever the size of the loss?

A small regression, the same with targets a thousand times as large, a classifier, and the MNIST autoencoders of
`compare`, whose losses are sums over pixels. KFACOptimizer has momentum 0.9 and two rates, and is told what the
mean in the loss runs over; all else is at its defaults. It is held against torch.optim.Adam at the best of a grid of
learning rates, by the loss on the training data at the end. All start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import nn, optim
from torch.optim import Optimizer

from benchmarks import data
from benchmarks.compare import load, prepare
from benchmarks.data import Split
from benchmarks.examples import Examples
from benchmarks.harness import pin_threads, write_json
from benchmarks.models import mlp
from benchmarks.problem import Aim, FixedBatch, Problem
from benchmarks.problems import PROBLEMS as COMPARED
from benchmarks.problems import error_rate
from benchmarks.training import LossFunction, mean_over, train
from kfac_optim import KFACOptimizer, LossTerms, MonteCarlo

_EXAMPLES, _INPUTS, _CLASSES = 4096, 16, 10
_ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_KFAC_RATES = (0.03, 0.1)


def _teacher(outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, and what a smooth random network of one hidden layer makes of them."""
    generator = torch.Generator().manual_seed(1000)
    inputs = torch.randn(_EXAMPLES, _INPUTS, generator=generator)
    first = torch.randn(_INPUTS, 32, generator=generator) / 2
    second = torch.randn(32, outputs, generator=generator) / math.sqrt(8)
    return inputs, torch.tanh(inputs @ first) @ second


def _examples(inputs: torch.Tensor, targets: torch.Tensor, outputs: int) -> Examples:
    split = Split(inputs, targets)
    return Examples(lambda sizes, seed: data.draw(split, sizes, seed), len(split), split, split, outputs, split)


def _regression(scale: float) -> Callable[[Path | None], Examples]:
    def make(_: Path | None) -> Examples:
        inputs, targets = _teacher(4)
        return _examples(inputs, targets * scale, 4)

    return make


def _classification(_: Path | None) -> Examples:
    inputs, logits = _teacher(_CLASSES)
    return _examples(inputs, logits.argmax(-1), _CLASSES)


def _small(
    title: str,
    examples: Callable[[Path | None], Examples],
    loss: LossFunction,
    score: LossFunction,
    criterion: nn.Module,
    loss_terms: LossTerms,
) -> Problem:
    return Problem(
        title=title,
        folder=None,
        load=examples,
        model=lambda outputs: mlp((_INPUTS, 64, 64, 64, outputs), nn.Tanh),
        small_model=lambda outputs: mlp((_INPUTS, 8, outputs), nn.Tanh),
        loss=loss,
        score=score,
        units=("loss", "loss"),
        named_loss=MonteCarlo(criterion),
        batch=FixedBatch(256),
        steps=300,
        period=10,
        aim=Aim.TRAINING,
        loss_terms=loss_terms,
    )


def _square(title: str, scale: float) -> Problem:
    return _small(title, _regression(scale), F.mse_loss, F.mse_loss, nn.MSELoss(), LossTerms.ELEMENTS)


PROBLEMS = {
    "regression": _square("regression by 3 hidden layers of 64 tanh units, mean squared error", 1.0),
    "regression-1000": _square("the same, targets times 1000", 1000.0),
    "classifier": _small(
        "classifier of the same size, 10 classes",
        _classification,
        F.cross_entropy,
        error_rate,
        nn.CrossEntropyLoss(),
        LossTerms.EXAMPLES,
    ),
    "mnist-a": COMPARED["mnist-a"].lasting(100),
    "mnist-b": COMPARED["mnist-b"].lasting(100),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Holds a run of one optimizer with one learning rate.

    Attributes:
        loss: the loss on the training data at the end; None where the run diverged.
        highest_rise: the highest mini-batch loss over the first; None where the run diverged.
    """

    optimizer: str
    lr: float
    loss: float | None
    highest_rise: float | None

    @property
    def rank(self) -> float:
        return math.inf if self.loss is None else self.loss


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    chosen = {name: prepare(PROBLEMS[name], args) for name in args.problems}
    rates: dict[str, Sequence[float]] = {"Adam": _ADAM_RATES, "KFAC": _KFAC_RATES}
    if args.quick:
        rates = {name: some[-1:] for name, some in rates.items()}
    found: dict[str, list[Run]] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(chosen) * sum(map(len, rates.values())))
        for name, problem in chosen.items():
            examples = load(problem, args)
            found[name] = []
            for optimizer, lr in [(optimizer, lr) for optimizer, some in rates.items() for lr in some]:
                progress.update(task, description=f"{name}: {optimizer}, lr {lr:g}")
                found[name].append(run_one(problem, examples, optimizer, lr, args.seed))
                progress.advance(task)
    console.print(table(found))
    path = args.out / "defaults.json"
    write_json(path, make_report(chosen, found, args.seed), torch.device("cpu"))
    console.print(f"Figures: {path}")


def run_one(problem: Problem, examples: Examples, optimizer: str, lr: float, seed: int) -> Run:
    """Train from the weights and with the batches of ``seed``, and read the loss at the end."""
    torch.manual_seed(seed)
    model = problem.model(examples.outputs)
    batches = itertools.islice(examples.draw(problem.batch.sizes(examples.count), seed), problem.steps)
    made = make_optimizer(optimizer, model, lr, problem.loss_terms)
    history = train(model, made, batches, problem.loss, period=problem.period, observe=lambda _: None)
    (loss,) = mean_over(model, examples.training, problem.loss)
    if history.diverged or not math.isfinite(loss):
        return Run(optimizer, lr, None, None)
    return Run(optimizer, lr, loss, history.highest_rise)


def make_optimizer(name: str, model: nn.Module, lr: float, loss_terms: LossTerms) -> Optimizer:
    if name == "Adam":
        return optim.Adam(model.parameters(), lr=lr)
    return KFACOptimizer(model, lr=lr, momentum=0.9, loss_terms=loss_terms)


def best_adam(runs: Sequence[Run]) -> Run:
    return min((run for run in runs if run.optimizer == "Adam"), key=lambda run: run.rank)


def table(found: Mapping[str, Sequence[Run]]) -> Table:
    made = Table(title="Loss on the training data at the end")
    made.add_column("problem", no_wrap=True)
    for heading in ("Adam, its best rate", "K-FAC, rate", "loss", "÷ Adam's", "highest ÷ first batch loss"):
        made.add_column(heading, justify="right")
    for name, runs in found.items():
        adam = best_adam(runs)
        for number, kfac in enumerate(run for run in runs if run.optimizer == "KFAC"):
            made.add_row(
                "" if number else name,
                "" if number else f"{adam.rank:.4g} ({adam.lr:g})",
                f"{kfac.lr:g}",
                "diverged" if kfac.loss is None else f"{kfac.loss:.4g}",
                "—" if kfac.loss is None else f"{kfac.loss / adam.rank:.2f}",
                "—" if kfac.highest_rise is None else f"{kfac.highest_rise:.2f}",
            )
    return made


def make_report(problems: Mapping[str, Problem], found: Mapping[str, Sequence[Run]], seed: int) -> dict[str, Any]:
    return {
        "benchmark": "defaults",
        "seed": seed,
        "problems": [
            {
                "name": name,
                "title": problem.title,
                "batch_size": str(problem.batch),
                "steps": problem.steps,
                "runs": [asdict(run) for run in found[name]],
                "better_than_adam": all(
                    run.rank < best_adam(found[name]).rank for run in found[name] if run.optimizer == "KFAC"
                ),
            }
            for name, problem in problems.items()
        ],
    }
