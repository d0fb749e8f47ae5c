"""Inverses that keep `A` and `G` as they are, and solve for each."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import make_pair
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.inverses.base import Inverse, Result
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held

# Of an eigendecomposition, per d³ of one dense factor, on the scale where a Cholesky inverse is 1. Fewer are counted
# (about 9), but at a lower rate: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13, float32, d from
# 64 to 1024).
EIGH_FLOPS = 25.0


class PairState(ABC):
    """Factors of one block, and what is counted and measured as they are solved for.

    Attributes:
        pair: the running averages.
        retried: matrices that were solved only in a later attempt, `[]` int64.
        failed: matrices given up, whose old result was kept, `[]` int64.
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
    def results(self) -> dict[str, Tensor]:
        """What `refresh` computed, by its name in checkpoints; no copies."""

    @abstractmethod
    def shared(self, part: str) -> tuple[Result, ...]:
        """Give those results that other ranks need of one part, in a fixed order."""

    def measures(self) -> dict[str, Tensor]:
        """What it counted and measured, likewise."""
        return {
            "retried": self.retried,
            "failed": self.failed,
            "failed_in_a_row": self.failed_in_a_row,
            "condition": self.condition,
        }

    def ranges(self) -> dict[str, value_checks.Rule]:
        """Tell what `measures` and `results` can be, by the names there."""
        return {
            "retried": value_checks.not_negative,
            "failed": value_checks.not_negative,
            "failed_in_a_row": value_checks.not_negative,
            "condition": value_checks.measured,
        }


P = TypeVar("P", bound=PairState)


class PairInverse(Inverse[P]):
    """A representation that keeps `A` and `G` as they are and solves for each: all but refreshing and applying."""

    def accumulate(self, state: P, stats: LayerStatistics) -> None:
        state.pair.accumulate(stats)

    def has_pending(self, state: P) -> bool:
        return state.pair.has_pending()

    def discard(self, state: P) -> None:
        state.pair.discard()

    def has_statistics(self, state: P) -> bool:
        return bool(state.pair.held())

    def fold(self, state: P, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        state.pair.fold(loss_terms, decay, loss_scale)

    def averages(self, state: P, part: str) -> tuple[Factor, ...]:
        return state.pair.averages(part)

    def merge(self, state: P, part: str, others: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().merge(state, part, others)
        state.pair.combine()

    def age(self, state: P, decay: float, loss_terms: float | Tensor = 0) -> None:
        state.pair.age(decay, loss_terms)

    def results(self, state: P, part: str) -> tuple[Result, ...]:
        return state.shared(part)

    def measures(self, state: P, part: str) -> tuple[Tensor, ...]:
        sides = slice(None) if part == "" else "AG".index(part)
        return state.condition[sides], state.failed_in_a_row[sides]

    def adopt(self, state: P, shadow: P) -> None:
        theirs = shadow.measures() | shadow.results()
        for name, tensor in (state.measures() | state.results()).items():
            copy_held(tensor, theirs[name])

    def factors(self, state: P) -> tuple[Tensor | None, Tensor | None]:
        a, g = state.pair.a, state.pair.g
        return (None if a is None else a.average), (None if g is None else g.average)

    def setbacks(self, state: P) -> tuple[Tensor, Tensor]:
        return state.pair.refused_in_a_row, state.failed_in_a_row.max()

    def counters(self, state: P) -> dict[str, Tensor]:
        return {
            "refused_statistics": state.pair.refused,
            "retried_refreshes": state.retried,
            "failed_refreshes": state.failed,
            "condition_A": state.condition[0],
            "condition_G": state.condition[1],
        }

    @property
    def damps_jointly(self) -> bool:
        """Whether a factor is solved for without a look at the other: λ is not shared among them."""
        return False

    @abstractmethod
    def result(self, factor: FactorShape) -> tuple[int, int]:
        """Numbers of what is computed for one factor: as it is sent to other ranks, and as kept, flags aside."""

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
            Part(
                name,
                self.flops(lone).refresh,
                (factor,),
                *result,
                traces=0 if self.damps_jointly else other.groups,
            )
            for (name, factor), (_, other), lone, result in zip(sides, reversed(sides), alone, results, strict=True)
        )

    def tensors(self, state: P) -> dict[str, Any]:
        return {"factors": state.pair.tensors(), **state.measures(), **state.results()}

    def ranges(self, state: P) -> dict[str, Any]:
        return {"factors": state.pair.ranges(), **state.ranges()}

    def load(self, state: P, tensors: Mapping[str, Any]) -> None:
        state.pair.load(tensors["factors"])
        for name, tensor in (state.measures() | state.results()).items():
            copy_held(tensor, tensors[name])


def dense_sides(spec: LayerSpec) -> list[tuple[int, int]]:
    """Size, and number of groups, of each factor that is dense."""
    return [(dim, groups) for kept, groups, dim in spec.factors() if kept is Structure.DENSE]


def dense_flops(spec: LayerSpec, per_cube: float, products: int) -> Cost:
    """Give the cost of a refresh of `per_cube · d³` for each dense factor, and of `products` products to apply each."""
    sides = dense_sides(spec)
    return Cost(
        refresh=per_cube * sum(groups * float(dim) ** 3 for dim, groups in sides),
        apply=products * 2.0 * spec.groups * spec.in_dim * spec.out_dim * sum(dim for dim, _ in sides),
    )
