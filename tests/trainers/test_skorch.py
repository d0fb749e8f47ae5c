"""skorch: `NeuralNet(optimizer=KFACOptimizer)` makes the optimizer of parameters and calls `step` with a closure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import KFACOptimizer, LevenbergMarquardt, MonteCarlo

skorch = pytest.importorskip("skorch")

EXAMPLES, BATCH, EPOCHS = 16, 4, 3
OPTIONS: dict[str, Any] = {"momentum": 0.9, "factor_update_period": 1}


class Network(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, 4, generator=generator), torch.randint(0, 3, (EXAMPLES,), generator=generator)


def network(**options: Any) -> Any:
    options = {f"optimizer__{key}": value for key, value in (OPTIONS | options).items()}
    loop = {"batch_size": BATCH, "max_epochs": EPOCHS, "train_split": None, "verbose": 0}
    return skorch.NeuralNet(Network, nn.CrossEntropyLoss, optimizer=KFACOptimizer, lr=0.1, **loop, **options)


def trained(**options: Any) -> Any:
    return network(**options).fit(*(each.numpy() for each in data()))


def in_a_plain_loop(model: nn.Module, optimizer: KFACOptimizer) -> None:
    for _ in range(EPOCHS):
        for x, y in zip(*(each.split(BATCH) for each in data()), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_a_run_is_that_of_a_plain_loop() -> None:
    """The model is found at the first forward."""
    net, twin = trained(), Network()
    in_a_plain_loop(twin, KFACOptimizer(twin, lr=0.1, **OPTIONS))
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(net.module_.parameters(), twin.parameters(), strict=True)
    )
    assert net.optimizer_.metrics()["measured_parameters"] == 1.0
    assert set(net.optimizer_.factors()) == {"0", "2"}


def test_its_closure_serves_choices_that_evaluate_the_loss_again() -> None:
    net = trained(estimate=MonteCarlo(nn.CrossEntropyLoss()), adapt_damping=LevenbergMarquardt(interval=2))
    assert net.optimizer_.param_groups[0]["damping"] != KFACOptimizer(Network()).param_groups[0]["damping"]
    assert net.history[-1]["train_loss"] < net.history[0]["train_loss"]


def test_a_saved_run_goes_on(tmp_path: Path) -> None:
    """The new optimizer has not seen its model when it loads its state."""
    saved, fresh = trained(), network().initialize()
    files = {"f_params": tmp_path / "model.pt", "f_optimizer": tmp_path / "optimizer.pt"}
    saved.save_params(**files)
    fresh.load_params(**files)
    for net in (saved, fresh):
        net.partial_fit(*(each.numpy() for each in data()))
    pairs = zip(fresh.module_.parameters(), saved.module_.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
