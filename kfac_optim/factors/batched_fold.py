"""Small factors are folded in batches, as the fold of one takes longer to launch than to compute.

It is `FactorPair.fold` of each, bit for bit: `Factor.take` itself does the arithmetic, on factors of equal shapes that
are stacked; and what there is one number of for each factor is computed for all shapes at once.
"""

import copy
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor, gain_of
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.small_calls import SMALL
from kfac_optim.specs import Sketched

# On accelerators launches take longer than the work on larger factors: 4 MiB of float32.
_SMALL_THERE = 2**20

# Elements of the factors that are folded together at most: 256 MiB of float32.
_TOGETHER = 2**26


class Alike(NamedTuple):
    """Says which pairs of factors are folded together: those of one family, of which those of one shape are stacked."""

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
    masses = [side and side.mass.dtype for side in sides]
    shapes = [side and (side.structure, side.dim, side.groups, side.dtype) for side in sides]
    return Alike((rows, pair.refused.device, *masses), tuple(shapes))


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
        loss_terms: as there, a number.
        decay: as there.
        loss_scale: as there, a number.
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
    places = list(pairwise(accumulate((len(of_shape) for of_shape in shapes), initial=0)))
    a = _Side([[pair.a for pair in of_shape] for of_shape in shapes])
    g = _Side([[pair.g for pair in of_shape] for of_shape in shapes])
    rows = _rows(pairs)
    samples = []
    if a.stacks:
        mean = 1 / rows.clamp(min=1).to(a.mass.dtype) if isinstance(rows, Tensor) else 1 / rows
        samples.append((a, mean, rows))
    if g.stacks:
        used = (rows > 0).to(g.mass.dtype) if isinstance(rows, Tensor) else 1
        samples.append((g, loss_terms / loss_scale**2, loss_terms * used))
    finite = [side.is_finite(scale, places) for side, scale, _ in samples]  # [n] each
    accept = finite[0] if len(finite) == 1 else finite[0] & finite[1]
    for side, scale, mass in samples:
        side.fold(scale, mass, decay, accept, places)
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
    """Holds one factor of each of n pairs, those of one shape in a stack; nothing where that is the identity.

    Attributes:
        stacks: one factor for each shape, with the groups of all factors of that shape; their masses stay where they
            are.
        mass: of all factors, `[n]`.
    """

    def __init__(self, shapes: Sequence[Sequence[Factor | None]]) -> None:
        self._factors = [[factor for factor in of_shape if factor is not None] for of_shape in shapes]
        self._factors = [factors for factors in self._factors if factors]
        self.stacks = [_stacked(factors) for factors in self._factors]
        if self.stacks:
            self.mass = torch.stack([factor.mass for factors in self._factors for factor in factors])

    def is_finite(self, scale: float | Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Return `Factor.pending_is_finite` of each factor, `[n]`; the arguments are as of `fold`."""
        finite = []
        for stack, factors, (start, stop) in zip(self.stacks, self._factors, places, strict=True):
            of_groups = _of_groups(scale[start:stop], stack) if isinstance(scale, Tensor) else scale
            finite.append(stack.pending_is_finite(of_groups).view(len(factors), -1).all(-1))
        return torch.cat(finite)

    def fold(
        self,
        scale: float | Tensor,
        mass: float | Tensor,
        decay: float,
        accept: Tensor,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Do as `Factor.fold` does to each factor; all but `decay` and `places` is one number for all, or `[n]`.

        Args:
            scale: as there.
            mass: as there.
            decay: as there.
            accept: as there, `[n]`.
            places: where the factors of each shape lie among the n.
        """
        gain = gain_of(self.mass, mass, decay, accept)
        for stack, factors, (start, stop) in zip(self.stacks, self._factors, places, strict=True):
            of_shape = scale[start:stop] if isinstance(scale, Tensor) else scale
            stack.take(
                _of_groups(of_shape, stack) if isinstance(of_shape, Tensor) else of_shape,
                _of_groups(accept[start:stop], stack),
                _of_groups(gain[start:stop], stack),
            )
            if len(factors) > 1:
                parts = torch.split(stack.packed, stack.groups // len(factors))
                torch._foreach_copy_([factor.packed for factor in factors], list(parts))
        each = [factor for factors in self._factors for factor in factors]
        torch._foreach_copy_([factor.mass for factor in each], list(self.mass.unbind()))
        for factor in each:
            factor.pending = None


def _stacked(factors: Sequence[Factor]) -> Factor:
    """Return one factor with the averages and sums of all factors; of a single one those are its own."""
    whole = copy.copy(factors[0])
    if len(factors) > 1:
        whole.packed = torch.cat([factor.packed for factor in factors])
        whole.pending = torch.cat([factor.pending for factor in factors if factor.pending is not None])
    return whole


def _of_groups(numbers: Tensor, stack: Factor) -> Tensor:
    """Return what each factor of a stack has, `[n]`, for each of its groups, `[n · groups, 1]`."""
    return numbers.unsqueeze(1).expand(-1, stack.groups // len(numbers)).reshape(-1, 1)
