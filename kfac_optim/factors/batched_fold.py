"""Small factors of equal shapes are folded in one batch, as the fold of one takes longer to launch than to compute.

It is `FactorPair.fold` of each, bit for bit; `Factor.fold` itself does the arithmetic, on factors that are stacked.
"""

import copy
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.small_calls import SMALL
from kfac_optim.specs import Sketched, Structure

# On accelerators launches take longer than the work on larger factors: 4 MiB of float32.
_SMALL_THERE = 2**20

# Elements of the factors that are put into one stack at most: 256 MiB of float32.
_TOGETHER = 2**26


def shared_by(pair: FactorPair) -> Hashable | None:
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
    return rows, pair.refused.device, *(side and (side.structure, side.dim, side.groups, side.dtype) for side in sides)


def _is_small(factor: Factor) -> bool:
    pending = factor.pending
    if type(factor) is not Factor or factor.mass.dim() > 0 or pending is None or len(pending) != factor.groups:
        return False
    if factor.device.type != "cpu":
        return factor.packed.numel() <= _SMALL_THERE
    return not isinstance(factor.structure, Sketched) and factor.packed.numel() <= SMALL


def most_together(pair: FactorPair) -> int:
    """Return how many pairs to fold together at most, of which one is given."""
    return max(1, _TOGETHER // max(1, *(side.packed.numel() for side in (pair.a, pair.g) if side is not None)))


def fold_together(pairs: Sequence[FactorPair], loss_terms: float, decay: float, loss_scale: float) -> None:
    """Fold pairs that `shared_by` finds alike; see `FactorPair.fold`.

    Args:
        pairs: at least one, of which each has a factor.
        loss_terms: as there, a number.
        decay: as there.
        loss_scale: as there, a number.
    """
    a, g = (_stacked([pair.a for pair in pairs]), _stacked([pair.g for pair in pairs]))
    finite = [_pending_is_finite(side, len(pairs)) for side in (a, g) if side is not None]  # [n] each
    accept = finite[0] if len(finite) == 1 else finite[0] & finite[1]
    rows = _rows(pairs)
    if a is not None:
        mean = 1 / rows.clamp(min=1).to(a.mass.dtype) if isinstance(rows, Tensor) else 1 / rows
        _fold(a, mean, rows, decay, accept)
        _hand_back(a, [pair.a for pair in pairs])
    if g is not None:
        used = (rows > 0).to(g.mass.dtype) if isinstance(rows, Tensor) else 1
        _fold(g, loss_terms / loss_scale**2, loss_terms * used, decay, accept)
        _hand_back(g, [pair.g for pair in pairs])
    in_a_row = torch.stack([pair.refused_in_a_row for pair in pairs])
    in_a_row = torch.where(accept, 0, in_a_row + 1)
    torch._foreach_add_([pair.refused for pair in pairs], list((~accept).to(in_a_row.dtype).unbind()))
    torch._foreach_copy_([pair.refused_in_a_row for pair in pairs], list(in_a_row.unbind()))
    for pair in pairs:
        pair.rows, pair.trace = 0, None


def _rows(pairs: Sequence[FactorPair]) -> float | Tensor:
    """Return the rows of pairs that are alike: one number for all, or `[n]` where the device has them."""
    rows = [pair.rows for pair in pairs]
    tensors = [each for each in rows if isinstance(each, Tensor)]
    return torch.stack(tensors) if tensors else rows[0]


def _stacked(factors: Sequence[Factor | None]) -> Factor | None:
    """Return one factor with the groups of all factors, each with its factor's mass; None for the identity.

    The mass is `[n · groups, 1]`.
    """
    present = [factor for factor in factors if factor is not None]
    if not present:
        return None
    whole = copy.copy(present[0])
    whole.packed = torch.cat([factor.packed for factor in present])
    whole.mass = _of_groups(torch.stack([factor.mass for factor in present]), whole)
    whole.pending = torch.cat([factor.pending for factor in present if factor.pending is not None])
    return whole


def _of_groups(numbers: Tensor, stack: Factor) -> Tensor:
    """Return what each factor of a stack has, `[n]`, for each of its groups, `[n · groups, 1]`."""
    return numbers.unsqueeze(1).expand(-1, stack.groups // len(numbers)).reshape(-1, 1)


def _fold(stack: Factor, scale: float | Tensor, mass: float | Tensor, decay: float, accept: Tensor) -> None:
    """Fold a stack; all but `decay` is one number for all factors, or `[n]`."""
    stack.fold(
        scale=_of_groups(scale, stack) if isinstance(scale, Tensor) else scale,
        mass=_of_groups(mass, stack) if isinstance(mass, Tensor) else mass,
        decay=decay,
        accept=_of_groups(accept, stack),
    )


def _pending_is_finite(stack: Factor, factors: int) -> Tensor:
    """Return `Factor.pending_is_finite` of each factor of a stack, `[factors]`."""
    pending = stack.pending
    assert pending is not None
    if isinstance(stack.structure, Sketched):
        pending = pending[:, -1]
    elif stack.structure is Structure.DENSE:
        pending = pending.diagonal(dim1=-2, dim2=-1)
    return pending.isfinite().reshape(factors, -1).all(-1)


def _hand_back(stack: Factor, factors: Sequence[Factor | None]) -> None:
    """Give each factor the average and mass that the stack has for it."""
    present = [factor for factor in factors if factor is not None]
    groups = present[0].groups
    torch._foreach_copy_([factor.packed for factor in present], list(torch.split(stack.packed, groups)))
    torch._foreach_copy_([factor.mass for factor in present], list(stack.mass[::groups].flatten().unbind()))
    for factor in present:
        factor.pending = None
