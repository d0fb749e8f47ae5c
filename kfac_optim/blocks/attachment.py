"""The hooks and watches that carry the statistics of calls to blocks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from kfac_optim.blocks.block import KFACBlock, LayerUse
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.layers.base import watch_of
from kfac_optim.utils.hooks import Handle
from kfac_optim.utils.sharded_params import Shards

Attachment = tuple[KFACBlock, LayerUse]
"""A block, and how one module uses it."""


def by_module(blocks: Iterable[KFACBlock]) -> dict[nn.Module, tuple[Attachment, ...]]:
    """Return the blocks that each module's calls give statistics to, with the module's use of each."""
    found: defaultdict[nn.Module, tuple[Attachment, ...]] = defaultdict(tuple)
    for block in blocks:
        for use in block.uses:
            found[use.module] += ((block, use),)
    return dict(found)


def attach(
    module: nn.Module, attachments: Sequence[Attachment], window: CaptureWindow, emitted: Callable[[KFACBlock], None]
) -> Handle:
    """Hook `module` into `window` for all its blocks; `emitted` is called with each that took statistics."""
    _, use = attachments[0]
    specs = [use.spec for _, use in attachments]
    return use.adapter.capture(module, specs, window, Sink(attachments, emitted))


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes the statistics of one module into its blocks, in the order of the adapter's specs."""

    attachments: Sequence[Attachment]
    emitted: Callable[[KFACBlock], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.attachments[0][0].dtype

    def wanted(self) -> bool:
        return any(block.takes_statistics() for block, _ in self.attachments)

    def emit(self, index: int, stats: LayerStatistics) -> bool:
        block, use = self.attachments[index]
        stats.opposed = use.opposed
        block.accumulate(stats)
        self.emitted(block)
        # A derivative that comes after this backward may have the rows of all uses joined, which need the input.
        return stats.keeps_input or block.follows_uses

    def awaits_gradient(self, index: int, shards: Shards) -> bool:
        block, _ = self.attachments[index]
        return block.awaits_gradient(shards)

    def verify(self, index: int, call: LayerCall | None, statistics: Callable[[LayerCall], LayerStatistics]) -> None:
        block, use = self.attachments[index]
        if call is None:
            block.check.spoil()
        else:
            stats = statistics(call)
            stats.opposed = use.opposed
            block.check.capture(stats, call)

    def discard(self) -> None:
        for block, _ in self.attachments:
            block.discard()

    def separate_inputs(self, index: int) -> None:
        block, _ = self.attachments[index]
        block.revise(replace(block.spec, shared_input=False))


class Watches:
    """Has a watch for each matrix; `emitted` is called with each block that took statistics."""

    def __init__(self, emitted: Callable[[KFACBlock], None]) -> None:
        self._emitted = emitted
        self._known: dict[tuple[nn.Parameter, bool], tuple[KFACBlock, LayerWatch, Handle]] = {}

    def of(
        self,
        window: CaptureWindow,
        block: KFACBlock,
        statistics: Callable[[LayerCall], LayerStatistics],
        *,
        opposed: bool = False,
    ) -> LayerWatch:
        """Return the watch of a block's matrix, or (`opposed`) of its transpose, which makes `statistics` of a call."""
        weight = block.params[0]
        if (weight, opposed) not in self._known:
            use = block.uses[0]
            sink = Sink([(block, replace(use, opposed=True) if opposed else use)], self._emitted)
            watch = watch_of(weight, sink, 0, statistics)
            self._known[weight, opposed] = block, watch, window.watch_calls(watch)
        return self._known[weight, opposed][1]

    def keep(self, *present: Mapping[nn.Parameter, KFACBlock]) -> None:
        """Drop the watches of blocks that none of these has."""
        for key, (block, _, handle) in list(self._known.items()):
            if not any(blocks.get(key[0]) is block for blocks in present):
                handle.remove()
                del self._known[key]
