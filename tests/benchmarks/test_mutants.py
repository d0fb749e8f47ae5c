"""`python -m benchmarks mutants`: every mutant can be made, and five of them, drawn once for all, are still killed."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.covering import Covering
from benchmarks.mutants import Copy, GoneError, runs_of
from benchmarks.mutation import ROOT, Mutant, files_about, lines_of, load

SEED, SAMPLE = 29, 5
QUICK = 45.0  # seconds for all of a mutant's tests, where all were judged
VERDICTS = ROOT / "benchmarks" / "results" / "mutants" / "mutants.json"


def test_every_mutant_can_be_made() -> None:
    mutants = load()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 80
    for mutant in mutants:
        mutant.print_of()  # raises where its old text does not occur once


def test_a_mutant_whose_text_is_gone_is_refused() -> None:
    mutant = Mutant("linalg/any", "linalg/eigen.py", "a text that is not there", "", "None.")
    with pytest.raises(ValueError, match=r"once in kfac_optim/linalg/eigen\.py, and does so 0 times"):
        mutant.print_of()


def test_tests_that_are_about_the_mutated_file_come_first() -> None:
    (mutant,) = [each for each in load() if each.name == "inverses/swapped-pi"]
    near, room, others = files_about(mutant)
    assert near[0] == "tests/inverses/test_damping.py"
    assert all(name.startswith("tests/inverses/") for name in room)
    assert {"tests/test_optimizer.py", "tests/distributed/test_ranks.py"} <= {*near, *others}


SUMS = Mutant(
    "distributed/any", "distributed/communication/layouts.py", "        views = {}\n", "        views = None\n", ""
)
"""Only what runs on ranks comes to this line, by what tests of the reducer ask for."""


def test_quick_tests_that_execute_a_mutated_line_go_from_the_quickest_on(tmp_path: Path) -> None:
    (line,) = lines_of(SUMS, (ROOT / "kfac_optim" / SUMS.file).read_text())
    near, far = "tests/distributed/test_reducer.py", "tests/distributed/test_plan.py"
    lines = {"first": line, "second": line, "first_elsewhere": line + 1}
    asked = []

    def trace(words: Sequence[str]) -> tuple[int, None]:
        file = words[-1]
        asked.append(file)
        seen = [
            {"test": f"{file}::{name}", "seconds": len(name), "lines": {SUMS.file: [each]}}
            for name, each in lines.items()
        ]
        with Path(words[words.index("--lines-of-tests") + 1]).open("a") as records:
            records.writelines(json.dumps(each) + "\n" for each in seen)
        return 0, None

    Covering(ROOT, trace, tmp_path).of(SUMS, [far])
    covering = Covering(ROOT, trace, tmp_path)
    found = list(covering.of(SUMS, [near]))
    assert found == [f"{file}::{name}" for file in (near, far) for name in ("first", "second")]
    assert list(covering.of(SUMS, [near])) == found
    assert asked == [far, near]  # each once
    assert covering.deselected(found[:2]) == [f"--deselect={near}::second"]  # the other would take one more along
    ((name, words),) = runs_of(SUMS, [], room_alone=True, covering=covering)
    assert name == "covering"
    assert set(found) < set(words)  # and those of other files of the room


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("+ a,", "- a,", {5, 6}),
        ("if a:\n    x = (1\n         + a, 2)", "if not a:\n    x = (1\n         + a, 2)", {4}),
        ("b=True", "b=False", {2, 3, 4, 5, 6, 7}),  # tests that call it execute other lines of the function alone
        ("y = 1", "y = 2", {8, 9}),
        ("z = 0", "z = 1", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}),
    ],
)
def test_lines_of_a_mutant_are_those_of_its_statement(old: str, new: str, lines: set[int]) -> None:
    text = "z = 0\ndef f(a,\n      b=True):\n  if a:\n    x = (1\n         + a, 2)\n  return x\nclass C:\n  y = 1\n"
    assert lines_of(Mutant("any/any", "any.py", old, new, ""), text) == lines


@pytest.mark.slow  # a quarter of a minute
def test_lines_that_ranks_execute_are_those_of_the_test_that_called_them(tmp_path: Path) -> None:
    def trace(words: Sequence[str]) -> tuple[int, None]:
        command = [sys.executable, "-m", "pytest", *words, "-k", "what_cannot_be or merge_exactly_on_two_ranks"]
        return subprocess.run(command, cwd=ROOT).returncode, None

    (test,) = Covering(ROOT, trace, tmp_path).of(SUMS, ["tests/distributed/test_reducer.py"])
    assert "::test_means_merge_exactly_on_two_ranks" in test


def test_the_test_that_killed_before_goes_first_if_it_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pytest_on(_: Copy, words: Sequence[str]) -> tuple[int, list[str]]:
        asked.append(words[-1])
        if words[-1] == "tests/any.py::gone":
            raise GoneError
        return 1, ["tests/any.py::failed"]

    monkeypatch.setattr(Copy, "pytest", pytest_on)
    for killer, tests in (("tests/any.py::gone", "near"), ("tests/any.py::there", "killer")):
        asked.clear()
        verdict = Copy(tmp_path, 1.0).judge(SUMS, runs_of(SUMS, [], room_alone=True, killer=killer))
        assert (asked[0], verdict.by, verdict.tests) == (killer, "tests/any.py::failed", tests)


@pytest.mark.slow  # a minute
def test_a_sample_of_the_mutants_is_killed(tmp_path: Path) -> None:
    verdicts = json.loads(VERDICTS.read_text())["verdicts"]
    quick = {name for name, each in verdicts.items() if each["killed"] and each["seconds"] < QUICK}
    *chosen, left = random.Random(SEED).sample(sorted({mutant.name for mutant in load()} & quick), SAMPLE + 1)
    out = tmp_path / "mutants.json"
    before = {name: verdicts[name] | {"file_print": "of other code"} for name in (*chosen, left)}
    out.write_text(json.dumps({"verdicts": before}))
    command = [sys.executable, "-m", "benchmarks", "mutants", *chosen, "--room-alone", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads(out.read_text())
    assert report["judged"] == SAMPLE  # else a test fails without a mutant, too
    assert report["survivors"] == []
    assert {each["tests"] for each in report["verdicts"].values()} == {"killer"}
    assert report["of_other_code"] == {left: before[left]}
