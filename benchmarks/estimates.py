"""Which estimate of the Fisher, and which inverse, trains the deep autoencoder best?

The MNIST autoencoder of Hinton & Salakhutdinov (784-1000-500-250-30 and mirrored, ReLU units), batch 1,000,
cross-entropy summed over pixels: one that the empirical Fisher can diverge on. Every method takes the same steps from
the same weights on the same batches, at the same rate, damping and trust region; statistics every 5 steps, inverses
every 20.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from torch import nn

from benchmarks import arguments, data
from benchmarks.harness import pin_threads, write_json
from benchmarks.models import Autoencoder
from benchmarks.training import History, train
from benchmarks.workloads import reconstruction_loss
from kfac_optim import EKFAC, CurvaturePropagation, Eigen, Estimate, KFACOptimizer, LossTerms, MonteCarlo, NewtonSchulz

HELP = "which estimate and which inverse train the deep autoencoder best?"

_BATCH = 1000
_PERIOD = 10  # steps between two readings of the loss
_LAST = 5  # readings whose median is reported


def _named(kind: Callable[..., Estimate]) -> dict[str, object]:
    return {"estimate": kind(nn.BCEWithLogitsLoss(), loss_terms=LossTerms.EXAMPLES)}


_METHODS: dict[str, Callable[[], dict[str, object]]] = {
    "Empirical, Cholesky": dict,
    "MonteCarlo, Cholesky": lambda: _named(MonteCarlo),
    "CurvaturePropagation, Cholesky": lambda: _named(CurvaturePropagation),
    "MonteCarlo, Eigen": lambda: {**_named(MonteCarlo), "inverse": Eigen()},
    "MonteCarlo, EKFAC": lambda: {**_named(MonteCarlo), "inverse": EKFAC()},
    "MonteCarlo, NewtonSchulz": lambda: {**_named(MonteCarlo), "inverse": NewtonSchulz()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: from the hub)")
    parser.add_argument("--steps", type=arguments.positive_int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--lr", type=arguments.positive_float, default=0.3, help="learning rate (default: 0.3)")
    parser.add_argument("--damping", type=arguments.positive_float, default=0.3, help="default: 0.3")
    parser.add_argument("--kl-clip", type=arguments.positive_float, default=0.1, help="default: 0.1")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("estimates.json"), help="JSON file (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    if args.steps < _PERIOD:
        raise arguments.UsageError(f"argument --steps: expected at least {_PERIOD}, one reading, got {args.steps}")
    console = Console()
    pin_threads(args.threads)
    images = data.mnist(args.data_dir).train.inputs.flatten(1)  # [60000, 784]
    runs: dict[str, History] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for name, options in _METHODS.items():
            task = progress.add_task(name, total=args.steps)

            def observe(history: History, task: TaskID = task) -> None:
                progress.update(task, completed=history.steps)

            runs[name] = _train(args, images, options(), observe)
    console.print(_table(runs))
    report = {
        "benchmark": "estimates",
        **{key: getattr(args, key) for key in ("steps", "lr", "damping", "kl_clip", "seed")},
        "runs": [
            {
                "method": name,
                "diverged": history.diverged,
                "loss": _final(history),
                "seconds": history.seconds,
                "highest_rise": None if history.diverged else history.highest_rise,
                "batch_losses": [loss if math.isfinite(loss) else None for loss in history.batch_losses],
            }
            for name, history in runs.items()
        ],
    }
    write_json(args.out, report, torch.device("cpu"))
    console.print(f"Figures: {args.out}")


def _train(
    args: argparse.Namespace, images: torch.Tensor, options: dict[str, object], observe: Callable[[History], None]
) -> History:
    pixels = data.Split(inputs=images, targets=images)
    torch.manual_seed(args.seed)
    model = Autoencoder()
    optimizer = KFACOptimizer(
        model,
        lr=args.lr,
        momentum=0.9,
        damping=args.damping,
        kl_clip=args.kl_clip,
        factor_update_period=5,
        inverse_update_period=20,
        **options,  # type: ignore[arg-type]
    )
    epochs = -(-args.steps // (len(images) // _BATCH))
    batches = itertools.islice(data.batches(pixels, _BATCH, epochs, args.seed), args.steps)
    return train(model, optimizer, batches, reconstruction_loss, period=_PERIOD, observe=observe)


def _final(history: History) -> float | None:
    """Median loss of the last batches; None where the run diverged."""
    return None if history.diverged else statistics.median(history.batch_losses[-_LAST * _PERIOD :])


def _table(runs: dict[str, History]) -> Table:
    columns: Sequence[str] = ("method", "loss, nats", "highest ÷ first loss", "seconds")
    table = Table(*columns, title="MNIST autoencoder, same steps, rate, damping and trust region")
    for name, history in runs.items():
        loss = _final(history)
        table.add_row(
            name,
            "diverged" if loss is None else f"{loss:.1f}",
            "" if history.diverged else f"{history.highest_rise:.2f}",
            f"{history.seconds:.1f}",
        )
    return table
