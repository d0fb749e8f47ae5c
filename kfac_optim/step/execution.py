"""Protocols for those who carry out a step, on one process or many: statistics, gradients, checkpoints, agreement."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing

Parts = Sequence[Tensor]
"""One tensor for each parameter of a block, in its shape."""


class Trained(NamedTuple):
    """Holds what an optimizer trains."""

    blocks: Sequence[KFACBlock]
    """All blocks, in the order of the model."""
    params: Sequence[nn.Parameter]
    """All parameters of the param groups."""
    names: Callable[[], Mapping[nn.Parameter, str]]
    """Returns the fully qualified names of the parameters."""


class Agreement(NamedTuple):
    """Holds what all ranks know of a step as it begins."""

    finite: bool
    """Whether every gradient is finite, on every rank."""
    summed: float
    """`LossCount.summed`, the largest of all ranks."""
    sampled: Collection[KFACBlock]
    """Blocks that took statistics on some rank."""
    graded: Collection[KFACBlock]
    """Blocks that have a gradient on some rank."""
    unaccounted: Collection[KFACBlock] = ()
    """Blocks of which some rank has captured only a part of the gradient."""
    terms: tuple[int, int] | None = None
    """The least and the most terms of the loss that a rank has counted; None if none has counted."""
    edited: bool = False
    """Whether gradients were changed in place on some rank, where each rank has the mean of some of them alone."""
    restarted: Sequence[str] = ()
    """Names of blocks whose statistics a loaded checkpoint has, but no rank; each load names them once."""


class Statistics(Protocol):
    """Brings statistics to those who recompute inverses, and inverses to those who precondition."""

    def emitted(self, block: KFACBlock) -> None:
        """Take notice, during backward, that `block` took statistics; they may be sent at once."""

    def settle(self) -> None:
        """Finish what `emitted` has begun, when the statistics of the step are folded."""

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the first part of a refresh: bring the statistics of all ranks to those that recompute inverses."""

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the second part of a refresh: recompute the inverses of `blocks`, and touch nothing else.

        The blocks may be copies, and the caller may be another thread.
        """

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        """Do the third part of a refresh: bring the inverses to the ranks that precondition."""

    def has_statistics(self, block: KFACBlock) -> bool:
        """Return whether any sample was accepted by the time of the last refresh."""

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        """Return `Inverse.counters`; on several ranks they are the same on all, as of the last refresh."""

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        """Return how many samples were refused in a row and how many refreshes failed in a row, for each block."""

    def keeps(self, block: KFACBlock) -> bool:
        """Return whether this rank holds the running averages of `block` over all ranks; one rank does."""

    def owners(self, block: KFACBlock) -> Sequence[int]:
        """Return the ranks that recompute the inverse of `block`, or parts of it."""


class Gradients(Protocol):
    """Brings gradients to those who precondition them, and the result to those who update."""

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        """Return the blocks whose direction is to be known here, with the whole `∇h` of each of their parameters.

        The tensors may be `.grad` itself, and must not be changed.
        """

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        """Return the preconditioned `grads`: new tensors of the same shapes and layouts, in float32 at least."""

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        """Return the direction of each parameter that is updated here.

        Args:
            blocks: what `precondition` gave here.
            covered: all blocks that are preconditioned on some rank.

        Returns:
            Tensors in the shape, dtype and layout of their parameter, as torch's fused kernels read parameter, gradient
            and momentum side by side. They may share the memory of `blocks`.
        """

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return those of `params` that are updated here, in whole or in part."""

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        """Sum `values` `[n]` over the ranks that update different parameters."""


class WholeStates(Protocol):
    """Knows for checkpoints what this process holds of the statistics and inverses of all blocks."""

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        """Take notice that a checkpoint is about to be loaded, which has no statistics for some blocks here."""

    def tensors(self, block: KFACBlock) -> Any | None:
        """Return the whole state of `block` as `Inverse.tensors` gives it; None where this rank does not hold it."""

    def lacks(self, *, factors: bool) -> str | None:
        """Say what a checkpoint made now lacks of what other ranks know; None if it lacks nothing.

        Args:
            factors: whether checkpoints hold statistics and inverses.
        """


class Executor(Protocol):
    """Has all ranks agree on a step, and knows who carries out its parts.

    Attributes:
        several: whether there are other ranks.
        worker: the number of this rank, from 0.
        statistics: who brings statistics and inverses where they belong.
        gradients: who does so with gradients and directions.
        states: who knows what checkpoints hold.
        sees_all_gradients: whether a gradient that is not finite anywhere is not finite here.
    """

    several: bool

    @property
    def worker(self) -> int: ...

    @property
    def statistics(self) -> Statistics: ...

    @property
    def gradients(self) -> Gradients: ...

    @property
    def states(self) -> WholeStates: ...

    @property
    def sees_all_gradients(self) -> bool: ...

    def attach(self, model: nn.Module | None) -> None:
        """Take notice of the model; None if it is not known yet."""

    def begin_forward(self, model: nn.Module) -> int:
        """Take notice that a forward of the model begins, in whatever wrapper; returns the number of this rank."""

    def close(self) -> None:
        """Launch nothing any more: the optimizer is gone."""

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that are laid out over processes as this executor cannot train them; change nothing.

        Raises:
            NotImplementedError: no executor can.
            RuntimeError: another could.
        """

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        """Begin a step.

        Args:
            trained: what the step is about.
            finite: whether the gradients here are finite.
            summed: `LossCount.summed` of this rank.
            counted: `LossTally.counted` of this rank.
            rescaled: whether the step has divided the gradients by the loss scale, which GradScaler does unseen.

        Raises:
            RuntimeError: the ranks do not train the same model.
        """

    def gradients_dropped(self) -> None:
        """Take notice of `zero_grad`."""

    def publish(self) -> None:
        """Share updated parameters with the ranks that did not update them, which ends the step."""

    def clip_grad_norm_(
        self, trained: Trained, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip the norm of all gradients together, and return the norm before, `[]`."""

    def consolidate(self, trained: Trained, to: int | None) -> None:
        """Hold all states and momentum on rank `to` until the next step; None holds each block on one of its owners.

        Raises:
            ValueError: there is no such rank.
        """

    def mean_over_examples(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the ranks, which see different examples, as it is taken of gradients."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks."""


class Refresher(Protocol):
    """Decides when inverses that are due are recomputed: at once, or behind the training."""

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Take over earlier refreshes that are finished, or must be waited for; return the blocks that got an inverse.

        Args:
            blocks: all blocks.
        """

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Refresh `blocks`, which are due, or begin to; return those that have their new inverse already."""


class AtOnce:
    """Refreshes blocks at the step at which they are due."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        if blocks:
            statistics = self._executor.statistics
            statistics.merge(blocks)
            statistics.solve(blocks)
            statistics.share(blocks)
        return blocks
