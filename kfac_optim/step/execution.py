"""Who refreshes, preconditions and updates what, and when refreshes are done. The engine knows only protocols."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.preconditioning import gradients, has_gradient, laid_out, precondition, to_params
from kfac_optim.inverses.base import Inverse
from kfac_optim.utils.sharded_params import Shards, is_part

Names = Callable[[], Mapping[nn.Parameter, str]]
"""Fully qualified names of the optimizer's parameters."""

Parts = Sequence[Tensor]
"""One tensor for each parameter of a block, in its shape."""


class Agreement(NamedTuple):
    """What all workers know of a step as it begins."""

    finite: bool
    """Whether every gradient is, on every worker."""
    summed: float
    """`LossCount.summed`, the largest of all workers."""
    sampled: Collection[KFACBlock]
    """Blocks that took statistics on some worker."""
    graded: Collection[KFACBlock]
    """Blocks that have a gradient on some worker."""
    unaccounted: Collection[KFACBlock] = ()
    """Blocks of which some worker has captured only a part of the gradient."""
    terms: tuple[int, int] | None = None
    """The least and the most that a worker has counted of terms of the loss; None where none has counted."""
    edited: bool = False
    """Whether gradients were changed in place on some worker, where each has the mean of some of them alone."""
    restarted: Sequence[str] = ()
    """Names of blocks of which a checkpoint that was loaded has statistics, but no worker; told once."""


