"""Whether several processes train together, as the user or the process group says."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.utils.text import without_addresses


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
        f"argument {name}": without_addresses(repr(value))
        for name, value in choices.items()
        if name != "distributed"  # agreed upon with the plan
    }
