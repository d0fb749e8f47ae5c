"""These functions find the tensors in whatever structure, and the examples in the batch that a call was handed."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def examples_of(layer_input: Tensor, unbatched_ndim: int) -> int | None:
    """Return the batch that a layer was handed; None for a single example, which has `unbatched_ndim` dimensions."""
    return None if layer_input.dim() == unbatched_ndim else layer_input.size(0)


def first_tensor(*structures: Any, least_ndim: int = 1) -> Tensor | None:
    """Return the first tensor with a dimension: a scalar before it (a time, a temperature) is not the batch."""
    for leaf in tree_leaves(structures):
        if isinstance(leaf, Tensor):
            if leaf.dim() >= least_ndim:
                return leaf
        elif (inside := _inside(leaf)) and (found := first_tensor(inside, least_ndim=least_ndim)) is not None:
            return found
    return None


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure in their order, also those in what torch's pytrees do not look into."""
    for leaf in tree_leaves(structure):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from tensors_in(_inside(leaf))


def first_dimensions(structure: Any) -> tuple[int, ...]:
    """Return the first dimensions of the tensors of a structure in their order, but for empty ones and scalars."""
    return tuple(tensor.size(0) for tensor in tensors_in(structure) if tensor.dim() and tensor.size(0))


def _inside(leaf: object) -> list[Any]:
    """Return what a container holds that torch's pytrees do not look into."""
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name) for field in fields(leaf)]
    return []
