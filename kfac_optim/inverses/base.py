"""What an inverse representation must provide, and what those that solve for a pair of factors have in common."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from kfac_optim import ranges
from kfac_optim.factors import Factor
from kfac_optim.layers.base import LayerStatistics
from kfac_optim.memory import copy_held
from kfac_optim.pairs import make_pair
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure

S = TypeVar("S")


class Result(NamedTuple):
    """One tensor that `refresh` computed, as others need it."""

    tensor: Tensor
    symmetric: bool = False
    """Whether it is made of symmetric matrices `[groups, d, d]`, of which one triangle says all."""
    measuring: bool = False
    """Whether it is needed to take statistics."""


class Inverse(ABC, Generic[S]):
    """A representation of a block's inverse curvature. Dear work (`refresh`) is apart from cheap (`apply`).

    The object holds choices only; what it measures is in the state `S` of each block, which it alone reads.
    """

    @property
    def squares_examples(self) -> bool:
        """Whether it squares sums over the positions of an example, which must then all be there."""
        return False

    @property
    def follows_damping(self) -> bool:
        """Whether `apply` damps by the λ it is given, so that a λ which moves needs no refresh."""
        return False

    def factor_dims(self, spec: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the matrices whose Kronecker product stands for a dense `A`, and for a dense `G`.

        Asked of a layer as its adapter describes it, before factors that are too wide are kept in another form.
        """
        return (spec.in_dim,), (spec.out_dim,)

    @abstractmethod
    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> S:
        """A state that has seen nothing; applying it gives the gradient back.

        Args:
            spec: of the layer, by blocks (`LayerSpec.by_blocks`): these are groups here.
            dtype: of the factors.
            device: of the parameters.
        """

    @abstractmethod
    def accumulate(self, state: S, stats: LayerStatistics) -> None:
        """Add one call's moments to the raw sums of this step. Runs inside backward."""

    @abstractmethod
    def has_pending(self, state: S) -> bool:
        """Whether anything was accumulated since the last fold."""

    @abstractmethod
    def discard(self, state: S) -> None:
        """Forget what was accumulated since the last fold."""

    @abstractmethod
    def has_statistics(self, state: S) -> bool:
        """Whether any sample was ever accepted. Synchronises; asked only until the first yes."""

    @abstractmethod
    def fold(self, state: S, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        """Take the sums of this step into the running averages.

        Non-finite sums are refused and counted in the state.

        Args:
            state: of one block.
            loss_terms: `M`, the terms that the mean in the loss runs over; 1 for a summed loss.
            decay: of the old average, over all optimizer steps since the last fold.
            loss_scale: what the output gradients are multiplied by, against those of the loss as the user wrote it.
        """

    @abstractmethod
    def refresh(self, states: Sequence[S], dampings: Sequence[float]) -> None:
        """Recompute the inverses of blocks that share this representation, equal shapes batched.

        A block whose computation fails keeps its last good inverse and counts the failure in its state.
        """

    @abstractmethod
    def adopt(self, state: S, shadow: S) -> None:
        """Take over what `refresh` computed, counted and measured in `shadow`, a copy of `state` as it was then.

        What was folded into `state` since stays. It was not itself refreshed meanwhile, so that no event counts twice.
        """

    @abstractmethod
    def apply(self, state: S, grad: Tensor, damping: float) -> Tensor:
        """Precondition `[groups, out, in]`; `damping` is for those that follow it (`follows_damping`).

        The result is a new tensor, in at least float32; but in `applied_dtype` where `grad` is.
        """

    def applied_dtype(self, state: S) -> torch.dtype | None:
        """In which `apply` computes, whatever it is given; None is that of the factors, but at least float32.

        `grad` is best made in it: to be cast afterwards takes another pass over all parameters.
        """
        return None

    @abstractmethod
    def factors(self, state: S) -> tuple[Tensor | None, Tensor | None]:
        """The undamped running averages `(A, G)`, not to be written to; None stands for the identity."""

    @abstractmethod
    def setbacks(self, state: S) -> tuple[Tensor, Tensor]:
        """Samples refused in a row and refreshes failed in a row, up to now, each `[]` int64."""

    @abstractmethod
    def counters(self, state: S) -> dict[str, Tensor]:
        """Event counts and measures for `metrics()`, each `[]`."""

    @abstractmethod
    def flops(self, spec: LayerSpec) -> Cost:
        """Floating-point operations of `refresh` and `apply` for one block; `spec` as `init` gets it."""

    @abstractmethod
    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """What of one block's inverse can be recomputed apart; their operations add up to those of `flops`."""

    # What several processes need. Each folds its own samples. Before a refresh the averages of all go to the rank that
    # recomputes the part, which merges them, and the others start anew; after it the results go to whom they concern.

    def averages(self, state: S, part: str) -> tuple[Factor, ...]:
        """The running averages behind one of `parts`, by its name, in the order of its `sums`."""
        self._refuse_sharing()

    def merge(self, state: S, part: str, others: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take in what other ranks measured for one part: for each of `averages` what `Factor.merge` gets."""
        for factor, (total, mass) in zip(self.averages(state, part), others, strict=True):
            factor.merge(total, mass)

    def age(self, state: S, decay: float, loss_terms: float | Tensor = 0) -> None:
        """A fold without a sample, where other ranks had some: all that is held weighs less.

        Args:
            state: of one block.
            decay: as in `fold`.
            loss_terms: of this rank. Their gradients at the layer are zero, which is what they add to `G`.
        """
        self._refuse_sharing()

    def results(self, state: S, part: str) -> tuple[Result, ...]:
        """What a rank that did not recompute the part needs to apply it, or to take statistics; no copies.

        A rank that does neither may drop their memory (`memory.drop`): what is measured does not read them.
        """
        self._refuse_sharing()

    def measures(self, state: S, part: str) -> tuple[Tensor, ...]:
        """What only the rank that recomputes the part counted and measured of it; no copies.

        Checkpoints of a block whose parts have several owners bring it together.
        """
        return ()

    def take(self, state: S, part: str, received: Mapping[int, Tensor]) -> None:
        """Take over results of another rank, or its own as the others got them.

        Flags only ever turn true: parts that have one in common may come from different ranks.

        Args:
            state: of one block.
            part: by its name.
            received: by their index in `results`, in the shape of the tensors there, and any dtype that holds numbers;
                some may be missing.
        """
        results = self.results(state, part)
        for index, tensor in received.items():
            kept = results[index].tensor
            if kept.dtype != torch.bool:
                copy_held(kept, tensor)
            elif not kept.is_meta:
                kept.logical_or_(tensor != 0)

    def _refuse_sharing(self) -> NoReturn:
        raise NotImplementedError(
            f"kfac_optim: the inverses of {type(self).__name__} cannot be shared among processes. Write its methods "
            f"averages(), age() and results(), see kfac_optim.Inverse, or choose another representation."
        )

    @abstractmethod
    def tensors(self, state: S) -> dict[str, Any]:
        """The state as a nested dict of tensors, for checkpoints; copies only of what would be in it twice."""

    def ranges(self, state: S) -> dict[str, Any]:
        """Tell what the tensors of a checkpoint can be, nested like `tensors`, by rules of `kfac_optim.ranges`.

        A checkpoint with others is refused. What is left out has to be finite.
        """
        return {}

    def held(self, state: S) -> dict[str, Any]:
        """`tensors` without the copies: what takes memory between two steps."""
        return self.tensors(state)

    @abstractmethod
    def load(self, state: S, tensors: Mapping[str, Any]) -> None:
        """Copy what `tensors` gave, of equal shapes, into `state`, but for results that have no memory.

        What was accumulated since the last fold stays.
        """


# Of an eigendecomposition, per d³ of one dense factor, on the scale where a Cholesky inverse is 1. Fewer are counted
# (about 9), but at a lower rate: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13, float32, d from
# 64 to 1024).
EIGH_FLOPS = 25.0

# Elements of the matrices that one batched call takes: 256 MiB of float32.
_AT_ONCE = 2**26


class InverseRule(ABC):
    """Chooses the representation of each block, where one is not given by name.

    Choices that are equal and hash alike (as frozen dataclasses are and do) are refreshed together.
    """

    @abstractmethod
    def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
        """The representation of one block.

        Args:
            spec: of the block; its structure is what is wished for, whatever the sizes.
            max_factor_dim: sides of which no wider matrix can be kept are made diagonal.
            channels: of the feature map that the layer reads flattened, where that is known.
        """


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
        """Of these what other ranks need of one part, in a fixed order."""

    def measures(self) -> dict[str, Tensor]:
        """What it counted and measured, likewise."""
        return {
            "retried": self.retried,
            "failed": self.failed,
            "failed_in_a_row": self.failed_in_a_row,
            "condition": self.condition,
        }

    def ranges(self) -> dict[str, ranges.Rule]:
        """Tell what `measures` and `results` can be, by the names there."""
        return {
            "retried": ranges.not_negative,
            "failed": ranges.not_negative,
            "failed_in_a_row": ranges.not_negative,
            "condition": ranges.measured,
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


@dataclass(frozen=True, slots=True, eq=False)
class FactorJob:
    """One factor to solve for, on side 0 (A) or 1 (G) of the block whose state takes the result."""

    state: PairState
    side: int
    factor: Factor

    def average(self) -> Tensor:
        """In the dtype of the computation; of a dense factor it is unpacked at each call."""
        return self.factor.average.to(self.state.condition.dtype)

    def settle(self, attempts: Tensor) -> Tensor:
        """Count what came of each group; `[groups]` bool, whether its new result replaces the old one.

        Args:
            attempts: that each group took, `[groups]`; 0 where all failed.
        """
        failed, in_a_row = attempts == 0, self.state.failed_in_a_row
        self.state.failed += failed.sum()
        in_a_row[self.side] = torch.where(failed.any(), in_a_row[self.side] + 1, 0)
        self.state.retried += (attempts > 1).sum()
        return (attempts > 0) & self.state.pair.held()


J = TypeVar("J", bound=FactorJob)


def batches(jobs: Iterable[J]) -> Iterator[tuple[Structure, list[J]]]:
    """Jobs of one structure, size, dtype and device: what one batched call can take.

    No more than make `_AT_ONCE` elements of full matrices, or one job that has more: what a refresh needs besides what
    it leaves is so much a few times over, however many layers are alike.
    """
    alike: defaultdict[tuple[Any, ...], list[J]] = defaultdict(list)
    for job in jobs:
        factor = job.factor
        alike[factor.structure, factor.dim, job.state.condition.dtype, factor.device].append(job)
    for (structure, dim, *_), equal in alike.items():
        batch, matrices = [equal[0]], equal[0].factor.groups
        for job in equal[1:]:
            if (matrices + job.factor.groups) * dim**2 > _AT_ONCE:
                yield structure, batch
                batch, matrices = [], 0
            batch.append(job)
            matrices += job.factor.groups
        yield structure, batch


def dense_sides(spec: LayerSpec) -> list[tuple[int, int]]:
    """Size, and number of groups, of each factor that is dense."""
    return [(dim, groups) for kept, groups, dim in spec.factors() if kept is Structure.DENSE]


def dense_flops(spec: LayerSpec, per_cube: float, products: int) -> Cost:
    """Of a refresh that takes `per_cube · d³` for each dense factor, and `products` matrix products to apply each."""
    sides = dense_sides(spec)
    return Cost(
        refresh=per_cube * sum(groups * float(dim) ** 3 for dim, groups in sides),
        apply=products * 2.0 * spec.groups * spec.in_dim * spec.out_dim * sum(dim for dim, _ in sides),
    )
