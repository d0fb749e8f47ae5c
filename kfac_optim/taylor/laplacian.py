"""Value, gradient and Laplacian of a model in its inputs, in one forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.taylor.carried import REMEDY, Carried, NotCarriedError, channels_of
from kfac_optim.taylor.channels import Channels


class Derivatives(NamedTuple):
    """Holds a model's outputs for each example, with their derivatives with respect to its inputs.

    All are differentiable with respect to the parameters.
    """

    value: Tensor
    """`u(x)`, `[N, *out]`."""
    gradient: Tensor
    """`∂u/∂xᵢ`, `[N, *out, d]`."""
    laplacian: Tensor
    """`Σᵢ ∂²u/∂xᵢ²`, or with `wᵢ` in the sum, `[N, *out]`; of k rows of weights `[N, *out, k]`."""


def laplacian(
    model: Callable[[Tensor], Any], x: Tensor, *, weights: Tensor | Sequence[float] | None = None
) -> Derivatives:
    """Return `model(x)`, its gradient and its Laplacian in `x`, carried through the model's own forward in one pass.

    It is for losses of differential equations (physics-informed networks): `laplacian(model, x).laplacian + f(x)` is
    the residual of Poisson's equation. Beside each value `z` of the forward go its derivatives `∂ᵢz` and its Laplacian
    `Δz`: through a linear layer as `W∂ᵢz` and `WΔz`, through an elementwise function σ as `σ'∂ᵢz` and
    `σ'Δz + σ''Σᵢ(∂ᵢz)²` (forward Laplacian, Li et al. 2023, arXiv 2307.08214). All 2 + d of an example go through each
    linear layer as one product of stacked rows `[N, 2 + d, in]`, the bias added to the first, so that
    `KFACOptimizer(model, …)` makes the layer's factors of all of them (Dangel, Müller & Zeinhofer 2024, arXiv
    2405.15603). Nested `autograd.grad` computes the same numbers in reverse passes.

    The forward may hold whatever torch can differentiate often enough: modules, activations, sums, products, features
    such as `torch.sin(2 * x)`, `cat`, indexing, layer norms. Each example has to be treated by itself. Refused are
    functions that change a tensor in place, draw random numbers (dropout in training) or mix the examples of a batch
    (batch norm in training), complex numbers, custom autograd functions, compiled and scripted modules; a scripted
    function makes all derivatives NaN.
    A forward of several arguments is called by a function: `laplacian(lambda z: model(z[:, :1], z[:, 1:]), z)`.

    Args:
        model: a module, or a function, of one tensor; it returns one tensor `[N, *out]`.
        x: inputs of N examples, `[N, d]`.
        weights: `w` of the operator `Σᵢ wᵢ ∂²/∂xᵢ²`, `[d]`; None is 1 for all. In the heat equation with `x = (t, s)`,
            `[0, 1]` gives `∂²u/∂s²`, and `gradient[..., 0]` is `∂u/∂t`. k rows `[k, d]` give k operators, each at the
            cost of one more row in every layer: `torch.eye(d)` gives `∂²u/∂xᵢ²` for each coordinate.

    Raises:
        TypeError: `x` is no tensor of floating-point numbers, or the model does not return one tensor.
        ValueError: `x` is not `[N, d]`, or the weights do not fit it.
        NotImplementedError: the forward calls a function that derivatives cannot be carried through; it is named.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"kfac_optim: x of taylor.laplacian must be a tensor of floating-point numbers, got {x!r}.")
    if x.dim() != 2:
        raise ValueError(
            f"kfac_optim: x of taylor.laplacian must be [N, d], one row for each example, got {list(x.shape)}; "
            "x[None] makes a batch of one example, x.flatten(1) rows of examples of another shape."
        )
    if isinstance(x, Carried):
        raise NotCarriedError(
            f"kfac_optim: taylor.laplacian was called within another taylor.laplacian, which carries two derivatives "
            f"and no more. {REMEDY}"
        )
    parts = model.modules() if isinstance(model, nn.Module) else ()
    if any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts):
        raise NotCarriedError(
            "kfac_optim: taylor.laplacian runs the model's own forward, and a compiled model has another one. Pass the "
            "model that was compiled (its _orig_mod), without parts that are compiled; where model.compile() has "
            "compiled it in place, leave that out."
        )
    examples, inputs = x.shape
    operators = _operators(weights, x)
    ones = torch.eye(inputs, dtype=x.dtype, device=x.device)[:, None].expand(inputs, examples, inputs)
    zeros = x.new_zeros(1 if operators is None else len(operators), examples, inputs)
    output = model(Carried.of(Channels(x, ones, zeros, operators)))
    if not isinstance(output, Tensor):
        raise TypeError(
            f"kfac_optim: the model of taylor.laplacian must return one tensor, got {type(output).__name__}; wrap it "
            "in a function that takes the tensor out: laplacian(lambda x: model(x)[0], x)."
        )
    if not isinstance(output, Carried):
        raise NotCarriedError(
            f"kfac_optim: the output of the model of taylor.laplacian does not depend on x in a way that was seen: it "
            f"is a constant, or passed through detach(), .data, or NumPy. {REMEDY}"
        )
    value, first, second, _ = channels_of(output)
    single = weights is None or torch.as_tensor(weights).dim() == 1
    lost = 0 * value.detach()  # NaN where derivatives were lost on the way to the value, see `Carried`
    first, second = first + lost, second + lost
    return Derivatives(value, first.movedim(0, -1), second[0] if single else second.movedim(0, -1))


def _operators(weights: Tensor | Sequence[float] | None, x: Tensor) -> Tensor | None:
    """Return the weights as `[k, d]`; None for the Laplacian."""
    if weights is None:
        return None
    given = torch.as_tensor(weights, dtype=x.dtype, device=x.device)
    if given.dim() not in (1, 2) or given.shape[-1] != x.shape[1] or given.numel() == 0:
        raise ValueError(
            f"kfac_optim: weights of taylor.laplacian must be [d] or [k, d] with d = {x.shape[1]}, the columns of x, "
            f"got {list(given.shape)}."
        )
    return given if given.dim() == 2 else given[None]
