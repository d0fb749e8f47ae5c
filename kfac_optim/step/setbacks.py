"""Layers whose statistics are refused, or whose refreshes fail, again and again."""

from collections.abc import Sequence

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.selection import holders
from kfac_optim.inverses.damped.powers import InverseAndRoot
from kfac_optim.step.execution import Executor


def check_setbacks(blocks: Sequence[KFACBlock], executor: Executor, limit: int) -> None:
    """Raise if a layer's statistics were refused, or its refresh failed, too many times in a row."""
    for block, (refused, failed) in zip(blocks, executor.statistics.setbacks(blocks), strict=True):
        if refused >= limit:
            raise RuntimeError(
                f"kfac_optim: the statistics of layer {block.name!r} were not finite {refused} times in a row "
                f"(nonfinite_limit={limit}). Look for inputs or output gradients that overflow {block.dtype} when they "
                f"are squared: lower the loss scale or normalise the input, pass factor_dtype=torch.float64, or pass "
                f"skip_layers={holders(block.param_names)}. Where you call set_loss_terms(n), see that n is above 0."
            )
        if failed >= limit:
            relative = isinstance(block.inverse, InverseAndRoot)
            more = "Pass a larger inverse=InverseAndRoot(damping=...)" if relative else "Raise damping"
            raise RuntimeError(
                f"kfac_optim: the inverse of layer {block.name!r} could not be computed {failed} times in a row "
                f"(nonfinite_limit={limit}). {more}, pass factor_dtype=torch.float64, or pass "
                f"skip_layers={holders(block.param_names)}."
            )
