"""Studies: the same start and batches for all, early ends alike for all, and what was run is not run again."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks import data, problems
from benchmarks.arguments import UsageError
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.data import ImageData, Split, TextData
from benchmarks.examples import Examples, read_images
from benchmarks.problem import Decay, FixedBatch, Problem
from benchmarks.problems import PROBLEMS
from benchmarks.search import Range, Setting
from benchmarks.study import Ending, Run, RunFolder, Study
from benchmarks.training import mean_over, train
from kfac_optim import Empirical

QUIET = Console(quiet=True)


def images(*shape: int) -> ImageData:
    split = Split(torch.rand(40, *shape), torch.arange(40) % 10)
    return ImageData(split, split, 10)


def load_small(name: str, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """Data made up, of the shape of the problem's own."""
    monkeypatch.setattr(data, "mnist", lambda _: images(1, 28, 28))
    monkeypatch.setattr(data, "cifar10", lambda _: images(3, 16, 16))
    monkeypatch.setattr(problems, "curves", lambda *_, **__: Split(torch.rand(40, 1, 28, 28), torch.zeros(40)))
    monkeypatch.setattr("benchmarks.examples._PASSAGES", 10)
    text = torch.randint(11, (300,))
    monkeypatch.setattr(data, "tinyshakespeare", lambda _: TextData(text, text[:200], 11))
    return PROBLEMS[name].load(None)


def study(
    folder: Path,
    problem: Problem,
    examples: Examples,
    contestants: dict[str, Contestant] = CONTESTANTS,
    trials: int = 2,
) -> Study:
    return Study("digits", problem, examples, contestants, trials, 0, RunFolder(folder))


def small_digits() -> tuple[Problem, Examples]:
    return PROBLEMS["digits"].quick().lasting(10), PROBLEMS["digits"].load(None)


def readings(run: Run) -> list[tuple[float, ...]]:
    """All but the seconds, which no two runs have alike."""
    return [(reading.steps, reading.training, reading.validation) for reading in run.readings]


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_optimizer_steps_on_every_problem_from_the_same_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = load_small(name, monkeypatch)
    problem = replace(PROBLEMS[name].quick(), batch=FixedBatch(8), steps=2, period=2)
    taking_part = {each: found for each, found in CONTESTANTS.items() if found.takes_part(problem)}
    made = study(tmp_path, problem, examples, taking_part)
    starts = set()
    for each in taking_part:
        run = made.run(each, trial=0, seed=1)
        assert run.ending in (Ending.FINISHED, Ending.HOPELESS), each
        first, last = run.readings[0], run.readings[-1]
        assert last.training != first.training, each
        assert last.seconds > 0
        starts.add((first.training, first.validation))
    assert len(starts) == 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_optimizer_has_equally_many_trials_within_its_space(name: str, tmp_path: Path) -> None:
    problem = PROBLEMS[name]
    made = study(tmp_path, problem, replace(PROBLEMS["digits"].load(None), count=60_000), trials=5)
    for each, contestant in CONTESTANTS.items():
        settings = made.settings(each)
        assert len(settings) == 5
        box = contestant.box(problem)
        assert all(box[key].low <= setting[key] <= box[key].high for setting in settings for key in box)
        assert ("horizon" in box) == (problem.decay is Decay.COSINE)
    assert ("weight_decay" in CONTESTANTS["SGD"].box(problem)) == (problem.folder == "cifar10")


def test_trials_of_all_optimizers_are_kept_and_a_study_that_was_stopped_ends_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, examples = small_digits()
    chosen = {name: CONTESTANTS[name] for name in ("SGD", "L-BFGS", "KFAC-named")}
    whole = study(tmp_path / "whole", problem, examples, chosen).tune(QUIET)
    assert {name: [run.trial for run in runs] for name, runs in whole.items()} == {name: [0, 1] for name in chosen}

    keep, kept = RunFolder.keep, itertools.count(1)

    def interrupted(*arguments: object) -> None:
        keep(*arguments)  # type: ignore[arg-type]
        if next(kept) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "keep", interrupted)
    stopped = study(tmp_path / "stopped", problem, examples, chosen)
    with pytest.raises(KeyboardInterrupt):
        stopped.tune(QUIET)
    assert len(list((tmp_path / "stopped").rglob("*.json"))) == 4
    console = Console(record=True, width=200)
    resumed = stopped.tune(console)
    assert next(kept) == 7, "two more runs were made"
    assert "4 of 6 trials are in" in console.export_text()
    for name, runs in whole.items():
        assert list(map(readings, resumed[name])) == list(map(readings, runs))
        assert [run.setting for run in resumed[name]] == [run.setting for run in runs]


