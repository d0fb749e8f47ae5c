"""Plain equivalents that the user-facing tests compare with: small models, loops, and K-FAC written out densely."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim import KFACOptimizer
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.factors.factor import Factor
from kfac_optim.linalg.triangles import pack_triangle

Factors = dict[str, tuple[Tensor | None, Tensor | None]]
Layer = nn.Linear | nn.Conv2d

# Of tests over several steps, so that what goes wrong at statistics or with their age shows in few of them.
FREQUENT: dict[str, Any] = {"factor_update_period": 1, "inverse_update_period": 10}


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64, sizes: Sequence[int] = (4, 5, 3)) -> nn.Sequential:
    """Linear layers with tanh between them: layers "0", "2", "4" and so on."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (d_in, d_out) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(d_in, d_out, dtype=dtype)] + ([nn.Tanh()] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


def batch(seed: int = 0, size: int = 8, dim: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def square_loss(output: Tensor) -> Tensor:
    """Half the squared norm, averaged over examples: `M` is the first dimension."""
    return output.square().sum() / (2 * output.shape[0])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, start: int = 0, dim: int = 4) -> None:
    """`steps` steps on batches numbered from `start`."""
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):
        optimizer.zero_grad()
        square_loss(model(batch(100 + i, dim=dim, dtype=dtype))).backward()
        optimizer.step()


def factors_after(model: nn.Module, run: Callable[[nn.Module], None], **options: Any) -> Factors:
    """Factors of the one step in which `run(model)` is the forward and backward; parameters stay put."""
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    run(model)
    optimizer.step()
    return optimizer.factors()


def assert_same_factors(ours: Factors, theirs: Factors, *, rtol: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    for name, pair in ours.items():
        for side, left, right in zip("AG", pair, theirs[name], strict=True):
            torch.testing.assert_close(
                left, right, rtol=rtol, atol=1e-14, msg=lambda text, at=f"{side} of {name!r}": f"{at}: {text}"
            )


def linear_factors(rows: Tensor, gradients: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """`A` `[1, in + 1, in + 1]` and `G` `[1, out, out]` of a Linear with bias from their definitions.

    Args:
        rows: inputs, `[n, in]`.
        gradients: of the loss with respect to the outputs, `[n, out]`.
        terms: `M`.
    """
    a = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return (a.T @ a / len(a))[None], (terms * gradients.T @ gradients)[None]


def gradient_matrix(weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[out, in (+ 1)]`."""
    matrix = weight.reshape(weight.shape[0], -1)
    return matrix if bias is None else torch.cat([matrix, bias[:, None]], dim=1)


def direction(grad: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """`(G + √λ/π I)⁻¹ ∇ (A + π√λ I)⁻¹` by dense solves, `[out, in]`."""
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    a = a + pi * damping**0.5 * torch.eye(len(a), dtype=a.dtype)
    g = g + damping**0.5 / pi * torch.eye(len(g), dtype=g.dtype)
    return torch.linalg.solve(g, torch.linalg.solve(a, grad, left=False))


def layer_direction(layer: Layer, factors: tuple[Tensor | None, Tensor | None], damping: float) -> Tensor:
    """`direction` of the gradient that `layer` holds now, `[out, in (+ 1)]`."""
    a, g = factors
    assert a is not None
    assert g is not None
    bias = None if layer.bias is None else layer.bias.grad
    return direction(gradient_matrix(layer.weight.grad, bias), a[0], g[0], damping)


def trust_region(kl_clip: float | None, *products: tuple[float, Tensor]) -> float:
    """`ν = min(1, √(κ / max(lr² Δᵀ∇, (lr Δᵀ∇)²)))`, each product being `(lr, Δᵀ∇)` of some parameters."""
    if kl_clip is None:
        return 1.0
    quadratic = sum(lr**2 * float(product) for lr, product in products)
    decrease = sum(lr * float(product) for lr, product in products)
    return min(1.0, (kl_clip / max(quadratic, decrease**2)) ** 0.5)


def refresh_steps(factor_period: int, inverse_period: int, steps: int) -> list[int]:
    """By period, and when the averages hold half as many samples again as at the last refresh."""
    found: list[int] = []
    folds = folds_at_refresh = 0
    for step in range(steps):
        fold = step % factor_period == 0
        folds += fold
        if step % inverse_period == 0 or (fold and folds >= 1.5 * folds_at_refresh):
            found.append(step)
            folds_at_refresh = folds
    return found


def block(optimizer: KFACOptimizer, name: str) -> KFACBlock:
    """The block called `name`; for tests of what has no public view."""
    return next(block for block in optimizer._binding.coverage.blocks if block.name == name)


@contextmanager
def edited(factor: Factor) -> Iterator[Tensor]:
    """The average as a tensor to write to, `[groups, d, d]` or `[groups, d]`, which the factor takes over at the end.

    No public way leads to an average that was written to.
    """
    average = factor.average.clone()
    yield average
    if average.dim() == 2:
        factor.packed.copy_(average)
    else:
        assert torch.allclose(average, average.mT, equal_nan=True), "of a dense average one triangle is kept"
        factor.packed.copy_(pack_triangle(average))


def sgd_step(start: Tensor, grad: Tensor | None, lr: float) -> Tensor:
    """`start - lr · grad`, rounded as torch's SGD rounds it."""
    assert grad is not None
    return torch.add(start, grad, alpha=-lr)


def clones(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """Everything an optimizer holds and the parameters it moves, copied, for before/after comparisons."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return copy_of([params, optimizer.state_dict()])


def assert_identical(left: Any, right: Any, at: str = "") -> None:
    """Bitwise equality of nested dicts, sequences, tensors (dtype included) and numbers."""
    assert type(left) is type(right), at
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype, at
        assert torch.equal(left, right), at
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), at
        for key, value in left.items():
            assert_identical(value, right[key], f"{at}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), at
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_identical(one, other, f"{at}[{i}]")
    else:
        assert left == right, at


def copy_of(value: Any) -> Any:
    """Return a copy of nested dicts, sequences and tensors, the tensors without their graphs."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_of(item) for item in value)
    return value
