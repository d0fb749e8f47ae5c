"""What tests of collectives share: a communicator for a while, and a count of what is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.message import Message

CPU = torch.device("cpu")
PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def communicator(trace: list[Message] | None = None, kind: type[Communicator] = Communicator) -> Iterator[Communicator]:
    observe = None if trace is None else trace.append
    timeout = timedelta(seconds=30)
    made = kind(dist.new_group(timeout=timeout), CPU, timeout, observe)
    yield made
    dist.destroy_process_group(made.group)


class Sent(NamedTuple):
    """What one collective was given: bytes that this rank sends to others and receives from them."""

    operation: str
    sent: float
    received: float


@contextmanager
def counted_calls() -> Iterator[list[Sent]]:
    """What is handed to `torch.distributed`, in the order of calls."""
    found: list[Sent] = []

    def exchange(
        out: Tensor, given_: Tensor, out_splits: list[int], in_splits: list[int], group: Any, **kw: Any
    ) -> Any:
        rank = dist.get_rank(group)
        sizes = [
            (tensor.numel() - splits[rank]) * tensor.itemsize
            for tensor, splits in ((given_, in_splits), (out, out_splits))
        ]
        assert (sum(in_splits), sum(out_splits)) == (given_.numel(), out.numel())
        found.append(Sent("all-to-all", *sizes))
        return originals[0](out, given_, out_splits, in_splits, group=group, **kw)

    def gather(out: list[Tensor], given_: Tensor, group: Any, **kw: Any) -> Any:
        received = sum(each.nbytes for each in out) - given_.nbytes
        found.append(Sent("all-gather", given_.nbytes * (dist.get_world_size(group) - 1), received))
        return originals[1](out, given_, group=group, **kw)

    def reduce(values: Tensor, group: Any, **kw: Any) -> Any:
        size = dist.get_world_size(group)
        ring = 2 * (size - 1) * values.nbytes / size
        found.append(Sent("all-reduce", ring, ring))
        return originals[2](values, group=group, **kw)

    originals = dist.all_to_all_single, dist.all_gather, dist.all_reduce
    with (
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(dist, "all_gather", gather),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        yield found


@contextmanager
def counted_bytes() -> Iterator[list[float]]:
    """What each collective is given to send to others, in the order of calls; complete when the context is left."""
    sent: list[float] = []
    with counted_calls() as found:
        yield sent
    sent.extend(each.sent for each in found)
