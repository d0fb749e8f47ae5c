"""Training beside statistics workers on ranks, and the one process that it must equal.

The one process takes statistics of the workers' mini-batches, and gradients of a twin from those of the ranks that
train; its refreshes come as late as the workers'.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.training import Batch, Mixed, squares
from kfac_optim import Background, Cholesky, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, StatisticsWorkers
from kfac_optim.distributed.serving.rounds import Progress
from kfac_optim.distributed.serving.trainers import TrainingExecutor

EXAMPLES = 4  # of each rank


@dataclass(frozen=True)
class Served:
    """One way to train.

    Attributes:
        workers: the choice.
        steps: of the training.
        net: makes the model.
        options: of the optimizer.
        timeout: of messages, in seconds.
    """

    workers: StatisticsWorkers
    steps: int = 14
    net: Callable[[], nn.Module] = Mixed
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 30.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.net().double()

    def optimizer(self, model: Any, /, **others: Any) -> KFACOptimizer:
        defaults = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "inverse": Cholesky()}
        periods = {"factor_update_period": 3, "inverse_update_period": 6}
        return KFACOptimizer(model, **{**defaults, **periods, **self.options, **others})

    def distributed(self) -> DistributedConfig:
        return DistributedConfig(workers=self.workers, timeout=timedelta(seconds=self.timeout))


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(EXAMPLES, dim, generator=generator, dtype=torch.float64) for dim in (4, 2))
    return x, y


def trained_on(step: int, rank: int) -> Batch:
    """The mini-batch of a rank that trains."""
    return batch(1000 * (rank + 1) + step)


def measured(worker: int, first: int = 0) -> Iterator[Batch]:
    """The mini-batches of a worker, one for each round, from round `first` on."""
    for number in range(first, 10**6):
        yield batch(10**5 * (worker + 1) + number)


def loss_by(model: nn.Module) -> Callable[[Batch], Tensor]:
    def loss_of(one: Batch) -> Tensor:
        return squares(model(one[0]), one[1]).mean()

    return loss_of


def on_rank(rank: int, case: Served) -> list[Tensor] | int:
    """Parameters of a rank that trains; of a worker how many mini-batches it has measured."""
    role, model = case.workers.role(), case.model()
    if role.serves:
        optimizer = case.optimizer(model, distributed=case.distributed())
        return optimizer.serve(measured(role.workers.index(rank)), loss_by(model))
    wrapped = DistributedDataParallel(model, process_group=role.group)
    optimizer = case.optimizer(wrapped, distributed=case.distributed())
    for step in range(case.steps):
        await_answer(optimizer)
        train(optimizer, wrapped, trained_on(step, rank))
    optimizer.dismiss_workers()
    return [param.detach().clone() for param in model.parameters()]


def await_answer(optimizer: KFACOptimizer) -> None:
    """Wait until a round that is under way has come back, so that it could be taken over too early."""
    executor = optimizer._executor
    assert isinstance(executor, TrainingExecutor)
    while executor.rounds.progress() is Progress.BEHIND:
        time.sleep(0.001)


def train(optimizer: KFACOptimizer, model: nn.Module, one: Batch) -> float:
    """Take a step, and return its loss."""
    optimizer.zero_grad()
    loss = loss_by(model)(one)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def one_process(case: Served, trainers: int) -> list[Tensor]:
    """Parameters where rounds come back when they must, as `deterministic=True` has it."""
    model, twin = case.model(), case.model()
    refresh = Background(max_staleness=case.workers.max_staleness, deterministic=True)
    optimizer = case.optimizer(model, refresh=refresh)
    streams = [measured(worker) for worker in range(case.workers.ranks)]
    for step in range(case.steps):
        optimizer.zero_grad()
        twin.zero_grad()
        twin.load_state_dict(model.state_dict())
        if step % optimizer.param_groups[0]["factor_update_period"] == 0:
            x, y = (torch.cat(parts) for parts in zip(*map(next, streams), strict=True))
            loss_by(model)((x, y)).backward()
        x, y = (torch.cat(parts) for parts in zip(*(trained_on(step, r) for r in range(trainers)), strict=True))
        loss_by(twin)((x, y)).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert other.grad is not None
            # To the bit that would be taken for a scale of the loss.
            param.grad = other.grad * (1 + 2**-48)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]
