"""A step that asks a new optimizer for its state, as `torch.distributed.checkpoint` does, is none of the training."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.plain import assert_identical, batch, clones, mlp, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

from kfac_optim import (
    ExactGGN,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    TrustRegion,
)

CRITERION = nn.MSELoss()
NAMED = ExactGGN(CRITERION)
CHOICES: dict[str, dict[str, Any]] = {
    "no momentum, so that directions are kept": {},
    "nothing of biases": {"step_size": TrustRegion()},
    "weight decay and dampening": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "l2_in_curvature": True},
    "selected updates": {"momentum": 0.9, "step_size": SelectedUpdates()},
    "a quadratic model": {"step_size": QuadraticModel(), "estimate": NAMED, "adapt_damping": LevenbergMarquardt(3)},
    "a line search": {"step_size": LineSearch(), "estimate": NAMED, "inverse": SampleSpace(momentum=0.8)},
    "an average": {"momentum": 0.9, "average": IterateAverage()},
}


def new(**options: Any) -> tuple[nn.Module, KFACOptimizer]:
    model = nn.Sequential(*mlp(), nn.LayerNorm(3, dtype=torch.float64))
    return model, KFACOptimizer(model, lr=0.1, factor_update_period=2, inverse_update_period=3, **options)


def step_by_closure(model: nn.Module, optimizer: KFACOptimizer, steps: int, *, start: int = 0) -> None:
    for i in range(start, start + steps):

        def closure(i: int = i) -> Tensor:
            optimizer.zero_grad()
            output = model(batch(i))
            loss = CRITERION(output, torch.ones_like(output))
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_training_goes_on_as_if_the_state_had_not_been_asked_for(choice: str) -> None:
    """Periods, momentum, its dampening and averages begin with the first step of the training."""
    (model, optimizer), (twin, untouched) = (new(**CHOICES[choice]) for _ in range(2))
    get_optimizer_state_dict(model, optimizer)
    for each in ((model, optimizer), (twin, untouched)):
        step_by_closure(*each, 5)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(optimizer.metrics(), untouched.metrics())
    assert_identical(optimizer.state_dict(), untouched.state_dict())


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_read_into_the_state_resumes_bitwise(choice: str, tmp_path: Path) -> None:
    (model, optimizer), (other, fresh) = (new(**CHOICES[choice]) for _ in range(2))
    step_by_closure(model, optimizer, 5)
    state = get_optimizer_state_dict(model, optimizer)
    template = get_optimizer_state_dict(other, fresh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=tmp_path)
        dcp.load(template, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, fresh, template)
    other.load_state_dict(model.state_dict())
    for each in ((model, optimizer), (other, fresh)):
        step_by_closure(*each, 4, start=5)
    assert_identical(clones(other.parameters()), clones(model.parameters()))


@pytest.mark.parametrize("choice", ["weight decay and dampening", "selected updates", "an average"])
def test_a_state_that_was_asked_for_holds_no_step(choice: str) -> None:
    """Of `optim.SGD` the momentum then holds the weight decay."""
    model, optimizer = new(**CHOICES[choice])
    before = clones(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    held = optimizer.state_dict()["state"].values()
    layers = 2 if choice == "selected updates" else 3  # which leave the norm layer to AdamW
    assert [each.pop("kfac")["clock"]["step"] for each in held if "kfac" in each] == [0] * layers
    assert all("momentum_buffer" in each for each in held)
    assert not any(torch.as_tensor(value).any() for each in held for key, value in each.items() if key != "average")
    assert_identical(clones(model.parameters()), before)


def test_a_copy_begins_with_no_momentum_as_well() -> None:
    model, optimizer = new(momentum=0.9, dampening=0.5)
    get_optimizer_state_dict(model, optimizer)
    other, copied = copy.deepcopy((model, optimizer))
    twin, untouched = new(momentum=0.9, dampening=0.5)
    for each in ((other, copied), (twin, untouched)):
        train(*each, 3)
    assert_identical(clones(other.parameters()), clones(twin.parameters()))


def test_the_first_step_of_a_warm_up_from_zero_counts() -> None:
    """Its rate is zero, but there was a forward, though its gradients are zero as well."""
    model, optimizer = new(momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: step / 4)
    (model(batch()) * 0).sum().backward()
    optimizer.step()
    scheduler.step()
    assert next(iter(optimizer.state_dict()["state"].values()))["kfac"]["clock"]["step"] == 1


def test_every_step_counts_of_an_optimizer_that_has_a_state() -> None:
    (model, optimizer), (other, loaded) = (new(momentum=0.9) for _ in range(2))
    train(model, optimizer, 3)
    loaded.load_state_dict(optimizer.state_dict())
    for param in other.parameters():
        param.grad = torch.zeros_like(param)
    for group in loaded.param_groups:
        group["lr"] = 0.0
    loaded.step()
    assert next(iter(loaded.state_dict()["state"].values()))["kfac"]["clock"]["step"] == 4
