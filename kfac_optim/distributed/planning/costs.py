"""How long operations and collectives take: the model by which plans are made."""

import math
from dataclasses import dataclass, replace

from kfac_optim.distributed.communication.message import Collective
from kfac_optim.utils.validation import check_integer, check_number


@dataclass(frozen=True)
class CostModel:
    """Rates of the machines a plan is for, given or measured. All ranks must plan with the same.

    With P ranks, α the latency, β the inverse of the bandwidth and S bytes that each rank gives or is to get, a
    reduce-scatter or an all-gather by halving or doubling takes `⌈log₂P⌉α + (P−1)/P·Sβ` and an all-reduce both
    (Thakur, Rabenseifner & Gropp 2005, §4). An all-to-all in which the busiest rank moves S bytes and the mean one M
    takes `(P−1)α + (P−1)/P·Sβ` pair by pair, or, where messages are short, `⌈log₂P⌉(α + M/2·β) + (P−1)/P·(S−M)β` by way
    of others (Bruck et al. 1997; what one rank has beyond the mean comes to it by a binomial tree), whichever is less.
    Contention is not in it: `bandwidth` is what a rank has while all others send too. Of topology it knows nodes, where
    it is told: what only ranks of one node exchange goes at `bandwidth_in_node`.

    Args:
        flop_rate: floating-point operations per second of large matrix products on one rank.
        bandwidth: bytes per second that a rank sends, while it receives as many.
        latency: seconds before the first byte of a message arrives.
        ranks_per_node: how many neighbouring ranks are on one machine: then plans keep what they can from going between
            machines. None: it is not known.
        bandwidth_in_node: bytes per second, as `bandwidth`, between ranks of one machine; None is `bandwidth`.
        solver_rate: operations per second, as `flop_rate`, of those that `Inverse.flops` counts for a refresh:
            factorisations are slower than products on accelerators. None is `flop_rate`.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a rate is not above 0, or the latency below 0.
    """

    flop_rate: float
    bandwidth: float
    latency: float = 0.0
    solver_rate: float | None = None
    ranks_per_node: int | None = None
    bandwidth_in_node: float | None = None

    def __post_init__(self) -> None:
        check_number("flop_rate of CostModel", self.flop_rate, above=0)
        check_number("bandwidth of CostModel", self.bandwidth, above=0)
        check_number("latency of CostModel", self.latency, at_least=0)
        if self.solver_rate is not None:
            check_number("solver_rate of CostModel (None is flop_rate)", self.solver_rate, above=0)
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node of CostModel (None is not known)", self.ranks_per_node)
        if self.bandwidth_in_node is not None:
            check_number("bandwidth_in_node of CostModel (None is bandwidth)", self.bandwidth_in_node, above=0)

    def among(self, ranks: range) -> "CostModel":
        """Return the rates among these ranks alone: those within a node, if all of them are on one."""
        size = self.ranks_per_node
        if size is None or self.bandwidth_in_node is None or ranks[0] // size != ranks[-1] // size:
            return self
        return replace(self, bandwidth=self.bandwidth_in_node)

    def computing(self, flops: float) -> float:
        """Return seconds of matrix products of so many operations."""
        return flops / self.flop_rate

    def solving(self, flops: float) -> float:
        """Return seconds of a refresh of so many operations."""
        return flops / (self.solver_rate or self.flop_rate)

    def communicating(self, collective: Collective, size: float, ranks: int, mean: float | None = None) -> float:
        """Return seconds of one collective.

        Args:
            collective: the operation.
            size: bytes of the whole: of the tensor reduced, scattered or gathered; for an all-to-all what the busiest
                rank sends or gets in all, its own share included.
            ranks: how many ranks the group has; one has nothing to send.
            mean: what ranks send on average in an all-to-all; None is as much as the busiest.
        """
        check_integer("ranks", ranks)
        if ranks == 1:
            return 0.0
        rounds, crossing = math.ceil(math.log2(ranks)), size * (ranks - 1) / ranks / self.bandwidth
        if collective is Collective.ALL_TO_ALL:
            even = size if mean is None else mean
            relayed = rounds * (self.latency + even / 2 / self.bandwidth)
            relayed += (size - even) * (ranks - 1) / ranks / self.bandwidth
            return min((ranks - 1) * self.latency + crossing, relayed)
        return (rounds * self.latency + crossing) * (2 if collective is Collective.ALL_REDUCE else 1)
