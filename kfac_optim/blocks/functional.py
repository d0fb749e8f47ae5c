"""Statistics of matrices that functions multiply by, inside the modules that own them or outside.

A tied output layer is `F.linear(x, embedding.weight)`, Hugging Face's `Conv1D` is `torch.addmm`: no module hook sees
either. So within forwards of the model, on statistics steps, every product is looked at and known by the id of its
parameter. A module whose forward is such a product then leaves it to us, so that nothing counts twice; one that
multiplies by something computed from its weight instead has no statistics then, rather than wrong ones.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.attachment import Watches
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.derivatives import DerivativeUses
from kfac_optim.blocks.tensor_uses import TensorUses
from kfac_optim.blocks.uses_in_graphs import (
    GraphUses,
    count_in_in_graph,
    count_out_in_graph,
    is_noted_in_graph,
    watch_in_graph,
)
from kfac_optim.capture.batches import examples_of
from kfac_optim.capture.calls import ForwardCall
from kfac_optim.capture.contractions import TensorProduct
from kfac_optim.capture.function_modes import Function, Product, ProductMode, run_in
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.listeners import ForwardListener
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import ADDS_BIAS, LayerCall, adds_bias_to_first
from kfac_optim.layers.embedding import EmbeddingAdapter
from kfac_optim.layers.linear import LinearAdapter
from kfac_optim.layers.product import ProductAdapter, ProductStatistics
from kfac_optim.layers.weight_uses import use_context
from kfac_optim.utils.autograd import in_function_transform, saved_tensors_are_hooked
from kfac_optim.utils.hooks import Handle
from kfac_optim.utils.sharded_params import Shards

Claim = Callable[[Product | TensorProduct], KFACBlock | None]
"""Makes a block of a parameter that has none yet; None where there shall be none."""


class FunctionalUses(ForwardListener, GraphUses):
    """Knows the block of each matrix, and listens to the products with it.

    Args:
        window: takes the statistics.
        claim: asked at the first product with a candidate; a bound method, held weakly.
        emitted: is called with each block that took statistics.
        before_forward: is called as a forward of the model begins; a bound method, held weakly.

    Attributes:
        expected: parameters that a checkpoint has statistics of; these candidates are looked for until they are found.
    """

    def __init__(
        self,
        window: CaptureWindow,
        claim: Claim,
        emitted: Callable[[KFACBlock], None],
        before_forward: Callable[[], None],
    ) -> None:
        super().__init__()
        self._tensors = TensorUses(window, claim, emitted)
        self._window = weakref.ref(window)
        self._claim = weakref.WeakMethod(claim)
        self._before_forward = weakref.WeakMethod(before_forward)
        self.expected: Collection[nn.Parameter] = ()
        self._blocks: dict[nn.Parameter, KFACBlock] = {}
        self._listening: list[KFACBlock] = []
        self._candidates: set[nn.Parameter] = set()
        self._watches = Watches(emitted)
        self._owners: dict[nn.Module, Handle] = {}
        self._others: dict[nn.Parameter, list[str]] = {}
        self._last: dict[nn.Parameter, ForwardCall] = {}
        self._looking = self._looked = self._builds_graph = False
        self._dropped: set[nn.Parameter] = set()
        self._told: set[nn.Parameter] = set()
        self.derivatives = DerivativeUses(self._window, emitted)
        self.mode: ProductMode = ProductMode(self)

    def know(
        self, blocks: Iterable[KFACBlock], candidates: Iterable[nn.Parameter], owners: Iterable[nn.Module]
    ) -> None:
        """Take these for the blocks from now on; those count whose matrix is a weight or its transpose.

        Args:
            blocks: the blocks of the model.
            candidates: parameters that may be claimed.
            owners: modules with parameters that only functions show; they are looked into also when they run outside
                a forward of the model: by themselves, or again within backward.
        """
        heard = {param for block in self._listening for param in block.params}
        self._listening = list(blocks)
        for param in (param for block in self._listening for param in block.params):
            if param not in heard:  # nobody has counted out yet what its own module did
                self._others.pop(param, None)
        self._blocks = {block.params[0]: block for block in self._listening if _is_plain(block)}
        self._watches.keep(self._blocks)
        self._candidates = set(candidates)
        self._told &= self._candidates
        self._tensors.know(self._listening, self._candidates)
        window, params = self._window(), [param for block in self._listening for param in block.params]
        self.know_in_graphs([*params, *self._candidates], Shards() if window is None else window.shards)
        self._look_into(set(owners))
        self.derivatives.know(self._listening)
        self._looking = self._looked = False

    def forget(self) -> None:
        """Listen to nothing."""
        self._watches.keep()
        self._look_into(set())
        self.derivatives.know(())
        self._listening, self._blocks, self._candidates = [], {}, set()
        self._tensors.know([], self._candidates)
        self.know_in_graphs([], Shards())

    def begin_forward(self) -> bool:
        if (prepare := self._before_forward()) is not None:
            prepare()
        return self.begin()

    def begin(self) -> bool:
        """Note that a forward of the model begins; return whether it is to run in the mode.

        That is on statistics steps, and in the first step to find candidates.
        """
        wanted = self.is_wanted()
        if wanted:
            self.look()
        return wanted

    def begin_alone(self) -> bool:
        window = self._window()
        return window is not None and not window.roots.is_under_way() and self.begin()

    def look(self) -> None:
        """Note that a forward of the model runs in the mode, perhaps in a graph."""
        self._looking, self._builds_graph = True, torch.is_grad_enabled()
        self._last.clear()
        self._tensors.look()
        self.derivatives.begin_forward()

    def expect_derivatives(self) -> None:
        self.derivatives.begin_all()

    def follows_uses(self) -> bool:
        if in_function_transform() and (self._listening or self._candidates):
            self.expect_derivatives()
        return self.derivatives.is_on

    def follow(self, product: Product) -> Tensor | None:
        window = self._window()
        if window is None or product.with_bias or not _may_follow():
            return None
        known = _of_optimizer(product, window.shards)
        block = self._block_of(known)
        if block is None or not (block.follows_uses and block.takes_statistics()):
            return None
        opposed = product.transposed != block.adapter.transposes
        if opposed and not block.joins_uses:
            if not (in_function_transform() or block.strikes):
                return None  # such a product by itself has factors of its own, see `_opposes`
            block.join_uses()
        output = self.derivatives.product(product, known, block, opposed=opposed)
        call = None if output is None or opposed else getattr(output.grad_fn, "kfac_call", None)
        if call is not None:
            self._last[known.weight] = call
        return output

    def follow_convolution(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        return self.derivatives.convolution(function, args, kwargs) if _may_follow() else None

    def is_wanted(self) -> bool:
        """Return whether the next forward of the model has something to show."""
        looks = bool(self._candidates) and not (self._looked and self._candidates.isdisjoint(self.expected))
        return looks or any(block.takes_statistics() for block in self._listening)

    def _look_into(self, owners: set[nn.Module]) -> None:
        window = self._window()
        for module in self._owners.keys() - owners:
            self._owners.pop(module).remove()
        if window is not None:
            for module in owners - self._owners.keys():
                self._owners[module] = run_in(window, module, self.mode, self.begin_alone)

    def end_step(self) -> None:
        """Note that a step was taken: what its forwards did not show is not looked for any more."""
        self._others.clear()
        self._dropped.clear()
        self._looked |= self._looking

    def take_unseen(self) -> list[nn.Parameter]:
        """Return candidates with a gradient whose products were computed without a graph, each once.

        A reentrant checkpoint computes such a product in the forward without a graph, and again in backward, where no
        mode sees it.
        """
        found = [param for param in self._dropped & self._candidates - self._told if param.grad is not None]
        self._told.update(found)
        return found

    def _note_without_graph(self, weight: nn.Parameter) -> None:
        """Note a product in a part of a forward that builds no graph, though the forward does."""
        window = self._window()
        if window is not None and self._builds_graph and not torch.is_grad_enabled() and weight.requires_grad:
            self._dropped.add(window.shards.known(weight))

    def unmeasured(self) -> dict[nn.Parameter, str]:
        """Return parameters that a function used as another layer's weight outside their own modules, and its name."""
        return {param: names[-1] for param, names in self._others.items() if names}

    def layer_ran(self, weight: nn.Parameter) -> bool:
        """Note, within the mode, that the module with this weight has run: one of the uses was its own.

        Returns:
            Whether that use was followed, and so noted.
        """
        if not torch.compiler.is_compiling() and self.derivatives.took(weight):
            return True
        if not torch.compiler.is_compiling():
            self.count_out(weight)
        elif (index := self._index(weight)) >= 0:  # pragma: traced
            count_out_in_graph(self.number, index)
        return False

    def notes(self, weight: nn.Parameter) -> bool:
        return weight in self._blocks

    def count_out(self, weight: nn.Parameter) -> None:
        """Note that the last use of `weight` by a function was that of its own module."""
        self._tensors.withdraw(weight)
        if names := self._others.get(weight):
            names.pop()

    def saw_use(self, param: nn.Parameter, function: str) -> None:
        if not torch.compiler.is_compiling():
            window = self._window()
            self.count_in(param if window is None else window.shards.known(param), function)
        elif (index := self._index(param)) >= 0:  # pragma: traced
            count_in_in_graph(self.number, index, function)

    def count_in(self, param: nn.Parameter, function: str) -> None:
        self._others.setdefault(param, []).append(function)

    def module_ran(self, weight: nn.Parameter) -> bool:
        """Tell, within the mode and after the module with this weight has run, whether its product was noted here.

        The module may add its bias to the product by itself.
        """
        if torch.compiler.is_compiling():
            index = self._index(weight)
            return index >= 0 and bool(is_noted_in_graph(self.number, index))
        call = self._last.pop(weight, None)
        if call is not None and not call.context:
            call.context = ADDS_BIAS
        elif call is not None and call.context == use_context(False, False):  # a product that is followed
            call.context = use_context(False, True)
        return weight in self._blocks

    def saw_product(self, product: Product, output: Tensor) -> Tensor:
        window = self._window()
        if window is None or not window.takes(output):
            if not torch.compiler.is_compiling():
                self._note_without_graph(product.weight)
            return output
        if torch.compiler.is_compiling():
            return self._seen_in_graph(window, product, output)
        product = _of_optimizer(product, window.shards)
        weight, block = product.weight, self._block_of(product)
        if block is None or not block.takes_statistics():
            return output
        opposed = _opposes(block, product.transposed)
        adds_bias = len(block.params) > 1 and product.bias is block.params[1]
        call = window.note(
            self._watch(window, block, opposed),
            product.input,
            output,
            examples=examples_of(product.input, 1),
            context=_context(adds_bias, product.with_bias),
        )
        if call is not None and not opposed:
            self._last[weight] = call
        return output

    def hears_of(self, param: nn.Parameter) -> bool:
        return self._tensors.knows(param)

    def saw_tensor(self, product: TensorProduct, output: Tensor, *, in_place: bool) -> Tensor:
        self._note_without_graph(product.weight)
        output, claimed = self._tensors.saw(product, output, in_place=in_place)
        if claimed is not None:
            self._listening.append(claimed)
        return output

    def saw_layer(self, function: Function, args: Any, kwargs: Any, output: Any) -> Any:
        return self._tensors.saw_layer(function, args, kwargs, output)

    def _block_of(self, product: Product) -> KFACBlock | None:
        """Return the block of the product's weight, made now if the weight was a candidate."""
        weight = product.weight
        if weight in self._candidates:
            self._candidates.discard(weight)
            claim = self._claim()
            if claim is not None and (claimed := claim(product)) is not None:
                self._blocks[weight] = claimed
                self._listening.append(claimed)
                self.derivatives.know(self._listening)
        return self._blocks.get(weight)

    def _seen_in_graph(self, window: CaptureWindow, product: Product, output: Tensor) -> Tensor:  # pragma: traced
        """Do what `saw_product` does as `torch.compile` can trace it: decisions are made once, outside the graph."""
        index, bias = self._index(product.weight), self._index(product.bias)
        if index < 0:
            return output
        watch, adds_bias = watch_in_graph(self.number, index, bias, product.bias is not None, product.transposed)
        if watch < 0 or product.input.is_nested:
            return output
        context = ADDS_BIAS if adds_bias else ()
        return window.note_in_graph(watch, product.input, output, True, examples_of(product.input, 1), context)

    def watch_in_graph(self, index: int, bias: int, has_bias: bool, transposed: bool) -> tuple[int, bool]:
        window, weight = self._window(), self._in_graphs[index]
        added = self._in_graphs[bias] if bias >= 0 else None
        block = self._block_of(Product(weight, weight, added, transposed))  # its input is not asked for
        if window is None or block is None:
            return -1, False
        opposed = _opposes(block, transposed)
        if len(block.params) == 1:
            adds_bias = False
        elif has_bias:
            adds_bias = added is block.params[1]
        else:
            adds_bias = any(use.adapter.adds_bias_itself(use.module) for use in block.uses)
        return self._watch(window, block, opposed).number, adds_bias

    def _watch(self, window: CaptureWindow, block: KFACBlock, opposed: bool) -> LayerWatch:
        return self._watches.of(window, block, partial(_statistics, block, opposed), opposed=opposed)


