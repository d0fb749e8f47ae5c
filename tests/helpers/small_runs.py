"""A small regression, and the plain loop whose run a trainer has to repeat bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

EXAMPLES, BATCH, STEPS = 24, 4, 6
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1, "inverse_update_period": 2}


class Regression(nn.Module):
    """Computes its own loss, as Hugging Face's models do, so that each tool has it under its autocast."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


def examples(dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(EXAMPLES, width, generator=generator).to(dtype) for width in (4, 2))
    return [{"x": each, "labels": label} for each, label in zip(x, y, strict=True)]


def batches(dtype: torch.dtype = torch.float32, rank: int = 0, ranks: int = 1) -> Iterator[dict[str, Tensor]]:
    """Yield batches in the order of the examples, over and over; a rank takes every `ranks`-th batch."""
    data = examples(dtype)
    every = [data[at : at + BATCH] for at in range(0, EXAMPLES, BATCH)][rank::ranks]
    for some in cycle(every):
        yield {name: torch.stack([each[name] for each in some]) for name in ("x", "labels")}


def plain_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[dict[str, Tensor]] | None = None,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    scheduler: LRScheduler | None = None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train by the loop that everybody writes; `after` is called after each step."""
    data = batches() if data is None else data
    for _ in range(steps):
        optimizer.zero_grad()
        for left in reversed(range(accumulate)):
            alone = isinstance(model, DistributedDataParallel) and left > 0
            with model.no_sync() if alone else nullcontext():
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    loss = model(**next(data))["loss"] / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        after()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same_bits(found: nn.Module | list[Tensor], expected: nn.Module | list[Tensor]) -> None:
    """Compare all parameters bit for bit."""
    pairs = [parameters_of(side) if isinstance(side, nn.Module) else side for side in (found, expected)]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
