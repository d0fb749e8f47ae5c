"""Torch functions seen or replaced while a module's forward runs, for layers that module hooks cannot see into."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kfac_optim.capture.contractions import TensorProduct
from kfac_optim.capture.tensor_products import IN_PLACE, products_of, reads
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.taylor.stacked_product import stacked_product
from kfac_optim.utils.autograd import below_transforms, no_view
from kfac_optim.utils.dynamo import as_one_node, call_as_it_is, inline_only
from kfac_optim.utils.hooks import Handle, is_any_on, is_on

Function = Callable[..., Any]


class Product(NamedTuple):
    """Describes one `input @ weightᵀ + bias`, or `input @ weight + bias` if `transposed`, as a function got it."""

    weight: nn.Parameter
    input: Tensor
    bias: Tensor | None
    transposed: bool
    with_bias: int = 0
    """How many shared positions of an example the bias is added to, the first ones; 0 is all of them."""


class ProductListener(Protocol):
    """Hears what functions do with parameters."""

    def saw_product(self, product: Product, output: Tensor) -> Tensor:
        """Note a function's product with a parameter; return what stands for its output from now on."""

    def saw_tensor(self, product: TensorProduct, output: Tensor, *, in_place: bool) -> Tensor:
        """Note a product with matrices that lie in a parameter; return what stands for its output from now on."""

    def hears_of(self, param: nn.Parameter) -> bool:
        """Return whether `saw_tensor` takes products with a parameter."""

    def saw_layer(self, function: Function, args: Any, kwargs: Any, output: Any) -> Any:
        """Note a call of a layer's function by somebody else; return what stands for its output from now on."""

    def saw_use(self, param: nn.Parameter, function: str) -> None:
        """Note that a function of this name has used a parameter as a layer's weight in another way."""

    def follows_uses(self) -> bool:
        """Return whether products are to be computed by `follow` and `follow_convolution`."""

    def follow(self, product: Product) -> Tensor | None:
        """Compute a product so that its derivatives are noted as well; None where that is not wanted."""

    def follow_convolution(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Compute a convolution so that its derivatives are noted as well; None where that is not wanted."""


class ProductMode(TorchFunctionMode):
    """Sees what functions do with parameters, whatever module asks for it.

    Args:
        listener: hears of it, and is held weakly: compiled graphs keep the mode.
    """

    def __init__(self, listener: "ProductListener") -> None:
        super().__init__()
        self._listener = weakref.ref(listener)

    @inline_only
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if getattr(kind, "taken_apart", False):  # the functions that it calls in this one's place are to be seen
                with self:
                    return cast(Any, kind).__torch_function__(func, types, args, kwargs or {})
        if not torch.compiler.is_compiling() and func in _WATCHED:
            followed = call_as_it_is(self._follow, func, args, kwargs or {})
            if followed is not None:
                return followed
        output = traceable(func)(*args, **(kwargs or {}))
        if _is_among(func, _WATCHED) or (not torch.compiler.is_compiling() and reads(func)):
            output = call_as_it_is(self._look, func, args, kwargs or {}, output)
        return _as_known(output, (*args, *(kwargs or {}).values())) if torch.compiler.is_compiling() else output

    def _follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        listener = self._listener()
        if listener is None or not listener.follows_uses():
            return None
        if func in CONVOLUTIONS:
            return listener.follow_convolution(func, args, kwargs)
        read = _PRODUCTS.get(func)
        product = None if read is None else read(*args, **kwargs)
        if product is None or kwargs.get("beta", 1) != 1:  # the summand of such an `addmm` is in no product
            return None
        return listener.follow(product)

    def _look(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        read, listener = _PRODUCTS.get(func), self._listener()
        if listener is None:
            return output
        product = None if read is None else read(*args, **kwargs)
        if product is not None:
            return listener.saw_product(product, no_view(output))
        if not torch.compiler.is_compiling():
            products = [each for each in products_of(func, args, kwargs) if listener.hears_of(each.weight)]
            for each in products:
                output = listener.saw_tensor(each, output, in_place=func in IN_PLACE)
            if products:
                return output
            output = listener.saw_layer(func, args, kwargs, output)
        if read is None and (torch.compiler.is_compiling() or func in _OTHER_LAYERS) and output.requires_grad:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    listener.saw_use(leaf, func.__name__)
        return output


@inline_only
def _as_known(output: Any, arguments: tuple[Any, ...]) -> Any:  # pragma: traced
    """Return the output of a traced function, or what dynamo knows as the same parameter or its transpose.

    Dynamo takes every output for a tensor of its own, although `weight.to(dtype)` may return `weight`. It does not know
    either of which tensor an output is a view, as `weight.t()` is; of attributes it does, such as `weight.mT`.
    """
    if not isinstance(output, Tensor):
        return output
    for each in arguments:
        if isinstance(each, Tensor) and output is each:
            return each
        is_matrix = isinstance(each, nn.Parameter) and each.dim() == 2 and not each.is_complex()
        # Strides first: to compare sizes that change from batch to batch would bind the graph to them.
        if is_matrix and output._base is not None and output.stride() == each.mT.stride():
            return each.mT if output.shape == each.mT.shape else output
    return output


def _product(layer_input: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool) -> Product | None:
    """Return the product with `matrix`, a parameter or its transpose; None for any other tensor.

    None as well where a parameter is multiplied: its rows are no examples, and their gradients are of the whole batch.
    """
    origin = layer_input if isinstance(layer_input, nn.Parameter) else layer_input._base
    # A tensor of more elements than the parameter is one that was expanded to the batch.
    if isinstance(origin, nn.Parameter) and layer_input.numel() <= origin.numel():
        return None
    if isinstance(matrix, nn.Parameter):
        return Product(matrix, layer_input, bias, transposed) if matrix.dim() == 2 else None
    matrix = below_transforms(matrix)
    base = matrix._base
    if not isinstance(base, nn.Parameter) or base.dim() != 2:
        return None
    is_transpose = (matrix.shape, matrix.stride()) == (base.mT.shape, base.mT.stride())
    return Product(base, layer_input, bias, not transposed) if is_transpose else None


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:  # noqa: A002 (torch's name)
    return _product(input, weight, bias, transposed=False)


def _of_matmul(input: Tensor, other: Any = None, *, mat2: Any = None, **_: Any) -> Product | None:  # noqa: A002
    matrix = mat2 if other is None else other
    return _product(input, matrix, None, transposed=True) if isinstance(matrix, Tensor) else None


def _of_addmm(
    input: Tensor,  # noqa: A002 (torch's name)
    mat1: Tensor,
    mat2: Tensor,
    *deprecated: Any,  # torch still takes a number before a tensor
    beta: float = 1,
    alpha: float = 1,
    **_: Any,
) -> Product | None:
    if alpha != 1 or deprecated:
        return None
    return _product(mat1, mat2, input if beta == 1 else None, transposed=True)


def _of_stacked_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Product | None:
    product = _product(rows, weight, bias, transposed=False)
    return product and product._replace(with_bias=math.prod(rows.shape[2:-1]))


_PRODUCTS: Mapping[Function, Callable[..., Product | None]] = {
    F.linear: _of_linear,
    stacked_product: _of_stacked_product,
    torch.addmm: _of_addmm,
    torch.Tensor.addmm: _of_addmm,
    torch.matmul: _of_matmul,
    torch.mm: _of_matmul,
    torch.Tensor.matmul: _of_matmul,
    torch.Tensor.mm: _of_matmul,
    torch.Tensor.__matmul__: _of_matmul,
}


CONVOLUTIONS: frozenset[Function] = frozenset(
    {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
)


_OTHER_LAYERS: frozenset[Function] = frozenset(
    {
        *CONVOLUTIONS,
        *(F.embedding, F.embedding_bag, F.bilinear, torch.einsum),
    }
)


_WATCHED: Mapping[Function, Function] = {func: as_one_node(func) for func in (*_PRODUCTS, *_OTHER_LAYERS)}
"""Each function that the mode looks at → what it calls instead in a graph."""


@inline_only
def traceable(func: Function) -> Function:
    """Return `func`, or its equal while a mode is traced by `torch.compile`."""
    if func is torch.Tensor.unflatten:
        return torch.unflatten  # which is written in Python; dynamo cannot trace the method within a mode
    # A product mode beneath is to see the function itself.
    if torch.compiler.is_compiling() and not is_any_on(ProductMode):
        for watched, node in _WATCHED.items():
            if func is watched:
                return node
    return func


@inline_only
def _is_among(func: Function, table: Mapping[Function, Any]) -> bool:
    """Return `func in table`, also if `torch.compile` cannot hash a function that a mode was handed."""
    if torch.compiler.is_compiling():
        return any(func is known for known in table)
    return func in table


class _Substitution(TorchFunctionMode):
    def __init__(self, table: Mapping[Function, Function]) -> None:
        super().__init__()
        self._table = table

    @inline_only
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_among(func, self._table):
            return traceable(func)(*args, **(kwargs or {}))
        return call_as_it_is(self._table[func], *args, **(kwargs or {}))


class _Around:
    """Runs the forwards of a module in a mode; what is entered is left, also when the forward raises."""

    def __init__(self, window: CaptureWindow, mode: TorchFunctionMode, wanted: Callable[[], bool]) -> None:
        self._window = weakref.ref(window)
        self._mode = mode
        self._wanted = wanted
        self._entered: list[bool] = []  # for each forward under way

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        window, enters = self._window(), False
        if torch.compiler.is_compiling():
            if window is not None and self._enters_in_graph(window):
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            return
        if window is not None and not torch.is_grad_enabled():
            window.roots.layer_without_graph()
            window = None
        if window is not None:
            window.begin_layer()
        if window is not None and not is_on(self._mode) and self._wanted():
            enters = True
            window.modes.enter(self._mode)
        self._entered.append(enters)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        window = self._window()
        if torch.compiler.is_compiling():
            if window is not None and self._enters_in_graph(window):
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return
        entered = self._entered.pop() if self._entered else False
        if window is not None and entered:
            window.modes.leave(self._mode)

    def _enters_in_graph(self, window: CaptureWindow) -> bool:  # pragma: traced
        return window.captures() and window.listener.mode is not self._mode


def run_in(window: CaptureWindow, module: nn.Module, mode: TorchFunctionMode, wanted: Callable[[], bool]) -> Handle:
    """Run forwards of `module` that build a graph in `mode`, where `wanted()` says so and it is not on already.

    `wanted` is not asked for forwards that are being traced: they run in `mode` if their graph is to capture, unless
    it is the window's own mode, in which the model's forward runs already.
    """
    around = _Around(window, mode, wanted)
    return window.hook(module, after=around.after, before=around.before)


def substitute(
    window: CaptureWindow, module: nn.Module, table: Mapping[Function, Function], wanted: Callable[[], bool]
) -> Handle:
    """Call `table[f]` where a forward of `module` that builds a graph calls torch's function `f`.

    What a replacement calls is not replaced again, so it may call `f` itself.

    Args:
        window: the window that hooks the module.
        module: the module whose forward, and all inside it, is affected.
        table: torch function → replacement, called with the same arguments.
        wanted: asked before each forward; where it says no nothing is replaced.
    """
    return run_in(window, module, _Substitution(table), wanted)
