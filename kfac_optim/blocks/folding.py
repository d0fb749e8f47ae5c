"""The sums of a step are taken into the averages of all blocks, those of small equal blocks in one batch."""

from collections import defaultdict
from collections.abc import Hashable, Iterable

from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.factors.batched_fold import fold_together, shared_by
from kfac_optim.factors.kronecker_factors import FactorPair


def fold_all(blocks: Iterable[KFACBlock], count: LossCount, gradient_scale: float | Tensor) -> None:
    """Take this step's sums into the averages of blocks; see `KFACBlock.fold`."""
    blocks = list(blocks)
    for block in blocks:
        block.settle()
    averaged, alike = count.averaged, defaultdict[Hashable, list[tuple[KFACBlock, FactorPair]]](list)
    if isinstance(averaged, Tensor) or isinstance(gradient_scale, Tensor):  # not looked at here
        for block in blocks:
            block.fold(count, gradient_scale)
        return
    for block in blocks:
        pair = block.state.to_fold()
        shared = None if pair is None else shared_by(pair)
        if pair is None or shared is None:
            block.fold(count, gradient_scale)
        else:
            alike[block.decay(), shared].append((block, pair))
    for equal in alike.values():
        first = equal[0][0]
        if len(equal) == 1:
            first.fold(count, gradient_scale)
            continue
        fold_together([pair for _, pair in equal], averaged, first.decay(), gradient_scale)
        for block, _ in equal:
            block.clock.note_fold(count)
