"""Who refreshes, preconditions and updates what. The engine knows only this protocol."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from kfac_optim.blocks import KFACBlock
from kfac_optim.inverses.base import Inverse


class Executor(Protocol):
    """Carries out the engine's steps on one process or many."""

    def reduce(self, block: KFACBlock) -> None:
        """Told during backward that `block` took statistics; may start to share them."""

    def wait(self) -> None:
        """Finish what `reduce` started; after it the pending sums are those of all workers."""

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Take over refreshes of earlier steps that are finished, or waited for now; the blocks that got an inverse."""

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Recompute the inverses of `blocks`, those that are due; the ones that have theirs now, not at a later step.

        Touches nothing but the blocks it is given: they may be copies, on another thread.
        """

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Tensor]) -> list[Tensor]:
        """The preconditioned gradient `[groups, out, in]` of each block."""

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Those of `params` that this worker updates."""

    def publish(self, params: Sequence[nn.Parameter]) -> None:
        """Share updated parameters with the workers that did not update them."""

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Sum `values` `[n]` over workers that hold different blocks."""


class SingleDevice:
    """Everything here and now, in one process."""

    def reduce(self, block: KFACBlock) -> None:
        pass

    def wait(self) -> None:
        pass

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        by_inverse: defaultdict[Inverse[Any], list[KFACBlock]] = defaultdict(list)
        for block in blocks:
            by_inverse[block.inverse].append(block)
        for inverse, alike in by_inverse.items():
            inverse.refresh([b.state for b in alike], [b.damping for b in alike])
        return blocks

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Tensor]) -> list[Tensor]:
        return [
            block.inverse.apply(block.state, grad, block.damping) for block, grad in zip(blocks, grads, strict=True)
        ]

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return params

    def publish(self, params: Sequence[nn.Parameter]) -> None:
        pass

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        return values
