"""What is done when a message of a process group has ended, while the host goes on.

[Note: one stream] On an accelerator torch calls what follows a message at once, in one stream after the other out of a
pool, where it waits for the message on the device. Streams share the few queues that the device has for them, and a
stream that waits holds up all others in its queue: so the kernel of one message may wait behind a stream that waits for
another message, and on another rank the other way round. That is the likely reason why two ranks over NCCL stood still
within 20 steps, in each of three tries (an H200, torch 2.11). So all that follows goes into one stream of each device,
in the order in which it is asked for, the same on all ranks; with it 13 of 13 runs came to their end.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")


def continued(
    future: torch.futures.Future[S], device: torch.device, then: Callable[[torch.futures.Future[S]], T]
) -> torch.futures.Future[T]:
    """Do something when a future has ended.

    On an accelerator the future has ended for the host: `then` is called now, what it raises is raised here, and what
    it queues waits on the device, in a stream of its own (see [Note: one stream]).

    Args:
        future: the future of a message, or of several.
        device: the device of the tensors.
        then: is called with the future, as by `torch.futures.Future.then`; it waits for the future itself.

    Returns:
        The future of what `then` returns, in which whoever waits finds the tensors.
    """
    if not continues_at_once(device):
        return future.then(then)
    with _stream(device):  # pragma: cuda
        done: torch.futures.Future[T] = torch.futures.Future(devices=[device])
        done.set_result(then(future))
    return done  # pragma: cuda


def continues_at_once(device: torch.device) -> bool:
    """Return whether `continued` calls what follows at once: on accelerators; what is on paper alone (meta) is not."""
    return device.type not in ("cpu", "meta")


@cache
def _stream(device: torch.device) -> torch.Stream:  # pragma: cuda
    return torch.Stream(device)
