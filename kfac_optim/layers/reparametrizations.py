"""How the weight that a layer uses is made of the parameters that are trained: `weight_norm` and `spectral_norm`.

Each way maps gradients of the parameters to one of the used weight `W`, and a step of `W` to steps of the parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from kfac_optim.utils.autograd import version

# Lengths `g` below this share of the largest are taken for it where they divide.
_SHORTEST = 1e-3


class Unseen(NamedTuple):
    """Says of which part of a call's gradient `∇W` the parameters are told: `share (∇W - ⟨∇W, W⟩ K)`."""

    weight: Tensor
    """`W` in the call."""
    lead: Tensor
    """`K`, in the shape of `W`."""
    share: Tensor
    """What that part is multiplied by, `[]`: 1 where the present `W` is that of the call."""


@dataclass(frozen=True)
class Reparametrization(ABC):
    """Says how `weight` is made of the parameters `names` of a module, of which the first has its shape."""

    names: tuple[str, ...]

    @abstractmethod
    def to_weight(self, module: nn.Module, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient of `W` that gradients of the parameters tell."""

    @abstractmethod
    def to_params(self, module: nn.Module, step: Tensor) -> tuple[Tensor, ...]:
        """Return steps of the parameters that take `W` along `step`; this is the transpose of `to_weight`."""

    def unseen(self, module: nn.Module, kept: Sequence[Tensor], dtype: torch.dtype) -> Unseen | None:
        """Return what gradients of the parameters lack of the gradient of `W` in a call; None if nothing.

        Args:
            module: the layer.
            kept: what `keep` returned in the call.
            dtype: the dtype of the tensors.
        """
        return None

    def stamp(self, module: nn.Module) -> tuple[int, ...]:
        """Return numbers that tell whether forwards have changed since what `W` is made of beside the parameters."""
        return ()

    def keep(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return copies of what `W` is made of beside the parameters."""
        return ()

    def _values(self, module: nn.Module, like: Tensor) -> list[Tensor]:
        return [module.get_parameter(name).detach().to(like) for name in self.names]


@dataclass(frozen=True)
class NormedWeight(Reparametrization):
    """Describes `W = g v / ‖v‖`, with a length for each place along a dimension (Salimans & Kingma 2016).

    Any small step of `W` is one of `g` and `v`, and all gradients of `W` can be told from theirs: with `v̂ = v / ‖v‖`,
    `∇W = v̂ ∇g + (‖v‖ / g) (∇v - v̂ ⟨v̂, ∇v⟩)`. So the natural gradient of `W` is that of the parameters.
    """

    dim: int = 0
    """The dimension; -1 for one length in all, as torch has it."""

    def to_weight(self, module: nn.Module, gradients: Sequence[Tensor]) -> Tensor:
        of_v, of_g = gradients
        direction, ratio = self._direction(module, of_v)
        return direction * of_g.view_as(ratio) + ratio * self._across(direction, of_v)

    def to_params(self, module: nn.Module, step: Tensor) -> tuple[Tensor, ...]:
        direction, ratio = self._direction(module, step)
        return ratio * self._across(direction, step), self._along(direction, step)

    def _direction(self, module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
        v, g = self._values(module, like)
        norm = self._along(v, v).sqrt()
        g = g.view_as(norm)
        least = _SHORTEST * g.abs().max()
        least = torch.where(least > 0, least, norm.max())  # all are zero, as where a branch begins with nothing
        return v / norm, norm / torch.where(g.abs() < least, torch.where(g < 0, -least, least), g)

    def _across(self, direction: Tensor, tensor: Tensor) -> Tensor:
        return tensor - direction * self._along(direction, tensor)

    def _along(self, direction: Tensor, tensor: Tensor) -> Tensor:
        rest = [dim for dim in range(tensor.dim()) if self.dim == -1 or dim != self.dim % tensor.dim()]
        return (direction * tensor).sum(rest, keepdim=True)


@dataclass(frozen=True)
class SpectrallyNormedWeight(Reparametrization):
    """Describes `W = V / σ`, `σ = uᵀ V v` with vectors that are not differentiated (Miyato et al. 2018).

    `σ` is taken to stay as it is: `∇W = σ ∇V`, which lacks `⟨∇W, W⟩ u vᵀ`, a part that no step of `V` changes `W` by.
    """

    dim: int = 0
    """The dimension that numbers the rows of `V`."""

    def to_weight(self, module: nn.Module, gradients: Sequence[Tensor]) -> Tensor:
        (of_weight,) = gradients
        sigma, _, _ = self._parts(module, self._vectors(module), of_weight)
        return of_weight * sigma

    def to_params(self, module: nn.Module, step: Tensor) -> tuple[Tensor, ...]:
        sigma, _, _ = self._parts(module, self._vectors(module), step)
        return (step * sigma,)

    def unseen(self, module: nn.Module, kept: Sequence[Tensor], dtype: torch.dtype) -> Unseen:
        like = module.get_parameter(self.names[0]).detach().to(dtype)
        now, _, _ = self._parts(module, self._vectors(module), like)
        sigma, weight, lead = self._parts(module, kept, like)
        return Unseen(weight / sigma, lead, now / sigma)

    def stamp(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(map(version, self._vectors(module)))  # a forward in training mode iterates them in place

    def keep(self, module: nn.Module) -> tuple[Tensor, ...]:
        return tuple(vector.detach().clone() for vector in self._vectors(module))

    def _vectors(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return `u` and `v`."""
        if is_parametrized(module):
            norm = module.get_submodule("parametrizations.weight.0")
            return norm.get_buffer("_u"), norm.get_buffer("_v")
        return module.get_buffer("weight_u"), module.get_buffer("weight_v")

    def _parts(self, module: nn.Module, vectors: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `σ`, `V`, and `u vᵀ` in the shape of `V`, of vectors `u` and `v`."""
        (weight,) = self._values(module, like)
        u, v = vectors
        moved = weight.movedim(self.dim, 0)
        lead = torch.outer(u.detach().to(weight), v.detach().to(weight)).view_as(moved)
        return (lead * moved).sum(), weight, lead.movedim(0, self.dim)


def reparametrization_of(module: nn.Module) -> Reparametrization | None:
    """Return how the weight of a module is made, where that is one of these ways and nothing else is done to it."""
    old = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))]
    if is_parametrized(module):
        made = module.get_submodule("parametrizations")
        if old or [*made._modules] != ["weight"] or len(list(made.get_submodule("weight").children())) != 1:
            return None
        norm, prefix = module.get_submodule("parametrizations.weight.0"), "parametrizations.weight.original"
        if isinstance(norm, parametrizations._WeightNorm):
            return NormedWeight((f"{prefix}1", f"{prefix}0"), norm.dim)
        if isinstance(norm, parametrizations._SpectralNorm) and hasattr(norm, "_u"):
            return SpectrallyNormedWeight((prefix,), norm.dim)
        return None
    if len(old) != 1 or old[0].name != "weight":
        return None
    (hook,) = old
    if isinstance(hook, WeightNorm):
        return NormedWeight(("weight_v", "weight_g"), hook.dim)
    return SpectrallyNormedWeight(("weight_orig",), hook.dim)
