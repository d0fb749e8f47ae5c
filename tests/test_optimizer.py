"""`KFACOptimizer` as an optimizer: params, groups, gradients, hooks, periods; each does what users of SGD expect."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.plain import (
    FREQUENT,
    assert_identical,
    assert_same_factors,
    batch,
    block,
    clones,
    direction,
    edited,
    factors_after,
    gradient_matrix,
    layer_direction,
    linear_factors,
    mlp,
    refresh_steps,
    sgd_step,
    snapshot,
    square_loss,
    train,
    trust_region,
)
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from kfac_optim import EKFAC, Cholesky, DoublyFactored, Eigen, ExactGGN, KFACOptimizer, Structure, TrustRegion
from kfac_optim.distributed import DistributedConfig

MakeParams = Callable[[nn.Module], Any]


# -- what params may be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(lambda m: m.parameters(), id="generator"),
        pytest.param(lambda m: list(m.parameters()), id="list"),
        pytest.param(lambda m: m.named_parameters(), id="named"),
        pytest.param(lambda m: [{"params": m.parameters()}], id="one-group"),
        pytest.param(lambda m: [{"params": m[0].parameters()}, {"params": m[2].parameters()}], id="two-groups"),
        pytest.param(lambda m: [{"params": m[0].named_parameters()}, {"params": m[2].named_parameters()}], id="named"),
    ],
)
def test_every_form_of_params_takes_the_steps_of_passing_the_model(params: MakeParams) -> None:
    model, twin = mlp(), mlp()
    train(model, KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1), 5)
    train(twin, KFACOptimizer(params(twin), lr=0.1, momentum=0.9, model=twin, factor_update_period=1), 5)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_named_parameters_keep_their_names_in_the_groups() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.named_parameters(), model=model)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_the_model_may_be_named_twice() -> None:
    model = mlp()
    assert len(KFACOptimizer(model, model=model).summary().blocks) == 2


def test_duplicate_parameters_are_refused_as_by_torch() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        KFACOptimizer([{"params": model.parameters()}, {"params": model[0].parameters()}], model=model)


def test_an_empty_model_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        KFACOptimizer(nn.Tanh())


def test_a_group_without_parameters_is_taken_as_by_torch() -> None:
    optimizer = KFACOptimizer([{"params": []}], lr=0.1)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["params"] == []
    model = mlp()
    optimizer.add_param_group({"params": list(model.parameters())})
    train(model, optimizer, 1)
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_a_model_that_is_one_layer_is_preconditioned() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    before = clones(model.parameters())
    optimizer = KFACOptimizer(model, lr=0.5, kl_clip=None)
    x = batch()
    output = model(x)
    output.retain_grad()
    square_loss(output).backward()
    optimizer.step()
    a, g = linear_factors(x, output.grad, len(x))
    assert_same_factors(optimizer.factors(), {"": (a, g)})
    expected = layer_direction(model, (a, g), 1e-3)
    torch.testing.assert_close(before[0] - model.weight, 0.5 * expected[:, :-1])
    torch.testing.assert_close(before[1] - model.bias, 0.5 * expected[:, -1])


# -- numbers of groups -----------------------------------------------------------------------------------------


def test_each_group_uses_its_own_numbers() -> None:
    """Two groups of one optimizer step like two optimizers, each with one group's numbers."""
    numbers = [
        {
            "lr": 0.1,
            "momentum": 0.9,
            "damping": 0.1,
            "factor_decay": 0.5,
            "weight_decay": 0.1,
            "factor_update_period": 1,
        },
        {"lr": 0.2, "momentum": 0.0, "damping": 0.01, "inverse_update_period": 2, "factor_update_period": 2},
    ]
    model, twin = mlp(), mlp()
    groups = [{"params": model[i].parameters(), **n} for i, n in zip((0, 2), numbers, strict=True)]
    optimizer = KFACOptimizer(groups, model=model, kl_clip=None, inverse_update_period=1, factor_update_period=1)
    apart = [
        KFACOptimizer(twin[i].parameters(), model=twin, **{"kl_clip": None, "inverse_update_period": 1, **n})
        for i, n in zip((0, 2), numbers, strict=True)
    ]
    for i in range(6):
        for owner, optimizers in ((model, [optimizer]), (twin, apart)):
            owner.zero_grad()
            square_loss(owner(batch(i))).backward()
            for each in optimizers:
                each.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    plain = mlp()
    train(plain, KFACOptimizer(plain, kl_clip=None, inverse_update_period=1, **numbers[0]), 6)
    assert not torch.allclose(plain[2].weight, model[2].weight), "the groups' numbers made no difference"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.03),
        ("lr", torch.tensor(0.03)),
        ("momentum", 0.3),
        ("dampening", 0.5),
        ("weight_decay", 0.3),
        ("nesterov", True),
        ("maximize", True),
        ("damping", 0.7),
        ("factor_decay", 0.2),
        ("factor_update_period", 3),
        ("inverse_update_period", 2),
        ("kl_clip", 1e-4),
        ("kl_clip", None),
    ],
)
def test_an_edit_of_a_group_between_steps_takes_effect_at_the_next_step(key: str, value: Any) -> None:
    """Editing `param_groups` equals having loaded the same state into an optimizer built with the new number."""
    options: dict[str, Any] = {
        "lr": 0.1,
        "momentum": 0.9,
        "kl_clip": 1e-2,
        "factor_update_period": 1,
        "inverse_update_period": 1,
    }
    model = mlp()
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 4)
    twin, untouched = copy.deepcopy(model), copy.deepcopy(model)
    built = KFACOptimizer(twin, **{**options, key: copy.deepcopy(value)})
    groups = [{**group, "params": built.state_dict()["param_groups"][0]["params"]} for group in built.param_groups]
    # torch shares loaded momentum buffers with the checkpoint, so each run needs its own copy.
    built.load_state_dict({**copy.deepcopy(optimizer.state_dict()), "param_groups": groups})
    same = KFACOptimizer(untouched, **options)
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0][key] = value
    for each, owner in ((optimizer, model), (built, twin), (same, untouched)):
        train(owner, each, 4, start=4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert not torch.equal(model[0].weight, untouched[0].weight), "the edit made no difference"


def test_a_bad_edit_of_a_group_is_refused_before_anything_changes() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    before = clones(model.parameters())
    optimizer.param_groups[0]["damping"] = -1.0
    with pytest.raises(ValueError, match=r"damping in param group 0 must be finite, above 0, got -1\.0"):
        optimizer.step()
    assert_identical(clones(model.parameters()), before)
    optimizer.param_groups[0]["damping"] = 1e-3
    optimizer.step()
    assert optimizer.metrics()["factor_age"] == 1.0, "the refused step is not one"


def test_groups_that_disagree_on_kl_clip_are_refused() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "kl_clip": 1e-2}, {"params": model[2].parameters()}]
    optimizer = KFACOptimizer(groups, model=model, kl_clip=1e-3)
    square_loss(model(batch())).backward()
    before = clones(model.parameters())
    with pytest.raises(ValueError, match=r"disagree on kl_clip: 0\.01, 0\.001\. Set the same value in every group"):
        optimizer.step()
    assert_identical(clones(model.parameters()), before)


