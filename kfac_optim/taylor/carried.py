"""A tensor that carries its derivatives through whatever a model's forward does with it."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kfac_optim.taylor.channels import (
    COMPLEX,
    Channels,
    argument_names,
    map_channels,
    through_any,
    through_bilinear,
    through_elementwise,
    through_linear,
    through_product,
    through_quotient,
    through_sum,
    works_in_place,
)
from kfac_optim.taylor.stacked_product import stacked_product
from kfac_optim.utils.autograd import is_of_custom_function

Function = Callable[..., Any]

REMEDY = (
    "Take the derivatives of this model by nested autograd.grad(..., create_graph=True), or write that part of its "
    "forward with functions that can be differentiated twice."
)

# Functions of one tensor that act on each element alone, by the name that torch gives them wherever they are found.
_ELEMENTWISE = frozenset(
    """
    tanh sigmoid sin cos exp square reciprocal tan asin acos atan sinh cosh asinh acosh atanh erf erfc exp2 expm1
    log log2 log10 log1p sqrt rsqrt relu relu6 silu gelu mish softplus softsign elu selu celu log_sigmoid tanhshrink
    hardtanh hardswish leaky_relu abs neg negative positive sinc lgamma digamma
    """.split()  # noqa: SIM905 (to be read)
)

# Linear in all the tensors that they are given, and in no need of a derivative.
_LINEAR = frozenset(
    """
    reshape reshape_as view view_as flatten unflatten ravel squeeze unsqueeze transpose t permute movedim moveaxis
    swapaxes swapdims expand expand_as broadcast_to repeat repeat_interleave tile cat concat concatenate stack
    hstack vstack dstack column_stack split chunk tensor_split unbind select narrow index_select gather
    take_along_dim flip roll __getitem__ sum mean clone contiguous to float double type_as diagonal trace cumsum
    adjoint diff
    """.split()  # noqa: SIM905 (to be read)
)

# What these return does not depend on the inputs of the model.
_CONSTANT = frozenset(
    """
    detach zeros_like ones_like full_like rand_like randn_like randint_like empty_like new_zeros new_ones new_full
    new_empty new_tensor numpy item tolist __repr__ __format__ __str__ __bool__ __float__ __int__
    """.split()  # noqa: SIM905 (to be read)
)

_COPIES: dict[str, Function] = {"view": Tensor.reshape, "view_as": Tensor.reshape_as}

_RANDOM = frozenset(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout rrelu
    """.split()  # noqa: SIM905 (to be read)
)

_BILINEAR = {"matmul": torch.matmul, "__matmul__": torch.matmul, "mm": torch.matmul, "bmm": torch.matmul}

# The classes of what TorchScript makes of functions and methods.
_SCRIPTED = ("ScriptMethod", "ScriptFunction")

_VIEWS = ("T", "mT", "H", "mH", "real")


class NotCarriedError(NotImplementedError):
    """Says what the derivatives cannot be carried through, and what to do."""


class StackedProduct(NamedTuple):
    """Describes the product with a weight that a carried tensor was split from."""

    rows: Tensor
    """`[batch, positions, *shared, in]`."""
    output: Tensor
    """`[batch, positions, *shared, out]`, without the bias."""
    with_bias: int
    """How many shared positions are given the bias, the first ones; 0: none of them."""


class Carried(Tensor):
    """Stands for a value in a model's forward, and has its derivatives with it.

    It has the shape, dtype and device of the value, and every torch function that it is handed to gives such a tensor
    again. Its own numbers are NaN, so that code which ignores the class, as scripted functions do, makes NaN and does
    not lose the derivatives in silence.
    """

    channels: Channels

    product: StackedProduct | None = None
    """The product with a weight that this is the result of, and nothing else; None for other tensors."""

    taken_apart = True
    """Says to modes which look at torch functions that this class calls other functions in their place, to be shown."""

    @classmethod
    def of(cls, channels: Channels) -> "Carried":
        # It requires a gradient so that custom autograd functions show (`channels_of`).
        numbers = channels.value.new_full((), math.nan).requires_grad_().expand(channels.value.shape)
        carried = numbers.as_subclass(cls)
        carried.channels = channels
        return carried

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func).__name__ in _SCRIPTED:
            raise _refusal(func, "it is scripted, and cannot be looked into; pass what it was scripted from")
        if (rewritten := _REWRITTEN.get(func.__name__)) is not None:
            return rewritten(*args, **kwargs)
        if func.__name__ == "__get__":
            return _read_attribute(func, args[0].channels)
        args, kwargs = (tree_map(channels_of, each) for each in (args, kwargs))
        if works_in_place(func, args, kwargs):
            raise _refusal(func, "it changes its input in place")
        if func is F.linear and args and isinstance(args[0], Channels) and not _holds_channels((args[1:], kwargs)):
            return _through_weight(*args, **kwargs)
        made = _carry(func, args, kwargs)
        if isinstance(made, Channels) and made.value.is_complex():
            raise _refusal(func, COMPLEX)
        return map_channels(cls.of, made)


