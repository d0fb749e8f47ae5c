"""Are gradients of experts still those of a sum over ranks, where they have to be those of the mean?"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import largest
from kfac_optim.utils.autograd import on_gradient_first
from kfac_optim.utils.hooks import weakly

# Steps with gradients that are looked at, as looking synchronises; and elements of each gradient.
_STEPS, _ELEMENTS = 3, 4096

# Relative difference from the sum that rounding explains, of the sums of copies as well.
_ROUNDING = 1e-4


class DivisionCheck:
    """Compares what backward brings to experts with their gradients at the step, at the first few steps.

    Backward brings the gradient of the sum of the losses of several ranks. Whatever divides it since, a hook on the
    parameter or the training loop, leaves less of it; so where nothing is missing at the step, nothing has divided it.
    """

    def __init__(self) -> None:
        self._left = _STEPS
        self._brought: dict[nn.Parameter, Tensor] = {}
        self._handles: dict[nn.Parameter, RemovableHandle] = {}

    def follow(self, params: Iterable[nn.Parameter]) -> None:
        """Listen, from now on, to what backward brings to the parameters that are trained."""
        for param in params if self._left else ():
            if param.requires_grad and param not in self._handles:
                self._handles[param] = on_gradient_first(param, weakly(self._add, weakref.ref(param)))

    def check(
        self,
        params: Sequence[nn.Parameter],
        communicator: Communicator,
        over_copies: Callable[[Tensor], Tensor],
        *,
        copies: int,
        averages: bool,
    ) -> None:
        """Raise on all ranks alike where gradients are as backward has brought them; collectives, at the first steps.

        Args:
            params: the parameters of the experts here.
            communicator: a communicator of all ranks.
            over_copies: sums `[2]` over the ranks that hold copies of these experts.
            copies: how many these are; their gradients at the step are equal, the sum of what backward brought to each.
            averages: whether the gradients of other layers are known to be the mean over ranks.

        Raises:
            RuntimeError: they are.
        """
        brought, self._brought = self._brought, {}
        if not self._left:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=communicator.device)
        for param in params:
            if param.grad is not None and param.grad.layout is torch.strided:
                after = _some(param.grad)
                before = brought.get(param, torch.zeros_like(after))
                sums += torch.stack([after @ after, after @ before])
        square, along = (over_copies(sums) / torch.tensor([copies, 1], device=sums.device)).tolist()
        found = averages and square > 0 and abs(along / square - 1) < _ROUNDING
        undivided, seen = largest(communicator, [int(found), int(square > 0)], "gradients of experts", ())
        self._left -= seen  # a step says nothing where all experts are frozen
        if not self._left:
            for handle in self._handles.values():
                handle.remove()
        if undivided:
            raise RuntimeError(
                "kfac_optim: the gradients of experts are those of the sum of the losses of ranks, as backward brings "
                "them, while those of other layers are of the mean. Before step(), for each parameter of an expert, "
                f"param.grad /= {communicator.world_size}; or, before the first backward, have a hook on it return "
                f"gradient / {communicator.world_size}. If your all-to-all divides the gradients of tokens, have it "
                "leave them as they are."
            )

    def forget(self) -> None:
        """Forget what backward has brought, as gradients were dropped."""
        self._brought = {}

    def _add(self, known: weakref.ref[nn.Parameter], gradient: Tensor) -> None:
        param = known()
        if param is None or gradient.layout is not torch.strided:
            return
        brought = _some(gradient)
        if param.grad is not None and param in self._brought:
            brought = brought + self._brought[param]
        self._brought[param] = brought.clone()  # what is kept as `.grad` may be divided in place


def _some(gradient: Tensor) -> Tensor:
    """Return some elements, `[n]` float64, spread over the whole."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)].double()
