"""The command line: each benchmark runs whole in its quick form, and bad arguments are refused with the remedy."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from benchmarks import (
    accelerator,
    autoencoders,
    compare,
    defaults,
    fault_training,
    pde_problems,
    pinn_contestants,
    quickstart,
    refresh,
    scaling,
    shapes,
    step_cost,
)
from benchmarks import options as command_options
from benchmarks.__main__ import main
from benchmarks.curves import curves
from benchmarks.models import Autoencoder, ResNet50, Transformer
from benchmarks.options import ADD
from benchmarks.quickstart import Run, verdict
from benchmarks.settings import SETTINGS
from benchmarks.training import Checkpoint, train
from kfac_optim import Cholesky


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
    assert "steps and CPU seconds to a loss of" in " ".join(printed.split())
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "digits.json").read_text())
    assert [best["optimizer"] for best in report["best"]] == ["SGD", "KFAC"]
    losses = [point["train_loss"] for point in report["best"][0]["checkpoints"]]
    assert report["target"] == min(losses)
    # One seed, one set of weights: before the first step both see the same loss; K-FAC is already ahead after a few.
    sgd, kfac = (best["checkpoints"] for best in report["best"])
    assert kfac[-1]["train_loss"] < sgd[-1]["train_loss"]
    assert [point["steps"] for point in sgd] == [point["steps"] for point in kfac]


def test_kfac_takes_the_setting_and_sgd_does_not() -> None:
    model = nn.Linear(3, 2)
    sgd, kfac = (quickstart.make_optimizer(name, model, 0.1, SETTINGS["whole"]) for name in ("SGD", "KFAC"))
    assert type(sgd) is torch.optim.SGD
    assert [block.inverse for block in kfac._binding.coverage.blocks] == [Cholesky()]


def test_step_cost_measures_ratio_floor_parts_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(step_cost.WORKLOADS["transformer"], model=partial(Transformer, width=64, hidden=256, layers=1))
    monkeypatch.setitem(step_cost.WORKLOADS, "transformer", small)
    out = tmp_path / "cost.json"
    run("step-cost", "--quick", "--models", "transformer", "--periods", "1,2", "--out", out)
    default, whole = json.loads(out.read_text())["models"]
    assert (default["setting"], whole["setting"]) == ("default", "whole")
    for cost in (default, whole):
        (period,) = cost["periods"]
        assert period["periods"] == "1,2"
        assert period["floor_ratio"] > 1
        assert math.isclose(period["gap"], (period["ratio"] - 1) / (period["floor_ratio"] - 1))
        assert set(cost["parts"]) == {"update", "application", "statistics", "refresh"}
        assert all(part["floor_seconds"] >= 0 for part in cost["parts"].values())
        assert cost["peak_bytes"] > cost["sgd_peak_bytes"] > 0
    assert whole["state_multiple"] > default["state_multiple"] > 1  # an average and an inverse of each factor


@pytest.mark.slow
def test_accelerator_measures_steps_refreshes_and_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accelerator.json"
    run("accelerator", "--quick", "--device", "cpu", "--models", "gpt2-small", "--periods", "1,2", "--out", out)
    assert "a refresh of all layers" in " ".join(capsys.readouterr().out.split())
    (cost,) = json.loads(out.read_text())["models"]
    steps = {row["name"]: row for row in cost["steps"]}
    sgd, kfac = steps["SGD, fused"], steps["K-FAC"]
    assert sgd["ratio"] == steps["SGD, compiled"]["ratio"] == 1.0
    assert kfac["ratio"] == kfac["seconds"] / sgd["seconds"]
    assert steps["compiled"]["ratio"] == steps["compiled"]["seconds"] / steps["SGD, compiled"]["seconds"]
    parameters = 4 * cost["parameters"]
    assert sgd["state_bytes"] == steps["SGD, foreach"]["state_bytes"] == parameters, "momentum"
    assert kfac["state_bytes"] > steps["bf16 inverses"]["state_bytes"] > parameters
    assert kfac["peak_bytes"] > sgd["peak_bytes"] > parameters, "gradients at least"
    assert all(row["waits"] is None for row in cost["steps"]), "nothing is waited for on a CPU"
    # Of one block four 17 × 16 layers, 17 × 32 and 33 × 16.
    assert {width: count for width, count in cost["widths"].items() if int(width) > 16} == {"33": 1, "32": 1, "17": 5}
    assert [row["representation"].partition("(")[0] for row in cost["refreshes"]] == [
        "Cholesky",
        "LowRank",
        "Eigen",
        "EKFAC",
        "NewtonSchulz",
    ]
    assert all(row["seconds"] > 0 and row["failed"] == 0 for row in cost["refreshes"])
    ranges = {row["name"] for row in cost["profile"]}
    assert ranges >= {f"kfac.{part}" for part in ("statistics", "fold", "refresh", "precondition", "update")}


def test_averaging_measures_parameters_and_their_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("averaging", "--quick", "--out", tmp_path)
    assert "training loss" in capsys.readouterr().out
    (digits,) = json.loads((tmp_path / "averaging.json").read_text())["problems"]
    assert [each["decay"] for each in digits["runs"]] == ["none", "cosine"]
    assert all(each["average"]["training"] != each["iterate"]["training"] for each in digits["runs"])


def test_defaults_holds_kfac_against_the_best_rate_of_adam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("defaults", "regression-1000", "classifier", "--quick", "--out", tmp_path)
    assert "regression-1000" in capsys.readouterr().out
    large, classifier = json.loads((tmp_path / "defaults.json").read_text())["problems"]
    for problem in (large, classifier):
        assert [each["optimizer"] for each in problem["runs"]] == ["Adam", "KFAC"]
        adam, kfac = (each["loss"] for each in problem["runs"])
        assert problem["better_than_adam"] == (kfac < adam)
    assert large["runs"][0]["loss"] > 1e5 > classifier["runs"][0]["loss"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_accelerator_wants_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pass --device cpu --quick" in refused(capsys, "accelerator")


def test_resnet_50_has_the_shapes_that_plans_on_paper_give_it() -> None:
    with torch.device("meta"):
        model = ResNet50()
    assert sum(param.numel() for param in model.parameters()) == 25_557_032
    planned = [covered.spec for covered in shapes.resnet50() if covered.spec.groups == 1]
    built = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert sorted(spec.in_dim * spec.out_dim for spec in planned) == sorted(
        sum(param.numel() for param in module.parameters()) for module in built
    )


def test_a_tied_transformer_of_gpt2s_size_has_its_number_of_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(vocabulary=50257, context=1024, width=768, hidden=3072, heads=12, layers=12, tied=True)
    assert sum(param.numel() for param in model.parameters()) == 124_439_808


def test_preconditioning_reads_the_cosine_and_the_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(1024, 1, 28, 28)
    split = type("Split", (), {"inputs": images})
    monkeypatch.setattr("benchmarks.data.mnist", lambda _: type("Data", (), {"train": split}))
    run("preconditioning", "--steps", 10, "--out", tmp_path / "cosine.json")
    report = json.loads((tmp_path / "cosine.json").read_text())
    assert report["cosines"] == [report["median_cosine"]]
    assert 0 < report["median_cosine"] < 1
    assert report["highest_rise"] == max(report["batch_losses"]) / report["batch_losses"][0]


def test_autoencoders_takes_the_best_of_each_grid_and_leaves_a_table_a_plot_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = curves(200, seed=0).inputs.flatten(1)
    monkeypatch.setitem(autoencoders.PROBLEMS, "curves", autoencoders.Problem(lambda _: few, (784, 20, 6), 20))
    methods = {
        "SGD": replace(autoencoders.METHODS["SGD"], grid=({"lr": 1e30}, {"lr": 1e-3}, {"lr": 1e-9})),
        "MonteCarlo+EKFAC": replace(autoencoders.METHODS["MonteCarlo+EKFAC"], grid=({"lr": 0.1, "damping": 10.0},)),
    }
    monkeypatch.setattr(autoencoders, "METHODS", methods)
    run("autoencoders", "--methods", *methods, "--batch-size", 100, "--out", tmp_path)
    assert "Training error" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "curves.json").read_text())
    assert [tried["cross_entropy"] is None for tried in report["tried"]] == [True, False, False, False]
    sgd, ekfac = report["best"]
    assert sgd["setting"] == {"lr": 1e-3}, "the best of its grid"
    for each in (sgd, ekfac):
        assert [reading["steps"] for reading in each["readings"]] == [10, 20]
        assert each["readings"][1]["squared_error"] < each["readings"][0]["squared_error"]
    assert report["equal_seconds"] == min(each["readings"][-1]["seconds"] for each in (sgd, ekfac))


@pytest.mark.parametrize("method", autoencoders.METHODS)
def test_every_method_starts_from_the_same_weights(method: str) -> None:
    course = autoencoders.Course((784, 20, 6), curves(60, seed=0).inputs.flatten(1), batch_size=20, steps=10, seed=0)
    make = autoencoders.METHODS[method].make
    still = course.train(make, {"lr": 0.0}, advance=lambda _: None)
    expected = course.train(autoencoders.METHODS["SGD"].make, {"lr": 0.0}, lambda _: None)
    assert not still[0]
    for reading, same in zip(still[1], expected[1], strict=True):
        assert reading.cross_entropy == pytest.approx(same.cross_entropy, rel=1e-5)


def test_low_rank_takes_statistics_of_a_quarter_of_the_batch_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock()
    monkeypatch.setattr(autoencoders, "KFACOptimizer", made)
    autoencoders.METHODS["MonteCarlo+LowRank"].make(nn.Linear(2, 2), 500, lr=0.1)
    assert made.call_args.kwargs["subsample"].examples == 125


def test_reconstruction_errors_are_sums_over_pixels_and_means_over_images() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    images = torch.tensor([[1.0, 0.0], [1.0, 0.5]])
    network = nn.Linear(2, 2)
    network.forward = lambda _: logits  # type: ignore[method-assign]
    cross_entropy, squared_error = autoencoders.errors(network, images)
    assert cross_entropy == pytest.approx((3 * math.log(2) + math.log(4 / 3)) / 2)
    assert squared_error == pytest.approx((0.25 + 0.25 + 0.0625 + 0) / 2)


def test_equal_seconds_are_those_of_the_first_to_finish_without_diverging() -> None:
    def made(method: str, seconds: list[float], diverged: bool = False) -> autoencoders.Run:
        readings = [autoencoders.Reading(10 * i, spent, 1.0, 1.0) for i, spent in enumerate(seconds, start=1)]
        return autoencoders.Run(method, {}, diverged, readings)

    slow, fast, lost = made("slow", [2.0, 5.0, 8.0]), made("fast", [2.0, 4.0, 6.0]), made("lost", [1.0], diverged=True)
    assert autoencoders.equal_seconds([slow, fast, lost]) == 6.0
    assert autoencoders.equal_seconds([lost]) is None
    reading = slow.by(6.0)
    assert reading is not None
    assert reading.steps == 20
    assert slow.by(1.0) is None


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


def test_the_names_that_arguments_may_have_are_those_of_the_benchmarks() -> None:
    for names, table in (
        (command_options.PROBLEMS, compare.PROBLEMS),
        (command_options.CONTESTANTS, compare.CONTESTANTS),
        (command_options.SETTINGS, SETTINGS),
        (command_options.DATASETS, quickstart.PROBLEMS),
        (command_options.DEFAULTS_PROBLEMS, defaults.PROBLEMS),
        (command_options.WORKLOADS, step_cost.WORKLOADS),
        (command_options.LARGE_MODELS, accelerator.MODELS),
        (command_options.AUTOENCODER_DATASETS, autoencoders.PROBLEMS),
        (command_options.METHODS, autoencoders.METHODS),
        (command_options.PLANNED_MODELS, scaling._MODELS),
        (command_options.STRATEGIES, fault_training.STRATEGIES),
        (command_options.PINN_PROBLEMS, pde_problems.PROBLEMS),
        (command_options.PINN_CONTESTANTS, pinn_contestants.CONTESTANTS),
    ):
        assert names == tuple(table)
    assert all(defaults.PROBLEMS[name].folder is None for name in command_options.WITHOUT_DOWNLOAD)


def test_wrong_arguments_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from benchmarks.__main__ import main\n"
        "try:\n    main(['compare', 'mnist-z'])\n"
        "except SystemExit as error:\n    print(error.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 False"
    assert "expected one of digits, " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--epochs", "0"], "--epochs: expected a whole number of at least 1, got '0'"),
        (["quickstart", "--seed", "9" * 20], "--seed: expected a whole number from 0 to"),
        (["quickstart", "--dataset", "cifar"], "--dataset: invalid choice: 'cifar'"),
        (["quickstart", "--data-dir", "x"], "--data-dir: digits comes with scikit-learn.*pass --dataset mnist"),
        (["step-cost", "--periods", "1;2"], "--periods: expected FACTOR,INVERSE.*got '1;2'"),
        (["step-cost", "--device", "tpu"], "--device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["autoencoders", "--steps", "13"], "--steps: expected a multiple of 10.*got 13"),
        (["autoencoders", "--methods", "SGD", "Newton"], "--methods: invalid choice: 'Newton'"),
        (["autoencoders", "--data-dir", "x"], "--data-dir: curves are drawn.*pass --dataset mnist"),
        (["autoencoders", "--batch-size", "20001"], "--batch-size: expected at most 20000.*got 20001"),
        (["scaling", "--bandwidths", "0"], "--bandwidths: expected a number above 0, got '0'"),
        (["scaling", "--models", "gpt"], "--models: invalid choice: 'gpt'"),
        (["pinn", "wave"], "PROBLEM: expected one of poisson-2d,.* got 'wave'"),
        (["pinn", "--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["defaults", "mnist-c"], "PROBLEM: expected one of regression, regression-1000,.* got 'mnist-c'"),
        (["refresh", "--period", "0"], "--period: expected a whole number of at least 1, got '0'"),
        (["preconditioning", "--lr", "-1"], "--lr: expected a number above 0, got '-1'"),
        (["preconditioning", "--steps", "3"], "--steps: expected at least 10.*got 3"),
        (["quickstart", "--dataset", "mnist", "--data-dir", "nowhere"], "--data-dir: no folder 'nowhere'"),
        (["scoreboard", "x.json", "--out", "x.xyz"], "--out: expected a file .png, .pdf or .svg, got 'x.xyz'"),
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
    assert all(name in printed for name in ADD)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("quickstart", "--out", "/dev/null/results")
    assert exit_.value.code == 2
    assert "argument --out: /dev/null/results cannot be made: Not a directory" in capsys.readouterr().err


def test_a_folder_where_a_file_is_written_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("step-cost", "--out", str(tmp_path))
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"argument --out: {tmp_path} is a folder, and a file is written: {tmp_path}/step-cost.json, say" in message


@pytest.mark.parametrize(
    ("name", "said"), [("compare", "goes on where it stopped"), ("refresh", "nothing was written")]
)
def test_an_interrupt_says_how_to_go_on(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"benchmarks.{name}.run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        run(name, "--out", tmp_path)
    assert exit_.value.code == 130
    assert said in capsys.readouterr().err


def checkpoint(steps: int, loss: float) -> Checkpoint:
    return Checkpoint(steps, steps / 10, loss, 1.0, loss, 1.0)


def test_the_verdict_compares_steps_and_seconds_to_the_target() -> None:
    sgd = Run("SGD", 0.1, 1.0, [checkpoint(10, 2.0), checkpoint(40, 1.0)])
    kfac = Run("KFAC", 0.1, 1.0, [checkpoint(10, 1.0), checkpoint(40, 0.5)])
    assert "0.25 of its steps and 0.25 of its seconds" in verdict([sgd, kfac], sgd.best_loss)
    assert "did not reach" in verdict([kfac, sgd], kfac.best_loss)


def test_training_takes_the_steps_of_a_plain_loop_and_keeps_the_losses_before_them() -> None:
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.item()
    batches = [(torch.tensor([[2.0]]), torch.tensor([[1.0]]))] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = train(model, optimizer, batches, nn.functional.mse_loss, period=3, observe=lambda _: None)
    expected = []
    for _ in batches:
        expected.append((2 * weight - 1) ** 2)
        weight -= 0.1 * 4 * (2 * weight - 1)
    assert history.batch_losses == pytest.approx(expected)
    assert model.weight.item() == pytest.approx(weight)


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
