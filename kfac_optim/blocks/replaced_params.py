"""Refuse parameters that FSDP2 has replaced by others."""

from collections.abc import Iterable

from torch import nn

from kfac_optim.blocks.building import Coverage
from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.utils.sharded_params import is_sharded, refuse_flat


def refuse_stand_ins(names: ModuleNames, params: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if the optimizer was handed what FSDP2 has gathered for a forward.

    Args:
        names: the names of the model's parameters.
        params: those of the optimizer.
    """
    held = names.parameters()
    for param in params:
        if names.shards.is_stand_in(param):
            raise RuntimeError(
                f"kfac_optim: {held[names.shards.known(param)]!r} is kept in shards, but what was handed over is that "
                "parameter as FSDP2 has gathered it for a forward. Call reshard() on the modules that fully_shard "
                "wrapped before their parameters are handed to the optimizer."
            )


def refuse_replaced(model: nn.Module | None, params: Iterable[nn.Parameter], coverage: Coverage) -> None:
    """Raise if the model was sharded since the optimizer was built.

    Args:
        model: the model; None if it is not known yet.
        params: those of the optimizer.
        coverage: the blocks that the optimizer has built.

    Raises:
        RuntimeError: the model has sharded parameters now that are not the optimizer's.
        NotImplementedError: FSDP1 keeps the parameters (see `refuse_flat`).
    """
    if model is None:
        return
    held = ModuleNames(model).parameters()
    refuse_flat(params, held)
    if not any(map(is_sharded, held)):
        return
    was_held = {
        param: name for block in coverage.blocks for param, name in zip(block.params, block.param_names, strict=True)
    }
    for param in (*was_held, *coverage.uncovered):
        if param not in held:
            raise RuntimeError(
                f"kfac_optim: the optimizer was built before fully_shard replaced "
                f"{was_held.get(param, list(param.shape))!r} by another parameter, and would go on without it. Build "
                "the optimizer after fully_shard."
            )
