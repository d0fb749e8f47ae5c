"""Inverses that keep `A` and `G` as they are, and solve for each."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import make_pair
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.state import InverseState
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held

# Of an eigendecomposition, per d³ of one dense factor, on the scale where a Cholesky inverse is 1. Fewer are counted
# (about 9), but at a lower rate: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13, float32, d from
# 64 to 1024).
EIGH_FLOPS = 25.0


class PairState(InverseState):
    """Holds the factors of one block, and what is counted and measured as they are solved for.

    Subclasses hold what a refresh computes, and name it in `computed` and `results`.

    Attributes:
        pair: the running averages.
        retried: matrices that were solved only in a later attempt, `[]` int64.
        failed: matrices that were given up and kept their old result, `[]` int64.
        failed_in_a_row: refreshes in a row in which a matrix of that side was given up, `[2]` int64 for A and G.
        condition: largest condition number of the damped factors at the last refresh, `[2]` for A and G; in the
            dtype of all computations, at least float32.
    """

    __slots__ = ("condition", "failed", "failed_in_a_row", "pair", "retried")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.pair = make_pair(spec, dtype=dtype, device=device)
        self.retried = torch.zeros((), dtype=torch.int64, device=device)
        self.failed = torch.zeros((), dtype=torch.int64, device=device)
        self.failed_in_a_row = torch.zeros(2, dtype=torch.int64, device=device)
        self.condition = torch.ones(2, dtype=torch.promote_types(dtype, torch.float32), device=device)

    @abstractmethod
    def computed(self) -> dict[str, Tensor]:
        """Return what `refresh` computed, by its name in checkpoints; no copies."""

    def counted(self) -> dict[str, Tensor]:
        """Return what was counted and measured, by its name in checkpoints; no copies."""
        return {
            "retried": self.retried,
            "failed": self.failed,
            "failed_in_a_row": self.failed_in_a_row,
            "condition": self.condition,
        }

    def accumulate(self, stats: LayerStatistics) -> None:
        self.pair.accumulate(stats)

    def has_pending(self) -> bool:
        return self.pair.has_pending()

    def discard(self) -> None:
        self.pair.discard()

    def has_statistics(self) -> bool:
        return bool(self.pair.held())

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        self.pair.fold(loss_terms, decay, loss_scale)

    def averages(self, part: str) -> tuple[Factor, ...]:
        return self.pair.averages(part)

    def merge(self, part: str, others: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().merge(part, others)
        self.pair.combine()

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        self.pair.age(decay, loss_terms)

    def measures(self, part: str) -> tuple[Tensor, ...]:
        side = side_of(part)
        return self.condition[side], self.failed_in_a_row[side]

    def adopt(self, shadow: Self) -> None:
        theirs = shadow.counted() | shadow.computed()
        for name, tensor in (self.counted() | self.computed()).items():
            copy_held(tensor, theirs[name])

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        a, g = self.pair.a, self.pair.g
        return (None if a is None else a.average), (None if g is None else g.average)

    def setbacks(self) -> tuple[Tensor, Tensor]:
        return self.pair.refused_in_a_row, self.failed_in_a_row.max()

    def counters(self) -> dict[str, Tensor]:
        return {
            "refused_statistics": self.pair.refused,
            "retried_refreshes": self.retried,
            "failed_refreshes": self.failed,
            "condition_A": self.condition[0],
            "condition_G": self.condition[1],
        }

    def tensors(self) -> dict[str, Any]:
        return {"factors": self.pair.tensors(), **self.counted(), **self.computed()}

    def ranges(self) -> dict[str, Any]:
        return {
            "factors": self.pair.ranges(),
            "retried": value_checks.not_negative,
            "failed": value_checks.not_negative,
            "failed_in_a_row": value_checks.not_negative,
            "condition": value_checks.measured,
        }

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.pair.load(tensors["factors"])
        for name, tensor in (self.counted() | self.computed()).items():
            copy_held(tensor, tensors[name])


def side_of(part: str) -> slice | int:
    """Return the index of what belongs to one part of a block, in tensors `[2]` for A and G."""
    return slice(None) if part == "" else "AG".index(part)


P = TypeVar("P", bound=PairState)


class PairInverse(Inverse[P]):
    """Keeps `A` and `G` as they are, and solves for each."""

    @property
    def damps_jointly(self) -> bool:
        """Return whether a factor is solved for without a look at the other: then λ is not shared among them."""
        return False

    @abstractmethod
    def result(self, factor: FactorShape) -> tuple[int, int]:
        """Return numbers of what is computed for one factor: as it is sent to other ranks, and as kept, flags aside."""

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        a, g = spec.factors()
        sides = [(name, factor) for name, factor in (("A", a), ("G", g)) if factor.structure is not Structure.IDENTITY]
        results = [self.result(factor) for _, factor in sides]
        if len(sides) == 1 or spec.opposed:  # an opposed use weighs both sides by one another
            sums = tuple(factor for _, factor in sides)
            sent, held = (sum(numbers) for numbers in zip(*results, strict=True))
            if spec.opposed:
                sums += tuple(f for f in spec.transposed().factors() if f.structure is not Structure.IDENTITY)
                held += sum(factor.packed for _, factor in sides)
            return (Part("", self.flops(spec).refresh, sums, sent, held),)
        identity = Structure.IDENTITY
        alone = (
            replace(spec, structure=(spec.structure[0], identity)),
            replace(spec, structure=(identity, spec.structure[1])),
        )
        return tuple(
            Part(name, self.flops(lone).refresh, (factor,), *result, traces=0 if self.damps_jointly else other.groups)
            for (name, factor), (_, other), lone, result in zip(sides, reversed(sides), alone, results, strict=True)
        )


def dense_sides(spec: LayerSpec) -> list[tuple[int, int]]:
    """Return size, and number of groups, of each factor that is dense."""
    return [(dim, groups) for kept, groups, dim in spec.factors() if kept is Structure.DENSE]


def dense_flops(spec: LayerSpec, per_cube: float, products: int) -> Cost:
    """Give the cost of a refresh of `per_cube · d³` for each dense factor, and of `products` products to apply each."""
    sides = dense_sides(spec)
    return Cost(
        refresh=per_cube * sum(groups * float(dim) ** 3 for dim, groups in sides),
        apply=products * 2.0 * spec.groups * spec.in_dim * spec.out_dim * sum(dim for dim, _ in sides),
    )
