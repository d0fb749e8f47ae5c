"""What is carried through a model beside its values, and how each kind of function changes it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Function = Callable[..., Any]

COMPLEX = "its result is complex"


class Channels(NamedTuple):
    """Holds a tensor `z(x)` of one model, with its derivatives with respect to the inputs `x` of each example."""

    value: Tensor
    """`z`, `[*shape]`."""
    first: Tensor
    """`∂ᵢz`, `[d, *shape]`."""
    second: Tensor
    """`Σᵢ wₖᵢ ∂ᵢ∂ᵢz` for each operator k, `[k, *shape]`."""
    weights: Tensor | None
    """`w`, `[k, d]`; None is the Laplacian alone, of weights 1."""

    def contract(self, squares: Tensor) -> Tensor:
        """Return `Σᵢ wₖᵢ qᵢ` of what has an entry for each input, `[d, …]` to `[k, …]`."""
        if self.weights is None:
            return squares.sum(0, keepdim=True)
        contracted: Tensor = torch.tensordot(self.weights.to(squares.dtype), squares, 1)
        return contracted

    def with_rank(self, ndim: int) -> "Channels":
        """Return the same with dimensions of size 1 in front of the shape, so that it has `ndim`."""
        missing = ndim - self.value.dim()
        if missing <= 0:
            return self
        shape = (1,) * missing + tuple(self.value.shape)
        return self._replace(
            value=self.value.view(shape),
            first=self.first.reshape(len(self.first), *shape),
            second=self.second.reshape(len(self.second), *shape),
        )


Operand = Channels | Tensor | complex


def through_elementwise(function: Function, z: Channels) -> Channels:
    """Return `σ(z)`: `∂ᵢσ = σ'∂ᵢz` and `Δσ = σ'Δz + σ''Σᵢ(∂ᵢz)²`, of a function of one argument."""
    known = _DERIVATIVES.get(function.__name__)
    value, slope, bend = known(z.value) if known is not None else _differentiated(function, z.value)
    return z._replace(
        value=value,
        first=slope * z.first,
        second=slope * z.second + bend * z.contract(z.first.square()),
    )


def _differentiated(function: Function, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ones = torch.ones_like(z)

    def slope(x: Tensor) -> Tensor:
        pulled: Tensor = _vjp(function, x)[1](ones)[0]
        return pulled

    first, pull = _vjp(slope, z)
    return function(z), first, pull(ones)[0]


def _of_tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.tanh()
    slope = 1 - value.square()
    return value, slope, -2 * value * slope


def _of_sigmoid(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.sigmoid()
    slope = value * (1 - value)
    return value, slope, slope * (1 - 2 * value)


def _of_sin(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.sin()
    return value, z.cos(), -value


def _of_cos(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.cos()
    return value, -z.sin(), -value


def _of_exp(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.exp()
    return value, value, value


def _of_square(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.square(), 2 * z, torch.full_like(z, 2)


def _of_reciprocal(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = z.reciprocal()
    return value, -value.square(), 2 * value**3


# These come up in every step of a training, where the general way takes several times as long.
_DERIVATIVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "tanh": _of_tanh,
    "sigmoid": _of_sigmoid,
    "sin": _of_sin,
    "cos": _of_cos,
    "exp": _of_exp,
    "square": _of_square,
    "reciprocal": _of_reciprocal,
}


def through_sum(left: Operand, right: Operand, alpha: complex = 1) -> Channels:
    """Return `left + α·right`, of which at least one is carried; the other does not depend on `x`."""
    left, right = _scaled_alike(left, right)
    if isinstance(left, Channels) and isinstance(right, Channels):
        return Channels(
            torch.add(left.value, right.value, alpha=alpha),
            torch.add(left.first, right.first, alpha=alpha),
            torch.add(left.second, right.second, alpha=alpha),
            left.weights,
        )
    if isinstance(left, Channels):
        assert not isinstance(right, Channels)
        value = left.value + alpha * right if not isinstance(right, Tensor) else left.value.add(right, alpha=alpha)
        return _broadcast(left._replace(value=value))
    assert isinstance(right, Channels)
    assert not isinstance(left, Channels)
    scaled = right if alpha == 1 else right._replace(first=alpha * right.first, second=alpha * right.second)
    return _broadcast(scaled._replace(value=left + alpha * right.value))


def through_product(left: Operand, right: Operand) -> Channels:
    """Return the elementwise product: `Δ(yz) = yΔz + 2Σᵢ∂ᵢy∂ᵢz + zΔy`."""
    return through_bilinear(torch.mul, *_scaled_alike(left, right))


def through_quotient(left: Operand, right: Operand) -> Channels:
    if not isinstance(right, Channels):
        return through_product(left, 1 / right)
    inverse = through_elementwise(torch.reciprocal, right)
    return through_product(left, inverse)


def through_bilinear(product: Function, left: Operand, right: Operand) -> Channels:
    """Return a product that is linear in each of its two arguments; of channels it is taken with leading dimensions."""
    if not isinstance(left, Channels):
        assert isinstance(right, Channels)
        return Channels(
            product(left, right.value), product(left, right.first), product(left, right.second), right.weights
        )
    if not isinstance(right, Channels):
        return Channels(
            product(left.value, right), product(left.first, right), product(left.second, right), left.weights
        )
    return Channels(
        product(left.value, right.value),
        product(left.first, right.value) + product(left.value, right.first),
        product(left.second, right.value)
        + product(left.value, right.second)
        + 2 * left.contract(product(left.first, right.first)),
        left.weights,
    )


def _scaled_alike(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Give both as many dimensions, so that their channels broadcast as their values do."""
    ranks = [_value(each).dim() for each in (left, right) if isinstance(each, (Channels, Tensor))]
    left, right = (each.with_rank(max(ranks)) if isinstance(each, Channels) else each for each in (left, right))
    return left, right


