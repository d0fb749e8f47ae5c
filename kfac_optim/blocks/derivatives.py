"""Following weights through derivatives of the model with respect to its inputs.

Hooks see the forward of a layer, and all that an ordinary loss needs. Where a loss holds derivatives of the model, they
miss the products with the weight in backward passes that are differentiated themselves, and in `torch.func`. So from
the first sign of such a loss, products on statistics steps are computed by the functions of `capture.weight_uses`. A
sign for all layers is a forward within a transform of `torch.func`, or an input that is a leaf and requires its
gradient; for one layer, captured calls that did not account for its gradient (`capture.gradient_check`). Statistics
stay what they are until a derivative of a product is itself seen to be used; then all uses of the weight make them
together.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.blocks.attachment import Watches
from kfac_optim.blocks.block import KFACBlock, LayerUse
from kfac_optim.capture.function_modes import Function, Product
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.capture.weight_maps import ConvolutionMap, MatrixMap, WeightMap
from kfac_optim.capture.weight_uses import ForwardUse, Noted
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.call_rows import CallRows
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.patches import pad
from kfac_optim.layers.convolution import ConvAdapter, ConvTransposeAdapter
from kfac_optim.layers.convolution.base import PatchAdapter, by_axis
from kfac_optim.layers.product import ProductStatistics
from kfac_optim.layers.weight_uses import UseStatistics, of_forward, use_context
from kfac_optim.specs import LayerSpec, WeightSharing
from kfac_optim.utils.autograd import edge, mapped, mapped_size
from kfac_optim.utils.precision import as_autocast
from kfac_optim.utils.warning import warn

_CONVOLUTION_ADAPTERS = (ConvAdapter, ConvTransposeAdapter)
_OPERANDS = ("input", "weight", "bias")
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class DerivativeUses:
    """Computes products with all their derivatives noted, once a model is differentiated with respect to its inputs.

    Args:
        window: takes the statistics.
        emitted: is called with each block that took statistics.

    Attributes:
        is_on: whether any products are followed.
    """

    def __init__(self, window: "weakref.ref[CaptureWindow]", emitted: Callable[[KFACBlock], None]) -> None:
        self._window = window
        self.is_on = self._follows_all = False
        self._blocks: list[KFACBlock] = []
        self._convolutions: dict[nn.Parameter, tuple[KFACBlock, LayerUse]] = {}
        self._watches = Watches(emitted)
        self._followed: set[nn.Parameter] = set()
        self._unclear: set[str] = set()  # names of the layers that were warned of

    def know(self, blocks: Iterable[KFACBlock]) -> None:
        """Take these for the blocks from now on."""
        self._blocks = list(blocks)
        self._convolutions = {
            block.params[0]: (block, block.uses[0])
            for block in self._blocks
            if len(block.uses) == 1 and type(block.adapter) in _CONVOLUTION_ADAPTERS
        }
        self._watches.keep({block.params[0]: block for block in self._blocks})
        self.is_on = self._follows_all or any(block.follows_uses for block in self._blocks)
        if self._follows_all:
            self.begin(self._blocks)

    def begin_all(self) -> None:
        """Follow the products with all weights from now on."""
        if not self._follows_all:
            self._follows_all = self.is_on = True
            self.begin(self._blocks)

    def begin(self, blocks: Iterable[KFACBlock]) -> None:
        """Follow the products with the weights of some blocks from now on."""
        for block in blocks:
            block.follows_uses = self.is_on = True

    def begin_forward(self) -> None:
        """Note that a forward of the model begins."""
        self._followed.clear()

    def took(self, weight: nn.Parameter) -> bool:
        """Return whether a product with this weight was followed in the forward that is running."""
        return weight in self._followed

    def product(self, product: Product, known: Product, block: KFACBlock, *, opposed: bool) -> Tensor | None:
        """Compute a product with the matrix of a block, or (`opposed`) with its transpose.

        Args:
            product: the product.
            known: the same in terms of the optimizer's parameters.
            block: the block whose matrix it is.
            opposed: whether it is with the transpose.
        """
        adds_bias = not opposed and len(block.params) > 1 and known.bias is block.params[1]
        rows_of = partial(_product_rows, block)
        bias = product.bias if adds_bias else None
        output = self._apply(
            product.input, product.weight, bias, MatrixMap(product.transposed), block, rows_of, opposed
        )
        if output is None or product.bias is None or bias is not None:
            return output
        return output + product.bias.to(output.dtype)  # which is narrow under autocast

    def convolution(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Compute a convolution with the weight of a block."""
        given, options = {**dict(zip(_OPERANDS, args, strict=False)), **kwargs}, args[len(_OPERANDS) :]
        layer_input, param, bias = (given.pop(name, None) for name in _OPERANDS)
        window = self._window()
        if window is None or not isinstance(param, nn.Parameter):
            return None
        weight = window.shards.known(param)
        block, use = self._convolutions.get(weight, (None, None))
        if block is None or use is None or not (block.follows_uses and block.takes_statistics()):
            return None
        module: Any = use.module
        context = _adapter(use).context(module, *options, **given)
        if context is None:
            return None
        ndim, transposed = param.dim() - 2, function in _TRANSPOSED
        stride, dilation, padding, *after = (context[at : at + ndim] for at in range(0, len(context), ndim))
        beyond = (*options[2:3], given.get("output_padding", 0))[0] if transposed else 0
        if after and after[0] != padding:
            layer_input, padding = pad(layer_input, tuple(zip(padding, after[0], strict=True))), (0,) * ndim
            context = (*stride, *dilation, *padding, *padding)
        numbers = stride, padding, dilation, transposed, by_axis(beyond, ndim), module.groups
        # On the CPU autocast knows the functions of torch.nn.functional, and not the one that is called here.
        layer_input = as_autocast(layer_input)
        weight_map = ConvolutionMap(tuple(layer_input.shape[-ndim:]), *numbers)
        adds_bias = len(block.params) > 1 and bias is block.params[1]
        rows_of = partial(_convolution_rows, block, use)
        added = bias if adds_bias else None
        output = self._apply(layer_input, param, added, weight_map, block, rows_of, False, context)
        if output is None:
            return None
        self._followed.add(weight)
        return output if bias is None or adds_bias else weight_map.with_bias(output, bias.to(output.dtype))

    def _apply(
        self,
        layer_input: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        weight_map: WeightMap,
        block: KFACBlock,
        rows_of: Callable[[LayerSpec, LayerCall], CallRows],
        opposed: bool,
        of_function: tuple[int, ...] = (),
    ) -> Tensor | None:
        window = self._window()
        if window is None:
            return None
        watch = weakref.ref(self._watches.of(window, block, partial(_statistics, block, rows_of)))
        held = self._window, watch, weakref.ref(block)
        root = window.roots.current()
        notes = _Notes(*held, root, opposed, bias is not None, of_function)
        if layer_input.dim() < weight.dim() or self._is_one_example(layer_input, root, block):
            notes = replace(notes, is_single=True)
        output = ForwardUse.of(layer_input, weight, bias, weight_map, notes)
        call = getattr(output.grad_fn, "kfac_call", None)  # None within torch.func
        if call is not None and window.estimate is not None:
            window.roots.expect(call, edge(output))
        return output

    def _is_one_example(self, layer_input: Tensor, root: RootCall | None, block: KFACBlock) -> bool:
        """Return whether a `torch.vmap` in the forward of the model hands a layer examples one by one.

        It may run over the positions of the whole batch as well.
        """
        if root is None or root.is_mapped or (slices := mapped_size(layer_input)) is None:
            return False
        rows, handed = layer_input.size(0), root.handed
        of_slices, of_rows = slices in handed, rows in handed
        is_single = root.maps_examples(slices, rows)
        is_clear = of_slices != of_rows
        if handed and not (of_slices or of_rows):  # heads, for one, may be folded into the batch
            is_clear = slices % handed[0] != 0 == rows % handed[0]
        spec, inverse = block.spec, block.inverse
        matters = block.joins_uses or spec.weight_sharing is WeightSharing.REDUCE or inverse.squares_examples
        if not is_clear and matters and block.name not in self._unclear:
            self._unclear.add(block.name)
            found = f"tensors of {', '.join(map(str, handed))} rows" if handed else "no tensor"
            order = "; or hand the model the batch first" if of_slices and slices != rows else ""
            warn(
                f"kfac_optim: layer {block.name!r} is called within torch.vmap, on {slices} inputs of {rows} rows, and "
                "it cannot be told whether the inputs or the rows are the examples, as the model was handed "
                f"{found}. Its factors take the {'inputs' if is_single else 'rows'} for them. Call the layer on the "
                f"whole batch, or map the whole model, torch.vmap(model)(x){order}; or list the layer in skip_layers."
            )
        return is_single


