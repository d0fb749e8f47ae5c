"""The state of an optimizer that has not taken a step, for tools that read a checkpoint into it.

`torch.distributed.checkpoint` and torchtitan load into tensors that exist. They have a new optimizer make these by a
step without a forward, of gradients of zero at a rate of zero. It is no step of the training, so that nothing counts
it, and at the next step the optimizer is as new as before.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import says_something
from kfac_optim.blocks.state_keys import AVERAGED_STEPS, MOMENTUM, UPDATED
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.step import averaging
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Agreement, Executor
from kfac_optim.step.step_size import Proposal
from kfac_optim.utils.joined_tensors import Joins


def asks_for_state(groups: Sequence[Mapping[str, Any]], window: CaptureWindow) -> bool:
    """Return whether the first step of an optimizer is one that asks for the state alone."""
    gradients = [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return (
        bool(gradients)
        and not window.roots.entered
        and not any(group["lr"] for group in groups)
        and not any(map(says_something, gradients))
    )


def make_state(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Any, Any],
    blocks: Sequence[KFACBlock],
    agreement: Agreement,
    choices: Choices,
    executor: Executor,
    window: CaptureWindow,
    memory: Tensor,
) -> None:
    """Make what steps will keep of each parameter, as it is before the first: zeros, and averages of no step.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state, which is empty.
        blocks: the optimizer's blocks.
        agreement: what all ranks know.
        choices: the user's choices.
        executor: knows which parameters are updated here.
        window: the window, in which nothing was captured.
        memory: what the step size remembers, `[4]`.
    """
    count = window.close()
    if choices.step_size.directs_all:
        graded = [block for block in blocks if block in agreement.graded]
        choices.step_size.size(
            Proposal(groups, state, graded, (), (), (), (), None, count, executor, None, memory, Joins())
        )
    for group in groups:
        trained = executor.gradients.owned([param for param in group["params"] if param.grad is not None])
        if group["momentum"] != 0:
            for param in trained:
                state[param].setdefault(MOMENTUM, torch.zeros_like(param))
    for held in state.values():
        for name in held.keys() & set(UPDATED):
            held[name].zero_()
    executor.publish()
    if choices.average is not None:
        params = [param for group in groups for param in group["params"]]
        averaging.follow(choices.average, params, state, None)
        for held in state.values():
            if AVERAGED_STEPS in held:
                held[AVERAGED_STEPS] = 0
