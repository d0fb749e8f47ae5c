"""Three roles bring statistics, gradients and states of a step to where they belong: on one process all are there."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.preconditioning import Stacks, gradients, laid_out, precondition_jointly
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.inverses.base import Inverse
from kfac_optim.utils.streams import brought

Parts = Sequence[Tensor]
"""One tensor for each parameter of a block, in its shape."""


class LossShare(NamedTuple):
    """Says of some blocks which loss the gradients behind their statistics are of."""

    blocks: Sequence[KFACBlock]
    """Blocks that took statistics on some rank."""
    terms: LossCount
    """The terms of that loss."""
    scale: float = 1
    """What that loss was multiplied by before backward, beside the loss scale."""


class Statistics:
    """Brings statistics to ranks that recompute inverses, and inverses to ranks that precondition: all are here."""

    def emitted(self, block: KFACBlock) -> None:
        """Take notice, during backward, that `block` took statistics; they may be sent at once."""

    def tell_counts(self, blocks: Sequence[KFACBlock], count: LossCount, gradient_scale: float | Tensor) -> None:
        """Tell blocks that took statistics on some rank what all ranks have counted, as far as a fold asks for it.

        Args:
            blocks: the same on all ranks.
            count: the terms of the loss.
            gradient_scale: what output gradients are multiplied by.
        """

    def settle(self) -> None:
        """Finish what `emitted` has begun, when the statistics of the step are folded."""

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the first part of a refresh: bring the statistics of all ranks to those that recompute inverses."""

    def mark(self, blocks: Sequence[KFACBlock]) -> None:
        """Mark in `blocks`, which may be copies, what `solve` leaves to other ranks, as of the last `merge`."""

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the second part of a refresh: recompute the inverses of `blocks`, and touch nothing else.

        The blocks may be copies, and the caller may be another thread.
        """
        by_inverse: defaultdict[Inverse[Any], list[KFACBlock]] = defaultdict(list)
        for block in blocks:
            by_inverse[block.inverse].append(block)
        for inverse, alike in by_inverse.items():
            inverse.refresh([b.state for b in alike], [b.damping for b in alike])

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the third part of a refresh: bring the inverses to the ranks that precondition."""

    def has_statistics(self, block: KFACBlock) -> bool:
        """Return whether any sample was accepted by the time of the last refresh."""
        return block.state.has_statistics()

    def keeps(self, block: KFACBlock) -> bool:
        """Return whether the running averages of all processes come to this one, as far as it takes any."""
        return block.measured_here

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        """Return `InverseState.counters`; on several ranks they are the same on all, as of the last refresh."""
        return block.state.counters()

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        """Return how many samples were refused in a row and how many refreshes failed in a row, for each block."""
        if not blocks:
            return []
        device = blocks[0].params[0].device
        counts = [brought(count, device) for block in blocks for count in block.state.setbacks()]
        numbers = torch.stack(counts).tolist()  # the only host synchronisation here
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def owners(self, block: KFACBlock) -> Sequence[int]:
        """Return the ranks that recompute the inverse of `block`, or parts of it."""
        return (0,)


