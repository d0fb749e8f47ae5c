"""Does K-FAC beat a tuned SGD on real data?

Trains a deep network without normalisation on scikit-learn's digits, or on MNIST, once for each learning rate of a
grid: with torch.optim.SGD and with KFACOptimizer, from the same initial weights, on the same batches, both with
momentum 0.9, KFACOptimizer otherwise at its defaults (or with all factors whole). On several processes
(torchrun, mpirun, SLURM) each has its share of every batch, and both optimizers train the model in DDP. The target is
the lowest loss on the training data that SGD reaches at any checkpoint with any learning rate; of each optimizer's runs
the one that gets there first is shown.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from benchmarks import arguments, data, processes
from benchmarks.data import ImageData
from benchmarks.harness import leave, pin_threads
from benchmarks.models import mlp
from benchmarks.plots import plot_training
from benchmarks.settings import SETTINGS
from benchmarks.training import Checkpoint, History, mean_over, train
from kfac_optim import KFACOptimizer
from kfac_optim.distributed import ProcessPlace


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes a data set, a network for it, and how long and how to train.

    Attributes:
        load: ``(data folder or None) → images``.
        widths: units of each layer of a tanh network, pixels and classes included.
        period: steps between two checkpoints.
        grids: learning rates to try, by optimizer.
    """

    load: Callable[[Path | None], ImageData]
    widths: tuple[int, ...]
    batch_size: int
    epochs: int
    period: int
    grids: Mapping[str, tuple[float, ...]]


PROBLEMS = {
    "digits": Problem(
        load=lambda _: data.digits(),
        widths=(64, *[64] * 8, 10),
        batch_size=128,
        epochs=50,
        period=5,
        grids={"SGD": (0.02, 0.05, 0.1, 0.2, 0.4), "KFAC": (0.003, 0.01, 0.03)},
    ),
    "mnist": Problem(
        load=data.mnist,
        widths=(784, *[64] * 12, 10),
        batch_size=512,
        epochs=4,
        period=20,
        grids={"SGD": (0.05, 0.1, 0.2), "KFAC": (0.01, 0.03)},
    ),
}


