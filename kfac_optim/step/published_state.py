"""The state of blocks and of the step size, put where `torch.optim` and `torch.distributed.checkpoint` look for it."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.state_keys import MOMENTUM
from kfac_optim.step.execution import Executor


def publish(
    state: MutableMapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    blocks: Sequence[KFACBlock],
    beside_blocks: checkpoint.States,
    executor: Executor,
    *,
    include_factors: bool,
    keeps_directions: bool,
    remembered: Tensor,
) -> None:
    """Put what a checkpoint holds into the state of the parameters, and remove what was put there before.

    Args:
        state: the optimizer's state, by parameter.
        groups: the param groups.
        blocks: the optimizer's blocks.
        beside_blocks: what checkpoints hold of parameters without a block.
        executor: knows the tensors of each block.
        include_factors: whether statistics and inverses are held.
        keeps_directions: whether the step size keeps the last direction of parameters without momentum.
        remembered: what the step size remembers, `[4]`.
    """
    for each in state.values():
        if isinstance(each, dict):
            each.pop(checkpoint.KEY, None)
    _drop_directions(state, groups)
    held = {block: executor.states.tensors(block) if include_factors else None for block in blocks}
    partial = executor.several and include_factors and None in held.values()
    if keeps_directions:
        _publish_directions(state, blocks, executor)
    for block, tensors in held.items():
        # Refreshes under way on several processes would be known to some of them only.
        state[block.params[0]][checkpoint.KEY] = checkpoint.dump(
            block,
            tensors,
            factors=include_factors,
            under_way=not executor.several,
            spread=partial and block.is_ready,
            momenta=sum(state.get(param, {}).get(MOMENTUM) is not None for param in block.params),
            remembered=remembered,
        )
    for param, beside in beside_blocks.items():
        # What waits for its layer has all that the blocks have, so that no state is older than another.
        waits = remembered is not None and "left_out" not in beside
        state[param][checkpoint.KEY] = {**beside, checkpoint.STEP_SIZE: remembered} if waits else beside


def withdraw(state: MutableMapping[Any, Any]) -> None:
    """Let go of what was put there for a checkpoint; the checkpoint itself keeps it."""
    for param, each in list(state.items()):
        if isinstance(each, dict) and checkpoint.KEY in each:
            state[param] = {name: value for name, value in each.items() if name != checkpoint.KEY}


def fill_up(states: MutableMapping[Any, Any], params: Sequence[nn.Parameter]) -> None:
    """Give trained parameters an empty state in a checkpoint: `torch.distributed.checkpoint` misses those without one.

    Args:
        states: what the checkpoint holds of parameters, by their numbers.
        params: all parameters of the param groups.
    """
    numbers = {param: number for number, param in enumerate(params)}  # as torch: one that is listed twice has the last
    for param, number in numbers.items() if states else ():
        if param.requires_grad:
            states.setdefault(number, {})


def _publish_directions(state: MutableMapping[Any, Any], blocks: Sequence[KFACBlock], executor: Executor) -> None:
    """Put zeros where directions will be kept, for `torch.distributed.checkpoint` to read into."""
    covered = {param: group for block in blocks for param, group in zip(block.params, block.groups, strict=True)}
    for param in executor.gradients.owned(list(covered)):
        if covered[param]["momentum"] == 0 and MOMENTUM not in state[param]:
            state[param][MOMENTUM] = torch.zeros_like(param)


def _drop_directions(state: MutableMapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Drop the last directions of parameters that were taken out of the groups: torch raises KeyError for their state.

    As with `torch.optim.SGD`, what has momentum is for the user to drop.
    """
    present = {param for group in groups for param in group["params"]}
    directions = set() if any(group["momentum"] for group in groups) else {MOMENTUM}
    for param, each in list(state.items()):
        if isinstance(param, Tensor) and param not in present and set(each) <= directions:
            del state[param]
