"""The rows `ρ` of one block: a row for each example, term and column of the loss's curvature, `F = ρᵀρ`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfac_optim.factors.example_rows import ExampleRows
from kfac_optim.linalg.products import symmetric_product

# Elements of Jacobians that are held at a time.
_CHUNK = 2**23

Key = tuple[int, int]
"""Term and column, as in `LayerCall`."""


class SampleRows:
    """Multiplies by the rows of one block, in the way that takes the fewest operations.

    `ρ` is formed where the matrix of the block has fewer elements than pairs of rows take; otherwise products of the
    rows of inputs and of output gradients are multiplied, and nothing of the size of the matrix is made of an example.

    Args:
        keys: the terms and columns of all blocks, with the examples of each, in the order of the rows of `ρ`.
        rows: the rows of this block; a term that does not reach it has none.
        scale: what rows are multiplied by.
        centred: whether the mean over the examples of a term is taken off.
        like: a gradient matrix of the block, `[groups, out, in]`.
        dtype: the dtype of all products.

    Attributes:
        keys: the same as the argument.
        count: rows of `ρ`.
    """

    def __init__(
        self,
        keys: Mapping[Key, int],
        rows: Mapping[Key, ExampleRows],
        scale: Tensor | float,
        centred: bool,
        like: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.keys = keys
        self.count = sum(keys.values())
        self._centred = centred
        self._shape = like.shape
        self._device = like.device
        self._dtype = dtype
        self._uses = {
            key: [(z.to(dtype), g.to(dtype) * scale) for z, g in rows[key].aligned()] for key in keys if key in rows
        }
        positions = max((sum(z.shape[2] for z, _ in uses) for uses in self._uses.values()), default=0)
        _, out_dim, in_dim = like.shape
        self._dense: Tensor | None = None
        if out_dim * in_dim <= positions**2 * (out_dim + in_dim):
            self._dense = self.dense()

    def dense(self) -> Tensor:
        """Return `ρ`, `[rows, groups · out · in]`."""
        if self._dense is not None:
            return self._dense
        parts = []
        for key, examples in self.keys.items():
            if key in self._uses:
                part = ExampleRows(examples, None, self._uses[key]).jacobians().movedim(1, 0).flatten(1)
                parts.append(part - part.mean(0) if self._centred else part)
            else:
                parts.append(torch.zeros(examples, self._shape.numel(), dtype=self._dtype, device=self._device))
        return torch.cat(parts)

    def gram(self) -> Tensor:
        """Return `ρρᵀ`, `[rows, rows]`."""
        if self._dense is not None:
            whole = self._dense.new_empty(1, len(self._dense), len(self._dense))
            symmetric_product(self._dense.mT.unsqueeze(0), out=whole)
            return whole[0]
        result = torch.zeros(self.count, self.count, dtype=self._dtype, device=self._device)
        starts = self._starts()
        for key, start in starts.items():
            for other, beside in starts.items():
                if beside > start or key not in self._uses or other not in self._uses:
                    continue
                block = _pairs(self._uses[key], self._uses[other])
                if self._centred:
                    block = block - block.mean(0) - block.mean(1, keepdim=True) + block.mean()
                result[start : start + len(block), beside : beside + block.shape[1]] = block
                result[beside : beside + block.shape[1], start : start + len(block)] = block.mT
        return result

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return `Σ J Jᵀ` `[groups, out, out]` and `Σ Jᵀ J` `[groups, in, in]` over all rows."""
        groups, out_dim, in_dim = self._shape
        left = torch.zeros(groups, out_dim, out_dim, dtype=self._dtype, device=self._device)
        right = torch.zeros(groups, in_dim, in_dim, dtype=self._dtype, device=self._device)
        for uses in self._uses.values():
            for some in ExampleRows(uses=uses).chunks(_CHUNK):
                left += (some @ some.mT).sum(1)
                right += (some.mT @ some).sum(1)
        return left, right

    def square(self) -> Tensor:
        """Return `Σ ρ²`, `[]`; where `ρ` is not formed, an estimate that may be small by uses times positions."""
        if self._dense is not None:
            return self._dense.square().sum()
        parts = [((z.square().sum(-1) * g.square().sum(-1)).sum()) for uses in self._uses.values() for z, g in uses]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=self._dtype, device=self._device)

    def along(self, matrix: Tensor) -> Tensor:
        """Return `ρ` times a matrix `[groups, out, in]`, `[rows]`."""
        matrix = matrix.to(self._dtype)
        if self._dense is not None:
            return self._dense @ matrix.flatten()
        parts = []
        for key, examples in self.keys.items():
            total = torch.zeros(examples, dtype=self._dtype, device=self._device)
            for z, g in self._uses.get(key, ()):
                total += ((z @ matrix.mT.unsqueeze(1)) * g).sum((0, 2, 3))
            parts.append(total - total.mean() if self._centred else total)
        return torch.cat(parts)

    def combined(self, weights: Tensor) -> Tensor:
        """Return `ρᵀ` times weights `[rows]`, `[groups, out, in]`."""
        if self._dense is not None:
            return (self._dense.mT @ weights).view(self._shape)
        total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        for key, start in self._starts().items():
            some = weights[start : start + self.keys[key]]
            some = some - some.mean() if self._centred else some
            for z, g in self._uses.get(key, ()):
                weighed = g * some.view(1, -1, 1, 1)
                total += weighed.flatten(1, 2).mT @ z.flatten(1, 2)
        return total

    def _starts(self) -> dict[Key, int]:
        starts, start = {}, 0
        for key, examples in self.keys.items():
            starts[key] = start
            start += examples
        return starts


def _pairs(left: Sequence[tuple[Tensor, Tensor]], right: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return `Σ (z zᵀ) ∘ (g gᵀ)` over groups, uses and positions of both sides, `[examples, examples]`."""
    total: Tensor | None = None
    for z, g in left:
        for other_z, other_g in right:
            for group in range(max(len(z), len(other_z))):
                for position in range(z.shape[2]):
                    for beside in range(other_z.shape[2]):
                        inputs = z[group % len(z), :, position] @ other_z[group % len(other_z), :, beside].mT
                        part = inputs * (g[group, :, position] @ other_g[group, :, beside].mT)
                        total = part if total is None else total.add_(part)
    assert total is not None
    return total
