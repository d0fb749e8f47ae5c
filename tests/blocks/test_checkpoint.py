"""`state_dict()` and `load_state_dict()`: plain contents, bitwise resumption, and refusals that change nothing."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, batch, block, clones, mlp, snapshot, square_loss, train
from torch import Tensor, nn

from kfac_optim import EKFAC, KFACOptimizer, Structure, TrustRegion

Make = Callable[[], nn.Module]


def through_a_file(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


def walk(value: Any, path: str = "") -> None:
    """Fail on anything but tensors, numbers, None and strings in dicts, lists and tuples."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) in (str, int), path
            walk(item, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            walk(item, f"{path}[{i}]")
    else:
        assert type(value) in (Tensor, float, int, bool, type(None), str), f"{path}: {type(value)}"
        assert not (isinstance(value, Tensor) and value.requires_grad), path


class Everything(nn.Module):
    """A convolution, a wide layer made diagonal, a layer with the identity for G, and uncovered parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(2, 4, 3, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(16, 5)
        self.foof = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.foof(self.wide(self.norm(self.conv(x.view(-1, 2, 4, 4))).flatten(1)).tanh())


EVERYTHING = {"max_factor_dim": 16, "structure": {"foof": (Structure.DENSE, Structure.IDENTITY)}}


def test_the_state_holds_tensors_and_numbers_only() -> None:
    model = Everything()
    optimizer = KFACOptimizer(model, lr=torch.tensor(0.1), momentum=0.9, factor_update_period=1, **EVERYTHING)
    train(model, optimizer, 2, dim=32)
    state = optimizer.state_dict()
    walk(state["state"], "state")
    walk(state["param_groups"], "param_groups")
    assert_identical(through_a_file(state), state)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("factor_period", "inverse_period", "stop"),
    [(1, 1, 3), (1, 4, 4), (1, 4, 6), (3, 4, 5), (3, 2, 4), (2, 10, 1), (5, 7, 0)],
)
@pytest.mark.parametrize("make", [lambda: mlp(dtype=torch.float32), Everything], ids=["mlp", "everything"])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(
    make: Make, factor_period: int, inverse_period: int, stop: int, momentum: float
) -> None:
    """Also between refreshes and between statistics steps, through a file and into a model built anew."""
    options: dict[str, Any] = {
        "lr": 0.1,
        "momentum": momentum,
        "factor_update_period": factor_period,
        "inverse_update_period": inverse_period,
    }
    dim = 4 if make is not Everything else 32
    options |= EVERYTHING if make is Everything else {}
    whole, first, second = make(), make(), make()
    train(whole, uninterrupted := KFACOptimizer(whole, **options), 10, dim=dim)
    train(first, optimizer := KFACOptimizer(first, **options), stop, dim=dim)
    saved = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    train(first, optimizer, 2, start=50, dim=dim)  # what happens after saving must not reach the checkpoint
    second.load_state_dict(saved["model"])
    resumed = KFACOptimizer(second, **{**options, "lr": 7.0, "damping": 0.5})
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 10 - stop, start=stop, dim=dim)
    assert_identical(second.state_dict(), whole.state_dict())
    assert_identical(resumed.state_dict(), uninterrupted.state_dict())
    assert_identical(resumed.factors(), uninterrupted.factors())


def test_loading_into_an_optimizer_that_has_stepped_equals_loading_into_a_new_one() -> None:
    """A rollback: whatever it had measured, captured or scheduled meanwhile is gone."""
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, inverse_update_period=2, factor_update_period=1)
    train(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, 3, start=3)
    optimizer.param_groups[0]["lr"] = 5.0
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(model, optimizer, 3, start=20)
    twin.load_state_dict(saved[0])
    fresh = KFACOptimizer(twin, lr=0.1, momentum=0.9, inverse_update_period=2, factor_update_period=1)
    fresh.load_state_dict(saved[1])
    train(twin, fresh, 3, start=20)
    assert_identical(optimizer.state_dict(), fresh.state_dict())
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


@pytest.mark.parametrize("include_factors", [True, False])
def test_statistics_captured_before_a_load_are_dropped_with_their_loss_terms(include_factors: bool) -> None:
    """A rollback between backward and step: the gradients are cleared, so their rows and terms must not count."""
    model, twin = mlp(), mlp()
    options: dict[str, Any] = {"lr": 0.1, "inverse_update_period": 1, "include_factors": include_factors}
    optimizer = KFACOptimizer(model, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    square_loss(model(batch(33))).backward()
    optimizer.set_loss_terms(1000)
    optimizer.load_state_dict(saved)
    model.zero_grad()
    square_loss(model(batch(100))).backward()
    optimizer.step()
    train(twin, KFACOptimizer(twin, **options), 1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_checkpoint_shares_no_memory_with_the_optimizer_that_loaded_it() -> None:
    """Of the factors; torch shares momentum buffers."""
    model, twin = mlp(), mlp()
    optimizer, loaded = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    loaded.load_state_dict(state)
    before = copy.deepcopy(state)
    train(twin, loaded, 2, start=5)
    assert_identical(state, before)


# -- dtype and device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "factor_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float64), (torch.float32, torch.float64)],
)
def test_factors_wider_than_their_parameters_keep_dtype_and_exact_values(
    dtype: torch.dtype, factor_dtype: torch.dtype | None
) -> None:
    """Torch casts the state of a parameter to the parameter's dtype."""
    model, twin = mlp().to(dtype), mlp().to(dtype)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_dtype=factor_dtype, factor_update_period=1)
    loaded = KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_dtype=factor_dtype)
    train(model, optimizer, 3)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_identical(loaded.factors(), optimizer.factors())
    assert loaded.factors()["0"][0].dtype == (factor_dtype or torch.float32)
    exact = [factor for pair in loaded.factors().values() for factor in pair]
    assert any(not torch.equal(factor, factor.to(dtype).to(factor.dtype)) for factor in exact), "all too round to tell"
    assert_identical(loaded.state_dict(), optimizer.state_dict())


