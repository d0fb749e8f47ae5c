"""What a run's `optimizer.metrics()` say of it: `diagnose` in words, `plot` as a drawing."""

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from statistics import median
from typing import Any

Reported = Mapping[str, float]
History = Sequence[Reported | Sequence[Any]]
"""What `metrics()` gave in the course of a run, or pairs `(step, metrics)`, oldest first."""

_WINDOW = 100  # records that hints are read off
_FEW = 10  # of which nothing is said but counts
_NEARLY_ALL = 0.95
_MANY_SKIPPED = 0.05  # a scaler that finds its scale skips one step in hundreds
_SHORT = 1e-3  # steps are ordinarily held at 1e-2 or more of what the rate makes them
_HARDLY_TURNED = 0.95  # cosine
_LOST = 10.0  # cutoff
_HALF = 0.5
_LITTLE = 0.1  # of the first loss
_GROWN = 10.0  # times a step of the rate
_STANDS, _HIGHER = 0.9, 1.3  # of the first loss, which is of one batch: between them it has stayed, above it is worse
_LONG = 100  # steps in which a loss that can fall has fallen
_PANELS = (
    (("damping",), "log"),
    (("trust_region_scale", "kl_clip"), "log"),
    (("cosine",), "linear"),
    (("condition_A", "condition_G"), "log"),
    (("skipped_steps",), "linear"),
)


def diagnose(history: History) -> list[str]:
    """Say what is wrong in a run, with what was seen and the remedy; an empty list if nothing is.

    It reads the last 100 records, and takes no step. One record, `diagnose([optimizer.metrics()])`, tells counts (but
    for skipped steps) and shares of parameters; what holds for most steps needs 10 records and more.

    Args:
        history: what `optimizer.metrics()` returned from the beginning of the run, or pairs `(step, metrics)`; plain
        metrics count as one per step. The loss may stand among them, as `"loss"`.

    Raises:
        TypeError: an entry is neither.
    """
    records = _records(history)
    if not records:
        return []
    began, first = records[0]
    run = _Window(records[-_WINDOW:], first, began)
    return [hint for ask in _HINTS if (hint := ask(run)) is not None]


def plot(history: History, path: str | os.PathLike[str]) -> Any:
    """Draw damping, trust region, cosine, condition numbers and skipped steps over the run into a file.

    Args:
        history: the history of the run, as for `diagnose`; what it has none of is left out.
        path: the path of the file; its ending says which format, `.png`, `.pdf` or `.svg`.

    Returns:
        The `matplotlib.figure.Figure`, to change and save again.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: an entry of the history is neither metrics nor a pair.
        ValueError: there is nothing to draw.
    """
    records = _records(history)
    known = {name for _, metrics in records for name in metrics}
    panels = [(names, scale) for names, scale in _PANELS if known.intersection(names)]
    if not panels:
        raise ValueError(
            f"kfac_optim: plot found nothing to draw in {len(records)} records. Pass what optimizer.metrics() gave "
            "after steps, or pairs (step, metrics)."
        )
    try:
        figure = importlib.import_module("matplotlib.figure").Figure((8, 2 * len(panels)), layout="constrained")
    except ImportError as error:
        raise ImportError("kfac_optim: plot draws by matplotlib: pip install matplotlib") from error
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (names, scale) in zip(rows, panels, strict=True):
        for name in names:
            points = [(step, metrics[name]) for step, metrics in records if name in metrics]
            if points:
                axes.plot(*zip(*points, strict=True), label=name)
        axes.set_yscale(scale)
        axes.legend(loc="upper left")
    rows[-1].set_xlabel("step")
    figure.savefig(path)
    return figure


def _records(history: History) -> list[tuple[float, Reported]]:
    """Return pairs of step and metrics; the number of an entry is its step where it has none."""
    records: list[tuple[float, Reported]] = []
    for i, entry in enumerate(history):
        pair = (i, entry) if isinstance(entry, Mapping) else tuple(entry) if isinstance(entry, list | tuple) else ()
        if len(pair) != 2 or not isinstance(pair[0], Real) or not isinstance(pair[1], Mapping):
            raise TypeError(
                f"kfac_optim: entry {i} of the history must be what optimizer.metrics() gave, or a pair "
                f"(step, metrics), got {entry!r}. Pass a list of them: [optimizer.metrics(), ...]."
            )
        records.append((float(pair[0]), pair[1]))
    return records


