"""Every product with a weight, at every order of differentiation.

[Note: every use of a weight]
A loss may hold derivatives of the model with respect to its inputs. Then the weight `W` of a layer stands in the graph
of the loss several times: in products `y = W z`, of the forward and of forward-mode derivatives, and in products
`u = Wᵀ v` of backward passes that are themselves differentiated. With `g = ∂L/∂y`, and with `g := v` and `z := ∂L/∂u`
for the transposed ones, the gradient of the weight is `Σ g zᵀ` over all of them, exactly, and so is that of each
example. A hook on the layer's output sees the forward alone.

So the two products are a pair of autograd functions whose derivatives are made of the two again: `ForwardUse`, whose
derivative with respect to its input is `BackwardUse`, and `BackwardUse`, whose derivative is `ForwardUse`. Under
`torch.func` a use is carried through the transforms; below all of them it meets plain tensors, where it is noted, and
where the training loop's own backward comes to it. Each `torch.vmap` has put a dimension before the others. Where the
outermost runs over what the model is handed, that dimension is the batch: what does not depend on the example, such as
the unit vectors of `torch.func.jacrev`, is first expanded to all of them. Otherwise the model is handed the batch.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kfac_optim.capture.calls import ForwardCall
from kfac_optim.capture.weight_maps import WeightMap
from kfac_optim.utils.autograd import Function, differentiable, in_function_transform, is_asked, is_batched_by_grad

Noted = tuple[ForwardCall | None, Callable[[Tensor], None] | None]
"""A call, and what is called with the gradient of its output in each backward; None where nobody asks."""


class UseNotes(Protocol):
    """Takes notes of the uses of one weight in one forward of the model, and in what is derived from it."""

    @property
    def derived(self) -> "UseNotes":
        """Return what takes notes of the uses that derivatives of the product make."""

    @property
    def batch_dim(self) -> int:
        """Give the dimension of the batch, after those of `torch.vmap` if none of these runs over the examples."""

    def below_vmap(self) -> "UseNotes":
        """Return what takes notes of the use below a `torch.vmap`, which has put its dimension first."""

    def batch_first(self) -> "UseNotes":
        """Return what takes notes of the use once the batch was put first."""

    def for_each_example(self, tensor: Tensor) -> Tensor:
        """Return the tensor, expanded over the `torch.vmap` that runs over the examples, if there is one."""

    def note(self, tensor: Tensor, *, transposed: bool) -> Noted:
        """Note a use that multiplies `tensor` by the weight, or by its transpose; the gradient is of the product."""


class _Use(Function):
    """Is a product with a weight. `transposed` says whether it is with the transpose."""

    transposed: bool
    generate_vmap_rule = False

    @classmethod
    def of(cls, tensor: Tensor, weight: Tensor, bias: Tensor | None, weight_map: WeightMap, notes: UseNotes) -> Tensor:
        """Compute the product."""
        if not in_function_transform() and (dim := notes.batch_dim) > 0:
            return cls.of(tensor.movedim(dim, 0), weight, bias, weight_map, notes.batch_first()).movedim(0, dim)
        tensor = notes.for_each_example(tensor)
        result: Tensor = cls.apply(tensor, weight, bias, weight_map, notes)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def setup(cls: "type[_Use]", ctx: Any, inputs: tuple[Any, ...]) -> None:
        tensor, weight, _, ctx.map, ctx.notes = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensor, weight)
        ctx.save_for_forward(tensor, weight)
        ctx.is_plain = not in_function_transform()
        ctx.kfac_call = ctx.arrive = None
        if ctx.is_plain:
            ctx.kfac_call, ctx.arrive = ctx.notes.note(tensor, transposed=cls.transposed)

    @staticmethod
    def pushed(ctx: Any, tangents: tuple[Tensor | None, ...], of: "type[_Use]") -> Tensor:
        """Return the forward-mode derivative, which can itself be differentiated in both modes."""
        tangent, *others = tangents
        assert tangent is not None
        assert not any(isinstance(each, Tensor) for each in others), "products with parameters alone are followed"
        _, weight = ctx.saved_tensors
        with differentiable():
            result: Tensor = of.of(tangent, weight, None, ctx.map, ctx.notes.derived)
        return result

    @staticmethod
    def pulled(ctx: Any, gradient: Tensor, weight: Tensor, of: "type[_Use]") -> Tensor:
        """Return the gradient of what was multiplied, by another use if it may be differentiated itself."""
        if torch.is_grad_enabled() and not is_batched_by_grad(gradient):
            result: Tensor = of.of(gradient, weight, None, ctx.map, ctx.notes.derived)
            return result
        weight_map: WeightMap = ctx.map
        return (weight_map.backward if of.transposed else weight_map.forward)(gradient, _as(weight, gradient))

    @staticmethod
    def lowered(in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], of: "type[_Use]") -> Tensor:
        """Return the product below a `torch.vmap`, whose dimension is put first."""
        tensor, weight, bias, weight_map, notes = inputs
        dim, *others = in_dims
        assert dim is not None
        assert not any(each is not None for each in others), "products with parameters alone are followed"
        return of.of(tensor.movedim(dim, 0), weight, bias, weight_map, notes.below_vmap())


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the dtype of another: where the forward ran under autocast, its products are of both."""
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


