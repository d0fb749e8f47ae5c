"""Plots, made from the JSON reports alone, and pictures of solutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure  # bare: no display needed, and no global state as with pyplot
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy import float64
from numpy.typing import NDArray

Image = NDArray[float64]
"""Holds values on a grid."""


def plot_training(report: Mapping[str, Any], path: Path) -> None:
    """Draw the training loss of the best run of each optimizer against steps and against seconds; writes a PNG."""
    title = f"{report['dataset']}: {report['model']}, batch {report['batch_size']}"
    runs = {f"{run['optimizer']}, lr {run['lr']:g}": run["checkpoints"] for run in report["best"]}
    figure, axes = _plot_runs(runs, "train_loss", title)
    for each in axes:
        each.axhline(report["target"], color="grey", linestyle="--", label="SGD's best loss")
        _logarithmic(each, "y")
    axes[0].set_ylabel("loss on the training data")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def plot_steps(report: Mapping[str, Any], path: Path) -> None:
    """Draw milliseconds of every step, one panel for each variant; writes a PNG."""
    variants = report["variants"]
    figure = Figure(figsize=(10, 1.6 * len(variants)), layout="constrained")
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


def plot_reconstruction(report: Mapping[str, Any], path: Path) -> None:
    """Draw the training error of each method against steps and against seconds; writes a PNG."""
    widths = "-".join(map(str, report["widths"]))
    title = f"{report['dataset']}: autoencoder {widths} and mirrored, batch {report['batch_size']}"
    figure, axes = _plot_runs({run["method"]: run["readings"] for run in report["best"]}, "squared_error", title)
    if report["equal_seconds"] is not None:
        axes[1].axvline(report["equal_seconds"], color="grey", linestyle="--", label="equal seconds")
    for each in axes:
        _logarithmic(each, "y")
    axes[0].set_ylabel("squared error on the training data")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def plot_comparison(report: Mapping[str, Any], path: Path) -> None:
    """Draw the measure aimed at against steps and seconds, a line for each optimizer and seed; writes a PNG.

    Baselines are thin, the others thick. What is above the start is not shown: runs that diverge would fill the plot.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = list(figure.subplots(1, 2, sharey=True))
    aim = report["aim"]
    for each, quantity in zip(axes, ("steps", "seconds"), strict=True):
        for number, optimizer in enumerate(report["optimizers"]):
            width = 1 if optimizer["baseline"] else 2.5
            for seed, run in enumerate(optimizer["runs"]):
                label = None if seed else optimizer["name"]
                _draw_readings(each, run, quantity, aim, linewidth=width, label=label, **_style(number))
        for target, style in zip(report["targets"], ("--", ":"), strict=False):
            label = f"{target['value']:.4g}, {target['setter']}"
            each.axhline(target["value"], color="grey", linestyle=style, label=label)
        each.set_xlabel(quantity)
        _logarithmic(each, "y")
        each.grid(alpha=0.3)
    _logarithmic(axes[1], "x")  # optimizers differ much in what a step costs
    starts = [run["readings"][aim][0] for optimizer in report["optimizers"] for run in optimizer["runs"]]
    axes[0].set_ylim(top=1.1 * max(starts))
    axes[0].set_ylabel(report["measure"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{report['title']}, batch {report['batch_size']}", fontsize="medium")
    figure.savefig(path, dpi=150)


def plot_errors(report: Mapping[str, Any], path: Path) -> None:
    """Draw the error of each run of each optimizer against seconds of the processor; writes a PNG.

    Baselines are thin, the others thick.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, optimizer in enumerate(report["optimizers"]):
        width = 1 if optimizer["baseline"] else 2.5
        for seed, run in enumerate(optimizer["runs"]):
            label = None if seed else optimizer["name"]
            # The first reading is at 0 seconds, for which a logarithmic axis has no place.
            seconds, errors = run["readings"]["seconds"][1:], run["readings"]["error"][1:]
            axes.plot(seconds, errors, linewidth=width, label=label, **_style(number))
    for which in ("x", "y"):
        _logarithmic(axes, which)
    axes.set_xlabel("seconds of the processor")
    axes.set_ylabel("error at the test points, root mean square")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{report['title']}, network {report['network']}", fontsize="medium")
    figure.savefig(path, dpi=150)


def plot_returns(report: Mapping[str, Any], path: Path) -> None:
    """Draw the mean return of the last episodes in each run of each optimizer against steps; writes a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, optimizer in enumerate(report["optimizers"]):
        for seed, run in enumerate(optimizer["runs"]):
            label = None if seed else optimizer["name"]
            _draw_readings(axes, run, "steps", "return", label=label, **_style(number))
    axes.axhline(report["solved"], color="grey", linestyle="--", label="solved")
    axes.set_xlabel("steps of the environment")
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("CartPole-v1, the best setting of each, other seeds", fontsize="medium")
    figure.savefig(path, dpi=150)


def plot_solutions(learned: Mapping[str, Image], true: Image, labels: tuple[str, str], title: str, path: Path) -> None:
    """Draw learned solutions on the unit square beside the true one, and what they differ by; writes a PNG.

    Args:
        learned: the solution of each optimizer, ``[vertical, horizontal]``; a row of panels for each.
        true: the same of the true solution.
        labels: the labels of the horizontal and of the vertical axis.
        title: the title of the whole.
        path: the path of the PNG.
    """
    figure = Figure(figsize=(10, 3 * len(learned)), layout="constrained")
    rows = figure.subplots(len(learned), 3, sharex=True, sharey=True, squeeze=False)
    scale = {"vmin": true.min(), "vmax": true.max(), "cmap": "viridis"}
    for (name, solution), panels in zip(learned.items(), rows, strict=True):
        difference = solution - true
        largest = abs(difference).max()
        # Red where it is too high, blue where it is too low, and white where it is right.
        diverging = {"vmin": -largest, "vmax": largest, "cmap": "RdBu_r"}
        shown = (
            (f"{name}, learned", solution, scale),
            ("true", true, scale),
            ("learned − true", difference, diverging),
        )
        for panel, (heading, values, colours) in zip(panels, shown, strict=True):
            image = panel.imshow(values, origin="lower", extent=(0, 1, 0, 1), **colours)
            panel.set_title(heading, fontsize="medium")
            figure.colorbar(image, ax=panel, format="{x:.2g}")
    for panel in rows[-1]:
        panel.set_xlabel(labels[0])
    for panel in rows[:, 0]:
        panel.set_ylabel(labels[1])
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def plot_profile(slowdowns: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw on what part of its problems each optimizer is within a factor of the fastest; writes a PNG.

    Args:
        slowdowns: the seconds of each optimizer over the fastest's, a number for each problem; infinite for a miss.
        path: the path of the PNG.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    reached = [factor for factors in slowdowns.values() for factor in factors if math.isfinite(factor)]
    end = 1.1 * max([*reached, 2.0])
    for number, (name, factors) in enumerate(slowdowns.items()):
        within = sorted(factor for factor in factors if math.isfinite(factor))
        parts = [each / len(factors) for each in range(len(within) + 1)]
        axes.step(
            [1, *within, end],
            [*parts, parts[-1]],
            where="post",
            label=f"{name} ({len(factors)})",
            linewidth=2.5 if name.startswith("KFAC") else 1,
            **_style(number),
        )
    _logarithmic(axes, "x")
    axes.set_xlim(1, end)
    axes.set_xlabel("seconds to the best baseline's target, over those of the fastest optimizer")
    axes.set_ylabel("part of the problems it was run on (how many)")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def plot_batch_sizes(report: Mapping[str, Any], path: Path) -> None:
    """Draw above steps to the target against batch size, below the curves. Training left, validation right; a PNG."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    for column, measure in enumerate(report["measures"]):
        above = figure.add_subplot(2, 2, 1 + column)
        below = figure.add_subplot(2, 2, 3 + column)
        points = measure["batch_sizes"]
        names = [optimizer["name"] for optimizer in points[0]["optimizers"]]
        for number, (name, style) in enumerate(zip(names, ("--", "-"), strict=True)):
            reached = [
                (point["batch_size"], point["optimizers"][number]["arrival"]["steps"])
                for point in points
                if point["optimizers"][number]["arrival"]["steps"]["median"] is not None
            ]
            above.plot(
                [size for size, _ in reached], [steps["median"] for _, steps in reached], f"o{style}", label=name
            )
            for shade, point in enumerate(points):
                run = point["optimizers"][number]["runs"][0]
                label = f"{name}, {point['batch_size']}"
                _draw_readings(below, run, "steps", measure["aim"], color=f"C{shade}", linestyle=style, label=label)
        above.set_xscale("log", base=2)
        _logarithmic(above, "y")
        above.set_xlabel("batch size")
        above.set_ylabel(f"steps to {measure['target']:.4g}")
        above.set_title(f"{measure['aim']}, {measure['units']}", fontsize="medium")
        above.legend()
        starts = [each["runs"][0]["readings"][measure["aim"]][0] for point in points for each in point["optimizers"]]
        below.set_xscale("log", nonpositive="mask")
        _logarithmic(below, "y")
        below.set_ylim(top=1.1 * max(starts))
        below.set_xlabel("steps; one seed")
        below.set_ylabel(f"{measure['aim']}, {measure['units']}")
        below.legend(fontsize="x-small", ncols=2)
        for each in (above, below):
            each.grid(alpha=0.3)
    figure.suptitle(report["title"])
    figure.savefig(path, dpi=150)


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic once all is drawn, with plain numbers, at 1, 2, 5, 10, … where decades are few."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_minpos(), axis.get_data_interval()[1]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _style(number: int) -> dict[str, Any]:
    """Give each of up to 40 lines a look of its own: ten colours that differ, then the same ones broken."""
    return {"color": colormaps["tab10"](number % 10), "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def _draw_readings(axes: Axes, run: Mapping[str, Any], quantity: str, measure: str, **style: Any) -> None:
    axes.plot(run["readings"][quantity], run["readings"][measure], **style)


def _plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], value: str, title: str) -> tuple[Figure, list[Axes]]:
    """Draw ``value`` of the points of each run, by its label, against their ``steps`` and their ``seconds``."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = list(figure.subplots(1, 2, sharey=True))
    for each, quantity in zip(axes, ("steps", "seconds"), strict=True):
        for label, points in runs.items():
            each.plot([point[quantity] for point in points], [point[value] for point in points], label=label)
        each.set_xlabel(quantity)
        each.grid(alpha=0.3)
    figure.suptitle(title)
    return figure, axes
