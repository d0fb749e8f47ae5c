"""The schedules of `torch.distributed.pipelining` divide gradients after backward; statistics stay as they are."""

from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from kfac_optim import KFACOptimizer

EXAMPLES, STEPS = 8, 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1, "kl_clip": None}
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(EXAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def on_rank(rank: int, schedule: str, micro_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train one stage, as long as the whole model is trained by `alone`, and give its parameters and its factors."""
    part = net()[:2] if rank == 0 else net()[2:]
    optimizer = KFACOptimizer(part, **OPTIONS, distributed=False)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, micro_batches, loss_fn=loss)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)
        optimizer.step()
    factors = [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]
    return [param.detach() for param in part.parameters()], factors


def alone() -> tuple[list[Tensor], list[Tensor]]:
    model = net()
    optimizer = KFACOptimizer(model, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss(model(x), y).backward()
        optimizer.step()
    factors = [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]
    return [param.detach() for param in model.parameters()], factors


@pytest.mark.parametrize(("schedule", "micro_batches"), [("GPipe", 4), ("1F1B", 2)])
def test_scaled_gradients_leave_statistics_as_they_are(two_ranks: Ranks, schedule: str, micro_batches: int) -> None:
    answers = two_ranks.run(on_rank, schedule, micro_batches)
    for ours, theirs in zip(
        ([each for answer in answers for each in answer[0]], [each for answer in answers for each in answer[1]]),
        alone(),
        strict=True,
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
