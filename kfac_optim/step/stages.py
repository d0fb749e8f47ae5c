"""What the stages of a pipeline know together of one step; here is one stage alone."""

import torch
from torch import Tensor


class Stages:
    """Brings together what the stages of a pipeline know of one step, each with an optimizer; here is one stage alone.

    Attributes:
        several: whether there are other stages.
    """

    several = False

    def agree(self, *, finite: bool, summed: float, kl_clip: float | None, device: torch.device) -> tuple[bool, float]:
        """Return whether all gradients of all stages are finite, and the most terms of a summed loss that one has seen.

        Args:
            finite: whether those of this stage are.
            summed: `LossCount.summed` of this stage.
            kl_clip: of its param groups.
            device: of its parameters.
        """
        return finite, summed

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` `[n]` over the stages."""
        return values
