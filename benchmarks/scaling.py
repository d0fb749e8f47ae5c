"""How does K-FAC scale to 1,024 ranks? One rank's real code, counted, and plans on paper for a range of machines.

ResNet-50 with 32 images on each rank, BERT-Large with 8 × 512 tokens and a 7B transformer with 4096, in float32, with
``Cholesky``. Bytes, messages and buffers of the sharded layout by segments are counted (``counted_group``): one rank of
many runs its part of a step on a faked process group. All seconds are predicted, from shapes, from messages and from
the rates given, by the model of ``kfac_optim.distributed.CostModel``. A rank is one processor with one link.

Layouts: replicated, with every rank preconditioning all layers (COMM-OPT) or each layer on one rank (MEM-OPT),
and sharded, whose traffic is that of SGD, with layers or factors placed as one. SGD is DDP's. Scaling efficiency is the
mean step on the fewest ranks over that on P, with the same batch on each rank: above 1 where more ranks share the same
refreshes and preconditioning.

No placement gets below the refresh of one largest factor. Last comes what does. ``DoublyFactored`` has no place in
these three: it is for linear layers on flattened maps, as VGG-16's first, of 25,088 inputs, 512 channels by 49 places.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import shapes
from benchmarks.arguments import UsageError
from benchmarks.counted_scaling import CountedPoint, counted_point, counted_table
from benchmarks.harness import write_json
from kfac_optim import BlockDiagonal, NewtonSchulz, Structure
from kfac_optim.distributed import (
    CostModel,
    Placement,
    Plan,
    PlanOptions,
    Replicated,
    Sharded,
    Strategy,
    make_plan,
    predict_sgd,
)

_MODELS = {"resnet50": shapes.resnet50, "bert-large": shapes.bert_large, "7b": shapes.transformer_7b}
_SHOWN = (64, 256, 1024)
_NARROW: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}


@dataclass(frozen=True, slots=True)
class Point:
    """Holds the figures of one model in one layout on some ranks.

    Attributes:
        model: its name.
        layout: its name.
        ranks: P.
        bandwidth: bytes per second of a rank.
        flop_rate: operations per second of matrix products on a rank.
        refresh_imbalance: operations of the busiest rank's refreshes over the mean.
        apply_imbalance: likewise, of preconditioning.
        refresh_floor: the dearest factor's over the mean.
        largest: name of that factor.
        bytes_per_step: the bytes that all ranks send, averaged over the periods.
        sgd_bytes_per_step: likewise, of SGD.
        memory: bytes of K-FAC and momentum on the rank that needs most.
        seconds: the seconds of a step, averaged over the periods.
        longest: the seconds of a step that refreshes.
        sgd_seconds: the seconds of SGD's step.
        efficiency: `seconds` on the fewest ranks over `seconds`.
        sgd_efficiency: likewise, of SGD.
    """

    model: str
    layout: str
    ranks: int
    bandwidth: float
    flop_rate: float
    refresh_imbalance: float
    apply_imbalance: float
    refresh_floor: float
    largest: str
    bytes_per_step: float
    sgd_bytes_per_step: float
    memory: int
    seconds: float
    longest: float
    sgd_seconds: float
    efficiency: float
    sgd_efficiency: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """Says what one change makes of the longest rank's refresh."""

    model: str
    change: str
    ranks: int
    refresh_floor: float
    refresh_seconds: float
    longest: float
    seconds: float