def test_weight_and_bias_in_different_groups_share_the_weights_block_numbers_and_keep_their_own_lr() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    kl_clip = 1e-4
    groups = [
        {"params": [model.bias], "lr": 0.3, "weight_decay": 0.0, "damping": 7.0, "factor_decay": 0.3},
        {"params": [model.weight], "lr": 0.1, "weight_decay": 0.2, "damping": 0.05, "factor_decay": 0.9},
    ]
    periods: dict[str, Any] = {"inverse_update_period": 1, "factor_update_period": 1}
    optimizer = KFACOptimizer(groups, model=model, kl_clip=kl_clip, step_size=TrustRegion(), **periods)
    moments = []
    for i in range(3):
        before = clones((model.weight, model.bias))
        optimizer.zero_grad()
        output = model(batch(i))
        output.retain_grad()
        square_loss(output).backward()
        moments.append(linear_factors(batch(i), output.grad, 8))
        optimizer.step()
        weights = torch.tensor([0.9 ** (len(moments) - 1 - j) for j in range(len(moments))], dtype=torch.float64)
        a, g = (
            sum(w * pair[side] for w, pair in zip(weights, moments, strict=True)) / weights.sum() for side in (0, 1)
        )
        assert_same_factors(optimizer.factors(), {"": (a, g)})
        matrix = layer_direction(model, (a, g), 0.05)
        weight_part, bias_part = matrix[:, :-1], matrix[:, -1]
        products = (0.1, (weight_part * model.weight.grad).sum()), (0.3, (bias_part * model.bias.grad).sum())
        scale = trust_region(kl_clip, *products)
        assert scale < 1
        assert optimizer.metrics()["trust_region_scale"] == pytest.approx(scale, rel=1e-9)
        torch.testing.assert_close(before[0] - model.weight, 0.1 * (scale * weight_part + 0.2 * before[0]))
        torch.testing.assert_close(before[1] - model.bias, 0.3 * scale * bias_part)


def test_the_trust_region_weighs_each_group_with_its_own_lr() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.4}]
    optimizer = KFACOptimizer(groups, model=model, kl_clip=1e-5)
    square_loss(model(batch())).backward()
    optimizer.step()
    products = []
    for name, lr in (("0", 0.1), ("2", 0.4)):
        layer = model.get_submodule(name)
        grad = gradient_matrix(layer.weight.grad, layer.bias.grad)
        products.append((lr, (layer_direction(layer, optimizer.factors()[name], 1e-3) * grad).sum()))
    expected = trust_region(1e-5, *products)
    assert expected < 1
    assert optimizer.metrics()["trust_region_scale"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kl_clip", [None, 1e-6, 1e6])
def test_momentum_that_goes_uphill_is_held_back_to_the_trust_region(kl_clip: float | None, nesterov: bool) -> None:
    """To `√κ` of rise by the momentum of all covered layers together; uncovered parameters keep theirs."""
    model = nn.Sequential(mlp(), nn.PReLU(dtype=torch.float64))
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "kl_clip": kl_clip, "damping": 1.0}
    options |= {"factor_update_period": 1000, "inverse_update_period": 1000, "step_size": TrustRegion()}
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    (-5 * square_loss(model(batch(102)))).backward()  # the loss turns round
    covered = {name: model[0].get_submodule(name[2:]) for name in optimizer.factors()}
    buffers = {name: optimizer.state[layer.weight]["momentum_buffer"].clone() for name, layer in covered.items()}
    free = optimizer.state[model[1].weight]["momentum_buffer"].clone()
    steps, products, rise = {}, [], 0.0
    for name, layer in covered.items():
        steps[name] = layer_direction(layer, optimizer.factors()[name], 1.0)
        grad = gradient_matrix(layer.weight.grad, layer.bias.grad)
        products.append((0.1, (steps[name] * grad).sum()))
        held = gradient_matrix(*(optimizer.state[p]["momentum_buffer"] for p in (layer.weight, layer.bias)))
        rise -= 0.1 * 0.9 * float((held * grad).sum())
    scale = 1.0 if kl_clip is None else min(1.0, kl_clip**0.5 / rise)
    assert rise > 0
    assert (scale < 1) == (kl_clip == 1e-6)
    optimizer.step()
    assert optimizer.metrics()["momentum_scale"] == pytest.approx(scale, rel=1e-9)
    for name, layer in covered.items():
        expected = 0.9 * scale * buffers[name] + trust_region(kl_clip, *products) * steps[name][:, :-1]
        torch.testing.assert_close(optimizer.state[layer.weight]["momentum_buffer"], expected)
    torch.testing.assert_close(optimizer.state[model[1].weight]["momentum_buffer"], 0.9 * free + model[1].weight.grad)


@pytest.mark.parametrize(
    ("l2_in_curvature", "nesterov", "named"),
    [(False, False, False), (True, True, False), (False, True, True), (True, False, True)],
)
def test_maximising_the_negative_of_a_loss_equals_minimising_the_loss(
    l2_in_curvature: bool, nesterov: bool, named: bool
) -> None:
    model, twin, criterion = mlp(), mlp(), nn.MSELoss()
    options: dict[str, Any] = {
        "lr": 0.3,
        "momentum": 0.9,
        "nesterov": nesterov,
        "kl_clip": 1e-5,
        "weight_decay": 0.1,
        "l2_in_curvature": l2_in_curvature,
        **({"estimate": ExactGGN(criterion)} if named else {}),
        **FREQUENT,
    }
    up, down = KFACOptimizer(model, maximize=True, **options), KFACOptimizer(twin, **options)
    for step in range(8):
        for optimizer, owner, sign in ((up, model, -1), (down, twin, 1)):
            optimizer.zero_grad()
            output = owner(batch(step))
            (sign * (criterion(output, torch.ones_like(output)) if named else square_loss(output))).backward()
            optimizer.step()
        assert up.metrics()["measured_parameters"] == 1
        assert up.metrics()["momentum_scale"] == down.metrics()["momentum_scale"]
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