# -- hints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """Holds the records that hints are read off, oldest first, and the metrics and the step that the run began with."""

    records: Sequence[tuple[float, Reported]]
    first: Reported
    began: float

    @property
    def where(self) -> str:
        """Return words for the records, as "the last 40 steps"."""
        every_step = self.steps() == len(self.records) - 1
        return f"the last {len(self.records)} {'steps' if every_step else 'records'}"

    @property
    def last(self) -> Reported:
        return self.records[-1][1]

    def of(self, name: str) -> list[float]:
        """Return its values, without those that are not a number; none if they are few."""
        found = [metrics[name] for _, metrics in self.records if not math.isnan(metrics.get(name, math.nan))]
        return found if len(found) >= _FEW else []

    @property
    def selects(self) -> bool:
        """Return whether the run takes `SelectedUpdates`, which look at no `damping`."""
        return "natural_updates" in self.last

    @property
    def is_bounded(self) -> bool:
        """Return whether a trust region of fixed size holds nearly every step."""
        scales, bounds = self.of("trust_region_scale"), self.of("kl_clip")
        if not scales or not bounds or min(bounds) != max(bounds):  # one that adapts moves while it binds
            return False
        return sum(scale < 1 for scale in scales) >= _NEARLY_ALL * len(scales)

    @property
    def first_loss(self) -> float:
        return self.first.get("loss", math.nan)

    def loss_over_first(self) -> float:
        """Return the median loss over the first one; NaN where that is not known, or not above 0."""
        losses = self.of("loss")
        return median(losses) / self.first_loss if losses and self.first_loss > 0 else math.nan

    def grown(self, name: str) -> int:
        """Return by how much a count has grown; of a single record the count.

        A count falls where another process goes on with the run, or a layer begins anew; only its growth is added up.
        """
        counts = [measures.get(name, 0.0) for _, measures in self.records]
        if len(counts) == 1:
            return int(counts[0])
        return int(sum(max(0.0, after - before) for before, after in pairwise(counts)))

    def steps(self) -> float:
        """Return how many steps lie between the first and the last record, at least 1."""
        return max(1.0, self.records[-1][0] - self.records[0][0])


def _short_steps(run: _Window) -> str | None:
    scales, bounds = run.of("trust_region_scale"), run.of("kl_clip")
    if not scales or not bounds or run.loss_over_first() > _HIGHER:
        return None
    middle, first = median(scales), run.first.get("kl_clip", 0.0)
    if middle <= 0:
        return None
    if run.is_bounded:
        held = sum(scale < 1 for scale in scales) / len(scales)
        return (
            f"The trust region binds in {held:.0%} of {run.where} (median trust_region_scale {middle:.1g}), and "
            f"kl_clip stays {bounds[-1]:.1g}. If the loss falls slowly, raise kl_clip tenfold, or leave step_size at "
            "its default, which finds how far steps may go."
        )
    # Where noise has shrunk the region, steps may be as much shorter.
    shrunk = min(1.0, median(bounds) / first) ** 0.5 if first > 0 else 1.0
    if sum(scale < _SHORT * shrunk for scale in scales) < _NEARLY_ALL * len(scales):
        return None
    return (
        f"The trust region makes steps {middle:.0e} times as long as lr does (median trust_region_scale of "
        f"{run.where}), so that neither lr nor a schedule of it has an effect on layers. For it to have one, divide lr "
        f"by about {1 / middle:.0e}; where the loss hardly falls, raise kl_clip instead."
    )


def _hardly_turned(run: _Window) -> str | None:
    cosines = run.of("cosine")
    if not cosines or median(cosines) < _HARDLY_TURNED or "reduction_ratio" in run.last:  # that finds the damping
        return None
    return (
        f"Hardly anything is preconditioned: the median cosine of {run.where} is {median(cosines):.3f}, with damping "
        f"{run.last.get('damping', math.nan):.1g}. Lower damping tenfold (preconditioner_damping, where that is set); "
        "where the cosine came near 1 as the loss fell, name the loss, estimate=MonteCarlo(criterion). If neither "
        "changes it, the curvature is about the same in all directions, and K-FAC has nothing to gain."
    )


def _flat(run: _Window) -> str | None:
    flat, blocks = run.of("flat_blocks"), run.last.get("blocks", 0.0)
    if not flat or median(flat) <= _HALF * blocks or "reduction_ratio" in run.last or _hardly_turned(run) is not None:
        return None
    if run.selects:
        return None  # whose damping is relative to the curvature
    if run.loss_over_first() < _LITTLE:
        return None  # it has come down, and the empirical Fisher with it
    return (
        f"Damping hides the curvature of {median(flat):.0f} of {blocks:.0f} layers (median flat_blocks of "
        f"{run.where}), with damping {run.last.get('damping', math.nan):.1g}: they take the plain gradient, as in deep "
        "networks whose signals vanish. Lower damping a hundredfold, or pass step_size=SelectedUpdates(), whose "
        "damping is relative to the curvature of each layer."
    )


def _higher_loss(run: _Window) -> str | None:
    if not run.loss_over_first() > _HIGHER:
        return None
    if run.is_bounded:
        remedy = "Lower kl_clip tenfold, or leave step_size at its default"
    elif (scales := run.of("trust_region_scale")) and median(scales) > _GROWN:
        remedy = (
            f"The trust region has grown, and makes steps {median(scales):.0f} times as long as lr does. Pass "
            "step_size=TrustRegion(), whose region does not grow, as where another network moves the loss"
        )
    elif "learning_rate" in run.last:  # `QuadraticModel` finds its own
        remedy = "Raise damping tenfold, or take larger batches"
    else:
        remedy = f"Divide lr by ten{'' if run.selects else ', or raise damping tenfold'}"
    return (
        f"The loss is higher than where it began: {median(run.of('loss')):.3g} in the median of {run.where}, "
        f"{run.first_loss:.3g} at first. {remedy}."
    )