@dataclass(frozen=True, slots=True)
class _Notes:
    """Takes notes of the uses of one weight; nodes of the graph hold it, so it holds the window and the watch weakly.

    Attributes:
        window: takes the calls.
        watch: the watch of the weight.
        block: the block whose matrix it is.
        root: the forward of the model.
        opposed: whether the forward multiplies by the transpose of the block's matrix.
        adds_bias: whether the block's bias is added to the product.
        of_function: what the adapter needs to know of the call.
        is_derived: whether the uses are those that derivatives of the forward make.
        depth: how many dimensions of `torch.vmap` stand before those of the layer.
        is_single: whether the layer was handed one example without a batch dimension, as in a `torch.vmap` over them.
    """

    window: "weakref.ref[CaptureWindow]"
    watch: "weakref.ref[LayerWatch]"
    block: "weakref.ref[KFACBlock]"
    root: RootCall | None
    opposed: bool
    adds_bias: bool
    of_function: tuple[int, ...]
    is_derived: bool = False
    depth: int = 0
    is_single: bool = False

    @property
    def batch_dim(self) -> int:
        return 0 if self._runs_over_examples else self.depth

    def below_vmap(self) -> "_Notes":
        return replace(self, depth=self.depth + 1)

    def batch_first(self) -> "_Notes":
        return replace(self, depth=0)

    @property
    def derived(self) -> "_Notes":
        return self if self.is_derived else replace(self, adds_bias=False, is_derived=True)

    @property
    def _runs_over_examples(self) -> bool:
        """Return whether the outermost `torch.vmap`, if there is one, runs over the examples."""
        return self.is_single or self.root is None or self.root.is_mapped

    def for_each_example(self, tensor: Tensor) -> Tensor:
        return mapped(tensor) if self._runs_over_examples else tensor

    def note(self, tensor: Tensor, *, transposed: bool) -> Noted:
        window, watch, block = self.window(), self.watch(), self.block()
        if window is None or watch is None or block is None or window.aside:
            return None, None
        if self.is_derived:
            block.join_uses()
        context = use_context(transposed != self.opposed, self.adds_bias, *self.of_function)
        examples = None if self.is_single and self.depth == 0 else tensor.size(0)
        return window.note_use(watch, tensor, self.root, context, examples=examples)


