"""Does K-FAC train language models of characters: a transformer and an LSTM, as torch has them?

Trains on tinyshakespeare with SGD, AdamW and KFACOptimizer, once for each learning rate of a grid, from the same
initial weights and on the same passages; SGD and KFACOptimizer with momentum 0.9, all else at its defaults, or
KFACOptimizer with the setting that is called fast. Figures are bits per character on fixed passages of the validation
text.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from benchmarks import arguments, data
from benchmarks.data import TextData
from benchmarks.harness import pin_threads, write_json
from benchmarks.models import CharacterLSTM, CharacterTransformer
from benchmarks.plots import plot_validation
from benchmarks.settings import SETTINGS
from benchmarks.training import History, train
from benchmarks.workloads import next_character_loss
from kfac_optim import KFACOptimizer, LossTerms

HELP = "does it train a character transformer and an LSTM, beside AdamW and SGD?"

_CONTEXT = 64
_BATCH = 32
_VALIDATION_BATCHES = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, how long to train it, and the learning rates to try.

    Attributes:
        model: ``(vocabulary) → network``.
        period: steps between two checkpoints.
    """

    model: Callable[[int], nn.Module]
    description: str
    steps: int
    period: int
    grids: dict[str, tuple[float, ...]]


PROBLEMS = {
    "transformer": Problem(
        lambda vocabulary: CharacterTransformer(vocabulary, _CONTEXT, width=128, heads=4, layers=2),
        "nn.TransformerEncoder, 2 layers, width 128",
        steps=600,
        period=50,
        grids={"SGD": (0.1, 0.3, 1.0), "AdamW": (1e-3, 3e-3, 1e-2), "KFAC": (0.01, 0.03, 0.1)},
    ),
    "lstm": Problem(
        lambda vocabulary: CharacterLSTM(vocabulary, width=128, layers=1),
        "nn.LSTM, 1 layer, width 128",
        steps=600,
        period=50,
        grids={"SGD": (0.3, 1.0, 3.0), "AdamW": (3e-3, 1e-2, 3e-2), "KFAC": (0.003, 0.01, 0.03)},
    ),
}


def make_optimizer(name: str, model: nn.Module, lr: float, options: Mapping[str, Any]) -> Optimizer:
    """``options`` are K-FAC's own."""
    if name == "SGD":
        return optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "AdamW":
        return optim.AdamW(model.parameters(), lr=lr)
    return KFACOptimizer(model, lr=lr, momentum=0.9, loss_terms=LossTerms.POSITIONS, **options)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bits per character on the validation passages after ``steps`` steps and ``seconds`` of training."""

    steps: int
    seconds: float
    bits: float


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer with one learning rate."""

    optimizer: str
    lr: float
    diverged: bool
    readings: list[Reading]

    @property
    def best_bits(self) -> float:
        return min((reading.bits for reading in self.readings), default=math.inf)

    def reaches(self, bits: float) -> Reading | None:
        return next((reading for reading in self.readings if reading.bits <= bits), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(PROBLEMS), default="transformer", help="default: transformer")
    parser.add_argument("--data-dir", type=Path, help="folder of tinyshakespeare's input.txt (default: from the hub)")
    parser.add_argument("--steps", type=arguments.positive_int, metavar="N", help="default: 600")
    parser.add_argument("--setting", choices=list(SETTINGS), default="exact", help="of K-FAC (default: its defaults)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and passages (default: 0)")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--out", type=Path, default=Path("language-results"), help="folder for PNG and JSON (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one learning rate each, few steps: shows that it runs")


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    problem = PROBLEMS[args.model]
    if args.quick:
        grids = {name: grid[1:2] for name, grid in problem.grids.items()}
        problem = replace(problem, steps=20, period=10, grids=grids)
    if args.steps is not None:
        problem = replace(problem, steps=args.steps, period=min(problem.period, args.steps))
    text = data.tinyshakespeare(args.data_dir)
    runs = run_grids(problem, text, SETTINGS[args.setting](_BATCH), args.seed, console)
    best = [
        min((run for run in runs if run.optimizer == name), key=lambda run: run.best_bits) for name in problem.grids
    ]
    console.print(grid_table(runs), result_table(best))
    report = {
        "benchmark": "language",
        "model": problem.description,
        "tokens": f"{_BATCH} × {_CONTEXT}",
        "steps": problem.steps,
        "setting": args.setting,
        "seed": args.seed,
        "runs": [asdict(run) for run in runs],
        "best": [asdict(run) for run in best],
    }
    json_path, plot_path = (args.out / f"{args.model}.{suffix}" for suffix in ("json", "png"))
    write_json(json_path, report, torch.device("cpu"))
    plot_validation(report, plot_path)
    console.print(f"Plot: {plot_path}. Figures: {json_path}")


def run_grids(problem: Problem, text: TextData, options: Mapping[str, Any], seed: int, console: Console) -> list[Run]:
    """One run for every optimizer and learning rate, all from the same weights and on the same passages."""
    trials = [(name, lr) for name, grid in problem.grids.items() for lr in grid]
    runs = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=problem.steps * len(trials))
        for number, (name, lr) in enumerate(trials):
            done = number * problem.steps
            progress.update(task, description=f"{name}, lr {lr:g}", completed=done)
            tell = functools.partial(_tell, progress, done)
            runs.append(run_one(problem, text, name, lr, options, seed, tell))
        progress.update(task, completed=problem.steps * len(trials))
    return runs


