"""What an inverse representation must provide, and the pair of factors that most of them keep."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors import Factor
from kfac_optim.layers.base import LayerStatistics
from kfac_optim.specs import Cost, LayerSpec, Structure

S = TypeVar("S")


class Inverse(ABC, Generic[S]):
    """A representation of a block's inverse curvature. Dear work (`refresh`) is apart from cheap (`apply`).

    The object holds choices only; what it measures is in the state `S` of each block, which it alone reads.
    """

    @abstractmethod
    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> S:
        """A state that has seen nothing; applying it gives the gradient back."""

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
    def fold(self, state: S, loss_terms: float, decay: float) -> None:
        """Take the sums of this step into the running averages.

        Non-finite sums are refused and counted in the state.

        Args:
            state: of one block.
            loss_terms: `M`, the terms that the mean in the loss runs over; 1 for a summed loss.
            decay: of the old average, over all optimizer steps since the last fold.
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


class FactorPair:
    """`A` and `G` of one block, and the rows behind the pending sum of `A`.

    Attributes:
        a: input factor, or None for the identity.
        g: output factor, or None for the identity.
        rows: rows accumulated since the last fold; a device scalar where only the device knows how many count.
        refused: non-finite samples refused so far, `[]` int64.
    """

    __slots__ = ("a", "g", "refused", "rows")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.a, self.g = (
            None if structure is Structure.IDENTITY else Factor(spec.groups, dim, structure, dtype=dtype, device=device)
            for structure, dim in zip(spec.structure, (spec.in_dim, spec.out_dim), strict=True)
        )
        self.rows: int | Tensor = 0
        self.refused = torch.zeros((), dtype=torch.int64, device=device)

    def accumulate(self, stats: LayerStatistics) -> None:
        count = stats.count
        if self.a is not None and _counts(count):
            self.a.add(stats.input_moment(self.a.structure))
        if self.g is not None:
            self.g.add(stats.output_moment(self.g.structure))
        self.rows = self.rows + count

    def has_pending(self) -> bool:
        """Whether anything was accumulated since the last fold."""
        return _counts(self.rows)

    def fold(self, loss_terms: float, decay: float) -> None:
        """`A = Σ a aᵀ / rows` weighing its rows, `G = M Σ g gᵀ` weighing `M`."""
        present = [factor for factor in (self.a, self.g) if factor is not None]
        accept = torch.stack([factor.pending_is_finite() for factor in present]).all()
        if self.a is not None:
            # Rows that only the device could count may turn out to be none.
            rows = self.rows.clamp(min=1) if isinstance(self.rows, Tensor) else self.rows
            self.a.fold(scale=1 / rows, mass=self.rows, decay=decay, accept=accept)
        if self.g is not None:
            self.g.fold(scale=loss_terms, mass=loss_terms, decay=decay, accept=accept)
        self.refused += ~accept
        self.rows = 0

    def discard(self) -> None:
        for factor in (self.a, self.g):
            if factor is not None:
                factor.pending = None
        self.rows = 0

    def held(self) -> Tensor:
        """`[]` bool: whether any sample was ever accepted."""
        present = [factor for factor in (self.a, self.g) if factor is not None]
        return torch.stack([factor.mass > 0 for factor in present]).all()

    def tensors(self) -> dict[str, Any]:
        nested: dict[str, Any] = {"refused": self.refused}
        for name, factor in (("A", self.a), ("G", self.g)):
            if factor is not None:
                nested[name] = factor.tensors()
        return nested

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.refused.copy_(tensors["refused"])
        for name, factor in (("A", self.a), ("G", self.g)):
            if factor is not None:
                factor.load(tensors[name])
        self.discard()


def _counts(rows: int | Tensor) -> bool:
    """Whether there may be rows: a number on the device is not waited for."""
    return isinstance(rows, Tensor) or rows > 0
