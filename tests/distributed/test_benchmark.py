"""The benchmark of layouts on processes: what it counts is what plans predict."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import Ranks
from torch import Tensor, nn

from benchmarks import distributed
from benchmarks.__main__ import main
from benchmarks.arguments import Periods
from benchmarks.workloads import Workload
from kfac_optim import LossTerms


def batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 16), torch.randint(4, (examples,))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


SMALL = Workload(net, batch, F.cross_entropy, LossTerms.EXAMPLES, examples=8, peer={})


def of_small(_: int, out: Path) -> None:
    choices = distributed.Choices(("small",), (Periods(10, 100),), 1, 1, False, out)
    with mock.patch.dict(distributed.WORKLOADS, {"small": SMALL}):
        distributed.compare(choices)


@pytest.mark.slow
def test_bytes_counted_are_those_of_plans(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(of_small, tmp_path / "distributed.json", timeout=120.0)
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["ranks"] == 2
    (cost,) = report["models"]
    assert cost["sgd_bytes"] == 2 * cost["parameter_bytes"]
    assert cost["sgd_held_bytes"] == cost["parameter_bytes"]
    names = ["Replicated(1)", "Replicated(1/2)", "Sharded()", "Sharded(FACTORS)"]
    by_key = {(each["layout"], each["periods"]): each for each in cost["layouts"]}
    assert list(by_key) == [(name, "10,100") for name in names]
    for each in by_key.values():
        assert each["bytes"] == pytest.approx(each["planned_bytes"], rel=1e-12)
        assert each["bytes_ratio"] == each["bytes"] / cost["sgd_bytes"]
        assert each["seconds_ratio"] > 0
        assert each["held_bytes"] <= each["planned_memory"] * 1.05, "the rest is for sums on their way"
    held = {name: by_key[name, "10,100"]["held_bytes"] for name in names}
    assert held["Sharded()"] < held["Replicated(1/2)"] < held["Replicated(1)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--periods", "10,25"], "expected INVERSE to be a multiple of FACTOR, got '10,25'"),
        (["--ranks", "1"], "--ranks: expected at least 2"),
        (["--ranks", "0"], "--ranks: expected a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["distributed", *arguments])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
