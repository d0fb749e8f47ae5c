"""The parts of a step are named in the traces of every profiler of torch, and only there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import KFACOptimizer
from kfac_optim.utils.autograd import profiled

PROFILERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "torch.autograd.profiler": lambda: torch.autograd.profiler.profile(),
}


@pytest.mark.parametrize("name", PROFILERS)
def test_a_profiler_sees_the_parts_of_a_step(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = KFACOptimizer(model, lr=0.1)
    with PROFILERS[name]() as profile:
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    seen = {event.key for event in profile.key_averages()}
    assert seen >= {f"kfac.{part}" for part in ("statistics", "fold", "refresh", "precondition", "step_size", "update")}


def test_without_a_profiler_nothing_is_named() -> None:
    assert profiled("one") is profiled("other")
