"""Unit-wise second moments of normalisation layers, `y = w ⊙ x̂ + b`: one small matrix for each feature.

The Fisher of feature j's weight and bias is `M Σ u uᵀ`, `u = g_j (x̂_j, 1)`, the unit-wise Fisher (Amari, Karakida &
Oizumi 2019; for batch normalisation Osawa et al. 2020, arXiv 2002.06015). So every feature is a group with gradient
matrix `[2, 1]`, `u` takes the place of `g`, and `A` is the identity: `λ` is added to the exact 2×2 block.

With weight sharing `expand` each position (token, pixel) is an example of its own; with `reduce` `u` is summed over
the positions of an example, which is the exact gradient of that example.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import FEW_THERE, LayerStatistics, UnitRows
from kfac_optim.factors.second_moments import batched, examples_at_once, on_host, weighed
from kfac_optim.factors.subsampling import Draw, RowSample
from kfac_optim.specs import LayerSpec, Sketched, Structure, WeightSharing
from kfac_optim.utils.streams import current_stream


@dataclass(frozen=True, slots=True)
class ByExample:
    """Standardises examples by themselves; layers of one `key` do so alike."""

    key: Hashable
    function: Callable[[Tensor], Tensor]

    def __call__(self, some: Tensor) -> Tensor:
        return self.function(some)


@dataclass(frozen=True, slots=True, eq=False)
class ByChannel:
    """Standardises examples by the `shift` and `scale` of each channel, shaped to be taken off an example."""

    shift: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __call__(self, some: Tensor) -> Tensor:
        return (some - self.shift).to(self.dtype).mul_(self.scale)


Standardiser = Callable[[Tensor], Tensor]
"""Makes `x̂` of examples of a layer's input; a `ByExample` or `ByChannel` can do so for several layers at once."""


@dataclass(frozen=True, slots=True, eq=False)
class NormRows(UnitRows):
    """Holds examples of the input and of the output gradient of one call.

    Attributes:
        x: examples of the input, `[examples, ...]` as the module has it.
        g: the same examples of the output gradient.
        standardise: makes `x̂` of examples of the input, as in `NormStatistics`.
        canonical: brings examples to `[examples, shared, features]`, as in `NormStatistics`.
        has_bias: whether `u` has two elements.
    """

    x: Tensor
    g: Tensor
    standardise: ByExample | ByChannel
    canonical: Callable[[Tensor], Tensor]
    has_bias: bool
    count: int
    weight: float
    stream: Hashable

    @property
    def size(self) -> int:
        return self.x.nbytes + self.g.nbytes

    @property
    def numel(self) -> int:
        return 4 * self.x.numel()

    @property
    def key(self) -> Hashable:
        how = self.standardise.key if isinstance(self.standardise, ByExample) else self.standardise.dtype
        shapes = self.x.shape, self.g.shape, self.x.dtype, self.g.dtype, self.x.device
        return type(self.standardise), how, *shapes, self.has_bias, self.count, self.weight

    def output_moments(self, calls: Sequence["NormRows"], structure: Structure | Sketched) -> tuple[Tensor, Tensor]:
        if len(calls) == 1:
            x = self.standardise(self.x)
        elif isinstance(self.standardise, ByExample):
            x = self.standardise(torch.cat([call.x for call in calls]))
        else:
            by_channel = [call.standardise for call in calls if isinstance(call.standardise, ByChannel)]
            shift = torch.stack([each.shift for each in by_channel]).unsqueeze(1)
            scale = torch.stack([each.scale for each in by_channel]).unsqueeze(1)
            x = ByChannel(shift, scale, self.standardise.dtype)(torch.stack([call.x for call in calls])).flatten(0, 1)
        g = torch.cat([call.g for call in calls])
        used = g.reshape(len(calls), -1, *g.shape[1:]).any(tuple(range(1, g.dim() + 1)))
        g = g.to(x.dtype)
        x, g = (self.canonical(each) for each in (x, g))
        columns = [g * x, g] if self.has_bias else [g * x]
        return _moments([column.reshape(len(calls), -1, column.shape[-1]) for column in columns], structure), used