def _value(operand: Channels | Tensor) -> Tensor:
    return operand.value if isinstance(operand, Channels) else operand


def _broadcast(z: Channels) -> Channels:
    """Expand the derivatives to the shape of the value, to which a constant may have added."""
    if z.first.shape[1:] == z.value.shape:
        return z
    return z._replace(
        first=z.first.expand(len(z.first), *z.value.shape), second=z.second.expand(len(z.second), *z.value.shape)
    )


def through_linear(function: Function, args: Any, kwargs: Any) -> Any:
    """Return a function that is linear in all its tensors together, as `reshape` and `cat` are.

    Args:
        function: the function to call on tensors.
        args: its arguments, with `Channels` among them or inside of lists and tuples; constants add to the value alone.
        kwargs: its keyword arguments, of the same kinds.

    Returns:
        `Channels`, or what has them inside where the function gives several tensors.

    Raises:
        NotImplementedError: the result is complex.
    """
    return _along(function, args, kwargs, is_linear=True)


def through_any(function: Function, args: Any, kwargs: Any) -> Any:
    """Return any function: `f'[∂ᵢz]`, and `f'[Δz] + Σᵢ f''[∂ᵢz, ∂ᵢz]`, by differentiating it.

    Arguments and result are those of `through_linear`.
    """
    return _along(function, args, kwargs, is_linear=False)


def _along(function: Function, args: Any, kwargs: Any, *, is_linear: bool) -> Any:
    leaves, structure = tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Channels))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Channels)]
    carried: list[Channels] = [leaves[index] for index in places]

    def call(*values: Tensor, held: Sequence[Any] = leaves) -> Any:
        filled = list(held)
        for index, value in zip(places, values, strict=True):
            filled[index] = value
        own_args, own_kwargs = tree_unflatten(filled, structure)
        return function(*own_args, **own_kwargs)

    values, firsts, seconds = (tuple(part) for part in list(zip(*carried, strict=True))[:3])
    outputs, out_structure = tree_flatten(call(*values))
    if any(isinstance(each, Tensor) and each.is_complex() for each in outputs):
        raise NotImplementedError(COMPLEX)
    real = [index for index, each in enumerate(outputs) if isinstance(each, Tensor) and each.is_floating_point()]

    def slope(*along: Tensor) -> list[Tensor]:
        if not is_linear:
            return along_outputs(values, along)
        # What is constant has no derivative: its place is taken by zeros.
        zeros = [
            torch.zeros_like(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
        ]
        return _picked(call(*along, held=zeros), real)

    def along_outputs(at: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> list[Tensor]:
        return _pushed(lambda *point: _picked(call(*point), real), at, along)

    def bend(*along: Tensor) -> list[Tensor]:
        return _pushed(lambda *point: along_outputs(point, along), values, along)

    first, second = vmap(slope)(*firsts), vmap(slope)(*seconds)
    if not is_linear:
        bends = vmap(bend)(*firsts)
        second = [each + carried[0].contract(square) for each, square in zip(second, bends, strict=True)]
    for index, along, operated in zip(real, first, second, strict=True):
        outputs[index] = Channels(outputs[index], along, operated, carried[0].weights)
    return tree_unflatten(outputs, out_structure)


def _vjp(function: Function, *at: Any) -> tuple[Any, Function]:
    value, pull = vjp(function, *at)[:2]
    return value, pull


def _picked(tree: Any, places: Sequence[int]) -> list[Tensor]:
    leaves = tree_flatten(tree)[0]
    return [leaves[index] for index in places]


def _pushed(function: Callable[..., list[Tensor]], at: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the derivative of `function` at a point along a direction, by reverse mode twice.

    What a reverse pass gives is linear in what it starts from, and the reverse pass of that is the derivative. Forward
    mode would do in one, but twice in a row, or under a backward, torch 2.13 gets it wrong for layer norms, silently.
    """
    outputs, pull = _vjp(function, *at)
    _, push = _vjp(pull, [torch.zeros_like(each) for each in outputs])
    pushed: list[Tensor] = push(along)[0]
    return pushed


def works_in_place(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a torch function would change its input."""
    name = function.__name__
    if name.startswith("__"):
        changes = name == "__setitem__" or name.startswith("__i")
        return changes and name not in ("__index__", "__int__", "__invert__")
    if name.endswith("_") or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    return bool(dict(zip(argument_names(function), args, strict=False)).get("inplace"))


def argument_names(function: Function) -> Sequence[str]:
    """Return the names of the arguments of a function that torch has written in Python; none of others."""
    code = getattr(function, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def map_channels(function: Callable[[Channels], Any], tree: Any) -> Any:
    """Replace each `Channels` in nested lists, tuples and dicts."""
    return tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, Channels) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Channels),
    )