class Weighed(nn.Module):
    """Two layers, and a weight of the loss that is to grow."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize(
    ("ascending", "descending", "layers_sign"), [("weight", "net", 1), ("net.2", "net.0", 1), ("net.2", "net.0", -1)]
)
def test_a_group_that_ascends_beside_others_leaves_the_statistics_of_a_named_loss_as_they_are(
    ascending: str, descending: str, layers_sign: int
) -> None:
    """In a game of two layers none of them loses its statistics, whatever the sign of the loss."""
    ends = []
    for maximize in (True, False):
        torch.manual_seed(0)
        model, criterion = Weighed(), nn.MSELoss()
        named = list(model.named_parameters())
        groups = [
            {"params": [param for name, param in named if name.startswith(ascending)], "maximize": maximize},
            {"params": [param for name, param in named if name.startswith(descending)]},
        ]
        optimizer = KFACOptimizer(groups, lr=0.0, model=model, estimate=ExactGGN(criterion), **FREQUENT)
        for step in range(2):
            optimizer.zero_grad()
            loss = model.weight * criterion(model(batch(step)), torch.ones(8, 3, dtype=torch.float64))
            (loss * (layers_sign if maximize else 1)).backward()
            optimizer.step()
        ends.append(optimizer.factors())
    assert None not in ends[0]["net.0"]
    assert_identical(*ends)


def as_a_copy(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module) -> Any:
    return copy.deepcopy((model, optimizer, criterion))


def as_loaded(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module) -> Any:
    twin = copy.deepcopy(model)
    again = KFACOptimizer(twin, estimate=ExactGGN(criterion), lr=0.1, **FREQUENT)
    again.load_state_dict(optimizer.state_dict())
    return twin, again, criterion


def as_edited(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module) -> Any:
    for maximize in (False, True):
        optimizer.param_groups[0]["maximize"] = maximize
        optimizer.zero_grad()
    optimizer.param_groups[0]["maximize"] = False
    optimizer.zero_grad()
    optimizer.param_groups[0]["maximize"] = True
    return model, optimizer, criterion


@pytest.mark.parametrize("turn", [as_a_copy, as_loaded, as_edited])
def test_a_backward_goes_by_the_sign_that_the_groups_have_then(turn: Callable[..., Any]) -> None:
    """Of a loop that zeroes gradients at the end of a step, so that nothing looks at the groups before."""
    ends = []
    for turns in (False, True):
        model, criterion = mlp(), nn.MSELoss()
        groups = [{"params": list(model.parameters()), "maximize": True}]
        optimizer = KFACOptimizer(groups, model=model, estimate=ExactGGN(criterion), lr=0.1, **FREQUENT)
        for step in range(4):
            if turns and step == 2:
                model, optimizer, criterion = turn(model, optimizer, criterion)
            output = model(batch(step))
            (-criterion(output, torch.ones_like(output))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(optimizer.factors())
    assert_identical(*ends)


def test_a_tensor_learning_rate_takes_the_steps_of_a_number() -> None:
    model, twin = mlp(), mlp()
    tensor = torch.tensor(0.1, dtype=torch.float64)
    train(model, KFACOptimizer(model, lr=tensor, kl_clip=1e-4, factor_update_period=1), 4)
    train(twin, KFACOptimizer(twin, lr=0.1, kl_clip=1e-4, factor_update_period=1), 4)
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()), rtol=1e-12, atol=0)
    assert tensor == 0.1


# -- which parameters move -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frozen", [("0.weight", "0.bias"), ("0.bias",), ("0.weight",), ("2.weight",), ("0.weight", "2.bias")]
)
def test_frozen_parameters_stay_and_the_others_step_as_without_them(frozen: tuple[str, ...]) -> None:
    """Freezing equals leaving the parameter out of the groups; a bias frozen beside its weight drops a column."""
    model, twin = mlp(), mlp()
    for owner in (model, twin):
        for name in frozen:
            owner.get_parameter(name).requires_grad_(False)
    kept = [param for param in twin.parameters() if param.requires_grad]
    before = {name: model.get_parameter(name).clone() for name in frozen}
    train(model, KFACOptimizer(model, lr=0.1, momentum=0.9, weight_decay=0.1, factor_update_period=1), 4)
    train(twin, KFACOptimizer(kept, lr=0.1, momentum=0.9, weight_decay=0.1, model=twin, factor_update_period=1), 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical({name: model.get_parameter(name).detach() for name in frozen}, before)


def test_a_bias_frozen_while_its_weight_trains_leaves_a_block_without_the_column() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    before = model[0].weight.clone()
    x = batch()
    square_loss(model(x)).backward()
    optimizer.step()
    a, g = optimizer.factors()["0"]
    torch.testing.assert_close(a, (x.T @ x / len(x))[None])
    torch.testing.assert_close(before - model[0].weight, 0.1 * direction(model[0].weight.grad, a[0], g[0], 1e-3))


def test_a_bias_whose_weight_is_frozen_takes_the_plain_step() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-6)
    before = model[0].bias.clone()
    square_loss(model(batch())).backward()
    optimizer.step()
    assert torch.equal(model[0].bias, sgd_step(before, model[0].bias.grad, 0.1))
    assert set(optimizer.factors()) == {"2"}


def test_parameters_outside_the_groups_stay_put_though_they_have_gradients() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[2].parameters(), lr=0.1, model=model, factor_update_period=1)
    before = clones(model.parameters())
    train(model, optimizer, 3)
    assert model[0].weight.grad is not None
    assert_identical(clones(model.parameters())[:2], before[:2])
    assert not torch.equal(model[2].weight, before[2])
    assert set(optimizer.factors()) == {"2"}


def test_a_weight_outside_the_groups_leaves_its_bias_to_sgd() -> None:
    model = mlp()
    optimizer = KFACOptimizer([model[0].bias, *model[2].parameters()], lr=0.1, model=model, kl_clip=1e-6)
    before = clones(model[0].parameters())
    square_loss(model(batch())).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(model[0].bias, sgd_step(before[1], model[0].bias.grad, 0.1))


def test_a_parameter_that_is_not_of_the_model_takes_the_plain_step() -> None:
    model = mlp()
    temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = KFACOptimizer([*model.parameters(), temperature], lr=0.1, model=model)
    square_loss(model(batch()) * temperature).backward()
    optimizer.step()
    assert torch.equal(temperature, sgd_step(torch.tensor(2.0, dtype=torch.float64), temperature.grad, 0.1))


# -- add_param_group -------------------------------------------------------------------------------------------


def test_a_group_added_before_the_first_step_equals_one_given_from_the_start() -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(
        model[0].parameters(), lr=0.1, momentum=0.9, model=model, factor_update_period=1, inverse_update_period=10
    )
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05, "damping": 0.1})
    groups = [{"params": twin[0].parameters()}, {"params": twin[2].parameters(), "lr": 0.05, "damping": 0.1}]
    train(model, optimizer, 12)
    train(
        twin,
        KFACOptimizer(groups, lr=0.1, momentum=0.9, model=twin, factor_update_period=1, inverse_update_period=10),
        12,
    )
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_group_added_in_the_middle_is_preconditioned_from_then_on_and_the_others_keep_their_statistics() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[0].parameters(), lr=0.1, model=model, kl_clip=None, factor_update_period=1)
    train(model, optimizer, 3)
    before = optimizer.factors()["0"]
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
    assert_identical(optimizer.factors()["0"], before)
    weight = model[2].weight.clone()
    train(model, optimizer, 1, start=3)
    expected = layer_direction(model[2], optimizer.factors()["2"], 1e-3)[:, :-1]
    torch.testing.assert_close(weight - model[2].weight, 0.2 * expected)


def test_a_bias_added_to_its_weights_layer_joins_the_block() -> None:
    model = mlp()
    optimizer = KFACOptimizer([model[0].weight], lr=0.1, model=model, kl_clip=None, factor_update_period=1)
    train(model, optimizer, 2)
    assert optimizer.factors()["0"][0].shape == (1, 4, 4)
    optimizer.add_param_group({"params": [model[0].bias]})
    bias = model[0].bias.clone()
    train(model, optimizer, 1, start=2)
    assert optimizer.factors()["0"][0].shape == (1, 5, 5)
    expected = layer_direction(model[0], optimizer.factors()["0"], 1e-3)[:, -1]
    torch.testing.assert_close(bias - model[0].bias, 0.1 * expected)
    twin = mlp()
    whole = KFACOptimizer(twin[0].parameters(), model=twin)
    assert hooks_of(model) == hooks_of(twin), "the block of the weight alone is unhooked"
    assert len(whole.summary().blocks) == 1


def test_a_layer_unfrozen_and_added_later_is_preconditioned() -> None:
    """Gradual unfreezing: the usual recipe of fine-tuning."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model[2].parameters(), lr=0.1, model=model, factor_update_period=1)
    train(model, optimizer, 2)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    train(model, optimizer, 2, start=2)
    assert set(optimizer.factors()) == {"0", "2"}
    assert optimizer.metrics()["blocks_without_statistics"] == 0


