"""Schedules of group numbers: always from the base value, whatever happens between."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plain import assert_identical, clones, mlp, train

from kfac_optim import ExponentialDecay, HyperparameterScheduler, KFACOptimizer


def optimizer(**options: Any) -> KFACOptimizer:
    return KFACOptimizer(mlp(), **options)


def two_groups(**second: Any) -> KFACOptimizer:
    model = mlp()
    return KFACOptimizer(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), **second}], model=model, damping=0.5
    )


def present(scheduler: HyperparameterScheduler) -> list[Any]:
    """In each group."""
    return [group[scheduler.key] for group in scheduler.optimizer.param_groups]


def values(scheduler: HyperparameterScheduler, steps: int) -> list[list[Any]]:
    """In each group: at first, and after each of `steps` steps."""
    found = [present(scheduler)]
    for _ in range(steps):
        scheduler.step()
        found.append(present(scheduler))
    return found


@pytest.mark.parametrize(
    ("key", "base"), [("damping", 0.5), ("kl_clip", 0.25), ("factor_decay", 0.875), ("lr", 0.125), ("momentum", 0.5)]
)
def test_the_value_is_base_times_factor_and_never_compounds(key: str, base: float) -> None:
    """A constant factor of one half gives half the base at every step, not a vanishing sequence."""
    scheduler = HyperparameterScheduler(optimizer(**{key: base}), key, lambda step: 0.5 if step else 1.0)
    assert values(scheduler, 4) == [[base]] + 4 * [[base * 0.5]]


@pytest.mark.parametrize("key", ["factor_update_period", "inverse_update_period"])
def test_a_period_is_rounded_stays_an_integer_and_never_falls_below_one(key: str) -> None:
    factors = [1.0, 0.26, 0.24, 0.01, 0.0, -3.0, 2.3]
    scheduler = HyperparameterScheduler(optimizer(**{key: 10}), key, lambda step: factors[step])
    found = [value for (value,) in values(scheduler, 6)]
    assert found == [10, 3, 2, 1, 1, 1, 23]
    assert all(type(value) is int for value in found)


@pytest.mark.parametrize("key", ["damping", "kl_clip", "factor_decay"])
def test_a_decay_that_comes_to_zero_can_be_stepped_for_ever(key: str) -> None:
    model = mlp()
    owner = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    scheduler = HyperparameterScheduler(owner, key, ExponentialDecay(0.96, every=1))
    scheduler._set_values(20_000, scheduler.base_values)
    train(model, owner, 2)
    assert owner.param_groups[0][key] > 0
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (
            1e308,
            r"'inverse_update_period' must be finite, and at 1 it is 10 times a factor of 1e\+308\. Have the factor",
        ),
        (2**2000, "must return a finite number, and returned inf at 1"),
    ],
    ids=["float", "integer"],
)
def test_a_schedule_that_overflows_is_told_of_and_changes_nothing(factor: float, message: str) -> None:
    owner = optimizer(inverse_update_period=10)
    scheduler = HyperparameterScheduler(owner, "inverse_update_period", lambda step: factor if step else 1)
    with pytest.raises((TypeError, ValueError), match=message):
        scheduler.step()
    assert (scheduler.last_epoch, owner.param_groups[0]["inverse_update_period"]) == (0, 10)


def test_a_factor_of_numpy_leaves_a_number_of_python() -> None:
    """Checkpoints with numbers of numpy are not read by `torch.load(weights_only=True)`."""
    scheduler = HyperparameterScheduler(optimizer(), "damping", lambda step: np.cos(step))
    assert [type(value) for (value,) in values(scheduler, 1)] == [float, float]


def test_an_edit_of_the_group_between_steps_is_overwritten_from_the_base() -> None:
    scheduler = HyperparameterScheduler(optimizer(damping=0.5), "damping", lambda step: 1 / (1 + step))
    scheduler.optimizer.param_groups[0]["damping"] = 77.0
    scheduler.step()
    assert present(scheduler) == [0.25]


def test_each_group_keeps_its_own_base() -> None:
    scheduler = HyperparameterScheduler(two_groups(damping=0.125), "damping", lambda step: 2.0**-step)
    assert values(scheduler, 2) == [[0.5, 0.125], [0.25, 0.0625], [0.125, 0.03125]]


def test_a_group_that_was_added_since_keeps_its_value() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[0].parameters(), model=model, lr=0.1, damping=0.1)
    schedule = HyperparameterScheduler(optimizer, "damping", lambda _: 0.5)
    optimizer.add_param_group({"params": model[2].parameters(), "damping": 0.3})
    optimizer.step()
    schedule.step()
    assert [group["damping"] for group in optimizer.param_groups] == [0.05, 0.3]


@pytest.mark.parametrize("anew", [False, True])
def test_a_group_that_was_added_since_takes_the_one_kl_clip_of_all(anew: bool) -> None:
    """Groups that disagree on it cannot be stepped: what a step asks for once holds from then on."""
    model = mlp()
    owner = KFACOptimizer(model[0].parameters(), model=model, lr=0.1, kl_clip=0.25)
    schedule = HyperparameterScheduler(owner, "kl_clip", lambda step: 2.0**-step)
    schedule.step()
    owner.add_param_group({"params": model[2].parameters()})
    with pytest.raises(ValueError, match="disagree on kl_clip"):
        train(model, owner, 1)
    owner.param_groups[1]["kl_clip"] = owner.param_groups[0]["kl_clip"]
    train(model, owner, 1)
    if anew:
        schedule = HyperparameterScheduler(owner, "kl_clip", lambda step: 2.0**-step, last_epoch=1)
    else:
        schedule.step()
    assert present(schedule) == [0.0625, 0.0625]
    train(model, owner, 1)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_each_group_may_have_its_own_factor(sequence: Callable[[list[Any]], Any]) -> None:
    factors = sequence([lambda step: 2.0**-step, lambda step: 1.0 + step])
    scheduler = HyperparameterScheduler(two_groups(), "damping", factors)
    assert values(scheduler, 2) == [[0.5, 0.5], [0.25, 1.0], [0.125, 1.5]]


def test_two_schedulers_of_different_numbers_do_not_meet() -> None:
    owner = optimizer(damping=0.5, inverse_update_period=4)
    first = HyperparameterScheduler(owner, "damping", lambda step: 0.5**step)
    second = HyperparameterScheduler(owner, "inverse_update_period", lambda step: 1 + step)
    assert values(first, 2) == [[0.5], [0.25], [0.125]]
    assert values(second, 2) == [[4], [8], [12]]


def test_a_scheduled_number_drives_the_run_like_edits_by_hand() -> None:
    model, twin = mlp(), mlp()
    scheduled, edited = (
        KFACOptimizer(m, lr=0.1, damping=0.5, inverse_update_period=1, factor_update_period=1) for m in (model, twin)
    )
    scheduler = HyperparameterScheduler(scheduled, "damping", lambda step: 0.5**step)
    for step in range(4):
        train(model, scheduled, 1, start=step)
        scheduler.step()
        edited.param_groups[0]["damping"] = 0.5 * 0.5**step
        train(twin, edited, 1, start=step)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_period_scheduled_up_takes_effect() -> None:
    model = mlp()
    owner = KFACOptimizer(model, lr=0.1, inverse_update_period=1, factor_update_period=100)
    scheduler = HyperparameterScheduler(owner, "inverse_update_period", lambda step: 1 if step < 3 else 4)
    ages = []
    for step in range(9):
        train(model, owner, 1, start=step)
        ages.append(owner.metrics()["inverse_age"])
        scheduler.step()
    assert ages == [0, 0, 0, 1, 0, 1, 2, 3, 0]


def test_a_factor_sees_the_same_steps_as_lambda_lr() -> None:
    ours, theirs = [], []
    owner = optimizer(lr=0.5, damping=0.5)
    first = HyperparameterScheduler(owner, "damping", lambda step: ours.append(step) or 1.0)
    second = torch.optim.lr_scheduler.LambdaLR(owner, lambda step: theirs.append(step) or 1.0)
    owner.step()
    for _ in range(3):
        first.step()
        second.step()
    assert ours == theirs == [0, 1, 2, 3]


# -- resuming --------------------------------------------------------------------------------------------------


def warm_up(step: int) -> float:
    """Not 1 at step 0, so that a base value taken from a scheduled one would show."""
    return (1 + step) / 8


@pytest.mark.parametrize("order", ["scheduler first", "optimizer first"])
def test_a_resumed_schedule_continues_as_if_uninterrupted_whichever_is_loaded_first(order: str) -> None:
    whole = HyperparameterScheduler(optimizer(damping=0.5), "damping", warm_up)
    expected = values(whole, 8)
    scheduler = HyperparameterScheduler(optimizer(damping=0.5), "damping", warm_up)
    values(scheduler, 4)
    saved = [scheduler.optimizer.state_dict(), scheduler.state_dict()]
    resumed = optimizer(damping=0.5)
    if order == "optimizer first":
        resumed.load_state_dict(saved[0])
        restored = HyperparameterScheduler(resumed, "damping", warm_up)
        restored.load_state_dict(saved[1])
    else:
        restored = HyperparameterScheduler(resumed, "damping", warm_up)
        restored.load_state_dict(saved[1])
        resumed.load_state_dict(saved[0])
    assert present(restored) == expected[4]
    assert values(restored, 4)[1:] == expected[5:]


def test_a_resumed_schedule_goes_by_the_base_that_it_was_saved_with() -> None:
    scheduler = HyperparameterScheduler(optimizer(damping=0.5), "damping", warm_up)
    values(scheduler, 2)
    restored = HyperparameterScheduler(optimizer(damping=0.25), "damping", warm_up)
    restored.load_state_dict(scheduler.state_dict())
    assert values(restored, 1) == [[0.5 * 3 / 8], [0.5 * 4 / 8]]


def test_a_schedule_built_again_starts_from_the_base_and_does_not_compound() -> None:
    """As in torch, whose schedulers keep `initial_lr` in the group for the ones after them."""
    owner = optimizer(damping=0.5)
    values(HyperparameterScheduler(owner, "damping", warm_up), 3)
    again = HyperparameterScheduler(owner, "damping", warm_up)
    assert values(again, 2) == [[0.5 / 8], [0.5 * 2 / 8], [0.5 * 3 / 8]]


def test_last_epoch_resumes_from_the_base_in_the_group() -> None:
    owner = optimizer(damping=0.5)
    values(HyperparameterScheduler(owner, "damping", warm_up), 3)
    resumed = HyperparameterScheduler(owner, "damping", warm_up, last_epoch=3)
    assert present(resumed) == [0.5 * 5 / 8]


def test_last_epoch_without_a_base_in_the_group_is_refused_as_in_torch() -> None:
    with pytest.raises(KeyError, match="initial_damping"):
        HyperparameterScheduler(optimizer(damping=0.5), "damping", warm_up, last_epoch=3)


def test_the_state_is_plain_numbers_and_survives_a_weights_only_file(tmp_path: Any) -> None:
    scheduler = HyperparameterScheduler(two_groups(damping=0.125), "damping", warm_up)
    values(scheduler, 3)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    loaded = torch.load(tmp_path / "scheduler.pt", weights_only=True)
    assert loaded == scheduler.state_dict() == {"key": "damping", "last_epoch": 3, "base_values": [0.5, 0.125]}


def test_the_state_of_another_number_is_refused() -> None:
    owner = optimizer()
    state = HyperparameterScheduler(owner, "damping", warm_up).state_dict()
    with pytest.raises(ValueError, match=r"drives 'kl_clip', the checkpoint 'damping'; load each scheduler's own"):
        HyperparameterScheduler(owner, "kl_clip", warm_up).load_state_dict(state)


def test_the_state_of_another_number_of_groups_is_refused() -> None:
    state = HyperparameterScheduler(two_groups(), "damping", warm_up).state_dict()
    with pytest.raises(ValueError, match=r"drives 1 param groups, the checkpoint 2\. Build it at the same place of"):
        HyperparameterScheduler(optimizer(), "damping", warm_up).load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"key": None}, r"has no 'key'\. Load what its own state_dict\(\) gave"),
        ({"last_epoch": "3"}, "last_epoch of the state must be an integer, got '3'"),
        ({"base_values": [math.nan]}, "a base value of 'damping' must be finite, got nan"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_is_changed(damage: dict[str, Any], message: str) -> None:
    owner = optimizer()
    scheduler = HyperparameterScheduler(owner, "damping", warm_up)
    scheduler.step()
    before = scheduler.state_dict(), owner.param_groups[0]["damping"]
    state = scheduler.state_dict() | {"last_epoch": 7} | damage
    with pytest.raises((TypeError, ValueError), match=message):
        scheduler.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert before == (scheduler.state_dict(), owner.param_groups[0]["damping"])


def test_an_epoch_whose_factor_raises_is_taken_again() -> None:
    fails = [False, True, False]
    owner = optimizer()
    scheduler = HyperparameterScheduler(owner, "damping", lambda epoch: math.nan if fails.pop(0) else 0.5**epoch)
    base = owner.param_groups[0]["damping"]
    with pytest.raises(TypeError, match="must return a finite number, and returned nan at 1"):
        scheduler.step()
    scheduler.step()
    assert owner.param_groups[0]["damping"] == base / 2


# -- refusals ----------------------------------------------------------------------------------------------------


def test_an_unknown_number_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(KeyError, match=r"no 'dampnig' to schedule; it has \[.*'damping'.*'kl_clip'") as refused:
        HyperparameterScheduler(optimizer(), "dampnig", warm_up)
    for flag in ("nesterov", "maximize", "l2_in_curvature"):
        assert flag not in str(refused.value)


@pytest.mark.parametrize(("key", "shown"), [("kl_clip", "None"), ("nesterov", "False"), ("foreach", "None")])
def test_what_is_no_number_is_refused(key: str, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"'{key}' of param group 0 is {shown}, which is no number to schedule"):
        HyperparameterScheduler(optimizer(kl_clip=None), key, warm_up)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_factors_than_groups_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"2 param groups need one factor or 2, got {count}"):
        HyperparameterScheduler(two_groups(), "damping", [warm_up] * count)


def test_a_refused_scheduler_leaves_the_groups_alone() -> None:
    owner = two_groups()
    before = [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]
    with pytest.raises(ValueError, match="need one factor"):
        HyperparameterScheduler(owner, "damping", [warm_up])
    assert before == [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]


# -- ExponentialDecay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (ExponentialDecay(0.5), [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (ExponentialDecay(0.5, every=2), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (ExponentialDecay(0.5, minimum=0.2), [1, 0.5, 0.25, 0.2, 0.2, 0.2]),
        (ExponentialDecay(1.0), [1] * 6),
    ],
)
def test_exponential_decay_is_a_power_per_interval_clipped_below(
    decay: ExponentialDecay, expected: list[float]
) -> None:
    assert [decay(step) for step in range(6)] == expected


def test_exponential_decay_drives_the_trust_region_as_in_the_paper() -> None:
    """Ba, Grosse & Martens 2017, §5: c₀ ζ^k with c₀ = 0.01, ζ = 0.96, k counting half epochs."""
    steps_per_half_epoch = 3
    owner = optimizer(kl_clip=0.01)
    scheduler = HyperparameterScheduler(owner, "kl_clip", ExponentialDecay(0.96, every=steps_per_half_epoch))
    found = [value for (value,) in values(scheduler, 9)]
    assert found == [0.01 * 0.96 ** (step // 3) for step in range(10)]
