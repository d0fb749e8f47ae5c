"""Copies of blocks, which are refreshed in their place while training goes on."""

from dataclasses import replace

from kfac_optim.blocks.block import KFACBlock


def make_shadow(block: KFACBlock, spare: KFACBlock | None = None) -> KFACBlock:
    """Copy a block's state, its clock and the numbers of its param groups as they are now.

    Args:
        block: the block.
        spare: an earlier copy, whose memory is used again if it fits.
    """
    fits = spare is not None and (spare.spec, spare.home) == (block.spec, block.home)
    shadow = spare if spare is not None and fits else replace(block)
    shadow.clock = replace(block.clock, damping=block.damping)
    shadow.groups = tuple(dict(group) for group in block.groups)
    shadow.state.load(block.state.tensors())
    return shadow


def adopt(block: KFACBlock, shadow: KFACBlock) -> None:
    """Take over the inverse that a copy of the block at an earlier step was given since."""
    block.state.adopt(shadow.state)
    block.under_way = None
    block.clock.note_adoption(shadow.clock)
