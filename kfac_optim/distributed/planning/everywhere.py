"""Layers that are too large for one owner: all ranks hold their inverse, precondition and update them.

[Note: layers without an owner] Under `Sharded` a layer's gradient goes to its owner over that rank's link, and its
parameters come back over it; where it is larger than what the others own of the rest, they wait. So the largest layers
go as SGD sends them: their gradient is averaged on all ranks, and all do the same with it. That is exact, needs no more
bytes than SGD's and the inverse once per refresh, and takes no longer than the owner took. But it takes as much memory
on every rank as on the owner: so these layers have at most twice the elements of the largest.
"""

import math
from collections.abc import Sequence

from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.plan_options import PlanOptions
from kfac_optim.distributed.planning.planned_model import Covered, Uncovered

# On fewer ranks each layer has an owner: what one owns is large there, and goes directly as a rule.
FEWEST = 8

# What all ranks work on has at most so many times the elements of the largest layer.
LARGEST = 2.0


def on_all_ranks(
    model: Sequence[Covered | Uncovered], ranks: int, options: PlanOptions, cost: CostModel
) -> frozenset[str]:
    """Return the names of the largest layers and other parameters, if a step is shorter where all ranks work on them.

    Args:
        model: all of them.
        ranks: how many there are.
        options: numbers that the plan depends on.
        cost: the rates of the machines.
    """
    if ranks < FEWEST:
        return frozenset()
    order = sorted(model, key=lambda each: (-each.words, each.name))
    applies = [_apply(each) for each in order]
    total = left = sum(each.words for each in order)
    itemsize, period = options.parameter_dtype.itemsize, options.inverse_update_period
    best, chosen, applied, inverses = math.inf, 0, 0.0, 0.0
    for number, each in enumerate(order):
        # What has an owner takes about this long: both ways on the busiest link, which is filled up to the largest
        # (Graham 1969), and to precondition. The inverses of the rest go to all ranks.
        seconds = (2 * itemsize * (left / ranks + each.words) + inverses / period) / cost.bandwidth
        seconds += cost.computing(applied + max(max(applies[number:]), sum(applies[number:]) / ranks))
        if seconds < best:
            best, chosen = seconds, number
        if total - left + each.words > LARGEST * order[0].words:
            break
        left, applied = left - each.words, applied + applies[number]
        inverses += _sent(each) * options.inverse_dtype.itemsize
    return frozenset(each.name for each in order[:chosen])


def _apply(each: Covered | Uncovered) -> float:
    """Return the operations of one preconditioning."""
    return each.inverse.flops(each.spec.by_blocks()).apply if isinstance(each, Covered) else 0.0


def _sent(each: Covered | Uncovered) -> int:
    """Return the words of an inverse as it is sent."""
    return sum(part.sent for part in each.inverse.parts(each.spec.by_blocks())) if isinstance(each, Covered) else 0
