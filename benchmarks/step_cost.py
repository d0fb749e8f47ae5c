"""What does a training step cost with KFACOptimizer, as a multiple of the same step with torch.optim.SGD?

A training step is zero_grad, forward, backward and optimizer step, on synthetic data. All variants run interleaved,
in blocks of whole inverse periods, so that statistics and refreshes count with their true frequency; ratios are
medians over rounds. The floor is the arithmetic of K-FAC's plain formulas at the rate of a large matrix product
timed in the same run; the gap is measured overhead over floor overhead. ``default`` is KFACOptimizer at its defaults
but for the periods; ``whole`` keeps all factors whole and takes statistics of all rows, which is what the floor counts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from benchmarks import floor
from benchmarks.arguments import Periods
from benchmarks.harness import (
    Contender,
    chosen_device,
    matmul_rate,
    pin_threads,
    ratio_spread,
    time_interleaved,
    write_json,
)
from benchmarks.memory import peak_growth
from benchmarks.settings import SETTINGS
from benchmarks.variants import LR, MOMENTUM, NEVER, SHORTEST_BLOCK, Variant
from benchmarks.workloads import WORKLOADS, Workload
from kfac_optim import KFACOptimizer

# Each adds one part of K-FAC to the one before: application, statistics, refresh.
_STAGES = (Periods(NEVER, NEVER), Periods(1, NEVER), Periods(1, 1))
_PEER = "kfac_pytorch on 2 cores"


@dataclass(frozen=True, slots=True)
class PeriodCost:
    """Holds the cost of training with one pair of periods.

    Attributes:
        ratio: seconds of a step over those of SGD.
        ratios: its median, lowest and highest over the rounds.
        floor_ratio: the ratio that the floor's arithmetic alone would give.
        gap: measured overhead over the floor's overhead; 1 is the floor.
        peer_ratio: kfac_pytorch's ratio, measured elsewhere.
    """

    periods: str
    seconds: float
    ratio: float
    ratios: dict[str, float]
    floor_ratio: float
    gap: float
    peer_ratio: float | None


@dataclass(frozen=True, slots=True)
class PartCost:
    """Holds the seconds of one part of K-FAC, each time it runs: measured, and by the floor's arithmetic."""

    seconds: float
    floor_seconds: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Holds the costs of one workload under one setting.

    Attributes:
        matmul_rate: floating-point operations per second of a large matrix product.
        state_multiple: bytes of optimizer state beyond SGD's, over the parameters' bytes.
        sgd_peak_bytes: the most that a step takes beyond what is held between steps, with SGD.
        peak_bytes: likewise, with K-FAC, in a step with statistics and a refresh.
        parts: statistics, refresh, application, and update (what is left of the step beyond SGD's).
    """

    model: str
    setting: str
    examples: int
    sgd_seconds: float
    matmul_rate: float
    state_multiple: float
    sgd_peak_bytes: int
    peak_bytes: int
    parts: dict[str, PartCost]
    periods: list[PeriodCost]


def run(args: argparse.Namespace) -> None:
    args.device = chosen_device(args.device)
    console = Console()
    pin_threads(args.threads)
    torch.manual_seed(0)
    rounds, shortest = (1, 0.0) if args.quick else (args.repeats, SHORTEST_BLOCK)
    costs = []
    for name in args.models:
        workload = WORKLOADS[name]
        if args.quick:
            workload = replace(workload, examples=max(workload.examples // 8, 1))
        for setting in args.settings:
            costs.append(measure(name, setting, workload, args.periods, rounds, shortest, args.device, console))
    console.print(ratio_table(costs), parts_table(costs))
    models = [asdict(cost) for cost in costs]
    report = {"benchmark": "step-cost", "quick": args.quick, "repeats": rounds, "models": models}
    write_json(args.out, report, args.device)
    console.print(f"{torch.get_num_threads()} threads on {args.device}. Figures: {args.out}")


def measure(
    name: str,
    setting: str,
    workload: Workload,
    periods: Sequence[Periods],
    rounds: int,
    shortest: float,
    device: torch.device,
    console: Console,
) -> ModelCost:
    """Time one workload with SGD, with K-FAC at each of ``periods``, and with K-FAC less one part after the other.

    Blocks of steps take at least ``shortest`` seconds.
    """
    model = workload.model().to(device)
    inputs, targets = (tensor.to(device) for tensor in workload.batch(workload.examples))
    options = SETTINGS[setting]
    variants = {
        "sgd": _variant(model, workload, None),
        "no layer": _variant(model, workload, Periods(NEVER, NEVER), {"skip_layers": ("*",)}),
        **{str(pair): _variant(model, workload, pair, options) for pair in (*_STAGES, *periods)},
    }
    contenders = []
    for key, variant in variants.items():
        step = functools.partial(variant.step, inputs, targets)
        contenders.append(Contender(key, step, variant.warm_up(step, device, shortest)))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"{name}, {setting}", total=rounds * sum(contender.block for contender in contenders))
        seconds = time_interleaved(contenders, rounds, device, lambda steps: progress.advance(task, steps))
    for key, variant in variants.items():
        variant.check_finite(f"step-cost: {name}, {setting}, {key}")

    # A step with statistics and a refresh has all that any step has.
    peaks = [
        peak_growth(functools.partial(variants[key].step, inputs, targets), device)
        for key in ("sgd", str(Periods(1, 1)))
    ]
    layers = floor.observe(model, inputs)
    rate = matmul_rate(device)
    sgd_seconds = statistics.median(seconds["sgd"])
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    held = variants[str(periods[0])].state_bytes() - variants["sgd"].state_bytes()
    return ModelCost(
        model=name,
        setting=setting,
        examples=workload.examples,
        sgd_seconds=sgd_seconds,
        matmul_rate=rate,
        state_multiple=held / parameter_bytes,
        sgd_peak_bytes=peaks[0],
        peak_bytes=peaks[1],
        parts=_part_costs(seconds, layers, rate),
        periods=[
            _period_cost(pair, seconds, floor.overhead(layers, pair) / rate / sgd_seconds, workload) for pair in periods
        ],
    )


def _variant(
    model: nn.Module, workload: Workload, periods: Periods | None, options: Mapping[str, Any] | None = None
) -> Variant:
    """Make a copy of the model under SGD, where there are no periods, or K-FAC."""

    def make(copied: nn.Module) -> Optimizer:
        if periods is None:
            return torch.optim.SGD(copied.parameters(), lr=LR, momentum=MOMENTUM)
        return KFACOptimizer(
            copied,
            lr=LR,
            momentum=MOMENTUM,
            factor_update_period=periods.factor,
            inverse_update_period=periods.inverse,
            loss_terms=workload.loss_terms,
            **(options or {}),
        )

    return Variant(model, lambda run, inputs, targets: workload.loss(run(inputs), targets), make, periods)


def _period_cost(
    periods: Periods, seconds: Mapping[str, Sequence[float]], floor_overhead: float, workload: Workload
) -> PeriodCost:
    """Return the cost at these periods; ``floor_overhead`` is a multiple of an SGD step."""
    ratios = ratio_spread(seconds[str(periods)], seconds["sgd"])
    return PeriodCost(
        periods=str(periods),
        seconds=statistics.median(seconds[str(periods)]),
        ratio=ratios["median"],
        ratios=ratios,
        floor_ratio=1 + floor_overhead,
        gap=(ratios["median"] - 1) / floor_overhead,
        peer_ratio=workload.peer.get((periods.factor, periods.inverse)),
    )


def _part_costs(
    seconds: Mapping[str, Sequence[float]], layers: Sequence[floor.LayerWork], rate: float
) -> dict[str, PartCost]:
    """Return each part as the difference between a variant with it and one without, in the same round."""
    never, gather, everything = map(str, _STAGES)
    stages = {
        "update": ("no layer", "sgd", 0),
        "application": (never, "no layer", sum(layer.application for layer in layers)),
        "statistics": (gather, never, sum(layer.statistics for layer in layers)),
        "refresh": (everything, gather, sum(layer.refresh for layer in layers)),
    }
    return {
        part: PartCost(
            statistics.median(a - b for a, b in zip(seconds[more], seconds[less], strict=True)), operations / rate
        )
        for part, (more, less, operations) in stages.items()
    }


def ratio_table(costs: Sequence[ModelCost]) -> Table:
    table = Table(
        title="A training step as a multiple of the same step with SGD",
        caption=f"state: multiple of the parameters' bytes; peak: MB that a step takes beyond what is held between "
        f"steps, with SGD / K-FAC; peer: ratio of {_PEER}",
        box=box.SIMPLE,
    )
    table.add_column("model", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    for heading in ("periods", "SGD ms", "K-FAC ms", "ratio", "floor", "gap", "state", "peak", "peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in costs:
        for row in cost.periods:
            table.add_row(
                cost.model,
                cost.setting,
                row.periods,
                f"{1e3 * cost.sgd_seconds:.1f}",
                f"{1e3 * row.seconds:.1f}",
                f"{row.ratio:.2f}",
                f"{row.floor_ratio:.2f}",
                f"{row.gap:.1f}",
                f"{cost.state_multiple:.1f}",
                f"{cost.sgd_peak_bytes / 1e6:.0f} / {cost.peak_bytes / 1e6:.0f}",
                "" if row.peer_ratio is None else f"{row.peer_ratio:.2f}",
            )
        table.add_section()
    return table


def parts_table(costs: Sequence[ModelCost]) -> Table:
    table = Table(title="Milliseconds of each part, each time it runs (floor)", box=box.SIMPLE)
    table.add_column("model")
    table.add_column("setting")
    for part in costs[0].parts:
        table.add_column(part, justify="right")
    for cost in costs:
        cells = (f"{1e3 * part.seconds:.1f} ({1e3 * part.floor_seconds:.1f})" for part in cost.parts.values())
        table.add_row(cost.model, cost.setting, *cells)
    return table
