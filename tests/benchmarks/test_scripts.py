"""The scripts to copy are short, train in a short form, and have what they say preconditioned."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks

SCRIPTS = Path(benchmarks.__file__).parent / "scripts"
LONGER = {"cart_pole.py": 120}  # it plays as well, and its parts are imported by a benchmark

pytestmark = pytest.mark.filterwarnings("ignore", "error:kfac_optim")  # the tools say much


def test_scripts_are_short() -> None:
    lines = {script.name: len(script.read_text().splitlines()) for script in SCRIPTS.glob("*.py")}
    assert {name: count for name, count in lines.items() if count > LONGER.get(name, 60)} == {}


def test_scripts_import_nothing_of_the_benchmarks() -> None:
    for script in SCRIPTS.glob("*.py"):
        assert not re.search(r"^\s*(from|import) (benchmarks|helpers|\.)", script.read_text(), re.MULTILINE), (
            script.name
        )


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """The names of a script that has run, in a folder of its own."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(folder)
    return runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def figures(printed: str, before: str) -> list[float]:
    return [float(found) for found in re.findall(re.escape(before) + r" ([\d.]+)", printed)]


@pytest.mark.slow
def test_images_are_learned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("datasets", "sklearn"):
        pytest.importorskip(tool)
    names = run("images.py", "--epochs", "2", monkeypatch=monkeypatch, folder=tmp_path)
    assert figures(capsys.readouterr().out, "test loss")[-1] < 0.3
    assert names["optimizer"].metrics()["measured_parameters"] == 1


@pytest.mark.slow
def test_images_on_two_processes_are_learned_as_on_one(tmp_path: Path) -> None:
    for tool in ("datasets", "sklearn"):
        pytest.importorskip(tool)
    script = [str(SCRIPTS / "images.py"), "--epochs", "1"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(SCRIPTS.parents[1])}
    losses = []
    for launcher in ([], torchrun):
        process = subprocess.Popen(
            [sys.executable, *launcher, *script], env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        try:
            printed, _ = process.communicate(timeout=200)
        finally:
            process.terminate()  # not kill: torchrun passes it on to its workers
        assert process.returncode == 0, printed
        losses += figures(printed, "test loss")
    alone, shared = losses
    assert shared == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_a_language_model_is_trained_by_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("transformers", "accelerate"):
        pytest.importorskip(tool)
    names = run("language_model.py", "--steps", "30", monkeypatch=monkeypatch, folder=tmp_path)
    (loss,) = figures(capsys.readouterr().out, "held out:")
    assert loss < 2.5
    assert names["optimizer"].metrics()["measured_parameters"] > 0.95


@pytest.mark.slow
def test_adapters_are_fine_tuned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("transformers", "peft"):
        pytest.importorskip(tool)
    names = run("adapters.py", "--steps-before", "40", "--steps", "50", monkeypatch=monkeypatch, folder=tmp_path)
    before, after = figures(capsys.readouterr().out, "held-out code")
    assert after < before - 0.1
    assert names["optimizer"].metrics()["measured_parameters"] == 1


def test_an_autoencoder_needs_no_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    names = run("autoencoder.py", "--steps", "20", monkeypatch=monkeypatch, folder=tmp_path)
    assert figures(capsys.readouterr().out, "squared error")[-1] < 4.4  # the mean image has 4.69
    assert names["optimizer"].metrics()["measured_parameters"] == 1
