"""Whether the blocks' part of a checkpoint can be loaded: every field is looked at before anything is changed."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.checkpoint import FORMAT, STEP_SIZE, layer_name, member_names, revised, text_of
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.utils import value_checks


class _Field(NamedTuple):
    fits: Callable[[Any], bool]
    wanted: str


def _is_text(value: object) -> bool:
    try:
        text_of(value)
    except ValueError:
        return False
    return True


def _whole(at_least: int) -> _Field:
    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= 2**53

    return _Field(fits, f"a whole number from {at_least} on")


def _number(*, zero: bool) -> _Field:
    def fits(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return 0 < value <= sys.float_info.max or (zero and value == 0)

    return _Field(fits, "a finite number from 0 on" if zero else "a finite number above 0")


_FLAG = _Field(lambda value: isinstance(value, bool), "True or False")
_TEXT = _Field(_is_text, "UTF-8 text as a tensor of bytes")
_FOUR = _Field(
    lambda value: isinstance(value, Tensor) and value.shape == (4,) and value.is_floating_point(),
    "four floating numbers",
)
_DICT = _Field(lambda value: isinstance(value, Mapping), "a dict")

# The fields of a mark, of a block (required, then optional), of a refresh under way, and of a clock.
_MARK = {"version": _whole(1), "name": _TEXT, "left_out": _TEXT}
_BLOCK = {
    "version": _whole(1),
    "name": _TEXT,
    "params": _TEXT,
    "clock": _DICT,
    "opposed": _FLAG,
    "shared_input": _FLAG,
    "spread": _FLAG,
    "factors": _FLAG,
    "refreshing": _FLAG,
    "momenta": _whole(0),
}
_OPTIONAL = {"inverse": _DICT, "under_way": _DICT, STEP_SIZE: _FOUR, "follows_uses": _FLAG}
_UNDER_WAY = {"clock": _DICT, "inverse": _DICT}
_CLOCK = {
    "step": _whole(0),
    "folds": _whole(0),
    "folded_at": _whole(-1),
    "refreshed_at": _whole(-1),
    "folds_at_refresh": _whole(0),
    "damping": _number(zero=True),
    "outdated": _FLAG,
    "summed_terms": _number(zero=False),
    "loss_unit": _number(zero=False),
}
# Older checkpoints do not have these.
_CLOCK_LATER = {"gradient_scale": _number(zero=False), "missed": _FLAG, "graded": _whole(0)}


def check_forms(states: Mapping[str, object]) -> None:
    """Raise ValueError unless every field has the right form; the tensors of inverses are not looked at here.

    Args:
        states: what the checkpoint holds for each block, or in a block's place, by the name that messages give it.
    """
    problems = [problem for at, state in states.items() for problem in _form(state, at)]
    _raise_damaged(problems, "Load another one, or give the fields that are named what they should hold")


def check_layers(
    blocks: Sequence[KFACBlock],
    states: Sequence[Mapping[str, Any] | None],
    strays: Sequence[str],
    *,
    of_found: int = 0,
    several: bool = False,
) -> None:
    """Raise ValueError, naming layers, unless the states, whose forms were checked, fit the blocks.

    Args:
        blocks: the blocks of this optimizer.
        states: what the checkpoint holds for each, None where it holds nothing.
        strays: names of layers in the checkpoint that belong to no block.
        of_found: how many models were found, where none was given. Names may then differ by a prefix, as of a model
            that was found inside another module; and, of several, by the place of the model.
        several: whether there are other processes, which may have what is missing here.
    """
    problems = [f"it has statistics for {name!r}, which is not preconditioned here" for name in strays]
    damaged: list[str] = []
    for block, state in zip(blocks, states, strict=True):
        if state is None:
            # Saved before the first forward it has none of what only a forward shows.
            if not isinstance(block.adapter, ProductAdapter):
                problems.append(f"it has none for {block.name!r}")
        elif not _same_name(layer_name(state), block.name, of_found):
            problems.append(f"it has {layer_name(state)!r} where {block.name!r} should stand")
        elif "left_out" not in state:
            found = list(_misfits(block, state))
            problems += found
            if not found:
                damaged += _damages(block, state, several=several)
    if problems:
        raise ValueError(
            f"kfac_optim: the checkpoint belongs to other layers or other options: {_shown(problems)}. Build the "
            "optimizer as it was when the checkpoint was saved; nothing has been changed."
        )
    _raise_damaged(
        damaged,
        "Load another one; or go on without the statistics of a layer, which then start from zero: in its entry 'kfac' "
        f"of the checkpoint's 'state' set 'factors' to False and delete 'inverse' (and {STEP_SIZE!r}, if it is named)",
    )


def described(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}{' without values' if value.is_meta else ''}"
    text = repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}…"


def tensor_problem(value: object, like: Tensor, rule: value_checks.Rule, *, virtual: bool) -> str | None:
    """Tell what is wrong with a value that is to be copied into a tensor of its shape; None where nothing is.

    Args:
        value: what the checkpoint has.
        like: the tensor that it is for.
        rule: what its numbers can be.
        virtual: whether the model is on the meta device, where there are no numbers.
    """
    if not isinstance(value, Tensor):
        return described(value)
    same_kind = value.dtype == torch.bool, value.is_floating_point(), value.is_complex()
    if same_kind != (like.dtype == torch.bool, like.is_floating_point(), like.is_complex()):
        # `torch.optim.SGD` makes all tensors of a parameter like the parameter, counts and flags as well.
        was_cast = value.is_floating_point() and like.dtype in (torch.int64, torch.bool) and not value.is_meta
        if not was_cast or not torch.equal(value, value.to(like.dtype).to(value.dtype)):
            return f"of {value.dtype}, here {like.dtype}"
    if value.layout != like.layout or value.is_quantized:
        return f"{value.layout}, here {like.layout}"
    if value.is_meta:
        return None if virtual else "without values, on the meta device"
    wrong = rule(value.detach().to(like.dtype))
    return None if wrong is None else f"{wrong}{f' in {like.dtype}' if like.dtype != value.dtype else ''}"


def _form(state: object, at: str) -> Iterator[str]:
    """Tell what is wrong with all that is no tensor of an inverse."""
    if not isinstance(state, Mapping):
        yield f"{at} is {described(state)}, not a dict"
        return
    version = state.get("version")
    if isinstance(version, int) and version > FORMAT:
        yield (
            f"{at} was written by a later version of kfac_optim, in format {version}, and this one reads formats up to "
            f"{FORMAT}"
        )
        return
    if "left_out" in state:
        yield from _fields(state, _MARK, {}, at)
        return
    yield from _fields(state, _BLOCK, _OPTIONAL, at)
    if isinstance(state.get("clock"), Mapping):
        yield from _clock(state["clock"], f"'clock' of {at}")
    under_way = state.get("under_way")
    if isinstance(under_way, Mapping):
        yield from _fields(under_way, _UNDER_WAY, {}, f"'under_way' of {at}")
        if isinstance(under_way.get("clock"), Mapping):
            yield from _clock(under_way["clock"], f"'clock' of 'under_way' of {at}")


def _fields(
    state: Mapping[str, Any], required: Mapping[str, _Field], optional: Mapping[str, _Field], at: str
) -> Iterator[str]:
    known = {**required, **optional}
    for key, value in state.items():
        if key not in known:
            yield f"{at} has a field {key!r}, which is unknown here: a later version of kfac_optim may have written it"
        elif not known[key].fits(value):
            yield f"{key!r} of {at} is {described(value)}, not {known[key].wanted}"
    yield from (f"{at} lacks {key!r}" for key in required if key not in state)


def _clock(clock: Mapping[str, Any], at: str) -> Iterator[str]:
    problems = list(_fields(clock, _CLOCK, _CLOCK_LATER, at))
    if problems:
        yield from problems
        return
    step, folds = clock["step"], clock["folds"]
    for key, limit, of in (
        ("folds", step + 1, "steps"),
        ("folded_at", step, "the step"),
        ("refreshed_at", step, "the step"),
        ("folds_at_refresh", folds, "'folds'"),
    ):
        if clock[key] > limit:
            yield f"{key!r} of {at} is {clock[key]}, beyond {of}, {limit}"
    for key in ("folded_at", "refreshed_at"):
        if clock[key] >= 0 and folds == 0:
            yield f"{key!r} of {at} is {clock[key]}, though 'folds' is 0"
    if folds > 0 and clock["folded_at"] < 0:
        yield f"'folded_at' of {at} is {clock['folded_at']}, though 'folds' is {folds}"


def _misfits(block: KFACBlock, state: Mapping[str, Any]) -> Iterator[str]:
    """Tell where names or shapes are those of another layer, or of other options."""
    if member_names(state) != block.spec.params:
        yield f"it has {member_names(state)} of {block.name!r}, here {block.spec.params}"
        return
    for key, ours, theirs in _pairs(block, state):
        if ours is None:
            yield f"{key} of {block.name!r} is {_size(theirs)}, here unused"
        elif theirs is None or (isinstance(theirs, Tensor) and theirs.shape != ours.shape):
            yield f"{key} of {block.name!r} is {_size(theirs)}, here {_size(ours)}"


def _damages(block: KFACBlock, state: Mapping[str, Any], *, several: bool) -> Iterator[str]:
    """Yield the values that no optimizer of this package can have written."""
    rules = dict(_leaves(_state_like(block, state).ranges()))
    virtual = block.params[0].is_meta
    for key, like, value in _pairs(block, state):
        rule = rules.get(key.removeprefix("under_way."), value_checks.finite)
        if like is not None and (wrong := tensor_problem(value, like, rule, virtual=virtual)) is not None:
            yield f"{key!r} of {block.name!r} is {wrong}"
    memory = state.get(STEP_SIZE)
    if memory is not None:
        wrong = tensor_problem(
            memory, torch.empty(memory.shape, dtype=memory.dtype), value_checks.finite, virtual=virtual
        )
        if wrong is not None:
            yield f"{STEP_SIZE!r} of {block.name!r} is {wrong}"
    if several:
        return
    measured = state["clock"]["refreshed_at"] >= 0 and not state["spread"]
    if "inverse" not in state and state["factors"] and measured:
        yield f"'inverse' of {block.name!r} is missing"


def _pairs(block: KFACBlock, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor | None, Any]]:
    """Give each tensor of the inverse by its path, as it is here and as the checkpoint has it; None where missing."""
    like = dict(_leaves(_state_like(block, state).tensors()))
    for prefix, holder in (("", state), ("under_way.", state.get("under_way", {}))):
        if "inverse" in holder:
            held = dict(_leaves(holder["inverse"]))
            for key in sorted(like.keys() | held.keys()):
                yield prefix + key, like.get(key), held.get(key)


def _leaves(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        # A key of another kind, or with a dot in it, is no name of ours, whatever it looks like.
        path = f"{prefix}{key}" if isinstance(key, str) and "." not in key else f"{prefix}[{key!r}]"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _state_like(block: KFACBlock, state: Mapping[str, Any]) -> Any:
    """Return the block's state; if the checkpoint would revise the block, a state such as it will have."""
    spec = revised(block, state)
    if spec == block.spec:
        return block.state
    return block.inverse.init(spec.by_blocks(), dtype=block.dtype, device=torch.device("meta"))


def _same_name(one: str, other: str, of_found: int) -> bool:
    if one == other or of_found == 0:
        return one == other
    if of_found > 1:  # names begin with the place of the model, in the order of their first calls
        one, other = (re.sub("^[0-9]+([.]|$)", "", name) for name in (one, other))
    short, long = sorted((one, other), key=len)
    return short == long or not short or long.endswith(f".{short}")


def _size(value: Any) -> str:
    return "missing" if value is None else str(list(value.shape)) if isinstance(value, Tensor) else described(value)


def _raise_damaged(problems: Iterable[str], remedy: str) -> None:
    found = list(problems)
    if found:
        raise ValueError(
            f"kfac_optim: the checkpoint cannot be loaded: {_shown(found)}. {remedy}. Nothing has been changed."
        )


def _shown(problems: Sequence[str]) -> str:
    return "; ".join(problems[:8]) + (f"; … ({len(problems)} in all)" if len(problems) > 8 else "")
