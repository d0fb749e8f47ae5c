"""Rows of small calls wait, until the step at the latest, for layers of equal shape to take their moments in one batch.

To launch the products of a small layer takes several times as long as to compute them. On a host a layer is small if
its factors have some thousand elements; on an accelerator nearly all layers are.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import FewRows, UnitRows
from kfac_optim.factors.second_moments import active_rows, gram, on_host, weighed
from kfac_optim.specs import Sketched, Structure

# Elements of an average below which a launch takes longer than to compute with it or to copy it.
SMALL = 2**14

# Elements of rows, or of moments, that an accelerator has in one batch: 256 MiB of float32.
_TOGETHER = 2**26


class SmallCall(NamedTuple):
    """Names the pair of factors that the rows of a call are of."""

    pair: FactorPair
    rows: FewRows | UnitRows


def takes_few_rows(pair: FactorPair | None) -> bool:
    """Return whether `add_moments` serves a pair of factors, which on a host are small and dense."""
    if type(pair) is not FactorPair:
        return False
    if pair.a is None:
        return type(pair.g) is Factor and pair.g.mass.dim() == 0 and not on_host(pair.g.packed)
    return all(_is_served(side) for side in (pair.a, pair.g))


def _is_served(factor: Factor | None) -> bool:
    if type(factor) is not Factor or factor.groups > 1:
        return False
    if on_host(factor.packed):
        return factor.structure is Structure.DENSE and factor.packed.numel() <= SMALL
    return factor.structure is Structure.DENSE or isinstance(factor.structure, Sketched)


def add_moments(calls: Sequence[SmallCall]) -> None:
    """Add the second moments of calls to the sums of their pairs, as `FactorPair.accumulate` adds those of one."""
    alike = defaultdict[Hashable, list[SmallCall]](list)
    for call in calls:
        alike[_shape(call)].append(call)
    for equal in alike.values():
        most = max(1, _TOGETHER // _size(equal[0]))
        for start in range(0, len(equal), most):
            some = equal[start : start + most]
            _adder(some[0].rows)([call.pair for call in some], [call.rows for call in some])


def _adder(rows: FewRows | UnitRows) -> Callable[[Sequence[FactorPair], Sequence[Any]], None]:
    """Return what adds the moments of calls that are alike to their pairs."""
    if isinstance(rows, UnitRows):
        return _add_units
    return _add_on_host if on_host(rows.g) else _add_there


def _shape(call: SmallCall) -> Hashable:
    """Return what calls share whose moments can be computed in one batch."""
    factors = [(side.structure, side.dtype) for side in (call.pair.a, call.pair.g) if side is not None]
    if isinstance(call.rows, UnitRows):
        return call.rows.key, *factors
    a, g, constant, weight, _ = call.rows
    return a.shape, g.shape, a.dtype, g.dtype, a.device, constant, weight, *factors


def _size(call: SmallCall) -> int:
    """Return how many elements the largest of the tensors has that are made of one call."""
    if isinstance(call.rows, UnitRows):
        return call.rows.numel
    sides = [side for side in (call.pair.a, call.pair.g) if side is not None and side.structure is Structure.DENSE]
    return max(call.rows.a.numel(), call.rows.g.numel(), *(side.dim**2 for side in sides))


def _add_on_host(pairs: Sequence[FactorPair], rows: Sequence[FewRows]) -> None:
    a, g = _stacked(rows)
    if (constant := rows[0].constant) is not None:
        a = F.pad(a, (0, 1), value=constant)
    active = g[..., 0] != 0  # in most layers one feature shows already that all rows count
    if not bool(active.all()):
        active = g.abs().amax(-1) != 0
        a = torch.where(active.unsqueeze(-1), a, 0)
    counts: list[int] = active.sum(1).tolist()
    moments = zip(torch.split(a.mT @ a, 1), torch.split(g.mT @ g, 1), strict=True)
    for pair, count, (a_moment, g_moment) in zip(pairs, counts, moments, strict=True):
        if count > 0:
            pair.add(count, a_moment, g_moment)


def _add_there(pairs: Sequence[FactorPair], rows: Sequence[FewRows]) -> None:
    """Add moments on an accelerator, which is not asked how many rows count."""
    pair, (_, _, constant, weight, _) = pairs[0], rows[0]
    assert pair.a is not None
    assert pair.g is not None
    a, g = (side.unsqueeze(2) for side in _stacked(rows))
    active = active_rows(g, by_group=True)
    counts: Tensor = active.sum((1, 2))
    a_moments = gram(a.to(pair.a.dtype), pair.a.structure, active, constant=constant)
    g_moments = gram(g.to(pair.g.dtype), pair.g.structure)
    if weight != 1:
        counts = weighed(counts, weight, pair.a.dtype)
        a_moments, g_moments = a_moments.mul_(weight), g_moments.mul_(weight)
    each = zip(pairs, counts.unbind(), torch.split(a_moments, 1), torch.split(g_moments, 1), strict=True)
    for of_call, count, a_moment, g_moment in each:
        of_call.add(count, a_moment, g_moment)


def _add_units(pairs: Sequence[FactorPair], rows: Sequence[UnitRows]) -> None:
    """Add moments of layers whose `A` is the identity."""
    g, first = pairs[0].g, rows[0]
    assert g is not None
    moments, used = first.output_moments(rows, g.structure)
    moments, counts = moments.mul_(first.weight).to(g.dtype), used * first.count
    if first.weight != 1:
        counts = weighed(counts, first.weight, g.dtype)
    for pair, count, moment in zip(pairs, counts.unbind(), torch.split(moments, g.groups), strict=True):
        pair.add(count, None, moment)


def _stacked(rows: Sequence[FewRows]) -> tuple[Tensor, Tensor]:
    return torch.stack([each.a for each in rows]), torch.stack([each.g for each in rows])
