"""Which K-FAC trains the deep autoencoders of Martens & Grosse (2015), beside SGD and Adam?

Two problems, known to be hard for first-order methods: MNIST (784-1000-500-250-30 and mirrored) and CURVES
(784-400-200-100-50-25-6 and mirrored), a linear code, sparse initialisation, cross-entropy summed over the pixels, L2
penalty of 1e-5, large batches. Units are tanh. Every method starts from the same weights and sees the same batches.

Each method is trained with each setting of a grid of its own; that with the lowest training cross-entropy at the end
counts. The training error is that of the paper, the squared error of the reconstruction summed over the pixels and
averaged over images, without a factor of 1/2; it is read off on the first 5,000 training images, outside the time that
is measured. Equal seconds are those in which the fastest of the methods has done all its steps: of each method the last
reading by then counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.curves import curves
from benchmarks.harness import leave, pin_threads, without_subnormals
from benchmarks.models import sparse_autoencoder
from benchmarks.plots import plot_reconstruction
from benchmarks.problems import L2, PIXELS, TANH_SCALE
from benchmarks.training import History, train
from benchmarks.workloads import reconstruction_loss
from kfac_optim import (
    EKFAC,
    Cholesky,
    Empirical,
    Estimate,
    Inverse,
    KFACOptimizer,
    LevenbergMarquardt,
    LowRank,
    NewtonSchulz,
    QuadraticModel,
    Subsample,
    TrustRegion,
)

_MOMENTUM = 0.9
_READ = 5000  # training images on which the error is read off
_CURVES = 20_000  # training images, as in the original
_PERIOD = 10  # steps between two readings

Setting = Mapping[str, float]
"""Holds the arguments of an optimizer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes images, and the autoencoder for them.

    Attributes:
        images: ``(data folder or None) → [examples, 784]``.
        widths: the widths of the layers, from the pixels to the code.
        steps: the steps of a full run, unless told otherwise.
    """

    images: Callable[[Path | None], Tensor]
    widths: tuple[int, ...]
    steps: int


PROBLEMS = {
    "mnist": Problem(
        lambda folder: data.mnist(folder).train.inputs.flatten(1), widths=(784, 1000, 500, 250, 30), steps=100
    ),
    "curves": Problem(
        lambda _: curves(_CURVES, seed=0).inputs.flatten(1), widths=(784, 400, 200, 100, 50, 25, 6), steps=200
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """``make(model, batch_size, **setting)`` gives the optimizer; the settings to try are in ``grid``."""

    make: Callable[..., Optimizer]
    grid: tuple[Setting, ...]


def _sgd(model: nn.Module, _: int, lr: float) -> Optimizer:
    return optim.SGD(model.parameters(), lr, momentum=_MOMENTUM, nesterov=True, weight_decay=L2)


def _adam(model: nn.Module, _: int, lr: float) -> Optimizer:
    return optim.Adam(model.parameters(), lr, weight_decay=L2)


def _kfac(choices: Callable[[int], Mapping[str, Any]]) -> Callable[..., Optimizer]:
    """Return a maker of K-FAC; ``choices`` are ``(batch size) → arguments``."""

    def make(model: nn.Module, batch_size: int, **setting: Any) -> Optimizer:
        return KFACOptimizer(
            model,
            momentum=_MOMENTUM,
            weight_decay=L2,
            factor_update_period=5,
            inverse_update_period=20,
            **{"step_size": TrustRegion(), **choices(batch_size)},  # the ranges of kl_clip are those of a fixed region
            **setting,
        )

    return make


def _inverted(estimate: Estimate, inverse: Inverse[Any]) -> Callable[..., Optimizer]:
    return _kfac(lambda _: {"estimate": estimate, "inverse": inverse})


def _settings(*settings: tuple[float, float, float]) -> tuple[Setting, ...]:
    return tuple(dict(zip(("lr", "damping", "kl_clip"), setting, strict=True)) for setting in settings)


# The loss is a sum over 784 pixels, hence trust regions so wide.
_FACTORED = _settings((0.1, 0.1, 100), (0.1, 0.3, 100), (0.3, 0.3, 100))
_EXACT = _settings((0.1, 0.1, 100), (0.1, 0.3, 100), (0.1, 1, 100))
_EMPIRICAL = _settings((0.1, 0.3, 1e3), (1, 3, 1e3), (1, 10, 1e4))

# Rate and momentum by the exact model, damping adapted every 5 steps, L2 in the curvature. Martens & Grosse start from
# a damping of 150 and train for thousands of steps; it falls by a quarter in 5 steps at most, too slowly for hundreds.
_ADAPTIVE: tuple[Setting, ...] = ({"damping": 0.1}, {"damping": 1.0})
_ADAPTED = {
    "estimate": PIXELS,
    "step_size": QuadraticModel(),
    "adapt_damping": LevenbergMarquardt(interval=5),
    "l2_in_curvature": True,
}


def _of_a_quarter(batch_size: int) -> dict[str, Any]:
    """Return thin inverses, and statistics of a quarter of the examples."""
    return {"estimate": PIXELS, "inverse": LowRank(), "subsample": Subsample(examples=max(1, batch_size // 4))}


METHODS = {
    "SGD": Method(_sgd, tuple({"lr": lr} for lr in (0.0003, 0.001, 0.003, 0.01))),
    "Adam": Method(_adam, tuple({"lr": lr} for lr in (0.0003, 0.001, 0.003, 0.01))),
    "Empirical+Cholesky": Method(_inverted(Empirical(), Cholesky()), _EMPIRICAL),
    "MonteCarlo+Cholesky": Method(_inverted(PIXELS, Cholesky()), _FACTORED),
    "MonteCarlo+LowRank": Method(_kfac(_of_a_quarter), _FACTORED),
    "MonteCarlo+NewtonSchulz": Method(_inverted(PIXELS, NewtonSchulz()), _FACTORED[:2]),
    "MonteCarlo+EKFAC": Method(_inverted(PIXELS, EKFAC()), _EXACT),
    "MonteCarlo+adaptive": Method(_kfac(lambda _: _ADAPTED), _ADAPTIVE),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Holds cross-entropy in nats and squared error, both summed over the pixels and averaged over images."""

    steps: int
    seconds: float
    cross_entropy: float
    squared_error: float


