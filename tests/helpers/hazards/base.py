"""What a hazard is, and what each is compared with: K-FAC written out by hand, or a plain run of the optimizer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from helpers.plain import batch, clones, gradient_matrix, linear_factors, mlp, square_loss
from helpers.plain import direction as damped_direction
from kfac_optim import KFACOptimizer, TrustRegion

# Momentum, weight decay and a stale inverse take part, so that a step too many or too few shows in all later ones.
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "damping": 0.1,
    "factor_decay": 0.8,
    "factor_update_period": 1,
    "inverse_update_period": 3,
    "kl_clip": 1e-4,
    "step_size": TrustRegion(),  # as it is written out by hand
}
STEPS = 4

Pair = tuple[Any, Any]
"""Ours and the plain one: nested dicts, tuples and lists of tensors, None and numbers."""


@dataclass(frozen=True)
class Hazard:
    """A habit of training loops that could spoil the numbers.

    Attributes:
        name: what the user does, with the variant.
        source: where the hazard was met.
        run: what becomes of it, beside what must.
        rtol: allowed error, of the largest element of each tensor; 0 is equality to the bit.
    """

    name: str
    source: str
    run: Callable[[], Pair]
    rtol: float = 1e-10


HAZARDS: list[Hazard] = []


def hazard(source: str, *variants: Any, rtol: float = 1e-10) -> Callable[[Callable[..., Pair]], Callable[..., Pair]]:
    """Register a function as a hazard, or as one for each variant, which becomes its argument."""

    def register(function: Callable[..., Pair]) -> Callable[..., Pair]:
        name = function.__name__.replace("_", " ").strip()
        if not variants:
            HAZARDS.append(Hazard(name, source, function, rtol))
        for variant in variants:
            HAZARDS.append(Hazard(f"{name}: {_label(variant)}", source, partial(function, variant), rtol))
        return function

    return register


def _label(variant: Any) -> str:
    if isinstance(variant, (list, tuple)):
        return ", ".join(map(_label, variant))
    return str(getattr(variant, "__name__", variant)).replace("_", " ").strip()


# -- our side ----------------------------------------------------------------------------------------------------


class Training:
    """A model under its optimizer; every step must precondition every layer that has gradients."""

    def __init__(self, model: nn.Module, optimizer: KFACOptimizer | None = None, **options: Any) -> None:
        self.model = model
        self.optimizer = KFACOptimizer(model, **{**OPTIONS, **options}) if optimizer is None else optimizer
        self.start = clones(model.parameters())

    def steps(self, count: int = STEPS, *, start: int = 0, size: int = 8) -> Iterator[Tensor]:
        """Batches numbered from `start`: `zero_grad()` before each, `step()` after it."""
        for i in range(start, start + count):
            self.optimizer.zero_grad()
            yield batch(100 + i, size=size)
            self.step()

    def train(self, count: int = STEPS, *, start: int = 0, **kwargs: Any) -> "Training":
        for x in self.steps(count, start=start):
            square_loss(self.model(x, **kwargs)).backward()
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.optimizer.step(closure)
        self.check()

    def check(self) -> None:
        metrics = self.optimizer.metrics()
        assert metrics["unpreconditioned_blocks"] == 0, "a layer took the plain SGD step"
        assert metrics["cosine"] < 0.9999, "hardly preconditioned"

    def result(self) -> dict[str, Any]:
        """How far each parameter moved, and the factors."""
        moved = [end.detach() - start for end, start in zip(self.model.parameters(), self.start, strict=True)]
        return {"moved": moved, "factors": self.optimizer.factors()}


def plain_run(model: nn.Module | None = None, count: int = STEPS, **options: Any) -> dict[str, Any]:
    """The optimizer in the simplest of loops."""
    return Training(mlp() if model is None else model, **options).train(count).result()


# -- the other side, without the library ---------------------------------------------------------------------------


@dataclass
class _Layer:
    module: nn.Linear
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Input and output of each call that built a graph."""
    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    masses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    inverted: list[Tensor] = field(default_factory=list)
    folds: int = 0
    folded_at: int = 0
    folds_at_refresh: int = 0


