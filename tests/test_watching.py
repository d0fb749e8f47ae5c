"""Watching a run: `metrics()` as a dict that is read late, their table, the recipes, `diagnose` and `plot`."""

import copy
import itertools
import json
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain import batch, mlp, train
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    LowRank,
    NewtonSchulz,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    TrustRegion,
)
from kfac_optim.watching import diagnose, plot

GUIDE = (Path(__file__).parents[1] / "kfac_optim" / "README.md").read_text()
CRITERION = nn.MSELoss()
EACH_STEP: dict[str, Any] = {"factor_update_period": 1, "inverse_update_period": 1}


def recipe(title: str) -> str:
    found = re.search(rf"<!-- {title} -->\n```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert found is not None
    return found[1]


# -- metrics, read late ------------------------------------------------------------------------------------------


def measured() -> tuple[nn.Module, KFACOptimizer]:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, **EACH_STEP)
    train(model, optimizer, 2)
    return model, optimizer


def test_metrics_are_of_the_step_after_which_they_were_asked_for() -> None:
    model, optimizer = measured()
    late, at_once = optimizer.metrics(), dict(optimizer.metrics())
    train(model, optimizer, 3, start=2)
    model[0].weight.grad.fill_(torch.nan)
    optimizer.step()
    after = optimizer.metrics()
    assert late == at_once
    assert all(after[name] != late[name] for name in ("cosine", "condition_A", "skipped_steps"))


