"""Statistics of matrices that lie in parameters of any shape, and of convolutions that functions make.

It hears from `FunctionalUses` of what functions do with parameters, in forwards outside of graphs alone: what
`torch.compile` traces makes no statistics here.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.attachment import Watches
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.batches import examples_of
from kfac_optim.capture.calls import ForwardCall
from kfac_optim.capture.contractions import TensorProduct, added, whole_parameter
from kfac_optim.capture.function_modes import Function
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.noted_outputs import note_below
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.layers.base import WeightBiasAdapter
from kfac_optim.layers.convolution.base import PatchAdapter
from kfac_optim.layers.tensors import TensorAdapter, TensorStatistics
from kfac_optim.utils.autograd import in_function_transform, no_view

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
        self._blocks: dict[nn.Parameter, KFACBlock] = {}
        self._layers: dict[nn.Parameter, KFACBlock] = {}
        self._last: dict[nn.Parameter, ForwardCall] = {}
        self._by_layer: set[nn.Parameter] = set()
        self._candidates: set[nn.Parameter] = set()
        self._watches = Watches(emitted)

    def know(self, blocks: Iterable[KFACBlock], candidates: set[nn.Parameter]) -> None:
        """Take these for the blocks and candidates from now on; the set is shared with the caller."""
        self._blocks = {block.params[0]: block for block in blocks if isinstance(block.adapter, TensorAdapter)}
        self._layers = {block.params[0]: block for block in blocks if len(block.uses) == 1}
        self._candidates = candidates
        self._by_layer &= self._layers.keys()
        self._watches.keep(self._blocks, self._layers)

    def saw(self, product: TensorProduct, output: Tensor, *, in_place: bool) -> tuple[Tensor, KFACBlock | None]:
        """Note a product, or a sum.

        Args:
            product: what was made.
            output: the output of the function.
            in_place: whether the output is an argument of the function, which cannot be replaced.

        Returns:
            What stands for the output from now on, and the block if it was claimed now.
        """
        window, claimed, transformed = self._window(), None, in_function_transform()
        if window is None or not (torch.is_grad_enabled() if transformed else window.takes(output)):
            return output, None
        if transformed and (product.added is None or in_place):
            return output, None
        weight = window.shards.known(product.weight)
        if weight in self._candidates:
            claimed = self._claimed(product._replace(weight=weight))
        block = self._blocks.get(weight)
        if block is None or not block.takes_statistics() or not _is_of(block, product):
            return output, claimed
        if product.ids is not None and product.ids.is_meta:  # which tell nothing
            return output, claimed
        watch, rows, examples = self._watch(window, block), product.rows(), product.input_shape[1]
        if transformed:
            output = note_below(window, watch, output, None, partial(_read_sum, product))
        elif in_place:
            window.note(watch, rows, output, examples=examples, context=product.context())
        else:
            output = window.note_output(watch, rows, output, examples=examples, context=product.context())
        return output, claimed

    def saw_layer(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Note a call of the function of a layer, with its weight, by others than the layer.

        Once a layer was seen to make such a call itself its calls are not noted here any more: it notes them.

        Args:
            function: the function that was called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            output: what it returned.

        Returns:
            What stands for the output from now on.
        """
        window = self._window()
        if window is None or not self._layers or not isinstance(output, Tensor) or not window.takes(output):
            return output
        names, options = ("input", "weight", "bias"), args[3:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        layer_input, weight, bias = (given.pop(name, None) for name in names)
        param = whole_parameter(weight)
        block = None if param is None else self._layers.get(window.shards.known(param))
        if block is None or block.params[0] in self._by_layer or not block.takes_statistics():
            return output
        use, added = block.uses[0], bias if bias is None else window.shards.known(bias)
        adapter = use.adapter
        if not isinstance(adapter, PatchAdapter) or function not in adapter.functions.values():
            return output
        if weight.dim() != use.module.get_parameter(block.spec.params[0]).dim():
            return output  # a convolution over fewer dimensions, or more
        context = adapter.context(use.module, *options, **given)
        if context is None or added is not (block.params[1] if block.spec.has_bias else None):
            return output
        output = no_view(output)
        unbatched = adapter.unbatched_ndim(use.module)
        call = window.note(
            self._watch(window, block),
            layer_input,
            output,
            examples=examples_of(layer_input, unbatched),
            training=use.module.training,
            context=context,
        )
        if call is not None:
            self._last[block.params[0]] = call
        return output

    def look(self) -> None:
        """Note that a forward of the model begins: calls before it are nobody else's."""
        self._last.clear()

    def withdraw(self, weight: nn.Parameter) -> None:
        """Take back the last call of a layer's function: it was the layer's own, which notes it."""
        self._by_layer.add(weight)
        if (call := self._last.pop(weight, None)) is not None:
            call.withdraw()

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
        return self._watches.of(window, block, partial(_statistics, block))


def _read_sum(product: TensorProduct, output: Tensor, _: Tensor | None) -> tuple[Tensor, int, tuple[int, ...]]:
    """Read a sum as it is below all transforms."""
    below = None if product.added is None else added(product.added, tuple(output.shape))
    assert below is not None, "the same was read within the transform"
    return below.rows(), below.input_shape[1], below.context()


def _is_of(block: KFACBlock, product: TensorProduct) -> bool:
    """Return whether the product is with the matrices that the block has made of the parameter."""
    adapter = block.adapter
    return isinstance(adapter, TensorAdapter) and (adapter.shape, adapter.sides) == (product.shape, product.sides)


def _statistics(block: KFACBlock, call: LayerCall) -> LayerStatistics:
    use = block.uses[0]
    if isinstance(use.adapter, WeightBiasAdapter):
        return use.adapter.statistics(use.module, use.spec, call, block.dtype)
    return TensorStatistics(block.spec, call, block.dtype)
