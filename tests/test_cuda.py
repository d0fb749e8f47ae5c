"""What only a CUDA device can show: what `test_waits.py` says of a pretended one is true."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import waits
from helpers.accelerator import site
from test_waits import expected
from torch import nn

from kfac_optim import Background, KFACOptimizer
from kfac_optim.step.trust_region import square_sum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def waited() -> Iterator[list[str]]:
    """Functions of the package in which the host waited."""
    seen: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            seen.append(site(sys._getframe(1)))

    with sync_debug_mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # put back with the filters
        yield seen


@pytest.mark.parametrize("name", waits.CASES)
def test_the_host_waits_where_it_does_on_the_pretended_device(name: str) -> None:
    with waited() as seen:
        steps = waits.steps(waits.CASES[name], seen, "cuda")
    for step in steps:
        said = {wait.partition(":")[0] for wait in expected(name, step)}
        assert {wait for wait in step["waits"] if wait} == said - {""}, step["kind"]
        assert step["kind"] != "plain" or step["waits"] == {} or said, "nor anywhere else"


@pytest.mark.parametrize("options", [{}, {"refresh": Background()}, {"nonfinite_limit": None}])
def test_steps_between_refreshes_wait_for_nothing(options: dict[str, Any]) -> None:
    model = waits.layers().cuda()
    batch, targets = waits.rows().cuda(), torch.randint(waits.CLASSES, (8,)).cuda()
    periods = {"factor_update_period": 10, "inverse_update_period": 10}
    optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, fused=True, **periods, **options)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), targets).backward()
        optimizer.step()

    train()
    torch.cuda.synchronize()
    with sync_debug_mode("error"):
        for _ in range(9):
            train()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            train()  # takes statistics, and asks whether gradients are finite
    torch.cuda.synchronize()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("value", waits.SPOILT)
def test_the_device_leaves_out_steps_that_are_not_finite(value: str) -> None:
    with waited() as seen:
        step = waits.spoilt_step(waits.SPOILT[value], "cuda", seen, step_size=waits.TrustRegion())
    assert not step["waited"]
    assert step["same"] == step["skipped"] == (value != "huge")


def test_training_on_cuda_equals_that_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        batch, targets = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))
        model, batch, targets = model.to(device), batch.to(device), targets.to(device)
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, fused=True, inverse_update_period=3)
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(batch), targets).backward()
            optimizer.step()
        results.append([param.detach().cpu() for param in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def test_square_sum_is_that_of_all_tensors_wherever_they_are() -> None:
    tensors = [torch.randn(size, dtype=torch.float64) for size in (1, 0, 300, 70_000)]
    mixed = [
        tensor.to(device, dtype)
        for tensor in tensors
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    found = square_sum(mixed, torch.device("cuda"))
    assert found.device.type == "cuda"
    assert float(found) == pytest.approx(sum(float(tensor.double().square().sum()) for tensor in mixed), rel=1e-5)
