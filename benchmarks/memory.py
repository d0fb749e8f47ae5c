"""Bytes that a training step holds at its peak, and that an optimizer holds between steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import synchronize


def peak_growth(step: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that tensors take during ``step()`` beyond those that they take before.

    On CUDA by the allocator's own count. On the CPU by the profiler, which sees what torch allocates in this thread,
    inside operators too, but not the scratch memory of vendor libraries.
    """
    synchronize(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))  # the one public place that has allocations in their order
        events = json.loads(path.read_text())["traceEvents"]
    allocations = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, size in allocations:
        held += size
        peak = max(peak, held)
    return peak


def tensor_bytes(state: object) -> int:
    """Return the bytes of all tensors in nested mappings and sequences."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        state = list(state.values())
    return sum(map(tensor_bytes, state)) if isinstance(state, (list, tuple)) else 0
