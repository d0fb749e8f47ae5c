"""Statistics and inverses of one plan, step by step: which blocks refresh, what is sent early, and what is left."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.distributed.planning.plan_options import TOLD_COUNTERS
from kfac_optim.distributed.statistics.exchange import StatisticsExchange
from kfac_optim.distributed.statistics.overlap import EarlyReports
from kfac_optim.step.roles import Statistics


class SharedStatistics(Statistics):
    """Carries out refreshes on many ranks under one plan.

    [Note: which blocks are coming] All ranks must send the statistics of the same blocks in the same buckets, and the
    first of them are sent during backward. So `coming` settles, once in a step, which blocks the next step refreshes;
    whoever asks first in that step settles it, and clocks, periods and dampings are the same on all ranks by then.

    Args:
        exchange: sends and receives under the plan.
        reports: sends during backward; None where statistics are sent in the step alone.
        blocks: all blocks of the plan.

    Attributes:
        exchange: the exchange that was given.
        blocks: the blocks that were given, or those by which `follow` has replaced them.
        joined: names of blocks of which all ranks know that statistics are made of all uses of the matrix together.
    """

    def __init__(self, exchange: StatisticsExchange, reports: EarlyReports | None, blocks: Sequence[KFACBlock]) -> None:
        self.exchange = exchange
        self.blocks = blocks
        self.joined: set[str] = set()
        self._reports = reports
        self._listens = True
        # What the plan was made of, and the states whose memory was laid out: to see when a block gets another.
        self._specs = {block: block.spec for block in blocks}
        self._placed: dict[KFACBlock, object] = {}
        # About the step to come: blocks that it refreshes, those that are merged already, and buckets that go again.
        self._due: tuple[KFACBlock, ...] | None = None
        self._merged: set[KFACBlock] = set()
        self._again: tuple[bool, ...] = ()

    def follow(self, blocks: Sequence[KFACBlock]) -> None:
        """Have other blocks from now on, which the same plan may hold for.

        What the coming step refreshes stays as the old blocks have it: ranks whose backward has asked know it so.
        """
        self.coming()
        self.blocks = blocks

    def planned_as_it_is(self) -> list[KFACBlock]:
        """Return the blocks that still are as they were planned."""
        return [block for block in self.blocks if self._specs.get(block) == block.spec]

    def coming(self) -> Sequence[KFACBlock]:
        """Return blocks that the coming step refreshes, and perhaps a few more; see [Note: which blocks are coming]."""
        if self._due is None:
            self._due = tuple(
                block
                for block in self.blocks
                if block in self._placed and block.under_way is None and block.refresh_due(ahead=True)
            )
        return self._due if self.exchange.merges else ()

    def hold_off(self) -> None:
        """Send nothing more during backward, as a checkpoint replaces the statistics."""
        self.coming()  # settled as all ranks know it still, for what may be under way
        self._listens = False

    def close(self) -> None:
        """Send nothing more: the optimizer is gone, and a backward may still come."""
        self._reports = None

    def place_new(self) -> None:
        """Lay out the memory of states that are new."""
        for block in self.blocks:
            if self._placed.get(block) is not block.state:
                self.exchange.place(block)
                self._placed[block] = block.state

    def is_placed(self, block: KFACBlock) -> bool:
        """Return whether the memory of the block's state is laid out under this plan."""
        return block in self._placed

    def stale_flags(self) -> list[bool]:
        """Return for each bucket of the coming step whether what this rank has sent of it does not hold any more."""
        if self._reports is None or not (coming := self.coming()):
            return []
        reducer = self.exchange.reducer(coming)
        self._reports.review(reducer)
        return reducer.stale_flags()

    def resend(self, again: Sequence[bool]) -> None:
        """Have `settle` send buckets again that some rank finds stale; more flags than buckets are not looked at."""
        self._again = tuple(again)

    def abandon(self) -> None:
        """Throw away what was sent early for the coming step; a collective."""
        if self._reports is not None and (coming := self.coming()):
            self.exchange.abandon(coming)
        self._end_round()
        self._merged.clear()

    def emitted(self, block: KFACBlock) -> None:
        # A forward may have shown another use of the weight since the plan was made: then the step plans again.
        if self._reports is not None and self._listens and self._specs.get(block) == block.spec:
            self._reports.emitted(block, self.coming)

    def join(self, names: Collection[str]) -> bool:
        """Have statistics of these blocks made of all uses together, as some rank does; whether that is new."""
        new = not self.joined.issuperset(names)
        self.joined.update(names)
        for block in self.blocks:
            if block.name in self.joined:
                block.join_uses()
        return new

    def tell_counts(self, blocks: Sequence[KFACBlock], count: LossCount, gradient_scale: float | Tensor) -> None:
        if not self.exchange.merges:
            return
        together = [block for block in blocks if block.counts_together or block.name in self.joined]
        counted = {block: block.counts(count, gradient_scale) for block in together}
        known = {block: each for block, each in counted.items() if each is not None}
        if known:
            for block, everywhere in self.exchange.add_up(known).items():
                block.state.tell(everywhere)

    def settle(self) -> None:
        if coming := self.coming():
            self.exchange.merge(coming, self._again)
        self._end_round()

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        if rest := [block for block in blocks if block not in self._merged]:
            self.exchange.merge(rest)

    def mark(self, blocks: Sequence[KFACBlock]) -> None:
        self.exchange.mark_elsewhere([block for block in blocks if self.exchange.owns(block)])

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        super().solve([block for block in blocks if self.exchange.owns(block)])

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        self.exchange.share(blocks)

    def has_statistics(self, block: KFACBlock) -> bool:
        return self.exchange.status[block.name].held

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        own = {key: value for key, value in super().counters(block).items() if key not in TOLD_COUNTERS}
        told = self.exchange.status.get(block.name)
        return own if told is None else {**own, **told.counters}

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        status = self.exchange.status
        return [(status[block.name].refused, status[block.name].failed) for block in blocks]

    def keeps(self, block: KFACBlock) -> bool:
        return self.exchange.owns_all(block) if self.is_placed(block) else super().keeps(block)

    def owners(self, block: KFACBlock) -> Sequence[int]:
        return self.exchange.owners(block) if self.is_placed(block) else (0,)

    def _end_round(self) -> None:
        self._merged = set(self.coming())
        self._due = None
        if self._reports is not None:
            self._reports.end()
