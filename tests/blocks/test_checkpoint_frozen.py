"""Layers that are frozen for a while, or are out of sight, stay in step in copies and in what checkpoints resume."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, block, clones, mlp, train
from test_checkpoint import through_a_file
from torch import Tensor, nn

from kfac_optim import EKFAC, KFACOptimizer, LowRank

Run = tuple[nn.Module, KFACOptimizer]

OPTIONS = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 3}


def copied(run: Run) -> Run:
    return copy.deepcopy(run)


def pickled(run: Run) -> Run:
    return pickle.loads(pickle.dumps(run))


def reloaded(run: Run, **options: object) -> Run:
    """A script that builds the optimizer when the layer is frozen already."""
    model, optimizer = run
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = copy.deepcopy(model)
    resumed = KFACOptimizer(twin, **{**OPTIONS, **options})
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    return twin, resumed


WAYS: dict[str, Callable[[Run], Run]] = {"copied": copied, "pickled": pickled, "reloaded": reloaded}


def frozen(names: tuple[str, ...]) -> Run:
    """Parameters of these names are frozen after some steps."""
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 5)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model, optimizer


def assert_goes_on_alike(run: Run, other: Run, names: tuple[str, ...]) -> None:
    """Some steps while frozen, some afterwards; averages, clocks and parameters are equal to the bit."""
    for model, optimizer in (run, other):
        train(model, optimizer, 4, start=5)
        for name in names:
            model.get_parameter(name).requires_grad_(True)
        train(model, optimizer, 4, start=9)
    assert_identical(clones(other[0].parameters()), clones(run[0].parameters()))
    assert_identical(other[1].state_dict(), run[1].state_dict())


@pytest.mark.parametrize("names", [("0.weight", "0.bias"), ("2.weight", "2.bias"), ("0.bias",), ("0.weight",)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_layer_stays_in_step(way: str, names: tuple[str, ...]) -> None:
    """The weight alone and the bias alone too: the block covers both, whatever is frozen of it."""
    run = frozen(names)
    other = WAYS[way](run)
    assert [block(run[1], "0").clock, block(run[1], "2").clock] == [
        block(other[1], "0").clock,
        block(other[1], "2").clock,
    ]
    assert_goes_on_alike(run, other, names)


class Product(nn.Module):
    """A matrix that a function multiplies by."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_matrix_of_a_function_stays_in_step(way: str) -> None:
    model = mlp()
    model[0] = Product(model[0])
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 5)
    model[0].requires_grad_(False)
    assert_goes_on_alike((model, optimizer), WAYS[way]((model, optimizer)), ("0.weight",))


@pytest.mark.parametrize("options", [{}, {"inverse": EKFAC()}, {"inverse": LowRank(rank=1, sketch=2)}], ids=str)
def test_a_state_of_before_the_first_step_brings_it_back(options: dict[str, Any]) -> None:
    """Without a copy of it, as of torch's optimizers: one for each fold of a cross-validation."""
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS, **options)
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    runs = []
    for _ in range(2):
        train(model, optimizer, 6)
        runs.append(clones(model.parameters()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    assert_identical(runs[0], runs[1])


def test_what_was_copied_twice_and_reloaded_while_frozen_is_still_in_step() -> None:
    names = ("0.weight", "0.bias")
    run = frozen(names)
    assert_goes_on_alike(run, reloaded(copied(copied(run))), names)


def test_a_checkpoint_that_is_refused_leaves_an_optimizer_that_began_frozen_as_it_was() -> None:
    run = frozen(("0.weight", "0.bias"))
    twin = copy.deepcopy(run[0])
    resumed = KFACOptimizer(twin, **OPTIONS)
    broken = copy.deepcopy(run[1].state_dict())
    broken["state"][0]["kfac"]["inverse"]["factors"]["A"]["mass"].neg_()
    with pytest.raises(ValueError, match=r"'factors\.A\.mass' of '0' is negative"):
        resumed.load_state_dict(broken)
    assert [each.name for each in resumed._binding.coverage.blocks] == ["2"]
    resumed.load_state_dict(copy.deepcopy(run[1].state_dict()))
    assert_goes_on_alike(run, (twin, resumed), ("0.weight", "0.bias"))


class Sometimes(nn.Module):
    """A matrix that a function multiplies by, where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.randn(4, 4) / 2)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x).tanh()
        return x @ self.matrix if self.used else x


def test_the_clock_of_a_layer_that_no_forward_shows_for_a_while_goes_on() -> None:
    """And a refresh that fell due meanwhile comes with the first step that shows it."""
    model = Sometimes().double()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 5)
    model.used = False
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    twin = Sometimes().double()
    twin.used = False
    twin.load_state_dict(saved[0])
    resumed = KFACOptimizer(twin, **OPTIONS)
    resumed.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (twin, resumed)):
        train(each, its, 4, start=5)
    clocks = [each.state_dict()["state"][0]["kfac"]["clock"]["step"] for each in (optimizer, resumed)]
    assert clocks == [9, 9]
    assert resumed.state_dict()["state"][0]["kfac"]["name"].tolist() == list(b"matrix")
    for each, its in ((model, optimizer), (twin, resumed)):
        each.used = True
        train(each, its, 4, start=9)
    assert_identical(clones(twin.parameters()), clones(model.parameters()))
    assert_identical(resumed.factors(), optimizer.factors())


def frozen_at_first() -> tuple[nn.Module, KFACOptimizer]:
    model = mlp()
    model[0].requires_grad_(False)
    return model, KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1, inverse_update_period=2)


@pytest.mark.parametrize("unfrozen", ["before the load", "after it"])
def test_a_script_that_unfreezes_a_layer_in_mid_training_resumes_its_own_checkpoint_bitwise(unfrozen: str) -> None:
    """When it begins anew the layer is frozen, and the optimizer is built then."""
    model, optimizer = frozen_at_first()
    train(model, optimizer, 2)
    model[0].requires_grad_(True)
    train(model, optimizer, 3, start=2)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    second, resumed = frozen_at_first()
    second.load_state_dict(saved["model"])
    if unfrozen == "before the load":
        second[0].requires_grad_(True)
    resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))
    assert_identical(resumed.state_dict(), saved["optimizer"])
    second[0].requires_grad_(True)
    train(second, resumed, 3, start=5)
    train(model, optimizer, 3, start=5)
    assert_identical(clones(second.parameters()), clones(model.parameters()))
    assert_identical(resumed.state_dict(), optimizer.state_dict())
