"""The commands compare and batch-size run whole, and draw from their JSON alone."""

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import batch_size, compare, contestants, options
from benchmarks.__main__ import main
from benchmarks.plots import plot_batch_sizes, plot_comparison
from benchmarks.problem import Aim
from benchmarks.problems import PROBLEMS
from benchmarks.scores import Arrival, Spread, Target
from benchmarks.study import Ending, Reading, Run, Runs, Study

PNG = b"\x89PNG"


def run(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def test_compare_leaves_a_table_a_plot_and_figures_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("compare", "--quick", "--optimizers", "SGD", "L-BFGS", "KFAC-default", "--out", tmp_path)
    run(*arguments)
    assert "The best trial of each" in capsys.readouterr().out
    report = json.loads((tmp_path / "digits.json").read_text())
    sgd, lbfgs, kfac = report["optimizers"]
    assert [len(each["trials"]) for each in (sgd, lbfgs, kfac)] == [2, 2, 2]
    assert [[run["seed"] for run in each["runs"]] for each in (sgd, lbfgs, kfac)] == [[1, 2]] * 3
    setters = {target["setter"]: target["value"] for target in report["targets"]}
    assert setters["SGD"] == sgd["lowest"]["high"], "of two seeds the higher"
    assert "KFAC-default" not in setters
    trials = [trial for each in (sgd, lbfgs) for trial in each["trials"]]
    assert report["tuning_target"] == min(trial["lowest"] for trial in trials)
    reached = [trial["steps"] is not None for trial in trials]
    assert reached == [trial["lowest"] <= report["tuning_target"] for trial in trials]
    assert sgd["arrivals"][0]["reached"] == 2
    assert kfac["runs"][0]["readings"]["steps"] == [0, 5, 10, 15, 20]
    assert lbfgs["runs"][0]["readings"]["steps"][-1] == 4
    assert report["command"].startswith("python -m benchmarks")
    assert report["machine"]["torch_threads"] == 1

    run(*arguments)
    printed = " ".join(capsys.readouterr().out.split())
    assert "6 of 6 trials are in" in printed
    assert "6 of 6 repeats are in" in printed
    again = json.loads((tmp_path / "digits.json").read_text())
    assert again == {**report, "date": again["date"], "commit": again["commit"], "wall_seconds": again["wall_seconds"]}
    plot_comparison(report, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "digits.png").read_bytes()
    assert (tmp_path / "digits.png").read_bytes().startswith(PNG)


def test_trials_of_an_earlier_result_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("compare", "--quick", "--optimizers", "SGD", "KFAC-default")
    before, after, last = (tmp_path / name for name in ("before", "after", "last"))
    run(*arguments, "--out", before)
    run(*arguments, "--out", after, "--trials-of", before / "digits.json")
    run(*arguments, "--out", last, "--trials-of", after / "digits.json")
    capsys.readouterr()
    first, second, third = (json.loads((folder / "digits.json").read_text()) for folder in (before, after, last))
    assert [len(list((folder / "runs" / "digits").glob("*-0.json"))) for folder in (before, after)] == [4, 0]
    for name in ("trials", "trial", "setting", "lowest"):
        assert [each[name] for each in first["optimizers"]] == [each[name] for each in second["optimizers"]], name
    assert first["trials_of"] == []
    of_whom = {"optimizers": ["SGD", "KFAC-default"]}
    origin = {name: first[name] for name in ("command", "machine", "date", "commit")} | of_whom
    assert second["trials_of"] == third["trials_of"] == [origin]


def test_trials_of_other_settings_are_run(tmp_path: Path) -> None:
    arguments = ("compare", "--quick", "--optimizers", "SGD", "KFAC-default")
    before, after = tmp_path / "before", tmp_path / "after"
    run(*arguments, "--out", before)
    file = before / "digits.json"
    report = json.loads(file.read_text())
    report["optimizers"][1]["trials"][0]["setting"]["lr"] *= 2
    file.write_text(json.dumps(report))
    run(*arguments, "--out", after, "--trials-of", file)
    assert sorted(path.name for path in (after / "runs" / "digits").glob("*-0.json")) == [
        f"KFAC-default-{trial:03d}-0.json" for trial in range(2)
    ]
    second = json.loads((after / "digits.json").read_text())
    assert [len(each["trials"]) for each in second["optimizers"]] == [2, 2]
    run(*arguments, "--out", tmp_path / "last", "--trials-of", after / "digits.json")
    third = json.loads((tmp_path / "last" / "digits.json").read_text())
    origins = [[(each["command"], each["optimizers"]) for each in result["trials_of"]] for result in (second, third)]
    of_baseline = report["command"], ["SGD"]
    assert origins == [[of_baseline], [of_baseline, (second["command"], ["KFAC-default"])]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 7}, "has steps 7, this study has 20"),
        ({"benchmark": "pinn"}, "is no result of compare"),
        ({"optimizers": []}, "lacks these trials of SGD"),
        ({"optimizers": [{"name": "SGD", "trials": [{"setting": {"lr": 0.1}}]}]}, "lacks these trials of SGD"),
    ],
    ids=["other steps", "another benchmark", "without a baseline", "another space"],
)
def test_trials_of_another_study_are_refused(
    tmp_path: Path, change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = {"problem": "digits", "batch_size": "32", "steps": 20, "aim": "training", "floor": 0.01, "trials": 2}
    file, rest = tmp_path / "digits.json", {"search_seed": 0, "tuning_target": 1.0, "optimizers": []}
    file.write_text(json.dumps({"benchmark": "compare", **study, **rest, **change}))
    with pytest.raises(SystemExit):
        run("compare", "--quick", "--optimizers", "SGD", "--out", tmp_path / "out", "--trials-of", file)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_without_trials_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("compare", "--quick", "--out", tmp_path, "--trials-of", tmp_path / "nowhere.json")
    assert "no result can be read from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("baselines", "expected"),
    [
        ({"SGD": 3.0, "Muon": 2.0, "AdamW": 4.0}, [Target("SGD", 3.0), Target("Muon", 2.0)]),
        ({"SGD": 1.0, "Muon": 2.0}, [Target("SGD", 1.0)]),
        ({"AdamW": 3.0, "Muon": 2.0}, [Target("Muon", 2.0)]),
    ],
    ids=["another is best", "SGD is best", "without SGD"],
)
def test_targets_are_that_of_sgd_and_that_of_the_best_baseline(
    baselines: dict[str, float], expected: list[Target]
) -> None:
    repeated = {
        name: [Run(name, 0, 1, {}, Ending.FINISHED, (Reading(0, 0.0, lowest, 0.0),))]
        for name, lowest in {**baselines, "KFAC-named": 0.5}.items()
    }
    assert compare.set_targets(repeated, list(baselines), Aim.TRAINING, 0.0) == expected


