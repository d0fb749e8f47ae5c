"""The part of a checkpoint that is torch's own: param groups and momentum, and whose checkpoint it is."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.checkpoint import KEY
from kfac_optim.blocks.checkpoint_check import described, tensor_problem
from kfac_optim.blocks.state_keys import ADAM_STEPS, AVERAGE, AVERAGED_STEPS, ITERATE, MOMENTUM, SECOND_MOMENT
from kfac_optim.utils import value_checks
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.text import listed
from kfac_optim.utils.validation import check_kfac_numbers

Group = Mapping[str, Any]

_FLAGS = ("nesterov", "maximize", "foreach", "fused")
_SGD = ("lr", "momentum", "dampening", "weight_decay")


class Origin(Enum):
    """Says which optimizer has written a checkpoint."""

    OURS = "KFACOptimizer"
    SGD = "torch.optim.SGD"


def check_is_dict(state_dict: object) -> None:
    """Raise ValueError unless this is a dict. What it holds is checked later, as the user's hooks may change it."""
    if not isinstance(state_dict, dict):
        raise _refusal(f"it is {described(state_dict)}, not a dict as state_dict() gives it")


def check_repeats(numbers: Sequence[Hashable], params: Sequence[nn.Parameter]) -> None:
    """Raise ValueError where a checkpoint lists a parameter twice that is listed once here, or the other way round.

    Args:
        numbers: the numbers of the checkpoint's parameters.
        params: the optimizer's parameters, as many.
    """
    places: dict[Hashable, int] = {}
    here: dict[nn.Parameter, int] = {}
    for place, (number, param) in enumerate(zip(numbers, params, strict=True)):
        if places.setdefault(number, place) != here.setdefault(param, place):
            raise _refusal(
                f"'params' and the param groups here do not repeat the same parameters: number {number!r}, at place "
                f"{place}, is listed twice in one of them and not in the other"
            )


def check_shape(state_dict: object) -> None:
    """Raise ValueError unless there are param groups and states where torch looks for them."""
    check_is_dict(state_dict)
    assert isinstance(state_dict, dict)
    for key, kind, name in (("param_groups", list | tuple, "a list"), ("state", Mapping, "a dict")):
        if key not in state_dict:
            given = listed(state_dict, 4) or "nothing"
            raise _refusal(f"it lacks {key!r} and has {given}; pass what state_dict() gave")
        if not isinstance(state_dict[key], kind):
            raise _refusal(f"{key!r} is {described(state_dict[key])}, not {name}")
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, dict):
            raise _refusal(f"param group {number} is {described(group)}, not a dict")
        params = group.get("params")
        if not isinstance(params, list | tuple):
            raise _refusal(f"'params' of param group {number} is {described(params)}, not a list")
        for param in params:
            if isinstance(param, bool) or not isinstance(param, int | str):
                raise _refusal(f"'params' of param group {number} has {described(param)}, not numbers of parameters")
    names = [key for group in state_dict["param_groups"] for key in group if not isinstance(key, str)]
    if names:
        raise _refusal(f"a param group has a number called {described(names[0])}, not a string")


