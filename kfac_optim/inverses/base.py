"""What an inverse representation must provide, and what those that solve for a pair of factors have in common."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kfac_optim.damping import factored_tikhonov
from kfac_optim.factors import Factor
from kfac_optim.layers.base import LayerStatistics
from kfac_optim.linalg import eigendecomposition
from kfac_optim.pairs import make_pair
from kfac_optim.specs import Cost, LayerSpec, Structure

S = TypeVar("S")


class Inverse(ABC, Generic[S]):
    """A representation of a block's inverse curvature. Dear work (`refresh`) is apart from cheap (`apply`).

    The object holds choices only; what it measures is in the state `S` of each block, which it alone reads.
    """

    @property
    def squares_examples(self) -> bool:
        """Whether it squares sums over the positions of an example, which must then all be there."""
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
    def apply(self, state: S, grad: Tensor, damping: float) -> Tensor:
        """Precondition `[groups, out, in]`; `damping` is for representations that can change it without a refresh."""

    @abstractmethod
    def factors(self, state: S) -> tuple[Tensor | None, Tensor | None]:
        """The undamped running averages `(A, G)`; None stands for the identity."""

    @abstractmethod
    def setbacks(self, state: S) -> tuple[Tensor, Tensor]:
        """Samples refused in a row and refreshes failed in a row, up to now, each `[]` int64."""

    @abstractmethod
    def counters(self, state: S) -> dict[str, Tensor]:
        """Event counts and measures for `metrics()`, each `[]`."""

    @abstractmethod
    def flops(self, spec: LayerSpec) -> Cost:
        """Floating-point operations of `refresh` and `apply` for one block."""

    @abstractmethod
    def tensors(self, state: S) -> dict[str, Any]:
        """The state as a nested dict of tensors, for checkpoints; no copies."""

    @abstractmethod
    def load(self, state: S, tensors: Mapping[str, Any]) -> None:
        """Copy what `tensors` gave, of equal shapes, into `state`."""


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

    def measures(self) -> dict[str, Tensor]:
        """What was counted and measured, likewise."""
        return {
            "retried": self.retried,
            "failed": self.failed,
            "failed_in_a_row": self.failed_in_a_row,
            "condition": self.condition,
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

    def tensors(self, state: P) -> dict[str, Any]:
        return {"factors": state.pair.tensors(), **state.measures(), **state.results()}

    def load(self, state: P, tensors: Mapping[str, Any]) -> None:
        state.pair.load(tensors["factors"])
        for name, tensor in (state.measures() | state.results()).items():
            tensor.copy_(tensors[name])


@dataclass(frozen=True, slots=True, eq=False)
class FactorJob:
    """One factor to solve for, on side 0 (A) or 1 (G) of the block whose state takes the result."""

    state: PairState
    side: int
    factor: Factor

    def average(self) -> Tensor:
        """In the dtype of the computation."""
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
    """Jobs of one structure, size, dtype and device: what one batched call can take."""
    alike: defaultdict[tuple[Any, ...], list[J]] = defaultdict(list)
    for job in jobs:
        average = job.factor.average
        key = (job.factor.structure, average.shape[-1], job.state.condition.dtype, average.device)
        alike[key].append(job)
    for (structure, *_), equal in alike.items():
        yield structure, equal


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


# -- in the eigenbases of the factors ----------------------------------------------------------------------------

# Of an eigendecomposition, per d³ of one dense factor, on the scale where a Cholesky inverse is 1. Fewer are counted
# (about 9), but at a lower rate: 20-30 times as long on a GPU, 3.5-5 times on one CPU core (torch 2.13, float32, d from
# 64 to 1024).
EIGH_FLOPS = 25.0


class Spectrum(NamedTuple):
    """One factor as `basis · diag(values) · basisᵀ`."""

    values: Tensor
    """Eigenvalues, none negative, `[groups, d]`."""
    basis: Tensor | None
    """Eigenvectors as columns, `[groups, d, d]`; None for a diagonal factor, which is its own eigenvalues."""


class EigenState(PairState):
    """Factors of one block and their eigendecompositions.

    Attributes:
        a: of `A`, None for the identity.
        g: of `G`, None for the identity.
        solved: `[groups]` bool, whether any factor of the group was ever decomposed. Until then both stand as
            identities and λ does not count, so that the gradient comes back whatever λ is.
    """

    __slots__ = ("a", "g", "solved")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.a, self.g = (
            None if factor is None else _unit_spectrum(factor, self.condition.dtype)
            for factor in (self.pair.a, self.pair.g)
        )
        self.solved = torch.zeros(spec.groups, dtype=torch.bool, device=device)

    def results(self) -> dict[str, Tensor]:
        named = {"solved": self.solved}
        for name, spectrum in (("A", self.a), ("G", self.g)):
            if spectrum is not None:
                named[f"{name}_values"] = spectrum.values
                if spectrum.basis is not None:
                    named[f"{name}_basis"] = spectrum.basis
        return named

    def eigenvalues(self) -> Tensor:
        """`s_G s_Aᵀ`, `[groups, out, in]`; the axis of an identity factor has size 1."""
        return outer(
            None if self.g is None else self.g.values, None if self.a is None else self.a.values, like=self.condition
        )

    def turned(self, side: int, basis: Tensor) -> None:
        """Told that the basis of side 0 (A) or 1 (G) is about to become `basis` `[groups, d, d]`."""


E = TypeVar("E", bound=EigenState)


class EigenbasisInverse(PairInverse[E]):
    """A representation that divides the gradient by one number for each pair of eigenvectors of `A` and `G`."""

    def refresh(self, states: Sequence[E], dampings: Sequence[float]) -> None:
        for structure, equal in batches(job for state in states for job in _eigen_jobs(state)):
            if structure is Structure.DENSE:
                self.decompose(equal)
            else:
                _take_diagonal(equal)
        for state, damping in zip(states, dampings, strict=True):
            _measure_condition(state, damping)

    def decompose(self, jobs: "list[EigenJob]") -> None:
        """Give each of the dense factors, all of one size, its new basis and eigenvalues."""
        decompose_fully(jobs)

    def damped(self, state: E, damping: float) -> Tensor:
        """What to divide by in the eigenbasis, `[groups, out, in]` or of size 1 along an axis."""
        values = state.eigenvalues()
        return values + (state.solved.to(values.dtype) * damping)[:, None, None]

    def apply(self, state: E, grad: Tensor, damping: float) -> Tensor:
        a, g = state.a, state.g
        grad = grad.to(state.condition.dtype)
        if g is not None and g.basis is not None:
            grad = g.basis.mT @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis
        grad = grad / self.damped(state, damping)
        if g is not None and g.basis is not None:
            grad = g.basis @ grad
        if a is not None and a.basis is not None:
            grad = grad @ a.basis.mT
        return grad


def outer(g_values: Tensor | None, a_values: Tensor | None, *, like: Tensor) -> Tensor:
    """`g aᵀ` of values `[groups, d]`, in the dtype of `like`; None stands for the identity, whose axis has size 1."""
    values = torch.ones((), dtype=like.dtype, device=like.device)
    if g_values is not None:
        values = values * g_values.unsqueeze(-1)
    if a_values is not None:
        values = values * a_values.unsqueeze(-2)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class EigenJob(FactorJob):
    """Where the decomposition goes."""

    state: EigenState
    spectrum: Spectrum

    def keep(self, values: Tensor, basis: Tensor | None, attempts: Tensor) -> Tensor:
        """Take the groups that are usable, `[groups]` bool, and leave the others at their last good decomposition.

        Args:
            values: `[groups, d]`.
            basis: `[groups, d, d]`, None for a diagonal factor.
            attempts: `[groups]`, 0 where all failed.
        """
        usable = self.settle(attempts)
        old_values, old_basis = self.spectrum
        old_values.copy_(torch.where(usable[:, None], values.clamp(min=0), old_values))
        if basis is not None and old_basis is not None:
            basis = torch.where(usable[:, None, None], basis, old_basis)
            self.state.turned(self.side, basis)
            old_basis.copy_(basis)
        self.state.solved.logical_or_(usable)
        return usable


def decompose_fully(jobs: Sequence[EigenJob]) -> list[Tensor]:
    """Stack every group of every job into one batch, decompose, and hand the parts back.

    Returns:
        Of each job, whether the decomposition of each group was taken, `[groups]` bool.
    """
    whole = eigendecomposition(torch.cat([job.average() for job in jobs]))
    return hand_back(jobs, whole)


def hand_back(jobs: Sequence[EigenJob], whole: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Split values `[n, d]`, bases `[n, d, d]` and attempts `[n]` of all groups of all jobs; see `EigenJob.keep`."""
    sizes = [job.factor.average.shape[0] for job in jobs]
    parts = (torch.split(part, sizes) for part in whole)
    return [job.keep(values, basis, tries) for job, values, basis, tries in zip(jobs, *parts, strict=True)]


