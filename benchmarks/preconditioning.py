"""Does K-FAC precondition at all, and is its cold start safe?

The MNIST autoencoder of Hinton & Salakhutdinov (784-1000-500-250-30 and mirrored, ReLU units, batch 512) is trained
with KFACOptimizer at its defaults, learning rate and momentum apart. A cosine near 1 between the raw and the
preconditioned gradient would mean that damping swamps the curvature and the optimizer is SGD in disguise; a training
loss above its first value would mean that the first inverses, made from few statistics, are not held.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from benchmarks import arguments, data
from benchmarks.harness import pin_threads, write_json
from benchmarks.models import Autoencoder
from benchmarks.training import History, train
from benchmarks.workloads import reconstruction_loss
from kfac_optim import KFACOptimizer

_BATCH = 512
_PERIOD = 10  # steps between two readings of the cosine
_LAST = 10  # readings whose median is reported: the last 100 steps


def run(args: argparse.Namespace) -> None:
    if args.steps < _PERIOD:
        raise arguments.UsageError(f"argument --steps: expected at least {_PERIOD}, one reading, got {args.steps}")
    console = Console()
    pin_threads(args.threads)
    images = data.mnist(args.data_dir).train.inputs.flatten(1)  # [60000, 784]
    pixels = data.Split(inputs=images, targets=images)
    torch.manual_seed(args.seed)
    model = Autoencoder()
    optimizer = KFACOptimizer(model, lr=args.lr, momentum=0.9)
    epochs = -(-args.steps // (len(images) // _BATCH))
    batches = itertools.islice(data.batches(pixels, _BATCH, epochs, args.seed), args.steps)
    cosines: list[float] = []
    scales: list[float] = []

    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("autoencoder", total=args.steps)

        def observe(history: History) -> None:
            metrics = optimizer.metrics()
            cosines.append(metrics["cosine"])
            scales.append(metrics["trust_region_scale"])
            progress.update(task, completed=history.steps)

        history = train(model, optimizer, batches, reconstruction_loss, period=_PERIOD, observe=observe)
    report = {
        "benchmark": "preconditioning",
        "lr": args.lr,
        "seed": args.seed,
        "diverged": history.diverged,
        "highest_rise": None if history.diverged else history.highest_rise,
        "median_cosine": statistics.median(cosines[-_LAST:]) if cosines else None,
        "reading_period": _PERIOD,
        "cosines": cosines,
        "trust_region_scales": scales,
        "batch_losses": [loss if math.isfinite(loss) else None for loss in history.batch_losses],
    }
    console.print(_table(history, cosines, scales))
    write_json(args.out, report, torch.device("cpu"))
    console.print(f"Figures: {args.out}")


def _table(history: History, cosines: Sequence[float], scales: Sequence[float]) -> Table:
    table = Table(title="MNIST autoencoder, KFACOptimizer with its defaults", show_header=False)
    table.add_row("steps", str(history.steps))
    table.add_row(
        "loss of the first and the last batch, nats", f"{history.batch_losses[0]:.1f} → {history.batch_losses[-1]:.1f}"
    )
    table.add_row("highest loss ÷ first loss", "diverged" if history.diverged else f"{history.highest_rise:.2f}")
    if cosines:
        table.add_row(
            f"median cosine(∇, Δ), last {len(cosines[-_LAST:])} readings", f"{statistics.median(cosines[-_LAST:]):.3f}"
        )
        table.add_row("lowest and highest cosine", f"{min(cosines):.3f}, {max(cosines):.3f}")
        table.add_row("lowest trust-region scale", f"{min(scales):.1e}")
    return table