def test_a_refused_group_changes_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[0].parameters(), model=model)
    with pytest.raises(ValueError, match=r"damping in param group 1"):
        optimizer.add_param_group({"params": model[2].parameters(), "damping": 0.0})
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": model[0].parameters()})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.summary().parameters) == 2


def test_a_group_whose_layer_does_not_fit_leaves_the_optimizer_as_it_was() -> None:
    models = [nn.ModuleList([*mlp(), nn.Conv2d(2, 4, 3, groups=2)]).double() for _ in range(2)]
    for model in models:
        model.forward = lambda x, model=model: model[2](model[1](model[0](x)))
        model[0].bias.requires_grad_(False)
    optimizer, reference = (
        KFACOptimizer(model[0].parameters(), lr=0.1, model=model, inverse=DoublyFactored(4), factor_update_period=1)
        for model in models
    )
    for model, each in zip(models, (optimizer, reference), strict=True):
        train(model, each, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"DoublyFactored\(channels=4\) does not fit layer '3'"):
            optimizer.add_param_group({"params": models[0][3].parameters()})
        assert len(optimizer.param_groups) == 1
        assert list(optimizer.factors()) == ["0"]
    for model, each in zip(models, (optimizer, reference), strict=True):
        model[0].bias.requires_grad_(True)  # layers are looked for again
        train(model, each, 2, start=2)
        each.add_param_group({"params": model[3].bias})
        train(model, each, 2, start=4)
    assert_identical(snapshot(optimizer), snapshot(reference))


# -- gradients -------------------------------------------------------------------------------------------------


def test_a_step_before_any_backward_changes_nothing() -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, weight_decay=0.1, factor_update_period=1)
    assert optimizer.step() is None
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    train(model, optimizer, 3)
    train(twin, KFACOptimizer(twin, lr=0.1, momentum=0.9, weight_decay=0.1, factor_update_period=1), 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_parameters_without_a_gradient_stay_and_the_others_are_preconditioned() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, weight_decay=0.5, kl_clip=None)
    square_loss(model(batch())).backward()
    for param in model[0].parameters():
        param.grad = None
    before = clones(model.parameters())
    optimizer.step()
    assert_identical(clones(model[0].parameters()), before[:2])
    expected = layer_direction(model[2], optimizer.factors()["2"], 1e-3)
    torch.testing.assert_close(before[2] - model[2].weight, 0.1 * (expected[:, :-1] + 0.5 * before[2]))


def test_a_missing_gradient_of_a_weight_counts_as_zero_for_its_bias() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    square_loss(model(batch())).backward()
    model[0].weight.grad = None
    before = clones(model[0].parameters())
    optimizer.step()
    assert torch.equal(model[0].weight, before[0])
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    expected = layer_direction(model[0], optimizer.factors()["0"], 1e-3)[:, -1]
    torch.testing.assert_close(before[1] - model[0].bias, 0.1 * expected)


def test_gradients_set_by_hand_are_stepped_on() -> None:
    """Statistics come from the backward, the gradient from `.grad`, whoever wrote it there."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    square_loss(model(batch())).backward()
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)
    before = model[0].weight.clone()
    optimizer.step()
    expected = layer_direction(model[0], optimizer.factors()["0"], 1e-3)[:, :-1]
    torch.testing.assert_close(before - model[0].weight, 0.1 * expected)


def test_clipping_between_backward_and_step_acts_on_the_raw_gradient() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    square_loss(model(batch())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = model[2].weight.clone()
    optimizer.step()
    expected = layer_direction(model[2], optimizer.factors()["2"], 1e-3)[:, :-1]
    torch.testing.assert_close(before - model[2].weight, 0.1 * expected)


def test_a_sparse_gradient_of_a_covered_parameter_is_refused_before_anything_changes() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1)
    train(model, optimizer, 2)
    model[2].weight.grad = model[2].weight.grad.to_sparse()
    before = clones(model.parameters())
    with pytest.raises(
        RuntimeError,
        match=r"'2\.weight' has a torch\.sparse_coo gradient.*pass skip_layers=\['2'\]",
    ):
        optimizer.step()
    assert_identical(clones(model.parameters()), before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_embedding_with_sparse_gradients_steps_as_under_sgd(momentum: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 3))
    twin = nn.Embedding.from_pretrained(model[0].weight.detach().clone(), freeze=False, sparse=True)
    options = {"lr": 0.1, "momentum": momentum}
    optimizer, reference = KFACOptimizer(model, **options), torch.optim.SGD(twin.parameters(), **options)
    for i in range(4):
        optimizer.zero_grad()
        tokens = torch.randint(5, (5,), generator=torch.Generator().manual_seed(i))  # the last has no momentum
        model(tokens).square().mean().backward()
        assert model[0].weight.grad.is_sparse
        twin.weight.grad = model[0].weight.grad.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(model[0].weight, twin.weight)
    again = KFACOptimizer(copy.deepcopy(model), **options)
    again.load_state_dict(optimizer.state_dict())
    if momentum:
        held, loaded = (each.state[each.param_groups[0]["params"][0]]["momentum_buffer"] for each in (optimizer, again))
        assert torch.equal(loaded.to_dense(), held.to_dense())


@pytest.mark.parametrize("foreach", [None, True, False])
def test_complex_parameters_step_as_under_sgd(foreach: bool | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.cfloat), nn.Linear(4, 3, dtype=torch.cfloat))
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": foreach}
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        optimizer = KFACOptimizer(model, **options)
    reference = torch.optim.SGD(twin.parameters(), **options)
    for i in range(5):
        for each, owner in ((optimizer, model), (reference, twin)):
            each.zero_grad()
            owner(batch(i).to(torch.cfloat)).abs().square().mean().backward()
            each.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert "only real floating-point" in str(optimizer.summary())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kl_clip", [None, 1e-6])
def test_a_preconditioned_step_leaves_every_gradient_bitwise_as_it_was(
    nesterov: bool, foreach: bool | None, kl_clip: float | None
) -> None:
    model = nn.Sequential(mlp(), nn.LayerNorm(3), nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    foof = (Structure.DIAGONAL, Structure.IDENTITY)
    optimizer = KFACOptimizer(
        model,
        lr=0.1,
        momentum=0.9,
        nesterov=nesterov,
        weight_decay=0.1,
        foreach=foreach,
        kl_clip=kl_clip,
        structure={"3": foof},
        factor_update_period=1,
    )
    for i in range(3):
        optimizer.zero_grad()
        square_loss(model(batch(i))).backward()
        before = [(param.grad, param.grad.clone()) for param in model.parameters()]
        optimizer.step()
        for param, (same, value) in zip(model.parameters(), before, strict=True):
            assert param.grad is same
            assert torch.equal(same, value)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("zero", ["lr", "tensor lr", "gradients"])
def test_a_step_with_lr_zero_or_zero_gradients_leaves_finite_momentum(zero: str, maximize: bool) -> None:
    """Schedules start from zero and end at it."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, maximize=maximize, factor_update_period=1)
    train(model, optimizer, 2)
    before, buffers = clones(model.parameters()), clones(s["momentum_buffer"] for s in optimizer.state.values())
    if zero == "gradients":
        for param in model.parameters():
            param.grad.zero_()
    else:
        optimizer.param_groups[0]["lr"] = 0.0 if zero == "lr" else torch.tensor(0.0)
        square_loss(model(batch(5))).backward()
    optimizer.step()
    after = clones(s["momentum_buffer"] for s in optimizer.state.values())
    assert all(buffer.isfinite().all() for buffer in after)
    if zero == "gradients":
        torch.testing.assert_close(after, [0.9 * buffer for buffer in buffers])
    else:
        assert_identical(clones(model.parameters()), before)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 1, start=2)
    assert all(param.isfinite().all() for param in model.parameters())
    assert optimizer.metrics()["momentum_scale"] <= 1