@dataclass(frozen=True, slots=True)
class Run:
    """Holds a run of a method with one setting."""

    method: str
    setting: Setting
    diverged: bool
    readings: list[Reading]

    @property
    def result(self) -> float:
        """Return the last cross-entropy; infinite where the run diverged."""
        return math.inf if self.diverged else self.readings[-1].cross_entropy

    def by(self, seconds: float) -> Reading | None:
        """Return the last reading after at most so many seconds."""
        return next((reading for reading in reversed(self.readings) if reading.seconds <= seconds), None)


@dataclass(frozen=True, slots=True)
class Course:
    """Holds what all methods of a comparison have in common: the network, its first weights and its batches.

    Attributes:
        images: ``[examples, 784]``.
    """

    widths: tuple[int, ...]
    images: Tensor
    batch_size: int
    steps: int
    seed: int

    def train(
        self, make: Callable[..., Optimizer], setting: Setting, advance: Callable[[int], object]
    ) -> tuple[bool, list[Reading]]:
        """Return whether training diverged, and readings after every ``_PERIOD`` steps; ``advance`` is told of them."""
        torch.manual_seed(self.seed)
        model = sparse_autoencoder(self.widths, nn.Tanh, TANH_SCALE)
        readings: list[Reading] = []

        def observe(history: History) -> None:
            readings.append(Reading(history.steps, history.seconds, *errors(model, self.images[:_READ])))
            advance(_PERIOD)

        epochs = -(-self.steps // (len(self.images) // self.batch_size))
        pixels = data.Split(inputs=self.images, targets=self.images)
        batches = itertools.islice(data.batches(pixels, self.batch_size, epochs, self.seed), self.steps)
        with without_subnormals():
            history = train(
                model,
                make(model, self.batch_size, **setting),
                batches,
                reconstruction_loss,
                period=_PERIOD,
                observe=observe,
            )
        finite = [reading for reading in readings if math.isfinite(reading.cross_entropy)]
        return history.diverged or len(finite) < len(readings), finite


def run(args: argparse.Namespace) -> None:
    problem = PROBLEMS[args.dataset]
    steps = problem.steps if args.steps is None else args.steps
    if steps % _PERIOD:
        raise arguments.UsageError(
            f"argument --steps: expected a multiple of {_PERIOD}, the steps between two readings, got {steps}"
        )
    if args.dataset == "curves" and args.data_dir is not None:
        raise arguments.UsageError(
            f"argument --data-dir: curves are drawn and read from no folder, got {str(args.data_dir)!r}; "
            f"leave it out, or pass --dataset mnist"
        )
    console = Console()
    pin_threads(args.threads)
    images = problem.images(args.data_dir)
    if args.batch_size > len(images):
        raise arguments.UsageError(
            f"argument --batch-size: expected at most {len(images)}, all training images, got {args.batch_size}"
        )
    course = Course(problem.widths, images, args.batch_size, steps, args.seed)
    runs = run_grids(course, {name: METHODS[name] for name in args.methods}, console)
    best = [min((run for run in runs if run.method == name), key=lambda run: run.result) for name in args.methods]
    seconds = equal_seconds(best)
    console.print(grid_table(runs, best), result_table(best, steps, seconds))
    report = {
        "benchmark": "autoencoders",
        "dataset": args.dataset,
        "widths": problem.widths,
        "batch_size": args.batch_size,
        "steps": steps,
        "seed": args.seed,
        "equal_seconds": seconds,
        "tried": [
            {"method": run.method, "setting": run.setting, "cross_entropy": None if run.diverged else run.result}
            for run in runs
        ],
        "best": [asdict(run) for run in best],
    }
    console.print(leave(args.out, args.dataset, report, plot_reconstruction))


def run_grids(course: Course, methods: Mapping[str, Method], console: Console) -> list[Run]:
    """Make one run for every method and setting."""
    runs = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for name, method in methods.items():
            task = progress.add_task(name, total=len(method.grid) * course.steps)
            advance = functools.partial(progress.advance, task)
            runs += [Run(name, setting, *course.train(method.make, setting, advance)) for setting in method.grid]
    return runs


@torch.no_grad()
def errors(model: nn.Module, images: Tensor) -> tuple[float, float]:
    """Return cross-entropy in nats and squared error of reconstruction, summed over pixels, mean over ``[n, 784]``."""
    logits = model(images)
    squares = (logits.sigmoid() - images).square().sum() / len(images)
    return reconstruction_loss(logits, images).item(), squares.item()


def equal_seconds(runs: Sequence[Run]) -> float | None:
    """Return the training time after which the first of the methods had done all its steps; None where all diverged."""
    return min((run.readings[-1].seconds for run in runs if not run.diverged), default=None)


def grid_table(runs: Sequence[Run], best: Sequence[Run]) -> Table:
    table = Table(title="Training cross-entropy at the end, of each setting", caption="* counts", box=box.SIMPLE)
    for heading in ("method", "setting", "nats", ""):
        table.add_column(heading, justify="right" if heading == "nats" else "left", no_wrap=True)
    for run in runs:
        words = ", ".join(f"{name} {value:g}" for name, value in run.setting.items())
        nats = "diverged" if run.diverged else f"{run.result:.1f}"
        table.add_row(run.method, words, nats, "*" if run in best else "")
    return table


def result_table(runs: Sequence[Run], steps: int, seconds: float | None) -> Table:
    """Show training errors after equal steps, and after equal seconds."""
    table = Table(title="Training error: squared error, and cross-entropy in nats", box=box.SIMPLE)
    table.add_column("method", no_wrap=True)
    by_then = "" if seconds is None else f"by {seconds:.0f} s"
    for heading in (f"{steps} steps", "nats", "seconds", by_then, "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        if run.diverged or seconds is None:
            table.add_row(run.method, "diverged")
            continue
        last, then = run.readings[-1], run.by(seconds)
        table.add_row(
            run.method,
            f"{last.squared_error:.2f}",
            f"{last.cross_entropy:.1f}",
            f"{last.seconds:.0f}",
            *(("—",) if then is None else (f"{then.squared_error:.2f}", str(then.steps))),
        )
    return table
