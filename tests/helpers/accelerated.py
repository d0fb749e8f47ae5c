"""Accelerate, and what is built on it, in the process group that there is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def accelerate_on(rank: int) -> Iterator[None]:
    """Have Accelerate find the default process group, and forget it at the end."""
    from accelerate.state import AcceleratorState

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "ACCELERATE_USE_CPU": "true"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
