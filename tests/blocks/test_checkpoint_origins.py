"""Checkpoints of other optimizers: SGD's is a warm start, the others are refused as what they are."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, clones, mlp, snapshot, train
from torch import nn

from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer, LineSearch, SelectedUpdates


def saved_by(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 2) -> dict[str, Any]:
    model = mlp()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, steps)
    return optimizer.state_dict()


def sgd(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, **options})


def test_a_checkpoint_of_sgd_is_a_warm_start() -> None:
    """Its momentum and numbers, and the damping that the optimizer was built with."""
    saved = saved_by(sgd)
    model, twin = mlp(seed=1), mlp(seed=1)
    optimizer = KFACOptimizer([{"params": model.parameters(), "damping": 0.07}], model=model, factor_update_period=1)
    train(model, optimizer, 3)  # what was measured is gone
    with pytest.warns(UserWarning, match=r"is of torch\.optim\.SGD: its momentum .* begin from zero") as caught:
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert [each.filename for each in caught] == [__file__]
    twin.load_state_dict(model.state_dict())
    expected = KFACOptimizer(twin, 0.3, 0.9, weight_decay=0.01, damping=0.07, factor_update_period=1)
    for number, param in enumerate(twin.parameters()):
        expected.state[param]["momentum_buffer"] = saved["state"][number]["momentum_buffer"].clone()
    train(model, optimizer, 3, start=5)
    train(twin, expected, 3, start=5)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(optimizer.factors(), expected.factors())


def test_the_momentum_of_sgd_is_of_no_use_to_updates_of_a_mean() -> None:
    optimizer = KFACOptimizer(mlp(), momentum=0.9, step_size=SelectedUpdates())
    with pytest.warns(UserWarning, match=r"its momentum is not, since it is a sum .*; set lr anew"):
        optimizer.load_state_dict(saved_by(sgd))


def test_a_checkpoint_of_sgd_without_momentum_is_one_too() -> None:
    optimizer = KFACOptimizer(mlp(), momentum=0.9)
    with pytest.warns(UserWarning, match=r"of torch\.optim\.SGD"):
        optimizer.load_state_dict(saved_by(lambda params: sgd(params, momentum=0.0)))
    assert optimizer.param_groups[0]["momentum"] == 0.0
    assert optimizer.param_groups[0]["damping"] == 1e-3


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"momentum": 0.0}, {"momentum": 0.9, "step_size": SelectedUpdates()}, "SelectedUpdates .* got momentum=0"),
        ({"weight_decay": 0.0}, {"step_size": LineSearch()}, "LineSearch .*: momentum of param group 1 must be 0"),
        ({"momentum": 0.0}, {"step_size": LineSearch()}, "weight_decay=0.01 of param group 1 is no part of the loss"),
    ],
)
def test_numbers_of_a_checkpoint_that_do_not_go_with_the_step_size_are_refused_with_a_remedy_that_works(
    theirs: dict[str, Any], ours: dict[str, Any], message: str
) -> None:
    """Only the second param group of the checkpoint has such numbers."""
    bad = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **theirs}
    good = {"momentum": ours.get("momentum", 0.0), "weight_decay": 0.0}
    halves = [list(mlp()[i].parameters()) for i in (0, 2)]
    saved = torch.optim.SGD([{"params": halves[0], **good}, {"params": halves[1]}], **bad).state_dict()
    model = mlp()
    groups = [{"params": list(model[i].parameters())} for i in (0, 2)]
    optimizer = KFACOptimizer(groups, model=model, lr=0.01, **ours)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=f"the checkpoint cannot be loaded: {message}") as error:
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), before)
    assert "Nothing has been changed." in str(error.value)
    assert "change them in checkpoint['param_groups']" in str(error.value)
    saved["param_groups"][1].update(good)
    with pytest.warns(UserWarning, match=r"is of torch\.optim\.SGD"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_a_checkpoint_of_a_model_with_another_head_is_refused_with_a_remedy() -> None:
    model, other = mlp(), mlp(sizes=(4, 5, 7))
    saved = KFACOptimizer(model, factor_update_period=1)
    train(model, saved, 2)
    remedy = "load the parameters alone, and begin with a new optimizer. Nothing has been changed."
    with pytest.raises(ValueError, match=f"'momentum_buffer' of '2.weight' is .*, here .*{re.escape(remedy)}"):
        KFACOptimizer(other).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("inverse", [Cholesky(), EKFAC()], ids=repr)
def test_a_checkpoint_that_sgd_has_read_and_saved_is_read_again(inverse: Inverse[Any]) -> None:
    """It makes all tensors of a parameter floating-point ones, counts and flags of layers as well."""
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, momentum=0.9, factor_update_period=1, inverse=inverse)
    train(model, optimizer, 3)
    other = sgd(list(model.parameters()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = KFACOptimizer(twin, momentum=0.9, factor_update_period=1, inverse=inverse)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_identical(again.factors(), optimizer.factors())
    damaged = copy.deepcopy(other.state_dict())
    damaged["state"][0]["kfac"]["inverse"]["factors"]["refused"] += 0.5
    with pytest.raises(ValueError, match=r"'factors\.refused' of '0' is of torch\.float"):
        again.load_state_dict(damaged)


REFUSED: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], int, str]] = {
    "Adam": (torch.optim.Adam, 2, r"is of Adam or AdamW: its state holds 'step', 'exp_avg', 'exp_avg_sq'"),
    "AdamW": (torch.optim.AdamW, 2, r"is of Adam or AdamW"),
    "Adam before a step": (torch.optim.Adam, 0, r"is of Adam or AdamW: its param groups hold 'betas', 'eps'"),
    "RMSprop": (
        lambda params: torch.optim.RMSprop(params, momentum=0.9),
        2,
        r"is of another optimizer: its state holds 'step', 'square_avg', 'momentum_buffer'",
    ),
    "Adagrad": (torch.optim.Adagrad, 2, r"is of another optimizer: its state holds 'step', 'sum'"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("skipped", [(), ("*",)], ids=["", "every layer skipped"])
def test_another_optimizers_checkpoint_is_refused_by_name_with_a_remedy_that_works(
    case: str, skipped: tuple[str, ...]
) -> None:
    make, steps, message = REFUSED[case]
    saved = saved_by(make, steps)
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1, skip_layers=skipped)
    train(model, optimizer, 2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message) as error:
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), before)
    remedy = "optimizer.param_groups[0]['weight_decay'] = checkpoint['param_groups'][0]['weight_decay']"
    assert remedy in str(error.value)
    exec(remedy, {"optimizer": optimizer, "checkpoint": saved})
    train(model, optimizer, 1)
