"""Many small tensors made one, for sums over all their elements."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# Elements of tensors that are sooner copied into one than summed one by one.
_SMALL = 2**14


def joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the elements of dense tensors in fewer tensors: small ones of a device become one, `[elements]`.

    Where dtypes differ, it has the one that torch promotes them to. Lists of tensors of equal shapes are joined alike,
    so that sums over pairs of them may be taken of the results.
    """
    found: list[Tensor] = []
    small: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    last, alike = None, []
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            found.append(tensor)
            continue
        if (device := tensor.device) != last:
            last, alike = device, small[device]
        alike.append(tensor)
    # Private, but one call: a view of each, and then `torch.cat`, would take longer than the sums.
    found.extend(map(_flatten_dense_tensors, small.values()))
    return found


class Joins:
    """Joins tensors that nothing changes meanwhile, and joins the same ones only once."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[Tensor], list[Tensor]]] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what `joined` does."""
        for known, result in self._known:
            if len(known) == len(tensors) and all(map(is_, known, tensors)):
                return result
        result = joined(tensors)
        self._known.append((tensors, result))
        return result