def test_gradients_wider_than_their_parameters_step_as_under_sgd() -> None:
    """`grad_dtype` lets bfloat16 parameters accumulate in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    twin = copy.deepcopy(model)
    for owner in (model, twin):
        for param in owner.parameters():
            param.grad_dtype = torch.float32
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, skip_layers=["1"], factor_update_period=1)
    reference = torch.optim.SGD(twin[1].parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        square_loss(model(batch(step, dtype=torch.bfloat16))).backward()
        assert model[0].weight.grad.dtype == torch.float32
        for param, source in zip(twin[1].parameters(), model[1].parameters(), strict=True):
            param.grad = source.grad.clone()
        optimizer.step()
        reference.step()
    assert_identical(clones(model[1].parameters()), clones(twin[1].parameters()))
    assert optimizer.metrics()["blocks_without_statistics"] == 0


def test_a_second_step_without_a_new_backward_repeats_the_first() -> None:
    """As under SGD: the same gradient, the same inverse."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, factor_update_period=1)
    square_loss(model(batch())).backward()
    start = clones(model.parameters())
    optimizer.step()
    middle = clones(model.parameters())
    optimizer.step()
    for a, b, c in zip(start, middle, model.parameters(), strict=True):
        torch.testing.assert_close(a - b, b - c)


# -- closures and hooks ----------------------------------------------------------------------------------------


def test_a_closure_runs_once_with_grad_enabled_and_its_loss_is_returned() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = KFACOptimizer(model, lr=0.1), KFACOptimizer(twin, lr=0.1)
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = square_loss(model(batch(100)))
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert len(calls) == 1
    assert loss is calls[0]
    train(twin, reference, 1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_step_hooks_and_state_dict_hooks_fire_in_order() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("step post"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda _, s: seen.append(f"state_dict post {len(s['state'])}"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("load post"))
    train(model, optimizer, 1)
    assert seen == ["step pre", "step post"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2:] == ["state_dict pre", "state_dict post 4", "load pre", "load post"]


def test_a_step_pre_hook_may_write_gradients() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)

    def write(*_: Any) -> None:
        model[0].weight.grad.fill_(0.5)

    optimizer.register_step_pre_hook(write)
    square_loss(model(batch())).backward()
    before = model[0].weight.clone()
    optimizer.step()
    expected = layer_direction(model[0], optimizer.factors()["0"], 1e-3)[:, :-1]
    torch.testing.assert_close(before - model[0].weight, 0.1 * expected)


# -- amp -------------------------------------------------------------------------------------------------------


def all_factors(optimizer: KFACOptimizer) -> list[Tensor]:
    return [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]


def run_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, unscale: bool
) -> None:
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(square_loss(model(batch(100 + i)))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [KFACOptimizer, torch.optim.SGD])
def test_a_grad_scaler_drives_the_run_without_it(kind: type[torch.optim.Optimizer], unscale: bool) -> None:
    """Exactly, as the scales are powers of two; they grow on the way."""
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if kind is KFACOptimizer:
        optimizer: torch.optim.Optimizer = KFACOptimizer(
            model, lr=0.1, momentum=0.9, grad_scaler=scaler, factor_update_period=1
        )
        reference: torch.optim.Optimizer = KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_update_period=1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    run_scaled(model, optimizer, scaler, unscale=unscale)
    assert scaler.get_scale() == 2.0**12
    train(twin, reference, 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    grads = [[param.grad for param in m.parameters()] for m in (model, twin)]
    assert_identical(*grads)


def test_with_every_layer_skipped_a_scaled_run_equals_that_of_sgd_bit_for_bit() -> None:
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, skip_layers=["*"], factor_update_period=1)
    for m, each in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1234.567)  # not a power of two: each division rounds
        for i in range(3):
            each.zero_grad()
            scaler.scale(square_loss(m(batch(100 + i, dtype=torch.float32)))).backward()
            scaler.step(each)
            scaler.update()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_step_leaves_everything_but_the_scale(unscale: bool) -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=2, grad_scaler=scaler)
    reference = KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_update_period=2)
    for i in range(4):
        for overflow in [True, False] if i in (0, 2, 3) else [False]:
            optimizer.zero_grad()
            scaler.scale(square_loss(model(batch(100 + i)))).backward()
            if overflow:
                model[2].weight.grad[0, 0] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        train(twin, reference, 1, start=i)
        assert_identical(clones(model.parameters()), clones(twin.parameters()))
        assert_identical(all_factors(optimizer), all_factors(reference))
    assert scaler.get_scale() == 2.0**7
    assert optimizer.metrics()["skipped_steps"] == 3.0, "which the scaler has left out itself"
    assert optimizer.metrics()["refused_statistics"] == 0.0


@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaled_step_of_layers_outside_the_models_forward(overflow: bool) -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    reference = KFACOptimizer(twin, lr=0.1, factor_update_period=1)
    out = model[2](model[1](model[0](batch(0))))
    scaler.scale(square_loss(out)).backward()
    if overflow:
        model[2].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        assert_identical(clones(model.parameters()), clones(twin.parameters()))
        return
    with pytest.warns(UserWarning, match="number of terms that the loss is averaged over is taken to be 8"):
        scaler.step(optimizer)
    square_loss(twin(batch(0))).backward()
    reference.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize(
    ("argument", "given", "edit"),
    [
        ("skip_layers", ["2"], list.clear),
        ("inverse", {"0": Eigen()}, lambda given: given.update({"*": EKFAC()})),
    ],
)
def test_a_copy_has_the_choices_of_the_day_on_which_the_optimizer_was_built(
    argument: str, given: Any, edit: Callable[[Any], object]
) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **{argument: given})
    edit(given)
    copied = copy.deepcopy((model, optimizer))[1]
    assert copied.summary().blocks == optimizer.summary().blocks
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert copied.summary().blocks == optimizer.summary().blocks


