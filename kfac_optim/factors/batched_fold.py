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
from kfac_optim.specs import Structure


def shared_by(pair: FactorPair) -> Hashable | None:
    """Return what pairs share that can be folded together; None for a pair that is folded alone."""
    if type(pair) is not FactorPair or pair.everywhere is not None or isinstance(pair.rows, Tensor) or pair.rows <= 0:
        return None
    sides = pair.a, pair.g
    if not all(side is None or _is_small(side) for side in sides):
        return None
    return pair.rows, pair.refused.device, *(side and (side.structure, side.dim, side.dtype) for side in sides)


def _is_small(factor: Factor) -> bool:
    plain = type(factor) is Factor and factor.structure in (Structure.DENSE, Structure.DIAGONAL)
    pending = factor.pending
    small = factor.groups == 1 and factor.packed.numel() <= SMALL
    return plain and small and pending is not None and len(pending) == 1


def fold_together(pairs: Sequence[FactorPair], loss_terms: float, decay: float, loss_scale: float) -> None:
    """Fold pairs that `shared_by` finds alike; see `FactorPair.fold`.

    Args:
        pairs: at least one, of which each has a factor.
        loss_terms: as there, a number.
        decay: as there.
        loss_scale: as there, a number.
    """
    rows = pairs[0].rows
    a, g = (_stacked([pair.a for pair in pairs]), _stacked([pair.g for pair in pairs]))
    finite = [_pending_is_finite(side) for side in (a, g) if side is not None]  # [n, 1] each
    accept = finite[0] if len(finite) == 1 else finite[0] & finite[1]
    if a is not None:
        a.fold(scale=1 / rows, mass=rows, decay=decay, accept=accept)
        _hand_back(a, [pair.a for pair in pairs])
    if g is not None:
        g.fold(scale=loss_terms / loss_scale**2, mass=loss_terms, decay=decay, accept=accept)
        _hand_back(g, [pair.g for pair in pairs])
    accept = accept.flatten()
    in_a_row = torch.stack([pair.refused_in_a_row for pair in pairs])
    in_a_row = torch.where(accept, 0, in_a_row + 1)
    torch._foreach_add_([pair.refused for pair in pairs], list((~accept).to(in_a_row.dtype).unbind()))
    torch._foreach_copy_([pair.refused_in_a_row for pair in pairs], list(in_a_row.unbind()))
    for pair in pairs:
        pair.rows, pair.trace = 0, None


def _stacked(factors: Sequence[Factor | None]) -> Factor | None:
    """Return one factor whose groups are the factors, each with a mass of its own, `[n, 1]`; None for the identity."""
    present = [factor for factor in factors if factor is not None]
    if not present:
        return None
    whole = copy.copy(present[0])
    whole.packed = torch.cat([factor.packed for factor in present])
    whole.mass = torch.stack([factor.mass for factor in present]).unsqueeze(-1)
    whole.pending = torch.cat([factor.pending for factor in present if factor.pending is not None])
    return whole


def _pending_is_finite(stack: Factor) -> Tensor:
    """Return `Factor.pending_is_finite` of each factor of a stack, `[n, 1]`."""
    assert stack.pending is not None
    dense = stack.structure is Structure.DENSE
    diagonal = stack.pending.diagonal(dim1=-2, dim2=-1) if dense else stack.pending
    return diagonal.isfinite().all(-1, keepdim=True)


def _hand_back(stack: Factor, factors: Sequence[Factor | None]) -> None:
    """Give each factor the average and mass that the stack has for it."""
    present = [factor for factor in factors if factor is not None]
    torch._foreach_copy_([factor.packed for factor in present], list(torch.split(stack.packed, 1)))
    torch._foreach_copy_([factor.mass for factor in present], list(stack.mass.flatten().unbind()))
    for factor in present:
        factor.pending = None