def origin(state_dict: Mapping[str, Any], keys: Sequence[str]) -> Origin:
    """Tell whose checkpoint this is, by what it holds.

    Args:
        state_dict: a checkpoint of the right shape.
        keys: the numbers that our param groups have.

    Raises:
        ValueError: it belongs to another optimizer than ours and SGD, whose state is of no use here.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    held = {key: None for state in states.values() if isinstance(state, Mapping) for key in state}
    ours = set(keys) - {*_SGD, *_FLAGS}
    if KEY in held or any(not ours.isdisjoint(group) for group in groups):
        return Origin.OURS
    sgds = all("dampening" in group and "momentum" in group for group in groups)
    if sgds and set(held) <= {MOMENTUM}:
        return Origin.SGD
    numbers = list(dict.fromkeys(key for group in groups for key in group if key not in ("params", *_SGD)))
    shown = f"its state holds {listed(held)}" if held else f"its param groups hold {listed(numbers) or 'nothing'}"
    author = "Adam or AdamW" if "betas" in numbers else "another optimizer"
    raise ValueError(
        f"kfac_optim: the checkpoint is of {author}: {shown}, which is not the momentum of K-FAC. Load the model alone "
        "and begin with a new optimizer; a number of a param group can be set by hand, as in "
        "optimizer.param_groups[0]['weight_decay'] = checkpoint['param_groups'][0]['weight_decay']. Nothing has been "
        "changed."
    )


def completed(saved: Sequence[Group], present: Sequence[Group], keys: Sequence[str], whose: Origin) -> list[Group]:
    """Give the checkpoint's param groups with all numbers, each of which was checked.

    Args:
        saved: the checkpoint's.
        present: the optimizer's, as many; of a checkpoint of SGD they keep what SGD has not.
        keys: the numbers that our param groups have.
        whose: the optimizer that has written the checkpoint.

    Raises:
        ValueError: a number is missing, of another kind or out of range.
    """
    found: list[Group] = []
    for number, (theirs, ours) in enumerate(zip(saved, present, strict=True)):
        kept = _FLAGS if whose is Origin.OURS else [key for key in keys if key not in _SGD]
        filled = {**{key: ours[key] for key in kept}, **theirs}
        lacking = [key for key in keys if key not in filled]
        if lacking:
            raise _refusal(
                f"param group {number} lacks {', '.join(map(repr, lacking))}, which another version of kfac_optim may "
                f"not have had; set it, as in checkpoint['param_groups'][{number}][{lacking[0]!r}] = "
                f"{described(ours[lacking[0]])}"
            )
        for key in ("lr", "weight_decay"):
            value = filled[key]
            if isinstance(value, Tensor) and (value.is_meta or value.is_complex() or value.layout != torch.strided):
                raise _refusal(f"{key!r} of param group {number} is {described(value)}, not a number")
        try:
            check_kfac_numbers(filled, f" in param group {number}")  # what a step takes
        except (TypeError, ValueError) as error:
            raise _refusal(str(error).removeprefix("kfac_optim: ").removesuffix(".")) from None
        found.append(filled)
    return found


def check_together(completed: Sequence[Group], present: Sequence[Group], check: Callable[[list[Any]], object]) -> None:
    """Raise ValueError where the checkpoint's numbers do not go together, or not with the choices of the optimizer.

    Args:
        completed: the checkpoint's param groups, with all numbers.
        present: the optimizer's, as many.
        check: raises for param groups that cannot be stepped.
    """
    try:
        check([{**ours, **theirs, "params": ours["params"]} for theirs, ours in zip(completed, present, strict=True)])
    except ValueError as error:
        problem = str(error).removeprefix("kfac_optim: ").removesuffix(".")
        raise _refusal(
            f"{problem}. These numbers are the checkpoint's, and loading puts them in the place of the optimizer's: "
            "change them in checkpoint['param_groups'], which has a dict for each param group"
        ) from None


def by_number(states: Mapping[Any, Any], ids: Sequence[Hashable]) -> dict[Any, Any]:
    """Give the states by the numbers in `ids`, of which JSON makes strings.

    Torch's `dcp.load` makes strings of the numbers too, for everything but tensors, and adds that to the dict it was
    given. So what stands under a string comes from the checkpoint; under the number itself only tensors do.

    Raises:
        ValueError: a state is of no parameter that the param groups list.
    """
    known_ids, of_text = set(ids), {str(i): i for i in ids}
    found: dict[Any, Any] = {}
    for key, state in sorted(states.items(), key=lambda item: isinstance(item[0], str)):
        known = of_text.get(key, key) if isinstance(key, str) else key
        holds = isinstance(state, Mapping) and any(name in state for name in (KEY, MOMENTUM, SECOND_MOMENT, AVERAGE))
        if known not in known_ids and (holds or isinstance(key, int)):
            raise _refusal(f"'state' has {key!r}, and no param group lists a parameter of that number")
        found[known] = _merged(found[known], state) if known in found else state
    return found


def _merged(under: Any, over: Any) -> Any:
    """Give nested dicts as one, in which `over` has the last word."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}


