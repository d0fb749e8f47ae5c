"""Products with matrices that lie in a parameter of any shape, each described as a contraction.

The experts of a mixture are one parameter `[experts, in, out]`, whose matrices are used one by one (`x @ w[i]`), all at
once (`torch.bmm`), by a gather (`w[ids]`) or by offsets (`torch._grouped_mm`). Each of these is a contraction, and is
described as `torch.einsum` would have it: a label in input, weight and output numbers groups, one in input and weight
alone is summed over, one in weight and output alone numbers outputs, and the rest are rows. A parameter that is added
to rows is the matrix of a layer whose one input is 1.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.utils.autograd import below_transforms, gathered_from, in_function_transform

Label = Hashable
Sides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The dimensions of a parameter that number its groups, outputs and inputs."""


class TensorProduct(NamedTuple):
    """Describes rows that were multiplied by matrices of a parameter.

    Attributes:
        weight: the parameter.
        shape: its shape as the function saw it, without dimensions of size one.
        sides: which dimensions of `shape` number groups, outputs and inputs.
        input: what was multiplied.
        input_order: what `input` is permuted by, to be `[*groups, *rows, *inputs]`, where it may have no groups.
        input_shape: `(groups or 1, batch, shared, in)`.
        order: what the output is permuted by, to be `[*groups, *rows, *outputs]`.
        first: number of the first group that was used.
        used: how many were used, one after the other.
        ids: the group of each of the batch, `[batch]`; None where all rows are for all groups that were used.
        added: what was added to rows, where that is what the function did.
        by_row: whether each row is of an example of its own, also where they share an entry of `ids`: these number
            positions, and not examples.
    """

    weight: nn.Parameter
    shape: tuple[int, ...]
    sides: Sides
    input: Tensor
    input_order: tuple[int, ...]
    input_shape: tuple[int, int, int, int]
    order: tuple[int, ...]
    first: int
    used: int
    ids: Tensor | None
    added: Tensor | None = None
    by_row: bool = False

    def context(self) -> tuple[int, ...]:
        """Return all but the tensors of weight and input, as `LayerCall.context`. The host waits for the ids."""
        ids = () if self.ids is None else tuple(self.ids.tolist())
        return (self.first, self.used, *self.input_shape[1:3], int(self.by_row), len(self.order), *self.order, *ids)

    def rows(self) -> Tensor:
        """Return the input as `[groups or 1, batch, shared, in]`."""
        return self.input.detach().permute(self.input_order).reshape(self.input_shape)


class Source(NamedTuple):
    """Tells where a matrix, or several, lie in a parameter.

    Attributes:
        weight: the parameter.
        shape: the shape of all that is in the parameter, without dimensions of size one.
        dims: the number in `shape` of each dimension of the matrix; None for one of size one.
        first: number of the first group, where it is some of `shape[0]`.
        partial: whether the matrix has some of `shape[0]`, or (by `ids`) anything of it.
        ids: what was gathered along `shape[0]`.
        taken: how many groups there are, where it is some of `shape[0]`.
    """

    weight: nn.Parameter
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    first: int = 0
    partial: bool = False
    ids: Tensor | None = None
    taken: int = 0


def source_of(matrix: Any) -> Source | None:
    """Find the parameter that a tensor is, is a view of, or was gathered from; None if there is none."""
    if not isinstance(matrix, Tensor) or matrix.is_nested or matrix.layout is not torch.strided:
        return None
    matrix = below_transforms(matrix)
    base = matrix if matrix._base is None else matrix._base
    if not isinstance(base, nn.Parameter):
        return _gathered(matrix, base)
    if not base.is_contiguous() or base.dim() == 0 or base.numel() == 0:
        return None
    offset = matrix.storage_offset() - base.storage_offset()
    strides = matrix.stride()
    kept = sorted((dim for dim, size in enumerate(matrix.shape) if size != 1), key=lambda dim: -strides[dim])
    sizes = tuple(matrix.shape[dim] for dim in kept)
    if not _is_packed(sizes, [strides[dim] for dim in kept]):
        return None
    places = {dim: place for place, dim in enumerate(kept)}
    if matrix.numel() == base.numel():
        return Source(base, sizes, tuple(map(places.get, range(matrix.dim()))))
    each = base.numel() // len(base)  # numbers of one group
    groups, rest = divmod(matrix.numel(), each)
    if rest or offset % each or groups == 0:
        return None
    first = offset // each
    if groups == 1:
        places = {dim: place + 1 for dim, place in places.items()}
        shape = (len(base), *sizes)
    elif sizes[0] == groups:
        shape = (len(base), *sizes[1:])
    else:
        return None
    return Source(base, shape, tuple(map(places.get, range(matrix.dim()))), first, partial=True, taken=groups)


