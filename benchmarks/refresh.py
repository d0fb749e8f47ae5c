"""How much longer than the others is a step that refreshes inverses: together, staggered, in the background?

The autoencoder of Hinton & Salakhutdinov (784-1000-500-250-30 and mirrored, ReLU units) on MNIST, or where no
--data-dir names it on random pixels, cross-entropy summed over them, Monte Carlo estimate, statistics at every step.
All variants start from the same weights and see the same batches. The first three periods, in which the averages are
young, are not timed. After that the variants run interleaved, a period of each in turn; no refresh in the background
runs on into the period of another variant.

A step is as long as its position in the period was in the median of the repeats, so that a hiccup of the machine is not
blamed on the refresh; the longest single step is reported beside it. The background has a thread of its own: the
machine needs a core for it beyond those of --threads.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from benchmarks import arguments, data, plots
from benchmarks.harness import chosen_device, pin_threads, synchronize, write_json
from benchmarks.models import Autoencoder
from benchmarks.workloads import reconstruction_loss
from kfac_optim import Background, KFACOptimizer, LossTerms, MonteCarlo, Staggered, Together, TrustRegion

_TARGET = 1.3  # longest step over median step
_YOUNG = 3  # periods
_MOMENTUM = 0.9

_REFRESHES = {
    "SGD": None,
    "together": Together(),
    "staggered": Staggered(),
    "background": Background(),
    "background, staggered": Background(Staggered()),
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds the seconds of the steps of one variant.

    Attributes:
        seconds: the seconds of each step, by repeat and position in the period.
        median: the median of all steps.
        percentile_95: the 95th percentile of all steps.
        longest: the longest position, in the median over the repeats, over `median`.
        longest_single: the longest step over `median`.
        loss: mean over the batches of the last period; None where it is not finite.
    """

    name: str
    seconds: list[list[float]]
    median: float
    percentile_95: float
    longest: float
    longest_single: float
    loss: float | None


def run(args: argparse.Namespace) -> None:
    args.device = chosen_device(args.device)
    console = Console()
    pin_threads(args.threads)
    images = _images(args).to(args.device)
    variants = [_Variant(name, images, args) for name in _REFRESHES]
    steps = (_YOUNG + args.repeats) * args.period
    console.print(f"{steps} steps of {len(variants)} variants in turns: some minutes in all on two cores.")
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("steps", total=len(variants) * steps)
        for number in range(_YOUNG + args.repeats):
            for variant in variants if number % 2 == 0 else reversed(variants):
                variant.run_period()
                progress.advance(task, args.period)
    measured = [variant.measured() for variant in variants]
    console.print(table(measured))
    report = {
        "benchmark": "refresh",
        "target": _TARGET,
        **{key: getattr(args, key) for key in ("batch_size", "period", "repeats", "lr", "sgd_lr", "damping", "seed")},
        "kl_clip": args.kl_clip,
        "pixels": "random" if args.data_dir is None else "MNIST",
        "variants": [asdict(each) for each in measured],
    }
    write_json(args.out / "refresh.json", report, args.device)
    plots.plot_steps(report, args.out / "refresh.png")
    console.print(f"{torch.get_num_threads()} threads on {args.device}. Figures and plot: {args.out}")


def _images(args: argparse.Namespace) -> Tensor:
    """Return the images, `[images, 784]`."""
    if args.data_dir is None:
        return torch.rand(8 * args.batch_size, 784, generator=torch.Generator().manual_seed(args.seed))
    images = data.mnist(args.data_dir).train.inputs.flatten(1)
    if len(images) < args.batch_size:
        raise arguments.UsageError(f"argument --batch-size: at most the {len(images)} images, got {args.batch_size}")
    return images


class _Variant:
    """Trains the model under one optimizer."""

    def __init__(self, name: str, images: Tensor, args: argparse.Namespace) -> None:
        self.name, self.period, self.device = name, args.period, args.device
        torch.manual_seed(args.seed)
        self.model = Autoencoder().to(args.device)
        refresh = _REFRESHES[name]
        self.optimizer: torch.optim.Optimizer
        if refresh is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.sgd_lr, momentum=_MOMENTUM, nesterov=True)
        else:
            self.optimizer = KFACOptimizer(
                self.model,
                lr=args.lr,
                momentum=_MOMENTUM,
                damping=args.damping,
                kl_clip=args.kl_clip,
                step_size=TrustRegion(),
                factor_update_period=1,
                inverse_update_period=args.period,
                estimate=MonteCarlo(nn.BCEWithLogitsLoss(), loss_terms=LossTerms.EXAMPLES),
                refresh=refresh,
            )
        self.batches: Iterator[tuple[Tensor, Tensor]] = itertools.chain.from_iterable(
            data.batches(data.Split(images, images), args.batch_size, 1, args.seed + epoch)
            for epoch in itertools.count()
        )
        self.seconds: list[list[float]] = []
        self.losses: list[list[Tensor]] = []

    def run_period(self) -> None:
        seconds, losses = [], []
        for inputs, targets in itertools.islice(self.batches, self.period):
            synchronize(self.device)
            started = time.perf_counter()
            self.optimizer.zero_grad()
            loss = reconstruction_loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            synchronize(self.device)
            seconds.append(time.perf_counter() - started)
            losses.append(loss.detach())
        self.optimizer.state_dict()  # waits for refreshes under way
        self.seconds.append(seconds)
        self.losses.append(losses)

    def measured(self) -> StepTimes:
        repeats = self.seconds[_YOUNG:]
        every = sorted(itertools.chain.from_iterable(repeats))
        median = statistics.median(every)
        loss = float(torch.stack(self.losses[-1]).mean())
        return StepTimes(
            name=self.name,
            seconds=repeats,
            median=median,
            percentile_95=every[math.ceil(0.95 * len(every)) - 1],
            longest=max(map(statistics.median, zip(*repeats, strict=True))) / median,
            longest_single=every[-1] / median,
            loss=loss if math.isfinite(loss) else None,
        )


def table(measured: Sequence[StepTimes]) -> Table:
    found = Table(
        *("refresh", "median ms", "95% ms", "longest", "single", "loss, nats"),
        title=f"Steps over the inverse period; no longest one above {_TARGET:g} is the target",
        caption="longest: position in the period; single: step; both over the median",
        box=box.SIMPLE,
    )
    for each in measured:
        found.add_row(
            each.name,
            f"{1e3 * each.median:.0f}",
            f"{1e3 * each.percentile_95:.0f}",
            f"{each.longest:.2f}",
            f"{each.longest_single:.2f}",
            "diverged" if each.loss is None else f"{each.loss:.1f}",
        )
    return found
