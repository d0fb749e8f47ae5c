"""Matrices that lie in a parameter of any shape: experts, weights of `torch.einsum`, parameters added to rows.

Each expert is a group of the block, with factors of its own. A call has the rows of one group, of several, or of all;
its statistics are those of a linear layer for each group.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.specs import LayerSpec, Sketched, Structure

# The most elements of a dense `G` for a parameter that is added to rows. A larger one, such as a table of positions,
# keeps the diagonal.
_MOST = 2**22

# Numbers of rows of several groups that are worked on together: 64 MiB of float32.
_TOGETHER = 2**24


class _EqualGroups(RowStatistics):
    """Computes the statistics of groups that have equally many rows.

    The call is in the canonical layout: its input is `[groups or 1, batch, shared, in]`, its gradients are
    `[groups, batch, shared, out]`.
    """

    rows_by_group = True

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return layer_input

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return gradient

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        moment = super()._input_moment_over(active, structure)
        if len(moment) < self.spec.groups:  # all read the same, and all of it counts in every group
            moment = moment.repeat(self.spec.groups, *(1 for _ in moment.shape[1:]))
        return moment


class TensorStatistics(LayerStatistics):
    """Computes the statistics of one call of some of the groups.

    Args:
        spec: the block.
        call: its input is `[groups or 1, batch, shared, in]`, and its context that of `TensorProduct`.
        dtype: the dtype of the moments.
    """

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        self.spec, self.call, self.dtype = spec, call, dtype
        self._first, self._count, self._batch, self._shared, self._by_row, length, *rest = call.context
        self._order, self._ids = rest[:length], rest[length:]
        self._draw: Draw | None = None

    @property
    def term(self) -> int:
        return self.call.term

    @cached_property
    def parts(self) -> list[tuple[slice, _EqualGroups]]:
        """Give the statistics of all groups that have rows, those of several at a time, and say which groups they are.

        Groups that follow each other and have equally many rows, as those of a table of positions, are taken together:
        to launch the products of one takes far longer than to compute them. Where they have many rows, only a few are
        taken at a time, to bound the memory.
        """
        if not self._ids:
            return [
                self._part(slice(self._first + some.start, self._first + some.stop), some)
                for some in _pieces(0, self._count, self._at_once(self._batch))
            ]
        places = defaultdict[int, list[int]](list)
        for place, group in enumerate(self._ids):
            if 0 <= group < self.spec.groups:
                places[group].append(place)
        parts = []
        # Numbers that follow each other differ from their places in the list by the same.
        for (count, _), run in groupby(enumerate(sorted(places)), lambda at: (len(places[at[1]]), at[1] - at[0])):
            numbers = [group for _, group in run]
            for groups in _pieces(numbers[0], numbers[-1] + 1, self._at_once(count)):
                rows = [places[group] for group in range(groups.start, groups.stop)]
                parts.append(self._part(groups, torch.tensor(rows, device=self.call.gradient.device)))
        return parts

    def _at_once(self, batch: int) -> int:
        """Return how many groups with so many rows each are taken together."""
        return max(1, _TOGETHER // max(1, batch * self._shared * (self.spec.in_dim + self.spec.out_dim)))

    def _part(self, groups: slice, rows: slice | Tensor) -> tuple[slice, _EqualGroups]:
        """Return the statistics of some groups.

        Args:
            groups: which groups of the block they are.
            rows: what is theirs of the call: a slice of its groups; or places in the batch, `[groups, n]`.
        """
        layer_input, gradient, earlier, reach = (
            tensor if tensor is None else self._taken(tensor, rows) for tensor in (self.call.input, *self._gradients)
        )
        assert gradient is not None
        call = replace(self.call, input=layer_input, gradient=gradient, earlier=earlier, reach=reach)
        spec = replace(self.spec, groups=groups.stop - groups.start, shared_input=False)
        part = _EqualGroups(spec, call, self.dtype)
        if self._draw is not None:
            part.subsample(self._draw)
        return groups, part

    def _taken(self, tensor: Tensor, rows: slice | Tensor) -> Tensor:
        """Take what is of some groups from `[groups or 1, batch, shared, d]`; see `_part`."""
        if isinstance(rows, slice):
            return tensor if len(tensor) == 1 else tensor[rows]
        taken = tensor[0].index_select(0, rows.flatten()).view(*rows.shape, *tensor.shape[2:])
        return taken.flatten(1, 2).unsqueeze(2) if self._by_row else taken

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        """Give all gradients of the call as `[groups, batch, shared, out]`, of one group where there are ids."""
        call, groups = self.call, 1 if self._ids else self._count
        shape = groups, self._batch, self._shared, self.spec.out_dim
        return [
            each if each is None else each.permute(self._order).reshape(shape)
            for each in (call.gradient, call.earlier, call.reach)
        ]

    def subsample(self, draw: Draw) -> None:
        self._draw = draw  # before any of `parts` is made

    @property
    def groups(self) -> slice | None:
        if self._ids or self._count == self.spec.groups:
            return None
        return slice(self._first, self._first + self._count)

    @property
    def keeps_input(self) -> bool:
        return any(part.keeps_input for _, part in self.parts)

    @property
    def has_input(self) -> bool:
        return any(part.has_input for _, part in self.parts)

    @property
    def count(self) -> float | Tensor:
        if self.spec.groups == 1:
            return sum(part.count for _, part in self.parts)
        if not self.has_input:
            return 0
        counts = self.call.gradient.new_zeros(self.spec.groups, dtype=torch.float32)
        for groups, part in self.parts:
            counts[groups] = part.count
        return counts

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        return self._together([(groups, part.input_moment(structure)) for groups, part in self.parts if part.has_input])

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        no_row = torch.empty(1, 0, dtype=torch.int64, device=self.call.gradient.device)
        parts = self.parts or [self._part(slice(0, 1), no_row)]
        return self._together([(groups, part.output_moment(structure)) for groups, part in parts])

    def _together(self, moments: Sequence[tuple[slice, Tensor]]) -> Tensor:
        """Put moments of some groups side by side, and zeros for groups that have none."""
        whole = slice(0, self.spec.groups) if self.groups is None else self.groups
        (groups, some), *_ = moments
        if groups == whole:
            return some
        together = some.new_zeros(whole.stop - whole.start, *some.shape[1:])
        for groups, moment in moments:
            together[groups.start - whole.start : groups.stop - whole.start] = moment
        return together

    def rows(self) -> tuple[Tensor, Tensor]:
        pairs = [(groups, [rows.flatten(1, 2) for rows in part.rows()]) for groups, part in self.parts]
        most = max((a.shape[1] for _, (a, _) in pairs), default=0)
        sides = []
        for side, width in enumerate((self.spec.in_dim, self.spec.out_dim)):
            padded = self.call.gradient.new_zeros(self.spec.groups, most, 1, width, dtype=self.dtype)
            for groups, pair in pairs:
                padded[groups, : pair[side].shape[1], 0] = pair[side]
            sides.append(padded)
        return sides[0], sides[1]

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        total = directions.new_zeros(self.spec.groups, self.spec.out_dim, directions.shape[1])
        squares = directions.new_zeros(())
        for groups, part in self.parts:
            found = part.gradient_along(directions)
            assert found is not None
            total[groups] += found[0]
            squares += found[1].square()
        return total, squares.sqrt()

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        total = self.call.gradient.new_zeros(self.spec.groups, self.spec.out_dim, self.spec.in_dim, dtype=dtype)
        for groups, part in self.parts:
            of_a, of_g = (basis if basis is None or len(basis) == 1 else basis[groups] for basis in (a_basis, g_basis))
            total[groups] = part.squared_gradients(of_a, of_g, dtype=dtype, per_example=per_example)
        return total


def _pieces(start: int, stop: int, size: int) -> list[slice]:
    """Cut a range into slices of at most that size."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def added_structure(spec: LayerSpec) -> tuple[Structure, Structure]:
    """Return what is kept of the factors of a parameter that is added to rows: `A`, which is 1, need not be."""
    dense = spec.groups * spec.out_dim**2 <= _MOST
    return Structure.IDENTITY, Structure.DENSE if dense else Structure.DIAGONAL


class TensorAdapter(ProductAdapter):
    """Handles one parameter, whose dimensions number groups, outputs and inputs.

    Args:
        shape: the shape of the parameter, as it is used.
        sides: which dimensions number groups, outputs and inputs.
    """

    routes_rows = True

    def __init__(self, shape: tuple[int, ...], sides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
        self.transposes = None
        self.shape, self.sides = shape, sides

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return groups, outputs and inputs."""
        groups, outputs, inputs = (math.prod(self.shape[dim] for dim in side) for side in self.sides)
        return groups, outputs, inputs

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        order = [dim for side in self.sides for dim in side]
        return tensor.reshape(self.shape).permute(order).reshape(self.sizes)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        order = [dim for side in self.sides for dim in side]
        whole = matrix.reshape([self.shape[dim] for dim in order])
        return (whole.permute([order.index(dim) for dim in range(len(order))]),)