@dataclass(eq=False)
class NormStatistics(LayerStatistics):
    """Computes unit-wise second moments.

    They are made of a few examples at a time, so that what they are made of stays in the cache, and of no others than
    were drawn.

    Attributes:
        spec: the layer.
        call: one call, with the input at every backward.
        dtype: the dtype of the moments.
        standardise: makes `x̂` of some of the examples of the input, `[examples, ...]` as the module has it.
        canonical: brings such examples, or those of a gradient, to `[examples, shared, features]`.
        unbatched_ndim: dimensions of an input without a batch dimension.
    """

    keeps_input = True

    spec: LayerSpec
    call: LayerCall
    dtype: torch.dtype
    standardise: Standardiser
    canonical: Callable[[Tensor], Tensor]
    unbatched_ndim: int
    _sample: RowSample | None = None

    @property
    def term(self) -> int:
        return self.call.term

    def subsample(self, draw: Draw) -> None:
        self._sample = draw.rows(*self._shape, self.call.gradient.device)

    @property
    def weight(self) -> float:
        return 1.0 if self._sample is None else self._sample.weight

    @property
    def has_input(self) -> bool:
        return self._adds_rows is not False

    @property
    def count(self) -> float | Tensor:
        count = self._adds_rows * self._rows
        if self.weight == 1:
            return count
        return weighed(count, self.weight, self.dtype) if isinstance(count, Tensor) else count * self.weight

    @cached_property
    def _adds_rows(self) -> bool | Tensor:
        """Return whether this backward is the first that brings a gradient to a row that is taken, as `_comes` has it.

        Without a gradient the loss did not use the layer, and the zeros are no sample.
        """
        now = self._comes(self.call.gradient)
        if self.call.earlier is None:
            return now
        before = self._comes(self.call.earlier)
        return now & ~before if isinstance(before, Tensor) else now and not before

    def _comes(self, gradient: Tensor) -> bool | Tensor:
        """Return whether a gradient is not exactly zero in some row that is taken; an accelerator is not waited for."""
        examples = self._taken[0]
        if not on_host(gradient):
            return self._of_part(gradient, self._part(0, examples), lambda some: some).any()
        # In most layers one example shows it already.
        parts = (self._part(*ends) for ends in ((0, 1), (1, examples)) if ends[0] < min(ends[1], examples))
        return any(bool(self._of_part(gradient, part, lambda some: some).any()) for part in parts)

    @property
    def _shape(self) -> tuple[int, int]:
        """Return examples, and positions of each, that there are to draw from."""
        gradient = batched(self.call.gradient, self.unbatched_ndim)
        return len(gradient), gradient.numel() // max(1, len(gradient) * self.spec.groups)

    @property
    def _taken(self) -> tuple[int, int]:
        """Return examples, and positions of each, that are taken."""
        examples, positions = self._shape
        if self._sample is None:
            return examples, positions
        places = self._sample.positions
        return len(self._sample.examples), positions if places is None else places.shape[1]

    @property
    def _rows(self) -> int:
        """Return how many rows are taken, after weight sharing."""
        examples, positions = self._taken
        return examples if self.spec.weight_sharing is WeightSharing.REDUCE else examples * positions

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        shape = (self.spec.groups, 1, 1) if structure is Structure.DENSE else (self.spec.groups, 1)
        return self.call.gradient.new_ones(shape, dtype=self.dtype).mul_(self.count)

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        moment = self._moment_of(self.call.gradient, structure)
        if self.call.earlier is not None:
            moment -= self._moment_of(self.call.earlier, structure)
        return moment.mul_(self.weight).to(self.dtype)

    def rows(self) -> tuple[Tensor, Tensor]:
        columns = self._columns(self.call.gradient, 0, self._taken[0])
        u = torch.stack(columns, dim=-1).permute(2, 0, 1, 3).mul(self.weight**0.5).to(self.dtype)
        return u.new_ones(*u.shape[:-1], 1), u

    def few_rows(self) -> UnitRows | None:
        how, gradient = self.standardise, batched(self.call.gradient, self.unbatched_ndim)
        if on_host(gradient) or not isinstance(how, ByExample | ByChannel) or not self.call.is_last:
            return None
        if self.call.earlier is not None or gradient.numel() == 0 or self.spec.weight_sharing is WeightSharing.REDUCE:
            return None
        if self._sample is not None and self._sample.positions is not None:
            return None
        assert self.call.input is not None
        x = batched(self.call.input, self.unbatched_ndim)
        if x.numel() // len(x) * self._taken[0] > FEW_THERE:
            return None
        x, g = ((each.clone() if self._sample is None else self._sample.of_batch(each)) for each in (x, gradient))
        stream = current_stream(g.device)
        return NormRows(x, g, how, self.canonical, self.spec.out_dim > 1, self._rows, self.weight, stream)

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        examples = self._shape[0]
        step = examples_at_once(batched(self.call.gradient, self.unbatched_ndim))
        total = directions.new_zeros(self.spec.groups, self.spec.out_dim)
        squares = directions.new_zeros(())
        for start in range(0, examples, step):
            products = self._products(self.call.gradient, start, start + step)
            columns = [column.to(directions.dtype) for column in products]
            total += torch.stack([column.sum((0, 1)) for column in columns], dim=-1)
            squares += torch.stack([column.square().sum() for column in columns]).sum()
        return total.unsqueeze(-1) * directions, squares.sqrt() * torch.linalg.vector_norm(directions)

    def _moment_of(self, gradient: Tensor, structure: Structure | Sketched) -> Tensor:
        examples = self._taken[0]
        step = examples_at_once(batched(gradient, self.unbatched_ndim))
        starts = range(0, max(1, examples), step)
        moments = [_moment(self._columns(gradient, start, start + step), structure) for start in starts]
        return moments[0] if len(moments) == 1 else torch.stack(moments).sum(0)

    def _columns(self, gradient: Tensor, start: int, stop: int) -> list[Tensor]:
        """Return `_products`, summed over the positions of an example with weight sharing `reduce`."""
        columns = self._products(gradient, start, stop)
        if self.spec.weight_sharing is WeightSharing.REDUCE:
            columns = [column.sum(1, keepdim=True) for column in columns]
        return columns

    def _products(self, gradient: Tensor, start: int, stop: int) -> list[Tensor]:
        """Return `g x̂`, and `g` if there is a bias: each `[examples, positions, features]`, of some of those taken."""
        assert self.call.input is not None
        part = self._part(start, stop)
        x = self._of_part(self.call.input, part, self.standardise)
        g = self._of_part(gradient, part, lambda some: some.to(x.dtype))
        return [g * x, g][: self.spec.out_dim]

    def _part(self, start: int, stop: int) -> slice | RowSample:
        """Return some of the examples that are taken."""
        return slice(start, stop) if self._sample is None else self._sample.part(start, stop)

    def _of_part(self, tensor: Tensor, part: slice | RowSample, change: Callable[[Tensor], Tensor]) -> Tensor:
        tensor = batched(tensor, self.unbatched_ndim)
        if isinstance(part, slice):
            return self.canonical(change(tensor[part]))
        rows = self.canonical(change(part.of_batch(tensor)))
        if part.positions is None:
            return rows
        return rows.gather(1, part.positions.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def _moment(columns: Sequence[Tensor], structure: Structure | Sketched) -> Tensor:
    """Return `Σ u uᵀ` `[features, out, out]`, or its diagonal, of the columns of `u`."""
    if structure is Structure.DIAGONAL:
        return torch.stack([column.square().sum((0, 1)) for column in columns], dim=-1)
    if not on_host(columns[0]):
        return _moments([column.flatten(0, 1).unsqueeze(0) for column in columns], structure)
    size = range(len(columns))
    sums = {(i, j): (columns[i] * columns[j]).sum((0, 1)) for i in size for j in size if i <= j}
    return torch.stack([torch.stack([sums[min(i, j), max(i, j)] for j in size], dim=-1) for i in size], dim=-2)


def _moments(columns: Sequence[Tensor], structure: Structure | Sketched) -> Tensor:
    """Do as `_moment` does for several calls, by more arithmetic in the fewest operators.

    Args:
        columns: each `[calls, rows, features]`.
        structure: the structure of the moments, as for `_moment`.

    Returns:
        `[calls · features, out, out]`, or the diagonals.
    """
    u = torch.stack(list(columns))
    if structure is Structure.DIAGONAL:
        return u.square().sum(2).flatten(1).mT
    return (u.unsqueeze(0) * u.unsqueeze(1)).sum(3).flatten(2).permute(2, 0, 1)
