"""Torch functions seen or replaced while a module's forward runs, for layers that module hooks cannot see into."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_optim.capture import CaptureWindow, Handle, ModeStack

Function = Callable[..., Any]


class Product(NamedTuple):
    """One `input @ weightᵀ + bias`, or `input @ weight + bias` where `transposed`, as a function was asked for it."""

    weight: nn.Parameter
    input: Tensor
    bias: Tensor | None
    transposed: bool


class ProductMode(TorchFunctionMode):
    """Tells `seen(product, output)` of every product with a parameter, whatever module or function asks for it."""

    def __init__(self, seen: Callable[[Product, Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        read = _PRODUCTS.get(func)
        if read is not None:
            product = read(*args, **(kwargs or {}))
            if product is not None:
                self._seen(product, output)
        return output


def _product(layer_input: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool) -> Product | None:
    """The product with `matrix`, a parameter or its transpose; None for any other tensor."""
    if isinstance(matrix, nn.Parameter):
        return Product(matrix, layer_input, bias, transposed) if matrix.dim() == 2 else None
    base = matrix._base
    if not isinstance(base, nn.Parameter) or base.dim() != 2:
        return None
    is_transpose = (matrix.shape, matrix.stride()) == (base.mT.shape, base.mT.stride())
    return Product(base, layer_input, bias, not transposed) if is_transpose else None


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:  # noqa: A002 (torch's name)
    return _product(input, weight, bias, transposed=False)


def _of_matmul(input: Tensor, other: Any, **_: Any) -> Product | None:  # noqa: A002 (torch's name)
    return _product(input, other, None, transposed=True) if isinstance(other, Tensor) else None


def _of_addmm(
    input: Tensor,  # noqa: A002 (torch's name)
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    **_: Any,
) -> Product | None:
    if alpha != 1:
        return None
    return _product(mat1, mat2, input if beta == 1 else None, transposed=True)


_PRODUCTS: Mapping[Function, Callable[..., Product | None]] = {
    F.linear: _of_linear,
    torch.addmm: _of_addmm,
    torch.Tensor.addmm: _of_addmm,
    torch.matmul: _of_matmul,
    torch.mm: _of_matmul,
    torch.Tensor.matmul: _of_matmul,
    torch.Tensor.mm: _of_matmul,
    torch.Tensor.__matmul__: _of_matmul,
}


class _Substitution(TorchFunctionMode):
    def __init__(self, table: Mapping[Function, Function]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))


class _Around:
    """Runs the forwards of a module in a substitution; what is entered is left, also when the forward raises."""

    def __init__(self, modes: ModeStack, table: Mapping[Function, Function], wanted: Callable[[], bool]) -> None:
        self._modes = modes
        self._table = table
        self._wanted = wanted
        self._entered: list[_Substitution | None] = []  # one for each forward under way

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        mode = None
        if torch.is_grad_enabled() and self._wanted():
            mode = _Substitution(self._table)
            self._modes.enter(mode)
        self._entered.append(mode)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        mode = self._entered.pop() if self._entered else None
        if mode is not None:
            self._modes.leave(mode)


def substitute(
    window: CaptureWindow, module: nn.Module, table: Mapping[Function, Function], wanted: Callable[[], bool]
) -> Handle:
    """Within forwards of `module` that build a graph, call `table[f]` where torch's function `f` is called.

    What a replacement calls is not replaced again, so it may call `f` itself.

    Args:
        window: that hooks the module.
        module: whose forward, and all inside it, is affected.
        table: torch function → replacement, called with the same arguments.
        wanted: asked before each forward; where it says no nothing is replaced.
    """
    around = _Around(window.modes, table, wanted)
    return window.hook(module, after=around.after, before=around.before)