def _layer_norm(
    input: Tensor,  # noqa: A002 (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise as torch does, by functions whose derivatives are right: the third of `F.layer_norm` is not (2.13)."""
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    output = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


# Functions that are made of others here, since torch's own derivatives of them are wrong.
_REWRITTEN: dict[str, Function] = {"layer_norm": _layer_norm}


def channels_of(leaf: Any) -> Any:
    """Return the channels of a carried tensor, and anything else as it is."""
    if not isinstance(leaf, Carried):
        return leaf
    if "channels" not in leaf.__dict__ or is_of_custom_function(leaf):
        raise NotCarriedError(
            "kfac_optim: taylor.laplacian cannot carry derivatives through a custom autograd function (a subclass of "
            f"Function){_place()}, which does not tell its own. {REMEDY}"
        )
    return leaf.channels


def _read_attribute(func: Function, z: Channels) -> Any:
    """Return an attribute: a transpose and the real part have derivatives, others are those of the value."""
    for name in _VIEWS:
        if func == getattr(Tensor, name).__get__:
            return Carried.of(through_linear(getattr, (z, name), {}))
    return func(z.value)


def _carry(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in _CONSTANT:
        return _on_values(func, args, kwargs)
    if name in _ELEMENTWISE and _is_lone(args):
        return through_elementwise(func if not (args[1:] or kwargs) else _with(func, args[1:], kwargs), args[0])
    if name in ("pow", "__pow__") and _is_lone(args) and not kwargs:
        return through_elementwise(torch.square if args[1] == 2 else _with(func, args[1:], {}), args[0])
    if len(args) == 2 and all(isinstance(arg, (Channels, Tensor, int, float)) for arg in args):
        found = _through_pair(name, *args, **kwargs)
        if found is not None:
            return found
    if name in _LINEAR:
        # Derivatives do not lie in memory as the value does, so that there may be no view of them.
        copies = name in _COPIES and not any(isinstance(arg, torch.dtype) for arg in args)
        try:
            return through_linear(_COPIES[name] if copies else func, args, kwargs)
        except NotImplementedError as error:
            raise _refusal(func, str(error)) from error
    return _in_general(func, args, kwargs)


def _through_pair(name: str, left: Any, right: Any, **kwargs: Any) -> Channels | None:
    """Return a sum, product or quotient of two; None for other functions."""
    alpha = kwargs.pop("alpha", 1)
    if kwargs:
        return None
    if name == "__rsub__":
        return through_sum(right, left, -alpha)
    if name in ("add", "__add__", "__radd__"):
        return through_sum(left, right, alpha)
    if name in ("sub", "subtract", "__sub__"):
        return through_sum(left, right, -alpha)
    if alpha != 1:
        return None
    if name in ("mul", "multiply", "__mul__", "__rmul__"):
        return through_product(left, right)
    if name in ("div", "divide", "true_divide", "__truediv__", "__div__"):
        return through_quotient(left, right)
    if name in ("__rdiv__", "__rtruediv__"):
        return through_quotient(right, left)
    if name in _BILINEAR:
        return _through_matrices(left, right)
    return None


def _through_matrices(left: Any, right: Any) -> Channels | None:
    """Return a product of matrices of which one is constant and two-dimensional; None where the ranks are others."""
    if isinstance(right, Tensor) and right.dim() == 2 and isinstance(left, Channels) and left.value.dim() > 1:
        rows = _stacked(left)
        return _unstacked(torch.matmul(rows, right), left)
    ranks = [each.value.dim() if isinstance(each, Channels) else each.dim() for each in (left, right)]
    if min(ranks) < 2 or ranks[0] != ranks[1]:
        return None
    return through_bilinear(torch.matmul, left, right)


def _through_weight(z: Channels, weight: Tensor, bias: Tensor | None = None) -> Carried:
    """Multiply value and derivatives by a weight in one call, of which the value alone gets the bias."""
    if z.value.dim() == 1:  # one feature vector, without a batch
        result = through_linear(F.linear, (z, weight), {})
        return Carried.of(result if bias is None else through_sum(result, bias))
    rows = _stacked(z)
    output = F.linear(rows, weight) if bias is None else stacked_product(rows, weight, bias)
    split = _unstacked(output, z)
    result = Carried.of(split if bias is None else split._replace(value=split.value + bias))
    result.product = StackedProduct(rows.detach(), output, 0 if bias is None else math.prod(rows.shape[2:-1]))
    return result


def _stacked(z: Channels) -> Tensor:
    """Return `[batch, 1 + d + k, *shared, in]`: value, first derivatives, operators."""
    return torch.cat([z.value.unsqueeze(1), z.first.transpose(0, 1), z.second.transpose(0, 1)], dim=1)


def _unstacked(rows: Tensor, like: Channels) -> Channels:
    value, first, second = torch.split(rows, [1, len(like.first), len(like.second)], dim=1)
    return Channels(value.squeeze(1), first.transpose(0, 1), second.transpose(0, 1), like.weights)


def _in_general(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on_values = _on_values(func, args, kwargs)
    tensors = [leaf for leaf in tree_leaves(on_values) if isinstance(leaf, Tensor)]
    name = func.__name__
    if any(tensor.is_complex() for tensor in tensors):
        raise _refusal(func, COMPLEX)
    if not any(tensor.is_floating_point() for tensor in tensors):
        return on_values  # a size, a comparison, a decision
    if name in _RANDOM and _is_training(func, args, kwargs):
        raise _refusal(func, "it draws random numbers; put the model in evaluation mode")
    if name == "batch_norm" and _is_training(func, args, kwargs):
        raise _refusal(func, "it mixes the examples of a batch; put the model in evaluation mode")
    if name == "instance_norm":
        raise _refusal(func, "torch's third derivatives of it are wrong; nn.GroupNorm(channels, channels) is the same")
    try:
        return through_any(func, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise _refusal(func, str(error).splitlines()[0]) from error


def _is_training(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the flag of that name is on, wherever it stands among the arguments of a function in Python."""
    given = dict(zip(argument_names(func), args, strict=False)) | kwargs
    return bool(given.get("training", "dropout" in func.__name__))


def _on_values(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = map_channels(lambda z: z.value, args), map_channels(lambda z: z.value, kwargs)
    return func(*args, **kwargs)


def _with(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Function:
    """Return a function of one tensor alone, of the same name."""

    def bound(tensor: Tensor) -> Any:
        return func(tensor, *args, **kwargs)

    # Closed forms are those of the function without options.
    bound.__name__ = f"{func.__name__} with options"
    return bound


def _is_lone(args: tuple[Any, ...]) -> bool:
    others = any(isinstance(arg, (Tensor, Channels)) for arg in args[1:])
    return bool(args) and isinstance(args[0], Channels) and not others


def _holds_channels(tree: Any) -> bool:
    return any(isinstance(leaf, Channels) for leaf in tree_leaves(tree, is_leaf=lambda it: isinstance(it, Channels)))


def _refusal(func: Function, reason: str) -> NotCarriedError:
    name = getattr(func, "__name__", str(func))
    return NotCarriedError(
        f"kfac_optim: taylor.laplacian cannot carry derivatives through {name}(){_place()}: {reason}. {REMEDY}"
    )


def _place() -> str:
    """Name the modules whose forwards are running, innermost first; read off the stack, as it is asked for an error."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            names.append(type(module).__name__)
        frame = frame.f_back  # type: ignore[assignment]
    return f" in the forward of {' within '.join(names)}" if names else ""
