"""Small factors are folded in batches, as the fold of one takes longer to launch than to compute.

It is `FactorPair.fold` of each, bit for bit. The averages of all factors lie one after the other in one tensor for
that, and so do the sums, so that few calls serve all shapes.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, gain_of
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.small_calls import SMALL
from kfac_optim.linalg.triangles import pack_triangle
from kfac_optim.specs import Sketched, Structure

# On accelerators launches take longer than the work on larger factors: 4 MiB of float32.
_SMALL_THERE = 2**20

# Elements of the factors that are folded together at most: 64 MiB of float32, in each of some five tensors.
_TOGETHER = 2**24


class Alike(NamedTuple):
    """Says which pairs of factors are folded together: those of one family, those of one shape side by side."""

    family: Hashable
    shape: Hashable


def alike_of(pair: FactorPair) -> Alike | None:
    """Return what pairs share that can be folded together; None for a pair that is folded alone."""
    if type(pair) is not FactorPair or pair.everywhere is not None:
        return None
    rows: Hashable = pair.rows
    if isinstance(pair.rows, Tensor):
        if pair.rows.dim() > 0:
            return None
        rows = pair.rows.dtype  # of each its own number, which the device has
    elif pair.rows <= 0:
        return None
    sides = pair.a, pair.g
    if not all(side is None or _is_small(side) for side in sides):
        return None
    dtypes = [side and (side.dtype, side.pending is not None and side.pending.dtype) for side in sides]
    shapes = [side and (side.structure, side.dim, side.groups) for side in sides]
    return Alike((rows, pair.refused.device, *dtypes), tuple(shapes))


def _is_small(factor: Factor) -> bool:
    pending = factor.pending
    if type(factor) is not Factor or factor.mass.dim() > 0 or pending is None or len(pending) != factor.groups:
        return False
    if factor.device.type != "cpu":
        return factor.packed.numel() <= _SMALL_THERE
    return not isinstance(factor.structure, Sketched) and factor.packed.numel() <= SMALL


def fold_together(shapes: Sequence[Sequence[FactorPair]], loss_terms: float, decay: float, loss_scale: float) -> None:
    """Fold pairs of one family; see `FactorPair.fold`.

    Args:
        shapes: pairs of one shape each, at least one, of which each has a factor.
        loss_terms: the loss terms `M`, a number.
        decay: what the old averages are multiplied by.
        loss_scale: the loss scale, a number.
    """
    for portion in _portions(shapes):
        _fold_portion(portion, loss_terms, decay, loss_scale)


def _portions(shapes: Sequence[Sequence[FactorPair]]) -> Iterator[list[Sequence[FactorPair]]]:
    """Divide pairs, so that no portion is too large to be copied."""
    portion: list[Sequence[FactorPair]] = []
    taken = 0
    for pairs in shapes:
        size = max(1, *(side.packed.numel() for side in (pairs[0].a, pairs[0].g) if side is not None))
        start = 0
        while start < len(pairs):
            some = pairs[start : start + max(1, (_TOGETHER - taken) // size)]
            if portion and taken + len(some) * size > _TOGETHER:
                yield portion
                portion, taken = [], 0
                continue
            portion.append(some)
            start, taken = start + len(some), taken + len(some) * size
    if portion:
        yield portion


def _fold_portion(shapes: Sequence[Sequence[FactorPair]], loss_terms: float, decay: float, loss_scale: float) -> None:
    pairs = [pair for of_shape in shapes for pair in of_shape]
    a = _Side([[pair.a for pair in of_shape] for of_shape in shapes])
    g = _Side([[pair.g for pair in of_shape] for of_shape in shapes])
    rows = _rows(pairs)
    samples = []
    if a.factors:
        mean = 1 / rows.clamp(min=1).to(a.mass.dtype) if isinstance(rows, Tensor) else 1 / rows
        samples.append((a, mean, rows))
    if g.factors:
        used = (rows > 0).to(g.mass.dtype) if isinstance(rows, Tensor) else 1
        samples.append((g, loss_terms / loss_scale**2, loss_terms * used))
    for side, scale, _ in samples:
        side.scale(scale)
    finite = [side.is_finite() for side, _, _ in samples]  # [n] each
    accept = finite[0] if len(finite) == 1 else finite[0] & finite[1]
    for side, _, mass in samples:
        side.fold(mass, decay, accept)
    in_a_row = torch.stack([pair.refused_in_a_row for pair in pairs])
    in_a_row = torch.where(accept, 0, in_a_row + 1)
    torch._foreach_add_([pair.refused for pair in pairs], list((~accept).to(in_a_row.dtype).unbind()))
    torch._foreach_copy_([pair.refused_in_a_row for pair in pairs], list(in_a_row.unbind()))
    for pair in pairs:
        pair.rows, pair.trace = 0, None


def _rows(pairs: Sequence[FactorPair]) -> float | Tensor:
    """Return the rows of pairs of one family: one number for all, or `[n]` where the device has them."""
    rows = [pair.rows for pair in pairs]
    tensors = [each for each in rows if isinstance(each, Tensor)]
    return torch.stack(tensors) if tensors else rows[0]


class _Side:
    """Holds one factor of each of n pairs, and the sums of this step in a row; nothing where that is the identity.

    Attributes:
        factors: all of these factors, those of one shape next to one another.
        mass: the masses of all factors, `[n]`; their own stay as they are until `fold`.
    """

    def __init__(self, shapes: Sequence[Sequence[Factor | None]]) -> None:
        alike = [[factor for factor in of_shape if factor is not None] for of_shape in shapes]
        self._alike = [factors for factors in alike if factors]
        self.factors = [factor for factors in self._alike for factor in factors]
        if self.factors:
            self.mass = torch.stack([factor.mass for factor in self.factors])
            self._sample = torch.cat([_sums(factors) for factors in self._alike])

    def scale(self, scale: float | Tensor) -> None:
        """Multiply the sums by what `Factor.fold` takes, one number for all or `[n]`."""
        self._sample.mul_(self._of_elements(scale) if isinstance(scale, Tensor) else scale)
        self._sample = self._sample.to(self.factors[0].dtype)

    def is_finite(self) -> Tensor:
        """Return whether the sum of each factor is finite, `[n]`."""
        largest = [torch.linalg.vector_norm(sums, torch.inf, 1) for sums in self._by_shape(self._sample)]
        return torch.cat(largest).isfinite()

    def fold(self, mass: float | Tensor, decay: float, accept: Tensor) -> None:
        """Take the sums into the averages, as `Factor.fold` does; `mass` is one number, or `[n]` as `accept`."""
        gain = self._of_elements(gain_of(self.mass, mass, decay, accept).to(self._sample.dtype))
        before = torch.cat([factor.packed.flatten() for factor in self.factors])
        # A sample that is refused has no gain, and is perhaps not finite.
        after = torch.where(gain > 0, torch.lerp(before, self._sample, gain), before)
        parts = [part for of_shape in self._by_shape(after) for part in of_shape.unbind()]
        torch._foreach_copy_(
            [factor.packed for factor in self.factors],
            [part.view_as(factor.packed) for part, factor in zip(parts, self.factors, strict=True)],
        )
        torch._foreach_copy_([factor.mass for factor in self.factors], list(self.mass.unbind()))
        for factor in self.factors:
            factor.pending = None

    def _of_elements(self, numbers: Tensor) -> Tensor:
        """Return what each factor has, `[n]`, for each of its elements."""
        each = torch.split(numbers, [len(factors) for factors in self._alike])
        sizes = (factors[0].packed.numel() for factors in self._alike)
        return torch.cat([some.repeat_interleave(size) for some, size in zip(each, sizes, strict=True)])

    def _by_shape(self, elements: Tensor) -> list[Tensor]:
        """Return the elements of the factors of each shape, `[factors, elements of one]`, as views."""
        numbers = [sum(factor.packed.numel() for factor in factors) for factors in self._alike]
        each = zip(torch.split(elements, numbers), self._alike, strict=True)
        return [part.view(len(factors), -1) for part, factors in each]


def _sums(factors: Sequence[Factor]) -> Tensor:
    """Return the sums of this step of factors of one shape in a row, as their averages are packed."""
    sums = torch.cat([factor.pending for factor in factors if factor.pending is not None])
    return (pack_triangle(sums) if factors[0].structure is Structure.DENSE else sums).flatten()
