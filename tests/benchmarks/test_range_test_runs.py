"""`range-test`: runs as recommended beside what `compare` has tuned."""

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.__main__ import main
from benchmarks.arguments import UsageError
from benchmarks.contestants import CONTESTANTS
from benchmarks.problems import PROBLEMS
from benchmarks.range_test import _usual, read_tuned


def record(reached: list[float | None]) -> dict[str, Any]:
    """Give what `compare` leaves of one optimizer with two runs, and of targets 5 and 2."""
    runs = [
        {"readings": {"steps": [0, 10, 20], "training": [9.0, 4.0, lowest], "validation": [0.0] * 3}}
        for lowest in (3.0, 3.5)
    ]
    arrivals = [{"steps": {"median": steps}} for steps in reached]
    optimizer = {"name": "KFAC-named", "setting": {"lr": 0.1}, "trials": [{}] * 4, "arrivals": arrivals, "runs": runs}
    targets = [{"value": 5.0}, {"value": 2.0}]
    return {"problem": "digits", "steps": 20, "aim": "training", "targets": targets, "optimizers": [optimizer]}


@pytest.mark.parametrize(
    ("reached", "target", "arrival"), [([10, 20], 2.0, 20), ([10, None], 5.0, 10), ([None, None], 3.5, 20)]
)
def test_the_target_is_the_lowest_that_tuned_runs_reach_or_else_their_own(
    reached: list[float | None], target: float, arrival: float
) -> None:
    tuned = read_tuned(record(reached), "KFAC-named")
    assert (tuned.target, tuned.arrival, tuned.trials) == (target, arrival, 4)


def test_an_optimizer_that_was_not_tuned_is_refused() -> None:
    with pytest.raises(UsageError, match="has tuned KFAC-named on digits, got 'KFAC-default'"):
        read_tuned(record([1, 1]), "KFAC-default")


@pytest.mark.parametrize("name", ["KFAC-default", "KFAC-named", "KFAC-selected"])
def test_the_run_takes_the_damping_that_is_recommended(name: str) -> None:
    problem = PROBLEMS["digits"]
    optimizer = CONTESTANTS[name].optimizer(problem.small_model(10), problem, {"lr": 0.1, "damping": 0.5})
    assert optimizer.param_groups[0]["damping"] == 0.5


def test_of_the_optimizers_that_were_tuned_the_most_usual_is_tested() -> None:
    names = "SGD", "KFAC-selected", "KFAC-named"
    optimizers = [{"name": name} for name in names]
    assert _usual({"problem": "unet", "optimizers": optimizers}) == "KFAC-named"
    assert _usual({"problem": "unet", "optimizers": optimizers[:2]}) == "KFAC-selected"
    with pytest.raises(UsageError, match="has tuned no K-FAC on unet"):
        _usual({"problem": "unet", "optimizers": optimizers[:1]})


def test_range_test_leaves_a_table_a_picture_and_figures_and_goes_on_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for again in (False, True):
        main(["range-test", "--quick", "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert ("Recommended: lr" in printed) != again
        assert "Runs as the range test recommends" in " ".join(printed.split())
    assert (tmp_path / "digits-KFAC-default-1.png").read_bytes().startswith(b"\x89PNG")
    (digits,) = json.loads((tmp_path / "range-test.json").read_text())["problems"]
    committed = json.loads((Path(benchmarks.__file__).parent / "results/compare/digits.json").read_text())
    tuned = read_tuned(committed, "KFAC-default")
    assert (digits["optimizer"], digits["tuned"]["steps"]) == ("KFAC-default", tuned.arrival)
    assert digits["recommended"][0]["setting"].keys() == {"lr", "damping"}
