"""The scoreboard is made of what `compare` left, and of nothing else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.scoreboard import slowdowns


def spread(median: float | None) -> dict[str, float | None]:
    return {"median": median, "low": median, "high": median}


def optimizer(name: str, *arrivals: tuple[float | None, float | None], baseline: bool = True) -> dict[str, Any]:
    """One of a report: steps and seconds to each target, None for a miss by one of two seeds."""
    return {
        "name": name,
        "baseline": baseline,
        "arrivals": [
            {"steps": spread(steps), "seconds": spread(seconds), "reached": 1 if steps is None else 2}
            for steps, seconds in arrivals
        ],
        "runs": [{}, {}],
    }


def report(problem: str, targets: dict[str, float], *optimizers: dict[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": "compare",
        "problem": problem,
        "targets": [{"setter": setter, "value": value} for setter, value in targets.items()],
        "optimizers": list(optimizers),
    }


REPORTS = [
    report(
        "one",
        {"SGD": 0.5, "Muon": 0.25},
        optimizer("SGD", (100, 10.0), (None, None)),
        optimizer("Muon", (40, 8.0), (80, 16.0)),
        optimizer("KFAC", (20, 5.0), (60, 12.0), baseline=False),
        optimizer("KFAC-named", (20, 4.0), (None, None), baseline=False),
    ),
    report(
        "two",
        {"SGD": 0.1},
        optimizer("SGD", (50, 4.0)),
        optimizer("KFAC", (25, 6.0), baseline=False),
    ),
]


def test_the_table_has_multiples_of_what_the_setter_of_each_target_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(len(REPORTS))]
    for path, each in zip(paths, REPORTS, strict=True):
        path.write_text(json.dumps(each))
    plot = tmp_path / "folder" / "profile.png"
    main(["scoreboard", *map(str, paths), "--out", str(plot)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["problem", "target, set by", "its steps, seconds", "KFAC", "KFAC-named"]
    assert cells[2:] == [
        ["one", "0.5, SGD", "100, 10", "×0.20, ×0.50", "×0.20, ×0.40"],
        ["", "0.25, Muon", "80, 16", "×0.75, ×0.75", "1 of 2 seeds"],
        ["two", "0.1, SGD", "50, 4", "×0.50, ×1.50", "not run"],
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_target_that_is_met_before_the_first_step_has_no_multiples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_start = report("three", {"SGD": 2.0}, optimizer("SGD", (0, 0.0)), optimizer("KFAC", (5, 1.0), baseline=False))
    path = tmp_path / "three.json"
    path.write_text(json.dumps(at_start))
    main(["scoreboard", str(path), "--out", str(tmp_path / "plot.png")])
    assert "at start, at start" in capsys.readouterr().out
    assert slowdowns([at_start]) == {"SGD": [1.0], "KFAC": [math.inf]}


def test_slowdowns_are_over_the_fastest_to_the_best_baselines_target_where_it_was_run() -> None:
    assert slowdowns(REPORTS) == {
        "SGD": [math.inf, 1.0],
        "Muon": [16 / 12],
        "KFAC": [1.0, 1.5],
        "KFAC-named": [math.inf],
    }


def test_another_optimizer_sets_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(with_readings()))
    arguments = "scoreboard", str(path), "--out", str(tmp_path / "plot.png"), "--to"
    main([*arguments, "AdamW"])
    # AdamW's runs end at 0.4 and 0.5: its target is the higher one, and the seconds are medians of 3 and 2, of 2 and 2.
    assert "0.5, AdamW" in (out := capsys.readouterr().out)
    assert "2, 2.5" in out
    assert "×0.50, ×0.80" in out
    with pytest.raises(SystemExit):
        main([*arguments, "LAMB"])
    assert "'LAMB' is in none of these results" in capsys.readouterr().err


def with_readings() -> dict[str, Any]:
    def run(seed: int, seconds: list[float], losses: list[float]) -> dict[str, Any]:
        readings = {"steps": [0, 1, 2], "seconds": seconds, "training": losses, "validation": [0.0] * 3}
        return {"seed": seed, "ending": "finished", "readings": readings}

    def of(name: str, baseline: bool, *runs: dict[str, Any]) -> dict[str, Any]:
        return {**optimizer(name, baseline=baseline), "trial": 0, "setting": {}, "runs": list(runs)}

    first = of("AdamW", True, run(1, [0, 1, 3], [1, 0.6, 0.4]), run(2, [0, 1, 2], [1, 0.7, 0.5]))
    second = of("KFAC", False, run(1, [0, 2, 4], [1, 0.5, 0.1]), run(2, [0, 2, 4], [1, 0.4, 0.3]))
    return {**report("one", {}, first, second), "aim": "training", "floor": 0.0}


@pytest.mark.parametrize("content", ['{"benchmark": "batch-size"}', "[1]", "no JSON"])
def test_other_files_are_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as raised:
        main(["scoreboard", str(path), "--out", str(tmp_path / "plot.png")])
    assert raised.value.code == 2
    assert "other.json" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()
