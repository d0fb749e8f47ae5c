"""What autograd has saved for backward, and how much of it is still alive."""

import gc
import weakref

import torch
from torch import Tensor


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Notes what graphs save that are made in this context."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[_Saved]] = []
        super().__init__(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> "SavedTensors":  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._seen.append(weakref.ref(saved))
        return saved

    def all_gone(self) -> bool:
        """Whether something was saved, and nothing of it is alive after a garbage collection."""
        gc.collect()
        return bool(self._seen) and all(each() is None for each in self._seen)
