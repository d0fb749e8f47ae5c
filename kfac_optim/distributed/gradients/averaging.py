"""Are the gradients of all ranks their mean, where the training loop has to see to it?"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.utils.text import listed

# Relative difference of gradient norms that rounding explains, where ranks take the same mean in another order; and
# steps at which it is looked at, as norms may be near by chance. To look reads all gradients.
SAME_GRADIENTS = 1e-5
_STEPS_LOOKED_AT = 3


class AveragingCheck:
    """Compares norms of gradients among ranks, at the first few steps at which a parameter has a gradient.

    That a model is wrapped says little: forwards may go past the wrapper, and it averages nothing that was frozen as
    it was built. So what a wrapper has brought is compared like what the training loop has averaged.

    Args:
        wrapper: the wrapper of the model, or of a part of it; None: nothing is wrapped.
    """

    def __init__(self, wrapper: DistributedDataParallel | None) -> None:
        # DDP averages what was trained as it was built: as far as is known, what is trained as it is first seen.
        self._averaged: set[int] = set()
        if wrapper is not None:
            named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
            self._averaged = {id(param) for name, param in named if param.requires_grad and name not in ignored}
        self._looks: Counter[tuple[bool | None, int]] = Counter()
        self._some: list[nn.Parameter] = []

    def norm(self, params: Sequence[nn.Parameter], *, reduces: bool | None) -> float | None:
        """Return the norm of gradients here that were not compared often enough; None if all of them were.

        Args:
            params: the parameters of the optimizer.
            reduces: whether the last forward in the wrapper has asked it to average, None if there was none since the
                last step: what was compared in one of these ways says nothing of the others. It is the same on all
                ranks, so that all of them choose the same parameters.
        """
        owed = self._owed(params, reduces)
        if not owed:
            return None
        norms: tuple[dict[nn.Parameter, float], dict[nn.Parameter, float]] = {}, {}
        for param, norm in zip(owed, _norms(owed), strict=True):
            if norm > 0:
                norms[bool(reduces) and id(param) not in self._averaged][param] = norm
        inside, outside = norms
        is_all = len(owed) == sum(param.requires_grad for param in params) and not (inside and outside)
        self._some = [] if is_all else list(outside or inside)
        # Where others have some, a rank without any is to say so. Few small gradients would be lost in the norm of all,
        # as those may be that the wrapper does not average; of a product they change as large a share as the others.
        return math.prod(math.hypot(*group.values()) for group in norms if group) if any(norms) else 0.0

    def count(self, params: Sequence[nn.Parameter], *, reduces: bool | None) -> None:
        """Note that gradients were compared, on all ranks alike: also where this one has compared none.

        Args:
            params: the parameters of the optimizer, with the gradients of the step.
            reduces: whether the last forward in the wrapper has asked it to average, see `norm`; True on a rank that
                takes a step of others in a `Join`.
        """
        for param in self._owed(params, reduces):
            self._looks[reduces, id(param)] += param.grad is not None

    def _owed(self, params: Sequence[nn.Parameter], reduces: bool | None) -> list[nn.Parameter]:
        """Return the parameters that lie here whole and were not compared often enough."""
        whole = [p for p in params if p.requires_grad and not _is_elsewhere(p if p.grad is None else p.grad)]
        return [param for param in whole if self._looks[reduces, id(param)] < _STEPS_LOOKED_AT]

    def check(
        self,
        difference: float,
        params: Sequence[nn.Parameter],
        names: Mapping[nn.Parameter, str],
        *,
        serves_another: bool,
    ) -> None:
        """Raise on all ranks alike where their norms differ.

        Args:
            difference: the relative difference of norms, among those ranks that have compared.
            params: the parameters of the optimizer.
            names: their names.
            serves_another: whether the wrapper brings gradients to the owners of another optimizer.

        Raises:
            RuntimeError: they do.
        """
        if difference <= SAME_GRADIENTS:
            return
        which = listed([names.get(param, f"a parameter {list(param.shape)}") for param in self._some]) or "this step"
        remedy = (
            "Wrap the whole model by DistributedDataParallel, anew where layers were unfrozen, call the wrapper and "
            "not its module, and have the last backward before step() outside of no_sync(); or average the gradients "
            "of all ranks before step()"
        )
        if not any(isinstance(param, DTensor) for param in params):
            remedy += "; or use DistributedConfig(strategy=Sharded()), which brings them together itself"
        if serves_another:
            remedy = (
                "DistributedDataParallel brings gradients to the owners of another optimizer, with Sharded(): before "
                "this one is built, call remove_hooks() on that optimizer, on all ranks"
            )
        raise RuntimeError(
            f"kfac_optim: the gradients of {which} differ from rank to rank (their norms by {difference:.1g} of the "
            f"largest), so that the parameters would drift apart. {remedy}. Where each rank is to train a model of its "
            "own, pass distributed=False."
        )


def _norms(params: Sequence[nn.Parameter]) -> list[float]:
    """Return the norm of each gradient, 0 where there is none."""
    if all(param.grad is None for param in params):
        return [0.0] * len(params)  # without a wait for the device
    zero = torch.zeros((), dtype=torch.float64, device=params[0].device)
    return torch.stack([zero if param.grad is None else _norm(param.grad).to(zero.device) for param in params]).tolist()


def _norm(grad: Tensor) -> Tensor:
    """Return the norm of a gradient, which may be complex, `[]` float64."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float64))
    return norm


def _is_elsewhere(tensor: Tensor) -> bool:
    """Return whether this rank has only a part of the parameter, or of its gradient a list of entries."""
    return isinstance(tensor, DTensor) or tensor.is_sparse
