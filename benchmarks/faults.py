"""Does a run whose ranks are killed at random moments go on as if nothing had happened?

A small network is trained in float64 on two, four and one processes in turn, by torchrun. Again and again one random
rank gets SIGKILL, while it runs forward, backward, a step, or writes a checkpoint. torchrun starts all ranks again, and
when it has done so ``--max-restarts`` times it is started again itself, with the next number of ranks. Each time the
training goes on from the last checkpoint. The losses of all steps, those taken twice included, are compared with those
of a run on the first number of ranks that nobody disturbs.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.fault_training import EXAMPLES, STRATEGIES, read_beacon
from benchmarks.harness import write_json

HELP = "does a run whose ranks are killed at random go on as if nothing had happened?"

_PHASES = ("forward", "backward", "step", "checkpoint")
_PATIENCE = 180.0  # seconds for anything to happen
_LONGEST_WAIT = 0.03  # seconds into a phase: about as long as the longest lasts
_STEPS_PER_KILL = 12


@dataclass(frozen=True, slots=True)
class Kill:
    """One rank, killed.

    Attributes:
        ranks: how many there were.
        rank: which.
        phase: it was in.
        step: likewise.
        resumed_at: the step of the checkpoint that training went on from.
        ranks_after: how many ranks went on.
        seconds: until the first step was taken again.
    """

    ranks: int
    rank: int
    phase: str
    step: int
    resumed_at: int
    ranks_after: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=arguments.positive_int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--ranks", type=arguments.positive_int, nargs="+", default=[2, 4, 1], metavar="N", help="default: 2 4 1"
    )
    parser.add_argument(
        "--max-restarts", type=arguments.positive_int, default=3, metavar="N", help="of one torchrun (default: 3)"
    )
    parser.add_argument(
        "--period", type=arguments.positive_int, default=5, metavar="N", help="steps between checkpoints (default: 5)"
    )
    parser.add_argument("--strategy", choices=[*STRATEGIES], default="sharded", help="default: sharded")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="default: %(default)s")


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
    deviation = max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in found)
    report = {
        "benchmark": "faults",
        "strategy": args.strategy,
        "steps": steps,
        "period": args.period,
        "seed": args.seed,
        "kills": [asdict(each) for each in kills],
        "recoveries": len(kills),
        "steps_taken": len(found),
        "missing_steps": sorted(set(expected) - {step for step, _ in found}),
        "largest_relative_deviation": deviation,
        "losses": [expected[step] for step in sorted(expected)],
    }
    write_json(args.out, report, torch.device("cpu"))
    console.print(_table(kills))
    console.print(
        f"{len(kills)} kills, {len(kills)} recoveries. Losses of {len(found)} steps, {len(found) - steps} of them taken "
        f"again, differ from those of the undisturbed run by {deviation:.1e} at most, relatively. Figures: {args.out}"
    )


def _disturb(folder: Path, steps: int, args: argparse.Namespace, console: Console) -> list[Kill]:
    """Train to the end with so many kills."""
    chance = random.Random(args.seed)
    kills: list[Kill] = []
    for session in range(steps):  # far more than there can be
        ranks = args.ranks[session % len(args.ranks)]
        with _torchrun(folder, ranks, steps, args) as process:
            left = min(args.max_restarts + 1, args.kills - len(kills))
            for number in range(left):
                after = _STEPS_PER_KILL * (len(kills) + 1) - chance.randrange(_STEPS_PER_KILL // 2)
                rank, phase = chance.randrange(ranks), _PHASES[len(kills) % len(_PHASES)]
                killed = _kill(process, folder, rank, phase, after, chance.uniform(0, _LONGEST_WAIT))
                last = number == args.max_restarts
                if last:
                    _wait_for_end(process)
                    ranks_after = args.ranks[(session + 1) % len(args.ranks)]
                    with _torchrun(folder, ranks_after, steps, args, after=killed) as process:
                        pass
                kills.append(_recovered(process, folder, ranks, rank, *killed))
                console.print(kills[-1])
            if len(kills) == args.kills:
                _finish(process)
                break
    return kills
