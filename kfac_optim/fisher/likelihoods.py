"""Losses as negative log-likelihoods: what a Fisher that does not look at the targets needs to know of them.

A loss that is a mean (or sum) of terms `ℓ(f, y) = -log p(y | f)` has the Fisher `Σ Jᵀ H J / M`, with `J` the Jacobian
of the model's outputs and `H = E_y[∂ℓ ∂ℓᵀ]` of each term, under targets drawn from the model's own `p(y | f)`. But for
a variance, `H` is also the Hessian of `ℓ`: Fisher and generalised Gauss-Newton matrix are one (Martens 2020, §9).

Gradients below are those of single terms, not divided by `M`, each shaped as the output it belongs to. Every loss gives
them in three ways, all on one scale:

- `sample`: `∂ℓ` at targets drawn from the model, `E[∂ℓ ∂ℓᵀ] = H` (Monte Carlo);
- `propagate`: `B v` with `B Bᵀ = H` and random signs `v` (curvature propagation; Martens, Sutskever & Swersky 2012);
- `columns`: those of `B` one by one, whose outer products add up to `H` exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.utils.precision import at_least_float32
from kfac_optim.utils.random_state import normal_like

Outputs = tuple[Tensor, ...]
"""What the model computes of the loss's parameters: logits; means; means and variances."""

# A root of a probability below which a term has no residual: that would be its gradient divided by it.
_LEAST_ROOT = 1e-6

Vectors = tuple[Tensor | None, ...]
"""One for each of the outputs; None is zero."""


