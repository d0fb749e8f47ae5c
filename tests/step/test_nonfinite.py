"""What is not finite: the step is skipped, or the sample refused, or the refresh given up; and never for ever."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.plain import assert_identical, batch, clones, mlp, square_loss, train
from torch import Tensor, nn

from kfac_optim import KFACOptimizer
from kfac_optim.utils.precision import finite_on_device

NAN, INF = float("nan"), float("inf")


def nan_loss(model: nn.Module) -> None:
    (square_loss(model(batch())) * NAN).backward()


def infinite_input(model: nn.Module) -> None:
    x = batch()
    x[2, 1] = INF
    square_loss(model(x)).backward()


def one_bad_gradient(model: nn.Module) -> None:
    square_loss(model(batch())).backward()
    model.get_parameter("2.bias").grad[1] = -INF


def bad_gradient_of_an_uncovered_parameter(model: nn.Module) -> None:
    square_loss(model(batch())).backward()
    model.get_parameter("1.weight").grad.fill_(NAN)


BAD = [nan_loss, infinite_input, one_bad_gradient, bad_gradient_of_an_uncovered_parameter]


def with_prelu() -> nn.Sequential:
    model = mlp()
    model[1] = nn.PReLU(dtype=torch.float64)
    return model


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch_in_the_middle_changes_nothing_but_a_count(bad: Callable[[nn.Module], None]) -> None:
    model, twin = with_prelu(), with_prelu()
    numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "factor_update_period": 2, "inverse_update_period": 3}
    optimizer, reference = KFACOptimizer(model, **numbers), KFACOptimizer(twin, **numbers)
    for i in range(5):
        optimizer.zero_grad()
        bad(model)
        optimizer.step()
        train(model, optimizer, 1, start=i)
        train(twin, reference, 1, start=i)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict()))
    assert optimizer.metrics()["skipped_steps"] == 5.0
    assert reference.metrics()["skipped_steps"] == 0.0


def test_a_skipped_step_returns_the_loss_of_its_closure() -> None:
    model = mlp()
    before = clones(model.parameters())

    def closure() -> Tensor:
        loss = square_loss(model(batch())) * INF
        loss.backward()
        return loss

    assert KFACOptimizer(model).step(closure) == INF
    assert_identical(clones(model.parameters()), before)


def test_too_many_skipped_steps_in_a_row_raise_with_the_parameter_and_a_good_one_starts_anew() -> None:
    model = with_prelu()
    optimizer = KFACOptimizer(model, lr=0.1, nonfinite_limit=3, factor_update_period=1)

    def bad_step() -> None:
        optimizer.zero_grad()
        one_bad_gradient(model)
        optimizer.step()

    for _ in range(2):
        bad_step()
        bad_step()
        train(model, optimizer, 1)
    bad_step()
    bad_step()
    before = clones(model.parameters())
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*nonfinite_limit=3.*'2\.bias'\."):
        bad_step()
    assert_identical(clones(model.parameters()), before)


def test_without_a_limit_steps_are_skipped_for_ever() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, nonfinite_limit=None, factor_update_period=1, inverse_update_period=10)
    for _ in range(50):
        optimizer.zero_grad()
        nan_loss(model)
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 50.0


def overflow_statistics(model: nn.Module) -> None:
    """The second moment of an input overflows float32; gradients stay finite."""
    x = batch(dtype=torch.float32)
    x[0, 0] = 1e20
    with torch.no_grad():
        model[0].weight[:, 0] = 0  # or the Tanh saturates, and a row without gradient does not count
    (square_loss(model(x)) * 1e-10).backward()


def test_too_many_refused_samples_in_a_row_raise_with_the_layer_and_leave_the_averages() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.0, nonfinite_limit=3, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 2)
    factors = optimizer.factors()["0"]
    for run in (overflow_statistics, overflow_statistics, None, overflow_statistics, overflow_statistics):
        if run is None:
            train(model, optimizer, 1)
            factors = optimizer.factors()["0"]
        else:
            optimizer.zero_grad()
            run(model)
            optimizer.step()
    optimizer.zero_grad()
    overflow_statistics(model)
    with pytest.raises(RuntimeError, match=r"layer '0' were not finite 3 times in a row \(nonfinite_limit=3\)"):
        optimizer.step()
    assert_identical(optimizer.factors()["0"], factors)


def test_too_many_failed_refreshes_in_a_row_raise_with_the_layer() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, nonfinite_limit=2, inverse_update_period=1, factor_update_period=1000)
    train(model, optimizer, 1)
    (_, block) = optimizer._binding.coverage.blocks
    good = block.state.g.inverse.clone()
    block.state.pair.g.packed.fill_(NAN)  # no public way leads here: what is not finite is refused
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"the inverse of layer '2' could not be computed 2 times in a row"):
        train(model, optimizer, 1)
    assert torch.equal(block.state.g.inverse, good)
    assert optimizer.metrics()["failed_refreshes"] == 2.0


def test_the_count_in_a_row_is_part_of_a_checkpoint() -> None:
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.0, nonfinite_limit=2, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    overflow_statistics(model)
    optimizer.step()
    resumed = KFACOptimizer(twin, lr=0.0, nonfinite_limit=2, inverse_update_period=1)
    resumed.load_state_dict(optimizer.state_dict())
    overflow_statistics(twin)
    with pytest.raises(RuntimeError, match=r"layer '0' were not finite 2 times"):
        resumed.step()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, 1.0])
@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_a_device_tells_of_any_element_that_is_not_finite(value: float, place: int | None) -> None:
    """Huge ones are, though their sum is not."""
    gradients = [torch.ones(5, 3), torch.ones(4, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)]
    if place is not None:
        gradients[place].flatten()[-2:] = value
    expected = place is None or abs(value) < INF
    assert finite_on_device([*gradients, torch.ones(0)]).item() == expected


def test_no_element_at_all_is_finite() -> None:
    assert finite_on_device([torch.ones(0)]).item()


def test_a_direction_whose_square_overflows_is_none() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    buffers = [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters()]
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e30)
    optimizer.step()
    for param, old, buffer in zip(model.parameters(), before, buffers, strict=True):
        now = optimizer.state[param]["momentum_buffer"]
        assert now.isfinite().all()
        assert bool((now.abs() <= buffer.abs()).all()), "nothing was added to the momentum"
        assert torch.equal(param, old - 0.1 * now)
