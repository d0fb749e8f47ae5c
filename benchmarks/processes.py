"""Benchmarks on several processes: those of a launcher (torchrun, mpirun, SLURM), or started here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arguments import UsageError
from kfac_optim.distributed import ProcessPlace, initialize

_TIMEOUT = timedelta(minutes=10)


@contextmanager
def launched() -> Iterator[ProcessPlace]:
    """Form the process group that the launcher's variables describe, for a while; none where there was no launcher."""
    try:
        place = initialize(timeout=_TIMEOUT)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        yield place
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call ``function(*arguments)`` on ``ranks`` processes of this machine that form a gloo group."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        spawn(_serve, (ranks, str(Path(folder, "store")), function, arguments), ranks)  # type: ignore[no-untyped-call]


def _serve(rank: int, ranks: int, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap the model in DDP if there are other processes."""
    return DistributedDataParallel(model) if _several() else model


def average(values: Tensor) -> Tensor:
    """Average the values over all processes; each gets the same result."""
    if not _several():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def share(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this process's part of each batch, as large as that of any other."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)
    for inputs, targets in batches:
        yield inputs[rank::ranks], targets[rank::ranks]


def check_share(examples: int, ranks: int) -> None:
    """Refuse batches that do not part evenly: the mean of the processes' means is then not that of the batch."""
    if examples % ranks:
        raise UsageError(f"a batch of {examples} examples cannot be shared evenly among {ranks} processes; start fewer")


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