def test_layers_to_skip_may_be_given_by_a_generator() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, skip_layers=(name for name in ["2"]))  # type: ignore[arg-type]
    copied = copy.deepcopy((model, optimizer))[1]
    assert [block.name for block in copied.summary().blocks] == ["0"]


class HoldsItsOptimizer(nn.Module):
    """Makes its own optimizer, as agents of reinforcement learning often do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = KFACOptimizer(self, lr=0.1, momentum=0.9, factor_update_period=1, inverse_update_period=2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_model_that_holds_its_optimizer_is_copied_with_it(copied: Callable[[Any], Any]) -> None:
    model = HoldsItsOptimizer()
    train(model, model.optimizer, 3)
    twin = copied(model)
    for each in (model, twin):
        train(each, each.optimizer, 5, start=3)
        assert each.optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert_identical(list(twin.parameters()), list(model.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_grad_scaler_copied_with_the_optimizer_is_the_copys(copied: Callable[[Any], Any]) -> None:
    """Whose scale goes on growing while that of the original stands."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, grad_scaler=scaler, factor_update_period=1)
    run_scaled(model, optimizer, scaler, unscale=True)
    twin, other, its_scaler = copied((model, optimizer, scaler))
    run_scaled(twin, other, its_scaler, unscale=True)
    assert (scaler.get_scale(), its_scaler.get_scale()) == (2.0**12, 2.0**14)
    run_scaled(model, optimizer, scaler, unscale=True)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(all_factors(optimizer), all_factors(other))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_without_its_grad_scaler_asks_for_it_where_it_needs_the_scale(copied: Callable[[Any], Any]) -> None:
    """A private copy of the scaler would stand still while the user's goes on."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = KFACOptimizer(model, lr=0.1, grad_scaler=scaler, factor_update_period=1)
    run_scaled(model, optimizer, scaler, unscale=True)
    for twin, other in (copied((model, optimizer)), copied(copied((model, optimizer)))):
        run_scaled(twin, other, scaler, unscale=False)
        scaler.scale(square_loss(twin(batch(1)))).backward()
        with pytest.raises(RuntimeError, match=r"copied without the GradScaler.*model, optimizer, scaler = copy"):
            other.step()
        scaler.step(other)
        scaler.update()


def test_a_copy_without_a_grad_scaler_that_is_disabled_goes_on() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = KFACOptimizer(model, lr=0.1, grad_scaler=scaler, factor_update_period=1)
    twin, other = copy.deepcopy((model, optimizer))
    for each, its in ((model, optimizer), (twin, other)):
        run_scaled(each, its, scaler, unscale=True)
        train(each, its, 1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_disabled_grad_scaler_is_no_scaler() -> None:
    model, twin = mlp(), mlp()
    optimizer, scaler = KFACOptimizer(model, lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(square_loss(model(batch(100)))).backward()
    scaler.step(optimizer)
    scaler.update()
    train(twin, KFACOptimizer(twin, lr=0.1), 1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_training_under_bfloat16_autocast_keeps_float32_factors_close_to_the_plain_ones() -> None:
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer, reference = KFACOptimizer(model, lr=0.0), KFACOptimizer(twin, lr=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(dtype=torch.float32))
    square_loss(output.float()).backward()
    square_loss(twin(batch(dtype=torch.float32))).backward()
    for each in (optimizer, reference):
        each.step()
    for name, (a, g) in optimizer.factors().items():
        assert a.dtype == g.dtype == torch.float32
        for ours, theirs in zip((a, g), reference.factors()[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02 * float(theirs.abs().max()))


# -- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "factor_dtype", "expected"),
    [
        (torch.float64, None, torch.float64),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_factors_have_the_documented_dtype_and_steps_stay_near_those_of_float64(
    dtype: torch.dtype, factor_dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    model = mlp().to(dtype)
    exact = copy.deepcopy(model).double()
    # A clear step, so that the difference of parameters is far above the rounding of bfloat16.
    options: dict[str, Any] = {"lr": 1.0, "kl_clip": None, "damping": 0.1}
    optimizer = KFACOptimizer(model, factor_dtype=factor_dtype, **options)
    reference = KFACOptimizer(exact, **options)
    before = clones(model.parameters())
    x = batch().to(dtype)
    for each, owner, data in ((optimizer, model, x), (reference, exact, x.double())):
        square_loss(owner(data)).backward()
        each.step()
    assert {factor.dtype for pair in optimizer.factors().values() for factor in pair} == {expected}
    coarse = torch.bfloat16 in (dtype, expected) or dtype is torch.float16
    for param, theirs, start in zip(model.parameters(), exact.parameters(), before, strict=True):
        assert param.dtype == dtype
        moved, exactly = (param.double() - start.double()), (theirs - start.double())
        error = (moved - exactly).norm() / exactly.norm()
        assert error < (0.1 if coarse else 1e-4), float(error)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_channels_last_model_takes_the_steps_of_a_contiguous_one(options: dict[str, bool]) -> None:
    """Parameters, gradients and momentum must agree in layout where a fused kernel reads them side by side."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()

    model, twin = make().to(memory_format=torch.channels_last), make()
    images = batch(dim=48).view(8, 3, 4, 4)
    for owner, data in ((model, images.to(memory_format=torch.channels_last)), (twin, images)):
        optimizer = KFACOptimizer(owner, lr=0.1, momentum=0.9, kl_clip=1e-3, **FREQUENT, **options)
        for _ in range(4):
            optimizer.zero_grad()
            square_loss(owner(data)).backward()
            optimizer.step()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()), rtol=1e-9, atol=1e-12)


def test_a_model_of_mixed_dtypes_steps_each_layer_in_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, dtype=torch.float64))
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-3)
    hidden = model[1](model[0](batch(dtype=torch.float32)))
    output = model[2](hidden.double())
    optimizer.set_loss_terms(8)
    square_loss(output).backward()
    optimizer.step()
    assert [optimizer.factors()[name][0].dtype for name in ("0", "2")] == [torch.float32, torch.float64]


# -- several optimizers, hooks, lifetimes ----------------------------------------------------------------------


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_a_dropped_optimizer_takes_its_hooks_along() -> None:
    model = mlp()
    train(model, KFACOptimizer(model, lr=0.1, factor_update_period=1), 2)
    gc.collect()
    assert hooks_of(model) == 0