class Gradients:
    """Brings gradients to ranks that precondition them, and the result to those that update: both are done here.

    Attributes:
        stacks: preconditions small blocks together.
        apart: whether ranks have layers that others do not have, so that each takes part in sums whatever it has.
    """

    apart = False

    def __init__(self) -> None:
        self.stacks = Stacks()

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        """Return the blocks whose direction is to be known here, with the whole `∇h` of each of their parameters.

        The tensors may be `.grad` itself, and must not be changed.
        """
        return [(block, gradients(block)) for block in blocks]

    def whole(
        self, blocks: Sequence[KFACBlock], tensors: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[KFACBlock, Parts]]:
        """Return the blocks whose updates are made here, each with a whole tensor for each of its parameters.

        Args:
            blocks: the blocks with parameters that are updated here.
            tensors: the parts of these tensors that lie here, as the parameters do; where there is none it is zero.
        """
        return [
            (
                block,
                [torch.zeros_like(param) if (held := tensors.get(param)) is None else held for param in block.params],
            )
            for block in blocks
        ]

    def updates(self, made: Mapping[KFACBlock, Parts], blocks: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        """Return the updates of parameters, as `direction` does.

        Args:
            made: the updates that were made here, of the blocks that `whole` gave.
            blocks: the blocks that `whole` was asked for.
        """
        return self.direction(made, blocks)

    def as_makers_have(self, blocks: Sequence[KFACBlock], numbers: Mapping[KFACBlock, Tensor]) -> Sequence[Tensor]:
        """Return for each block the number `[]` that the ranks which make its update have found, on all that update it.

        Args:
            blocks: the blocks that `whole` was asked for.
            numbers: the numbers of the blocks that `whole` gave, each `[]`.
        """
        return [numbers[block] for block in blocks]

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        """Return the preconditioned `grads`: new tensors of the same shapes and layouts, in float32 at least."""
        if not any(block.inverse.takes_rows for block in blocks):
            return self.stacks.precondition(blocks, grads)
        apart = [i for i, block in enumerate(blocks) if not block.inverse.takes_rows]
        found = dict(zip(apart, self.stacks.precondition(*_chosen(apart, blocks, grads)), strict=True))
        together = defaultdict[Inverse[Any], list[int]](list)
        for i, block in enumerate(blocks):
            if block.inverse.takes_rows:
                together[block.inverse].append(i)
        for members in together.values():
            found |= zip(members, precondition_jointly(*_chosen(members, blocks, grads)), strict=True)
        return [found[i] for i in range(len(blocks))]

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        """Return the direction of each parameter that is updated here.

        Args:
            blocks: what `precondition` gave here.
            covered: all blocks that are preconditioned on some rank.

        Returns:
            Tensors in the shape, dtype and layout of their parameter, as torch's fused kernels read parameter, gradient
            and momentum side by side. They may share the memory of `blocks`.
        """
        return {
            param: laid_out(part, param, param.dtype)
            for block, parts in blocks.items()
            for param, part in zip(block.params, parts, strict=True)
            if param.grad is not None
        }

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return those of `params` that are updated here, in whole or in part."""
        return params

    def counts(self, param: nn.Parameter) -> bool:
        """Return whether sums over ranks take this rank's part of `param`: of copies they take one."""
        return True

    def makes_for_sums(self, block: KFACBlock) -> bool:
        """Return whether sums over ranks take what `precondition` gave of a block here: of equal ones they take one."""
        return True

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        """Sum `values` `[n]` over the ranks that update different parameters."""
        return values


def _chosen(
    members: Sequence[int], blocks: Sequence[KFACBlock], grads: Sequence[Parts]
) -> tuple[list[KFACBlock], list[Parts]]:
    return [blocks[i] for i in members], [grads[i] for i in members]


class WholeStates:
    """Knows for checkpoints what this process holds of the statistics and inverses of all blocks: everything."""

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        """Take notice that a checkpoint is about to be loaded, which has no statistics for some blocks here."""

    def late(self, block: KFACBlock, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is to be restored of a state that waited, since a checkpoint was loaded, for this new block."""
        return state

    def tensors(self, block: KFACBlock) -> Any | None:
        """Return the whole state of `block`, as `InverseState.tensors`; None where this rank does not hold it."""
        return block.state.tensors()

    def lacks(self, *, factors: bool) -> str | None:
        """Say what a checkpoint made now lacks of what other ranks know; None if it lacks nothing.

        Args:
            factors: whether checkpoints hold statistics and inverses.
        """
        return None

    @property
    def remedy(self) -> str:
        """Say what to do about it, in whole sentences."""
        return (
            "Call optimizer.consolidate_state_dict() on all ranks right before state_dict() (on the optimizer itself, "
            "where a trainer has wrapped it); with consolidate_state_dict(to=None) each rank saves what it owns."
        )