def kept_trials(folder: Path, optimizer: str) -> list[Run]:
    found = [json.loads(path.read_text())["run"] for path in sorted(folder.glob(f"{optimizer}-*-0.json"))]
    return [Run(**{**run, "readings": tuple(Reading(**each) for each in run["readings"])}) for run in found]


def test_batch_size_leaves_tables_a_plot_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("batch-size", "--problem", "digits", "--quick", "--batch-sizes", 64, 16, 8, "--out", tmp_path)
    run(*arguments)
    printed = " ".join(capsys.readouterr().out.split())
    assert "which SGD reaches at half of the batch sizes" in printed
    report = json.loads((tmp_path / "digits.json").read_text())
    assert report["steps"] == {"8": 80, "16": 40, "64": 20}, "640 examples, or 20 steps"
    assert [measure["aim"] for measure in report["measures"]] == ["training", "validation"]
    for measure in report["measures"]:
        assert [point["batch_size"] for point in measure["batch_sizes"]] == [8, 16, 64]
        aim = Aim(measure["aim"])
        folders = {size: tmp_path / "runs" / f"digits-{size}" for size in (8, 16, 64)}
        lowest = sorted(min(run.lowest(aim) for run in kept_trials(each, "SGD")) for each in folders.values())
        assert measure["target"] == lowest[1]
    plot_batch_sizes(report, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "digits.png").read_bytes()
    assert (tmp_path / "digits.png").read_bytes().startswith(PNG)


