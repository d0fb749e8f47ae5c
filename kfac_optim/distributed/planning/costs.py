"""How long operations and collectives take: the model by which plans are made."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kfac_optim.utils.validation import check_integer, check_number


class Collective(Enum):
    """Names an operation of a whole process group."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"


@dataclass(frozen=True)
class CostModel:
    """Rates of the machines a plan is for, given or measured. All ranks must plan with the same.

    With P ranks, α the latency, β the inverse of the bandwidth and S bytes that each rank gives or is to get, an
    all-reduce by a ring takes `2(P−1)α + 2(P−1)/P·Sβ` (Patarasuk & Yuan 2009); reduce-scatter, all-gather and
    all-to-all `(P−1)α + (P−1)/P·Sβ`; broadcast and reduce by a pipelined tree `⌈log₂P⌉α + Sβ`. Topology and contention
    are not in it.

    Args:
        flop_rate: floating-point operations per second of large matrix products on one rank.
        bandwidth: bytes per second that a rank sends, while it receives as many.
        latency: seconds before the first byte of a message arrives.
        solver_rate: as `flop_rate`, of the operations that `Inverse.flops` counts for a refresh: factorisations are
            slower than products on accelerators. None is `flop_rate`.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a rate is not above 0, or the latency below 0.
    """

    flop_rate: float
    bandwidth: float
    latency: float = 0.0
    solver_rate: float | None = None

    def __post_init__(self) -> None:
        check_number("flop_rate of CostModel", self.flop_rate, above=0)
        check_number("bandwidth of CostModel", self.bandwidth, above=0)
        check_number("latency of CostModel", self.latency, at_least=0)
        if self.solver_rate is not None:
            check_number("solver_rate of CostModel (None is flop_rate)", self.solver_rate, above=0)

    def computing(self, flops: float) -> float:
        """Return seconds of matrix products of so many operations."""
        return flops / self.flop_rate

    def solving(self, flops: float) -> float:
        """Return seconds of a refresh of so many operations."""
        return flops / (self.solver_rate or self.flop_rate)

    def communicating(self, collective: Collective, size: float, ranks: int) -> float:
        """Return seconds of one collective.

        Args:
            collective: which.
            size: bytes of the whole: of the tensor reduced, broadcast, scattered or gathered; for an all-to-all what
                each rank sends in all, its own share included.
            ranks: of the group; one has nothing to send.
        """
        check_integer("ranks", ranks)
        if ranks == 1:
            return 0.0
        if collective in (Collective.BROADCAST, Collective.REDUCE):
            return math.ceil(math.log2(ranks)) * self.latency + size / self.bandwidth
        rounds = 2 if collective is Collective.ALL_REDUCE else 1
        return rounds * (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    def all_reducing(self, size: float, ranks: int) -> tuple[Collective, float]:
        """Return the quicker way to sum `size` bytes on all ranks: a ring, or for many ranks a tree up and down.

        Returns:
            The collective as it is called, and its seconds.
        """
        ring = self.communicating(Collective.ALL_REDUCE, size, ranks)
        trees = sum(self.communicating(tree, size, ranks) for tree in (Collective.REDUCE, Collective.BROADCAST))
        return Collective.ALL_REDUCE, min(ring, trees)

    def rooted(self, tree: Collective, shares: Iterable[float], ranks: int) -> tuple[Collective, float]:
        """Return the quicker way to bring shares to owners (`tree` is a reduce), or from them to all (a broadcast).

        Either one all-to-all, which takes as long as the largest share, or one tree for each. Trees follow on each
        other's heels: beyond the first each costs one latency, not its whole depth.

        Args:
            tree: `Collective.REDUCE` or `Collective.BROADCAST`.
            shares: bytes of each owner; of owners without any none.
            ranks: of the group.

        Returns:
            The collective, and its seconds, those of all trees together.
        """
        shares = list(shares)
        direct = self.communicating(Collective.ALL_TO_ALL, ranks * max(shares, default=0.0), ranks)
        trees = self.communicating(tree, sum(shares), ranks) + max(len(shares) - 1, 0) * self.latency
        return (Collective.ALL_TO_ALL, direct) if direct < trees else (tree, trees)
