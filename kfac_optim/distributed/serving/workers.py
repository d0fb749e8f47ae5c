"""The statistics workers: they measure, refresh and answer, and leave gradients and parameters alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.planning.plan_options import TOLD_COUNTERS
from kfac_optim.distributed.serving.layout import Layout
from kfac_optim.distributed.serving.line import Lines, lines_of
from kfac_optim.distributed.serving.messages import (
    WORDS,
    BlockAnswer,
    BlockOrder,
    Envelope,
    Kind,
    Status,
    answer_layout,
    model_tensors,
    order_layout,
    results_of,
    state_tensors,
    with_shown,
)
from kfac_optim.distributed.serving.rounds import FAILURE
from kfac_optim.distributed.serving.trainers import timeout_of_lines
from kfac_optim.distributed.statistics_workers import Role, StatisticsWorkers
from kfac_optim.step.execution import Agreement, Trained
from kfac_optim.step.loss_scale import ScalerSource
from kfac_optim.step.refresher import Refresher


class ServingExecutor(DistributedExecutor):
    """Carries out the steps of a statistics worker: statistics of its own mini-batches, and refreshes as ordered.

    A step of the optimizer folds and refreshes here as on any ranks; without gradients it changes no parameter.

    Args:
        config: the user's choices, with the group of the workers.
        optimizer: what is to be known of the optimizer.
        choice: the user's choice of workers.
        role: the role of this rank.

    Attributes:
        sees_all_gradients: False, as no rank has the mean of gradients, so that an overflow is seen where it is alone.
        due: names of blocks that the order has refreshed, each with its unit of the loss; None outside of `serve`.
        finite: whether the gradients of the last mini-batch were finite on all workers.
        unaccounted: names of blocks of which only a part of the gradient was captured then.
    """

    sees_all_gradients = False

    def __init__(
        self, config: DistributedConfig, optimizer: OptimizerView, *, choice: StatisticsWorkers, role: Role
    ) -> None:
        super().__init__(config, optimizer)
        self.choice, self.role = choice, role
        self.due: dict[str, float] | None = None
        self.finite = True
        self.unaccounted: set[str] = set()

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        if self.due is None:
            raise RuntimeError(
                f"kfac_optim: rank {dist.get_rank()} is a statistics worker by {self.choice}, and step() was called on "
                "it. Call optimizer.serve(batches, loss_of) there in the place of the training loop."
            )
        for param in trained.params:
            param.grad = None  # statistics were made of it, and were checked by it
        agreement = super().agree(trained, finite=finite, summed=summed, counted=counted, rescaled=rescaled)
        self.finite = agreement.finite
        self.unaccounted = {block.name for block in agreement.unaccounted}
        return agreement

    def agree_on_state(self, trained: Trained) -> Agreement:
        # Workers load checkpoints too, and before they serve.
        return super().agree(trained, finite=True, summed=0, counted=None, rescaled=False)


class OrderedRefresher(Refresher):
    """Refreshes blocks as ordered, whatever their clocks say."""

    def __init__(self, executor: ServingExecutor) -> None:
        super().__init__(executor)
        self._serving = executor
        self._blocks: Sequence[KFACBlock] = ()

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        self._blocks = blocks
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        units = self._serving.due or {}
        due = [block for block in self._blocks if block.name in units]
        for block in due:
            block.clock.use_unit(units[block.name])
        return super().refresh(due)


class Service:
    """Carries out orders of the ranks that train, one after the other.

    Args:
        optimizer: the optimizer, whose steps measure and refresh.
        executor: the executor of the optimizer.
        blocks: returns those that there are now.
        window: the capture window of the optimizer.
        model: the model, whose parameters are those of the ranks that train from now on.
        scaler: knows the `GradScaler` that the user has named.
    """

    def __init__(
        self,
        optimizer: Any,
        executor: ServingExecutor,
        blocks: Callable[[], Sequence[KFACBlock]],
        window: CaptureWindow,
        model: nn.Module,
        scaler: ScalerSource,
    ) -> None:
        self._optimizer, self._executor, self._blocks, self._window = optimizer, executor, blocks, window
        self._model, self._scaler = model, scaler
        self._leads = dist.get_rank() == executor.role.workers[0]
        self._lines: Lines = lines_of(executor.role, timeout_of_lines(executor.config, executor.role), self)
        self._envelope: Envelope | None = None  # of an order that is not answered
        self._is_first = True

    def run(self, batches: Iterable[Any], loss_of: Callable[[Any], Tensor]) -> int:
        """Carry out orders until the ranks that train dismiss the workers.

        Args:
            batches: mini-batches; begun again where it ends.
            loss_of: returns the loss of one.

        Returns:
            How many mini-batches were measured.
        """
        endless, measured = _endless(batches), 0
        try:
            # Before any mini-batch, so that a worker which fails at its first is not waited for until the time-out.
            self._executor.ranks.open(list(self._model.parameters()))
            while (envelope := self._receive()).kind is not Kind.END:
                orders = self._read(envelope)
                if envelope.kind is Kind.MEASURE:
                    self._measure(envelope, orders, next(endless), loss_of)
                    measured += 1
                elif envelope.kind is Kind.STATES:
                    self._optimizer.consolidate_state_dict(to=0)
                self._answer(envelope, orders)
        except BaseException as error:
            self._give_up(error)
            self._lines.lost = True
            raise
        finally:
            self._executor.due = None
        self._lines.give_back()
        return measured

    def _receive(self) -> Envelope:
        numbers = Envelope.empty()
        self._await(numbers)
        return Envelope.of(numbers)

    def _await(self, buffer: Tensor) -> None:
        """Wait for what the ranks that train send next."""
        line = self._lines.orders
        assert line is not None, "this rank serves"
        try:
            line.wait(line.post(buffer))
        except RuntimeError as error:
            raise CollectiveError(
                f"kfac_optim: no order of rank {line.source} came to the statistics worker on rank {dist.get_rank()} "
                f"(time-out {line.timeout.total_seconds():g} s): {error}. It is gone; or it has ended without "
                "optimizer.dismiss_workers(); or it pauses for longer, then raise DistributedConfig(timeout=...)."
            ) from error

    def _read(self, envelope: Envelope) -> dict[str, BlockOrder]:
        """Receive the body of an order, and have model and blocks go by it."""
        model = self._model if envelope.kind is Kind.MEASURE else None
        layout = order_layout(envelope.blocks, envelope.letters, model)
        buffer = torch.empty(envelope.order_bytes, dtype=torch.uint8)
        self._await(buffer)
        self._envelope = envelope
        if layout.size != envelope.order_bytes:
            raise RuntimeError(
                f"kfac_optim: an order of the ranks that train holds {envelope.order_bytes} bytes, and by the model of "
                f"the statistics worker on rank {dist.get_rank()} it would hold {layout.size}. Build the same model on "
                "every rank, in the same dtypes."
            )
        numbers, letters, *of_model = layout.views(buffer)
        names = bytes(letters.tolist()).decode().split("\n")
        orders = {name: BlockOrder(*row) for name, row in zip(names, numbers.tolist(), strict=True)}
        if model is not None:
            self._take_model(model, of_model)
            self._check_clocks(envelope)
        for block in self._blocks():
            if block.name in orders:
                block.revise(with_shown(block.spec, orders[block.name]))
        self._set_numbers(envelope, orders)
        return orders

    def _set_numbers(self, envelope: Envelope, orders: Mapping[str, BlockOrder]) -> None:
        ordered = [(block, orders[block.name]) for block in self._blocks() if block.name in orders]
        _check_groups(ordered)
        for block, order in ordered:
            order.give(block)
            block.clock.step = envelope.step

    @torch.no_grad()
    def _take_model(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        flags, *values = tensors
        for param, flag in zip(model.parameters(), flags.tolist(), strict=True):
            if param.requires_grad != bool(flag):
                param.requires_grad_(bool(flag))
        for tensor, value in zip(model_tensors(model), values, strict=True):
            tensor.copy_(value)

    def _check_clocks(self, envelope: Envelope) -> None:
        """Refuse averages that are not of the run that the ranks that train are in."""
        clocks = [block.clock for block in self._blocks()]
        folds = max((clock.folds for clock in clocks), default=0)
        last = max((clock.folded_at for clock in clocks), default=-1)
        if envelope.step < last or (self._is_first and bool(folds) != bool(envelope.folds - 1)):
            raise RuntimeError(
                f"kfac_optim: the ranks that train are at step {envelope.step} with {envelope.folds - 1} statistics "
                f"behind them, and the statistics worker on rank {dist.get_rank()} had {folds}, the last at step "
                f"{last}. Load the same checkpoint on all ranks, on workers before they serve; or on none."
            )
        self._is_first = False

    def _measure(
        self, envelope: Envelope, orders: Mapping[str, BlockOrder], batch: Any, loss_of: Callable[[Any], Tensor]
    ) -> None:
        self._executor.due = {name: order.loss_unit for name, order in orders.items() if order.due}
        self._window.step = envelope.step
        with torch.enable_grad():
            loss = loss_of(batch)
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise TypeError(
                    "kfac_optim: loss_of(batch) must return the loss of the mini-batch, a tensor that depends on the "
                    f"parameters, got {loss!r}."
                )
            loss.backward()  # type: ignore[no-untyped-call]
        self._set_numbers(envelope, orders)  # the forward may have shown blocks that are new
        if (scaler := self._scaler.find()) is None:
            self._optimizer.step()
        else:  # a scale at which the loss overflows would do so in every round
            scaler.step(cast(Optimizer, self._optimizer))
            scaler.update()

    def _answer(self, envelope: Envelope, orders: Mapping[str, BlockOrder]) -> None:
        """Send what was ordered; one worker has it all."""
        if not self._leads:
            self._envelope = None
            return
        known = {block.name: block for block in self._blocks()}
        asked = [known[name] for name, order in orders.items() if order.due and name in known]
        kind = envelope.kind
        states: dict[KFACBlock, Any] = {}
        if kind is Kind.STATES:
            states = {block: self._executor.states.tensors(block) for block in asked}
        layout = answer_layout(len(orders), kind, asked, states)
        all_known = len(asked) == sum(bool(order.due) for order in orders.values())
        is_whole = all_known and layout.size == envelope.answer_bytes
        numbers = [float(Status.WHOLE if is_whole else Status.NUMBERS)]
        for name in orders:
            numbers += self._numbers(known.get(name)).words()
        tensors = [torch.tensor(numbers, dtype=torch.float64)]
        buffer = torch.empty(envelope.answer_bytes, dtype=torch.uint8)
        if is_whole:
            if kind is Kind.STATES:
                tensors += state_tensors(asked, states)
            else:
                tensors += [result.packed() for block in asked for _, _, result in results_of(block)]
            layout.pack(buffer, tensors)
        else:
            _numbers_alone(len(orders)).pack(buffer, tensors)
        self._send(buffer)

    def _numbers(self, block: KFACBlock | None) -> BlockAnswer:
        refreshed, unknown = float(self._executor.finite), 1.0
        if block is None:
            return BlockAnswer(0.0, refreshed, unknown, 0.0, 1.0, 0.0, 0.0)
        unaccounted = float(block.name in self._executor.unaccounted)
        opposed, shared_input = float(block.spec.opposed), float(block.spec.shared_input)
        planned = self._executor.planned
        status = None if planned is None else planned.exchange.status.get(block.name)
        if status is None:
            return BlockAnswer(0.0, refreshed, unaccounted, opposed, shared_input, 0.0, 0.0)
        held, refused, failed = map(float, (status.held, status.refused, status.failed))
        counters = tuple(status.counters.get(key, 0.0) for key in TOLD_COUNTERS)
        return BlockAnswer(held, refreshed, unaccounted, opposed, shared_input, refused, failed, counters)

    def _send(self, buffer: Tensor) -> None:
        line = self._lines.answers
        assert line is not None, "this rank leads"
        try:
            line.wait(line.post(buffer))
        except RuntimeError as error:
            raise CollectiveError(
                f"kfac_optim: the ranks that train did not take an answer of the statistics worker on rank "
                f"{dist.get_rank()} (time-out {line.timeout.total_seconds():g} s): {error}. Look for the first error "
                "in their logs."
            ) from error
        self._envelope = None

    def _give_up(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it has failed."""
        if self._envelope is None:
            return
        words = f"rank {dist.get_rank()} raised {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the error that is raised says more
            self._executor.ranks.give_up(words)
        if not self._leads:
            return
        line = self._lines.answers
        assert line is not None, "this rank leads"
        buffer = torch.zeros(self._envelope.answer_bytes, dtype=torch.uint8)
        failed = torch.tensor([float(Status.FAILED)], dtype=torch.float64)
        buffer[: failed.nbytes] = failed.view(torch.uint8)
        with suppress(RuntimeError):
            line.tell(FAILURE, words)
            line.wait(line.post(buffer))


def _check_groups(ordered: Iterable[tuple[KFACBlock, BlockOrder]]) -> None:
    """Refuse orders that give layers of one param group different numbers."""
    first: dict[int, tuple[KFACBlock, BlockOrder]] = {}
    for block, order in ordered:
        known, theirs = first.setdefault(id(block.group), (block, order))
        if order.of_group() != theirs.of_group():
            raise RuntimeError(
                f"kfac_optim: {known.name!r} and {block.name!r} are in one param group of the statistics worker on "
                f"rank {dist.get_rank()}, and the ranks that train have them in groups that differ in damping, "
                "factor_decay or weight_decay. Build the optimizer of a worker from the same param groups, with those "
                "that are added later."
            )


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise RuntimeError(
                "kfac_optim: the mini-batches of a statistics worker have ended, and begin no second time. Pass "
                "serve() an iterable that can be gone through again, as a DataLoader is, or one without end."
            )


def _numbers_alone(count: int) -> Layout:
    return Layout([torch.empty(1 + count * WORDS, dtype=torch.float64, device="meta")])