def test_a_checkpoint_of_another_factor_dtype_is_cast_to_ours() -> None:
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, factor_dtype=torch.float64, factor_update_period=1)
    train(model, optimizer, 2)
    loaded = KFACOptimizer(twin, lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    for name, (a, g) in loaded.factors().items():
        assert a.dtype == g.dtype == torch.float32
        assert torch.equal(a, optimizer.factors()[name][0].float())


def test_a_checkpoint_loads_exactly_after_the_model_was_moved_to_its_dtype() -> None:
    model, twin = mlp(), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    loaded = KFACOptimizer(twin, lr=0.1)
    twin.double()
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_identical(loaded.state_dict(), optimizer.state_dict())


def test_a_checkpoint_of_another_device_loads_onto_the_parameters_device() -> None:
    """Only one device is sure to be here, so the other one is the meta device: structure without values."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1)
    train(model, optimizer, 2)
    with torch.device("meta"):
        shell = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loaded = KFACOptimizer(shell, lr=0.1, momentum=0.9)
    loaded.load_state_dict(through_a_file(optimizer.state_dict(), map_location="cpu"))
    state = loaded.state_dict()["state"]
    assert state[0]["kfac"]["inverse"]["factors"]["A"]["average"].device.type == "meta"
    assert state[0]["momentum_buffer"].device.type == "meta"
    assert {factor.device.type for pair in loaded.factors().values() for factor in pair} == {"meta"}


@pytest.mark.parametrize("map_location", ["cpu", None, {"cpu": "cpu"}, lambda storage, _: storage])
def test_map_location_gives_the_same_checkpoint(map_location: Any) -> None:
    model, twin = mlp(), mlp()
    optimizer, loaded = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    train(model, optimizer, 2)
    loaded.load_state_dict(through_a_file(optimizer.state_dict(), map_location=map_location))
    assert_identical(loaded.state_dict(), optimizer.state_dict())


# -- refusals --------------------------------------------------------------------------------------------------


def named(**layers: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    model.forward = lambda x: [layer(x) for layer in layers.values()][-1]
    return model.double()


def saved_by(model: nn.Module, **options: Any) -> dict[str, Any]:
    return KFACOptimizer(model, **options).state_dict()


def saved_in_groups(model: nn.Module) -> dict[str, Any]:
    return KFACOptimizer([{"params": layer.parameters()} for layer in (model[0], model[2])], model=model).state_dict()


def without_kfac(index: int) -> dict[str, Any]:
    state = copy.deepcopy(saved_by(mlp()))
    del state["state"][index]["kfac"]
    return state


REFUSED = {
    "another width": (
        lambda: saved_by(mlp(sizes=(4, 7, 3))),
        r"factors\.A\.average of '2' is \[1, 36\], here \[1, 21\]",
    ),
    "other names": (
        lambda: saved_by(named(encoder=nn.Linear(4, 5), decoder=nn.Linear(5, 3))),
        r"it has 'encoder' where '0' should stand; it has 'decoder' where '2' should stand",
    ),
    "a layer of ours skipped there": (lambda: saved_by(mlp(), skip_layers=["2"]), r"it has none for '2'"),
    "one block gone": (lambda: without_kfac(2), r"it has none for '2'"),
    "diagonal there": (
        lambda: saved_by(mlp(), max_factor_dim=5),
        r"A_inverse of '2' is \[1, 6\], here \[1, 6, 6\]",
    ),
    "identity there": (
        lambda: saved_by(mlp(), structure=(Structure.DENSE, Structure.IDENTITY)),
        r"G_inverse of '0' is missing, here \[1, 5, 5\]",
    ),
    "more parameters": (
        lambda: saved_by(mlp(sizes=(4, 5, 5, 3))),
        r"doesn't match the size of optimizer's group",
    ),
    "another number of groups": (
        lambda: saved_in_groups(mlp()),
        r"different number of parameter groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_another_model_is_refused_by_name_and_nothing_changes(case: str) -> None:
    make, message = REFUSED[case]
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1)
    train(model, optimizer, 2)
    train(twin, reference := KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_update_period=1), 2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make())
    assert_identical(snapshot(optimizer), before)
    train(model, optimizer, 2, start=2)
    train(twin, reference, 2, start=2)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_checkpoint_with_statistics_for_a_layer_skipped_here_is_refused() -> None:
    optimizer = KFACOptimizer(mlp(), skip_layers=["2"])
    with pytest.raises(ValueError, match="it has statistics for '2', which is not preconditioned here"):
        optimizer.load_state_dict(saved_by(mlp()))


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"Build the optimizer as it was when the checkpoint was saved"):
        KFACOptimizer(mlp()).load_state_dict(saved_by(mlp(), skip_layers=["2"]))


def test_with_every_layer_skipped_sgds_own_checkpoint_continues_its_run() -> None:
    model, twin = mlp(), mlp()
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    train(twin, reference, 3)
    model.load_state_dict(twin.state_dict())
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, skip_layers=("*",), factor_update_period=1)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(model, optimizer, 3, start=3)
    train(twin, reference, 3, start=3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


# -- include_factors ---------------------------------------------------------------------------------------------


def test_without_factors_the_checkpoint_is_small_and_statistics_start_anew() -> None:
    """Resuming equals a new optimizer that was given the momentum buffers."""
    model = mlp()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1, "step_size": TrustRegion()}
    optimizer = KFACOptimizer(model, **options, include_factors=False)
    train(model, optimizer, 3)
    state = through_a_file(optimizer.state_dict())
    assert "inverse" not in state["state"][0]["kfac"]
    twin, resumed = copy.deepcopy(model), copy.deepcopy(model)
    fresh = KFACOptimizer(twin, **options)
    for index, param in enumerate(twin.parameters()):
        fresh.state[param]["momentum_buffer"] = state["state"][index]["momentum_buffer"].clone()
    train(twin, fresh, 3, start=3)
    loaded = KFACOptimizer(resumed, **options, include_factors=False)
    loaded.load_state_dict(state)
    train(resumed, loaded, 3, start=3)
    assert_identical(clones(resumed.parameters()), clones(twin.parameters()))


@pytest.mark.parametrize("stepped", [0, 2])
def test_a_checkpoint_without_factors_starts_statistics_anew_even_where_some_were_held(stepped: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, include_factors=False, factor_update_period=1)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, stepped)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1, start=40)
    only = KFACOptimizer(mlp(), lr=0.0)
    train(only._binding.model, only, 1, start=40)
    assert_identical(optimizer.factors(), only.factors())
    assert torch.equal(block(optimizer, "0").state.a.inverse, block(only, "0").state.a.inverse)


def test_an_optimizer_without_factors_in_its_checkpoints_loads_one_that_has_them() -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 3)
    loaded = KFACOptimizer(twin, lr=0.1, include_factors=False)
    loaded.load_state_dict(optimizer.state_dict())
    assert_identical(loaded.factors(), optimizer.factors())


# -- hooks and groups --------------------------------------------------------------------------------------------


def test_a_load_pre_hook_may_rewrite_the_checkpoint() -> None:
    """As torch recommends for renamed parameters: here the layers had another name when it was saved."""
    old = named(enc=nn.Linear(4, 5), dec=nn.Linear(4, 3))
    new = named(encoder=nn.Linear(4, 5), decoder=nn.Linear(4, 3))
    saved = KFACOptimizer(old, lr=0.1)
    optimizer = KFACOptimizer(new, lr=0.1)
    state = saved.state_dict()
    with pytest.raises(ValueError, match="'enc' where 'encoder' should stand"):
        optimizer.load_state_dict(state)

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        for held in state["state"].values():
            if "kfac" in held:
                name = bytes(held["kfac"]["name"].tolist()).decode()
                full = {"enc": "encoder", "dec": "decoder"}[name]
                held["kfac"]["name"] = torch.tensor(list(full.encode()), dtype=torch.uint8)
                held["kfac"]["clock"]["step"] = 12
        return state

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["kfac"]["clock"]["step"] == 12


def test_a_state_dict_post_hook_may_rewrite_the_checkpoint() -> None:
    optimizer = KFACOptimizer(mlp())
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 3})
    state = optimizer.state_dict()
    assert state["epoch"] == 3
    optimizer.load_state_dict(state)


def test_hooks_may_give_a_checkpoint_another_form_and_take_it_back() -> None:
    def numbers(state: dict[str, Any]) -> dict[str, int]:
        return {
            name: i
            for group in state["param_groups"]
            for i, name in zip(group["params"], group["param_names"], strict=True)
        }

    def by_name(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {"inner": {**state, "state": {name: state["state"][i] for name, i in numbers(state).items()}}}

    def by_number(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        inner = state["inner"]
        return {**inner, "state": {i: inner["state"][name] for name, i in numbers(inner).items()}}

    model = mlp()
    optimizer = KFACOptimizer(model.named_parameters(), model=model, lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(by_name)
    optimizer.register_load_state_dict_pre_hook(by_number)
    state = optimizer.state_dict()
    assert set(state["inner"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    optimizer.load_state_dict(state)
    assert_identical(optimizer.state_dict()["inner"]["param_groups"], expected["param_groups"])
    train(model, optimizer, 1)


@pytest.mark.parametrize("by", ["a hook", "hand"])
def test_momentum_that_begins_anew_is_in_no_count_of_the_checkpoint(by: str) -> None:
    def restart(optimizer: Any) -> None:
        for held in optimizer.state.values():
            held["momentum_buffer"] = None

    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    if by == "hand":
        restart(optimizer)
    else:
        optimizer.register_state_dict_pre_hook(restart)
    other = KFACOptimizer(model, lr=0.1, momentum=0.9)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, other, 1)


def test_a_parameter_that_a_group_lists_twice_keeps_its_state() -> None:
    model = mlp()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = KFACOptimizer([*model.parameters(), model[0].weight], model=model, lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == sorted(set(state["param_groups"][0]["params"]))
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)
    other = KFACOptimizer([*model.parameters(), nn.Parameter(torch.zeros(5, 4))], model=model, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="do not repeat the same parameters: number 4, at place 4"):
        other.load_state_dict(state)


def test_a_load_restores_the_numbers_of_the_groups_and_blocks_obey_them() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, damping=0.25, factor_decay=0.5, kl_clip=None)
    loaded = KFACOptimizer(mlp())
    loaded.load_state_dict(optimizer.state_dict())
    group = loaded.param_groups[0]
    assert (group["damping"], group["factor_decay"], group["kl_clip"]) == (0.25, 0.5, None)
    group["damping"] = 0.125
    assert block(loaded, "0").group is group


def test_state_dict_and_load_do_not_disturb_a_run() -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1)
    for i in range(4):
        train(model, optimizer, 1, start=i)
        optimizer.load_state_dict(optimizer.state_dict())
    train(twin, KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_update_period=1), 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_checkpoint_of_a_run_with_added_groups_resumes_it() -> None:
    def make(model: nn.Module) -> KFACOptimizer:
        optimizer = KFACOptimizer(model[0].parameters(), lr=0.1, model=model, factor_update_period=1)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        return optimizer

    model, twin = mlp(), mlp()
    optimizer = make(model)
    train(model, optimizer, 3)
    twin.load_state_dict(model.state_dict())
    resumed = make(twin)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, 3, start=3)
    train(twin, resumed, 3, start=3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_numbers_that_a_step_takes_are_in_checkpoints_and_copies_too() -> None:
    """Torch asks for momentum above 0 with Nesterov as an optimizer is built, and never again; so do we."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, nesterov=True)
    optimizer.param_groups[0]["momentum"] = 0.0  # a warm-up by hand
    train(model, optimizer, 1)
    KFACOptimizer(mlp(), lr=0.1, momentum=0.9, nesterov=True).load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy((model, optimizer))[1]
    assert twin.param_groups[0]["momentum"] == 0.0
    train(twin._binding.model, twin, 1)


def test_counts_of_steps_and_calls_that_were_left_out_survive_a_copy() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    train(model, optimizer, 1)
    optimizer._window.left_out, optimizer._window.dropped_calls = 2, 3
    metrics = copy.deepcopy((model, optimizer))[1].metrics()
    assert (metrics["skipped_steps"], metrics["dropped_calls"]) == (2, 3)


def test_after_a_checkpoint_nothing_of_it_is_held() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, inverse=EKFAC())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    train(model, optimizer, 1)
    assert not any("kfac" in state for state in optimizer.state.values())
    assert "kfac" in saved["state"][0]
