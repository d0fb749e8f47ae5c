"""What ranks that train and statistics workers tell each other.

An order is an envelope of a few integers, and a body: numbers and names of blocks, and the model as it is now. The
answer has its size from the order: numbers of the blocks, and the results, or the whole states, that were asked for.
Both sides lay tensors out by their own model. Where a worker has others than the order says, as its forward has shown
more of a layer, its answer holds the numbers alone, and these say so.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.distributed.communication.transfer import leaves
from kfac_optim.distributed.planning.plan_options import TOLD_COUNTERS
from kfac_optim.distributed.serving.layout import Layout
from kfac_optim.inverses.state import Result
from kfac_optim.specs import LayerSpec

States = Mapping[KFACBlock, Mapping[str, Any]]
"""Whole states of blocks, as `InverseState.tensors` gives them."""


class Kind(IntEnum):
    """Says what a worker is to do."""

    MEASURE = 0
    """Take statistics, refresh what is due, and give the results."""
    RESULTS = 1
    """Give results once more."""
    STATES = 2
    """Give whole states, for a checkpoint."""
    END = 3
    """Return."""


class Status(IntEnum):
    """Says what an answer holds."""

    WHOLE = 0
    NUMBERS = 1
    """Numbers of blocks alone."""
    FAILED = 2
    """Nothing; the worker has left its error where all ranks find it."""


class Envelope(NamedTuple):
    """Holds what must be known of an order before it comes."""

    kind: Kind
    step: int
    """The number of the step in which the order was given."""
    folds: int
    """The statistics behind the inverses of the ranks that train."""
    blocks: int
    """How many are named."""
    letters: int
    """Bytes of their names."""
    order_bytes: int
    answer_bytes: int

    def to_tensor(self) -> Tensor:
        return torch.tensor(list(map(int, self)), dtype=torch.int64)

    @classmethod
    def of(cls, numbers: Tensor) -> "Envelope":
        kind, *others = numbers.tolist()
        return cls(Kind(kind), *others)

    @classmethod
    def empty(cls) -> Tensor:
        """Return what an envelope is received into."""
        return torch.zeros(len(cls._fields), dtype=torch.int64)


class BlockOrder(NamedTuple):
    """Holds the numbers of one block in an order."""

    damping: float
    """`λ` of the refresh, without weight decay."""
    loss_unit: float
    """What `λ` is multiplied by: of the step size, which the ranks that train know."""
    decay_in_curvature: float
    """`η`, weight decay that is part of the curvature."""
    factor_decay: float
    due: float
    """Whether its inverse is to be refreshed, or its results given."""
    opposed: float
    shared_input: float

    @classmethod
    def of(cls, block: KFACBlock, *, due: bool) -> "BlockOrder":
        """Return the numbers of a block as they are now."""
        own = block.group["preconditioner_damping"]
        damping = float(block.group["damping"] if own is None else own), block.clock.loss_unit
        flags = due, block.spec.opposed, block.spec.shared_input
        return cls(*damping, l2(block.group), block.group["factor_decay"], *map(float, flags))

    def of_group(self) -> tuple[float, ...]:
        """Return the numbers that all blocks of one param group have."""
        return self.damping, self.decay_in_curvature, self.factor_decay

    def give(self, block: KFACBlock) -> None:
        """Have a worker's block go by these numbers."""
        block.group["preconditioner_damping"], block.group["factor_decay"] = self.damping, self.factor_decay
        block.group["weight_decay"], block.group["l2_in_curvature"] = self.decay_in_curvature, True
        block.group["factor_update_period"] = 1  # what is ordered is measured, at whatever step the round begins


class BlockAnswer(NamedTuple):
    """Holds the numbers of one block in an answer."""

    held: float
    """Whether any sample was ever accepted."""
    refreshed: float
    """Whether a refresh that was ordered was carried out: gradients of the mini-batch were finite."""
    unaccounted: float
    """Whether only a part of its gradient was captured, or the worker does not know the block."""
    opposed: float
    shared_input: float
    refused: float
    failed: float
    counters: tuple[float, ...] = (math.nan,) * len(TOLD_COUNTERS)

    def words(self) -> list[float]:
        return [*self[:-1], *self.counters]

    @classmethod
    def of(cls, words: Sequence[float]) -> "BlockAnswer":
        held, refreshed, unaccounted, opposed, shared_input, refused, failed, *counters = words
        return cls(held, refreshed, unaccounted, opposed, shared_input, refused, failed, tuple(counters))


WORDS = len(BlockAnswer._fields) - 1 + len(TOLD_COUNTERS)


def with_shown(spec: LayerSpec, told: BlockOrder | BlockAnswer) -> LayerSpec:
    """Return the spec with what forwards of other ranks have shown of the layer."""
    return replace(
        spec,
        opposed=spec.opposed or bool(told.opposed),
        shared_input=spec.shared_input and bool(told.shared_input),
    )


def model_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a model, in its order."""
    return [*model.parameters(), *model.buffers()]


def trained_flags(model: nn.Module) -> Tensor:
    """Return which parameters of a model are trained, `[parameters]` uint8."""
    return torch.tensor([param.requires_grad for param in model.parameters()], dtype=torch.uint8)


def order_layout(blocks: int, letters: int, model: nn.Module | None) -> Layout:
    """Return the layout of the body of an order; without a model where none is sent."""
    numbers = torch.empty(blocks, len(BlockOrder._fields), dtype=torch.float64, device="meta")
    names = torch.empty(letters, dtype=torch.uint8, device="meta")
    return Layout([numbers, names, *([] if model is None else [trained_flags(model), *model_tensors(model)])])


def answer_layout(count: int, kind: Kind, asked: Sequence[KFACBlock], states: States) -> Layout:
    """Return the layout of an answer.

    Args:
        count: how many blocks the order names.
        kind: the kind of the order.
        asked: blocks whose results or states are asked for.
        states: the states of these, where they are asked for.
    """
    numbers = torch.empty(1 + count * WORDS, dtype=torch.float64, device="meta")
    if kind is Kind.STATES:
        return Layout([numbers, *state_tensors(asked, states)])
    results = (result for block in asked for _, _, result in results_of(block))
    sent = (torch.empty(each.sent_shape, dtype=each.tensor.dtype, device="meta") for each in results)
    return Layout([numbers, *sent])


def state_tensors(blocks: Sequence[KFACBlock], states: States) -> list[Tensor]:
    """Return the tensors of whole states, in the order in which they are sent."""
    return [tensor for block in blocks for _, tensor in leaves(states[block])]


def results_of(block: KFACBlock) -> Iterator[tuple[str, int, Result]]:
    """Yield the results of a block, each with the name of its part and its number there."""
    for part in block.inverse.parts(block.spec.by_blocks()):
        for number, result in enumerate(block.state.results(part.name)):
            yield part.name, number, result