def _statistics(
    block: KFACBlock, rows_of: Callable[[LayerSpec, LayerCall], CallRows], call: LayerCall
) -> LayerStatistics:
    """Return the rows of a use; or moments as of any call of a layer, while the forward is the only use there is."""
    return UseStatistics(block.spec, call, rows_of) if block.joins_uses else of_forward(block.spec, call, rows_of)


def _product_rows(block: KFACBlock, spec: LayerSpec, call: LayerCall) -> CallRows:
    return ProductStatistics(spec, call, block.dtype)


def _adapter(use: LayerUse) -> PatchAdapter[Any]:
    assert isinstance(use.adapter, PatchAdapter)
    return use.adapter


def _convolution_rows(block: KFACBlock, use: LayerUse, spec: LayerSpec, call: LayerCall) -> CallRows:
    # `torch.vmap` puts its dimensions before those of the layer.
    ndim = use.module.get_parameter("weight").dim()
    assert call.input is not None
    earlier, reach = (None if each is None else _flat(each, ndim) for each in (call.earlier, call.reach))
    layer_input, gradient = _flat(call.input, ndim), _flat(call.gradient, ndim)
    flat = replace(call, input=layer_input, gradient=gradient, earlier=earlier, reach=reach)
    statistics = _adapter(use).statistics(use.module, spec, flat, block.dtype)
    assert isinstance(statistics, CallRows)
    return statistics


def _flat(tensor: Tensor, ndim: int) -> Tensor:
    """Return the tensor with its leading dimensions joined, so that `ndim` are left; one that has fewer as it is."""
    return tensor.flatten(0, tensor.dim() - ndim) if tensor.dim() > ndim else tensor
