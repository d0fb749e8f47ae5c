"""What a step size remembers of earlier steps, and the warning that is read off it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.step.scalars import Scalar
from kfac_optim.step.step_size import StepSize
from kfac_optim.step.user_warnings import UserWarnings

_LOOK_PERIOD = 100  # steps, as the host waits for the device to look
_NEARLY_ALL = 0.95  # of the recent steps


class StepMemory:
    """Keeps the four numbers of `StepSize` from step to step, on the device of the model.

    Args:
        step_size: the step size that remembers them.
        warnings: tells the user of steps that are too short.
    """

    def __init__(self, step_size: StepSize, warnings: UserWarnings) -> None:
        self._step_size = step_size
        self._warnings = warnings
        self._numbers: Tensor | None = None
        self._looked_at = 0.0  # infinite once nobody is to be warned any more

    def get(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> Tensor:
        """Return the numbers, `[4]`, zero at first; they lie where the last step or a checkpoint has put them."""
        if self._numbers is None:
            # A copy has no block before its first forward if the model has to be found.
            like = next((block.params[0] for block in blocks), next(iter(params), None))
            if like is None:  # parameters may still be added
                return torch.zeros(4, device="cpu")
            dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float64
            self._numbers = torch.zeros(4, dtype=dtype, device=like.device)
        return self._numbers

    def put(self, numbers: Tensor | None) -> None:
        """Replace the numbers, `[4]`; None forgets them."""
        self._numbers = numbers

    def to_list(self) -> list[float] | None:
        """Return the numbers for a pickle, as numbers outlive the spawning of a process and new tensors do not."""
        return None if self._numbers is None else self._numbers.tolist()

    def silence(self) -> None:
        """Never warn from now on."""
        self._looked_at = math.inf

    def look(self, measures: Mapping[str, Scalar], step: int) -> None:
        """Warn if nearly all recent steps were made too short. The host waits for that, so it is not done often.

        Args:
            measures: those of the last step.
            step: the number of the coming step.
        """
        if self._numbers is None or step - self._looked_at < _LOOK_PERIOD:
            return
        self._looked_at = step
        scale = measures.get("trust_region_scale")
        if scale is not None and float(self._numbers[3]) > _NEARLY_ALL:
            self.silence()
            self._warnings.short_steps(self._step_size, self._step_size.advice(float(scale)))
