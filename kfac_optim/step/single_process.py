"""A step on one process: all statistics, gradients and states are here. Several processes override what differs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.preconditioning import gradients, has_gradient, laid_out, precondition, to_params
from kfac_optim.inverses.base import Inverse
from kfac_optim.step.execution import Agreement, Parts, Trained
from kfac_optim.utils.sharded_params import Shards, is_part


class LocalStatistics:
    """Recomputes all inverses here, from statistics that are all here."""

    def emitted(self, block: KFACBlock) -> None:
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
        return block.state.has_statistics()

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        return block.state.counters()

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        if not blocks:
            return []
        device = blocks[0].params[0].device
        counts = [count.to(device, non_blocking=True) for block in blocks for count in block.state.setbacks()]
        numbers = torch.stack(counts).tolist()  # the only host synchronisation here
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def keeps(self, block: KFACBlock) -> bool:
        return True

    def owners(self, block: KFACBlock) -> Sequence[int]:
        return (0,)


class LocalGradients:
    """Preconditions all gradients here, and updates all parameters here."""

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

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        return values


class LocalStates:
    """Holds the states of all blocks here."""

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        pass

    def tensors(self, block: KFACBlock) -> Any | None:
        return block.state.tensors()

    def lacks(self, *, factors: bool) -> str | None:
        return None


class SingleProcess:
    """Agrees with nobody: one process trains alone."""

    several = False
    worker = 0
    sees_all_gradients = True

    def __init__(self) -> None:
        self.statistics, self.gradients, self.states = LocalStatistics(), LocalGradients(), LocalStates()
        self._shards = Shards()

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
        """Return whether steps change a part of it; of what FSDP2 gathers, statistics alone may be taken."""
        return is_part(param) and (param.grad is not None or self._shards.of(param) is None)

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        blocks = trained.blocks
        return Agreement(
            finite,
            summed,
            sampled={block for block in blocks if block.has_pending()},
            graded={block for block in blocks if has_gradient(block)},
            unaccounted={block for block in blocks if block.check.differs},
        )

    def gradients_dropped(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def clip_grad_norm_(
        self, trained: Trained, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        return nn.utils.clip_grad_norm_(trained.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def consolidate(self, trained: Trained, to: int | None) -> None:
        check_rank(to, 1)

    def mean_over_examples(self, values: Tensor) -> Tensor:
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values


def check_rank(to: int | None, ranks: int) -> None:
    """Raise unless `consolidate` may be asked for rank `to`.

    Raises:
        ValueError: there is no such rank.
    """
    if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < ranks):
        raise ValueError(f"kfac_optim: to must be a rank from 0 to {ranks - 1}, or None, got {to!r}.")