def _gathered(matrix: Tensor, gathered: Tensor) -> Source | None:
    found = gathered_from(gathered)
    if found is None or not gathered.is_contiguous() or matrix.dim() != gathered.dim():
        return None
    weight, ids = found
    strides = matrix.stride()
    order = sorted(range(matrix.dim()), key=lambda dim: -strides[dim])
    if tuple(matrix.shape[dim] for dim in order) != tuple(gathered.shape) or matrix.numel() != gathered.numel():
        return None
    kept = [dim for place, dim in enumerate(order) if place == 0 or matrix.shape[dim] != 1]
    shape = (len(weight), *(matrix.shape[dim] for dim in kept[1:]))
    places = {dim: place for place, dim in enumerate(kept)}
    return Source(weight, shape, tuple(map(places.get, range(matrix.dim()))), partial=True, ids=ids)


def whole_parameter(tensor: Any) -> nn.Parameter | None:
    """Return the parameter that a tensor is, or shows whole and in its order, but for dimensions of size one."""
    source = source_of(tensor)
    if source is None or source.partial:
        return None
    sizes = tuple(size for size in source.weight.shape if size != 1)
    kept = tuple(place for place in source.dims if place is not None)
    return source.weight if source.shape == sizes and kept == tuple(range(len(sizes))) else None


def _is_packed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether dimensions in this order fill their memory."""
    expected = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    return list(strides) == expected


def contract(
    rows: Tensor,
    row_labels: Sequence[Label],
    source: Source,
    labels: Sequence[Label],
    out_labels: Sequence[Label],
    numbering: frozenset[Label] = frozenset(),
) -> TensorProduct | None:
    """Describe a contraction of rows with what lies in a parameter; None where it is not a matrix of some layer.

    Args:
        rows: what is multiplied.
        row_labels: its dimensions.
        source: the source of the weight.
        labels: the weight's dimensions.
        out_labels: the output's dimensions.
        numbering: labels of groups, also where all of these have the same rows.
    """
    place_of = {label: place for label, place in zip(labels, source.dims, strict=True) if place is not None}
    size_of = dict(zip(row_labels, rows.shape, strict=True))
    if any(len(set(each)) < len(each) for each in (row_labels, labels, out_labels)):
        return None
    gathered = next((label for label, place in place_of.items() if place == 0 and source.ids is not None), None)
    groups: list[Label] = []
    outputs: list[Label] = []
    inputs: list[Label] = []
    batch: list[Label] = []
    for label in sorted(place_of, key=place_of.__getitem__):
        if label == gathered:
            if label not in size_of or label not in out_labels:
                return None
        elif label in out_labels:
            (groups if label in size_of or label in numbering else outputs).append(label)
        elif label in size_of:
            inputs.append(label)
        else:
            return None
    for label, size in size_of.items():
        if label in out_labels and (label not in place_of or label == gathered):
            batch.append(label)
        elif label not in place_of and size != 1:
            return None
    by_row = gathered is not None and gathered != row_labels[0]
    if gathered is not None:  # its rows are the batch
        batch = [gathered, *(label for label in batch if label != gathered)]
    if not batch:
        return None
    sides = tuple(tuple(place_of[label] for label in side) for side in (groups, outputs, inputs))
    of_groups, first, count = sides[0], 0, math.prod(source.shape[place] for place in sides[0])
    if source.partial:
        if gathered is not None or 0 not in place_of.values():
            of_groups, first = (0, *sides[0]), source.first * count
            if gathered is not None:
                count *= source.shape[0]
        else:
            first, part = source.first, next(label for label, place in place_of.items() if place == 0)
            if groups != [part]:
                return None
            count = source.taken
        if gathered is not None and groups:
            return None
    ones = [label for label in row_labels if label not in (*groups, *batch, *inputs)]
    held = [label for label in groups if label in size_of]
    if held and held != groups:
        return None
    rows_order = tuple(row_labels.index(label) for label in (*held, *batch, *inputs, *ones))
    lone = [label for label in out_labels if label not in (*groups, *batch, *outputs)]
    order = tuple(out_labels.index(label) for label in (*groups, *batch, *outputs, *lone))
    amounts = size_of[batch[0]], math.prod(size_of[label] for label in batch[1:])
    shape = math.prod(size_of[label] for label in held), *amounts, math.prod(size_of[label] for label in inputs)
    whole = (of_groups, sides[1], sides[2])
    where = source.weight, source.shape, whole
    return TensorProduct(*where, rows, rows_order, shape, order, first, count, source.ids, by_row=by_row)


def added(bias: Tensor, shape: tuple[int, ...]) -> TensorProduct | None:
    """Describe that a parameter is added to rows of an output of this shape.

    Within transforms of `torch.func`, of which one may hide the batch, there is one more dimension.
    """
    if in_function_transform():
        shape = (1, *shape)
    source = source_of(bias)
    if source is None:
        return None
    out = list(range(len(shape)))
    labels = out[len(out) - bias.dim() :]
    of_weight = {label for label, place in zip(labels, source.dims, strict=True) if place is not None}
    if not of_weight:
        return None
    rows = [label for label in out if label not in of_weight or (source.ids is not None and label == labels[0])]
    ones = bias.detach().new_ones(()).expand([shape[label] for label in rows])
    last = max(of_weight)
    found = contract(ones, rows, source, labels, out, frozenset(of_weight - {last}))
    return found and found._replace(added=bias)
