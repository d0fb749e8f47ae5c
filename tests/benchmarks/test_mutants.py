"""`python -m benchmarks mutants`: every mutant can be made, and five of them, drawn once for all, are still killed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutation import ROOT, Mutant, files_about, load

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


@pytest.mark.slow  # a minute
def test_a_sample_of_the_mutants_is_killed(tmp_path: Path) -> None:
    verdicts = json.loads(VERDICTS.read_text())["verdicts"]
    quick = [
        name
        for name, each in verdicts.items()
        if each["killed"] and each["seconds"] < QUICK and each["tests"] != "given"
    ]
    chosen = random.Random(SEED).sample(sorted({mutant.name for mutant in load()} & set(quick)), SAMPLE)
    out = tmp_path / "mutants.json"
    command = [sys.executable, "-m", "benchmarks", "mutants", *chosen, "--room-alone", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads(out.read_text())
    assert report["judged"] == SAMPLE  # else a test fails without a mutant, too
    assert report["survivors"] == []
