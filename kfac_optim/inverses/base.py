"""What an inverse of the damped Fisher block must provide."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.specs import Cost, LayerSpec, Part
from kfac_optim.utils.tensor_storage import copy_held

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
        """Give the dtype in which `apply` computes; None is that of the factors, but at least float32.

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
        """Tell what the tensors of a checkpoint can be, nested like `tensors`, by rules of `utils.value_checks`.

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
