"""Torch's generators, put back to where they stood: what is computed again draws what it drew."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor


class RandomState:
    """Holds the states of torch's generators, on the host and on the devices of a model."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = list(devices)
        self._host = torch.get_rng_state()
        self._on_devices = [torch.cuda.get_rng_state(device) for device in self._devices]

    def replayed(self) -> ExitStack:
        """Return a context that draws again what was drawn from here on, and leaves the generators as it found them."""
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(self._devices))
        torch.set_rng_state(self._host)
        for device, state in zip(self._devices, self._on_devices, strict=True):  # pragma: cuda
            torch.cuda.set_rng_state(state, device)
        return stack


def random_state(params: Iterable[Tensor]) -> RandomState:
    """Give the random state as it is now, for a model with these parameters."""
    return RandomState(sorted({param.device.index or 0 for param in params if param.is_cuda}))


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers from `generator`, in shape, dtype and device like `tensor`."""
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
