"""What do ranks that train pay for K-FAC beside a statistics worker, and what do they lose per step?

A deep autoencoder of Martens & Grosse (2015) on gloo processes of this machine, the last of which are statistics
workers. Three ways to train, from the same weights and on the same mini-batches: *synchronous*, where those that train
measure and refresh themselves, without workers; *served*, beside the workers; and *plain*, steps of the served
optimizer between rounds, with the inverses it has: no statistics, no refresh, nothing sent to workers.

Losses are of the mini-batches, before each step, averaged over windows of 10 steps. Seconds are those of the processor,
all threads of a process, of the ranks that train alone: the machine may have fewer cores than processes. Served and
plain steps take turns.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import processes
from benchmarks.arguments import Periods, UsageError
from benchmarks.autoencoders import PROBLEMS
from benchmarks.harness import pin_threads, write_json
from benchmarks.models import sparse_autoencoder
from benchmarks.problems import PIXELS, TANH_SCALE
from benchmarks.variants import NEVER
from benchmarks.workloads import reconstruction_loss
from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, StatisticsWorkers

_WINDOW = 10  # steps whose mean loss is compared
_IMAGES = 20_000


@dataclass(frozen=True, slots=True)
class Choices:
    """Holds the arguments, as processes are given them; ``images`` are those of each rank in a step."""

    dataset: str
    data_dir: Path | None
    workers: int
    images: int
    steps: int
    periods: Periods
    max_staleness: int
    repeats: int
    lr: float
    damping: float
    seed: int
    threads: int
    out: Path


@dataclass(frozen=True, slots=True)
class Found:
    """Says what one run came to.

    Attributes:
        losses: ``{way: mean loss of each window}``.
        loss_ratio: the loss of the last window, served over synchronous.
        largest_loss_ratio: the largest such ratio of all windows.
        ratios: processor seconds of served steps over those of plain ones, all ranks that train together, in each turn.
        ratio: their median.
        ratio_of_first: the ratio of the rank that sends the parameters.
        plain_seconds: the seconds of the processor, of a plain step on one rank.
        served_seconds: likewise.
        synchronous_seconds: likewise.
        rounds: mini-batches that each worker has measured.
    """

    losses: dict[str, list[float]]
    loss_ratio: float
    largest_loss_ratio: float
    ratios: list[float]
    ratio: float
    ratio_of_first: float
    plain_seconds: float
    served_seconds: float
    synchronous_seconds: float
    rounds: int


def run(args: argparse.Namespace) -> None:
    if args.workers >= args.ranks:
        raise UsageError(f"argument --workers: expected fewer than the {args.ranks} ranks, got {args.workers}")
    if args.steps % _WINDOW:
        raise UsageError(f"argument --steps: expected a multiple of {_WINDOW}, got {args.steps}")
    PROBLEMS[args.dataset].images(args.data_dir)  # before processes are started, to be told of what is not there
    choices = Choices(
        *(args.dataset, args.data_dir, args.workers, args.images, args.steps, args.periods, args.max_staleness),
        *(args.repeats, args.lr, args.damping, args.seed, args.threads, args.out),
    )
    processes.start(compare, args.ranks, choices)


def compare(choices: Choices) -> None:
    """Run the whole benchmark, on all ranks alike; the first of them shows it."""
    pin_threads(choices.threads)
    images = PROBLEMS[choices.dataset].images(choices.data_dir)[:_IMAGES]
    found = measure(choices, images)
    if found is None or dist.get_rank() > 0:
        return
    ranks = dist.get_world_size()
    console = Console()
    console.print(table(found, ranks, choices.workers))
    arguments = asdict(choices)
    del arguments["out"], arguments["data_dir"]
    report = {"benchmark": "statistics-workers", "ranks": ranks, **arguments, **asdict(found)}
    write_json(choices.out, report, torch.device("cpu"))
    console.print(f"Figures: {choices.out}")


def measure(choices: Choices, images: Tensor) -> Found | None:
    """Train in all three ways and return what was found; return None on workers."""
    workers = StatisticsWorkers(choices.workers, choices.max_staleness)
    role, rank = workers.role(), dist.get_rank()
    synchronous: list[float] = []
    synchronous_seconds = 0.0
    if not role.serves:
        alone = _Trainer(choices, images, DistributedConfig(group=role.group), role.group)
        begin = time.process_time()
        synchronous = alone.train(choices.steps)
        synchronous_seconds = (time.process_time() - begin) / choices.steps
    dist.barrier()
    config = DistributedConfig(workers=workers)
    if role.serves:
        model = _model(choices)
        own = _batches(images, choices, rank)
        rounds = torch.tensor(
            _optimizer(model, choices, config).serve(own, lambda pixels: reconstruction_loss(model(pixels), pixels))
        )
        dist.broadcast(rounds, src=role.workers[0])
        return None
    served = _Trainer(choices, images, config, role.group)
    losses = served.train(choices.steps)
    turns = [served.turn() for _ in range(choices.repeats)]
    served.optimizer.dismiss_workers()
    rounds = torch.zeros((), dtype=torch.int64)
    dist.broadcast(rounds, src=role.workers[0])
    seconds = torch.tensor([[synchronous_seconds] * len(turns), *zip(*turns, strict=True)], dtype=torch.float64)
    of_first = seconds.clone()
    dist.broadcast(of_first, src=0, group=role.group)
    dist.all_reduce(seconds, group=role.group)
    means = (seconds / len(role.trainers)).tolist()
    windows = {"synchronous": _windows(synchronous), "served": _windows(losses)}
    loss_ratios = [ours / theirs for ours, theirs in zip(windows["served"], windows["synchronous"], strict=True)]
    ratios = (seconds[2] / seconds[1]).tolist()
    return Found(
        losses=windows,
        loss_ratio=loss_ratios[-1],
        largest_loss_ratio=max(loss_ratios),
        ratios=ratios,
        ratio=statistics.median(ratios),
        ratio_of_first=statistics.median((of_first[2] / of_first[1]).tolist()),
        plain_seconds=statistics.median(means[1]),
        served_seconds=statistics.median(means[2]),
        synchronous_seconds=means[0][0],
        rounds=int(rounds),
    )


class _Trainer:
    """Trains the autoencoder in DDP on the ranks that train, with K-FAC."""

    def __init__(self, choices: Choices, images: Tensor, config: DistributedConfig, group: dist.ProcessGroup) -> None:
        self._choices, self._group = choices, group
        self._model = DistributedDataParallel(_model(choices), process_group=group)
        self.optimizer = _optimizer(self._model, choices, config)
        self._batches = _batches(images, choices, dist.get_rank())

    def train(self, steps: int) -> list[float]:
        """Train so many steps, and return the mean loss of all ranks that train before each."""
        losses = torch.stack([self._step(pixels) for pixels in itertools.islice(self._batches, steps)])
        dist.all_reduce(losses, group=self._group)
        return (losses / dist.get_world_size(self._group)).tolist()

    def turn(self) -> tuple[float, float]:
        """Return the processor seconds of a plain step and of a served one, each the mean of a period."""
        steps, periods = max(self._choices.periods.common, 2 * _WINDOW), self._choices.periods
        self._set(Periods(NEVER, NEVER))
        self.train(self._choices.max_staleness + 1)  # by then the last round has come back
        plain = self._seconds(steps)
        self._set(periods)
        self.train(periods.common)  # rounds that the pause has put off come at once
        return plain, self._seconds(steps)

    def _seconds(self, steps: int) -> float:
        begin = time.process_time()
        for pixels in itertools.islice(self._batches, steps):
            self._step(pixels)
        return (time.process_time() - begin) / steps

    def _step(self, pixels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = reconstruction_loss(self._model(pixels), pixels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _set(self, periods: Periods) -> None:
        for group in self.optimizer.param_groups:
            group["factor_update_period"], group["inverse_update_period"] = periods.factor, periods.inverse


def _model(choices: Choices) -> nn.Module:
    torch.manual_seed(choices.seed)
    return sparse_autoencoder(PROBLEMS[choices.dataset].widths, nn.Tanh, TANH_SCALE)


def _optimizer(model: nn.Module, choices: Choices, config: DistributedConfig) -> KFACOptimizer:
    return KFACOptimizer(
        model,
        lr=choices.lr,
        momentum=0.9,
        damping=choices.damping,
        estimate=PIXELS,
        factor_update_period=choices.periods.factor,
        inverse_update_period=choices.periods.inverse,
        distributed=config,
    )


def _batches(images: Tensor, choices: Choices, rank: int) -> Iterator[Tensor]:
    """Yield mini-batches of one rank, without end; those of a worker are as large as one of all ranks that train."""
    generator = torch.Generator().manual_seed(1000 * choices.seed + rank)
    trainers = dist.get_world_size() - choices.workers
    size = choices.images if rank < trainers else choices.images * trainers // choices.workers
    while True:
        yield images[torch.randint(len(images), (size,), generator=generator)]


def _windows(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[start : start + _WINDOW]) for start in range(0, len(losses), _WINDOW)]


def table(found: Found, ranks: int, workers: int) -> Table:
    result = Table(
        title=f"{ranks - workers} ranks that train, {workers} statistics worker{'s' if workers > 1 else ''}",
        caption=f"served over plain: {found.ratio:.3f} of the processor seconds of a step, {found.ratio_of_first:.3f} "
        f"on the rank that sends parameters; served over synchronous: {found.loss_ratio:.3f} of the last loss, at most "
        f"{found.largest_loss_ratio:.3f} of any; {found.rounds} rounds",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("way", "processor ms of a step", "first loss", "last loss"):
        result.add_column(heading, justify="right" if heading != "way" else "left")
    seconds = {"synchronous": found.synchronous_seconds, "served": found.served_seconds}
    for way, losses in found.losses.items():
        result.add_row(way, f"{1e3 * seconds[way]:.1f}", f"{losses[0]:.2f}", f"{losses[-1]:.2f}")
    result.add_row("plain", f"{1e3 * found.plain_seconds:.1f}", "", "")
    return result