def _may_follow() -> bool:
    """Return whether a product may be computed by another function than the user's.

    Checkpointing without reentrance runs a forward again, outside of all modes, and needs the graph to save as many
    tensors as before.
    """
    return torch.is_grad_enabled() and not saved_tensors_are_hooked()


def _context(adds_bias: bool, with_bias: int) -> tuple[int, ...]:
    """Return the context of a product; the bias is added to the first `with_bias` positions, 0 being all."""
    if not adds_bias:
        return ()
    return adds_bias_to_first(with_bias) if with_bias else ADDS_BIAS


def _statistics(block: KFACBlock, opposed: bool, call: LayerCall) -> ProductStatistics:
    return ProductStatistics(block.spec.transposed() if opposed else block.spec, call, block.dtype)


def _of_optimizer(product: Product, shards: Shards) -> Product:
    """Return the product in terms of the optimizer's parameters, if it was computed with what stands for them."""
    bias = shards.known(product.bias) if isinstance(product.bias, nn.Parameter) else product.bias
    return product._replace(weight=shards.known(product.weight), bias=bias)


def _opposes(block: KFACBlock, transposed: bool) -> bool:
    """Return whether a product, with the weight's transpose or not, is with the transpose of the block's matrix.

    The first that is makes the block keep two pairs of factors from now on.
    """
    opposed: bool = transposed != block.adapter.transposes
    if opposed and not block.spec.opposed:
        block.revise(replace(block.spec, opposed=True))
    return opposed


def _is_plain(block: KFACBlock) -> bool:
    """Return whether products with the weight are all that there is to measure, as it is for our own adapters."""
    return all(type(use.adapter) in (LinearAdapter, EmbeddingAdapter, ProductAdapter) for use in block.uses)
