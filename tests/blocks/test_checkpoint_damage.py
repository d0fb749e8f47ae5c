"""Checkpoints that something has happened to are loaded as what they say, or refused by one clear error.

`python tests/fuzz.py` tries many more.
"""

import io
import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers.fuzz.checkpoints import attempt, case_of, get, mutated, outcome
from helpers.fuzz.runs import INVERSES, PAIRS, build
from helpers.plain import assert_identical
from torch import Tensor

from kfac_optim import Cholesky
from kfac_optim.blocks.checkpoint_check import _CLOCK, _CLOCK_LATER
from kfac_optim.blocks.clock import Clock


def test_a_mutated_checkpoint_is_loaded_as_what_it_says_or_refused_and_nothing_changes() -> None:
    for seed in range(60):
        attempt(mutated(random.Random(seed)))


def test_the_checks_of_a_clock_are_of_all_its_fields() -> None:
    assert set(_CLOCK) | set(_CLOCK_LATER) == {field.name for field in fields(Clock)}


@pytest.mark.parametrize("field", ["summed_terms", "loss_unit", "gradient_scale"])
def test_numbers_of_a_clock_that_others_are_multiplied_or_divided_by_are_not_zero(field: str) -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    damaged["state"][0]["kfac"]["clock"][field] = 0.0
    with pytest.raises(ValueError, match=f"'{field}' of 'clock' of '0' is 0.0, not a finite number above 0"):
        case.optimizer.load_state_dict(damaged)
    assert_identical(case.held(), case.before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda kfac: kfac["clock"].update(folds=kfac["clock"]["step"] + 2),
            r"'folds' of 'clock' of '0' is \d+, beyond",
        ),
        (lambda kfac: kfac["clock"].update(folds=0, folds_at_refresh=0), r"though 'folds' is 0"),
        (lambda kfac: kfac["clock"].update(folded_at=-1), r"'folded_at' of 'clock' of '0' is -1, though 'folds' is"),
        (lambda kfac: kfac["clock"].pop("step"), r"'clock' of '0' lacks 'step'"),
        (lambda kfac: kfac.update(version=99), r"by a later version of kfac_optim, in format 99"),
        (lambda kfac: kfac.pop("inverse"), r"'inverse' of '0' is missing"),
    ],
    ids=["more folds than steps", "folded and not", "folds and when not", "no step", "later", "no inverse"],
)
def test_what_contradicts_itself_is_refused_and_nothing_changes(
    damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    damage(damaged["state"][0]["kfac"])
    with pytest.raises(ValueError, match=message):
        case.optimizer.load_state_dict(damaged)
    assert_identical(case.held(), case.before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved["state"].update({0: 3}), "'state' of '0.weight' is 3, not a dict"),
        (lambda saved: saved["state"][0].update(momentum_buffer=3), "'momentum_buffer' of '0.weight' is 3, not a"),
        (
            lambda saved: saved["param_groups"][0].update(lr=torch.tensor(1j)),
            "'lr' of param group 0 is .* not a",
        ),
        (
            lambda saved: saved["param_groups"][0].update(lr=saved),
            r"(?s)lr in param group 0 must be a number, got \{.{199}…\. Nothing has been changed",
        ),
        (lambda saved: saved["param_groups"][0].pop("kl_clip"), "param group 0 lacks 'kl_clip', which another"),
    ],
    ids=["state", "momentum", "rate", "all", "older"],
)
def test_what_is_of_another_kind_is_refused_and_nothing_changes(
    damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    damage(damaged)
    with pytest.raises(ValueError, match=message):
        case.optimizer.load_state_dict(damaged)
    assert_identical(case.held(), case.before)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(INVERSES)), ids=[repr(inverse) for inverse in INVERSES])
def test_every_tensor_of_every_inverse_that_is_not_finite_is_refused_by_its_name(index: int) -> None:
    """Or shown to the user alone: condition numbers and the like may have overflowed."""
    case = case_of((index, (index + 1) % len(INVERSES)) if (index, index + 1) in PAIRS else (0, index))
    for path in case.paths:
        damaged = case.saved()
        value = get(damaged, path)
        if (
            path[:2] != ("state", 0)
            or "inverse" not in path
            or "under_way" in path
            or not isinstance(value, Tensor)
            or not value.is_floating_point()
        ):
            continue
        value.view(-1)[0] = torch.nan
        if path[-1] in ("condition", "conditions", "cutoff"):
            continue
        with pytest.raises(ValueError, match=rf"{path[-1]}' of '\d' is not finite"):
            case.optimizer.load_state_dict(damaged)
    assert_identical(case.held(), case.before)


