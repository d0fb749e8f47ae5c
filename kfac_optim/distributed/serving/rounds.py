"""Orders of the ranks that train to the statistics workers: at most one is under way, and none is waited for here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.clock import Clock
from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.serving.layout import Layout
from kfac_optim.distributed.serving.line import Lines, lines_of
from kfac_optim.distributed.serving.messages import (
    WORDS,
    BlockAnswer,
    BlockOrder,
    Envelope,
    Kind,
    States,
    Status,
    answer_layout,
    model_tensors,
    order_layout,
    trained_flags,
)
from kfac_optim.distributed.statistics_workers import Role

FAILURE = "statistics-worker-failed"
"""The key under which a worker leaves its error."""


class Progress(IntEnum):
    """Says how far an order is on this rank; ranks go by the largest of all."""

    ARRIVED = 0
    """Its answer is here, or there is no order."""
    BEHIND = 1
    FAILED = 2


class Answer(NamedTuple):
    """Holds what came back of an order."""

    numbers: dict[KFACBlock, BlockAnswer]
    """Answers for each block that was named."""
    asked: list[tuple[KFACBlock, Clock]]
    """Blocks whose results or states were asked for, each with its clock as it was then."""
    tensors: list[Tensor] | None
    """Tensors of these blocks, as they were sent; None where the worker has others than were asked for."""
    void: bool
    """Whether a checkpoint was loaded meanwhile."""


@dataclass(slots=True, eq=False)
class _Order:
    kind: Kind
    step: int
    blocks: Sequence[KFACBlock]
    asked: list[tuple[KFACBlock, Clock]]
    layout: Layout
    buffer: Tensor
    coming: dist.Work
    going: Sequence[dist.Work]
    sent: Sequence[Tensor]
    """Kept until the answer is here."""
    void: bool = False


class Rounds:
    """Sends orders and receives answers, on one of the ranks that train; all of them call its methods alike.

    Args:
        role: the role of this rank.
        timeout: how long a message may be under way, or be waited for.

    Attributes:
        ended: whether the workers were dismissed.
    """

    def __init__(self, role: Role, timeout: timedelta) -> None:
        self._role, self._timeout = role, timeout
        self._is_first = dist.get_rank() == role.trainers[0]
        self._lines: Lines | None = None
        self._order: _Order | None = None
        self._body = torch.zeros(0, dtype=torch.uint8)
        self.ended = False

    @property
    def under_way_since(self) -> int | None:
        """Return the step of the order that is under way; None where none is. A void one is older than all."""
        if self._order is None:
            return None
        return -(2**62) if self._order.void else self._order.step

    def begin(
        self,
        kind: Kind,
        step: int,
        blocks: Sequence[KFACBlock],
        asked: Sequence[KFACBlock],
        model: nn.Module | None,
        states: States | None = None,
    ) -> None:
        """Give an order; the workers come to it whenever they do.

        Args:
            kind: the kind of the order.
            step: the number of the present step.
            blocks: all blocks.
            asked: those whose results are asked for; of an order to measure, those to be refreshed.
            model: its parameters are sent; None sends none.
            states: what the states of blocks are received into, where whole states are asked for.
        """
        assert self._order is None, "one order at a time"
        layout = answer_layout(len(blocks), kind, asked, states or {})
        going: list[dist.Work] = []
        sent: list[Tensor] = []
        if self._is_first:
            sent = self._written(kind, step, blocks, asked, layout, model)
            going = [self._open().orders.post(each) for each in sent]  # type: ignore[union-attr]
        buffer = layout.buffer()
        then = [(block, replace(block.clock, damping=block.damping)) for block in asked]
        coming = self._open().answers.post(buffer)  # type: ignore[union-attr]
        self._order = _Order(kind, step, blocks, then, layout, buffer, coming, going, sent)

    def progress(self) -> Progress:
        """Return how far the order is here, without waiting."""
        if (order := self._order) is None:
            return Progress.ARRIVED
        try:
            for work in (*order.going, order.coming):
                if work.is_completed():
                    work.wait()  # raises where it has failed
        except RuntimeError:
            return Progress.FAILED
        if not order.coming.is_completed():
            return Progress.BEHIND
        return Progress.FAILED if self._status(order) is Status.FAILED else Progress.ARRIVED

    def finish(self) -> Answer:
        """Wait for the answer, and give it out.

        Raises:
            CollectiveError: a worker has failed, is gone, or takes longer than the time-out.
        """
        assert self._order is not None, "an order is under way"
        order, lines = self._order, self._open()
        assert lines.answers is not None, "this rank trains"
        try:
            for work in (*order.going, order.coming):
                lines.answers.wait(work)
        except RuntimeError as error:
            raise self._missing(order, str(error)) from error
        if self._status(order) is Status.FAILED:
            lines.lost = True
            raise CollectiveError(
                f"kfac_optim: the statistics workers (ranks {', '.join(map(str, self._role.workers))}) gave up at the "
                f"order of step {order.step}: {lines.answers.told(FAILURE)} To go on, start all ranks again from the "
                "last checkpoint."
            )
        self._order = None
        numbers, *tensors = order.layout.views(order.buffer)
        words = [numbers[1 + i * WORDS : 1 + (i + 1) * WORDS].tolist() for i in range(len(order.blocks))]
        answers = {block: BlockAnswer.of(each) for block, each in zip(order.blocks, words, strict=True)}
        whole = Status(int(numbers[0])) is Status.WHOLE
        return Answer(answers, order.asked, tensors if whole else None, order.void)

    def fail(self) -> None:
        """Raise what has failed, here or on another of the ranks that train.

        Raises:
            CollectiveError: always.
        """
        assert self._order is not None, "an order is under way"
        order = self._order
        if self.progress() is Progress.FAILED:
            self.finish()
        raise self._missing(order, "another rank that trains has found it so")

    def make_void(self) -> None:
        """Have nothing taken over of what is under way, as a checkpoint is loaded."""
        if self._order is not None:
            self._order.void = True

    def end(self) -> None:
        """Wait for what is under way, and dismiss the workers.

        Raises:
            CollectiveError: see `finish`.
        """
        if self._order is not None:
            self.finish()
        for work in self._dismiss():
            try:
                self._open().orders.wait(work)  # type: ignore[union-attr]
            except RuntimeError as error:
                raise CollectiveError(
                    f"kfac_optim: the statistics workers (ranks {', '.join(map(str, self._role.workers))}) were gone "
                    f"when they were dismissed ({error}). The training is over; look for the first error in their logs."
                ) from error

    def close(self) -> None:
        """Dismiss the workers, if they have ever been met, without waiting."""
        if self._lines is not None and not self._lines.lost:
            self._dismiss()

    def _dismiss(self) -> list[dist.Work]:
        if self.ended:
            return []
        lines, self.ended = self._open(), True
        lines.give_back()
        if lines.orders is None:
            return []
        return [lines.orders.post(Envelope(Kind.END, 0, 0, 0, 0, 0, 0).to_tensor())]

    def _open(self) -> Lines:
        if self._lines is None:
            self._lines = lines_of(self._role, self._timeout, self)
        return self._lines

    def _written(
        self,
        kind: Kind,
        step: int,
        blocks: Sequence[KFACBlock],
        asked: Sequence[KFACBlock],
        answer: Layout,
        model: nn.Module | None,
    ) -> list[Tensor]:
        """Return the envelope and the body of an order. The body is written where the last one was."""
        orders = [BlockOrder.of(block, due=block in asked) for block in blocks]
        letters = "\n".join(block.name for block in blocks).encode()
        names = torch.tensor(list(letters), dtype=torch.uint8)
        layout = order_layout(len(blocks), len(letters), model)
        if len(self._body) != layout.size:
            self._body = layout.buffer()
        numbers = torch.tensor(orders, dtype=torch.float64)
        of_model = [] if model is None else [trained_flags(model), *model_tensors(model)]
        layout.pack(self._body, [numbers, names, *of_model])
        folds = max((block.clock.folds for block in blocks), default=0)
        envelope = Envelope(kind, step, folds, len(blocks), len(letters), layout.size, answer.size)
        return [envelope.to_tensor(), self._body]

    def _status(self, order: _Order) -> Status:
        return Status(int(order.layout.views(order.buffer)[0][0]))

    def _missing(self, order: _Order, why: str) -> CollectiveError:
        self._open().lost = True
        ranks = ", ".join(map(str, self._role.workers))
        return CollectiveError(
            f"kfac_optim: on rank {dist.get_rank()} the answer of the statistics workers (ranks {ranks}) to the order "
            f"of step {order.step} did not come (time-out {self._timeout.total_seconds():g} s): {why}. They are gone, "
            "or slower than that. Look for the first error in their logs; where they were only slow, raise "
            "DistributedConfig(timeout=...). To go on, start all ranks again from the last checkpoint."
        )
