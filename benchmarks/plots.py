"""Plots, made from the JSON reports alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_training(report: Mapping[str, Any], path: Path) -> None:
    """Training loss of the best run of each optimizer against steps and against seconds; writes a PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed, and no global state as with pyplot
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for axes, quantity in ((by_steps, "steps"), (by_seconds, "seconds")):
        for run in report["best"]:
            points = run["checkpoints"]
            axes.plot(
                [point[quantity] for point in points],
                [point["train_loss"] for point in points],
                label=f"{run['optimizer']}, lr {run['lr']:g}",
            )
        axes.axhline(report["target"], color="grey", linestyle="--", label="SGD's best loss")
        axes.set(yscale="log", xlabel=quantity)
        axes.grid(alpha=0.3)
    by_steps.set_ylabel("loss on the training data")
    by_steps.legend()
    figure.suptitle(f"{report['dataset']}: {report['model']}, batch {report['batch_size']}")
    figure.savefig(path, dpi=150)
