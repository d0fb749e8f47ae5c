"""Whether several processes train together, as the user or the process group says."""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist

from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.utils.text import without_addresses
from kfac_optim.utils.validation import plain_number


def chosen_config(distributed: object, *, sharded: bool) -> DistributedConfig | None:
    """Return how the processes train together; None if this one trains alone.

    Args:
        distributed: the argument of `KFACOptimizer`.
        sharded: whether parameters are, by FSDP2, which a single rank may do as well.

    Raises:
        TypeError: the argument is of another type.
        RuntimeError: a `DistributedConfig` without a process group, or of a group that this process is not in.
    """
    if distributed is not None and distributed is not False and not isinstance(distributed, DistributedConfig):
        raise TypeError(
            f"kfac_optim: distributed must be None, False or a DistributedConfig(...), got {distributed!r}."
        )
    running = dist.is_available() and dist.is_initialized()
    if isinstance(distributed, DistributedConfig) and not running:
        raise RuntimeError(
            "kfac_optim: a DistributedConfig was passed, but there is no process group. Call "
            "torch.distributed.init_process_group(), or kfac_optim.distributed.initialize(), before the optimizer "
            "is built."
        )
    if distributed is False or not running:
        return None
    config = distributed if isinstance(distributed, DistributedConfig) else DistributedConfig()
    ranks = dist.get_world_size(config.group)
    if ranks < 1:  # torch's way to say that this process is not one of them
        raise RuntimeError(
            f"kfac_optim: rank {dist.get_rank()} is not in the group of its DistributedConfig. Pass it the group that "
            "it is in; or distributed=False, where it trains a model of its own."
        )
    return config if sharded or ranks > 1 or config.workers is not None else None


def described(choices: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of an optimizer by name, in words that are the same wherever the arguments are."""
    return {
        f"argument {name}": without_addresses(repr(plain(value)))
        for name, value in choices.items()
        if name != "distributed"  # agreed upon with the plan
    }


def plain(value: Any) -> Any:
    """Return a number as Python has it, a whole one as an int; of a choice or a collection all its numbers alike.

    Ranks compare choices by their words: numpy's 1.0, Python's 1.0 and 1 are then the same.
    """
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for each in fields(value):
            if each.repr:
                object.__setattr__(made, each.name, plain(getattr(value, each.name)))
        return made
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    number = plain_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number
