"""Named losses, where a loop drops gradients, goes on from a step that was skipped, or copies its optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import batch, mlp
from torch import Tensor, nn

from kfac_optim import ExactGGN, KFACOptimizer, MonteCarlo, QuadraticModel
from kfac_optim.fisher.estimates import NamedLoss

CRITERION = nn.CrossEntropyLoss()
CLASSES = torch.arange(8) % 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2}


def take_step(model: nn.Module, optimizer: KFACOptimizer, number: int, times: float = 1.0) -> None:
    optimizer.zero_grad()
    (times * F.cross_entropy(model(batch(number)), CLASSES)).backward()
    optimizer.step()


@pytest.mark.parametrize("drop", ["optimizer", "model"])
def test_the_quadratic_model_is_that_of_the_last_backward_where_another_was_dropped(drop: str) -> None:
    ends = []
    for dropped in ((), (1, 2)):
        model = mlp()
        optimizer = KFACOptimizer(model, estimate=ExactGGN(CRITERION), step_size=QuadraticModel(), **OPTIONS)
        for number in range(4):
            if number in dropped:
                F.cross_entropy(model(batch(9)), CLASSES).backward()
                (optimizer if drop == "optimizer" else model).zero_grad()
            take_step(model, optimizer, number)
            assert optimizer.metrics()["learning_rate"] > 0
        ends.append(model.state_dict())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-12)


def test_momentum_of_the_quadratic_model_follows_a_model_that_is_cast() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, estimate=ExactGGN(CRITERION), step_size=QuadraticModel(), **OPTIONS)
    for number in range(4):
        if number == 2:
            model.double()
        optimizer.zero_grad()
        x = batch(number).to(model[0].weight.dtype)
        F.cross_entropy(model(x), CLASSES).backward()
        optimizer.step()
    assert {held["momentum_buffer"].dtype for held in optimizer.state.values()} == {torch.float64}
    assert 0 < abs(optimizer.metrics()["momentum"]) < 10


def test_what_follows_a_skipped_step_draws_the_same_targets_in_a_run_that_is_resumed() -> None:
    runs = []
    for _ in range(2):
        model = mlp()
        runs.append((model, KFACOptimizer(model, estimate=MonteCarlo(CRITERION), **OPTIONS)))
    (model, optimizer), (other, resumed) = runs
    for number in range(2):
        take_step(model, optimizer, number)
    take_step(model, optimizer, 2, times=float("nan"))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in runs:
        take_step(*each, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def outside(model: nn.Module, criterion: Callable[..., Tensor], number: int) -> Tensor:
    """Return a loss whose criterion reads what was computed from the output of the model."""
    return criterion(3 * model(batch(number)).square(), torch.ones(8, 3, dtype=torch.float64))


@pytest.mark.parametrize("estimate", [ExactGGN, MonteCarlo])
@pytest.mark.parametrize("copies", ["model and optimizer", "criterion too", "twice"])
def test_a_copy_goes_on_like_the_original_by_whichever_criterion_the_loop_calls(
    estimate: Callable[[nn.Module], NamedLoss], copies: str
) -> None:
    criterion = nn.MSELoss()
    model = mlp()
    optimizer = KFACOptimizer(model, estimate=estimate(criterion), **OPTIONS)

    def go_on(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module, *numbers: int) -> None:
        for number in numbers:
            optimizer.zero_grad()
            outside(model, criterion, number).backward()
            optimizer.step()

    go_on(model, optimizer, criterion, 0, 1)
    called = criterion
    if copies == "criterion too":
        model2, optimizer2, called = copy.deepcopy((model, optimizer, criterion))
    else:
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        if copies == "twice":
            model2, optimizer2 = copy.deepcopy((model2, optimizer2))
    go_on(model, optimizer, criterion, 2, 3)
    go_on(model2, optimizer2, called, 2, 3)
    for one, two in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(one, two)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = mlp(), nn.ModuleList(mlp(seed, sizes=(3, 2)) for seed in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x).tanh()
        return [head(hidden) for head in self.heads]


@pytest.mark.parametrize("is_named", [False, True])
def test_all_heads_count_where_the_gradients_of_tasks_are_taken_apart(is_named: bool) -> None:
    """Gradient surgery: a backward and `zero_grad()` for each task, whose gradients are put together by hand."""
    factors = []
    for apart in (True, False):
        model = Tasks()
        criterion = nn.MSELoss()
        given: dict[str, Any] = {"estimate": ExactGGN(criterion)} if is_named else {}
        optimizer = KFACOptimizer(model, lr=0.0, **given)
        losses = [criterion(output, torch.ones_like(output)) for output in model(batch())]
        if apart:
            sums = [torch.zeros_like(param) for param in model.parameters()]
            for loss in losses:
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                for total, param in zip(sums, model.parameters(), strict=True):
                    total += 0 if param.grad is None else param.grad
            for total, param in zip(sums, model.parameters(), strict=True):
                param.grad = total
        else:
            sum(losses).backward()
        optimizer.step()
        factors.append(optimizer.factors())
    assert len(factors[0]) == 5
    torch.testing.assert_close(factors[0], factors[1], rtol=1e-9, atol=1e-12)


def test_a_second_backward_through_one_call_of_the_criterion_is_warned_of() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, estimate=ExactGGN(CRITERION), **OPTIONS)
    loss = CRITERION(model(batch()), CLASSES)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()
    with pytest.warns(
        UserWarning, match="more than once through what one call of the criterion .* call the criterion for"
    ):
        optimizer.step()
    for number in range(2):  # one call and one backward each
        optimizer.zero_grad()
        CRITERION(model(batch(number)), CLASSES).backward()
        optimizer.step()
