"""Makes a process train on a CUDA device with code that was written for the CPU."""

import functools
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def work_on_cuda(rank: int) -> str:
    """Have new tensors and modules of this rank made on a CUDA device.

    Ranks may outnumber the devices. NCCL refuses two ranks on one device of one host, so that each pretends to be a
    host of its own; messages then go over the network interface of the machine itself.

    Returns:
        The backend for `torch.distributed.init_process_group`.
    """
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False
    torch.zeros(())  # torch notes by then which functions make tensors, those that are changed here among them
    for draw in ("rand", "randn", "randint", "randperm"):
        setattr(torch, draw, _drawn_by_any_generator(getattr(torch, draw), device))
    return "cpu:gloo,cuda:nccl"


def _drawn_by_any_generator(draw: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws where its generator is, and brings the numbers to the device."""

    @functools.wraps(draw)
    def drawn(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        if generator is None or "device" in options:
            return draw(*args, generator=generator, **options)
        return draw(*args, generator=generator, device=generator.device, **options).to(device)

    return drawn


def pickled_for_host(value: Any) -> bytes:
    """Pickle, with the numbers of tensors on other devices on the CPU."""
    written = io.BytesIO()
    _HostPickler(written).dump(value)
    return written.getvalue()


class _HostPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented
