"""Plots, made from the JSON reports alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_training(report: Mapping[str, Any], path: Path) -> None:
    """Training loss of the best run of each optimizer against steps and against seconds; writes a PNG."""
    title = f"{report['dataset']}: {report['model']}, batch {report['batch_size']}"
    figure, axes = _plot_best(report["best"], "checkpoints", "train_loss", title)
    for each in axes:
        each.axhline(report["target"], color="grey", linestyle="--", label="SGD's best loss")
        each.set_yscale("log")
    axes[0].set_ylabel("loss on the training data")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def plot_validation(report: Mapping[str, Any], path: Path) -> None:
    """Bits per character of the best run of each optimizer against steps and against seconds; writes a PNG."""
    figure, axes = _plot_best(report["best"], "readings", "bits", f"{report['model']}, {report['tokens']} characters")
    axes[0].set_ylabel("bits per character, validation")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def plot_steps(report: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of every step, one panel for each variant; writes a PNG."""
    variants = report["variants"]
    figure = Figure(figsize=(10, 1.6 * len(variants)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(variants), 1, sharex=True, sharey=True)
    for panel, variant in zip(panels, variants, strict=True):
        milliseconds = [1e3 * second for repeat in variant["seconds"] for second in repeat]
        panel.plot(range(len(milliseconds)), milliseconds, linewidth=0.8)
        panel.axhline(1e3 * variant["median"] * report["target"], color="grey", linestyle="--", linewidth=0.8)
        panel.set_title(variant["name"], fontsize="small", loc="left")
        panel.grid(alpha=0.3)
    panels[-1].set_ylim(bottom=0)  # of all panels, and only now: it ends their growing with what is drawn
    panels[-1].set_xlabel(f"steps; the dashed line is {report['target']:g} times the median")
    figure.supylabel("milliseconds")
    figure.savefig(path, dpi=150)


def _plot_best(best: Sequence[Mapping[str, Any]], points: str, value: str, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed, and no global state as with pyplot
    axes = list(figure.subplots(1, 2, sharey=True))
    for each, quantity in zip(axes, ("steps", "seconds"), strict=True):
        for run in best:
            label = f"{run['optimizer']}, lr {run['lr']:g}"
            each.plot([p[quantity] for p in run[points]], [p[value] for p in run[points]], label=label)
        each.set_xlabel(quantity)
        each.grid(alpha=0.3)
    figure.suptitle(title)
    return figure, axes
