"""Which layers of a model that is kept in parts can be trained: those in rows, as FSDP2 keeps them on all ranks."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.selection import holders
from kfac_optim.distributed.communication.process_groups import world
from kfac_optim.distributed.gradients.grid import Grid, grid_of
from kfac_optim.utils.sharded_params import Shards, is_part, is_sharded
from kfac_optim.utils.text import listed


def check_sharding(
    blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], shards: Shards, group: dist.ProcessGroup
) -> None:
    """Refuse covered layers whose parameters are kept in parts, but not in rows on the ranks that train together.

    Args:
        blocks: all there are.
        params: the parameters of the optimizer.
        shards: what FSDP2 keeps of the model.
        group: the group of the ranks that train together.

    Raises:
        NotImplementedError: there are such layers; all of them are named, with all that is to be done about it. Or
            shards are kept on the host, and what is gathered is not.
    """
    for block in blocks:
        if any(known is not None and known.is_offloaded for known in map(shards.of, block.params)):
            raise NotImplementedError(
                f"kfac_optim: fully_shard keeps the shards of {block.name!r} on the host (CPUOffloadPolicy), away from "
                "where the layer runs. Leave offload_policy out."
            )
    in_parts = [block for block in blocks if any(map(is_part, block.params))]
    known = [block for block in in_parts if _are_rows(block, shards) or _is_parallel(block, shards)]
    ranks = dist.get_process_group_ranks(group)
    grid = grid_of(params, ranks)
    advice = ""
    if apart := [block for block in known if not _lies_on(grid, block)]:
        mesh = _one(apart[0]).device_mesh
        several = f"dist.new_group({sorted(mesh.mesh.flatten().tolist())})"
        advice = (
            f" Ranks {ranks} are to train together, but {_names(apart)} lie in shards on ranks "
            f"{mesh.mesh.flatten().tolist()}. Have these train together: "
            + (
                "leave group of DistributedConfig out, or pass group=mesh.get_group(), with the mesh that fully_shard "
                "or parallelize_module was given."
                if mesh.ndim == 1
                else f"shard all layers over this mesh, and pass DistributedConfig(group={several})."
            )
        )
    if others := [block for block in in_parts if block not in known]:
        raise NotImplementedError(
            f"kfac_optim: the parameters of {_names(others)} are laid out over ranks as tensor parallelism has them"
            f"{_first_layout(others)}. K-FAC needs them whole, in rows, as fully_shard keeps them without "
            "shard_placement_fn, or of an nn.Linear in even shards over one mesh dimension, as ColwiseParallel and "
            f"RowwiseParallel have them. Leave these layers to SGD: skip_layers={_patterns(others)}.{advice}"
        )
    if apart:
        raise NotImplementedError(f"kfac_optim:{advice}")
    in_rows = [block for block in in_parts if any(shards.of(param) is not None for param in block.params)]
    whole = [block for block in blocks if block not in in_parts]
    if in_rows and whole:
        raise NotImplementedError(
            f"kfac_optim: the parameters of {_names(whole)} are not sharded, while those of other layers are. Wrap "
            f"these modules by fully_shard too, or leave them to SGD: skip_layers={_patterns(whole)}."
        )


def share_of_mean(blocks: Sequence[KFACBlock], shards: Shards) -> float:
    """Return a rank's own loss as a share of the loss whose mean over ranks has the gradients that FSDP2 leaves.

    It is 1 where FSDP2 takes the mean of gradients, and one over the number of ranks where it adds them.

    Args:
        blocks: all there are.
        shards: what FSDP2 keeps of the model.

    Raises:
        RuntimeError: gradients of some layers are divided by another number than those of others.
    """
    if shards.divide_by_ranks():
        return 1.0
    found: dict[float, tuple[KFACBlock, float]] = {}
    for block in blocks:
        for known in map(shards.of, block.params):
            if known is not None:
                found.setdefault(known.divisor / known.ranks, (block, known.divisor))
    if len(found) > 1:
        (one, by), (other, by_other), *_ = found.values()
        raise RuntimeError(
            f"kfac_optim: fully_shard divides the gradients of {one.name!r} by {by:g} and those of {other.name!r} by "
            f"{by_other:g}, so that they are of different losses. Call set_gradient_divide_factor with one number on "
            "all modules that fully_shard has wrapped."
        )
    return next(iter(found), 1.0)


def group_of_rows(params: Iterable[nn.Parameter], shards: Shards) -> dist.ProcessGroup | None:
    """Return the group over which FSDP2 keeps these parameters; None if it has none of them.

    Where some lie on a mesh of several dimensions, as under HSDP and tensor parallelism, that is all of it: the group
    of all processes, where it has all of them.

    Args:
        params: the parameters to look at.
        shards: what FSDP2 keeps of the model.
    """
    meshes = [param.device_mesh for param in params if shards.of(param) is not None and isinstance(param, DTensor)]
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.ndim)
    if largest.ndim == 1:
        return largest.get_group()
    return world() if largest.size() == dist.get_world_size() else None


def ranks_alike(model: nn.Module) -> list[int]:
    """Return the ranks that see the same examples as this one, itself among them.

    They are those of the mesh over which tensor parallelism has cut a linear layer or an embedding, which have a weight
    of two dimensions. Other parameters may lie in parts on ranks with other examples, as those of experts do.

    Args:
        model: a model whose modules may be wrapped by `fully_shard`.

    Returns:
        Their numbers among all processes, in order; none where no layer is cut.
    """
    shards = Shards(model)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            continue
        sharded, param = shards.of(weight), shards.known(weight)
        if not isinstance(param, DTensor) or not isinstance(param.placements[-1], Shard):
            continue
        if param.device_mesh.ndim == 1 if sharded is None else sharded.was_in_parts:
            return sorted(dist.get_process_group_ranks(param.device_mesh.get_group(param.device_mesh.ndim - 1)))
    return []


def _are_rows(block: KFACBlock, shards: Shards) -> bool:
    """Return whether FSDP2 keeps rows over one mesh dimension, perhaps copied over those before."""
    return all(shards.of(param) is not None and _is_rows(cast(DTensor, param)) for param in block.params)


def _is_rows(param: DTensor) -> bool:
    *before, last = param.placements
    # A subclass of Shard lays rows out otherwise: tensor parallelism with FSDP2 interleaves them.
    return type(last) is Shard and last.dim == 0 and all(isinstance(each, Replicate) for each in before)


def _is_parallel(block: KFACBlock, shards: Shards) -> bool:
    """Return whether tensor parallelism has cut one linear layer evenly, perhaps with fully_shard around it."""
    if len(block.uses) > 1 or not block.adapter.may_be_cut or block.adapter.adds_bias_itself(block.uses[0].module):
        return False  # elsewhere it is not known how the sides are cut
    if not all(isinstance(param, DTensor) for param in block.params):
        return False
    weight = cast(DTensor, block.params[0])
    mesh, placement = weight.device_mesh, weight.placements[-1]
    if mesh.ndim > 1 and shards.of(block.params[0]) is None:
        return False
    return placement in (Shard(0), Shard(1)) and weight.shape[placement.dim] % mesh.size(mesh.ndim - 1) == 0


def _lies_on(grid: Grid, block: KFACBlock) -> bool:
    return all(grid.has(param) for param in block.params)


def _one(block: KFACBlock) -> DTensor:
    """Return the first parameter of the block that is in parts."""
    return cast(DTensor, next(param for param in block.params if is_sharded(param)))


def _first_layout(blocks: Sequence[KFACBlock]) -> str:
    """Describe how the first parameter in parts is laid out, as far as that is known."""
    for param in blocks[0].params:
        if isinstance(param, DTensor):
            return f", the first as {tuple(param.placements)} over the mesh {param.device_mesh.mesh.tolist()}"
    return ""


def _names(blocks: Sequence[KFACBlock]) -> str:
    return listed([block.name for block in blocks])


def _patterns(blocks: Sequence[KFACBlock]) -> list[str]:
    return holders(name for block in blocks for name in block.param_names)
