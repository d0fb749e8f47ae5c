"""Block state in and out of `Optimizer.state_dict()`: tensors and numbers only, and refused when it does not fit."""

from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing, RefreshUnderWay
from kfac_optim.blocks.clock import Clock
from kfac_optim.blocks.shadow import make_shadow
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.text import listed
from kfac_optim.utils.warning import warn

KEY = "kfac"
"""The key of a block's state in the optimizer's state of the block's first parameter."""

STEP_SIZE = "step_size"
"""The key of what the step size remembers in the state of every block, the same in all and on all processes."""

FORMAT = 1
"""The version of a block's state. Raise it with every change of the format, and keep reading older ones."""

States = dict[nn.Parameter, Mapping[str, Any]]
"""The states of blocks, by each block's first parameter."""


def dump(
    block: KFACBlock,
    tensors: Mapping[str, Any] | None,
    *,
    factors: bool = True,
    under_way: bool = True,
    spread: bool = False,
    momenta: int = 0,
    remembered: Tensor | None = None,
) -> dict[str, Any]:
    """Return the state of `block`. Texts are UTF-8 bytes, as tensors and numbers are all that a checkpoint may hold.

    Args:
        block: whose.
        tensors: its statistics and inverse, as `InverseState.tensors` gives them; None leaves them out.
        factors: whether they are wanted, if not of this process then of another.
        under_way: whether a refresh that is under way is waited for, and held beside them.
        spread: whether, where they are left out, another process has them.
        momenta: how many of its parameters have a momentum buffer.
        remembered: what the step size remembers, `[4]`; in every block, so that any part of a checkpoint has it.
    """
    state: dict[str, Any] = {
        "version": FORMAT,
        "name": _bytes(block.name),
        "params": _bytes("\n".join(block.spec.params)),  # which may be frozen where this is loaded
        "clock": dict(vars(block.clock)),
        "opposed": block.spec.opposed,
        "shared_input": block.spec.shared_input,
        "spread": spread,
        "factors": factors,
        "refreshing": False,
        "momenta": momenta,
        "follows_uses": block.follows_uses,
    }
    if remembered is not None:
        state[STEP_SIZE] = remembered
    if tensors is not None:
        state["inverse"] = tensors
        # One that fails says so when it is to be taken over.
        if under_way and block.under_way is not None and block.under_way.done.exception() is None:
            shadow = block.under_way.shadow
            state["refreshing"] = True
            state["under_way"] = {"clock": dict(vars(shadow.clock)), "inverse": shadow.state.tensors()}
    return state


def set_apart(states: MutableMapping[Any, Any]) -> None:
    """Copy, in the states that a checkpoint holds, the tensors of layers that were never measured.

    All other tensors are shared with the run, as with torch's optimizers. But a loop may go back to a state from before
    the first step, which has no tensors in torch's optimizers: here its clock would not fit averages of later steps.
    """
    for number, of_param in states.items():
        state = of_param.get(KEY, {}) if isinstance(of_param, dict) else {}  # users keep notes of their own there
        if "inverse" in state and state["clock"]["folds"] == 0:
            states[number] = {**of_param, KEY: {**state, "inverse": _copied(state["inverse"])}}


def _copied(held: Any) -> Any:
    if isinstance(held, Tensor):
        return held.clone()
    return {name: _copied(inside) for name, inside in held.items()} if isinstance(held, Mapping) else held


def dump_all(blocks: Sequence[KFACBlock]) -> States:
    """Return the states of blocks, all of which this process has."""
    return {block.params[0]: dump(block, block.state.tensors()) for block in blocks}


def remembered(states: States) -> Tensor | None:
    """Give what the step size of the optimizer that was saved remembered, `[4]`; None where nothing is said of it."""
    said = [state for state in states.values() if STEP_SIZE in state]
    if not said:
        return None
    # Of a layer that was frozen then, the checkpoint may have what is older.
    found: Tensor = max(said, key=lambda state: int(state["clock"]["step"]))[STEP_SIZE]
    return found.detach().clone()


def mark(name: str, reason: str) -> dict[str, Any]:
    """Return what replaces a block's state if the layer was left to SGD in mid-training."""
    return {"version": FORMAT, "name": _bytes(name), "left_out": _bytes(reason)}


