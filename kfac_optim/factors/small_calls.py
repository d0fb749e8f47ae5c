"""Rows of small calls wait, until the step at the latest, for layers of equal shape to take their moments in one batch.

To launch the products of a small layer takes several times as long as to compute them: on a host of one whose factors
have some thousand elements, on an accelerator of nearly all.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import FewRows
from kfac_optim.factors.second_moments import active_rows, gram, on_host, weighed
from kfac_optim.specs import Sketched, Structure

# Elements of an average below which a launch takes longer than to compute with it or to copy it.
SMALL = 2**14

# Elements of rows, or of moments, that an accelerator has in one batch: 256 MiB of float32.
_TOGETHER = 2**26


class SmallCall(NamedTuple):
    """Names the pair of factors that the rows of a call are of."""

    pair: FactorPair
    rows: FewRows


def takes_few_rows(pair: FactorPair | None) -> bool:
    """Return whether `add_moments` serves a pair of factors: they are of one group, and on a host small and dense."""
    return type(pair) is FactorPair and all(_is_served(side) for side in (pair.a, pair.g))


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
        if on_host(equal[0].rows.g):
            _add_on_host(equal)
            continue
        most = _most_together(equal[0])
        for start in range(0, len(equal), most):
            _add_there(equal[start : start + most])


def _shape(call: SmallCall) -> Hashable:
    """Return what calls share whose moments can be computed in one batch."""
    a, g, *_ = call.rows
    factors = [(side.structure, side.dtype) for side in (call.pair.a, call.pair.g) if side is not None]
    return a.shape, g.shape, a.dtype, g.dtype, a.device, call.rows.constant, call.rows.weight, *factors


def _add_on_host(equal: Sequence[SmallCall]) -> None:
    a, g = _stacked(equal)
    if (constant := equal[0].rows.constant) is not None:
        a = F.pad(a, (0, 1), value=constant)
    active = g[..., 0] != 0  # in most layers one feature shows already that all rows count
    if not bool(active.all()):
        active = g.abs().amax(-1) != 0
        a = torch.where(active.unsqueeze(-1), a, 0)
    counts: list[int] = active.sum(1).tolist()
    moments = zip(torch.split(a.mT @ a, 1), torch.split(g.mT @ g, 1), strict=True)
    for call, count, (a_moment, g_moment) in zip(equal, counts, moments, strict=True):
        if count > 0:
            call.pair.add(count, a_moment, g_moment)


def _add_there(equal: Sequence[SmallCall]) -> None:
    """Add moments on an accelerator, which is not asked how many rows count."""
    pair, (_, _, constant, weight, _) = equal[0]
    assert pair.a is not None
    assert pair.g is not None
    a, g = (rows.unsqueeze(2) for rows in _stacked(equal))
    active = active_rows(g, by_group=True)
    counts: Tensor = active.sum((1, 2))
    a_moments = gram(a.to(pair.a.dtype), pair.a.structure, active, constant=constant)
    g_moments = gram(g.to(pair.g.dtype), pair.g.structure)
    if weight != 1:
        counts = weighed(counts, weight, pair.a.dtype)
        a_moments, g_moments = a_moments.mul_(weight), g_moments.mul_(weight)
    each = zip(equal, counts.unbind(), torch.split(a_moments, 1), torch.split(g_moments, 1), strict=True)
    for call, count, a_moment, g_moment in each:
        call.pair.add(count, a_moment, g_moment)


def _stacked(equal: Sequence[SmallCall]) -> tuple[Tensor, Tensor]:
    return torch.stack([call.rows.a for call in equal]), torch.stack([call.rows.g for call in equal])


def _most_together(call: SmallCall) -> int:
    """Return how many calls that are alike to compute with at a time."""
    sizes = [call.rows.a.numel(), call.rows.g.numel()]
    sizes += [side.dim**2 for side in (call.pair.a, call.pair.g) if side and side.structure is Structure.DENSE]
    return max(1, _TOGETHER // max(sizes))
