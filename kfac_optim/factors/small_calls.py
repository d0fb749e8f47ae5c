"""Rows of small calls wait until the step, where layers of equal shape take their second moments in one batch.

To launch the products of a small layer takes several times as long as to compute them.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import FewRows
from kfac_optim.specs import Structure

# Elements of an average below which a launch takes longer than to compute with it or to copy it.
SMALL = 2**14


class SmallCall(NamedTuple):
    """Names the pair of factors that the rows of a call are of."""

    pair: FactorPair
    rows: FewRows


def takes_few_rows(pair: FactorPair | None) -> bool:
    """Return whether a pair of factors is one that `add_moments` serves: small dense ones of one group."""
    return type(pair) is FactorPair and all(_is_small(side) for side in (pair.a, pair.g))


def _is_small(factor: Factor | None) -> bool:
    plain = type(factor) is Factor and factor.structure is Structure.DENSE and factor.groups == 1
    return factor is not None and plain and factor.packed.numel() <= SMALL and factor.device.type == "cpu"


def add_moments(calls: Sequence[SmallCall]) -> None:
    """Add the second moments of calls to the sums of their pairs, as `FactorPair.accumulate` adds those of one."""
    alike = defaultdict[Hashable, list[SmallCall]](list)
    for call in calls:
        a, g, constant = call.rows
        alike[a.shape, g.shape, constant, a.dtype].append(call)
    for equal in alike.values():
        a = torch.stack([call.rows.a for call in equal])
        g = torch.stack([call.rows.g for call in equal])
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
