"""How far the repeats behind a result lie apart, read off its figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]
Groups = Iterator[tuple[str, Sequence[float]]]
"""Gives what was repeated, and its values: lowest, median and highest, or all of them."""

_SUMMARY = {"median", "low", "high"}
_OPTIMIZERS = {"compare", "pinn", "cart-pole"}
_ONE_SEED = {"quickstart", "defaults", "autoencoders", "preconditioning"}
_ROUNDS = {"step-cost", "distributed", "accelerator", "refresh", "statistics-workers"}  # what they time


@dataclass(frozen=True, slots=True)
class Repeats:
    """Says what was repeated, and how far it lay apart.

    Attributes:
        count: how many repeats there are of each figure.
        of: what differs between them, ``"seeds"`` or ``"rounds"``.
        spreads: (highest − lowest) ÷ median, by the name of the figures: its median over all such figures of the
            result, and the largest. Figures of which one repeat misses its target have none.
    """

    count: int
    of: str
    spreads: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        words = f"{self.count} {self.of if self.count > 1 else self.of.removesuffix('s')}"
        each = (f"{name} {_percent(typical)} ({_percent(widest)})" for name, (typical, widest) in self.spreads.items())
        return ": ".join(filter(None, (words, ", ".join(each))))


def repeats_of(report: Report) -> Repeats | None:
    """Return the repeats behind a result; None where nothing is repeated."""
    name = report.get("benchmark")
    if name in _OPTIMIZERS:
        count, of = len(report["optimizers"][0]["runs"]), "seeds"
    elif name == "batch-size":
        count, of = len(report["measures"][0]["batch_sizes"][0]["optimizers"][0]["runs"]), "seeds"
    elif name == "averaging":
        count, of = len({run["seed"] for problem in report["problems"] for run in problem["runs"]}), "seeds"
    elif name == "range-test":
        count, of = len(report["problems"][0]["recommended"]), "seeds"
    elif name in _ONE_SEED:
        count, of = 1, "seeds"
    elif name in _ROUNDS:
        count, of = report["repeats"], "rounds"
    else:
        return None
    return Repeats(count, of, _spreads(_GROUPS.get(name, _summaries)(report)) if count > 1 else {})


def _spreads(groups: Groups) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, values in groups:
        if middle := statistics.median(values):
            found[name].append((max(values) - min(values)) / abs(middle))
    return {name: (statistics.median(each), max(each)) for name, each in sorted(found.items())}


def _percent(part: float) -> str:
    return f"{part:.{1 if part < 0.0095 else 0}%}" if part < 10 else "> 1,000%"


def _summaries(report: Any, name: str = "") -> Groups:
    """Find every median with its lowest and highest, however deep."""
    if isinstance(report, dict):
        if report.keys() == _SUMMARY:
            if None not in report.values():
                yield name, list(report.values())
        else:
            for key, value in report.items():
                yield from _summaries(value, key)
    elif isinstance(report, list):
        for value in report:
            yield from _summaries(value, name)


def _of_averaging(report: Report) -> Groups:
    for problem in report["problems"]:
        alike = defaultdict(list)
        for run in problem["runs"]:
            for which in ("iterate", "average"):
                for measure, value in (run[which] or {}).items():
                    alike[measure, which, run["lr"], run["decay"]].append(value)
        yield from ((measure, values) for (measure, *_), values in alike.items())


def _of_refresh(report: Report) -> Groups:
    for variant in report["variants"]:
        yield "median step", [statistics.median(period) for period in variant["seconds"]]
        yield "longest step", [max(period) for period in variant["seconds"]]


def _of_statistics_workers(report: Report) -> Groups:
    yield "ratio", report["ratios"]


_GROUPS: dict[str, Callable[[Any], Groups]] = {
    "averaging": _of_averaging,
    "refresh": _of_refresh,
    "statistics-workers": _of_statistics_workers,
}
