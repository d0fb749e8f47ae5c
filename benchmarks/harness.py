"""What every benchmark shares: pinned threads, interleaved timing, results as JSON, and what made them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.arguments import UsageError

_BEGUN = time.monotonic()  # every command imports this before it does anything


def pin_threads(threads: int | None) -> None:
    """Fix the number of torch's CPU threads; None keeps torch's own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Count numbers below 1e-38 as zero in this thread: Intel's cores take many times as long to multiply them.

    The backward of a cross-entropy over black pixels is full of them: a step on CURVES took 640 ms, and takes 115.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what decides how fast a benchmark runs, and nothing that tells one owner's machine from another's."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # processors of one name differ: "AVX2", "AVX512"
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def made_by(device: torch.device) -> dict[str, Any]:
    """Give what every result records of its making.

    Returns:
        ``command``; ``machine``; ``date``, today's, UTC; ``commit`` as in `provenance.commit`; ``wall_seconds`` of
        the command so far, evaluation included.
    """
    return {
        "command": provenance.command_line(sys.argv[1:]),
        "machine": describe_machine(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "wall_seconds": round(time.monotonic() - _BEGUN, 1),
    }


def write_json(path: Path, report: Mapping[str, Any], device: torch.device) -> None:
    """Write ``report`` with what made it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**made_by(device), **report}, indent=2, allow_nan=False) + "\n")
    part.replace(path)


def leave(folder: Path, name: str, report: Mapping[str, Any], draw: Callable[[Mapping[str, Any], Path], None]) -> str:
    """Write figures and the plot of them, and say where they are."""
    figures, plot = folder / f"{name}.json", folder / f"{name}.png"
    write_json(figures, report, torch.device("cpu"))
    draw(report, plot)
    return f"Plot: {plot}. Figures: {figures}"


def chosen_device(word: str) -> torch.device:
    """Give the device of that name; raise `UsageError` where torch does not see it."""
    device = torch.device(word)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices, got {word!r}; use --device cpu"
        )
    return device


_SLICES = 8  # of a block


@dataclass(frozen=True, slots=True)
class Contender:
    """Describes what is timed: ``step()`` is run in blocks of ``block`` steps, so that periodic work is seen whole."""

    name: str
    step: Callable[[], object]
    block: int


def time_interleaved(
    contenders: Sequence[Contender], rounds: int, device: torch.device, advance: Callable[[int], object]
) -> dict[str, list[float]]:
    """Return the seconds of a step of each contender in each round, averaged over one block.

    Every round runs one block of every contender. Blocks are cut into slices that take turns, in alternating order, so
    that a machine that slows down or warms up for a while does so for all of them alike: compare figures of the *same*
    round.

    Args:
        contenders: warmed up already.
        rounds: how many blocks of each to run.
        device: waited for before the clock is read.
        advance: told the number of steps done after each slice, for a progress bar.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        spent = [0.0] * len(contenders)
        for turn in range(_SLICES):
            order = range(len(contenders))
            for place in order if (number + turn) % 2 == 0 else reversed(order):
                contender = contenders[place]
                steps = contender.block * (turn + 1) // _SLICES - contender.block * turn // _SLICES
                synchronize(device)
                started = time.perf_counter()
                for _ in range(steps):
                    contender.step()
                synchronize(device)
                spent[place] += time.perf_counter() - started
                advance(steps)
        for contender, whole in zip(contenders, spent, strict=True):
            seconds[contender.name].append(whole / contender.block)
    return seconds


def ratio_spread(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest over the rounds of the ratio within a round."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of a large float32 matrix product: the median of five."""
    size = 8192 if device.type == "cuda" else 2048  # large enough that starting the product costs nothing
    a, b = torch.randn(2, size, size, device=device)
    torch.mm(a, b)
    timed = time_interleaved([Contender("matmul", lambda: torch.mm(a, b), 1)], 5, device, lambda _: None)
    return 2.0 * size**3 / statistics.median(timed["matmul"])


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    """Return the processor's model: `platform.processor()` gives only the architecture on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
