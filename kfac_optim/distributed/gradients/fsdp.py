"""Gradients that FSDP2 keeps in rows: to the owner of each matrix and back, in one bucket each way. Sends nothing.

A parameter `[d₀, …]` kept as `Shard(0)` has its rows cut as by `torch.chunk`: all ranks of the shard mesh hold
`⌈d₀ / P⌉` rows, but for the last ones, which hold fewer or none. Where mesh dimensions before that replicate, as HSDP
has them, each replica has all the rows, and owners of its own.

Each rank's rows are one parcel of a `ShareBucket`. Of `n` elements in even shards `n (P - 1) / P` travel each way, over
all ranks and whoever the owners are; the load is spread as evenly as what they own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket


class Rows(NamedTuple):
    """Says what one rank of the shard mesh holds of a parameter.

    Attributes:
        held: along the first dimension.
        elements: how many.
    """

    held: slice
    elements: int


class Owned(NamedTuple):
    """Names a parameter, and the rank of the shard mesh that gets its whole gradient.

    Attributes:
        name: fully qualified name.
        param: the parameter, sharded.
        owner: rank within the shard mesh.
    """

    name: str
    param: DTensor
    owner: int


def rows_of(param: DTensor, name: str = "a parameter") -> tuple[Rows, ...]:
    """Return what each rank of the shard mesh, in its order, holds of `param`.

    Args:
        param: of any shape with a dimension, `Shard(0)` over the last mesh dimension and replicated over all before.
        name: for messages.

    Raises:
        NotImplementedError: it is laid out in another way.
    """
    *before, last = param.placements
    # A subclass of Shard lays rows out otherwise: tensor parallelism with FSDP2 interleaves them.
    if type(last) is not Shard or last.dim != 0 or not all(isinstance(each, Replicate) for each in before):
        raise NotImplementedError(
            f"kfac_optim: {name!r} is laid out as {tuple(param.placements)} over a mesh of "
            f"{tuple(param.device_mesh.shape)} ranks; rows are exchanged of parameters that fully_shard keeps as "
            "Shard(0), perhaps replicated (HSDP). Leave its layer to SGD by skip_layers, or shard the model by "
            "fully_shard alone, without shard_placement_fn."
        )
    length, ranks = param.shape[0], int(param.device_mesh.shape[-1])
    row = param.numel() // length if length else 0
    most = -(-length // ranks)
    bounds = [(min(rank * most, length), min((rank + 1) * most, length)) for rank in range(ranks)]
    return tuple(Rows(slice(start, stop), (stop - start) * row) for start, stop in bounds)


def parcel_name(name: str, rank: int) -> str:
    """Name the rows that `rank` of the shard mesh holds of a parameter."""
    return f"{name}[{rank}]"


def to_owners(name: str, params: Sequence[Owned], world_size: int, payload: torch.dtype = torch.float32) -> ShareBucket:
    """Return the bucket that brings rows of gradients to the owners of the whole; empty shards send nothing.

    Args:
        name: of the bucket.
        params: with at least one element between them; names differ.
        world_size: ranks of the shard mesh.
        payload: dtype on the wire.

    Raises:
        NotImplementedError: see `rows_of`.
        ValueError: a parameter is sharded over another number of ranks; see also `ShareBucket`.
    """
    return ShareBucket(name, tuple(_parcels(params, world_size)), world_size, payload)


def from_owners(
    name: str, params: Sequence[Owned], world_size: int, payload: torch.dtype = torch.float32
) -> ShareBucket:
    """Return the bucket that brings rows of directions back from the owners of the whole."""
    back = [Parcel(each.name, each.elements, each.targets[0], (each.source,)) for each in _parcels(params, world_size)]
    return ShareBucket(name, tuple(back), world_size, payload)


def assemble(param: DTensor, name: str, pieces: Mapping[str, Tensor]) -> Tensor:
    """Put the whole gradient together, in the shape of `param`, from the parcels of a `to_owners` bucket, by name."""
    whole = [pieces[parcel_name(name, rank)] for rank, rows in enumerate(rows_of(param, name)) if rows.elements]
    if not whole:
        return param.to_local().new_zeros(param.shape)
    return torch.cat([piece.flatten() for piece in whole]).view(param.shape)


def cut(whole: Tensor, param: DTensor, name: str) -> dict[str, Tensor]:
    """Cut a direction, in the shape of `param`, into the parcels of a `from_owners` bucket, by name."""
    return {
        parcel_name(name, rank): whole[rows.held] for rank, rows in enumerate(rows_of(param, name)) if rows.elements
    }


def like(param: DTensor, part: Tensor) -> DTensor:
    """Lay this rank's part of a tensor out as `param` is; this communicates nothing.

    Args:
        param: the layout.
        part: of as many elements as `local(param)`, in any shape.
    """
    shape = param.to_local().shape
    result: DTensor = DTensor.from_local(
        part.reshape(shape),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return result


def _parcels(params: Sequence[Owned], world_size: int) -> list[Parcel]:
    parcels = []
    for name, param, owner in params:
        rows = rows_of(param, name)
        if len(rows) != world_size:
            raise ValueError(
                f"kfac_optim: {name!r} is sharded over {len(rows)} ranks, but rows are to be exchanged among "
                f"{world_size}. Parameters of one bucket are sharded over one mesh."
            )
        parcels += [
            Parcel(parcel_name(name, rank), held.elements, rank, (owner,))
            for rank, held in enumerate(rows)
            if held.elements
        ]
    return parcels