READS: dict[str, Callable[[dict[str, float]], Any]] = {
    "item": lambda m: m["cosine"],
    "dict": dict,
    "stars": lambda m: {**m},
    "keywords": lambda m: dict(**m),
    "update": lambda m: (d := {"cosine": 0.0, "loss": 1.0}).update(m) or d,
    "or": lambda m: m | {"loss": 1.0},
    "or from the right": lambda m: {"loss": 1.0} | m,
    "json": lambda m: json.loads(json.dumps(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "own copy": lambda m: m.copy(),
    "one of its kind": lambda m: dict(type(m)(m.items()), loss=1.0),
    "values": lambda m: list(m.values()),
    "items": lambda m: list(m.items()),
    "loop": lambda m: {name: m[name] for name in m},
    "get": lambda m: (m.get("cosine"), m.get("nothing", 1.0)),
    "pop": lambda m: (m.pop("cosine"), len(m), "cosine" in m, m["condition_A"]),
    "popitem": lambda m: m.popitem(),
    "setdefault": lambda m: m.setdefault("cosine", 0.0),
    "repr": repr,
    "unequal": lambda m: m != {**m},
    "written before": lambda m: (m.update(cosine=2.0), m.pop("kl_clip"), m.items() >= {("cosine", 2.0)}, {**m})[2:],
    "deleted before": lambda m: (m.__delitem__("cosine"), {**m}),
}


def test_metrics_are_a_dict_of_floats_to_whoever_reads_them() -> None:
    _, optimizer = measured()
    plain = dict(optimizer.metrics())
    assert {type(value) for value in plain.values()} == {float}
    assert 0 < plain["cosine"] < 1
    for name, read in READS.items():
        found = read(optimizer.metrics())
        assert found == read(dict(plain)), name
        assert isinstance(found, type(read(dict(plain)))), name


def test_metrics_are_read_from_a_file_of_torch(tmp_path: Path) -> None:
    _, optimizer = measured()
    torch.save({"metrics": optimizer.metrics()}, tmp_path / "run.pt")
    assert dict(torch.load(tmp_path / "run.pt")["metrics"]) == dict(optimizer.metrics())


# -- their table -------------------------------------------------------------------------------------------------


def every_name() -> set[str]:
    """The names that runs of each kind give."""
    targets = torch.ones(8, 3, dtype=torch.float64)
    runs: list[dict[str, Any]] = [
        {"inverse": {"0": EKFAC(), "2": NewtonSchulz()}},
        {"inverse": LowRank(1), "step_size": QuadraticModel(), "adapt_damping": LevenbergMarquardt()},
        {"step_size": SelectedUpdates()},
        {"step_size": LineSearch(), "inverse": SampleSpace(), "momentum": 0.0},
    ]
    names: set[str] = set()
    for options in runs:
        model = mlp()
        optimizer = KFACOptimizer(model, **{"lr": 1.0, "momentum": 0.9, "estimate": ExactGGN(CRITERION), **options})

        def closure(model: nn.Module = model, optimizer: KFACOptimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = CRITERION(model(batch()), targets)
            loss.backward()
            return loss.detach()

        for _ in range(6):
            optimizer.step(closure)
        names |= optimizer.metrics().keys()
    return names


def test_the_table_of_the_guide_has_every_name_of_metrics_and_no_other() -> None:
    table = re.search(r"<!-- the names of metrics\(\) -->\n.*?\n\|[-|]+\|\n(.*?)\n\n", GUIDE, flags=re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in row.split(" | ")] for row in table[1].splitlines()]
    names = [name for first, *_ in rows for name in re.findall(r"`(\w+)`", first)]
    assert sorted(names) == sorted(every_name())
    assert all(len(row) == 3 and all(row) for row in rows)


# -- recipes -----------------------------------------------------------------------------------------------------


def test_the_recipe_for_tensorboard_writes_what_it_then_shows(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
    _, optimizer = measured()
    with SummaryWriter(tmp_path) as writer:
        exec(recipe("the recipe for TensorBoard"), {"optimizer": optimizer, "writer": writer, "step": 7})
    shown = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag.removeprefix("kfac/"): shown.Scalars(tag) for tag in shown.Tags()["scalars"]}
    assert {name: event.value for name, (event,) in scalars.items()} == pytest.approx(optimizer.metrics(), rel=1e-6)
    assert {event.step for (event,) in scalars.values()} == {7}


def test_hints_and_a_drawing_are_made_as_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, optimizer = measured()
    names = {"optimizer": optimizer, "history": [], "step": 1, "loss": torch.ones(())}
    exec(recipe("hints and a drawing"), names)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


# -- drawings ----------------------------------------------------------------------------------------------------


def test_a_drawing_has_the_values_of_the_history_at_its_steps(tmp_path: Path) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, **EACH_STEP)
    history: list[Any] = [(0, optimizer.metrics())]  # has nothing but counts
    for step in (1, 2, 3):
        train(model, optimizer, 1, start=step)
        history.append((10 * step, optimizer.metrics()))
    figure = plot(history, tmp_path / "run.svg")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    assert "</svg>" in (tmp_path / "run.svg").read_text()
    assert lines.keys() == {
        *("damping", "trust_region_scale", "kl_clip", "cosine", "condition_A", "condition_G", "skipped_steps"),
    }
    for name, line in lines.items():
        known = [(step, metrics[name]) for step, metrics in history if name in metrics]
        assert [(x, y) for x, y in zip(*line.get_data(), strict=True)] == known, name


def test_plot_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"nothing to draw in 1 records.*optimizer\.metrics\(\)"):
        plot([{"loss": 1.0}], tmp_path / "run.png")
    with pytest.raises(TypeError, match=r"entry 1 of the history.*got 0\.5.*\[optimizer\.metrics\(\), \.\.\.\]"):
        plot([{"cosine": 0.5}, 0.5], tmp_path / "run.png")  # type: ignore[list-item]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot([{"cosine": 0.5}], tmp_path / "run.png")


# -- hints -------------------------------------------------------------------------------------------------------

Data = Iterator[Tensor]


def inputs(width: int = 8) -> Data:
    while True:
        yield torch.randn(32, width)


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))


