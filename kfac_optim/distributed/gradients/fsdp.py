"""Gradients that ranks keep in parts: to the owner of each matrix and back, in one bucket each way. Sends nothing.

A part is what FSDP2 keeps of a parameter `[d₀, …]` on one rank, rows cut as by `torch.chunk`; or a box of it, where
tensor parallelism has cut it too. Several ranks may hold the same part, as under HSDP: one of them sends it to the
owner, and all of them get its direction back, bit for bit the same.

Each part is one parcel of a `ShareBucket`. Of `n` elements in even parts without copies `n (P - 1) / P` travel each
way, over all ranks and whoever the owners are; the load is spread as evenly as what they own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket
from kfac_optim.distributed.gradients.grid import Grid, Part
from kfac_optim.utils.sharded_params import local


class Owned(NamedTuple):
    """Names a parameter, and the rank that gets its whole gradient.

    Attributes:
        name: fully qualified name.
        param: the parameter; a plain tensor is the same on all ranks.
        owner: rank within the grid.
    """

    name: str
    param: Tensor
    owner: int


def parcel_name(name: str, part: Part) -> str:
    """Name a part of a parameter."""
    return f"{name}[{part.holders[0]}]"


def held_by(rank: int, param: Tensor, name: str, grid: Grid) -> Part | None:
    """Return the part of a parameter that a rank holds; None where it holds nothing."""
    return next((part for part in grid.parts(param, name) if rank in part.holders), None)


def to_owners(name: str, params: Sequence[Owned], grid: Grid, payload: torch.dtype = torch.float32) -> ShareBucket:
    """Return the bucket that brings parts of gradients to the owners of the whole; empty parts send nothing.

    Args:
        name: the name of the bucket.
        params: parameters with at least one element between them; names differ.
        grid: the ranks.
        payload: dtype on the wire.

    Raises:
        NotImplementedError: see `Grid.parts`.
        ValueError: see `ShareBucket`.
    """
    parcels = [
        Parcel(parcel_name(of, part), part.elements, part.copy_near(owner, grid.count), (owner,))
        for of, param, owner in params
        for part in grid.parts(param, of)
    ]
    return ShareBucket(name, tuple(parcels), grid.count, payload)


def from_owners(name: str, params: Sequence[Owned], grid: Grid, payload: torch.dtype = torch.float32) -> ShareBucket:
    """Return the bucket that brings parts of directions from the owners of the whole to all ranks that hold them."""
    parcels = [
        Parcel(parcel_name(of, part), part.elements, owner, part.holders)
        for of, param, owner in params
        for part in grid.parts(param, of)
    ]
    return ShareBucket(name, tuple(parcels), grid.count, payload)


def assemble(param: Tensor, name: str, pieces: Mapping[str, Tensor], grid: Grid) -> Tensor:
    """Put the whole gradient together, in the shape of `param`, from the parcels of a `to_owners` bucket, by name."""
    parts = [(part, pieces[parcel_name(name, part)]) for part in grid.parts(param, name)]
    if not parts:
        return local(param).detach().new_zeros(param.shape)
    whole = parts[0][1].new_empty(param.shape)
    for part, piece in parts:
        box = whole[part.box]
        box.copy_(piece.view(box.shape))
    return whole


def cut(whole: Tensor, param: Tensor, name: str, grid: Grid) -> dict[str, Tensor]:
    """Cut a direction, in the shape of `param`, into the parcels of a `from_owners` bucket, by name."""
    return {parcel_name(name, part): whole[part.box] for part in grid.parts(param, name)}
