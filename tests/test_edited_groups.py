"""Scripts that edit `optimizer.param_groups`: the optimizer takes on what stands there when it is next asked."""

from collections.abc import Callable

import pytest
import torch
from helpers.plain import assert_identical, clones, mlp, train
from torch import nn

from kfac_optim import KFACOptimizer, TrustRegion

pytestmark = pytest.mark.usefixtures("float64")


def new(model: nn.Module, **options: object) -> KFACOptimizer:
    return KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1, **options)


def names(optimizer: KFACOptimizer) -> list[str]:
    return [block.name for block in optimizer._binding.coverage.blocks]


def test_a_layer_that_was_taken_out_is_in_no_checkpoint() -> None:
    model = mlp()
    optimizer = new(model)
    train(model, optimizer, 3)
    for param in model[2].parameters():
        param.requires_grad_(False)
        del optimizer.state[param]
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    state = optimizer.state_dict()
    assert list(state["state"]) == [0, 1]
    assert names(optimizer) == ["0"]
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)


@pytest.mark.parametrize("kl_clip", [1e-3, None])
def test_without_momentum_a_layer_that_was_taken_out_leaves_no_state_that_torch_misses(kl_clip: float | None) -> None:
    """The default trust region keeps the last directions, and a checkpoint shows the state of blocks."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1, kl_clip=kl_clip)
    train(model, optimizer, 2)
    optimizer.state_dict()
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    train(model, optimizer, 2, start=2)
    state = optimizer.state_dict()
    assert set(state["state"]) == {0, 1}
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)


def test_a_layer_that_was_put_in_the_place_of_another_is_preconditioned() -> None:
    model = mlp()
    optimizer = new(model)
    train(model, optimizer, 2)
    for param in model[2].parameters():
        del optimizer.state[param]
    model[2] = nn.Linear(5, 3)
    optimizer.param_groups[0]["params"][-2:] = model[2].parameters()
    train(model, optimizer, 2)
    assert optimizer._binding.coverage.blocks[1].params == tuple(model[2].parameters())
    assert optimizer.metrics()["measured_parameters"] == 1


def test_a_group_that_was_taken_out_is_no_part_of_the_trust_region() -> None:
    """Its layer has gradients, and takes no step."""
    found = []
    for listed in (1, 2):
        model = mlp()
        groups = [{"params": list(model[i].parameters())} for i in (0, 2)]
        optimizer = new(model, step_size=TrustRegion(), kl_clip=1e-6)
        optimizer.param_groups.clear()
        for group in groups[:listed]:
            optimizer.add_param_group(group)
        del optimizer.param_groups[1:]
        train(model, optimizer, 2)
        found.append(clones(model.parameters()))
    assert_identical(found[1], found[0])


def test_groups_that_are_built_anew_keep_their_statistics() -> None:
    model = mlp()
    optimizer = new(model)
    train(model, optimizer, 3)
    before = optimizer.factors()
    weights, biases = ([param for param in model.parameters() if param.dim() == dim] for dim in (2, 1))
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": weights, "weight_decay": 0.1})
    optimizer.add_param_group({"params": biases})
    assert_identical(optimizer.factors(), before)


def test_a_parameter_in_two_groups_is_told() -> None:
    model = mlp()
    groups = [{"params": list(model[i].parameters())} for i in (0, 2)]
    optimizer = KFACOptimizer(groups, lr=0.1, model=model)
    optimizer.param_groups[1]["params"].append(model[0].weight)
    with pytest.raises(ValueError, match=r"a parameter \[5, 4\] is in param groups 0 and 1"):
        optimizer.zero_grad()


@pytest.mark.parametrize("ask", [lambda optimizer: optimizer.step(), lambda optimizer: optimizer.state_dict()])
def test_names_that_were_not_edited_along_are_told(ask: Callable[[KFACOptimizer], object]) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.named_parameters(), model=model, lr=0.1)
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ValueError, match="param group 0 has 2 parameters and 4 'param_names'"):
        ask(optimizer)


def test_a_weight_decay_that_takes_the_damping_away_is_refused_before_anything_is_changed() -> None:
    model = mlp()
    optimizer = new(model, damping=0.01, l2_in_curvature=True)
    train(model, optimizer, 2)
    before = clones(model.parameters()), optimizer.factors()
    optimizer.param_groups[0]["weight_decay"] = -0.02
    with pytest.raises(ValueError, match=r"param group 0 damping=0\.01 and weight_decay=-0\.02 leave none"):
        train(model, optimizer, 1)
    assert_identical((clones(model.parameters()), optimizer.factors()), before)
    optimizer.param_groups[0]["weight_decay"] = -0.005
    train(model, optimizer, 1)