class ForwardUse(_Use):
    """Computes `y = W z + b`, noted. Call `ForwardUse.of(z, weight, bias, map, notes)`; there may be no bias."""

    transposed = False

    @staticmethod
    def forward(layer_input: Tensor, weight: Tensor, bias: Tensor | None, weight_map: WeightMap, _: UseNotes) -> Tensor:
        output = weight_map.forward(layer_input, _as(weight, layer_input))
        return output if bias is None else weight_map.with_bias(output, _as(bias, output))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        _Use.setup(ForwardUse, ctx, inputs)
        ctx.bias = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        layer_input, weight = ctx.saved_tensors
        if ctx.arrive is not None:
            ctx.arrive(gradient)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _Use.pulled(ctx, gradient, weight, BackwardUse)
        if ctx.needs_input_grad[1] and (not ctx.is_plain or is_asked(weight)):
            of_weight = ctx.map.weight_gradient(_as(layer_input, gradient), gradient, weight)
        if ctx.needs_input_grad[2] and (not ctx.is_plain or is_asked(ctx.bias)):
            of_bias = ctx.map.bias_gradient(gradient)
        return of_input, of_weight, of_bias, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Use.pushed(ctx, tangents, ForwardUse)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _Use.lowered(in_dims, inputs, ForwardUse), 0


class BackwardUse(_Use):
    """Computes `u = Wᵀ v`, noted. Call `BackwardUse.of(v, weight, None, map, notes)`."""

    transposed = True

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, _: None, weight_map: WeightMap, __: UseNotes) -> Tensor:
        return weight_map.backward(gradient, _as(weight, gradient))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        _Use.setup(BackwardUse, ctx, inputs)

    @staticmethod
    def backward(ctx: Any, second: Tensor | None) -> tuple[Tensor | None, ...]:
        if second is None:
            return None, None, None, None, None
        gradient, weight = ctx.saved_tensors
        if ctx.arrive is not None:
            ctx.arrive(second)
        of_gradient = of_weight = None
        if ctx.needs_input_grad[0]:
            of_gradient = _Use.pulled(ctx, second, weight, ForwardUse)
        if ctx.needs_input_grad[1] and (not ctx.is_plain or is_asked(weight)):
            of_weight = ctx.map.weight_gradient(_as(second, gradient), gradient, weight)
        return of_gradient, of_weight, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Use.pushed(ctx, tangents, BackwardUse)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _Use.lowered(in_dims, inputs, BackwardUse), 0
