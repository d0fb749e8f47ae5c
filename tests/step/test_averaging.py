"""The average of the iterates: against the mean written out, and as what evaluation sees and training does not."""

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.plain import FREQUENT, batch, mlp, square_loss, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from kfac_optim import IterateAverage, KFACOptimizer, LevenbergMarquardt, MonteCarlo

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **FREQUENT}
AVERAGED: dict[str, Any] = {**OPTIONS, "average": IterateAverage()}


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def written_out(iterates: list[list[Tensor]], eta: float, decay: float) -> list[Tensor]:
    """`x̄ ← β x̄ + (1 - β) x` with `β = min(1 - (1 + η)/(k + η), decay)`."""
    found = iterates[0]
    for k, iterate in enumerate(iterates[1:], 2):
        beta = min(1 - (1 + eta) / (k + eta), decay)
        found = [beta * mean + (1 - beta) * value for mean, value in zip(found, iterate, strict=True)]
    return found


@settings(deadline=None, max_examples=10)
@given(eta=st.sampled_from([0.0, 1.5, 8.0]), decay=st.sampled_from([0.0, 0.7, 1.0]), steps=st.integers(1, 12))
def test_evaluation_sees_the_average_and_training_goes_on_from_the_iterates(
    eta: float, decay: float, steps: int
) -> None:
    model, plain = mlp(), mlp()
    optimizer = KFACOptimizer(model, **OPTIONS, average=IterateAverage(eta, decay))
    without = KFACOptimizer(plain, **OPTIONS)
    iterates = []
    for i in range(steps):
        train(model, optimizer, 1, start=i)
        train(plain, without, 1, start=i)
        iterates.append(values(model))
        for _ in range(2):  # the second call does nothing
            optimizer.eval()
        for ours, mean in zip(values(model), written_out(iterates, eta, decay), strict=True):
            assert torch.allclose(ours, mean, rtol=1e-12, atol=1e-14)
        for _ in range(2):
            optimizer.train()
        assert_equal(values(model), values(plain))


def test_the_average_of_a_parameter_that_was_taken_out_of_the_groups_is_not_shown() -> None:
    """Another optimizer trains it since, so its average is old."""
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    head = list(model[2].parameters())
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if all(param is not each for each in head)]
    with torch.no_grad():
        head[0].fill_(3.0)
    before = values(model)
    optimizer.eval()
    shown = values(model)
    assert_equal(shown[2:], before[2:])
    assert not torch.equal(shown[0], before[0])
    optimizer.train()
    assert_equal(values(model), before)


def test_without_an_average_both_calls_do_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 2)
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    optimizer.eval()
    optimizer.train()
    assert_equal(values(model), before)
    assert all("average" not in held for held in state["state"].values())


def test_a_step_from_the_average_is_refused_and_changes_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 3)
    optimizer.eval()
    before = values(model)
    with pytest.raises(RuntimeError, match=r"step\(\) was called while the model holds the averages.*optimizer\.train"):
        train(model, optimizer, 1)
    assert_equal(values(model), before)
    optimizer.train()
    train(model, optimizer, 1)


