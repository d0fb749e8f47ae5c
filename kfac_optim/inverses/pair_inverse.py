"""Inverses that keep `A` and `G` as they are, and solve for each."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair, of_part
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.several_pairs import make_pair
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.state import InverseState, Result
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held

# The cost of an eigendecomposition per d³ of one dense factor, where a Cholesky inverse costs 1. It takes only about 9
# times the operations, but runs more slowly: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13,
# float32, d from 64 to 1024).
EIGH_FLOPS = 25.0


# What the tensors of a side may be, by the names of their fields.
_RANGES = {
    "inverse": value_checks.positive_matrix,
    "values": value_checks.not_negative,
    "basis": value_checks.unit_vectors,
    "weights": value_checks.share,
    "scale": value_checks.not_negative,
    "root": value_checks.positive_matrix,
    "root_weights": value_checks.share,
    "root_scale": value_checks.not_negative,
    "ratios": value_checks.not_negative,
}


class SymmetricInverse(NamedTuple):
    """Represents the inverse of one damped factor by itself."""

    inverse: Tensor
    """`[groups, d, d]`, or `[groups, d]` for a diagonal factor."""


class SymmetricPowers(NamedTuple):
    """Holds the inverse of one damped factor, and the root of that."""

    inverse: Tensor
    """`[groups, d, d]`, or `[groups, d]` for a diagonal factor."""
    root: Tensor
    """The inverse root, in the same shape."""


S = TypeVar("S", bound=NamedTuple)


class PairState(InverseState, Generic[S]):
    """Holds the factors of one block, what a refresh computes of each, and what is counted and measured as it does.

    What is computed of one factor is a named tuple of tensors, or None for those that a diagonal factor has not. The
    names of its fields are those in checkpoints, behind `A_` or `G_`.

    Attributes:
        pair: the running averages.
        a: what the last refresh computed of `A`; None for the identity.
        g: what the last refresh computed of `G`; None for the identity.
        retried: matrices that were solved only in a later attempt, `[]` int64.
        failed: matrices that were given up and kept their old result, `[]` int64.
        failed_in_a_row: refreshes in a row in which a matrix of that side was given up, `[2]` int64 for A and G.
        condition: largest condition number of the damped factors at the last refresh, `[2]` for A and G; in the
            dtype of all computations, at least float32.
    """

    def __init__(
        self,
        spec: LayerSpec,
        start: Callable[[Factor, torch.dtype], S],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the state of a block that was never refreshed.

        Args:
            spec: its layer.
            start: returns what stands for a factor before its first refresh, in the dtype of all computations.
            dtype: the dtype of the running averages.
            device: the device of the block's parameters.
        """
        self.pair = make_pair(spec, dtype=dtype, device=device)
        self.retried = torch.zeros((), dtype=torch.int64, device=device)
        self.failed = torch.zeros((), dtype=torch.int64, device=device)
        self.failed_in_a_row = torch.zeros(2, dtype=torch.int64, device=device)
        self.condition = torch.ones(2, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.a, self.g = (
            None if factor is None else start(factor, self.condition.dtype) for factor in (self.pair.a, self.pair.g)
        )

    def stacked(self, others: Sequence[Self]) -> Self | None:
        whole = copy.copy(self)
        whole.a = _joined([self.a, *(each.a for each in others)])
        whole.g = _joined([self.g, *(each.g for each in others)])
        return whole

    def to_stack(self) -> list[Tensor]:
        sides = (self.a or ()), (self.g or ())
        return [tensor for side in sides for tensor in side if tensor is not None]

    def side(self, index: int) -> S:
        """Return what is computed of `A` (0) or `G` (1), which is not the identity."""
        side = (self.a, self.g)[index]
        assert side is not None, "the identity is not solved for"
        return side

    def computed(self) -> dict[str, Tensor]:
        """Return what `refresh` computed, by its name in checkpoints; no copies."""
        sides = [(name, side) for name, side in (("A", self.a), ("G", self.g)) if side is not None]
        return {f"{name}_{field}": tensor for name, side in sides for field, tensor in _tensors(side)}

    def results(self, part: str) -> tuple[Result, ...]:
        return tuple(
            Result(tensor, symmetric=isinstance(side, SymmetricInverse | SymmetricPowers) and tensor.dim() == 3)
            for side in of_part(part, self.a, self.g)
            for _, tensor in _tensors(side)
        )

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

    def to_fold(self) -> FactorPair | None:
        return self.pair if type(self).fold is PairState.fold else None

    def averages(self, part: str) -> tuple[Factor, ...]:
        return self.pair.averages(part)

    def merge(self, part: str, others: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().merge(part, others)
        self.pair.combine()

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        self.pair.age(decay, loss_terms)

    def counts(self, loss_terms: float | Tensor, loss_scale: float | Tensor) -> Tensor | None:
        return self.pair.counts(loss_terms, loss_scale)

    def tell(self, everywhere: Tensor) -> None:
        self.pair.tell(everywhere)

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
            **dict.fromkeys(self.counted(), value_checks.not_negative),
            "condition": value_checks.measured,
            **{f"{side}_{field}": rule for side in "AG" for field, rule in _RANGES.items()},
        }

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.pair.load(tensors["factors"])
        for name, tensor in (self.counted() | self.computed()).items():
            copy_held(tensor, tensors[name])


def _joined(sides: Sequence[Any]) -> Any:
    """Concatenate the tensors of one side of several blocks along their groups."""
    if sides[0] is None:
        return None
    return type(sides[0])(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*sides, strict=True)))


def _tensors(side: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each field that is not None."""
    return ((field, tensor) for field, tensor in side._asdict().items() if tensor is not None)


def side_of(part: str) -> slice | int:
    """Return the index of what belongs to one part of a block, in tensors `[2]` for A and G."""
    return slice(None) if part == "" else "AG".index(part)


P = TypeVar("P", bound=PairState[Any])


class PairInverse(Inverse[P]):
    """Keeps `A` and `G` as they are, and solves for each."""

    damps_jointly = False
    """Whether a factor is solved for without a look at the other: then λ is not shared among them."""

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
    return [(dim, groups) for kept, groups, dim, _ in spec.factors() if kept is Structure.DENSE]


def dense_flops(spec: LayerSpec, per_cube: float, products: int) -> Cost:
    """Give the cost of a refresh of `per_cube · d³` for each dense factor, and of `products` products to apply each."""
    sides = dense_sides(spec)
    return Cost(
        refresh=per_cube * sum(groups * float(dim) ** 3 for dim, groups in sides),
        apply=products * 2.0 * spec.groups * spec.in_dim * spec.out_dim * sum(dim for dim, _ in sides),
    )
