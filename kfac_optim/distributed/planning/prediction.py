"""Seconds of a step, from work laid on ranks and buckets: compute, and what communication is not hidden behind it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kfac_optim.distributed.planning.buckets import Payload, PlannedBucket
from kfac_optim.distributed.planning.costs import CostModel


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one step are those of the rank that takes longest at each stage.

    Attributes:
        forward: the forward of the model.
        backward: the backward, with the share of the statistics in a step.
        gradients: seconds of reducing gradients that backward does not hide.
        apply: preconditioning.
        preconditioned: sharing its results; of sharded gradients also bringing them together.
        parameters: gathering them, which nothing hides.
        votes: agreeing on what the step does, and how far it goes.
        sums: further seconds that backward does not hide at a step that refreshes, as factor sums are reduced too.
        refresh: the refresh of the rank with most to refresh.
        inverses: sharing them.
        status: telling one another traces before the refresh, and after it how it went.
        period: steps between refreshes.
    """

    forward: float
    backward: float
    gradients: float
    apply: float
    preconditioned: float
    parameters: float
    votes: float
    sums: float
    refresh: float
    inverses: float
    status: float
    period: int

    @property
    def shortest(self) -> float:
        """Return the seconds of a step that does not refresh."""
        computing = self.forward + self.backward + self.apply
        return computing + self.votes + self.gradients + self.preconditioned + self.parameters

    @property
    def longest(self) -> float:
        """Return the seconds of a step that refreshes."""
        return self.shortest + self.sums + self.refresh + self.inverses + self.status

    @property
    def mean(self) -> float:
        """Return the mean seconds of a step over the period."""
        return self.shortest + (self.longest - self.shortest) / self.period


@dataclass(frozen=True, slots=True)
class Compute:
    """Operations of one layer on one rank in one step."""

    forward: float
    backward: float


def finished(ready: Sequence[float], seconds: Sequence[float]) -> float:
    """Return when the last of some buckets is sent, one after the other: `c_b = max(c_{b−1}, ready_b) + T(b)`."""
    clock = 0.0
    for begin, duration in zip(ready, seconds, strict=True):
        clock = max(clock, begin) + duration
    return clock


def in_order_of_backward(buckets: Sequence[PlannedBucket]) -> list[PlannedBucket]:
    """Sort buckets of gradients and factor sums as they become ready, by their last layer in backward."""
    return sorted(buckets, key=lambda b: (-min(item.position for item in b.items), b.payload is not Payload.GRADIENTS))


def exposed(layers: Sequence[Compute], buckets: Sequence[PlannedBucket], cost: CostModel) -> float:
    """Return seconds of sending `buckets`, in this order, that backward does not hide."""
    ready, clock = [0.0] * len(layers), 0.0
    for position in reversed(range(len(layers))):
        clock += cost.computing(layers[position].backward)
        ready[position] = clock
    begins = [max(ready[item.position] for item in bucket.items) for bucket in buckets]
    left = max(0.0, finished(begins, [bucket.seconds for bucket in buckets]) - clock)
    return left + sum(bucket.later for bucket in buckets)


def sharing(buckets: Sequence[PlannedBucket]) -> float:
    """Return seconds of sending all buckets, on the rank in most of them: those of different groups go side by side."""
    by_group: defaultdict[range, float] = defaultdict(float)
    for bucket in buckets:
        by_group[bucket.members] += bucket.seconds
    by_rank: defaultdict[int, float] = defaultdict(float)
    for members, seconds in by_group.items():
        for rank in members:
            by_rank[rank] += seconds
    return max(by_rank.values(), default=0.0)


def predict(
    layers: Sequence[Compute],
    buckets: Mapping[Payload, Sequence[PlannedBucket]],
    *,
    refresh: float,
    apply: float,
    period: int,
    cost: CostModel,
) -> Seconds:
    """Return seconds of a step of a plan.

    Args:
        layers: the operations of each layer, in forward order.
        buckets: the buckets of each payload, in their order.
        refresh: operations of the rank with most to refresh.
        apply: operations of the rank with most to precondition.
        period: steps between refreshes.
        cost: the rates of operations and collectives.
    """
    gradients = exposed(layers, buckets[Payload.GRADIENTS], cost)
    both = in_order_of_backward([*buckets[Payload.GRADIENTS], *buckets[Payload.SUMS]])
    return Seconds(
        forward=cost.computing(sum(layer.forward for layer in layers)),
        backward=cost.computing(sum(layer.backward for layer in layers)),
        gradients=gradients,
        apply=cost.computing(apply),
        preconditioned=sum(
            sharing(buckets[payload]) for payload in (Payload.ROWS, Payload.PRECONDITIONED, Payload.DIRECTIONS)
        ),
        parameters=sharing(buckets[Payload.PARAMETERS]),
        votes=sharing(buckets[Payload.VOTES]) + sharing(buckets[Payload.SCALARS]),
        sums=exposed(layers, both, cost) - gradients,
        refresh=cost.solving(refresh),
        inverses=sharing(buckets[Payload.INVERSES]),
        status=sharing(buckets[Payload.TRACES]) + sharing(buckets[Payload.STATUS]),
        period=period,
    )