def test_a_second_optimizer_on_the_model_is_not_disturbed_by_a_dropped_or_a_living_first() -> None:
    model, twin = mlp(), mlp()
    first = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, first, 2)
    twin.load_state_dict(model.state_dict())
    second = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, second, 3)
    assert first.metrics()["factor_age"] == 0.0, "the first took no step"
    del first
    gc.collect()
    train(model, second, 2, start=3)
    train(twin, KFACOptimizer(twin, lr=0.1, factor_update_period=1), 5)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_two_optimizers_share_a_model_by_halves() -> None:
    model, twin = mlp(), mlp()
    optimizers = [
        KFACOptimizer(model[i].parameters(), lr=0.1, kl_clip=None, model=model, factor_update_period=1) for i in (0, 2)
    ]
    together = KFACOptimizer(twin, lr=0.1, kl_clip=None, factor_update_period=1)
    for i in range(4):
        for owner, used in ((model, optimizers), (twin, [together])):
            owner.zero_grad()
            square_loss(owner(batch(i))).backward()
            for each in used:
                each.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_remove_hooks_ends_statistics_and_steps_go_on_with_the_inverses_as_they_are() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 3)
    factors = optimizer.factors()
    optimizer.remove_hooks()
    assert hooks_of(model) == 0
    before = model[0].weight.clone()
    train(model, optimizer, 1, start=3)
    assert_same_factors(optimizer.factors(), factors, rtol=0)
    torch.testing.assert_close(before - model[0].weight, 0.1 * layer_direction(model[0], factors["0"], 1e-3)[:, :-1])
    optimizer.remove_hooks()  # again, to no effect


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("include_factors", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_made_together_with_the_model_goes_on_like_the_original(
    duplicate: Callable[[Any], Any], named: bool, include_factors: bool
) -> None:
    model = mlp()
    groups = [
        {"params": list(model[0].named_parameters() if named else model[0].parameters()), "lr": 0.05},
        {"params": list(model[2].named_parameters() if named else model[2].parameters()), "damping": 0.1},
    ]
    optimizer = KFACOptimizer(
        groups,
        lr=0.1,
        momentum=0.9,
        model=model,
        inverse_update_period=3,
        include_factors=include_factors,
        factor_update_period=1,
    )
    train(model, optimizer, 4)
    model_copy, copied = duplicate((model, optimizer))
    assert copied.param_groups[0]["params"][0] is model_copy[0].weight
    assert [{**group, "params": None} for group in copied.param_groups] == [
        {**group, "params": None} for group in optimizer.param_groups
    ]
    for m, each in ((model, optimizer), (model_copy, copied)):
        train(m, each, 4, start=4)
    assert_identical(clones(model.parameters()), clones(model_copy.parameters()))
    assert_identical(all_factors(optimizer), all_factors(copied))
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, model_copy[0].weight)


def test_a_copy_of_the_optimizer_alone_brings_its_model() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    copied = copy.deepcopy(optimizer)
    before = clones(model.parameters())
    train(copied._binding.model, copied, 1, start=2)
    assert_identical(clones(model.parameters()), before)
    train(model, optimizer, 1, start=2)
    assert_identical(clones(model.parameters()), clones(copied.param_groups[0]["params"]))


def test_a_copy_where_the_model_was_found_finds_its_own() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    model_copy, copied = copy.deepcopy((model, optimizer))
    for m, each in ((model, optimizer), (model_copy, copied)):
        train(m, each, 2, start=2)
    assert_identical(clones(model.parameters()), clones(model_copy.parameters()))
    assert copied.metrics()["unpreconditioned_blocks"] == 0.0


# -- freezing, moving ------------------------------------------------------------------------------------------


def test_a_module_that_takes_over_the_parameters_of_another_is_measured_in_its_place() -> None:
    """Or left to SGD by name, as SyncBatchNorm is."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    other = nn.BatchNorm1d(5).double()
    other.weight, other.bias = model[1].weight, model[1].bias
    model[1] = other
    train(model, optimizer, 3, start=2)
    (block,) = [block for block in optimizer._binding.coverage.blocks if block.name == "1"]
    assert block.uses[0].module is other
    assert optimizer.metrics()["factor_age"] == 0
    model[1] = nn.SyncBatchNorm.convert_sync_batchnorm(model[1])
    optimizer._binding.end_step()
    assert [record.name for record in optimizer.summary().blocks] == ["0", "2"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_tied_in_mid_training_is_measured_as_one_that_was_tied_before(bias: bool) -> None:
    """Nobody took the old weight out of the groups, where it has no gradient; a bias of its layer goes to SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.Tanh(), nn.Linear(4, 4, bias=bias)).double()
    options = {"lr": 0.0, "factor_update_period": 1, "factor_decay": 1e-15}  # the averages are the last statistics
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 1)
    model[2].weight = model[0].weight
    train(model, optimizer, 2)  # it is found at the end of the first
    reference = KFACOptimizer(model, **options)
    train(model, reference, 1, start=1)
    assert_same_factors(optimizer.factors(), reference.factors())
    assert optimizer.metrics()["factor_age"] == 0


def test_a_layer_unfrozen_in_mid_training_is_preconditioned_from_its_first_step_on() -> None:
    model, twin = mlp(sizes=(4, 5, 5, 3)), mlp(sizes=(4, 5, 5, 3))
    model[2].requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    assert list(optimizer.factors()) == ["0", "4"]
    twin.load_state_dict(model.state_dict())
    model[2].requires_grad_(True)
    train(model, optimizer, 1, start=2)
    assert list(optimizer.factors()) == ["0", "2", "4"]
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0.0
    reference = KFACOptimizer(twin, lr=0.1)  # as its layer "2", the unfrozen one begins with this batch
    train(twin, reference, 1, start=2)
    assert_identical(optimizer.factors()["2"], reference.factors()["2"])
    # Each new block is frozen and thawed in its turn; statistics that exist are kept.
    factors = optimizer.factors()["0"]
    model[0].requires_grad_(False)
    train(model, optimizer, 1, start=3)
    assert_identical(optimizer.factors()["0"], factors)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_model_moved_to_another_dtype_takes_its_statistics_along(momentum: float) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=momentum, factor_update_period=1)
    train(model, optimizer, 3)
    before = optimizer.factors()
    model.double()
    twin = copy.deepcopy(model)
    train(model, optimizer, 1, start=3)
    after = optimizer.factors()
    for name, pair in factors_after(twin, lambda m: square_loss(m(batch(103))).backward()).items():
        for old, new, sample in zip(before[name], after[name], pair, strict=True):
            assert new.dtype == torch.float64
            masses = sum(0.95**i for i in range(1, 4))
            torch.testing.assert_close(new, (masses * old.double() + sample) / (masses + 1), rtol=1e-6, atol=1e-9)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert block(optimizer, "0").state.a.inverse.dtype == torch.float64


def test_nothing_keeps_a_dropped_optimizer_or_model_alive() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    references = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)]
    del optimizer, model
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_model_that_holds_its_optimizer_can_go() -> None:
    model = mlp()
    model.optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, model.optimizer, 2)
    references = [weakref.ref(model.optimizer), weakref.ref(model)]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_the_repr_shows_the_groups() -> None:
    assert "damping: 0.25" in repr(KFACOptimizer(mlp(), damping=0.25))