def run_one(
    problem: Problem,
    text: TextData,
    name: str,
    lr: float,
    options: Mapping[str, Any],
    seed: int,
    tell: Callable[[History], None],
) -> Run:
    """Train from the weights and on the passages of ``seed``."""
    torch.manual_seed(seed)
    model = problem.model(text.vocabulary)
    optimizer = make_optimizer(name, model, lr, options)
    validation = list(data.windows(text.validation, itertools.repeat(_BATCH, _VALIDATION_BATCHES), _CONTEXT, seed=0))
    readings: list[Reading] = []

    def observe(history: History) -> None:
        readings.append(Reading(history.steps, history.seconds, bits_per_character(model, validation)))
        tell(history)

    batches = data.windows(text.train, itertools.repeat(_BATCH, problem.steps), _CONTEXT, seed)
    history = train(model, optimizer, batches, next_character_loss, period=problem.period, observe=observe)
    return Run(name, lr, history.diverged, readings)


@torch.no_grad()
def bits_per_character(model: nn.Module, passages: Sequence[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    nats = sum(next_character_loss(model(inputs), targets).item() for inputs, targets in passages) / len(passages)
    model.train()
    return nats / math.log(2)


def _tell(progress: Progress, done: int, history: History) -> None:
    progress.update(progress.task_ids[0], completed=done + history.steps)


def grid_table(runs: Sequence[Run]) -> Table:
    table = Table(title="Learning rates tried", box=box.SIMPLE)
    for heading in ("optimizer", "lr", "lowest bits per character"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for run in runs:
        table.add_row(run.optimizer, f"{run.lr:g}", "diverged" if run.diverged else f"{run.best_bits:.3f}")
    return table


def result_table(best: Sequence[Run]) -> Table:
    """The best of each, and how soon it reached the lowest figures of the two baselines."""
    targets = {run.optimizer: run.best_bits for run in best if run.optimizer != "KFAC"}
    table = Table(title="The best of each; steps and seconds to the lowest figures of the others", box=box.SIMPLE)
    table.add_column("optimizer, lr")
    for heading in ("bits", "seconds", *(f"to {bits:.3f} ({name})" for name, bits in targets.items())):
        table.add_column(heading, justify="right")
    for run in best:
        reached = [run.reaches(bits) for bits in targets.values()]
        seconds = run.readings[-1].seconds if run.readings else math.nan
        cells = ("—" if point is None else f"{point.steps}, {point.seconds:.0f} s" for point in reached)
        table.add_row(f"{run.optimizer}, {run.lr:g}", f"{run.best_bits:.3f}", f"{seconds:.0f}", *cells)
    return table
