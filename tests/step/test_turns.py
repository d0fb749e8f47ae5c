"""Layers that the loss does not use at every step, and layers that come late."""

import pytest
import torch
from helpers.plain import batch, mlp, square_loss
from torch import Tensor, nn

from kfac_optim import KFACOptimizer

pytestmark = pytest.mark.usefixtures("float64")


class Tasks(nn.Module):
    """A trunk, and heads of which each forward uses one."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(heads))

    def forward(self, x: Tensor, task: int) -> Tensor:
        output: Tensor = self.heads[task](self.trunk(x).tanh())
        return output


@pytest.mark.parametrize("heads", [2, 4, 5, 7])
def test_heads_that_take_turns_are_measured_at_the_second_use_of_each_period(heads: int) -> None:
    """The period of 10 has a factor in common with some of these numbers, so that some heads have no step of it."""
    torch.manual_seed(0)
    model = Tasks(heads)
    optimizer = KFACOptimizer(model, lr=0.01)
    steps = 60
    for step in range(steps):
        optimizer.zero_grad()
        square_loss(model(torch.randn(8, 4), step % heads)).backward()
        optimizer.step()
    folds = {block.name: block.clock.folds for block in optimizer._binding.coverage.blocks}
    assert folds.pop("trunk") == steps // 10
    least = steps // 10 - 1 if heads <= 5 else steps // 21
    assert all(least <= count <= steps // 10 for count in folds.values()), folds
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_a_head_whose_gradients_are_zeroed_in_place_keeps_its_request() -> None:
    torch.manual_seed(0)
    model = Tasks(2)
    optimizer = KFACOptimizer(model, lr=0.01)
    for step in range(24):
        optimizer.zero_grad(set_to_none=False)
        square_loss(model(torch.randn(8, 4), step % 2)).backward()
        optimizer.step()
    assert optimizer._binding.coverage.blocks[2].clock.folded_at == 23


def test_a_request_is_given_up_after_many_periods() -> None:
    model = Tasks(2)
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=2)
    for step in range(40):
        optimizer.zero_grad()
        square_loss(model(torch.randn(8, 4), int(step in (0, 3)))).backward()
        optimizer.step()
        if step == 20:
            assert optimizer._binding.coverage.blocks[2].wants_statistics()
    assert not optimizer._binding.coverage.blocks[2].clock.missed


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_is_used_no_more_is_looked_at_by_period(set_to_none: bool) -> None:
    model = Tasks(2)
    optimizer = KFACOptimizer(model, lr=0.01)
    wanted = []
    for step in range(20):
        optimizer.zero_grad(set_to_none)
        square_loss(model(torch.randn(8, 4), 0 if step else 1)).backward()
        wanted.append([block.name for block in optimizer._binding.coverage.blocks if block.wants_statistics()])
        optimizer.step()
    assert wanted[11:] == [[]] * 9


@pytest.mark.parametrize("period", [1, 3])
def test_a_layer_whose_calls_are_seen_no_more_is_named_once(period: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=period)

    def step(seed: int) -> None:
        loss = square_loss(model(batch(seed)))
        optimizer.zero_grad()
        if seed == 0:
            loss.backward()
        else:
            for param, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                param.grad = gradient
        optimizer.step()

    for seed in range(period + 3):
        step(seed)
    with pytest.warns(UserWarning, match="'0', '2': there are gradients, and statistics were due and have not come"):
        step(period + 3)
    for seed in range(period + 4, 15):
        step(seed)
    assert optimizer.metrics()["factor_age"] == 14


@pytest.mark.parametrize("then", ["unused", "frozen", "released"])
def test_a_layer_that_gives_no_statistics_for_a_reason_is_not_named(then: str) -> None:
    torch.manual_seed(0)
    model = Tasks(2)
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=2)
    for step in range(9):
        if step == 1 and then == "frozen":
            model.heads[1].weight.requires_grad_(False)
        if step == 1 and then == "released":
            optimizer.remove_hooks()
        optimizer.zero_grad(set_to_none=False)
        loss = square_loss(model(torch.randn(8, 4), 0))
        if step == 0 or then != "unused":
            loss = loss + square_loss(model(torch.randn(8, 4), 1))
        loss.backward()
        if step == 2 and then == "unused":
            model.heads[1].weight.grad += 1  # so that its statistics are waited for
        optimizer.step()
    assert optimizer._binding.coverage.blocks[2].clock.folded_at == 0


def test_a_request_that_stands_is_in_checkpoints() -> None:
    def run(steps: range, saved: dict | None = None) -> KFACOptimizer:
        torch.manual_seed(0)
        model = Tasks(2)
        optimizer = KFACOptimizer(model, lr=0.0)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in steps:
            optimizer.zero_grad()
            square_loss(model(torch.full((8, 4), 1.0 + step), 1 if step in (0, 9, 11, 13) else 0)).backward()
            optimizer.step()
        return optimizer

    whole, first = run(range(14)), run(range(12))
    resumed = run(range(12, 14), first.state_dict())
    for block, other in zip(*(each._binding.coverage.blocks for each in (whole, resumed)), strict=True):
        assert block.clock == other.clock
    assert whole._binding.coverage.blocks[2].clock.folded_at == 13


@pytest.mark.parametrize("by", ["a group", "unfreezing"])
def test_layers_that_come_late_are_measured_and_refreshed_at_the_steps_of_the_others(by: str) -> None:
    model = mlp(sizes=(4, 5, 5, 3))
    first = [param for layer in model[2:] for param in layer.parameters()]
    for param in model[0].parameters():
        param.requires_grad_(by == "a group")
    optimizer = KFACOptimizer(first if by == "a group" else model, lr=0.01, model=model)
    for step in range(43):
        if step == 23:
            if by == "a group":
                optimizer.add_param_group({"params": list(model[0].parameters())})
            for param in model[0].parameters():
                param.requires_grad_(True)
        optimizer.zero_grad()
        square_loss(model(torch.randn(8, 4))).backward()
        optimizer.step()
    clocks = {block.name: block.clock for block in optimizer._binding.coverage.blocks}
    assert {clock.step for clock in clocks.values()} == {43}
    assert {clock.folded_at for clock in clocks.values()} == {40}
    assert (clocks["0"].folds, clocks["2"].folds) == (3, 5)
