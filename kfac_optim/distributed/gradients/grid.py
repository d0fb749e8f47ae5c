"""Which ranks hold which part of a parameter: the mesh of the ranks that train together, and boxes of tensors on it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_Box = tuple[slice, ...]


class Part(NamedTuple):
    """Says which ranks hold one part of a tensor.

    Attributes:
        box: the part, along each dimension.
        elements: how many; at least one.
        holders: ranks, ascending, each of which holds all of it and nothing else of the tensor.
    """

    box: _Box
    elements: int
    holders: tuple[int, ...]

    def copy_near(self, rank: int, ranks: int) -> int:
        """Return the holder of which a rank gets the part: itself if it is one, else that of its own neighbourhood."""
        return rank if rank in self.holders else self.holders[rank * len(self.holders) // ranks]


@dataclass(frozen=True, eq=False)
class Grid:
    """Lays the ranks that train together out as a mesh, on whose dimensions tensors are cut or copied.

    Attributes:
        ranks: their numbers within the group, each once, `[d₀, …]`.
        world: their numbers among all processes, in the same places.
    """

    ranks: Tensor
    world: Tensor
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)  # what was found before, by the layout

    @property
    def count(self) -> int:
        return self.ranks.numel()

    def placements(self, tensor: Tensor) -> tuple[Placement, ...] | None:
        """Return how a tensor lies along each dimension of the grid; None where it lies on no dimensions of it.

        A plain tensor is taken to be the same on all ranks.
        """
        if not isinstance(tensor, DTensor):
            return (Replicate(),) * self.ranks.ndim
        key = tensor.device_mesh, tensor.placements
        if key not in self._known:
            self._known[key] = self._placements(tensor)
        found: tuple[Placement, ...] | None = self._known[key]
        return found

    def _placements(self, tensor: DTensor) -> tuple[Placement, ...] | None:
        found: list[Placement] = [Replicate()] * self.ranks.ndim
        mesh = tensor.device_mesh.mesh.cpu()
        for dims in permutations(range(self.ranks.ndim), mesh.ndim):
            rest = [dim for dim in range(self.ranks.ndim) if dim not in dims]
            slices = self.world.permute(*rest, *dims).reshape(-1, *(self.world.shape[dim] for dim in dims))
            if any(torch.equal(each, mesh) for each in slices):
                for dim, placement in zip(dims, tensor.placements, strict=True):
                    found[dim] = placement
                return tuple(found)
        return None

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in boxes on this grid."""
        placements = self.placements(tensor)
        return placements is not None and _order(placements, self.ranks.shape) is not None

    def parts(self, tensor: Tensor, name: str = "a parameter") -> tuple[Part, ...]:
        """Return all parts of a tensor, in the order of their first holders; those without elements are left out.

        Args:
            tensor: a parameter or a gradient.
            name: a name for messages.

        Raises:
            NotImplementedError: it does not lie in boxes on this grid.
        """
        placements = self.placements(tensor)
        if placements is None or (order := _order(placements, self.ranks.shape)) is None:
            layout = f"{tuple(tensor.placements)} over {tensor.device_mesh}" if isinstance(tensor, DTensor) else "whole"
            raise NotImplementedError(
                f"kfac_optim: {name!r} is laid out as {layout}, and not in boxes over the mesh "
                f"{self.world.tolist()} of the ranks that train together. Leave its layer to SGD by skip_layers."
            )
        if (key := (tensor.shape, placements)) in self._known:
            known: tuple[Part, ...] = self._known[key]
            return known
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for where in product(*map(range, self.ranks.shape)):
            bounds = [(0, length) for length in tensor.shape]
            for dim in order:
                if (cut := _cut(placements[dim])) is not None:
                    bounds[cut] = _chunk(*bounds[cut], where[dim], self.ranks.shape[dim])
            holders.setdefault(tuple(bounds), []).append(int(self.ranks[where]))
        found = []
        for limits, at in holders.items():
            if elements := prod(stop - start for start, stop in limits):
                found.append(Part(tuple(slice(*each) for each in limits), elements, tuple(sorted(at))))
        self._known[key] = parts = tuple(sorted(found, key=lambda part: part.holders))
        return parts

    def counts(self, tensor: Tensor, rank: int) -> bool:
        """Return whether a rank is the first of those that hold its part of a tensor: sums take it from that one."""
        placements = self.placements(tensor)
        assert placements is not None, "it is not on this grid"
        copied = [dim for dim, placement in enumerate(placements) if _cut(placement) is None]
        (where,) = (self.ranks == rank).nonzero().tolist()
        first: list[int | slice] = [slice(None) if dim in copied else place for dim, place in enumerate(where)]
        return int(self.ranks[tuple(first)].min()) == rank


def grid_of(tensors: Iterable[Tensor], group: Sequence[int]) -> Grid:
    """Return the mesh of most dimensions on which any of these tensors lies and which has all ranks of a group.

    Args:
        tensors: all parameters.
        group: ranks that train together, by their numbers among all processes. It is the mesh where no tensor has one.
    """
    world = torch.tensor(group, device="cpu")
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh.mesh.cpu()
            if mesh.ndim > world.ndim or (mesh.ndim == 1 and world.ndim == 1):
                world = mesh if sorted(mesh.flatten().tolist()) == sorted(group) else world
    number = {rank: index for index, rank in enumerate(group)}
    numbers = torch.tensor([number[rank] for rank in world.flatten().tolist()], device="cpu")
    return Grid(numbers.view(world.shape), world)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh that a tensor lies on; None for a plain one."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _cut(placement: Placement) -> int | None:
    """Return the dimension that a placement cuts; None if it copies."""
    cut: int | None = getattr(placement, "dim", None)
    return cut


def _order(placements: Sequence[Placement], sizes: Sequence[int]) -> list[int] | None:
    """Return the dimensions of a mesh in the order in which they cut a tensor; None where it is not cut into boxes."""
    late = []
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate) or type(placement) is Shard:
            continue
        # Cuts after the mesh dimensions that come later, as fully_shard does after tensor parallelism.
        cut = _cut(placement)
        later = [d for d in range(dim + 1, len(sizes)) if _cut(placements[d]) == cut]
        if cut is None or getattr(placement, "split_factor", None) != prod(sizes[d] for d in later):
            return None
        late.append(dim)
    return None if len(late) > 1 else [dim for dim in range(len(sizes)) if dim not in late] + late


def _chunk(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of `count` pieces, as `torch.chunk` cuts them."""
    most = -(-(stop - start) // count)
    return min(start + index * most, stop), min(start + (index + 1) * most, stop)
