"""Whether the examples that steps are judged by are few, and others at each step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_optim.fisher.gauss_newton import KeptForward

# The smallest batch of Martens & Grosse 2015, §13, whose batches grow from there.
_FEW = 1000

# Relative error of a float64 sum that is taken in another order, with room to spare.
_ANY_ORDER = 1e-9


class BatchWatch:
    """Looks at the examples of the first two steps: are they few, and others each time?"""

    def __init__(self) -> None:
        self._first: list[tuple[torch.Size, Tensor]] | None = None
        self._done = False

    def finds_few(self, forwards: Sequence[KeptForward]) -> bool:
        """Told of the forwards of a step; True once, at the second. Then one host synchronisation."""
        found = [next((t for t in forward.inputs() if t.dim() > 0), None) for forward in forwards]
        tensors = [tensor for tensor in found if tensor is not None]
        if self._done or not tensors:
            return False
        now = [(tensor.shape, tensor.sum(dtype=torch.float64)) for tensor in tensors]
        first, self._first = self._first, now
        if first is None:
            return False
        self._done, self._first = True, None
        same = len(first) == len(now) and all(
            a == b and bool(torch.isclose(x, y.to(x.device), rtol=_ANY_ORDER, atol=0))
            for (a, x), (b, y) in zip(first, now, strict=False)
        )
        return not same and sum(tensor.shape[0] for tensor in tensors) < _FEW
