"""Block state in and out of `Optimizer.state_dict()`: tensors and numbers only, and refused when it does not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kfac_optim.blocks import Clock, KFACBlock

KEY = "kfac"
"""Where a block's state stands in the optimizer's state of the block's first parameter."""


def dump(block: KFACBlock, *, include_factors: bool) -> dict[str, Any]:
    """The state of `block`. Its name is kept as UTF-8 bytes, so that a checkpoint can name its layers."""
    state: dict[str, Any] = {
        "name": torch.tensor(list(block.name.encode()), dtype=torch.uint8),
        "clock": asdict(block.clock),
    }
    if include_factors:
        state["inverse"] = block.inverse.tensors(block.state)
    return state


def restore(block: KFACBlock, state: Mapping[str, Any]) -> None:
    """Copy into `block`; without factors its statistics start anew at the next step."""
    if "inverse" in state:
        block.clock = Clock(**state["clock"])
        block.inverse.load(block.state, state["inverse"])
    else:
        block.clock.step = state["clock"]["step"]
        block.restart()


def check(blocks: Sequence[KFACBlock], states: Sequence[Mapping[str, Any] | None], strays: Sequence[str]) -> None:
    """Raise ValueError, naming layers, unless the states fit the blocks.

    Args:
        blocks: of this optimizer.
        states: what the checkpoint holds for each, None where it holds nothing.
        strays: names of layers in the checkpoint that belong to no block.
    """
    problems = [f"it has statistics for {name!r}, which is not preconditioned here" for name in strays]
    for block, state in zip(blocks, states, strict=True):
        if state is None:
            problems.append(f"it has none for {block.name!r}")
        elif layer_name(state) != block.name:
            problems.append(f"it has {layer_name(state)!r} in the place of {block.name!r}")
        elif "inverse" in state:
            ours, theirs = _shapes(block.inverse.tensors(block.state)), _shapes(state["inverse"])
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


def layer_name(state: Mapping[str, Any]) -> str:
    return bytes(state["name"].to(torch.uint8).tolist()).decode()


def _shapes(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            shapes[prefix + key] = list(value.shape)
        else:
            shapes |= _shapes(value, f"{prefix}{key}.")
    return shapes