def test_more_trials_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    problem, examples = small_digits()
    few = study(tmp_path, problem, examples, {"SGD": CONTESTANTS["SGD"]}, trials=1).tune(QUIET)
    many = study(tmp_path, problem, examples, {"SGD": CONTESTANTS["SGD"]}, trials=3).tune(QUIET)
    assert many["SGD"][0] == few["SGD"][0], "seconds too: it was not run again"
    assert len(many["SGD"]) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda problem: problem.lasting(15), "made with steps 10, this study has 15"),
        (lambda problem: replace(problem, batch=FixedBatch(16)), "made with batch size '32', this study has '16'"),
        (lambda problem: replace(problem, terms=2), "made with setting .*pass another folder"),
    ],
)
def test_runs_of_another_study_are_refused(change: Callable[[Problem], Problem], message: str, tmp_path: Path) -> None:
    problem, examples = small_digits()
    study(tmp_path, problem, examples, {"SGD": CONTESTANTS["SGD"]}, trials=1).tune(QUIET)
    with pytest.raises(UsageError, match=f"argument --out: .*{message}"):
        study(tmp_path, change(problem), examples, {"SGD": CONTESTANTS["SGD"]}, trials=1).tune(QUIET)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_runs_of_an_optimizer_with_other_numbers_are_refused(name: str, tmp_path: Path) -> None:
    """Of those too that no study searches, as where the defaults of an optimizer have changed."""
    problem, examples = small_digits()
    contestant = CONTESTANTS[name]

    def changed(*arguments: Any, **choices: Any) -> torch.optim.Optimizer:
        optimizer = contestant.make(*arguments, **choices)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        return optimizer

    study(tmp_path, problem, examples, {name: contestant}, trials=1).tune(QUIET)
    with pytest.raises(UsageError, match="was made with numbers of the optimizer"):
        study(tmp_path, problem, examples, {name: replace(contestant, make=changed)}, trials=1).tune(QUIET)


def test_runs_of_an_optimizer_with_other_choices_are_refused(tmp_path: Path) -> None:
    problem, examples = small_digits()
    kfac = CONTESTANTS["KFAC-named"]
    study(tmp_path, problem, examples, {"KFAC-named": kfac}, trials=1).tune(QUIET)
    empirical = replace(kfac, choices=lambda problem: {**kfac.choices(problem), "estimate": Empirical()})
    with pytest.raises(UsageError, match=r"was made with choices .*MonteCarlo.*this study has .*Empirical\(\)"):
        study(tmp_path, problem, examples, {"KFAC-named": empirical}, trials=1).tune(QUIET)


def test_seconds_of_two_machines_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, examples = small_digits()
    made = study(tmp_path, problem, examples, {"SGD": CONTESTANTS["SGD"]}, trials=1)
    made.tune(QUIET)
    monkeypatch.setattr("benchmarks.study.describe_machine", lambda _: {"processor": "another"})
    with pytest.raises(UsageError, match=r"was made with machine .*this study has \{'processor': 'another'\}"):
        made.tune(QUIET)


def test_repeats_have_other_weights_and_batches_than_the_trials_and_each_other(tmp_path: Path) -> None:
    problem, examples = small_digits()
    made = study(tmp_path, problem, examples, {name: CONTESTANTS[name] for name in ("SGD", "AdamW")})
    (trial, *_), repeats = made.tune(QUIET)["SGD"], made.repeat({"SGD": 0, "AdamW": 1}, 2, QUIET)
    assert [run.seed for run in repeats["SGD"]] == [1, 2]
    assert [run.trial for run in repeats["AdamW"]] == [1, 1]
    starts = {run.readings[0].training for run in (trial, *repeats["SGD"])}
    assert len(starts) == 3
    assert {run.readings[0].training for run in repeats["AdamW"]} < starts


def fixed_rate(lr: float) -> Contestant:
    """SGD with one setting, uphill below a rate of 1."""

    def make(model: nn.Module, _: Problem, __: Setting) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr, maximize=lr < 1)

    return Contestant(make, {"lr": Range(1, 1)})