@pytest.mark.parametrize("saved", ["while training", "while evaluating", "as a copy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_was_saved_goes_on_as_if_nothing_had_been(saved: str, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 4)
    if saved == "as a copy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        if saved == "while evaluating":
            optimizer.eval()
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other = mlp(seed=1, dtype=dtype)
        other.load_state_dict(weights)
        resumed = KFACOptimizer(other, **AVERAGED)
        resumed.load_state_dict(state)
    for each, its in ((optimizer, model), (resumed, other)):
        each.train()
        train(its, each, 3, start=4)
        each.eval()
    assert_equal(values(model), values(other))
    averages = [held["average"] for held in resumed.state.values()]
    assert {average.dtype for average in averages} == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("eta", [0.0, 8.0])
def test_a_state_of_no_step_loads_and_the_average_begins_with_the_first(eta: float) -> None:
    """A new optimizer makes that state when `torch.distributed.checkpoint` asks for it."""
    model, twin = mlp(), mlp()
    optimizer, untouched = (KFACOptimizer(each, **OPTIONS, average=IterateAverage(eta)) for each in (model, twin))
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    for each, its in ((optimizer, model), (untouched, twin)):
        train(its, each, 3)
        each.eval()
    assert_equal(values(model), values(twin))


def both(model: nn.Module, optimizer: KFACOptimizer) -> dict[str, Any]:
    return dict(zip(("model_state_dict", "optim_state_dict"), get_state_dict(model, optimizer), strict=True))


def resume(model: nn.Module, optimizer: KFACOptimizer, folder: Path) -> None:
    template = both(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(template, checkpoint_id=folder)
    set_state_dict(model, optimizer, **template)


def test_trained_parameters_that_were_not_read_are_missed_and_the_remedy_works(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` has read what a new optimizer had a place for."""
    model, other = mlp(), mlp(seed=1)
    optimizer, resumed = KFACOptimizer(model, **AVERAGED), KFACOptimizer(other, **AVERAGED)
    train(model, optimizer, 4)
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(both(model, optimizer), checkpoint_id=tmp_path)
    remedy = r"get_optimizer_state_dict\(model, optimizer\) and then optimizer\.eval\(\)"
    with pytest.raises(ValueError, match=rf"'iterate' of '0\.weight'.* is missing.*{remedy}"):
        resume(other, resumed, tmp_path)
    get_optimizer_state_dict(other, resumed)
    resumed.eval()
    resume(other, resumed, tmp_path)
    for each, its in ((optimizer, model), (resumed, other)):
        each.train()
        train(its, each, 3, start=4)
    assert_equal(values(model), values(other))


def spoil(model: nn.Module) -> None:
    next(model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]


def test_steps_that_are_not_taken_are_not_averaged() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    square_loss(model(batch())).backward()
    spoil(model)
    optimizer.step()
    assert {held["averaged_steps"] for held in optimizer.state.values()} == {2}


def test_steps_that_are_taken_back_are_not_averaged() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(), batch(), torch.randint(3, (8,))
    optimizer = KFACOptimizer(
        model,
        **{**AVERAGED, "lr": 1e4},
        kl_clip=None,
        estimate=MonteCarlo(nn.CrossEntropyLoss()),
        adapt_damping=LevenbergMarquardt(reject=True),
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    rejected = optimizer.metrics()["rejected_steps"]
    assert rejected > 0
    assert {held.get("averaged_steps", 0) for held in optimizer.state.values()} == {3 - rejected}


def test_the_average_of_a_layer_that_is_trained_later_begins_then() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 3)
    model[0].requires_grad_(True)
    train(model, optimizer, 1, start=3)
    assert [held["averaged_steps"] for held in (optimizer.state[param] for param in model.parameters())] == [1, 1, 4, 4]
    iterate = values(model[0])
    optimizer.eval()
    assert_equal(values(model[0]), iterate)


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "shape": (lambda held: held.update(average=torch.zeros(2)), r"'average' of '0\.weight' is \[2\], here \[5, 4\]"),
    "nan": (lambda held: held["average"].fill_(torch.nan), r"'average' of '0\.weight' is not finite"),
    "steps": (lambda held: held.update(averaged_steps=2.5), r"'averaged_steps' of '0\.weight' is 2\.5"),
    "no steps": (lambda held: held.pop("averaged_steps"), r"'averaged_steps' of '0\.weight' is None"),
    "steps alone": (lambda held: held.pop("average"), r"'averaged_steps' of '0\.weight' is 2, and must be .* nowhere"),
    "iterate": (lambda held: held.update(iterate=torch.zeros(3)), r"'iterate' of '0\.weight' is \[3\]"),
    "iterate alone": (
        lambda held: (held.update(iterate=held.pop("average")), held.pop("averaged_steps")),
        r"'iterate' of '0\.weight' is there without 'average'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_averages_are_refused_before_anything_changes(damage: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    change, message = DAMAGES[damage]
    change(state["state"][0])
    before = copy.deepcopy(optimizer.state_dict()["state"][0]["average"])
    with pytest.raises(ValueError, match=message + ".*Nothing has been changed"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["average"], before)


def test_averages_that_the_optimizer_does_not_go_on_with_are_left_with_a_warning() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    other = KFACOptimizer(mlp(), **OPTIONS)
    with pytest.warns(UserWarning, match=r"holds averages.*average=IterateAverage\(\)"):
        other.load_state_dict(optimizer.state_dict())
    assert all("average" not in held for held in other.state.values())


def test_averages_that_a_model_was_loaded_with_are_told_and_the_remedy_works() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    trained = values(model)
    optimizer.eval()
    saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"saved after optimizer\.eval\(\).*then call optimizer\.train\(\)") as caught:
        KFACOptimizer(other, **OPTIONS).load_state_dict(saved)
    assert len(caught) == 1
    remedy = KFACOptimizer(other, **AVERAGED)
    remedy.load_state_dict(saved)
    remedy.train()
    assert_equal(values(other), trained)


@pytest.mark.parametrize(("value", "error"), [(-0.1, ValueError), (float("nan"), ValueError), ("0.9", TypeError)])
@pytest.mark.parametrize("name", ["eta", "decay"])
def test_numbers_out_of_range_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} of IterateAverage must be"):
        IterateAverage(**{name: value})
    with pytest.raises(ValueError, match="decay of IterateAverage must be"):
        IterateAverage(decay=1.1)
    with pytest.raises(TypeError, match=r"average \(None is no average\) must be an IterateAverage"):
        KFACOptimizer(mlp(), average=0.99)


def test_the_average_follows_the_model_to_another_dtype() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, **AVERAGED)
    train(model, optimizer, 2)
    averages = [optimizer.state[param]["average"].double() for param in model.parameters()]
    model.double()
    train(model, optimizer, 1, start=2)
    weight = IterateAverage().weight(3)
    for param, before in zip(model.parameters(), averages, strict=True):
        assert torch.equal(optimizer.state[param]["average"], before.lerp(param.detach(), weight))
