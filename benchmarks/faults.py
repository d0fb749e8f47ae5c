"""Does a run whose ranks are killed at random moments go on as if nothing had happened?

A small network is trained in float64 on two, four and one processes in turn, by torchrun. Again and again one random
rank gets SIGKILL, while it runs forward, backward, a step, or writes a checkpoint. torchrun starts all ranks again, and
when it has done so ``--max-restarts`` times it is started again itself, with the next number of ranks: by default every
second kill changes the size. Each time the training goes on from the last checkpoint. The losses of all steps, those
taken twice included, are compared with those of a run on the first number of ranks that nobody disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.fault_training import EXAMPLES, read_beacon
from benchmarks.harness import write_json

_PHASES = ("forward", "backward", "step", "checkpoint")
_PATIENCE = 180.0  # seconds for anything to happen
_LONGEST_WAIT = 0.03  # seconds into a phase: about as long as the longest lasts
_STEPS_PER_KILL = 12


@dataclass(frozen=True, slots=True)
class Kill:
    """Describes a kill of one rank.

    Attributes:
        ranks: how many there were.
        rank: the one that was killed.
        phase: the phase that it was in.
        step: the step that it was in.
        resumed_at: the step of the checkpoint that training went on from.
        ranks_after: how many ranks went on.
        seconds: the seconds from the kill until the first step was taken again.
    """

    ranks: int
    rank: int
    phase: str
    step: int
    resumed_at: int
    ranks_after: int
    seconds: float


def run(args: argparse.Namespace) -> None:
    if any(EXAMPLES % ranks for ranks in args.ranks):
        raise arguments.UsageError(f"argument --ranks: divisors of {EXAMPLES}, got {args.ranks}")
    console = Console()
    steps = _STEPS_PER_KILL * (args.kills + 1)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        calm, disturbed = Path(name, "calm"), Path(name, "disturbed")
        for folder in (calm, disturbed):
            folder.mkdir()
        with _torchrun(calm, args.ranks[0], steps, args) as process:
            _finish(process)
        kills = _disturb(disturbed, steps, args, console)
        expected = dict(_losses(calm))
        found = _losses(disturbed)
    changes = sum(each.ranks != each.ranks_after for each in kills)
    deviation = max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in found)
    report = {
        "benchmark": "faults",
        "strategy": args.strategy,
        "steps": steps,
        "period": args.period,
        "seed": args.seed,
        "kills": [asdict(each) for each in kills],
        "recoveries": len(kills),
        "changes_of_size": changes,
        "steps_taken": len(found),
        "missing_steps": sorted(set(expected) - {step for step, _ in found}),
        "largest_relative_deviation": deviation,
        "losses": [expected[step] for step in sorted(expected)],
    }
    write_json(args.out, report, torch.device("cpu"))
    console.print(_table(kills))
    console.print(
        f"{len(kills)} kills, {len(kills)} recoveries, {changes} of them on another number of ranks. Losses of "
        f"{len(found)} steps, {len(found) - steps} taken again, differ from those of the undisturbed run by "
        f"{deviation:.1e} at most, relatively. Figures: {args.out}"
    )


def _disturb(folder: Path, steps: int, args: argparse.Namespace, console: Console) -> list[Kill]:
    """Train to the end with so many kills."""
    chance = random.Random(args.seed)
    kills: list[Kill] = []
    pending: tuple[int, int, int, str, int, float] | None = None
    for session in range(args.kills + 1):
        ranks = args.ranks[session % len(args.ranks)]
        with _torchrun(folder, ranks, steps, args) as process:
            for _ in range(args.max_restarts + 1):
                if pending is not None:
                    kills.append(_recovered(process, folder, ranks, *pending))
                    console.print(kills[-1])
                    pending = None
                if len(kills) == args.kills:
                    _finish(process)
                    return kills
                rank = chance.randrange(ranks)
                phase = _PHASES[len(kills) % len(_PHASES)]
                earliest = _STEPS_PER_KILL * (len(kills) + 1) - chance.randrange(_STEPS_PER_KILL // 2)
                where = _kill(process, folder, rank, phase, earliest, chance)
                pending = len(_starts(_lines(folder))), ranks, rank, *where
            _wait_until(process, lambda: process.poll() is not None, "torchrun to give up")
    raise AssertionError("there are as many sessions as kills")


def _kill(
    process: subprocess.Popen[bytes], folder: Path, rank: int, phase: str, earliest: int, chance: random.Random
) -> tuple[str, int, float]:
    """Kill `rank` in some step from `earliest` on, at a random moment after it entered `phase`; where it was then.

    Returns:
        Phase and step, and the clock's reading.
    """

    def arrived() -> bool:
        found = read_beacon(folder, rank)
        return found is not None and found[1] == phase and found[2] >= earliest

    _wait_until(process, arrived, f"rank {rank} to be in phase {phase!r}", interval=2e-4)
    time.sleep(chance.uniform(0, _LONGEST_WAIT))
    found = read_beacon(folder, rank)
    assert found is not None
    pid, phase, step = found
    for beacon in folder.glob("rank-*"):
        beacon.unlink()  # those that are started next make new ones
    os.kill(pid, signal.SIGKILL)
    return phase, step, time.monotonic()


def _recovered(
    process: subprocess.Popen[bytes],
    folder: Path,
    ranks_after: int,
    starts: int,
    ranks: int,
    rank: int,
    phase: str,
    step: int,
    killed: float,
) -> Kill:
    """Wait for the first step after a kill, by when there were so many starts."""

    def stepped() -> bool:
        lines = _lines(folder)
        return len(_starts(lines)) > starts and "loss" in lines[-1]

    _wait_until(process, stepped, "training to go on")
    resumed_at = int(_starts(_lines(folder))[-1])
    return Kill(ranks, rank, phase, step, resumed_at, ranks_after, time.monotonic() - killed)


def _finish(process: subprocess.Popen[bytes]) -> None:
    _wait_until(process, lambda: process.poll() is not None, "the run to end")
    if process.returncode:
        raise RuntimeError(f"torchrun ended with {process.returncode}; it wrote what is above")


def _wait_until(
    process: subprocess.Popen[bytes], happened: Callable[[], bool], what: str, interval: float = 0.02
) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not happened():
        if process.poll() is not None and not happened():
            raise RuntimeError(f"torchrun ended with {process.returncode} while waiting for {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE:g} s for {what}")
        time.sleep(interval)


@contextmanager
def _torchrun(folder: Path, ranks: int, steps: int, args: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training under torchrun, which is ended with all that it has started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={args.max_restarts}", "--monitor-interval=0.1", "-m", "benchmarks.fault_training"]
    command += [f"--folder={folder}", f"--steps={steps}", f"--period={args.period}", f"--strategy={args.strategy}"]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # All of them are on this machine, so that they need not ask for its name.
    environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
    log = folder / "printed.txt"
    with log.open("ab") as printed:
        process = subprocess.Popen(command, env=environ, stdout=printed, stderr=subprocess.STDOUT)
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-8000:])
        raise
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its children too
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lines(folder: Path) -> list[dict[str, float]]:
    log = folder / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _starts(lines: list[dict[str, float]]) -> list[float]:
    """Return the steps at which the training was started."""
    return [line["start"] for line in lines if "start" in line]


def _losses(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss for each time that a step was taken."""
    return [(int(line["step"]), line["loss"]) for line in _lines(folder) if "step" in line]


def _table(kills: list[Kill]) -> Table:
    found = Table(
        "ranks", "killed", "phase", "step", "resumed at", "ranks then", "seconds", title="Kills", box=box.SIMPLE
    )
    for each in kills:
        found.add_row(
            *(str(value) for value in (each.ranks, each.rank, each.phase, each.step, each.resumed_at)),
            str(each.ranks_after),
            f"{each.seconds:.1f}",
        )
    return found