# -- distributed -----------------------------------------------------------------------------------------------


@contextmanager
def process_group(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ranks_that_train_models_of_their_own_say_so() -> None:
    with process_group(2):
        assert KFACOptimizer(mlp())._executor.several
        model, twin = mlp(), mlp()
        train(model, KFACOptimizer(model, lr=0.1, distributed=False, factor_update_period=1), 2)
    train(twin, KFACOptimizer(twin, lr=0.1, factor_update_period=1), 2)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_distributed_config_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        KFACOptimizer(mlp(), distributed=DistributedConfig())
    with pytest.raises(TypeError, match=r"distributed must be None, False or a DistributedConfig\(...\), got True"):
        KFACOptimizer(mlp(), distributed=True)


@pytest.mark.parametrize("distributed", [None, False])
def test_a_process_group_of_one_rank_is_one_process(distributed: bool | None) -> None:
    with process_group(1):
        KFACOptimizer(mlp(), distributed=distributed)


# -- periods and refreshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor_period", "inverse_period"), list(itertools.product([1, 2, 3], [1, 2, 4, 7])))
def test_statistics_and_refreshes_come_at_their_own_periods(factor_period: int, inverse_period: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model, lr=0.1, factor_update_period=factor_period, inverse_update_period=inverse_period, kl_clip=None
    )
    folded, refreshed = [], []
    state = block(optimizer, "0").state
    for i in range(20):
        before, inverse = optimizer.factors(), state.a.inverse.clone()
        train(model, optimizer, 1, start=i)
        if not before or not torch.equal(optimizer.factors()["0"][0], before["0"][0]):
            folded.append(i)
        if not torch.equal(state.a.inverse, inverse):
            refreshed.append(i)
    assert folded == list(range(0, 20, factor_period))
    # A refresh shows only where a fold came since the last one.
    due = refresh_steps(factor_period, inverse_period, 20)
    assert refreshed == [step for last, step in pairwise([-1, *due]) if any(last < fold <= step for fold in folded)]


def test_refreshes_are_closer_while_the_averages_are_young() -> None:
    """With statistics at every step: at the 1st, 2nd, 3rd, 5th, 8th, 12th, … whatever the period."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=1000, factor_update_period=1)
    state = block(optimizer, "0").state
    refreshed = []
    for i in range(20):
        inverse = state.a.inverse.clone()
        train(model, optimizer, 1, start=i)
        if not torch.equal(state.a.inverse, inverse):
            refreshed.append(i + 1)
    assert refreshed == [1, 2, 3, 5, 8, 12, 18]


@pytest.mark.parametrize("period", [1, 7, 1000])
def test_the_first_step_with_statistics_refreshes_whatever_the_periods(period: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, factor_update_period=period, inverse_update_period=period)
    optimizer.step()  # nothing yet: the clock moves on
    optimizer.step()
    before = model[0].weight.clone()
    square_loss(model(batch())).backward()
    optimizer.step()
    expected = layer_direction(model[0], optimizer.factors()["0"], 1e-3)[:, :-1]
    torch.testing.assert_close(before - model[0].weight, 0.1 * expected)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_the_running_average_decays_per_step_and_not_per_statistics_step(period: int) -> None:
    model = mlp(sizes=(4, 3))
    optimizer = KFACOptimizer(model, lr=0.0, factor_decay=0.8, factor_update_period=period, inverse_update_period=10)
    samples = []
    for i in range(2 * period + 1):
        train(model, optimizer, 1, start=i)
        if i % period == 0:
            x = torch.cat([batch(100 + i), torch.ones(8, 1, dtype=torch.float64)], 1)
            samples.append(x.T @ x / 8)
    weights = [0.8 ** (2 * period), 0.8**period, 1.0]
    expected = sum(w * s for w, s in zip(weights, samples, strict=True)) / sum(weights)
    torch.testing.assert_close(optimizer.factors()["0"][0][0], expected)


def test_a_failing_refresh_keeps_the_last_good_inverse_and_is_counted() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 2)
    broken = block(optimizer, "0").state
    good = broken.a.inverse.clone()
    # No public way leads to an indefinite factor; a factor of -10⁶ I stays one whatever is averaged into it.
    with edited(broken.pair.a) as average:
        average.copy_(-1e6 * torch.eye(5))
    before = optimizer.metrics()
    train(model, optimizer, 1, start=2)
    assert torch.equal(broken.a.inverse, good)
    assert optimizer.metrics()["failed_refreshes"] == before["failed_refreshes"] + 1
    assert all(param.isfinite().all() for param in model.parameters())


def overflowing(dtype: torch.dtype = torch.float32) -> Tensor:
    """An input whose second moment overflows while the model's gradients stay finite."""
    x = batch(dtype=dtype)
    x[0, 0] = 1e25
    return x


def test_statistics_that_overflow_are_refused_and_counted_and_the_inverses_stay() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.0, inverse_update_period=1, factor_decay=1.0, factor_update_period=1)
    train(model, optimizer, 2)
    factors, inverse = optimizer.factors(), block(optimizer, "0").state.a.inverse.clone()
    optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight[:, 0] = 0  # or the Tanh saturates, and a row without gradient does not count
    square_loss(model(overflowing())).backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())
    optimizer.step()
    assert optimizer.metrics()["refused_statistics"] == 1.0
    assert_identical(optimizer.factors()["0"], factors["0"])
    assert torch.equal(block(optimizer, "0").state.a.inverse, inverse)
    assert not torch.equal(optimizer.factors()["2"][0], factors["2"][0]), "the other layer's sample was good"
    train(model, optimizer, 1, start=2)
    assert optimizer.metrics()["refused_statistics"] == 1.0
    assert all(factor.isfinite().all() for pair in optimizer.factors().values() for factor in pair)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_batch_skipped_by_the_user_leaves_no_trace(bad: float) -> None:
    """The usual guard: look at the loss or the gradients, and drop the step by clearing them."""
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 2)
    square_loss(model(torch.full((8, 4), bad, dtype=torch.float64))).backward()
    optimizer.zero_grad()
    train(model, optimizer, 2, start=2)
    train(twin, KFACOptimizer(twin, lr=0.1, inverse_update_period=1, factor_update_period=1), 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert optimizer.metrics()["refused_statistics"] == 0.0


def test_zero_grad_drops_the_statistics_of_the_gradients_it_drops() -> None:
    """A GAN's generator step sends gradients through the discriminator that the next `zero_grad()` throws away."""
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=1, factor_update_period=1)
    for i in range(3):
        train(model, optimizer, 1, start=i)
        square_loss(model(batch(i))).backward()
    train(twin, KFACOptimizer(twin, lr=0.1, inverse_update_period=1, factor_update_period=1), 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_one_inverse_object_may_serve_two_optimizers() -> None:
    inverse = Cholesky()
    model, twin = mlp(), mlp()
    first, second = (
        KFACOptimizer(model, lr=0.1, inverse=inverse, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, inverse=inverse, factor_update_period=1),
    )
    train(model, first, 3)
    train(twin, second, 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
