"""Ranks that are killed."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.slow
def test_a_run_goes_on_after_ranks_were_killed_also_on_fewer_of_them(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    main(["faults", "--kills", "2", "--ranks", "2", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [kill["ranks"] for kill in report["kills"]] == [2, 2]
    assert [kill["ranks_after"] for kill in report["kills"]] == [2, 1]
    assert report["recoveries"] == 2
    assert report["changes_of_size"] == 1
    assert not report["missing_steps"]
    assert report["steps_taken"] >= report["steps"]
    assert report["largest_relative_deviation"] < 1e-9
    assert report["losses"][-1] < report["losses"][0]
