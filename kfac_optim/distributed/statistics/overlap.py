"""Sums of statistics that are sent while backward goes on.

[Note: beside the wrapper] Meanwhile DistributedDataParallel sends gradients, and how both interleave differs from rank
to rank. That is safe, also where a communicator is one queue, as NCCL's are:

- Sums have a process group to themselves (`TrainingGroup.open_early`), lent to one optimizer at a time. On it a
  `Reducer` launches its buckets in the order of the plan, whatever order hooks come in, and the step what is left.
  Gradients go on the wrapper's group, in the order of its buckets. So what is matched by its place is in one order on
  all ranks, on either group; all else of a step goes on a third one, and never during backward.
- No launch waits for the other group: within backward neither the host nor the stream that computes waits for any
  collective (`Reducer._launch` gives up buffers of what has ended, no more). Each group has a stream of its own on an
  accelerator, which waits for the numbers that it sends. So there is no circle in which ranks could wait.

What is left to the device is to run kernels of two groups at once, as programs with FSDP and tensor parallelism ask of
it too; over NCCL two ranks on one device have done so. `DistributedConfig(overlap=False)` sends all sums in the step.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.folding import sum_rows
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.distributed.communication.reducer import Reducer
from kfac_optim.distributed.statistics.exchange import StatisticsExchange

Terms = tuple[LossCount, float | Tensor]
"""Terms of the loss, and what the output gradients are multiplied by."""


class EarlyReports:
    """Reports blocks to the reducer of a step that refreshes, as they take statistics.

    What is reported is what the block would send if the step came now. At the step it is looked at again: where more
    came, or the loss has other terms than it had, the report does not hold, and the bucket goes once more.

    Args:
        exchange: the exchange whose sums are sent.
        is_last: whether the backward that is running is the last before a step, as far as is known.
        terms: returns the terms of the loss, as they would be if the step came now; None where they are not known.
    """

    def __init__(
        self, exchange: StatisticsExchange, is_last: Callable[[], bool], terms: Callable[[], Terms | None]
    ) -> None:
        self._exchange = exchange
        self._is_last = is_last
        self._terms = terms
        self._reported: dict[KFACBlock, Terms] = {}
        self._several: set[KFACBlock] = set()

    def emitted(self, block: KFACBlock, due: Callable[[], Sequence[KFACBlock]]) -> None:
        """Report a block that took statistics; `due` gives those that the coming step refreshes on all ranks."""
        if block.joint is not None or block.counts_together:
            return  # statistics are made at the step, or fold with what other ranks have counted by then
        if not block.has_pending():
            return  # a call without examples: whether the block is folded, other ranks decide
        if block in self._reported:
            self._several.add(block)  # it has several calls, of which the last alone would be the time to report it
            self._invalidate(block, self._exchange.reducer(due()))
        elif block not in self._several and self._is_last() and block in (blocks := due()):
            if (terms := self._terms()) is None:
                return
            self._reported[block] = terms
            sum_rows([block])
            reducer = self._exchange.reducer(blocks)
            for name, factor in self._exchange.slots(block, _folded_ahead(block, *terms)):
                reducer.ready(name, factor.packed, factor.mass)

    def review(self, reducer: Reducer) -> None:
        """Look at all reports again as the step has come: what does not hold must be sent again."""
        terms = self._terms()
        for block, reported in self._reported.items():
            if not (block.has_pending() and terms is not None and _equal(terms, reported)):
                self._invalidate(block, reducer)

    def end(self) -> None:
        """End the round."""
        self._reported.clear()

    def _invalidate(self, block: KFACBlock, reducer: Reducer) -> None:
        for name, _ in self._exchange.slots(block, block.state):
            reducer.invalidate(name)


def _equal(one: Terms, other: Terms) -> bool:
    return all(_same(a, b) for a, b in zip((one[0].averaged, one[1]), (other[0].averaged, other[1]), strict=True))


def _same(one: Any, other: Any) -> bool:
    """Compare two values; tensors count as equal only if identical, as to look at them would synchronise."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


def _folded_ahead(block: KFACBlock, count: LossCount, gradient_scale: float | Tensor) -> Any:
    """Return a copy of a block's state, as `fold` would leave it; what `refresh` computed is not copied."""
    parts = block.inverse.parts(block.spec.by_blocks())
    results = (result.tensor for part in parts for result in block.state.results(part.name))
    ahead = copy.deepcopy(block.state, {id(tensor): tensor for tensor in results})
    block.fold_into(ahead, count, gradient_scale)
    return ahead