def make_optimizer(name: str, model: nn.Module, lr: float, options: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer: the swap is one line. ``options`` are K-FAC's own."""
    if name == "SGD":
        return optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return KFACOptimizer(model, lr=lr, momentum=0.9, **options)


@dataclass(frozen=True, slots=True)
class Run:
    """Holds a run of one optimizer with one learning rate.

    Attributes:
        highest_rise: the highest mini-batch loss over the first; None when the run diverged.
    """

    optimizer: str
    lr: float
    highest_rise: float | None
    checkpoints: list[Checkpoint]

    @property
    def best_loss(self) -> float:
        return min((point.train_loss for point in self.checkpoints), default=math.inf)

    def reaches(self, target: float) -> Checkpoint | None:
        """Return the first checkpoint with a loss on the training data no higher than ``target``."""
        return next((point for point in self.checkpoints if point.train_loss <= target), None)


def run(args: argparse.Namespace) -> None:
    if args.dataset == "digits" and args.data_dir is not None:
        raise arguments.UsageError(
            f"argument --data-dir: digits comes with scikit-learn and is read from no folder, got "
            f"{str(args.data_dir)!r}; leave it out, or pass --dataset mnist"
        )
    with processes.launched() as place:
        compare(args, place)


def compare(args: argparse.Namespace, place: ProcessPlace) -> None:
    """Run the whole benchmark, on all processes alike; the first of them shows it."""
    console = Console(quiet=place.rank > 0)
    pin_threads(args.threads)
    problem = PROBLEMS[args.dataset]
    if args.quick:
        problem = replace(problem, epochs=2, grids={name: grid[1:2] for name, grid in problem.grids.items()})
    if args.epochs is not None:
        problem = replace(problem, epochs=args.epochs)
    processes.check_share(problem.batch_size, place.world_size)
    images = problem.load(args.data_dir)

    options = SETTINGS[args.setting]
    runs = run_grids(problem, images, options, args.seed, console)
    tuned_sgd = min((run for run in runs if run.optimizer == "SGD"), key=lambda run: run.best_loss)
    target = tuned_sgd.best_loss
    best = [tuned_sgd, min((run for run in runs if run.optimizer == "KFAC"), key=functools.partial(_rank, target))]
    if place.rank > 0:
        return
    console.print(grid_table(runs, target), result_table(best, target), verdict(best, target))

    report = {
        "benchmark": "quickstart",
        "dataset": args.dataset,
        "model": f"{len(problem.widths) - 2} hidden layers of {problem.widths[1]} tanh units",
        "batch_size": problem.batch_size,
        "epochs": problem.epochs,
        "setting": args.setting,
        "seed": args.seed,
        "processes": place.world_size,
        "target": target,
        "runs": [asdict(run) for run in runs],
        "best": [asdict(run) for run in best],
    }
    console.print(leave(args.out, args.dataset, report, plot_training))


def run_grids(
    problem: Problem, images: ImageData, options: Mapping[str, Any], seed: int, console: Console
) -> list[Run]:
    """Make one run for every optimizer and learning rate, all from the same weights and on the same batches."""
    steps = problem.epochs * (len(images.train) // problem.batch_size)
    trials = [(name, lr) for name, grid in problem.grids.items() for lr in grid]
    runs = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=steps * len(trials))
        for number, (name, lr) in enumerate(trials):
            progress.update(task, description=f"{name}, lr {lr:g}", completed=number * steps)
            tell = functools.partial(_tell, progress, task, number * steps)
            runs.append(run_one(problem, images, name, lr, options, seed, tell))
        progress.update(task, completed=steps * len(trials))
    return runs


def run_one(
    problem: Problem,
    images: ImageData,
    name: str,
    lr: float,
    options: Mapping[str, Any],
    seed: int,
    tell: Callable[[History], None],
) -> Run:
    """Train from the weights and with the batches of ``seed``, evaluating both splits at every checkpoint."""
    torch.manual_seed(seed)
    model = mlp(problem.widths, nn.Tanh)
    trained = processes.wrapped(model)
    optimizer = make_optimizer(name, trained, lr, options)
    checkpoints: list[Checkpoint] = []

    def observe(history: History) -> None:
        figures = [mean_over(model, split, F.cross_entropy, _accuracy) for split in (images.train, images.validation)]
        checkpoints.append(Checkpoint(history.steps, history.seconds, *figures[0], *figures[1]))
        tell(history)

    batches = processes.share(data.batches(images.train, problem.batch_size, problem.epochs, seed))
    history = train(
        trained,
        optimizer,
        batches,
        F.cross_entropy,
        period=problem.period,
        observe=observe,
        average=processes.average,
        clock=time.process_time,  # other work on the machine does not count
    )
    return Run(name, lr, None if history.diverged else history.highest_rise, checkpoints)


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def _tell(progress: Progress, task: TaskID, done: int, history: History) -> None:
    progress.update(task, completed=done + history.steps)


def _rank(target: float, run: Run) -> tuple[float, float]:
    """Return what sorts runs: the steps to the target, then the lowest loss."""
    reached = run.reaches(target)
    return (math.inf if reached is None else reached.steps, run.best_loss)


def grid_table(runs: Sequence[Run], target: float) -> Table:
    table = Table(title="Learning rates tried")
    for heading in ("optimizer", "lr", "lowest training loss", f"steps to {target:.3g}", "highest ÷ first batch loss"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for run in runs:
        reached = run.reaches(target)
        table.add_row(
            run.optimizer,
            f"{run.lr:g}",
            f"{run.best_loss:.3g}",
            "—" if reached is None else str(reached.steps),
            "diverged" if run.highest_rise is None else f"{run.highest_rise:.2f}",
        )
    return table


def result_table(best: Sequence[Run], target: float) -> Table:
    table = Table(title=f"The best of each after training; steps and CPU seconds to a loss of {target:.3g}")
    headings = ("train loss", "acc.", "val. loss", "acc.", "steps", "seconds")
    for heading in ("optimizer, lr", *headings):
        table.add_column(heading, justify="left" if heading == "optimizer, lr" else "right")
    for run in best:
        last, reached = run.checkpoints[-1], run.reaches(target)
        table.add_row(
            f"{run.optimizer}, {run.lr:g}",
            f"{last.train_loss:.3g}",
            f"{last.train_accuracy:.1%}",
            f"{last.validation_loss:.3g}",
            f"{last.validation_accuracy:.1%}",
            *("—" if reached is None else (str(reached.steps), f"{reached.seconds:.2f}")),
        )
    return table


def verdict(best: Sequence[Run], target: float) -> str:
    """Say how many of SGD's steps and seconds K-FAC needed, and what it had on the validation data then."""
    sgd, kfac = (run.reaches(target) for run in best)
    if sgd is None or kfac is None:
        return "KFAC did not reach SGD's lowest training loss."
    return (
        f"KFAC reached SGD's lowest training loss in {kfac.steps / sgd.steps:.2f} of its steps "
        f"and {kfac.seconds / sgd.seconds:.2f} of its seconds. The validation loss was "
        f"{kfac.validation_loss:.3g} there, SGD's {sgd.validation_loss:.3g}."
    )
