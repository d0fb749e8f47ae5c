"""The stages of a pipeline: each rank has an optimizer for its part of the model, and one trust region bounds all."""

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.process_groups import device_of, own_groups, timeout_of
from kfac_optim.distributed.gradients.flow import total_norm
from kfac_optim.fisher.estimates import NamedLoss
from kfac_optim.step.choices import Choices
from kfac_optim.step.scalars import Scalar, scalars
from kfac_optim.step.stages import Stages


class PipelineStages(Stages):
    """Has the stages of one pipeline agree on each step, and adds up what they say of its length.

    Three small all-reduces a step go through a process group of our own with the ranks of the pipeline. The first one
    is launched before those of ranks that train the same stage, on all ranks, so that no order can differ: what one
    rank of one stage knows then reaches all ranks of all stages. The other two bring together what the ranks of each
    stage already agree on.

    Args:
        group: the ranks of the stages of this copy of the model, in their order.
        timeout: how long a collective may take; None is as long as in the group.
    """

    several = True

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        self._group, self._timeout = group, timeout
        self.is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
        self._made: Communicator | None = None

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
        the terms that the last stage tells the others; None where it has none to tell.

        Args:
            finite: whether the gradients of this stage are.
            summed: `LossCount.summed` of this stage.
            terms: the terms that this stage has to tell, `LossTally.told`.
            kl_clip: the `kl_clip` of the param groups of this stage.
            step_size: the step size of this stage.
            device: the device of its parameters.

        Raises:
            ValueError: the stages have different `kl_clip`, or step sizes of different kinds.
            CollectiveError: some stage never came.
        """
        clip = -1.0 if kl_clip is None else float(kl_clip)
        told = float(terms) if self.is_last and terms is not None else 0.0
        kind = float(zlib.crc32(type(step_size).__name__.encode()))  # the same number in all processes
        mine = torch.tensor([not finite, summed, clip, -clip, kind, -kind, told], dtype=torch.float64, device=device)
        largest = self._communicator(device).all_reduce("stages", mine, dist.ReduceOp.MAX).wait().tolist()
        unfinished, most, highest, lowest, last_kind, first_kind, told = largest
        if last_kind != -first_kind:
            raise ValueError(
                "kfac_optim: one trust region bounds all stages of the pipeline, and others take steps of another kind "
                f"than this one: this stage has step_size={step_size}. Pass the same step_size in all of them."
            )
        if highest != -lowest:
            shown = [None if each < 0 else each for each in (-lowest, highest)]
            raise ValueError(
                f"kfac_optim: one trust region bounds all stages of the pipeline, and their kl_clip differs: this "
                f"stage has {kl_clip}, others have {shown[0]} and {shown[1]}. Set the same value in all of them."
            )
        return not unfinished, most, told or None

    def any(self, here: bool) -> bool:
        assert self._made is not None, "the step began by `agree`"
        mine = torch.tensor(float(here), device=self._made.device)
        return bool(self._made.all_reduce("statistics of stages", mine, dist.ReduceOp.MAX).wait())

    def norm(self, own: Tensor, order: float) -> Tensor:
        return total_norm([own], order, self._communicator(device_of(self._group)), own.dtype)

    def sums(self, own: Sequence[Scalar], slopes: Tensor) -> list[Scalar]:
        """Return sums over all stages, in float64, the same bits on each.

        Args:
            own: sums over this stage, numbers or tensors on the device of the model.
            slopes: more of them, `[n]`.
        """
        # To copy a number to an accelerator waits for what is queued there, to fill a tensor with it does not.
        wide = slopes.double()
        tensors = [each.to(wide) if isinstance(each, Tensor) else wide.new_full((), each) for each in own]
        mine = torch.stack([*tensors, *wide])
        return scalars(self._communicator(mine.device).all_reduce("trust region", mine).wait())

    def _communicator(self, device: torch.device) -> Communicator:
        """Return what launches on the stages; the first time this is a collective."""
        if self._made is None:
            timeout = self._timeout or timeout_of(self._group, device)
            self._made = Communicator(own_groups(self._group, timeout).main, device, timeout)
        self._made.device = device
        return self._made


def check_stage_choices(choices: Choices) -> None:
    """Raise ValueError for choices that look at the whole model, of which each stage has a part.

    Args:
        choices: the user's choices.
    """
    if whole := [*choices.judges, *choices.by_rows, *choices.evaluators]:
        raise ValueError(
            f"kfac_optim: {whole[0]!r} evaluates the whole model, of which each stage of a pipeline has a part. Use "
            "AdaptiveTrustRegion() and a fixed damping, or leave pipeline out of DistributedConfig."
        )
    if isinstance(choices.estimate, NamedLoss):
        raise ValueError(
            f"kfac_optim: {choices.estimate!r} reads what the criterion reads, which the last stage of a pipeline has "
            "alone: the other stages would take their hidden outputs for predictions. Leave estimate out."
        )