def test_batch_size_repeats_what_is_soonest_at_the_target_of_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 16 the second trial gets lower, but the first is sooner at what SGD reaches at 64."""
    curves = {16: [(9.0, 1.0, 1.0), (9.0, 9.0, 0.5)], 64: [(9.0, 1.0, 1.0), (9.0, 9.0, 9.0)]}

    def made(name: str, trial: int, seed: int, values: tuple[float, ...]) -> Run:
        readings = tuple(Reading(5 * each, float(each), value, value) for each, value in enumerate(values))
        return Run(name, trial, seed, {}, Ending.FINISHED, readings)

    def tune(self: Study, _: object) -> Runs:
        values = curves[self.problem.batch.size]
        return {name: [made(name, trial, 0, each) for trial, each in enumerate(values)] for name in self.contestants}

    def repeat(self: Study, trials: dict[str, int], *_: object) -> Runs:
        chosen[self.name] = trials
        return {name: [made(name, trial, 1, (9.0, 1.0, 1.0))] for name, trial in trials.items()}

    chosen: dict[str, dict[str, int]] = {}
    monkeypatch.setattr(Study, "tune", tune)
    monkeypatch.setattr(Study, "repeat", repeat)
    run("batch-size", "--problem", "digits", "--quick", "--out", tmp_path)
    assert chosen == {f"digits-{size}": {"SGD": 0, "KFAC-default": 0} for size in (16, 64)}


def test_where_the_setter_misses_there_are_no_multiples() -> None:
    reached, missed, at_start = (Spread(each, each, each) for each in (10.0, math.inf, 0.0))
    words = {
        setter: compare.arrival_in_words(Arrival(reached, reached, 1), 1, Arrival(setter, setter, 1))
        for setter in (reached, missed, at_start)
    }
    assert words[reached][0] == f"×1.00  {words[missed][0]}"
    assert words[missed] == words[at_start]
    assert "×" not in "".join(words[missed])


@pytest.mark.parametrize(
    ("size", "examples", "steps", "period"),
    [(64, 600_000, 9378, 6), (8192, 600_000, 468, 6), (512, 600_000, 1176, 6), (64, 0, 468, 6), (64, 640, 468, 6)],
)
def test_a_run_of_batch_size_sees_the_examples_and_has_the_steps(
    size: int, examples: int, steps: int, period: int
) -> None:
    problem = batch_size.of_size(PROBLEMS["mnist-mlp"], size, examples)
    assert (problem.steps, problem.period, problem.batch.size) == (steps, period, size)
    assert problem.steps % problem.period == 0
    assert problem.steps * size >= examples


def test_curves_in_figures_are_thinned_evenly_from_the_start() -> None:
    run = Run("SGD", 0, 1, {}, Ending.FINISHED, tuple(Reading(6 * each, 0.0, 0.0, 0.0) for each in range(199)))
    assert [reading.steps for reading in batch_size.thinned(run).readings] == [30 * each for each in range(40)]
    short = replace(run, readings=run.readings[:40])
    assert batch_size.thinned(short) == short


@pytest.mark.parametrize(
    ("lowest", "target"), [((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 3.0, 2.0), 3.0), ((1.0, 2.0), 2.0), ((0.1,), 0.5)]
)
def test_the_target_of_batch_sizes_is_met_by_sgd_at_half_of_them(lowest: tuple[float, ...], target: float) -> None:
    """The lowest of all trials; nor K-FAC nor the other measure counts, and there is a floor."""

    def made(name: str, number: float) -> Run:
        return Run(name, 0, 0, {}, Ending.FINISHED, (Reading(0, 0.0, number, 0.0),))

    tuned = [{"SGD": [made("SGD", 9.0), made("SGD", each)], "KFAC-default": [made("KFAC", 0.0)]} for each in lowest]
    assert batch_size.set_target(tuned, Aim.TRAINING, 0.5) == Target("SGD", target)


@pytest.mark.parametrize(
    ("words", "examples"),
    [((), 600_000), (("--steps", "20"), 0), (("--steps", "20", "--examples", "5"), 5), (("--quick",), 640)],
)
def test_steps_alone_are_the_steps_of_every_batch_size(words: tuple[str, ...], examples: int) -> None:
    parser = argparse.ArgumentParser()
    options.ADD["batch-size"](parser)
    assert batch_size.at_least(parser.parse_args(words)) == examples


def test_list_shows_problems_and_spaces_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("compare", "--list")
    printed = " ".join(capsys.readouterr().out.split())
    assert all(name in printed for name in (*PROBLEMS, *contestants.CONTESTANTS))
    assert "L-BFGS lr 0.1 - 1, history_size 5 - 100" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "imagenet"], "PROBLEM: expected one of digits, mnist-a.*got 'imagenet'"),
        (["compare", "--optimizers", "Newton"], "--optimizers: invalid choice: 'Newton'"),
        (["compare", "--optimizers", "KFAC-named"], "--optimizers: digits has no baseline among KFAC-named"),
        (["compare", "mnist-b", "--data-dir", "nowhere"], "no folder 'nowhere/mnist'.*folder that has it as 'mnist'"),
        (
            ["compare", "lstm", "--data-dir", "nowhere"],
            "no file 'nowhere/tinyshakespeare/input.txt'.*as 'tinyshakespeare'",
        ),
        (["compare", "--trials", "0"], "--trials: expected a whole number of at least 1, got '0'"),
        (["batch-size", "--problem", "digits"], "digits-2048: expected batches of at most 1437.*got 2048"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
