"""Block state in and out of `Optimizer.state_dict()`: tensors and numbers only, and refused when it does not fit."""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks import Clock, KFACBlock, Missing, RefreshUnderWay
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.specs import LayerSpec

KEY = "kfac"
"""Where a block's state stands in the optimizer's state of the block's first parameter."""

STEP_SIZE = "step_size"
"""Where what the step size remembers stands in the state of every block, the same in all and on all processes."""

States = dict[nn.Parameter, Mapping[str, Any]]
"""What stands there, by that parameter."""


def dump(
    block: KFACBlock, tensors: Mapping[str, Any] | None, *, under_way: bool = True, spread: bool = False
) -> dict[str, Any]:
    """The state of `block`. The name is UTF-8 bytes, to name layers by.

    Args:
        block: whose.
        tensors: its statistics and inverse, as `Inverse.tensors` gives them; None leaves them out.
        under_way: whether a refresh that is under way is waited for, and held beside them.
        spread: whether, where they are left out, another process has them.
    """
    state: dict[str, Any] = {
        "name": _bytes(block.name),
        "clock": asdict(block.clock),
        "opposed": block.spec.opposed,
        "shared_input": block.spec.shared_input,
        "spread": spread,  # the same on all ranks, as whatever stands under one key in a distributed checkpoint
    }
    if tensors is not None:
        state["inverse"] = tensors
        # One that fails says so when it is to be taken over.
        if under_way and block.under_way is not None and block.under_way.done.exception() is None:
            shadow = block.under_way.shadow
            state["under_way"] = {"clock": asdict(shadow.clock), "inverse": shadow.inverse.tensors(shadow.state)}
    return state


def remembered(states: States) -> Tensor | None:
    """What the step size of the optimizer that was saved remembered, `[4]`; None where nothing is said of it.

    Raises:
        ValueError: it is something else.
    """
    said = [state for state in states.values() if STEP_SIZE in state]
    if not said:
        return None
    # Of a layer that was frozen then, the checkpoint may have what is older.
    found = max(said, key=lambda state: int(state["clock"]["step"]))[STEP_SIZE]
    if not (isinstance(found, Tensor) and found.shape == (4,) and found.is_floating_point()):
        shown = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(
            f"kfac_optim: what the step size remembers must be four floating numbers, and is {shown} in the "
            "checkpoint; nothing has been changed."
        )
    if not found.is_meta and not bool(found.isfinite().all()):
        raise ValueError(
            f"kfac_optim: what the step size remembers must be finite numbers, and is {found.tolist()} in the "
            "checkpoint; nothing has been changed."
        )
    return found.detach().clone()


def mark(name: str, reason: str) -> dict[str, Any]:
    """What stands in the place of a block's state where the layer was left to SGD in mid-training."""
    return {"name": _bytes(name), "left_out": _bytes(reason)}


def reason_of(mark: Mapping[str, Any]) -> str:
    return _text(mark["left_out"])


def part(states: States) -> tuple[States, States]:
    """States of blocks, and the marks of layers that were left to SGD."""
    marks = {param: state for param, state in states.items() if "left_out" in state}
    return {param: state for param, state in states.items() if param not in marks}, marks


def restore(block: KFACBlock, state: Mapping[str, Any] | None, *, several: bool = False) -> None:
    """Copy into `block`; without factors its statistics start anew at the next step, without a state all does.

    Args:
        block: to copy into.
        state: what `dump` gave.
        several: whether there are other processes.
    """
    if state is None:
        block.clock = Clock()
        block.spec = replace(block.spec, opposed=_opposed_by_modules(block))
        block.restart()
    elif "inverse" in state:
        block.revise(_spec(block, state))
        if several:
            block.restart()  # for the place of what this process did not need
        block.clock = Clock(**state["clock"])
        block.follow()
        block.discard()
        block.inverse.load(block.state, state["inverse"])
        block.under_way = None
        if "under_way" in state:
            block.under_way = _finished(block, state["under_way"])
    else:
        block.clock.step = state["clock"]["step"]
        block.restart()