def check_parameter_state(state: object, param: nn.Parameter, name: str, *, covered: bool) -> None:
    """Raise ValueError unless what a checkpoint holds for a parameter, beside its block, is a dict that fits it.

    Args:
        state: what the checkpoint holds.
        param: the parameter.
        name: the name of the parameter.
        covered: whether it belongs to a block, and so has no sparse gradients.
    """
    if not isinstance(state, Mapping):
        raise _refusal(f"'state' of {name!r} is {described(state)}, not a dict")
    for key in (MOMENTUM, SECOND_MOMENT, AVERAGE, ITERATE):
        if state.get(key) is not None:
            rule = value_checks.squares if key == SECOND_MOMENT else value_checks.finite
            _check_tensor(state[key], param, f"{key!r} of {name!r} is", rule, covered=covered)
    if SECOND_MOMENT in state and not _is_count(state.get(ADAM_STEPS)):
        raise _refusal(
            f"{ADAM_STEPS!r} of {name!r} is {described(state.get(ADAM_STEPS))}, and must be a tensor [] of a number "
            f"from 0 on where there is {SECOND_MOMENT!r}"
        )
    averaged = state.get(AVERAGED_STEPS)
    is_whole = isinstance(averaged, int) and not isinstance(averaged, bool)
    if (AVERAGE in state) != (AVERAGED_STEPS in state) or (AVERAGE in state and not is_whole):
        raise _refusal(
            f"{AVERAGED_STEPS!r} of {name!r} is {described(averaged)}, and must be a whole number where there is "
            f"{AVERAGE!r}, and nowhere else"
        )
    if averaged is not None and averaged < 0 and ITERATE not in state:
        raise _refusal(
            f"{ITERATE!r} of {name!r}, the trained parameter, is missing: the checkpoint was saved after "
            "optimizer.eval(), and torch.distributed.checkpoint.load reads what there is a place for. Call "
            "get_optimizer_state_dict(model, optimizer) and then optimizer.eval() before you make the dict that it is "
            "read into, and optimizer.train() after loading; or save after optimizer.train()"
        )
    if ITERATE in state and AVERAGE not in state:
        raise _refusal(f"{ITERATE!r} of {name!r} is there without {AVERAGE!r}")


def _is_count(value: object) -> bool:
    """Return whether a value is a tensor `[]` of a number from 0 on; on `meta` there is no number to look at."""
    if not isinstance(value, Tensor) or value.dim() > 0 or value.is_complex():
        return False
    return value.is_meta or bool(value >= 0)


def _check_tensor(buffer: object, param: nn.Parameter, at: str, rule: value_checks.Rule, *, covered: bool) -> None:
    """Raise ValueError unless a tensor of a parameter's state fits it; `at` begins the message."""
    if not isinstance(buffer, Tensor):
        raise _refusal(f"{at} {described(buffer)}, not a tensor")
    if is_lazy(param):  # whose shape the checkpoint of the model is about to tell
        return
    if buffer.shape != param.shape:
        raise _refusal(
            f"{at} {list(buffer.shape)}, here {list(param.shape)}. Of a model with other layers load the parameters "
            "alone, and begin with a new optimizer"
        )
    if isinstance(buffer, DTensor) != isinstance(param, DTensor):
        raise _refusal(
            f"{at} {'' if isinstance(buffer, DTensor) else 'not '}sharded, unlike the parameter; load it by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    mine, theirs = local(param), local(buffer)
    if theirs.layout is torch.sparse_coo and not covered:  # of sparse gradients
        theirs = theirs.coalesce().values()
    if mine.shape != theirs.shape and isinstance(buffer, DTensor):
        raise _refusal(
            f"{at} sharded otherwise: this rank has {list(theirs.shape)} of it, but {list(mine.shape)} of the parameter"
        )
    if (wrong := tensor_problem(theirs, mine, rule, virtual=mine.is_meta)) is not None:
        raise _refusal(f"{at} {wrong}")


def check_momenta(block: KFACBlock, held: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Raise ValueError where a block had more momentum buffers than there are now.

    Args:
        block: the block.
        held: what the checkpoint holds for each parameter.
    """
    state = held.get(block.params[0], {}).get(KEY, {})
    found = sum(held.get(param, {}).get(MOMENTUM) is not None for param in block.params)
    if found < state.get("momenta", 0):
        raise _refusal(
            f"it was saved with {state['momenta']} momentum buffers of {block.name!r}, and has {found}. Where "
            "torch.distributed.checkpoint.load has read it into the state_dict() of a new optimizer, which has none "
            "yet, call torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) once before "
            "that state_dict()"
        )


def _refusal(problem: str) -> ValueError:
    return ValueError(f"kfac_optim: the checkpoint cannot be loaded: {problem}. Nothing has been changed.")
