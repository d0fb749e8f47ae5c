"""A process that forks while a refresh runs in the background trains on in both processes."""

import subprocess
import sys
from concurrent.futures import Future

import pytest
from helpers.plain import mlp, train

from kfac_optim import Background, KFACOptimizer
from kfac_optim.step import background_refresh

SCRIPT = """
import os, torch
from torch import nn
from kfac_optim import Background, KFACOptimizer

torch.set_num_threads(1)
model = nn.Linear(4, 3)
optimizer = KFACOptimizer(
    model, lr=0.1, refresh=Background(max_staleness=3), factor_update_period=1, inverse_update_period=2
)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

train(3)
child = os.fork()
train(9)
age = optimizer.metrics()["inverse_age"]
if child == 0:
    os._exit(0 if age <= 5 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or int(age > 5))
"""


def test_the_child_refreshes_by_a_thread_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT], timeout=100).returncode == 0


def test_what_was_under_way_in_the_other_process_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model, lr=0.1, refresh=Background(max_staleness=50), factor_update_period=1, inverse_update_period=2
    )
    first = optimizer._binding.coverage.blocks[0]
    train(model, optimizer, 2)
    assert first.under_way is not None
    first.under_way = never = first.under_way._replace(done=Future())
    monkeypatch.setattr(background_refresh.os, "getpid", lambda: -1)
    train(model, optimizer, 20, start=2)  # fewer than it would wait for
    assert first.under_way is not never
    assert first.under_way is None or first.under_way.shadow.clock.step > 2