def vanishing() -> nn.Sequential:
    """Return a network whose layers each make signals and gradients a few times smaller."""
    hidden = [part for _ in range(10) for part in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


def watched(model: nn.Module, data: Data, steps: int = 40, **options: Any) -> list[Mapping[str, float]]:
    """The history of a run that learns a fixed network, losses among it."""
    torch.manual_seed(1)
    teacher = network(next(data).shape[1])
    optimizer = KFACOptimizer(model, **{"lr": 0.03, "momentum": 0.9, "nonfinite_limit": None, **options})
    history = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in itertools.islice(data, steps):
            targets = teacher(x.nan_to_num().clamp(-9, 9)).detach()

            def closure(x: Tensor = x, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = CRITERION(model(x), targets)
                loss.backward()
                return loss.detach()

            loss = optimizer.step(closure)
            history.append({"loss": float(loss), **optimizer.metrics()})
    return history


def spoilt(every: int, value: float) -> Data:
    """Inputs of which every so manyth batch has such a number."""
    for step, x in enumerate(inputs()):
        if step % every == 1:
            x[0, 0] = value
        yield x


def of_rank(rank: int, width: int) -> Data:
    directions = torch.randn(rank, width)
    for x in inputs(rank):
        yield x @ directions


HUGE = 1e25


class Overflowing(nn.Sequential):
    """The square of an input overflows where an example begins so, and no gradient does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        huge = torch.where(x[:, :1] == HUGE, HUGE, 1.0)
        out: Tensor = self[0](torch.where(x == HUGE, 0.0, x) * huge) / huge
        return out


class InPlace(nn.Module):
    """Autocast keeps a cast copy for backward, so that the input of a layer may be overwritten before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.layer(x)
        x.zero_()
        return out.float()


CASES: dict[str, tuple[Callable[[], list[Mapping[str, float]]], str]] = {
    "lr far too large": (
        lambda: watched(network(), inputs(), lr=1e4),
        r"makes steps \de-0\d times as long as lr does .* of the last 40 steps\).* divide lr by about 1?\de\+0\d",
    ),
    "a fixed region that binds": (
        lambda: watched(network(), inputs(), step_size=TrustRegion(), kl_clip=1e-6),
        r"binds in 100% of the last 40 steps \(median trust_region_scale 0\.\d+\), and kl_clip stays 1e-06\. .* raise",
    ),
    "far too much damping": (
        lambda: watched(network(), inputs(), damping=1e4),
        r"median cosine of the last 40 steps is (0\.99\d|1\.000), with damping 1e\+04\. Lower damping tenfold \(prec",
    ),
    "signals that vanish": (
        lambda: watched(vanishing(), inputs()),
        r"hides the curvature of [78] of 11 layers \(.* of the last 40 steps\), with damping 0\.001: .* a hundredfold",
    ),
    "a fixed region that is too large": (
        lambda: watched(network(), inputs(), lr=1e3, momentum=0.0, step_size=TrustRegion(), kl_clip=100.0),
        r"The loss is higher than where it began: .* Lower kl_clip tenfold, or leave step_size at its default",
    ),
    "selected updates at too high a rate": (
        lambda: watched(network(), inputs(), lr=3.0, step_size=SelectedUpdates()),
        r"The loss is higher than where it began: \S+ in the median .* \S+ at first\. Divide lr by ten\.$",
    ),
    "a region that has grown while another network moved the loss": (
        lambda: [{"loss": loss, "trust_region_scale": 300.0} for loss in (1.0, *[9.0] * 30)],
        r"The loss is higher .* makes steps 300 times as long as lr does\. Pass step_size=TrustRegion\(\), whose",
    ),
    "a quadratic model that is not trusted": (
        lambda: [{"loss": loss, "learning_rate": 0.1} for loss in (1.0, *[9.0] * 30)],
        r"The loss is higher than where it began: .* Raise damping tenfold, or take larger batches\.$",
    ),
    "a loss that stays": (
        lambda: watched(network(), inputs(), steps=120, lr=1e-9),
        r"The loss has stayed where it began: .* If it can fall, lower damping",
    ),
    "a loss that rises": (
        lambda: [{"loss": 9.0}, *({"loss": 1 + step / 100} for step in range(100))],
        r"The loss rises over the last 100 steps, from a median of 1\.12 to 1\.87: raise damping tenfold",
    ),
    "gradients that are not finite": (
        lambda: watched(network(), spoilt(4, float("nan"))),
        r"9 steps of the last 40 steps were skipped, as a gradient was not finite\. Look at the loss and the data",
    ),
    "statistics that overflow": (
        lambda: watched(Overflowing(), spoilt(4, HUGE), **EACH_STEP),
        r"Statistics were refused \d+ times, as they were not finite\. Look for inputs",
    ),
    "factors that are hardly regular": (
        lambda: watched(network(), of_rank(2, 8), damping=1e-30, **EACH_STEP),
        r"refreshes of inverses failed and \d+ took more damping \(largest condition number .*\): raise damping",
    ),
    "an iteration that does not converge": (
        lambda: watched(network(), inputs(), damping=1e-9, inverse=NewtonSchulz(1, 1e-6), **EACH_STEP),
        r"NewtonSchulz left \d+ inverses to Cholesky: raise damping tenfold, or pass inverse=Cholesky\(\)",
    ),
    "inputs changed in place": (
        lambda: watched(InPlace(), inputs(), **EACH_STEP),
        r"\d+ calls of layers gave no statistics: their input was changed in place",
    ),
    "most of the model left out": (
        lambda: watched(network(), inputs(), skip_layers=["0"]),
        r"27% of the parameters have statistics\. print\(optimizer\.summary\(\)\) says which take",
    ),
    "a part left out, and inverses that are missing at the end": (
        lambda: [{"measured_parameters": 0.3, "unpreconditioned_blocks": count} for count in (0.0, 0.0, 2.0)],
        r"^30% of the parameters have statistics, and 2 layers went without an inverse in the last step\. print",
    ),
    "a part left out, and late inverses of the rest": (
        lambda: [{"measured_parameters": 0.3, "unpreconditioned_blocks": count} for count in (4.0, 4.0, 0.0)],
        r"^30% of the parameters have statistics\. print",
    ),
    "white noise in wide layers": (
        lambda: watched(network(256), inputs(256), damping=1e-5),
        r"Sketches of wide factors give up eigenvalues of up to \d+ times the damping: keep factors whole",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hint_says_what_was_seen_and_what_to_do(name: str) -> None:
    run, expected = CASES[name]
    hints = diagnose(run())
    assert any(re.search(expected, hint) for hint in hints), hints


HEALTHY: dict[str, Callable[[], list[Mapping[str, float]]]] = {
    "default": lambda: watched(network(), inputs(), steps=120),
    "held by the region": lambda: watched(network(), inputs(), lr=3.0),
    "held by a region that noise has shrunk": lambda: watched(network(), inputs(), steps=150, lr=10.0),
    "wide": lambda: watched(network(256), of_rank(8, 256), steps=60),
    "selected": lambda: watched(network(), inputs(), steps=60, step_size=SelectedUpdates(), lr=0.01),
    "selected and wide": lambda: watched(
        network(256), inputs(256), steps=60, step_size=SelectedUpdates(), lr=0.01, momentum=0.9
    ),
    "sample space": lambda: watched(
        network(),
        itertools.repeat(next(inputs())),
        step_size=LineSearch(),
        momentum=0.0,
        lr=1.0,
        damping=1e-6,
        inverse=SampleSpace(),
        estimate=ExactGGN(CRITERION),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gives_no_hint(name: str) -> None:
    assert diagnose(HEALTHY[name]()) == []


def test_before_anything_was_logged_there_is_no_hint() -> None:
    assert diagnose([]) == diagnose([KFACOptimizer(mlp()).metrics()]) == []


def test_hints_are_of_late_and_of_the_steps_between() -> None:
    history = [{"skipped_steps": float(step)} for step in range(50)] + [{"skipped_steps": 50.0}] * 100
    assert len(diagnose(history[:50])) == 1
    assert diagnose(history) == []
    assert diagnose([(100 * step, metrics) for step, metrics in enumerate(history[:50])]) == []


def test_counts_that_begin_anew_are_no_negative_counts() -> None:
    """Another process goes on with the run, or a layer whose statistics were refused is left out."""
    names = ("refused_statistics", "failed_refreshes", "fallback_inverses", "dropped_calls")
    fallen = [dict.fromkeys(names, count) for count in (7.0, 7.0, 0.0, 0.0)]
    assert diagnose(fallen) == []
    (hint,) = diagnose([*fallen[:3], {"dropped_calls": 2.0}, {"dropped_calls": 3.0}])
    assert hint.startswith("3 calls of layers")


def test_a_trust_region_of_zero_is_no_error() -> None:
    clips = [1e-3 * (1 + step % 2) for step in range(100)]
    assert diagnose([{"trust_region_scale": 0.0, "kl_clip": clip} for clip in clips]) == []
    assert len(diagnose([{"trust_region_scale": 1e-5, "kl_clip": clip} for clip in [0.0, *clips]])) == 1
