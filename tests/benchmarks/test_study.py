"""Studies: the same start and batches for all, early ends alike for all, and what was run is not run again."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks import data, problems
from benchmarks.arguments import UsageError
from benchmarks.contestants import CONTESTANTS, Contestant, MuonWithAdamW
from benchmarks.data import ImageData, Split, TextData
from benchmarks.problems import PROBLEMS, Aim, Decay, Examples, FixedBatch, GrowingBatch, Problem, read_images
from benchmarks.search import Range, Setting
from benchmarks.study import Ending, Run, RunFolder, Study
from benchmarks.training import mean_over, train

QUIET = Console(quiet=True)
INSTALLED = [name for name, contestant in CONTESTANTS.items() if not contestant.missing]


def images(*shape: int) -> ImageData:
    split = Split(torch.rand(40, *shape), torch.arange(40) % 10)
    return ImageData(split, split, 10)


def load_small(name: str, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """Data made up, of the shape of the problem's own."""
    monkeypatch.setattr(data, "mnist", lambda _: images(1, 28, 28))
    monkeypatch.setattr(data, "cifar10", lambda _: images(3, 16, 16))
    monkeypatch.setattr(problems, "curves", lambda *_, **__: Split(torch.rand(40, 1, 28, 28), torch.zeros(40)))
    monkeypatch.setattr(problems, "_PASSAGES", 10)
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
    taking_part = {each: CONTESTANTS[each] for each in INSTALLED if CONTESTANTS[each].takes_part(problem)}
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


def test_spaces_go_with_the_number_of_summed_terms() -> None:
    """A loss 784 times as large has the same best settings, those of its units apart."""
    summed, plain = (CONTESTANTS["KFAC"].box(PROBLEMS[name]) for name in ("mnist-b", "digits"))
    assert summed["damping"] == plain["damping"].scaled(784)
    assert summed["kl_clip"] == plain["kl_clip"].scaled(784)
    assert summed["lr"] == plain["lr"]
    rates = [CONTESTANTS["SGD"].box(PROBLEMS[name])["lr"] for name in ("mnist-b", "digits")]
    assert rates[0] == rates[1].scaled(1 / 784)


def test_trials_of_all_optimizers_are_kept_and_a_study_that_was_stopped_ends_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, examples = small_digits()
    chosen = {name: CONTESTANTS[name] for name in ("SGD", "L-BFGS", "KFAC")}
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
    """SGD with one setting."""

    def make(model: nn.Module, _: Problem, __: Setting) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr, maximize=lr < 1)

    return Contestant(make, {"lr": Range(1, 1)})


@pytest.mark.parametrize(
    ("lr", "ending", "steps"), [(1e-3, Ending.HOPELESS, 25), (1e38, Ending.DIVERGED, 0)], ids=["rises", "overflows"]
)
def test_hopeless_and_diverging_runs_end_early(lr: float, ending: Ending, steps: int, tmp_path: Path) -> None:
    problem, examples = small_digits()
    made = study(tmp_path, problem.lasting(100), examples, {"SGD": fixed_rate(lr)})
    run = made.run("SGD", 0, 0)
    assert run.ending is ending
    assert run.readings[-1].steps == steps
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


def test_growing_batches_end_with_all_examples() -> None:
    sizes = list(itertools.islice(GrowingBatch(first=1000, steps=500).sizes(60_000), 510))
    assert sizes[0] == 1000
    assert sizes[100] == round(1000 * 60 ** (100 / 499))
    assert sizes[499:] == [60_000] * 11
    assert sizes == sorted(sizes)


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
    assert mean_over(model, split, F.mse_loss, batch_size=4) == pytest.approx(expected)
    assert model.training


class Small(nn.Module):
    """A layer of each kind that Muon takes or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.kernel = nn.Conv1d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embedding(tokens) + self.positions).mT
        out: Tensor = self.head(self.kernel(x).relu().mean(-1))
        return out


def test_muon_has_hidden_weights_as_matrices_and_adamw_the_rest() -> None:
    model, tokens = Small(), torch.randint(5, (8, 3))
    kernel = nn.Parameter(model.kernel.weight.detach().flatten(1).clone())
    others = {name: param for name, param in model.named_parameters() if name != "kernel.weight"}
    copies = {name: nn.Parameter(param.detach().clone()) for name, param in others.items()}
    muon = torch.optim.Muon([kernel], 0.02, 0.1, 0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(copies.values(), 0.02, (0.8, 0.999), weight_decay=0.1)
    optimizer = MuonWithAdamW(model, 0.02, 0.8, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        return loss.detach()

    for step in range(3):
        optimizer.step(closure)
        kernel.grad = model.kernel.weight.grad.flatten(1).clone()  # type: ignore[union-attr]
        for name, param in others.items():
            copies[name].grad = param.grad.clone()  # type: ignore[union-attr]
        for each in (muon, adamw):
            each.param_groups[0]["lr"] = 0.02 * 0.5**step
        muon.step()
        adamw.step()
        schedule.step()
    assert torch.equal(model.kernel.weight.flatten(1), kernel)
    for name, param in others.items():
        assert torch.equal(param, copies[name]), name


def test_sgd_decays_what_the_setting_or_else_the_problem_says() -> None:
    model, problem = nn.Linear(2, 2), PROBLEMS["resnet20"]
    setting = {"lr": 0.1, "one_minus_momentum": 0.25}
    (group,) = CONTESTANTS["SGD"].optimizer(model, problem, setting).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.75, True, 1e-4)
    (group,) = CONTESTANTS["SGD"].optimizer(model, problem, {**setting, "weight_decay": 0.3}).param_groups
    assert group["weight_decay"] == 0.3


def test_validation_is_aimed_at_where_a_problem_says_so() -> None:
    aims = {name: problem.aim for name, problem in PROBLEMS.items()}
    assert {name for name, aim in aims.items() if aim is Aim.VALIDATION} == {
        "resnet20",
        "resnet20-plain",
        "cnn",
        "transformer",
        "lstm",
    }


def candidates(image: Tensor, reach: int) -> Iterator[Tensor]:
    """Every mirroring and shift of ``[channels, height, width]``."""
    _, height, width = image.shape
    for mirrored in (image, image.flip(-1)):
        padded = F.pad(mirrored, (reach,) * 4)
        for down, right in itertools.product(range(2 * reach + 1), repeat=2):
            yield padded[:, down : down + height, right : right + width]


def test_images_are_mirrored_and_shifted() -> None:
    images = torch.rand(60, 2, 4, 5)
    moved, again, other = (data.mirror_and_shift(images, 1, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, other)
    seen = set()
    for image, result in zip(images, moved, strict=True):
        (which,) = [number for number, each in enumerate(candidates(image, 1)) if torch.equal(each, result)]
        seen.add(which)
    assert len(seen) > 12, "of 18 ways, most are taken by 60 images"


def test_batches_of_growing_size_hold_no_example_twice() -> None:
    split = Split(torch.arange(10.0), torch.arange(10))
    sizes = [3, 4, 5, 10, 2]
    drawn = [targets.tolist() for _, targets in data.draw(split, sizes, seed=0)]
    assert [len(batch) for batch in drawn] == sizes
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    assert not set(drawn[0]) & set(drawn[1]), "of one pass"