class Executor(Protocol):
    """Carries out the engine's steps on one process or many.

    Attributes:
        several: whether there are other workers.
        worker: the number of this one, from 0.
        sees_all_gradients: whether what makes any gradient not finite does so here.
    """

    several: bool
    worker: int

    @property
    def sees_all_gradients(self) -> bool: ...

    def attach(self, model: nn.Module | None) -> None:
        """Told of the model, when that is known; None where it is not yet."""

    def begin_forward(self, model: nn.Module) -> int:
        """Told that a forward of the model begins, by whatever wrapper; the number of this worker."""

    def close(self) -> None:
        """Told that the optimizer is gone."""

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that are laid out over processes as this executor cannot train them; changes nothing.

        Raises:
            NotImplementedError: no executor can.
            RuntimeError: another could.
        """

    def emitted(self, block: KFACBlock) -> None:
        """Told during backward that `block` took statistics; may begin to share them."""

    def prepare(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names) -> None:
        """Be ready for `clip_grad_norm_`; arguments as of `agree`."""

    def agree(
        self,
        blocks: Sequence[KFACBlock],
        params: Sequence[nn.Parameter],
        names: Names,
        *,
        finite: bool,
        summed: float,
        counted: int | None,
        rescaled: bool,
    ) -> Agreement:
        """Begin a step.

        Args:
            blocks: all there are.
            params: of the optimizer.
            names: of these.
            finite: whether the gradients are, here.
            summed: `LossCount.summed`, here.
            counted: `LossTally.counted`, here.
            rescaled: whether the step has divided the gradients by the scale, which GradScaler does unseen.

        Raises:
            RuntimeError: the workers do not train the same model.
        """

    def gradients_dropped(self) -> None:
        """Told by `zero_grad`."""

    def settle(self) -> None:
        """Finish what `emitted` has begun. Told when the statistics of the step are folded."""

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        """The first part of a refresh: bring the statistics of all workers to those that recompute inverses."""

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        """The second: recompute.

        Touches nothing but the blocks it is given: they may be copies, on another thread.
        """

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        """The third: bring the inverses to those that precondition."""

    def has_statistics(self, block: KFACBlock) -> bool:
        """Whether any sample was ever accepted, by the time of the last refresh."""

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        """`Inverse.counters`; with several workers the same on all, as of the last refresh."""

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        """Samples refused in a row and refreshes failed in a row, of each block."""

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        """Give those of `blocks` whose direction is to be known here, and `∇h` of each of their parameters, whole.

        They may be `.grad` itself, and are not to be changed.
        """

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        """What preconditioning makes of what `gradients` gave, in shape and layout like it, at least float32, new."""

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        """What `precondition` gave for `blocks`, for each parameter that is updated here, of all that are `covered`.

        As the parameter is, in shape, dtype and layout: torch's fused kernels read parameter, gradient and momentum
        side by side. It may share the memory of what it is made of.
        """

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Give those of `params` that are updated here, in whole or in part."""

    def publish(self, params: Sequence[nn.Parameter]) -> None:
        """Share updated parameters with the workers that did not update them."""

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Sum `values` `[n]` over workers that update different parameters."""

    def average(self, values: Tensor) -> Tensor:
        """The mean of `values` over workers that see different examples, as it is taken of gradients."""

    def keeps(self, block: KFACBlock) -> bool:
        """Whether the running averages of `block` are those of all workers here: so they are on one of them."""

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of `values` over all workers."""

    def clip_grad_norm_(
        self, params: Sequence[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip the norm of all gradients together; the norm before, `[]`."""

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        """Told that a checkpoint is about to be loaded, and for which blocks it has no statistics."""

    def tensors(self, block: KFACBlock) -> Any | None:
        """The whole state of `block` for a checkpoint, as `Inverse.tensors` gives it; None where it is not here."""

    def lacks(self, *, factors: bool) -> str | None:
        """Tell what checkpoints made now miss of what other workers know; None where they miss nothing.

        Args:
            factors: whether they are to hold statistics and inverses.
        """

    def consolidate(
        self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names, to: int | None
    ) -> None:
        """Have `tensors` and momentum whole on worker `to`, until the next step; None: of each block on one.

        The other arguments are those of `agree`.

        Raises:
            ValueError: there is no such worker.
        """

    def owners(self, block: KFACBlock) -> Sequence[int]:
        """The workers that recompute the inverse of `block`, or its parts."""


class Refresher(Protocol):
    """Has an executor recompute inverses."""

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Take over refreshes of earlier steps that are finished, or waited for now; the blocks that got an inverse."""

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        """Have `blocks`, those that are due, refreshed; the ones that have their inverse now, not at a later step."""


class AtOnce:
    """Refresh blocks at the step at which they are due."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        if blocks:
            self._executor.merge(blocks)
            self._executor.solve(blocks)
            self._executor.share(blocks)
        return blocks


def check_rank(to: int | None, workers: int) -> None:
    """Raise unless `consolidate` may be asked for it."""
    if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < workers):
        raise ValueError(f"kfac_optim: to must be a rank from 0 to {workers - 1}, or None, got {to!r}.")


class SingleDevice:
    """Everything here and now, in one process."""

    several = False
    worker = 0

    def __init__(self) -> None:
        self._shards = Shards()

    @property
    def sees_all_gradients(self) -> bool:
        return True

    def attach(self, model: nn.Module | None) -> None:
        self._shards = Shards(model)

    def begin_forward(self, model: nn.Module) -> int:
        return self.worker

    def close(self) -> None:
        pass

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        if sharded := [block.name for block in blocks if any(map(self._is_stepped_in_parts, block.params))]:
            raise RuntimeError(
                f"kfac_optim: the parameters of {sharded[0]!r} are sharded, and no process alone can precondition "
                "their gradient. Where fully_shard keeps them, leave distributed at None, or pass a "
                "DistributedConfig(...) with the group that they are sharded over; otherwise leave the layers to SGD: "
                f"skip_layers={sharded}."
            )

    def _is_stepped_in_parts(self, param: nn.Parameter) -> bool:
        """Whether it is, or is to be; statistics alone may be taken of what FSDP2 gathers for forwards."""
        return is_part(param) and (param.grad is not None or self._shards.of(param) is None)

    def emitted(self, block: KFACBlock) -> None:
        pass

    def prepare(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names) -> None:
        pass

    def agree(
        self,
        blocks: Sequence[KFACBlock],
        params: Sequence[nn.Parameter],
        names: Names,
        *,
        finite: bool,
        summed: float,
        counted: int | None,
        rescaled: bool,
    ) -> Agreement:
        return Agreement(
            finite,
            summed,
            sampled={block for block in blocks if block.has_pending()},
            graded={block for block in blocks if has_gradient(block)},
            unaccounted={block for block in blocks if block.check.differs},
        )

    def gradients_dropped(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        pass

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        by_inverse: defaultdict[Inverse[Any], list[KFACBlock]] = defaultdict(list)
        for block in blocks:
            by_inverse[block.inverse].append(block)
        for inverse, alike in by_inverse.items():
            inverse.refresh([b.state for b in alike], [b.damping for b in alike])

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        pass

    def has_statistics(self, block: KFACBlock) -> bool:
        return block.inverse.has_statistics(block.state)

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        return block.inverse.counters(block.state)

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        if not blocks:
            return []
        device = blocks[0].params[0].device
        counts = [
            count.to(device, non_blocking=True) for block in blocks for count in block.inverse.setbacks(block.state)
        ]
        numbers = torch.stack(counts).tolist()  # the one host synchronisation of it
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        return [(block, gradients(block)) for block in blocks]

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        # One after the other, so that the matrices of one are gone before those of the next are made.
        return [to_params(block, precondition(block, parts), parts) for block, parts in zip(blocks, grads, strict=True)]

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        return {
            param: laid_out(part, param, param.dtype)
            for block, parts in blocks.items()
            for param, part in zip(block.params, parts, strict=True)
            if param.grad is not None
        }

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return params

    def publish(self, params: Sequence[nn.Parameter]) -> None:
        pass

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        return values

    def average(self, values: Tensor) -> Tensor:
        return values

    def keeps(self, block: KFACBlock) -> bool:
        return True

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def clip_grad_norm_(
        self, params: Sequence[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        pass

    def tensors(self, block: KFACBlock) -> Any | None:
        return block.inverse.tensors(block.state)

    def lacks(self, *, factors: bool) -> str | None:
        return None

    def consolidate(
        self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names, to: int | None
    ) -> None:
        check_rank(to, 1)

    def owners(self, block: KFACBlock) -> Sequence[int]:
        return (0,)