def check(
    blocks: Sequence[KFACBlock],
    states: Sequence[Mapping[str, Any] | None],
    strays: Sequence[str],
    *,
    any_prefix: bool = False,
) -> None:
    """Raise ValueError, naming layers, unless the states fit the blocks.

    Args:
        blocks: of this optimizer.
        states: what the checkpoint holds for each, None where it holds nothing.
        strays: names of layers in the checkpoint that belong to no block.
        any_prefix: whether names may differ by a prefix, as when the model was found inside another module.
    """
    problems = [f"it has statistics for {name!r}, which is not preconditioned here" for name in strays]
    for block, state in zip(blocks, states, strict=True):
        if state is None:
            # Saved before the first forward it has none of what only a forward shows.
            if not isinstance(block.adapter, ProductAdapter):
                problems.append(f"it has none for {block.name!r}")
        elif not _same_name(layer_name(state), block.name, any_prefix):
            problems.append(f"it has {layer_name(state)!r} in the place of {block.name!r}")
        elif "inverse" in state:
            tensors = _tensors_like(block, state)
            ours, theirs = _shapes(tensors), _shapes(state["inverse"])
            if "under_way" in state:
                ours |= _shapes(tensors, "under_way.")
                theirs |= _shapes(state["under_way"]["inverse"], "under_way.")
            for key in sorted(ours.keys() | theirs.keys()):
                if ours.get(key) != theirs.get(key):
                    problems.append(
                        f"{key} of {block.name!r} is {theirs.get(key, 'missing')}, here {ours.get(key, 'unused')}"
                    )
    if problems:
        shown = "; ".join(problems[:8]) + (f"; … ({len(problems)} in all)" if len(problems) > 8 else "")
        raise ValueError(
            f"kfac_optim: the checkpoint belongs to other layers or other options: {shown}. Build the optimizer as "
            "it was when the checkpoint was saved; nothing has been changed."
        )


def missing(blocks: Sequence[KFACBlock], states: Sequence[Mapping[str, Any] | None]) -> dict[KFACBlock, Missing]:
    """The blocks that a checkpoint holds no statistics for."""
    found = {}
    for block, state in zip(blocks, states, strict=True):
        if state is None:
            found[block] = Missing(Clock(), elsewhere=False)
        elif "inverse" not in state:
            found[block] = Missing(Clock(**state["clock"]), elsewhere=bool(state.get("spread", False)))
    return found


def warn_of_missed(names: Sequence[str], stacklevel: int) -> None:
    if names:
        shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        warnings.warn(
            f"kfac_optim: the checkpoint lacks what other ranks than the one that saved it had: the statistics of "
            f"{shown}, which start anew, and under Sharded() their momentum. To save a whole one call "
            "optimizer.consolidate_state_dict() on all ranks before optimizer.state_dict().",
            stacklevel=stacklevel + 1,
        )


def without_blocks(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The optimizer's state, of each parameter or its number, without that of blocks."""
    return {
        key: {name: value for name, value in state.items() if name != KEY} if isinstance(state, dict) else state
        for key, state in states.items()
    }


def layer_name(state: Mapping[str, Any]) -> str:
    return _text(state["name"])


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text(tensor: Tensor) -> str:
    return bytes(tensor.to(torch.uint8).tolist()).decode()


def _finished(block: KFACBlock, state: Mapping[str, Any]) -> RefreshUnderWay:
    """What was under way, to be taken over when it would have been."""
    shadow = block.shadow()
    shadow.clock = Clock(**state["clock"])
    shadow.inverse.load(shadow.state, state["inverse"])
    done: Future[None] = Future()
    done.set_result(None)
    return RefreshUnderWay(shadow, done)


def _same_name(one: str, other: str, any_prefix: bool) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (any_prefix and (not short or long.endswith(f".{short}")))


def _spec(block: KFACBlock, state: Mapping[str, Any]) -> LayerSpec:
    """The block's, with what forwards had shown by the time of the checkpoint."""
    return replace(
        block.spec,
        opposed=_opposed_by_modules(block) or bool(state.get("opposed", False)),
        shared_input=bool(state.get("shared_input", block.spec.shared_input)),
    )


def _opposed_by_modules(block: KFACBlock) -> bool:
    """Whether modules use the matrix from both sides, whatever functions do."""
    return any(use.opposed for use in block.uses)


def _tensors_like(block: KFACBlock, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block's tensors; where the checkpoint would revise it, the like of what it will have."""
    spec = _spec(block, state)
    if spec == block.spec:
        return block.inverse.tensors(block.state)
    return block.inverse.tensors(block.inverse.init(spec.by_blocks(), dtype=block.dtype, device=torch.device("meta")))


def _shapes(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            shapes[prefix + key] = list(value.shape)
        else:
            shapes |= _shapes(value, f"{prefix}{key}.")
    return shapes
