"""Statistics of matrices that lie in parameters of any shape, and of convolutions that functions make.

It hears from `FunctionalUses` of what functions do with parameters, in forwards outside of graphs alone: what
`torch.compile` traces makes no statistics here.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn

from kfac_optim.blocks.attachment import Sink
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.contractions import TensorProduct
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.layers.base import watch_of
from kfac_optim.layers.tensors import TensorAdapter, TensorStatistics
from kfac_optim.utils.hooks import Handle

Claim = Callable[[TensorProduct], KFACBlock | None]
"""Makes a block of a parameter that has none yet; None where there shall be none."""


class TensorUses:
    """Knows the blocks of such parameters, and notes what is done with them.

    Args:
        window: takes the statistics; held weakly.
        claim: asked at the first product with a candidate; a bound method, held weakly.
        emitted: is called with each block that took statistics.
    """

    def __init__(self, window: CaptureWindow, claim: Claim, emitted: Callable[[KFACBlock], None]) -> None:
        self._window = weakref.ref(window)
        self._claim = weakref.WeakMethod(claim)
        self._emitted = emitted
        self._blocks: dict[nn.Parameter, KFACBlock] = {}
        self._candidates: set[nn.Parameter] = set()
        self._watches: dict[nn.Parameter, tuple[KFACBlock, LayerWatch, Handle]] = {}

    def know(self, blocks: Iterable[KFACBlock], candidates: set[nn.Parameter]) -> None:
        """Take these for the blocks and candidates from now on; the set is shared with the caller."""
        self._blocks = {block.params[0]: block for block in blocks if isinstance(block.adapter, TensorAdapter)}
        self._candidates = candidates
        for weight, (block, _, handle) in list(self._watches.items()):
            if self._blocks.get(weight) is not block:
                handle.remove()
                del self._watches[weight]

    def saw(self, product: TensorProduct, output: Tensor, *, in_place: bool) -> tuple[Tensor, KFACBlock | None]:
        """Note a product, or a sum.

        Args:
            product: what was made.
            output: of the function.
            in_place: whether the output is an argument of the function, which cannot be replaced.

        Returns:
            What stands for the output from now on, and the block if it was claimed now.
        """
        window, claimed = self._window(), None
        if window is None or not window.takes(output):
            return output, None
        weight = window.shards.known(product.weight)
        if weight in self._candidates:
            claimed = self._claimed(product._replace(weight=weight))
        block = self._blocks.get(weight)
        if block is None or not block.takes_statistics() or not _is_of(block, product):
            return output, claimed
        watch, rows, examples = self._watch(window, block), product.rows(), product.input_shape[1]
        if in_place:
            window.note(watch, rows, output, examples=examples, context=product.context())
        else:
            output = window.note_output(watch, rows, output, examples=examples, context=product.context())
        return output, claimed

    def knows(self, weight: nn.Parameter) -> bool:
        """Return whether products with the parameter are noted here."""
        window = self._window()
        known = weight if window is None else window.shards.known(weight)
        return known in self._blocks or known in self._candidates

    def _claimed(self, product: TensorProduct) -> KFACBlock | None:
        claim = self._claim()
        claimed = None if claim is None else claim(product)
        if claimed is not None:
            self._candidates.discard(product.weight)
            self._blocks[product.weight] = claimed
        return claimed

    def _watch(self, window: CaptureWindow, block: KFACBlock) -> LayerWatch:
        weight = block.params[0]
        if weight not in self._watches:
            sink = Sink([(block, block.uses[0])], self._emitted)
            watch = watch_of(weight, sink, 0, partial(_statistics, block))
            self._watches[weight] = (block, watch, window.watch_calls(watch))
        return self._watches[weight][1]


def _is_of(block: KFACBlock, product: TensorProduct) -> bool:
    """Return whether the product is with the matrices that the block has made of the parameter."""
    adapter = block.adapter
    return isinstance(adapter, TensorAdapter) and (adapter.shape, adapter.sides) == (product.shape, product.sides)


def _statistics(block: KFACBlock, call: LayerCall) -> LayerStatistics:
    return TensorStatistics(block.spec, call, block.dtype)
