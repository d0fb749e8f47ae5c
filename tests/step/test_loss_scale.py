"""The scale of the loss is found, whoever made the scaler and when, and clipping never enters the statistics."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.plain import Factors, assert_same_factors, batch, factors_after, mlp, square_loss, train
from torch import Tensor, nn
from torch.amp import GradScaler

from kfac_optim import ExactGGN, KFACOptimizer, LevenbergMarquardt

SCALE = 2.0**10


def plain_factors() -> Factors:
    return factors_after(mlp(), lambda model: square_loss(model(batch())).backward())


def optimizer_of(model: nn.Module, **options: Any) -> KFACOptimizer:
    return KFACOptimizer(model, **{"lr": 0.0, "factor_update_period": 1, **options})


def clip(model: nn.Module, by: float = 0.3) -> None:
    """Multiply all gradients by `by`, as clipping of the norm does."""
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    nn.utils.clip_grad_norm_(model.parameters(), by * float(norm))


# -- by a GradScaler -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_that_is_made_later_is_found(unscale: bool, clips: bool) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    scaler = GradScaler("cpu", init_scale=1234.5)
    scaler.scale(square_loss(model(batch()))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    if clips:
        clip(model)
    scaler.step(optimizer)
    assert_same_factors(optimizer.factors(), plain_factors(), rtol=1e-6)


@pytest.mark.parametrize("drop", ["model.zero_grad()", "optimizer.zero_grad()", "param.grad = None", "zeros"])
def test_what_a_scaler_leaves_out_leaves_nothing_behind(drop: str) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    scaler = GradScaler("cpu", init_scale=SCALE)
    for factor in (torch.inf, 1.0):
        loss = square_loss(model(batch(3 if factor != 1 else 0)))
        if factor != 1:
            optimizer.set_loss_terms(99)
        scaler.scale(loss).backward()
        if factor != 1:
            model[0].weight.grad[0, 0] = factor
        scaler.step(optimizer)
        scaler.update()
        if drop == "param.grad = None":
            for param in model.parameters():
                param.grad = None
        elif drop == "zeros":
            model.zero_grad(set_to_none=False)
        else:
            (model if drop.startswith("model") else optimizer).zero_grad()
    assert_same_factors(optimizer.factors(), plain_factors(), rtol=1e-10)
    assert optimizer._binding.coverage.blocks[0].clock.step == 1
    assert optimizer.metrics()["skipped_steps"] == 1


def test_gradients_thrown_away_by_the_model_take_their_statistics_along() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    square_loss(model(batch(7))).backward()
    model.zero_grad()
    for part in batch().split(2):
        (model(part).square().sum() / 16).backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), plain_factors())


# -- by anybody else -------------------------------------------------------------------------------------------


def by_a_constant(model: nn.Module, number: float) -> None:
    for param in model.parameters():
        param.grad *= number


@pytest.mark.parametrize("then_clip", [False, True])
def test_a_constant_scale_taken_off_by_hand_is_seen(then_clip: bool) -> None:
    """Once a step has shown it, clipping is told from it as well."""
    model = mlp()
    optimizer = optimizer_of(model, factor_decay=1e-6)  # the last statistics alone
    for clips in (False, then_clip):
        optimizer.zero_grad()
        (SCALE * square_loss(model(batch()))).backward()
        by_a_constant(model, 1 / SCALE)
        if clips:
            clip(model, 0.37)
        optimizer.step()
    assert_same_factors(optimizer.factors(), plain_factors(), rtol=1e-5)


@pytest.mark.parametrize("then_clip", [False, True])
def test_gradients_divided_by_the_number_of_micro_batches_are_those_of_the_mean(then_clip: bool) -> None:
    """As pipeline schedules do it by default, after the backwards of all."""
    model = mlp()
    optimizer = optimizer_of(model, factor_decay=1e-6)
    for clips in (False, then_clip):
        optimizer.zero_grad()
        for part in torch.tensor_split(batch(size=9), 3):
            square_loss(model(part)).backward()
        by_a_constant(model, 1 / 3)
        if clips:
            clip(model, 0.37)
        optimizer.step()
    whole = factors_after(mlp(), lambda model: square_loss(model(batch(size=9))).backward())
    assert_same_factors(optimizer.factors(), whole, rtol=1e-5)


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_backwards_whose_gradients_were_dropped_are_not_among_them(by: str) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    square_loss(model(batch(seed=7))).backward()
    (optimizer if by == "optimizer" else model).zero_grad()
    for part in torch.tensor_split(batch(size=9), 3):
        square_loss(model(part)).backward()
    by_a_constant(model, 1 / 3)
    optimizer.step()
    whole = factors_after(mlp(), lambda model: square_loss(model(batch(size=9))).backward())
    assert_same_factors(optimizer.factors(), whole, rtol=1e-5)


def test_after_a_step_was_judged_nothing_is_kept() -> None:
    model, criterion = mlp(), nn.MSELoss()
    judge = LevenbergMarquardt(interval=1)
    optimizer = optimizer_of(model, estimate=ExactGGN(criterion), adapt_damping=judge)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(batch()), torch.zeros(8, 3))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def clipped(model: nn.Module) -> None:
    clip(model, 0.37)


def clipped_nearly_by_half(model: nn.Module) -> None:
    clip(model, 0.50001)


def clipped_far(model: nn.Module) -> None:
    clip(model, 0.02)


def with_noise(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad += 0.1 * torch.randn_like(param)


def of_signs(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.sign_()


@pytest.mark.parametrize("edit", [clipped, clipped_nearly_by_half, clipped_far, with_noise, of_signs])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_other_edits_of_the_gradient_leave_the_statistics_alone_and_are_no_news(
    edit: Callable[[nn.Module], None], micro_batches: int
) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    for part in batch().chunk(micro_batches):
        (model(part).square().sum() / 16).backward()
    edit(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert_same_factors(optimizer.factors(), plain_factors())


@pytest.mark.parametrize("named", [False, True])
def test_a_scale_that_clipping_hides_is_doubted_once_and_naming_the_scaler_helps(named: bool) -> None:
    model = mlp()
    scaler = GradScaler("cpu", init_scale=SCALE)
    optimizer = optimizer_of(model, grad_scaler=scaler if named else None)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(square_loss(model(batch()))).backward()
        scaler.unscale_(optimizer)
        clip(model, 0.37)
        warns = not named and step == 0
        with pytest.warns(UserWarning, match="far below 1") if warns else nullcontext():
            optimizer.step()
        scaler.update()
    if named:
        assert_same_factors(optimizer.factors(), plain_factors(), rtol=1e-10)


def test_nothing_is_kept_of_steps_without_statistics() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=4)
    train(model, optimizer, 2)
    square_loss(model(batch())).backward()
    assert not optimizer._window.probe._kept
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_who_asks_within_a_step_whether_it_unscales_does_not_count_as_a_scaler() -> None:
    """Lightning asks so before it clips, in the closure of a step without a scaler."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = square_loss(model(batch()))
        loss.backward()
        assert not optimizer._step_supports_amp_scaling
        return loss.detach()

    for _ in range(3):
        optimizer.set_loss_terms(5)
        optimizer.step(closure)
        model(batch())
    assert optimizer.metrics()["skipped_steps"] == 0
