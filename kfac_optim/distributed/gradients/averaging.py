"""Are the gradients of all ranks their mean, where the training loop has to see to it?"""

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.utils.text import listed

# Relative difference of gradient norms that rounding explains, where ranks take the same mean in another order; and
# steps at which it is looked at, as norms may be near by chance. To look synchronises.
SAME_GRADIENTS = 1e-5
_STEPS_LOOKED_AT = 3


class _Unseen(Enum):
    """Gradients of which nobody is known to average them."""

    ALL = "all"
    """There is no wrapper."""
    OUTSIDE = "outside"
    """The wrapper does not have these parameters, or ignores them."""
    UNSYNCHRONISED = "unsynchronised"
    """The wrapper averages none, as its last forward ran under `no_sync`, or was an evaluation."""


class AveragingCheck:
    """Compares norms of gradients among ranks, at the first few steps with gradients that nobody is known to average.

    Args:
        wrapper: the wrapper of the model, or of a part of it; None: nothing is wrapped.
    """

    def __init__(self, wrapper: DistributedDataParallel | None) -> None:
        self._wrapper = wrapper
        # DDP averages what was trained as it was built: as far as is known, what is trained as it is first seen.
        self._averaged: set[int] = set()
        if wrapper is not None:
            named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
            self._averaged = {id(param) for name, param in named if param.requires_grad and name not in ignored}
        self._left = dict.fromkeys(_Unseen, _STEPS_LOOKED_AT)

    def norm(self, params: Sequence[nn.Parameter]) -> float | None:
        """Return the norm of those gradients here; None if there can be none, or they were compared often enough."""
        unseen, chosen = self._unseen(params)
        found = [grad for param in chosen if (grad := param.grad) is not None]
        gradients = [grad.to(torch.promote_types(grad.dtype, torch.float64)) for grad in found]  # which may be complex
        if not chosen or self._left[unseen] == 0 or (not gradients and unseen is _Unseen.OUTSIDE):
            return None
        self._left[unseen] -= bool(gradients)  # where others have some, this rank is to say that it has none
        return float(nn.utils.get_total_norm(gradients))

    def check(self, difference: float, params: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        """Raise on all ranks alike where their norms differ.

        Args:
            difference: the relative difference of norms, among those ranks that have compared.
            params: the parameters of the optimizer.
            names: their names.

        Raises:
            RuntimeError: they do.
        """
        if difference <= SAME_GRADIENTS:
            return
        _, chosen = self._unseen(params)
        which = "this step"
        if len(chosen) < len(params):
            which = listed([names.get(param, f"a parameter {list(param.shape)}") for param in chosen])
        gathers = "; or use DistributedConfig(strategy=Sharded()), which brings them together itself"
        if any(isinstance(param, DTensor) for param in params):
            gathers = ""
        raise RuntimeError(
            f"kfac_optim: the gradients of {which} differ from rank to rank (their norms by {difference:.1g} of the "
            "largest), so that the parameters would drift apart. Wrap the whole model by DistributedDataParallel, and "
            "have the last backward before step() outside of no_sync(); or average the gradients of all ranks before "
            f"step(){gathers}. Where each rank is to train a model of its own, pass distributed=False."
        )

    def _unseen(self, params: Sequence[nn.Parameter]) -> tuple[_Unseen, list[nn.Parameter]]:
        """Find the gradients that nobody is known to average."""
        whole = [p for p in params if p.requires_grad and not _is_elsewhere(p if p.grad is None else p.grad)]
        if self._wrapper is None:
            return _Unseen.ALL, whole
        if not self._wrapper.require_forward_param_sync:
            return _Unseen.UNSYNCHRONISED, whole
        return _Unseen.OUTSIDE, [param for param in whole if id(param) not in self._averaged]


def _is_elsewhere(tensor: Tensor) -> bool:
    """Return whether this rank has only a part of the parameter, or of its gradient a list of entries."""
    return isinstance(tensor, DTensor) or tensor.is_sparse