class ByHand:
    """K-FAC with momentum for linear layers with bias, written out: dense solves, gradients by `autograd.grad`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.options = {**OPTIONS, **options}
        self.start = clones(model.parameters())
        self.layers: dict[str, _Layer] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self.layers[name] = layer = _Layer(module)
                module.register_forward_hook(partial(self._record, layer))
        self.buffers: dict[nn.Parameter, Tensor] = {}
        self.terms = 0.0
        self.number = 0

    @staticmethod
    def _record(layer: _Layer, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            layer.calls.append((args[0].detach(), output))

    def backward(self, loss: Tensor, terms: float) -> None:
        """Gradients of a mean over `terms`, of every output recorded since the last backward and every parameter."""
        calls = [(layer, *call) for layer in self.layers.values() for call in layer.calls]
        params = [param for param in self.model.parameters() if param.requires_grad]
        targets = [*(output for _, _, output in calls), *params]
        found = torch.autograd.grad(loss, targets, allow_unused=True)
        for (layer, rows, _), gradient in zip(calls, found, strict=False):
            if gradient is not None and layer.module.weight.requires_grad:
                dtype = torch.promote_types(layer.module.weight.dtype, torch.float32)
                layer.rows.append(rows.flatten(0, -2).to(dtype))
                layer.gradients.append(gradient.flatten(0, -2).to(dtype))
        for param, gradient in zip(params, found[len(calls) :], strict=True):
            if gradient is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient
        for layer in self.layers.values():
            layer.calls.clear()
        self.terms += terms

    def fold(self) -> dict[str, tuple[Tensor, ...]]:
        """The factors, with the statistics so far taken in; no step."""
        for layer in self.layers.values():
            self._update(layer)
        return {name: tuple(layer.factors) for name, layer in self.layers.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Step on what `.grad` holds, and drop it."""
        options, bound = self.options, self.options["kl_clip"]
        directions: dict[nn.Parameter, Tensor] = {}
        product = uphill = 0.0
        for layer in self.layers.values():
            self._update(layer)
            weight, bias = layer.module.weight, layer.module.bias
            if weight.grad is None:
                continue
            assert layer.inverted
            grad = gradient_matrix(weight.grad, bias.grad)
            matrix = damped_direction(grad, layer.inverted[0][0], layer.inverted[1][0], options["damping"])
            product += float((matrix * grad).sum())
            directions |= {weight: matrix[:, :-1], bias: matrix[:, -1]}
            uphill -= sum(float((self.buffers[p] * p.grad).sum()) for p in (weight, bias) if p in self.buffers)
        lr, momentum = options["lr"], options["momentum"]
        scale = 1.0 if bound is None else min(1.0, (bound / max(lr**2 * product, (lr * product) ** 2)) ** 0.5)
        held = 1.0 if bound is None or lr * momentum * uphill <= bound**0.5 else bound**0.5 / (lr * momentum * uphill)
        for param in self.model.parameters():
            if param.grad is None:
                continue
            change = options["weight_decay"] * param + (
                scale * directions[param] if param in directions else param.grad
            )
            if param in self.buffers:
                change = momentum * (held if param in directions else 1.0) * self.buffers[param] + change
            self.buffers[param] = change
            param -= lr * change
            param.grad = None
        self.terms = 0.0
        self.number += 1

    def _update(self, layer: _Layer) -> None:
        """Averages weighed by mass, and the factors that are inverted until the next refresh."""
        fresh = bool(layer.rows)
        if fresh:
            rows, gradients = torch.cat(layer.rows), torch.cat(layer.gradients)
            counted = gradients.any(dim=-1)  # padding is no row
            sample = linear_factors(rows[counted], gradients[counted], self.terms)
            decay = self.options["factor_decay"] ** (self.number - layer.folded_at if layer.folds else 0)
            for side, mass in enumerate((float(counted.sum()), self.terms)):
                held = decay * layer.masses[side]
                layer.masses[side] = held + mass
                if layer.folds:
                    mixed = (held * layer.factors[side] + mass * sample[side]) / (held + mass)
                    layer.factors[side] = mixed
            if not layer.folds:
                layer.factors = list(sample)
            layer.folds, layer.folded_at = layer.folds + 1, self.number
            layer.rows.clear()
            layer.gradients.clear()
        outgrown = fresh and layer.folds >= 1.5 * layer.folds_at_refresh
        if layer.folds and (outgrown or self.number % self.options["inverse_update_period"] == 0):
            layer.inverted, layer.folds_at_refresh = list(layer.factors), layer.folds

    def result(self) -> dict[str, Any]:
        moved = [end.detach() - start for end, start in zip(self.model.parameters(), self.start, strict=True)]
        return {"moved": moved, "factors": {name: tuple(layer.factors) for name, layer in self.layers.items()}}


def by_hand(
    model: nn.Module | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: square_loss(model(x)),
    *,
    batches: Sequence[int] = range(STEPS),
    size: int = 8,
    edit: Callable[[list[nn.Parameter]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Plain steps by hand.

    Args:
        model: of linear layers.
        forward: from the model and a batch to a loss that is a mean over examples.
        batches: their numbers; one step each.
        size: examples in each.
        edit: what happens to the gradients before the step.
        options: in the place of those of `OPTIONS`.
    """
    run = ByHand(mlp() if model is None else model, **options)
    for number in batches:
        run.backward(forward(run.model, batch(100 + number, size=size)), size)
        if edit is not None:
            edit(list(run.model.parameters()))
        run.step()
    return run.result()
