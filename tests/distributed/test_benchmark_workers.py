"""The benchmark of statistics workers, on a small problem."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.ranks import Ranks

from benchmarks import autoencoders, statistics_workers
from benchmarks.arguments import Periods


def of_small(_: int, out: Path) -> None:
    small = autoencoders.Problem(lambda _: torch.rand(64, 784), widths=(784, 8, 4), steps=10)
    choices = statistics_workers.Choices("small", None, 1, 8, 20, Periods(2, 4), 3, 2, 0.1, 0.1, 0, 1, out)
    with mock.patch.dict(statistics_workers.PROBLEMS, {"small": small}):
        statistics_workers.compare(choices)


@pytest.mark.slow
def test_the_benchmark_compares_losses_and_processor_seconds(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(of_small, tmp_path / "found.json", timeout=120.0)
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["ranks"] == 4
    assert report["rounds"] >= 10 + 2 * 10 // 3
    for losses in report["losses"].values():
        assert len(losses) == 2
        assert losses[1] < losses[0]
    assert len(report["ratios"]) == 2
    assert min(report["ratios"]) > 0
