"""Blocks with several pairs of Kronecker factors: of calls by the transposed matrix, of the terms of a loss."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.specs import LayerSpec


class SeveralPairs(FactorPair):
    """Keeps a pair of factors for each kind of call, and as the block's own `A` and `G` one pair that stands for all.

    With `n` the mean eigenvalue, the calls of kind i give the sides `P_i`, `Q_i` and the weight `s_i = n(P_i) n(Q_i)`;
    the block's factors are `Σ s_i P̂_i / Σ s_i` and `Σ s_i Q̂_i`, where `F̂ = F / n(F)`. Their product has the trace of
    `Σ P_i ⊗ Q_i`, and equals it where the `P̂_i` or the `Q̂_i` are all equal.
    """

    __slots__ = ()

    @abstractmethod
    def members(self) -> Mapping[str, FactorPair]:
        """Return the pairs by their names in checkpoints."""

    @abstractmethod
    def sides(self) -> Sequence[tuple[Factor | None, Factor | None]]:
        """Return `P_i` and `Q_i`, None for the identity."""

    def has_pending(self) -> bool:
        return any(pair.has_pending() for pair in self.members().values())

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor) -> None:
        for pair in self.members().values():
            if pair.has_pending():
                pair.fold(loss_terms, decay, loss_scale)
            else:
                pair.age(decay, loss_terms if pair.is_told() else 0)
        self._count_refusals()
        self.combine()

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        for pair in self.members().values():
            pair.age(decay, loss_terms)
        self.combine()

    def used(self) -> float | Tensor:
        device = self.refused.device
        return torch.stack([torch.as_tensor(pair.used(), device=device) for pair in self.members().values()]).amax(0)

    def is_told(self) -> bool:
        return all(pair.is_told() for pair in self.members().values())

    @property
    def counted(self) -> int:
        return sum(pair.counted for pair in self.members().values())

    def counts(self, loss_terms: float | Tensor, loss_scale: float | Tensor) -> Tensor:
        return torch.cat([pair.counts(loss_terms, loss_scale) for pair in self.members().values()])

    def tell(self, everywhere: Tensor) -> None:
        members = self.members().values()
        parts = torch.split(everywhere, [pair.counted for pair in members])
        for pair, part in zip(members, parts, strict=True):
            pair.tell(part)

    def averages(self, part: str) -> tuple[Factor, ...]:
        return tuple(factor for pair in self.members().values() for factor in pair.averages(part))

    def discard(self) -> None:
        for pair in self.members().values():
            pair.discard()

    def held(self) -> Tensor:
        return torch.stack([pair.held() for pair in self.members().values()]).any()

    def held_groups(self) -> Tensor:
        return torch.stack([pair.held_groups() for pair in self.members().values()]).any(0)

    def tensors(self) -> dict[str, Any]:
        return {name: pair.tensors() for name, pair in self.members().items()}

    def ranges(self) -> dict[str, Any]:
        return {name: pair.ranges() for name, pair in self.members().items()}

    def load(self, tensors: Mapping[str, Any]) -> None:
        for name, pair in self.members().items():
            pair.load(tensors[name])
        self._count_refusals()
        self.combine()

    def _count_refusals(self) -> None:
        pairs = self.members().values()
        self.refused.copy_(torch.stack([pair.refused for pair in pairs]).sum())
        self.refused_in_a_row.copy_(torch.stack([pair.refused_in_a_row for pair in pairs]).amax())

    def combine(self) -> None:
        for pair in self.members().values():
            pair.combine()
        a_sides, g_sides = zip(*self.sides(), strict=True)
        device = self.refused.device
        a_means, g_means = ([_mean_eigenvalue(side, device) for side in sides] for sides in (a_sides, g_sides))
        weights = [a * g for a, g in zip(a_means, g_means, strict=True)]  # []
        total = torch.stack([torch.as_tensor(weight) for weight in weights]).sum(0)
        if self.a is not None:
            self.a.packed.copy_(_mix(a_sides, [_divide(w, n * total) for w, n in zip(weights, a_means, strict=True)]))
        if self.g is not None:
            self.g.packed.copy_(_mix(g_sides, [_divide(w, n) for w, n in zip(weights, g_means, strict=True)]))


class OpposedPair(SeveralPairs):
    """Keeps `A` and `G` of a matrix that some calls multiply by and others by its transpose, as with tied embeddings.

    Each kind of call has a pair of its own: on one side of the matrix inputs meet output gradients, which have other
    units.

    Attributes:
        own: the pair of the calls that multiply by the matrix.
        opposed: the pair of those that multiply by its transpose; its `A` is on the side of `G`.
    """

    __slots__ = ("opposed", "own")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.own = FactorPair(spec, dtype=dtype, device=device)
        self.opposed = FactorPair(spec.transposed(), dtype=dtype, device=device)

    def accumulate(self, stats: LayerStatistics) -> None:
        (self.opposed if stats.opposed else self.own).accumulate(stats)

    def members(self) -> Mapping[str, FactorPair]:
        return {"own": self.own, "opposed": self.opposed}

    def sides(self) -> Sequence[tuple[Factor | None, Factor | None]]:
        return (self.own.a, self.own.g), (self.opposed.g, self.opposed.a)


class PairPerTerm(SeveralPairs):
    """Keeps `A` and `G` of each term of a loss, whose curvature is the sum `A₁ ⊗ G₁ + A₂ ⊗ G₂ + …`.

    Attributes:
        of_terms: the pairs, by the number of the term (`LayerStatistics.term`).
    """

    __slots__ = ("of_terms",)

    def __init__(self, spec: LayerSpec, terms: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.of_terms = [make_pair(spec, dtype=dtype, device=device) for _ in range(terms)]

    def accumulate(self, stats: LayerStatistics) -> None:
        """Add one call's moments to those of its term.

        Raises:
            ValueError: the loss has more terms than there are pairs.
        """
        if stats.term >= len(self.of_terms):
            raise ValueError(
                f"kfac_optim: a gradient of layer {self._layer!r} comes from call {stats.term + 1} of a criterion "
                "(or forward of the model, where the loss holds derivatives and calls no criterion that the estimate "
                f"names) since the last step, and SumOfTerms keeps factors of {len(self.of_terms)} terms. Join terms "
                "in one call (cat their residuals, each times the root of its weight), take one backward for each "
                "step, or choose inverse=Cholesky(), which keeps one pair of factors for all."
            )
        self.of_terms[stats.term].accumulate(stats)

    def members(self) -> Mapping[str, FactorPair]:
        return {f"term{number}": pair for number, pair in enumerate(self.of_terms)}

    def sides(self) -> Sequence[tuple[Factor | None, Factor | None]]:
        return [(pair.a, pair.g) for pair in self.of_terms]


def make_pair(spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> FactorPair:
    """Return a pair that has seen nothing."""
    kind = OpposedPair if spec.opposed else FactorPair
    return kind(spec, dtype=dtype, device=device)


def _mean_eigenvalue(factor: Factor | None, device: torch.device) -> Tensor:
    """Return the mean eigenvalue of all blocks of the factor, `[]`; 1 for the identity."""
    return torch.ones((), device=device) if factor is None else factor.trace().mean() / factor.dim


def _divide(left: Tensor, right: Tensor) -> Tensor:
    """Return the quotient, and 0 where the divisor is 0."""
    return torch.where(right > 0, left / right, 0.0)


def _mix(factors: Sequence[Factor | None], weights: Sequence[Tensor]) -> Tensor:
    """Return `Σ weight · average`, packed; all factors are there."""
    mixed: Tensor | None = None
    for factor, weight in zip(factors, weights, strict=True):
        assert factor is not None
        part = factor.packed * weight.to(factor.dtype)
        mixed = part if mixed is None else mixed + part
    assert mixed is not None
    return mixed
