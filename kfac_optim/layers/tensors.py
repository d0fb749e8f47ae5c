"""Matrices that lie in a parameter of any shape: experts of a mixture, weights of `torch.einsum`, what rows are added.

Each expert is a group of the block, with factors of its own. A call has the rows of one group, of several, or of all;
its statistics are made group by group, as those of a linear layer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.specs import LayerSpec, Sketched, Structure

# Numbers of a dense `G` of what is added to rows; of tables with more, as of positions, the diagonal is kept.
_MOST = 2**22


class _OneGroup(RowStatistics):
    """Computes the statistics of the rows of one group: inputs and gradients are `[batch, shared, d]`."""

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return layer_input.unsqueeze(0)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return gradient.unsqueeze(0)


class TensorStatistics(LayerStatistics):
    """Computes the statistics of one call of some of the groups.

    Args:
        spec: of the block.
        call: its input is `[groups or 1, batch, shared, in]`, and its context that of `TensorProduct`.
        dtype: of the moments.
    """

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        self.spec, self.call, self.dtype = spec, call, dtype
        self._first, self._count, self._batch, self._shared, length, *rest = call.context
        self._order, self._ids = rest[:length], rest[length:]

    @cached_property
    def parts(self) -> list[tuple[int, RowStatistics]]:
        """Give the number of each group that has rows, and their statistics."""
        spec, call = replace(self.spec, groups=1, shared_input=False), self.call
        gradients = [
            None if each is None else self._canonical(each) for each in (call.gradient, call.earlier, call.reach)
        ]
        assert gradients[0] is not None
        if self._ids:
            places: dict[int, list[int]] = {}
            for place, group in enumerate(self._ids):
                places.setdefault(group, []).append(place)
            chosen: list[tuple[int, int, list[int] | None]]
            chosen = [(group, 0, at) for group, at in sorted(places.items()) if 0 <= group < self.spec.groups]
        else:
            chosen = [(self._first + index, index, None) for index in range(self._count)]
        parts: list[tuple[int, RowStatistics]] = []
        for group, index, at in chosen:
            rows = None if at is None else torch.tensor(at, device=call.gradient.device)
            inputs = None if call.input is None else call.input[min(index, len(call.input) - 1)]
            own = [each if each is None else each[index] for each in gradients]
            if rows is not None:
                inputs = None if inputs is None else inputs.index_select(0, rows)
                own = [each if each is None else each.index_select(0, rows) for each in own]
            gradient, earlier, reach = own
            assert gradient is not None
            of_group = replace(call, input=inputs, gradient=gradient, earlier=earlier, reach=reach)
            parts.append((group, _OneGroup(spec, of_group, self.dtype)))
        return parts

    def _canonical(self, gradient: Tensor) -> Tensor:
        groups = 1 if self._ids else self._count
        return gradient.permute(self._order).reshape(groups, self._batch, self._shared, self.spec.out_dim)

    def subsample(self, draw: Draw) -> None:
        for _, part in self.parts:
            part.subsample(draw)

    @property
    def groups(self) -> slice | None:
        if self.spec.groups == 1 or self._ids:
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
        counts = self.call.gradient.new_zeros(self.spec.groups, dtype=torch.float32)
        for group, part in self.parts:
            counts[group] = part.count
        return counts

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        moments = {group: part.input_moment(structure) for group, part in self.parts if part.has_input}
        return self._together(moments)

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        moments = {group: part.output_moment(structure) for group, part in self.parts}
        if not moments:  # no row was for any group
            empty = replace(self.call, gradient=self.call.gradient.new_zeros(0, 1, self.spec.out_dim), earlier=None)
            moments = {0: _OneGroup(replace(self.spec, groups=1), empty, self.dtype).output_moment(structure)}
        return self._together(moments)

    def _together(self, moments: dict[int, Tensor]) -> Tensor:
        """Put moments of single groups `[1, ...]` side by side, and zeros for groups that have none."""
        some = next(iter(moments.values()))
        if self.groups is None:
            first, count = 0, self.spec.groups
        else:
            first, count = self._first, self._count
        if len(moments) == count:
            return some if count == 1 else torch.cat([moments[group] for group in sorted(moments)])
        together = some.new_zeros(count, *some.shape[1:])
        for group, moment in moments.items():
            together[group - first] = moment[0]
        return together

    def rows(self) -> tuple[Tensor, Tensor]:
        pairs = {group: [rows.flatten(1, 2) for rows in part.rows()] for group, part in self.parts}
        most = max((a.shape[1] for a, _ in pairs.values()), default=0)
        sides = []
        for side, width in enumerate((self.spec.in_dim, self.spec.out_dim)):
            padded = self.call.gradient.new_zeros(self.spec.groups, most, 1, width, dtype=self.dtype)
            for group, pair in pairs.items():
                padded[group, : pair[side].shape[1], 0] = pair[side][0]
            sides.append(padded)
        return sides[0], sides[1]

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        total = directions.new_zeros(self.spec.groups, self.spec.out_dim, directions.shape[1])
        squares = directions.new_zeros(())
        for group, part in self.parts:
            found = part.gradient_along(directions)
            assert found is not None
            total[group] += found[0][0]
            squares += found[1].square()
        return total, squares.sqrt()

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        total = self.call.gradient.new_zeros(self.spec.groups, self.spec.out_dim, self.spec.in_dim, dtype=dtype)
        for group, part in self.parts:
            of_a, of_g = (
                basis if basis is None or len(basis) == 1 else basis[group : group + 1] for basis in (a_basis, g_basis)
            )
            total[group] = part.squared_gradients(of_a, of_g, dtype=dtype, per_example=per_example)[0]
        return total


def added_structure(spec: LayerSpec) -> tuple[Structure, Structure]:
    """Return what is kept of the factors of a parameter that is added to rows: `A`, which is 1, need not be."""
    dense = spec.groups * spec.out_dim**2 <= _MOST
    return Structure.IDENTITY, Structure.DENSE if dense else Structure.DIAGONAL


class TensorAdapter(ProductAdapter):
    """Handles one parameter, whose dimensions number groups, outputs and inputs.

    Args:
        shape: of the parameter, as it is used.
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
