"""The main job on processes of a launcher is the main job on one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import processes
from benchmarks.__main__ import main
from benchmarks.arguments import UsageError

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_quickstart_under_torchrun_is_that_of_one_process(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks"]
    arguments = ["quickstart", "--quick", "--epochs", "1", "--out"]
    command = [sys.executable, "-m", *launcher, *arguments, str(tmp_path / "two")]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = run.communicate(timeout=150)
    finally:
        run.terminate()  # not kill: torchrun passes it on to its workers
    assert run.returncode == 0, printed
    assert printed.count("Learning rates tried") == 1, "the first process alone prints"
    assert (tmp_path / "two" / "digits.png").read_bytes().startswith(b"\x89PNG")
    main([*arguments, str(tmp_path / "one")])
    two, one = (json.loads((tmp_path / name / "digits.json").read_text()) for name in ("two", "one"))
    assert (two["processes"], one["processes"]) == (2, 1)
    for ours, alone in zip(two["runs"], one["runs"], strict=True):
        assert ours["highest_rise"] == pytest.approx(alone["highest_rise"], rel=1e-4)
        assert len(ours["checkpoints"]) == len(alone["checkpoints"]) > 1
        for point, expected in zip(ours["checkpoints"], alone["checkpoints"], strict=True):
            for loss in ("train_loss", "validation_loss"):
                assert point[loss] == pytest.approx(expected[loss], rel=1e-4)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.arange(6), torch.arange(6) + 10


def test_alone_a_process_has_whole_batches() -> None:
    ((inputs, targets),) = processes.share(batches())
    assert torch.equal(inputs, torch.arange(6))
    assert torch.equal(targets, torch.arange(6) + 10)
    model = torch.nn.Linear(1, 1)
    assert processes.wrapped(model) is model
    assert float(processes.average(torch.tensor(3.0))) == 3


def test_batches_that_do_not_part_evenly_are_refused() -> None:
    processes.check_share(6, 3)
    with pytest.raises(UsageError, match="a batch of 6 examples cannot be shared evenly among 4 processes"):
        processes.check_share(6, 4)


def test_a_launcher_that_left_half_of_its_variables_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(SystemExit) as exit_:
        main(["quickstart", "--quick", "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert "OMPI_COMM_WORLD_SIZE" in capsys.readouterr().err
