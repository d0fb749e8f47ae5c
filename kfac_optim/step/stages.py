"""What the stages of a pipeline know together of one step; here is one stage alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_optim.step.scalars import Scalar, scalars_beside


class Stages:
    """Brings together what the stages of a pipeline know of one step, each with an optimizer; here is one stage alone.

    Attributes:
        several: whether there are other stages.
        is_last: whether this is the stage whose output the loss reads.
    """

    several = False
    is_last = True

    def agree(
        self,
        *,
        finite: bool,
        summed: float,
        terms: float | Tensor | None,
        kl_clip: float | None,
        step_size: object,
        device: torch.device,
    ) -> tuple[bool, float, float | None]:
        """Return what is known of all stages together.

        That is whether all gradients of all stages are finite, the most terms of a summed loss that one has seen, and
        the terms that the last stage tells the others; here these are none.

        Args:
            finite: whether the gradients of this stage are.
            summed: `LossCount.summed` of this stage.
            terms: `LossTally.told` of this stage.
            kl_clip: the `kl_clip` of its param groups.
            step_size: its step size.
            device: the device of its parameters.
        """
        return finite, summed, None

    def any(self, here: bool) -> bool:
        """Return whether something is so in any stage, where each knows whether it is so in its own.

        Args:
            here: whether it is so in this one.
        """
        return here

    def norm(self, own: Tensor, order: float) -> Tensor:
        """Return the norm of the gradients of all stages, `[]`; a collective.

        Args:
            own: the norm of the gradients of this stage, `[]`.
            order: the order of the norm.
        """
        return own

    def sums(self, own: Sequence[Scalar], slopes: Tensor) -> list[Scalar]:
        """Return sums over this stage as those over all stages, as of one process.

        Args:
            own: numbers, or tensors on the device of the model.
            slopes: more of them, `[n]`.
        """
        return [*own, *scalars_beside(slopes, own[0])]