def _rising_loss(run: _Window) -> str | None:
    losses = run.of("loss")
    quarter = len(losses) // 4
    if len(losses) < 4 * _FEW or median(losses[-quarter:]) <= max(losses[:quarter]) or _higher_loss(run) is not None:
        return None
    return (
        f"The loss rises over {run.where}, from a median of {median(losses[:quarter]):.3g} to "
        f"{median(losses[-quarter:]):.3g}: {'lower lr' if run.selects else 'raise damping tenfold'}, let the rate "
        "decay, or evaluate an average, average=IterateAverage()."
    )


def _staying_loss(run: _Window) -> str | None:
    part = run.loss_over_first()
    if not _STANDS <= part <= _HIGHER or run.records[-1][0] - run.began < _LONG or "reduction_ratio" in run.last:
        return None
    if any(ask(run) is not None for ask in (_short_steps, _hardly_turned, _flat, _rising_loss)):
        return None
    if run.selects:
        remedy = "try three times lr, and a third of it"
    else:
        remedy = "lower damping tenfold or a hundredfold, or pass step_size=SelectedUpdates()"
    return (
        f"The loss has stayed where it began: {median(run.of('loss')):.3g} in the median of {run.where}, "
        f"{run.first_loss:.3g} at first. If it can fall, {remedy}."
    )


def _skipped(run: _Window) -> str | None:
    count = run.grown("skipped_steps")
    if count <= _MANY_SKIPPED * run.steps() or len(run.records) < _FEW:
        return None
    return (
        f"{count} steps of {run.where} were skipped, as a gradient was not finite. Look at the loss and the data; "
        f"lower lr{'' if run.selects else ', raise damping'}, or lower the loss scale."
    )


def _refused(run: _Window) -> str | None:
    if not (count := run.grown("refused_statistics")):
        return None
    return (
        f"Statistics were refused {count} times, as they were not finite. Look for inputs or output gradients that "
        "overflow when they are squared: lower the loss scale, normalise the input, pass factor_dtype=torch.float64, "
        "or leave the layer to SGD by skip_layers. If you state set_loss_terms(n), n must be above 0 in each step."
    )


def _failed(run: _Window) -> str | None:
    failed, retried = run.grown("failed_refreshes"), run.grown("retried_refreshes")
    if not failed and not retried:
        return None
    worst = max(run.last.get("condition_A", 0.0), run.last.get("condition_G", 0.0))
    more = "pass a larger inverse=InverseAndRoot(damping=...)" if run.selects else "raise damping tenfold"
    return (
        f"{failed} refreshes of inverses failed and {retried} took more damping (largest condition number "
        f"{worst:.0e}): {more}, or pass factor_dtype=torch.float64."
    )


def _fell_back(run: _Window) -> str | None:
    if not (count := run.grown("fallback_inverses")):
        return None
    return f"NewtonSchulz left {count} inverses to Cholesky: raise damping tenfold, or pass inverse=Cholesky()."


def _dropped(run: _Window) -> str | None:
    if not (count := run.grown("dropped_calls")):
        return None
    return (
        f"{count} calls of layers gave no statistics: their input was changed in place before backward, or backward "
        "came a second time through a graph that was not retained. Write x = x + y for x += y on what a layer was "
        "handed, or pass retain_graph=True."
    )


def _left_out(run: _Window) -> str | None:
    layers = [metrics["unpreconditioned_blocks"] for _, metrics in run.records if "unpreconditioned_blocks" in metrics]
    measured = run.last.get("measured_parameters", 1.0)
    if not layers or (measured >= _HALF and sum(each > 0 for each in layers) <= _HALF * len(layers)):
        return None
    without = f", and {layers[-1]:.0f} layers went without an inverse in the last step" if layers[-1] else ""
    return (
        f"{measured:.0%} of the parameters have statistics{without}. print(optimizer.summary()) says which take the "
        "plain step, and why."
    )


def _cut_off(run: _Window) -> str | None:
    worst = max(run.last.get("cutoff_A", 0.0), run.last.get("cutoff_G", 0.0))
    if worst < _LOST or run.selects:  # whose damping is relative to the mean of each factor
        return None
    return (
        f"Sketches of wide factors give up eigenvalues of up to {worst:.0f} times the damping: keep factors whole by "
        "inverse=Cholesky(), or more of them by LowRank(rank=64, sketch=128)."
    )


_HINTS: tuple[Callable[[_Window], str | None], ...] = (
    _short_steps,
    _hardly_turned,
    _flat,
    _higher_loss,
    _rising_loss,
    _staying_loss,
    _skipped,
    _refused,
    _failed,
    _fell_back,
    _dropped,
    _left_out,
    _cut_off,
)