@dataclass(frozen=True)
class Likelihood(ABC):
    """Describes one loss as the negative logarithm of a likelihood.

    Attributes:
        mean: whether the loss is the mean of its terms; otherwise it is their sum.
    """

    mean: bool

    outputs = 1
    """How many tensors of the model's output it reads."""

    @abstractmethod
    def terms(self, outputs: Outputs) -> int:
        """Return the number of terms."""

    @abstractmethod
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        """Return `∂ℓ` at targets drawn from the model."""

    @abstractmethod
    def propagate(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        """Return `B v` with random signs `v`."""

    @abstractmethod
    def columns(self, outputs: Outputs) -> Iterator[Vectors]:
        """Return columns of `B`, each of all examples (the first dimension) at once.

        Positions of an example may interact in the model, examples do not.
        """

    @abstractmethod
    def solved(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        """Return `s` with `B s = gradient` at one of the outputs and zero at the others, `[examples, columns]`.

        The columns are those of `columns`, in their order.
        """

    @abstractmethod
    def curved(self, outputs: Outputs, vectors: Outputs) -> Outputs:
        """Return `H v` for a vector at every output."""

    def used(self, gradient: Tensor) -> Tensor:
        """Return which terms the training loop's loss used, by its gradient at an output: True or False for each.

        A term with a gradient of exactly zero is padding, or an ignored target, or has no curvature left.
        """
        return gradient != 0


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Describes `nn.CrossEntropyLoss`: a term for each position, over logits along one dimension.

    With `p = softmax(f)`: `H = diag(p) - p pᵀ`, `B = diag(√p) - p √pᵀ`.

    Attributes:
        class_dim: the dimension of the logits that numbers the classes; None is dimension 1 of `[batch, classes]`, or 0
            of `[classes]`.
    """

    class_dim: int | None = None

    def terms(self, outputs: Outputs) -> int:
        (logits,) = outputs
        return logits.numel() // max(logits.shape[self._dim(logits)], 1)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        p = self._probabilities(outputs)
        # As torch.multinomial draws, which would have an accelerator say first that these are probabilities.
        drawn = (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1, keepdim=True)
        return self._restore(outputs, p.scatter_add(-1, drawn, -torch.ones_like(p[..., :1])))

    def propagate(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        p = self._probabilities(outputs)
        return self._restore(outputs, _apply_root(p, _signs(p, generator)))

    def columns(self, outputs: Outputs) -> Iterator[Vectors]:
        p = self._probabilities(outputs)
        for unit in _units(p):
            yield self._restore(outputs, _apply_root(p, unit))

    def solved(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        p = self._probabilities(outputs)  # B D⁻½ = diag(p) - p pᵀ, to whose range every gradient of a term belongs
        along = gradient.movedim(self._dim(gradient), -1).to(p.dtype)
        return _by_example(_divided(along, p.sqrt()))

    def curved(self, outputs: Outputs, vectors: Outputs) -> Outputs:
        p = self._probabilities(outputs)
        weighted = p * vectors[0].movedim(self._dim(vectors[0]), -1)
        return self._restore(outputs, weighted - p * weighted.sum(-1, keepdim=True))

    def used(self, gradient: Tensor) -> Tensor:
        return (gradient != 0).any(self._dim(gradient), keepdim=True)

    def _dim(self, logits: Tensor) -> int:
        if self.class_dim is not None:
            if not -logits.dim() <= self.class_dim < logits.dim():
                raise ValueError(
                    f"kfac_optim: the loss has class_dim={self.class_dim}, and the output that it reads is "
                    f"{list(logits.shape)}. Pass the dimension of that output which the classes are in."
                )
            return self.class_dim
        if logits.dim() > 2:
            raise ValueError(
                f"kfac_optim: the model's output is {list(logits.shape)}, and the loss does not say which of its "
                "dimensions are the classes. Pass class_dim=-1 (language models) or class_dim=1 (segmentation) with "
                "the loss; either will do where the loop calls the criterion that the estimate names on other logits, "
                "as those of a head outside of the model."
            )
        return logits.dim() - 1

    def _probabilities(self, outputs: Outputs) -> Tensor:
        """Return the probabilities `[..., classes]`, in at least float32."""
        (logits,) = outputs
        wide = logits.to(at_least_float32(logits.dtype))
        return wide.movedim(self._dim(logits), -1).softmax(-1)

    def _restore(self, outputs: Outputs, gradient: Tensor) -> Outputs:
        (logits,) = outputs
        return (gradient.movedim(-1, self._dim(logits)).to(logits.dtype),)


@dataclass(frozen=True)
class _Elementwise(Likelihood):
    """Describes a loss with a term for each element: `H` is diagonal, and so is `B`."""

    @abstractmethod
    def _roots(self, outputs: Outputs) -> tuple[Any, ...]:
        """Return the diagonal of `B` at each of the outputs, a tensor or one number for all."""

    def terms(self, outputs: Outputs) -> int:
        return outputs[0].numel()

    def propagate(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        each = zip(self._roots(outputs), outputs, strict=True)
        return tuple(root * _signs(output, generator) for root, output in each)

    def columns(self, outputs: Outputs) -> Iterator[Vectors]:
        roots = self._roots(outputs)
        for unit in _units(outputs[0]):
            for place, root in enumerate(roots):
                yield tuple(root * unit if here == place else None for here in range(len(roots)))

    def solved(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        return _alternating(_by_example(gradient / self._roots(outputs)[place]), place, self.outputs)

    def curved(self, outputs: Outputs, vectors: Outputs) -> Outputs:
        return tuple(root.square() * vector for root, vector in zip(self._roots(outputs), vectors, strict=True))


@dataclass(frozen=True)
class Bernoulli(_Elementwise):
    """Describes `nn.BCEWithLogitsLoss`: a term for each element. With `p = σ(f)`: `H = p (1 - p)`, `B = √H`."""

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        (logits,) = outputs
        p = logits.to(at_least_float32(logits.dtype)).sigmoid()
        # `torch.bernoulli` refuses NaN, which leads to a step that is skipped.
        drawn = torch.rand(p.shape, generator=generator, dtype=p.dtype, device=p.device) < p
        return ((p - drawn.to(p.dtype)).to(logits.dtype),)

    def solved(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        return _by_example(_divided(gradient, *self._roots(outputs)))

    def _roots(self, outputs: Outputs) -> tuple[Any, ...]:
        (logits,) = outputs
        return ((logits.sigmoid() * (-logits).sigmoid()).sqrt(),)


@dataclass(frozen=True)
class Gaussian(_Elementwise):
    """Describes `nn.MSELoss`: a term `(f - y)²` for each element, a Gaussian of variance 1/2. `H = 2`, `B = √2`."""

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        return (2**0.5 * normal_like(outputs[0], generator),)

    def _roots(self, outputs: Outputs) -> tuple[Any, ...]:
        return (2**0.5,)

    def curved(self, outputs: Outputs, vectors: Outputs) -> Outputs:
        return (2 * vectors[0],)


@dataclass(frozen=True)
class _GaussianOfTwo(_Elementwise):
    """Describes a normal distribution of which the model gives the mean, and how wide it is."""

    outputs = 2

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Outputs:
        of_mean, of_width = self._roots(outputs)
        # y = f + σ z: the gradients are -z / σ and a multiple of 1 - z², whose variance is 2.
        z = normal_like(outputs[0], generator)
        return -of_mean * z, of_width * (1 - z.square()) / 2**0.5


@dataclass(frozen=True)
class GaussianWithVariance(_GaussianOfTwo):
    """Describes `nn.GaussianNLLLoss` of a model that returns means and variances: a term for each element.

    `ℓ = (log v + (f - y)² / v) / 2`, `H = diag(1 / v, 1 / (2 v²))` for the mean and the variance.

    Attributes:
        eps: lower bound of the variances, as in the loss.
    """

    eps: float = 1e-6

    def _roots(self, outputs: Outputs) -> tuple[Any, ...]:
        mean, variance = outputs
        if mean.shape != variance.shape:
            raise ValueError(
                f"kfac_optim: GaussianNLLLoss needs a variance for each mean, got {list(variance.shape)} for "
                f"{list(mean.shape)}. Pass a variance of input's shape to the criterion: var.expand_as(input), or "
                "var.unsqueeze(-1).expand_as(input) where var has one number for each row."
            )
        bounded = variance.clamp(min=self.eps)
        return bounded.rsqrt(), 1 / (2**0.5 * bounded)


@dataclass(frozen=True)
class GaussianWithScale(_GaussianOfTwo):
    """Describes a normal distribution by its mean and standard deviation `σ`: `H = diag(1 / σ², 2 / σ²)`."""

    def _roots(self, outputs: Outputs) -> tuple[Any, ...]:
        _, scale = outputs
        return 1 / scale, 2**0.5 / scale


def _apply_root(p: Tensor, vector: Tensor) -> Tensor:
    """Return `(diag(√p) - p √pᵀ) v` along the last dimension."""
    weighted = p.sqrt() * vector
    return weighted - p * weighted.sum(-1, keepdim=True)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def _by_example(tensor: Tensor) -> Tensor:
    """Return what belongs to each example as a row; a tensor of one dimension is one example."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _divided(gradient: Tensor, root: Tensor) -> Tensor:
    """Divide by a root of the curvature; a term that has next to none is left to the rest of the gradient."""
    known = root > _LEAST_ROOT
    return torch.where(known, gradient / torch.where(known, root, 1), 0)


def _alternating(columns: Tensor, place: int, outputs: int) -> Tensor:
    """Put columns of one output between columns of zeros for the others, `[examples, outputs · columns]`."""
    between = torch.zeros_like(columns).unsqueeze(-1).repeat(1, 1, outputs)
    between[..., place] = columns
    return between.flatten(1)


def _units(like: Tensor) -> Iterator[Tensor]:
    """Give, for each element of an example, 1 there in every example and 0 elsewhere."""
    flat = _by_example(like)
    for i in range(flat.shape[1]):
        unit = torch.zeros_like(flat)
        unit[:, i] = 1
        yield unit.view(like.shape)