def _eigen_jobs(state: EigenState) -> list[EigenJob]:
    sides = ((state.pair.a, state.a), (state.pair.g, state.g))
    return [
        EigenJob(state, side, factor, spectrum)
        for side, (factor, spectrum) in enumerate(sides)
        if factor is not None and spectrum is not None
    ]


def _take_diagonal(jobs: Sequence[EigenJob]) -> None:
    for job in jobs:
        values = job.average()
        job.keep(values, None, values.isfinite().all(-1).long())


def _measure_condition(state: EigenState, damping: float) -> None:
    present = [(side, spectrum.values) for side, spectrum in enumerate((state.a, state.g)) if spectrum is not None]
    traces = [values.sum(-1) for _, values in present]
    shares = factored_tikhonov(traces, [values.shape[-1] for _, values in present], damping)
    for (side, values), share in zip(present, shares, strict=True):
        damped = values * share.scale[:, None] + share.shift[:, None]
        state.condition[side] = (damped.amax(-1) / damped.amin(-1)).max()


def _unit_spectrum(factor: Factor, dtype: torch.dtype) -> Spectrum:
    """The identity's."""
    average = factor.average
    ones = torch.ones(average.shape[:2], dtype=dtype, device=average.device)
    return Spectrum(ones, torch.diag_embed(ones) if factor.structure is Structure.DENSE else None)
