"""How does K-FAC stand over all problems that `compare` was run on?

Reads the JSON that `compare` left: a table in Markdown, with K-FAC's steps and seconds to each target as multiples (×)
of what the baseline needs that set it; and, of the targets set by the best baselines, the performance profile of every
optimizer: on what part of the problems that it was run on it is within a factor of the fastest (Dolan & Moré 2002,
"Benchmarking optimization software with performance profiles"). With --to the one target of a problem is what that
optimizer reaches, in the median over seeds; problems that it was not run on are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.plots import plot_profile
from benchmarks.problem import Aim
from benchmarks.scores import Arrival, target_of
from benchmarks.study import Ending, Reading, Run

Report = Mapping[str, Any]


def run(args: argparse.Namespace) -> None:
    if args.out.suffix not in (".png", ".pdf", ".svg"):
        raise arguments.UsageError(f"argument --out: expected a file .png, .pdf or .svg, got {str(args.out)!r}")
    reports = [read_report(path) for path in args.reports]
    if args.to is not None:
        reports = [judged_by(report, args.to) for report in reports if args.to in _names(report["optimizers"])]
        if not reports:
            raise arguments.UsageError(f"argument --to: {args.to!r} is in none of these results")
    # Not cut at the width of a terminal: it is to be copied.
    console = Console(width=250, soft_wrap=True)
    console.print(score_table(reports))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot_profile(slowdowns(reports), args.out)
    console.print(f"Plot: {args.out}")


def read_report(path: Path) -> Report:
    """Read what `compare` left.

    Raises:
        UsageError: it is something else.
    """
    try:
        report: Report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise arguments.UsageError(f"argument JSON: {str(path)!r} cannot be read ({error})") from error
    if not isinstance(report, dict) or report.get("benchmark") != "compare":
        raise arguments.UsageError(
            f"argument JSON: expected what `python -m benchmarks compare` leaves, got {str(path)!r}"
        )
    return report


def judged_by(report: Report, setter: str) -> Report:
    """Return the same runs, with what the optimizer ``setter`` reaches as their only target."""
    aim = Aim(report["aim"])
    runs = {
        optimizer["name"]: [_run(optimizer, each) for each in optimizer["runs"]] for optimizer in report["optimizers"]
    }
    target = target_of(setter, runs[setter], aim, report["floor"])
    optimizers = [
        {**optimizer, "arrivals": [Arrival.of(runs[optimizer["name"]], aim, target).as_json()]}
        for optimizer in report["optimizers"]
    ]
    return {**report, "targets": [{"setter": setter, "value": target.value}], "optimizers": optimizers}


def _run(optimizer: Mapping[str, Any], run: Mapping[str, Any]) -> Run:
    columns = run["readings"]
    readings = tuple(
        Reading(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
    )
    ending = Ending(run["ending"])
    return Run(optimizer["name"], optimizer["trial"], run["seed"], optimizer["setting"], ending, readings)


def score_table(reports: Sequence[Report]) -> Table:
    """Make a row for each target of each problem."""
    names = _names(optimizer for optimizer in _optimizers(reports) if not optimizer["baseline"])
    table = Table(box=box.MARKDOWN)
    for heading in ("problem", "target, set by", "its steps, seconds", *names):
        table.add_column(heading, no_wrap=True)
    for report in reports:
        optimizers = {optimizer["name"]: optimizer for optimizer in report["optimizers"]}
        for number, target in enumerate(report["targets"]):
            setter = optimizers[target["setter"]]["arrivals"][number]
            cells = [
                _multiples(optimizers[name], number, setter) if name in optimizers else "not run" for name in names
            ]
            steps, seconds = (setter[quantity]["median"] for quantity in ("steps", "seconds"))
            table.add_row(
                "" if number else report["problem"],
                f"{target['value']:.4g}, {target['setter']}",
                f"{steps:.0f}, {seconds:.3g}",
                *cells,
            )
    return table


def _multiples(optimizer: Mapping[str, Any], target: int, setter: Mapping[str, Any]) -> str:
    arrival = optimizer["arrivals"][target]
    seeds = f"{arrival['reached']} of {len(optimizer['runs'])} seeds"
    if arrival["steps"]["median"] is None:
        return seeds
    multiples = ", ".join(
        f"×{arrival[quantity]['median'] / setter[quantity]['median']:.2f}" if setter[quantity]["median"] else "at start"
        for quantity in ("steps", "seconds")
    )
    return multiples if arrival["reached"] == len(optimizer["runs"]) else f"{multiples} ({seeds})"


def slowdowns(reports: Sequence[Report]) -> dict[str, list[float]]:
    """Return each optimizer's seconds to the best baseline's target over the fastest's, on the problems that it ran on.

    They are infinite where it missed the target.
    """
    found: dict[str, list[float]] = {name: [] for name in _names(_optimizers(reports))}
    for report in reports:
        seconds = {
            optimizer["name"]: optimizer["arrivals"][-1]["seconds"]["median"] for optimizer in report["optimizers"]
        }
        fastest = min(each for each in seconds.values() if each is not None)
        for name, own in seconds.items():
            found[name].append(_slowdown(own, fastest))
    return found


def _slowdown(own: float | None, fastest: float) -> float:
    if own is None:
        return math.inf
    # The fastest needs no time at all where a target is met at the start.
    return 1.0 if own == fastest else own / fastest if fastest > 0 else math.inf


def _optimizers(reports: Sequence[Report]) -> Iterator[Mapping[str, Any]]:
    for report in reports:
        yield from report["optimizers"]


def _names(optimizers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each name once, in order."""
    return list(dict.fromkeys(optimizer["name"] for optimizer in optimizers))
