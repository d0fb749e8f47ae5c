"""The sums of a step are taken into the averages of all blocks, those of small equal blocks in one batch."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.factors.batched_fold import alike_of, fold_together
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import FewRows, UnitRows
from kfac_optim.factors.small_calls import SmallCall, add_moments

# At most so many bytes of rows wait in one stream.
_HELD = 2**29


class WaitingRows:
    """Has the rows of blocks wait for those of others, for their moments to be computed in few batches.

    They wait until the step, unless so many wait in one stream of an accelerator that they would take its memory.
    """

    def __init__(self) -> None:
        self._held: defaultdict[Hashable, list[KFACBlock]] = defaultdict(list)
        self._bytes: Counter[Hashable] = Counter()

    def note(self, block: KFACBlock) -> None:
        """Note that a block has taken statistics, by rows that wait or not."""
        if not block.waiting:
            return
        rows = block.waiting[-1]
        self._held[rows.stream].append(block)
        self._bytes[rows.stream] += rows.size
        if self._bytes[rows.stream] > _HELD:
            sum_rows(self._held.pop(rows.stream), lambda each: each.stream == rows.stream)
            del self._bytes[rows.stream]

    def clear(self) -> None:
        """Note that no rows wait any more."""
        self._held.clear()
        self._bytes.clear()


def sum_rows(blocks: Iterable[KFACBlock], which: Callable[[FewRows | UnitRows], bool] = lambda _: True) -> None:
    """Take the rows that wait, or some of them, into the sums of this step; see `KFACBlock.waiting`."""
    calls = []
    for block in blocks:
        if block.waiting and (pair := block.state.to_fold()) is not None:
            calls += [SmallCall(pair, rows) for rows in block.waiting if which(rows)]
            block.waiting[:] = [rows for rows in block.waiting if not which(rows)]
    add_moments(calls)


def fold_all(
    blocks: Sequence[KFACBlock],
    count: LossCount,
    gradient_scale: float | Tensor,
    tell: Callable[[Sequence[KFACBlock], LossCount, float | Tensor], None],
) -> None:
    """Take this step's sums into the averages of blocks; see `KFACBlock.fold`.

    Args:
        blocks: the blocks.
        count: the terms of the loss.
        gradient_scale: what output gradients are multiplied by.
        tell: tells blocks what other ranks have counted, with these arguments, once the sums are complete.
    """
    for block in blocks:
        block.settle()
    tell(blocks, count, gradient_scale)
    averaged = count.averaged
    if isinstance(averaged, Tensor) or isinstance(gradient_scale, Tensor):  # not looked at here
        for block in blocks:
            block.fold(count, gradient_scale)
        return
    families: dict[tuple[float, Hashable], dict[Hashable, list[FactorPair]]] = {}
    members: defaultdict[tuple[float, Hashable], list[KFACBlock]] = defaultdict(list)
    for block in blocks:
        pair = block.state.to_fold()
        alike = None if pair is None else alike_of(pair)
        if pair is None or alike is None:
            block.fold(count, gradient_scale)
        else:
            family = block.decay(), alike.family
            families.setdefault(family, {}).setdefault(alike.shape, []).append(pair)
            members[family].append(block)
    for family, shapes in families.items():
        if len(members[family]) == 1:
            members[family][0].fold(count, gradient_scale)
            continue
        fold_together(list(shapes.values()), averaged, members[family][0].decay(), gradient_scale)
        for block in members[family]:
            block.clock.note_fold(count)
