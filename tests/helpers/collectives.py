"""What tests of collectives share: a communicator for a while, and a count of what is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.launches import Launch

CPU = torch.device("cpu")
PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def communicator(trace: list[Launch] | None = None, kind: type[Communicator] = Communicator) -> Iterator[Communicator]:
    observe = None if trace is None else trace.append
    timeout = timedelta(seconds=30)
    made = kind(dist.new_group(timeout=timeout), CPU, timeout, observe)
    yield made
    dist.destroy_process_group(made.group)


@contextmanager
def counted_bytes() -> Iterator[list[float]]:
    """What each collective is given to send to others, in the order of calls."""
    counted: list[float] = []

    def exchange(out: Tensor, given_: Tensor, out_splits: Any, in_splits: list[int], group: Any, **kw: Any) -> Any:
        counted.append((given_.numel() - in_splits[dist.get_rank(group)]) * given_.itemsize)
        return originals[0](out, given_, out_splits, in_splits, group=group, **kw)

    def gather(out: Tensor, given_: Tensor, group: Any, **kw: Any) -> Any:
        counted.append(given_.nbytes * (dist.get_world_size(group) - 1))
        return originals[1](out, given_, group=group, **kw)

    def reduce(values: Tensor, group: Any, **kw: Any) -> Any:
        size = dist.get_world_size(group)
        counted.append(2 * (size - 1) * values.nbytes / size)
        return originals[2](values, group=group, **kw)

    originals = dist.all_to_all_single, dist.all_gather_single, dist.all_reduce
    with (
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(dist, "all_gather_single", gather),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        yield counted
