"""timm: its registry makes the optimizer by name, with groups of parameters for weight decay."""

from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import KFACOptimizer

# Without torchvision, or beside one that was built for another torch, it cannot be imported.
optim = pytest.importorskip("timm.optim", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]

from timm.optim._optim_factory import default_registry  # noqa: E402

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        # timm's scripts ask the optimizer for this, and it makes a backward far dearer.
        create_graph = getattr(optimizer, "is_second_order", False)
        model(x).square().mean().backward(create_graph=create_graph)
        optimizer.step()


def test_an_optimizer_of_the_registry_is_that_of_a_plain_loop() -> None:
    default_registry.register(optim.OptimInfo(name="kfac", opt_class=KFACOptimizer, has_eps=False, has_momentum=True))
    assert not optim.get_optimizer_info("kfac").second_order
    model, twin = network(), network()
    ours = optim.create_optimizer_v2(model, opt="kfac", weight_decay=0.1, **OPTIONS)
    decayed = [param for param in twin.parameters() if param.dim() > 1]
    rest = [param for param in twin.parameters() if param.dim() <= 1]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    theirs = KFACOptimizer(groups, model=twin, **OPTIONS)
    train(model, ours)
    train(twin, theirs)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert ours.metrics()["measured_parameters"] == 1.0
