"""What the state of an inverse must provide: the statistics of one block, and what was computed of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.linalg.triangles import pack_triangle, triangle_size, unpack_triangle
from kfac_optim.utils.tensor_storage import copy_held


class Result(NamedTuple):
    """Holds one tensor that `Inverse.refresh` computed, as other ranks need it."""

    tensor: Tensor
    symmetric: bool = False
    """Whether the tensor consists of symmetric matrices `[groups, d, d]`, of which one triangle says all."""
    measuring: bool = False
    """Whether statistics cannot be taken without the tensor."""

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Return the shape of what is sent: of a symmetric matrix one triangle."""
        shape = tuple(self.tensor.shape)
        return (*shape[:-2], triangle_size(shape[-1])) if self.symmetric else shape

    def packed(self) -> Tensor:
        """Return the tensor as it is sent."""
        return pack_triangle(self.tensor) if self.symmetric else self.tensor

    def unpacked(self, sent: Tensor) -> Tensor:
        """Return what was sent, in whatever shape, in the shape of the tensor."""
        sent = sent.view(self.sent_shape)
        return unpack_triangle(sent, self.tensor.shape[-1]) if self.symmetric else sent


class InverseState(ABC):
    """Holds the statistics of one block, and the results that an `Inverse` computes of them.

    A step accumulates moments while backward runs, and folds them into running averages at its end; a refresh makes
    results of the averages. A representation of your own needs the abstract methods; on several processes it needs
    `averages`, `age` and `results` as well.
    """

    # -- statistics --------------------------------------------------------------------------------------------

    @abstractmethod
    def accumulate(self, stats: LayerStatistics) -> None:
        """Add one call's moments to the raw sums of this step. Runs inside backward."""

    @abstractmethod
    def has_pending(self) -> bool:
        """Return whether anything was accumulated since the last fold."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was accumulated since the last fold."""

    def end_step(self) -> None:  # noqa: B027 (most have nothing to drop)
        """Drop what only the step that has ended needed; asked of representations that `takes_rows`."""

    def forget_step(self) -> None:  # noqa: B027 (most remember nothing of it)
        """Forget what is remembered of the direction of a step, as it was taken back."""

    @abstractmethod
    def has_statistics(self) -> bool:
        """Return whether any sample was ever accepted. Synchronises; asked only until the first yes."""

    @abstractmethod
    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        """Take the sums of this step into the running averages.

        Sums that are not finite are refused and counted.

        Args:
            loss_terms: `M`, the terms that the mean in the loss runs over; 1 for a summed loss.
            decay: what the old average is multiplied by, over all optimizer steps since the last fold.
            loss_scale: what the output gradients are multiplied by, against those of the loss as the user wrote it.
        """

    def to_fold(self) -> FactorPair | None:
        """Return the pair of factors whose `fold` is all that this state's does; None if there is no such pair.

        Pairs of equal shapes are folded together.
        """
        return None

    @abstractmethod
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the undamped running averages `(A, G)`, not to be written to; None stands for the identity."""

    # -- results -----------------------------------------------------------------------------------------------

    @abstractmethod
    def adopt(self, shadow: Any) -> None:
        """Take over what a refresh computed, counted and measured in `shadow`, a copy of this state as it was then.

        What was folded since stays. This state was not refreshed meanwhile, so no event counts twice.
        """

    @abstractmethod
    def setbacks(self) -> tuple[Tensor, Tensor]:
        """Return how many samples were refused in a row, and refreshes failed in a row, up to now, each `[]` int64."""

    @abstractmethod
    def counters(self) -> dict[str, Tensor]:
        """Return event counts and measures for `metrics()`, each `[]`."""

    # -- checkpoints -------------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> dict[str, Any]:
        """Return the state as a nested dict of tensors, for checkpoints; copies only of what would be in it twice."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Any]) -> None:
        """Copy what `tensors` gave, of equal shapes, into this state, but for results that have no memory.

        What was accumulated since the last fold stays.
        """

    def stacked(self, others: Sequence[Self]) -> Self | None:
        """Return a state for `Inverse.apply` alone, with the groups of this state and, in their order, of `others`.

        None if there is none: then blocks of equal shapes are preconditioned one after the other.
        """
        return None

    def to_stack(self) -> Sequence[Tensor]:
        """Return the tensors that `stacked` makes a copy of; while none of them changes, the copy is used again.

        None of them is to be replaced or changed other than by operations that change a tensor in place and count it
        (`Tensor._version`). Without any, the states are stacked at every step.
        """
        return ()

    def ranges(self) -> dict[str, Any]:
        """Return what the tensors of a checkpoint can be, nested like `tensors`, by rules of `utils.value_checks`.

        A checkpoint with other values is refused. Tensors without a rule have to be finite.
        """
        return {}

    def held(self) -> dict[str, Any]:
        """Return `tensors` without the copies: what takes memory between two steps."""
        return self.tensors()

    # -- several processes -------------------------------------------------------------------------------------
    # Each process folds its own samples. Before a refresh the averages of all go to the rank that recomputes the part,
    # which merges them, and the others begin again from nothing. After the refresh the results go to the ranks that
    # need them.

    def averages(self, part: str) -> tuple[Factor, ...]:
        """Return the running averages behind one of `Inverse.parts`, by its name, in the order of its `sums`."""
        self._refuse_sharing()

    def merge(self, part: str, others: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take in what other ranks measured for one part: for each of `averages` what `Factor.merge` gets."""
        for factor, (total, mass) in zip(self.averages(part), others, strict=True):
            factor.merge(total, mass)

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        """Fold without a sample, at a step in which other ranks had some: all that is held weighs less.

        Args:
            decay: the decay, as in `fold`.
            loss_terms: this rank's loss terms. Their gradients at the layer are zero, which is what they add to `G`.
        """
        self._refuse_sharing()

    def counts(self, loss_terms: float | Tensor, loss_scale: float | Tensor) -> Tensor | None:
        """Return numbers of this step that ranks add up before they fold, `[k]` float64; None if they need none.

        They are asked of blocks whose sample is of the rows of all ranks together: of experts, of the terms of a loss,
        and of losses that hold derivatives of the model. `k` is the same on all ranks.

        Args:
            loss_terms: the loss terms `M`, as in `fold`.
            loss_scale: the loss scale, as in `fold`.
        """
        return None

    def tell(self, everywhere: Tensor) -> None:
        """Take what `counts` of all ranks add up to, for the fold that follows."""
        self._refuse_sharing()

    def results(self, part: str) -> tuple[Result, ...]:
        """Return what a rank that did not recompute the part needs to apply it, or to take statistics; no copies.

        A rank that does neither may drop their memory (`utils.tensor_storage.drop`): nothing measured reads them.
        """
        self._refuse_sharing()

    def measures(self, part: str) -> tuple[Tensor, ...]:
        """Return what only the rank that recomputes the part counted and measured of it; no copies.

        Checkpoints of a block whose parts have several owners bring it together.
        """
        return ()

    def take(self, part: str, received: Mapping[int, Tensor]) -> None:
        """Take over results of another rank, or this rank's own as the others got them.

        Flags only ever turn true: parts that have one in common may come from different ranks.

        Args:
            part: the name of the part.
            received: the tensors by their index in `results`, in the shapes there, and in any dtype that holds numbers;
                some may be missing.
        """
        results = self.results(part)
        for index, tensor in received.items():
            kept = results[index].tensor
            if kept.dtype != torch.bool:
                copy_held(kept, tensor)
            elif not kept.is_meta:
                kept.logical_or_(tensor != 0)

    def _refuse_sharing(self) -> NoReturn:
        raise NotImplementedError(
            f"kfac_optim: {type(self).__name__} cannot be shared among processes. Write its methods averages(), age() "
            f"and results(), see kfac_optim.InverseState, or choose another representation."
        )
