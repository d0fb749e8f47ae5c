"""Races of physics-informed networks: equal trials, the limit of time, and a run that is there is not run again."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks import pinn
from benchmarks.__main__ import main
from benchmarks.pde_problems import PROBLEMS
from benchmarks.pinn_contestants import CONTESTANTS, Contestant, ScaledLBFGS
from benchmarks.study import Reading

BASELINES = [name for name, contestant in CONTESTANTS.items() if contestant.baseline]
SCRIPT = Path(pinn.__file__).parent / "scripts" / "poisson.py"


def run(*arguments: object) -> None:
    main(["pinn", *map(str, arguments)])


def test_a_quick_run_leaves_tables_plots_and_figures_and_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["heat", "--quick", "--optimizers", *BASELINES, "--seeds", "2", "--out", tmp_path]
    run(*command)
    assert "error after 0.03 s" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "heat.json").read_text())
    assert (report["network"], report["parameters"]) == ("2-64-1", 257)
    assert report["points"] == {"interior": 30, "boundary": 12, "test": 300}
    assert [each["name"] for each in report["optimizers"]] == BASELINES
    for each in report["optimizers"]:
        assert len(each["trials"]) == 2
        lowest = [trial["lowest"] for trial in each["trials"]]
        assert each["trial"] == lowest.index(min(lowest))
        assert [one["seed"] for one in each["runs"]] == [1, 2]
        assert each["runs"][0]["readings"]["seconds"][-1] >= 0.03
        assert each["last"]["low"] <= each["runs"][0]["readings"]["error"][-1] <= each["last"]["high"]
    starts = {each["runs"][0]["readings"]["error"][0] for each in report["optimizers"]}
    assert len(starts) == 1, "all from the same weights"
    for name in ("heat.png", "heat-solution.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    for name in ("train", "plot_errors", "plot_solutions"):
        monkeypatch.setattr(pinn, name, Mock(side_effect=lambda *_: None))
    run(*command)
    pinn.train.assert_not_called()  # type: ignore[attr-defined]
    assert "heat: 6 of 6 repeats are in" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "heat.json").read_text())["optimizers"] == report["optimizers"]


def test_problems_and_settings_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--list", "--out", tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*PROBLEMS, *CONTESTANTS))
    assert "lr 0.01, decaying" in printed


def test_all_have_the_same_number_of_trials() -> None:
    assert {len(contestant.settings) for contestant in CONTESTANTS.values()} == {6}


class Slow(torch.optim.SGD):
    """Takes as many processor seconds as it is told."""

    seconds = 0.05

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        until = time.process_time() + self.seconds
        while time.process_time() < until:
            pass
        return super().step(closure)


def trained(
    setting: dict[str, float], seconds: float = 0.12, lr: float = 1e-3
) -> tuple[bool, list[Reading], torch.optim.Optimizer]:
    problem = PROBLEMS["poisson-2d"].quick()
    network = problem.network()
    optimizer = Slow(network.parameters(), lr=lr)
    readings: list[Reading] = []
    told: list[float] = []
    finite = pinn.train(
        problem, problem.points(), network, nn.MSELoss(), optimizer, setting, seconds, readings, told.append
    )
    if finite:
        assert sum(told) == pytest.approx(readings[-1].seconds)
    return finite, readings, optimizer


def test_the_step_that_reaches_the_limit_is_the_last_and_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = pinn.PDEProblem.error

    def slow_error(*args: object) -> float:
        until = time.process_time() + 0.15
        while time.process_time() < until:
            pass
        return evaluated(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pinn.PDEProblem, "error", slow_error)
    finite, readings, _ = trained({})
    assert finite
    assert (readings[0].steps, readings[0].seconds) == (0, 0)
    assert readings[-2].seconds < 0.12 <= readings[-1].seconds < 0.25, "no evaluation is counted"
    assert [each.steps for each in readings] == list(range(readings[-1].steps + 1))


def test_the_rate_decays_over_the_seconds_where_the_setting_says_so() -> None:
    _, _, constant = trained({"lr": 1e-3, "cosine": 0})
    assert constant.param_groups[0]["lr"] == 1e-3
    _, _, decaying = trained({"lr": 1e-3, "cosine": 1})
    assert 0 < decaying.param_groups[0]["lr"] < 0.9e-3


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    finite, readings, _ = trained({}, seconds=5, lr=1e200)
    assert not finite
    assert len(readings) == 1


class Failing(torch.optim.SGD):
    """Gives up at its third step."""

    steps = 0

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the matrix is not finite")
        return super().step(closure)


def test_an_optimizer_that_fails_is_reported_with_what_it_reached_and_not_pictured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Contestant("fails", lambda model, *_: Failing(model.parameters(), lr=1e-3), ({"lr": 1e-3},))
    pinn.Race("heat", PROBLEMS["heat"].quick(), {"Failing": failing}, 1, tmp_path).run(Console())
    assert "seed 1 failed: the matrix is not finite" in " ".join(capsys.readouterr().out.split())
    (each,) = json.loads((tmp_path / "heat.json").read_text())["optimizers"]
    assert each["runs"][0]["ending"] == "failed"
    assert each["runs"][0]["readings"]["steps"] == [0, 1, 2]
    assert not (tmp_path / "heat-solution.png").exists()


@pytest.mark.parametrize(("scale", "learns"), [(1e6, True), (1.0, False)])
def test_lbfgs_learns_the_curvature_of_a_small_loss_on_a_multiple_of_it_alone(scale: float, learns: bool) -> None:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    curvatures = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    optimizer = ScaledLBFGS(model, lr=1.0, history_size=10, scale=scale)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 1e-12 * (curvatures * (model.weight - 1) ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(111e-12), "of the closure, before the step"
    assert (closure().item() < 1e-8 * 111e-12) is learns


def errors_of(script: Path, *arguments: str) -> list[float]:
    ended = subprocess.run([sys.executable, script, *arguments], timeout=240, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_the_script_to_copy_is_short_and_its_error_falls() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 40
    errors = errors_of(SCRIPT)
    assert errors[-1] < 1e-6 < errors[0]


@pytest.mark.slow
def test_the_script_of_factors_by_terms_trains() -> None:
    errors = errors_of(SCRIPT.with_name("poisson_by_terms.py"), "--steps", "150")
    assert errors[-1] < 3e-2 < errors[0]