def aged(state: Mapping[str, Any], steps: int) -> Mapping[str, Any]:
    """Give a block's state with the clock as it is `steps` later, where nothing else has happened to the block."""
    return {**state, "clock": {**state["clock"], "step": state["clock"]["step"] + steps}}


def due_if_not_read(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a block's state with a refresh due where one was under way that `torch.distributed.checkpoint` did not read.

    It reads what there is a place for, and a new optimizer has no refresh under way.
    """
    if state["refreshing"] and "under_way" not in state:
        return {**state, "clock": {**state["clock"], "outdated": True}}
    return state


def reason_of(mark: Mapping[str, Any]) -> str:
    return text_of(mark["left_out"])


def part(states: States) -> tuple[States, States]:
    """Return states of blocks, and the marks of layers that were left to SGD."""
    marks = {param: state for param, state in states.items() if "left_out" in state}
    return {param: state for param, state in states.items() if param not in marks}, marks


@torch.no_grad()
def restore(block: KFACBlock, state: Mapping[str, Any] | None, *, several: bool = False) -> None:
    """Copy into `block`; without factors its statistics start from zero at the next step, without a state all does.

    Args:
        block: the block to copy into.
        state: what `dump` gave.
        several: whether there are other processes.
    """
    if _opposed_by_modules(block):  # whose uses were joined if one pair of factors stands for both sides
        if state is None or state["opposed"]:
            block.joint = None
        else:
            block.join_uses()
    if state is None:
        block.spec = replace(block.spec, opposed=_opposed_by_modules(block))
        block.restart(step=0)
    elif "inverse" in state:
        block.revise(revised(block, state))
        if several:
            block.restart()  # for the place of what this process did not need
        block.load(Clock(**state["clock"]), state["inverse"])
        if "under_way" in state:
            block.under_way = _finished(block, state["under_way"])
    else:
        block.restart(step=state["clock"]["step"])


def missing(blocks: Sequence[KFACBlock], states: Sequence[Mapping[str, Any] | None]) -> dict[KFACBlock, Missing]:
    """Return the blocks that a checkpoint holds no statistics for."""
    found = {}
    for block, state in zip(blocks, states, strict=True):
        if state is None:
            found[block] = Missing(Clock(), elsewhere=False)
        elif "inverse" not in state:
            found[block] = Missing(Clock(**state["clock"]), elsewhere=state["spread"])
    return found


def warn_of_missed(names: Sequence[str]) -> None:
    if names:
        warn(
            f"kfac_optim: the checkpoint lacks what ranks other than the one that saved it had: the statistics of "
            f"{listed(names, 4)}, which start from zero, and under Sharded() their momentum. To save a whole one call "
            "optimizer.consolidate_state_dict() on all ranks before optimizer.state_dict()."
        )


def without_blocks(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the optimizer's state, of each parameter or its number, without that of blocks."""
    return {
        key: {name: value for name, value in state.items() if name != KEY} if isinstance(state, dict) else state
        for key, state in states.items()
    }


def layer_name(state: Mapping[str, Any]) -> str:
    return text_of(state["name"])


def member_names(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the names of the block's parameters within their module."""
    return tuple(text_of(state["params"]).split("\n"))


def text_of(value: object) -> str:
    """Read a text that is kept as the bytes of its UTF-8.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_meta or value.layout is not torch.strided:
        raise ValueError("not a tensor of bytes")
    codes = [] if value.is_complex() or value.is_quantized else value.tolist()
    if len(codes) != len(value) or not all(0 <= code <= 255 and code == int(code) for code in codes):
        raise ValueError("not bytes")
    return bytes(map(int, codes)).decode()


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _finished(block: KFACBlock, state: Mapping[str, Any]) -> RefreshUnderWay:
    """Return a refresh that was under way, to be taken over at the step at which it would have been."""
    shadow = make_shadow(block)
    shadow.load(Clock(**state["clock"]), state["inverse"])
    done: Future[None] = Future()
    done.set_result(None)
    return RefreshUnderWay(shadow, done)


def revised(block: KFACBlock, state: Mapping[str, Any]) -> LayerSpec:
    """Give the block's spec with what forwards had shown by the time of the checkpoint."""
    return replace(block.spec, opposed=state["opposed"], shared_input=state["shared_input"])


def _opposed_by_modules(block: KFACBlock) -> bool:
    """Return whether modules use the matrix from both sides, whatever functions do."""
    return any(use.opposed for use in block.uses)