def run(args: argparse.Namespace) -> None:
    console = Console()
    args.ranks, args.counted = sorted(set(args.ranks)), sorted(set(args.counted))
    if 1 in args.counted:
        raise UsageError("argument --counted: one rank alone sends nothing; expected 2 or more")
    options = PlanOptions(factor_update_period=args.periods.factor, inverse_update_period=args.periods.inverse)
    points: list[Point] = []
    remedies: list[Remedy] = []
    counted: list[CountedPoint] = []
    for name in args.models:
        model = _MODELS[name]()
        for bandwidth, rate in itertools.product(args.bandwidths, args.flop_rates):
            points += curve(name, model, args.ranks, cost_model(args, bandwidth, rate), options)
        # A middling machine for what does not depend on its rates, or hardly.
        cost = cost_model(args, args.bandwidths[len(args.bandwidths) // 2], args.flop_rates[-1])
        remedies += what_lowers_the_floor(name, model, args.ranks[-1], cost, options)
        mine = [point for point in points if point.model == name]
        console.print(layout_table(name, mine, cost))
        counted += [counted_point(name, model, number, cost, options) for number in args.counted]
        console.print(efficiency_table(name, mine))
        console.print(remedy_table(name, [each for each in remedies if each.model == name]))
    if counted:
        console.print(counted_table(counted))
    report = {
        "benchmark": "scaling",
        "predicted": ["points", "remedies", "seconds of counted"],
        "latency": args.latency,
        "solver_share": args.solver_share,
        "periods": asdict(args.periods),
        "points": [asdict(point) for point in points],
        "remedies": [asdict(remedy) for remedy in remedies],
        "counted": [asdict(point) for point in counted],
    }
    write_json(args.out / "scaling.json", report, torch.device("cpu"))
    console.print(f"All figures that are not called counted are predictions. JSON: {args.out}")


def cost_model(args: argparse.Namespace, bandwidth: float, flop_rate: float) -> CostModel:
    return CostModel(flop_rate, bandwidth, args.latency, solver_rate=args.solver_share * flop_rate)


def layouts(ranks: int) -> dict[str, Strategy]:
    """Return the ends of the range between communication and memory, and the layout of SGD's traffic."""
    return {
        "COMM-OPT": Replicated(1.0),
        "MEM-OPT": Replicated(1 / ranks),
        "sharded": Sharded(),
        "by factors": Sharded(Placement.FACTORS),
    }


def curve(name: str, model: shapes.Model, ranks: Sequence[int], cost: CostModel, options: PlanOptions) -> list[Point]:
    """Return points of every layout over the numbers of ranks, the first of which is what efficiency refers to."""
    sgd = [predict_sgd(model, number, cost, options).mean for number in ranks]
    words = sum(each.words for each in model)
    points = []
    for layout in layouts(1):
        plans = [make_plan(model, number, layouts(number)[layout], cost, options) for number in ranks]
        for plan, sgd_seconds in zip(plans, sgd, strict=True):
            seconds = plan.seconds
            points.append(
                Point(
                    model=name,
                    layout=layout,
                    ranks=plan.ranks,
                    bandwidth=cost.bandwidth,
                    flop_rate=cost.flop_rate,
                    refresh_imbalance=plan.refresh_imbalance,
                    apply_imbalance=plan.apply_imbalance,
                    refresh_floor=plan.refresh_floor,
                    largest=plan.largest_part[0],
                    bytes_per_step=float(plan.bytes_per_step),
                    sgd_bytes_per_step=2.0 * (plan.ranks - 1) * words * options.parameter_dtype.itemsize,
                    memory=plan.memory_per_rank,
                    seconds=seconds.mean,
                    longest=seconds.longest,
                    sgd_seconds=sgd_seconds,
                    efficiency=plans[0].seconds.mean / seconds.mean,
                    sgd_efficiency=sgd[0] / sgd_seconds,
                )
            )
    return points


def what_lowers_the_floor(
    name: str, model: shapes.Model, ranks: int, cost: CostModel, options: PlanOptions
) -> list[Remedy]:
    """Try the sharded layout with other forms of the widest factors, or refreshes beside the training."""
    widest = max(dim for each in model for dim in _dense_dims(each))
    changes = {
        "as it is": model,
        "factors apart": model,
        f"dense up to {2 * shapes.MAX_FACTOR_DIM}": shapes.keeping(
            model, 2 * shapes.MAX_FACTOR_DIM, Structure.DIAGONAL
        ),
        f"Structure.DIAGONAL above {widest // 2}": shapes.keeping(model, widest // 2, Structure.DIAGONAL),
        **{
            f"BlockDiagonal({size}) above it": shapes.keeping(model, size, BlockDiagonal(size))
            for size in (2048, 1024, 512)
            if size < widest
        },
        "NewtonSchulz, products alone": shapes.with_inverse(model, NewtonSchulz()),
    }
    remedies = []
    for change, changed in changes.items():
        if change.startswith("dense") and changed == model:
            continue
        placement = Placement.FACTORS if change == "factors apart" else Placement.LAYERS
        products = change.startswith("NewtonSchulz")
        plan = make_plan(
            changed, ranks, Sharded(placement), _with_solver_of_products(cost) if products else cost, options
        )
        remedies.append(_remedy(name, change, plan, plan.seconds.longest))
        if change == "as it is":
            # Spread evenly over the period, which one factor in one piece can be only beside the steps.
            spread = plan.seconds.shortest + (plan.seconds.longest - plan.seconds.shortest) / plan.seconds.period
            remedies.append(_remedy(name, "Background, over the period", plan, spread))
    return remedies


def layout_table(name: str, points: Sequence[Point], cost: CostModel) -> Table:
    found = Table(
        *("ranks", "layout", "refresh", "floor", "apply", "bytes", "GB", "ms", "longest", "SGD"),
        title=f"{name}: {cost.bandwidth / 1e9:g} GB/s, {cost.flop_rate / 1e12:g} Tflop/s",
        caption="refresh, apply: busiest rank over the mean; floor: the dearest factor alone\n"
        "bytes: sent, over SGD's; GB: K-FAC and momentum on a rank; ms: mean and longest step",
        **_NARROW,
    )
    shown = [p for p in points if (p.bandwidth, p.flop_rate) == (cost.bandwidth, cost.flop_rate)]
    all_ranks = {point.ranks for point in shown}
    for ranks in [each for each in _SHOWN if each in all_ranks] or sorted(all_ranks):
        for point in (each for each in shown if each.ranks == ranks):
            found.add_row(
                str(ranks),
                point.layout,
                *map(_short, (point.refresh_imbalance, point.refresh_floor, point.apply_imbalance)),
                f"{point.bytes_per_step / point.sgd_bytes_per_step:.3f}" if point.sgd_bytes_per_step else "",
                _short(point.memory / 1e9),
                *(_short(1e3 * seconds) for seconds in (point.seconds, point.longest, point.sgd_seconds)),
            )
    return found


def efficiency_table(name: str, points: Sequence[Point]) -> Table:
    ranks = sorted({point.ranks for point in points})
    found = Table(
        *("GB/s", "Tflop", "layout", *map(str, ranks)),
        "/SGD",
        title=f"{name}: scaling efficiency from {ranks[0]} ranks",
        caption=f"/SGD: mean step over SGD's on {ranks[-1]} ranks",
        **_NARROW,
    )
    kinds = dict.fromkeys((point.bandwidth, point.flop_rate) for point in points)
    for bandwidth, rate in kinds:
        here = [point for point in points if (point.bandwidth, point.flop_rate) == (bandwidth, rate)]
        machine = (f"{bandwidth / 1e9:g}", f"{rate / 1e12:g}")
        for layout in dict.fromkeys(point.layout for point in here):
            line = [point for point in here if point.layout == layout]
            share = f"{line[-1].seconds / line[-1].sgd_seconds:.2f}"
            found.add_row(*machine, layout, *(f"{point.efficiency:.2f}" for point in line), share)
        line = [point for point in here if point.layout == here[0].layout]
        found.add_row(*machine, "SGD", *(f"{point.sgd_efficiency:.2f}" for point in line), "")
    return found


def remedy_table(name: str, remedies: Sequence[Remedy]) -> Table:
    found = Table(
        *("sharded", "floor", "refresh ms", "longest ms", "mean ms"),
        title=f"{name}, {remedies[0].ranks} ranks: what lowers the floor of the widest factor",
        caption="refresh: of the busiest rank; longest and mean: step",
        **_NARROW,
    )
    for each in remedies:
        milliseconds = (_short(1e3 * seconds) for seconds in (each.refresh_seconds, each.longest, each.seconds))
        found.add_row(each.change, _short(each.refresh_floor), *milliseconds)
    return found


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2f}"


def _remedy(name: str, change: str, plan: Plan, longest: float) -> Remedy:
    return Remedy(
        model=name,
        change=change,
        ranks=plan.ranks,
        refresh_floor=plan.refresh_floor,
        refresh_seconds=plan.seconds.refresh,
        longest=longest,
        seconds=plan.seconds.mean,
    )


def _with_solver_of_products(cost: CostModel) -> CostModel:
    """Return the cost model for an inverse made of matrix products: its solver runs at their rate."""
    return CostModel(cost.flop_rate, cost.bandwidth, cost.latency)


def _dense_dims(each: object) -> list[int]:
    spec = getattr(each, "spec", None)
    return [] if spec is None else [each.dim for each in spec.factors() if each.structure is Structure.DENSE]
