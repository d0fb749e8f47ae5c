"""Traces of `torch.jit` hold the model alone, and leave training as it was."""

import pytest
import torch
from helpers.oracles import assert_same
from helpers.plain import batch, mlp, train
from torch import Tensor, nn

from kfac_optim import KFACOptimizer


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.:DeprecationWarning")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_is_traced_on_every_step_and_trains_on_as_if_it_was_not(steps: int) -> None:
    ends = []
    for traces in (False, True):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=2)
        train(model, optimizer, steps)
        if traces:
            traced = torch.jit.trace(model, batch())  # type: ignore[no-untyped-call]
            assert torch.equal(traced(batch(1)), model(batch(1)))
        train(model, optimizer, 3, start=steps)
        ends.append(list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_an_exported_model_has_nothing_of_the_optimizers() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 1)
    exported = torch.export.export(model, (batch(),))
    assert not any("kfac" in str(node.target) for node in exported.graph.nodes)
    assert_same(exported.module()(batch()), model(batch()))
    train(model, optimizer, 1)
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_a_model_is_traced_by_fx_as_without_hooks() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(Product(), nn.Tanh()).to(batch().dtype)
    optimizer = KFACOptimizer(model, lr=0.1)
    traced = torch.fx.symbolic_trace(model)
    assert_same(traced(batch()), model(batch()))
    train(model, optimizer, 1)
