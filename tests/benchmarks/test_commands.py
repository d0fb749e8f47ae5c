"""The command line: each benchmark runs whole in its quick form, and bad arguments are refused with the remedy."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import estimates, refresh
from benchmarks.__main__ import main
from benchmarks.models import Autoencoder
from benchmarks.quickstart import Run, verdict
from benchmarks.training import Checkpoint, train


def run(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_quickstart_leaves_a_table_a_plot_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("quickstart", "--quick", "--out", tmp_path)
    printed = capsys.readouterr().out
    assert "Learning rates tried" in printed
    assert "steps and seconds to a training loss of" in " ".join(printed.split())
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "digits.json").read_text())
    assert [best["optimizer"] for best in report["best"]] == ["SGD", "KFAC"]
    losses = [point["train_loss"] for point in report["best"][0]["checkpoints"]]
    assert report["target"] == min(losses)
    # One seed, one set of weights: before the first step both see the same loss; K-FAC is already ahead after a few.
    sgd, kfac = (best["checkpoints"] for best in report["best"])
    assert kfac[-1]["train_loss"] < sgd[-1]["train_loss"]
    assert [point["steps"] for point in sgd] == [point["steps"] for point in kfac]


def test_step_cost_measures_ratio_floor_parts_and_state(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    run("step-cost", "--quick", "--models", "transformer", "--periods", "1,2", "--out", out)
    (cost,) = json.loads(out.read_text())["models"]
    (period,) = cost["periods"]
    assert period["periods"] == "1,2"
    assert period["floor_ratio"] > 1
    assert math.isclose(period["gap"], (period["ratio"] - 1) / (period["floor_ratio"] - 1))
    assert set(cost["parts"]) == {"update", "application", "statistics", "refresh"}
    assert all(part["floor_seconds"] >= 0 for part in cost["parts"].values())
    assert cost["state_multiple"] > 1  # two averages and two inverses of each layer


@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_language_leaves_a_table_a_plot_and_figures(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "input.txt").write_text("so much depends upon a red wheel barrow\n" * 50)
    run("language", "--quick", "--model", model, "--data-dir", tmp_path, "--out", tmp_path)
    assert "lowest bits per character" in capsys.readouterr().out
    assert (tmp_path / f"{model}.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / f"{model}.json").read_text())
    assert [best["optimizer"] for best in report["best"]] == ["SGD", "AdamW", "KFAC"]
    kfac = report["best"][2]["readings"]
    assert kfac[-1]["bits"] < kfac[0]["bits"] < math.log2(20), "it learns a text of few characters"


def test_preconditioning_reads_the_cosine_and_the_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(1024, 1, 28, 28)
    split = type("Split", (), {"inputs": images})
    monkeypatch.setattr("benchmarks.data.mnist", lambda _: type("Data", (), {"train": split}))
    run("preconditioning", "--steps", 10, "--out", tmp_path / "cosine.json")
    report = json.loads((tmp_path / "cosine.json").read_text())
    assert report["cosines"] == [report["median_cosine"]]
    assert 0 < report["median_cosine"] < 1
    assert report["highest_rise"] == max(report["batch_losses"]) / report["batch_losses"][0]


def test_estimates_compares_methods_from_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(1000, 1, 28, 28)
    split = type("Split", (), {"inputs": images})
    monkeypatch.setattr("benchmarks.data.mnist", lambda _: type("Data", (), {"train": split}))
    methods = {name: estimates._METHODS[name] for name in ("Empirical, Cholesky", "MonteCarlo, EKFAC")}
    monkeypatch.setattr(estimates, "_METHODS", methods)
    run("estimates", "--steps", 10, "--out", tmp_path / "estimates.json")
    first, second = json.loads((tmp_path / "estimates.json").read_text())["runs"]
    assert first["batch_losses"][0] == second["batch_losses"][0]
    assert first["batch_losses"][1] != second["batch_losses"][1]
    assert not second["diverged"]


def test_refresh_times_every_step_of_every_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refresh, "Autoencoder", lambda: Autoencoder((784, 8, 3)))
    run("refresh", "--batch-size", 16, "--period", 3, "--repeats", 2, "--out", tmp_path)
    assert "background, staggered" in capsys.readouterr().out
    assert (tmp_path / "refresh.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "refresh.json").read_text())
    names = ["SGD", "together", "staggered", "background", "background, staggered"]
    assert [variant["name"] for variant in report["variants"]] == names
    for variant in report["variants"]:
        first, second = variant["seconds"]
        assert len(first) == len(second) == 3
        middle = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        assert math.isclose(variant["longest"], max(middle) / variant["median"])
        assert math.isclose(variant["longest_single"], max(first + second) / variant["median"])
        assert variant["median"] <= variant["percentile_95"] <= max(first + second)
    assert report["variants"][1]["loss"] < report["variants"][0]["loss"], "K-FAC is ahead of SGD"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--epochs", "0"], "--epochs: expected a whole number of at least 1, got '0'"),
        (["quickstart", "--dataset", "cifar"], "--dataset: invalid choice: 'cifar'"),
        (["quickstart", "--data-dir", "x"], "--data-dir: digits comes with scikit-learn.*pass --dataset mnist"),
        (["step-cost", "--periods", "1;2"], "--periods: expected FACTOR,INVERSE.*got '1;2'"),
        (["step-cost", "--device", "tpu"], "--device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["estimates", "--steps", "3"], "--steps: expected at least 10.*got 3"),
        (["refresh", "--period", "0"], "--period: expected a whole number of at least 1, got '0'"),
        (["preconditioning", "--lr", "-1"], "--lr: expected a number above 0, got '-1'"),
        (["preconditioning", "--steps", "3"], "--steps: expected at least 10.*got 3"),
        (["quickstart", "--dataset", "mnist", "--data-dir", "nowhere"], "--data-dir: no folder 'nowhere'"),
        ([], "BENCHMARK"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(capsys, *arguments))


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("quickstart", "step-cost", "preconditioning", "estimates", "refresh"))


def checkpoint(steps: int, loss: float) -> Checkpoint:
    return Checkpoint(steps, steps / 10, loss, 1.0, loss, 1.0)


def test_the_verdict_compares_steps_and_seconds_to_the_target() -> None:
    sgd = Run("SGD", 0.1, 1.0, [checkpoint(10, 2.0), checkpoint(40, 1.0)])
    kfac = Run("KFAC", 0.1, 1.0, [checkpoint(10, 1.0), checkpoint(40, 0.5)])
    assert "0.25 of its steps and 0.25 of its seconds" in verdict([sgd, kfac], sgd.best_loss)
    assert "did not reach" in verdict([kfac, sgd], kfac.best_loss)


def test_training_stops_at_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    batch = (torch.ones(1, 1), torch.ones(1, 1))
    seen: list[int] = []
    history = train(
        model, optimizer, [batch] * 9, nn.functional.mse_loss, period=3, observe=lambda h: seen.append(h.steps)
    )
    assert history.diverged
    assert history.highest_rise == math.inf
    assert history.steps == 3
    assert seen == []
