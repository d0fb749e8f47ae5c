"""How the refreshes that are due are carried out: at once. `background_refresh.py` overrides it."""

from collections.abc import Sequence

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.step.execution import Executor


class Refresher:
    """Refreshes blocks at the step at which they are due."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Take over earlier refreshes that are finished, or must be waited for; return the blocks that got an inverse.

        Args:
            blocks: all blocks.
        """
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Refresh `blocks`, which are due, or begin to; return those that have their new inverse already."""
        if blocks:
            statistics = self._executor.statistics
            statistics.merge(blocks)
            statistics.mark(blocks)
            statistics.solve(blocks)
            statistics.share(blocks)
        return blocks
