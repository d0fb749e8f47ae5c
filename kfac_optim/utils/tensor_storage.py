"""Tensors that give up their memory and get it back, where nothing on this process reads them, or outlive a pickle."""

import weakref
from multiprocessing.context import get_spawning_popen

import torch
from torch import Tensor


def drop(tensor: Tensor) -> None:
    """Let `tensor` stand on the meta device, in place: all that hold it see that. Views of it must not be left."""
    torch.utils.swap_tensors(tensor, torch.empty_like(tensor, device="meta"))  # type: ignore[no-untyped-call]


def hold(tensor: Tensor, device: torch.device) -> None:
    """Give `tensor` memory on `device`, all zero, in place, where it has none."""
    if tensor.is_meta:
        torch.utils.swap_tensors(tensor, torch.zeros_like(tensor, device=device))  # type: ignore[no-untyped-call]


def held_once(tensor: Tensor) -> Tensor:
    """Return a view of all that an expanded tensor holds, each element once, so that it can be written to."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def copy_held(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, unless one of them has no memory."""
    if not (target.is_meta or source.is_meta):
        target.copy_(source)


def keep_while_spawning(*made: object) -> None:
    """Keep tensors that were made to be pickled, where that is to start a process.

    The process inherits the memory of tensors as open files, which it opens only when it runs; if the tensors are gone
    by then, the files are closed, or others have their numbers.
    """
    process = get_spawning_popen()
    if process is not None:
        weakref.finalize(process, _forget, *made).atexit = False


def _forget(*_: object) -> None:
    pass