def test_what_a_hook_of_the_user_makes_of_a_checkpoint_is_checked() -> None:
    case = case_of((0, 1))
    handle = case.optimizer.register_load_state_dict_pre_hook(lambda *_: [])
    with pytest.raises(ValueError, match="it is list, not a dict"):
        case.optimizer.load_state_dict(case.saved())
    handle.remove()
    assert_identical(case.held(), case.before)


def test_a_truncated_file_is_torchs_error_or_ours() -> None:
    case = case_of((0, 1))
    file = io.BytesIO()
    torch.save(case.saved(), file)
    whole = file.getvalue()
    for part in (0.1, 0.5, 0.9, 0.999):
        with pytest.raises((RuntimeError, EOFError, ValueError)):
            case.optimizer.load_state_dict(torch.load(io.BytesIO(whole[: int(part * len(whole))]), weights_only=True))
    assert_identical(case.held(), case.before)


NO_CHECKPOINTS: dict[str, tuple[Any, str]] = {
    "none": (None, "it is None, not a dict"),
    "a list": ([], "it is list, not a dict"),
    "an empty dict": ({}, "it lacks 'param_groups' and has nothing"),
    "a whole checkpoint": ({"model": {}, "optimizer": {}}, "it lacks 'param_groups' and has 'model', 'optimizer'"),
    "no state": ({"param_groups": []}, "it lacks 'state'"),
    "groups as a dict": ({"param_groups": {}, "state": {}}, "'param_groups' is dict, not a list"),
    "a group that is none": ({"param_groups": [3], "state": {}}, "param group 0 is 3, not a dict"),
    "a group without parameters": ({"param_groups": [{"lr": 1}], "state": {}}, "'params' of param group 0 is None"),
    "a number without a name": (
        {"param_groups": [{"params": [], 3: 1}], "state": {}},
        "a param group .* called 3",
    ),
}


@pytest.mark.parametrize("case", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused(case: str) -> None:
    value, message = NO_CHECKPOINTS[case]
    _, optimizer = build(Cholesky(), Cholesky())
    with pytest.raises(ValueError, match=f"the checkpoint cannot be loaded: {message}"):
        optimizer.load_state_dict(value)


def test_a_layer_whose_statistics_are_damaged_goes_on_without_them_as_the_error_says() -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    held = damaged["state"][0]["kfac"]
    held["inverse"]["factors"]["G"]["average"].fill_(torch.nan)
    held["step_size"] = held["step_size"] * torch.nan
    with pytest.raises(ValueError, match=r"set 'factors' to False and delete 'inverse' \(and 'step_size'"):
        case.optimizer.load_state_dict(damaged)
    held["factors"] = False
    del held["inverse"], held["step_size"]
    assert outcome(case, damaged) == "loaded"


def test_a_field_that_is_given_a_sound_value_as_the_error_says_loads() -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    clock = damaged["state"][0]["kfac"]["clock"]
    sound, clock["damping"] = clock["damping"], math.nan
    with pytest.raises(ValueError, match=r"'damping' of 'clock' of '0' is nan.* give the fields that are named what"):
        case.optimizer.load_state_dict(damaged)
    clock["damping"] = sound
    assert outcome(case, damaged) == "loaded"


def test_what_a_later_version_has_written_is_refused_as_that() -> None:
    case = case_of((0, 1))
    later, stranger = case.saved(), case.saved()
    later["state"][0]["kfac"] |= {"version": 2, "radius": 1.0}
    with pytest.raises(ValueError, match=r"'0' was written by a later version of kfac_optim, in format 2"):
        case.optimizer.load_state_dict(later)
    stranger["state"][0]["kfac"]["clock"]["warmed"] = True
    with pytest.raises(ValueError, match=r"'clock' of '0' has a field 'warmed', which is unknown here"):
        case.optimizer.load_state_dict(stranger)


def test_numbers_of_groups_that_do_not_go_together_are_refused_when_they_are_loaded() -> None:
    case = case_of((0, 1))
    damaged = case.saved()
    damaged["param_groups"][1]["kl_clip"] = 0.5
    with pytest.raises(ValueError, match="param groups disagree on kl_clip"):
        case.optimizer.load_state_dict(damaged)
    assert_identical(case.held(), case.before)
