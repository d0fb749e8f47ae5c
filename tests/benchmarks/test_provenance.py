"""Results record what made them, and the table of benchmarks/README.md says so of each."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from benchmarks import provenance
from benchmarks.figures_table import BEGIN, END, PAGE, table, update_page
from benchmarks.harness import ratio_spread, write_json
from benchmarks.spreads import repeats_of

CPU = torch.device("cpu")


def test_the_table_of_the_page_is_the_one_that_is_made() -> None:
    found = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert found == table(), "run: python -m benchmarks everything --table"


def test_what_stands_around_the_table_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}an old table\n{END}\nbehind\n")
    monkeypatch.setattr("benchmarks.figures_table.PAGE", page)
    monkeypatch.setattr("benchmarks.figures_table.table", lambda: "| a table |\n")
    update_page()
    assert page.read_text() == f"before\n{BEGIN}| a table |\n{END}\nbehind\n"


def test_a_result_records_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "refresh", "--data-dir", "/a/folder/mnist", "--out", "../here"])
    monkeypatch.setattr(provenance, "commit", lambda: "abc1234-dirty")
    write_json(tmp_path / "it.json", {"benchmark": "refresh", "repeats": 3}, CPU)
    report = json.loads((tmp_path / "it.json").read_text())
    assert report["command"] == "python -m benchmarks refresh --data-dir mnist --out here"
    assert report["commit"] == "abc1234-dirty"
    age = datetime.now(UTC) - datetime.fromisoformat(report["date"])
    assert 0 <= age.total_seconds() < 60
    assert {"processor", "instructions", "cores", "torch_threads", "torch"} <= report["machine"].keys()
    assert report["wall_seconds"] > 0


def test_a_commit_is_marked_where_code_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() is None
    code, result = tmp_path / "kfac_optim" / "room" / "it.py", tmp_path / "benchmarks" / "results" / "it.json"
    for file in (code, result):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    one = ["git", "-c", "user.name=one", "-c", "user.email=one@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "All."]):
        subprocess.run([*one, *words], cwd=tmp_path, check=True)
    head = provenance.commit()
    assert head is not None
    assert len(head) == 7
    result.write_text("2")
    assert provenance.commit() == head, "results are no code"
    code.with_name("another.py").write_text("1")
    assert provenance.commit() == f"{head}-dirty"


def test_paths_do_not_count_in_a_command() -> None:
    command = "python -m benchmarks compare digits --data-dir '/my data' --trials 2 --out x"
    assert provenance.essence(command) == ["compare", "digits", "--trials", "2"]


def test_spreads_are_typical_and_widest_without_misses() -> None:
    def optimizer(low: float, high: float | None) -> dict[str, object]:
        summary = {"median": 10.0, "low": low, "high": high}
        return {"lowest": {"median": 1.0, "low": 1.0, "high": 1.5}, "arrivals": [{"steps": summary}], "runs": [0, 0]}

    report = {"benchmark": "compare", "optimizers": [optimizer(9, 11), optimizer(9, 13), optimizer(9, None)]}
    repeats = repeats_of(report)
    assert repeats is not None
    assert repeats.spreads == {"lowest": (0.5, 0.5), "steps": (pytest.approx(0.3), 0.4)}
    assert str(repeats) == "2 seeds: lowest 50% (50%), steps 30% (40%)"
    assert str(repeats_of({"benchmark": "quickstart"})) == "1 seed"


def test_spreads_of_refresh_are_over_periods() -> None:
    variants = [{"seconds": [[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]]}]
    repeats = repeats_of({"benchmark": "refresh", "repeats": 3, "variants": variants})
    assert repeats is not None
    assert repeats.spreads == {"longest step": (2 / 3, 2 / 3), "median step": (0.5, 0.5)}


def test_ratios_are_those_within_a_round() -> None:
    assert ratio_spread([2.0, 8.0, 3.0], [1.0, 2.0, 1.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}


@pytest.mark.parametrize(
    ("older", "made_by", "commits"),
    [
        ([], ["1234567"], "1234567"),
        ([], ["1234567", "76543210"], "1234567, some runs 76543210"),
        (["89abcde", "abcdef0", "89abcde"], [], "1234567, older trials 89abcde, abcdef0"),
    ],
)
def test_a_row_says_whose_trials_and_runs_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: list[str], made_by: list[str], commits: str
) -> None:
    origins = [{"commit": commit} for commit in older]
    report = {"date": "2026-01-02T03:04:05", "commit": "1234567", "trials_of": origins, "commits_of_runs": made_by}
    machine = {"processor": "one", "cores": 2, "torch_threads": 1, "device": "cpu", "torch": "2.13"}
    report |= {"command": "python it.py", "machine": machine}
    (tmp_path / "one.json").write_text(json.dumps(report))
    monkeypatch.setattr("benchmarks.figures_table.RESULTS", tmp_path)
    row = table().splitlines()[-1]
    assert row.endswith(f"| 2026-01-02 | {commits} |")
    assert "| one, 2 cores, 1 thread, torch 2.13 |" in row


def test_a_row_says_which_instructions_the_processor_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"processor": "one", "instructions": "AVX2", "cores": 2, "torch_threads": 1, "device": "cpu"}
    report = {"date": "2026-01-02T03:04:05", "commit": "1234567", "command": "python it.py"}
    (tmp_path / "one.json").write_text(json.dumps({**report, "machine": {**machine, "torch": "2.13"}}))
    monkeypatch.setattr("benchmarks.figures_table.RESULTS", tmp_path)
    assert "| one (AVX2), 2 cores, 1 thread, torch 2.13 |" in table()
