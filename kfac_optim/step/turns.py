"""How layers take part in the statistics of a step: those that it does not use wait for their turn."""

from collections.abc import Sequence

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import is_used
from kfac_optim.factors.second_moments import on_host
from kfac_optim.step.execution import Agreement


def pass_step(blocks: Sequence[KFACBlock], agreement: Agreement) -> list[str]:
    """Advance all clocks by a step, and note which layers have missed statistics that were due.

    Returns:
        The names of layers that the loss uses here, though this process has waited in vain for their statistics.
    """
    stale: list[str] = []
    for block in blocks:
        if block not in agreement.sampled:
            if not block.is_ready:
                block.silent += block.wants_statistics()
            elif block.clock.missed:
                if block in agreement.graded and block.has_waited() and is_used(block):
                    stale.append(block.name)
                block.wait_on()
            elif block in agreement.graded and block.is_overdue() and _may_be_used(block, agreement):
                block.note_missed()
        elif block.is_partial and block not in agreement.unaccounted:
            block.note_missed()
        block.clock.graded += block in agreement.graded
        block.clock.advance()
    return stale


def _may_be_used(block: KFACBlock, agreement: Agreement) -> bool:
    """Return whether the loss may have used a block whose calls can be captured.

    Gradients are looked at where they are on the host; elsewhere each counts as not zero.
    """
    if block in agreement.unaccounted or block.is_refused():
        return False
    if not on_host(block.params[0]):
        return True
    return is_used(block) if agreement.used is None else block in agreement.used