@pytest.mark.parametrize(
    ("lr", "seed", "ending", "steps"),
    [
        pytest.param(1e-3, 0, Ending.FINISHED, 100, id="rises a little"),
        pytest.param(0.9, 0, Ending.HOPELESS, 25, id="doubles"),
        pytest.param(0.9, 1, Ending.FINISHED, 100, id="doubles in a repeat"),
        pytest.param(1e38, 0, Ending.DIVERGED, 0, id="overflows"),
    ],
)
def test_hopeless_trials_and_diverging_runs_end_early(
    lr: float, seed: int, ending: Ending, steps: int, tmp_path: Path
) -> None:
    problem, examples = small_digits()
    made = study(tmp_path, problem.lasting(100), examples, {"SGD": fixed_rate(lr)})
    run = made.run("SGD", 0, seed)
    assert run.ending is ending
    assert run.readings[-1].steps == steps
    assert steps == 0 or run.readings[-1].training > run.readings[0].training
    assert all(math.isfinite(reading.training) for reading in run.readings)


def test_an_optimizer_that_gives_up_ends_its_run_and_is_heard(tmp_path: Path) -> None:
    problem, examples = small_digits()

    def make(model: nn.Module, _: Problem, __: Setting) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = itertools.count(1)

        def give_up(*_: object) -> None:
            if next(steps) == 7:
                raise torch.linalg.LinAlgError("not finite [sic]")

        optimizer.register_step_pre_hook(give_up)
        return optimizer

    made = study(tmp_path, problem, examples, {"SGD": Contestant(make, {"lr": Range(1, 1)})}, trials=1)
    console = Console(record=True, width=200)
    (run,) = made.tune(console)["SGD"]
    assert run.ending is Ending.FAILED
    assert run.readings[-1].steps == 5
    assert "digits, trials: SGD 0, seed 0 failed: not finite [sic]" in console.export_text()
    assert made.tune(QUIET)["SGD"] == [run], "kept with its error"


def test_the_learning_rate_falls_to_zero_over_the_horizon(tmp_path: Path) -> None:
    problem, examples = small_digits()
    rates: list[float] = []

    def make(model: nn.Module, _: Problem, __: Setting) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 2.0)
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    problem = replace(problem, decay=Decay.COSINE, steps=16, period=4)
    made = study(tmp_path, problem, examples, {"SGD": Contestant(make, {"lr": Range(1, 1)})}, trials=8)
    horizons = [setting["horizon"] for setting in made.settings("SGD")]
    trial = min(range(8), key=lambda number: abs(horizons[number] - 0.5))
    run = made.run("SGD", trial, 0)
    assert run.readings[-1].steps == 8
    assert rates == pytest.approx([1 + math.cos(math.pi * step / 8) for step in range(8)])


def test_batches_larger_than_the_data_are_refused(tmp_path: Path) -> None:
    problem, examples = small_digits()
    with pytest.raises(UsageError, match="expected batches of at most 1437, all training examples, got 1438"):
        study(tmp_path, replace(problem, batch=FixedBatch(1438)), examples)


def test_full_batches_hold_every_example_once(tmp_path: Path) -> None:
    split = Split(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)
    examples = read_images(ImageData(split, split, 10))
    seen: list[Tensor] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen.append(x)
            return super().forward(x)

    problem = replace(
        small_digits()[0], model=lambda classes: nn.Sequential(nn.Flatten(), Watching(64, classes)), full_batch_steps=2
    )
    run = study(tmp_path, problem, examples, {"L-BFGS": CONTESTANTS["L-BFGS"]}).run("L-BFGS", 0, 0)
    assert run.readings[-1].steps == 2
    assert seen
    assert all(torch.equal(inputs, split.inputs.flatten(1)) for inputs in seen)
    assert not CONTESTANTS["L-BFGS"].takes_part(PROBLEMS["resnet20"])


def test_seconds_are_those_of_steps_and_not_of_observing() -> None:
    ticks = itertools.count()
    model = nn.Linear(1, 1)
    batches = [(torch.ones(1, 1), torch.ones(1, 1))] * 7

    def observe(_: object) -> None:
        for _ in range(100):
            next(ticks)

    history = train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        batches,
        F.mse_loss,
        period=2,
        observe=observe,
        clock=lambda: float(next(ticks)),
    )
    assert history.seconds == 4.0, "one tick for each of three periods and for the step that is left"


def test_means_are_over_examples_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 1))
    split = Split(torch.randn(10, 3), torch.randn(10, 1))
    expected = F.mse_loss(model[1](split.inputs), split.targets).item()
    absolute = F.l1_loss(model[1](split.inputs), split.targets).item()
    assert mean_over(model, split, F.mse_loss, F.l1_loss, batch_size=4) == pytest.approx([expected, absolute])
    assert model.training
