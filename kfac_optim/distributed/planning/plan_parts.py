"""What a plan says of one layer, one parameter, one payload and one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kfac_optim.distributed.planning.assignment import LayerPlace
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.specs import Part


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Plans one part of a layer's inverse.

    Attributes:
        part: what it costs and holds.
        owner: the rank that refreshes it.
        sums: words that each other rank sends to the owner before a refresh: packed moments and their masses.
    """

    part: Part
    owner: int
    sums: int

    def name_in(self, layer: str) -> str:
        """Return the name of the part among those of all layers."""
        return f"{layer} {self.part.name}".strip()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plans one covered layer.

    Attributes:
        name: the name of the layer.
        description: shapes and choices that ranks must agree on.
        position: its number in forward order, uncovered parameters counted too.
        words: the words of its gradient.
        apply: operations of one preconditioning.
        workers: ranks that precondition it.
        parts: the plans of its parts, in the order of `Inverse.parts`.
    """

    name: str
    description: str
    position: int
    words: int
    apply: float
    workers: range
    parts: tuple[PartPlan, ...]

    @property
    def owner(self) -> int:
        """Return the rank that preconditions it alone; -1 where several do."""
        return self.workers.start if len(self.workers) == 1 else -1

    @property
    def trace_words(self) -> int:
        """Count what its owners tell one another before a refresh: traces of both factors, each with its mass.

        0 where the parts have one owner, or need no traces of each other (`Part.traces`).
        """
        if len({part.owner for part in self.parts}) == 1 or not any(part.part.traces for part in self.parts):
            return 0
        return sum(part.part.traces + 1 for part in self.parts)


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """Plans one uncovered parameter: the rank that updates it, or None if all do."""

    name: str
    position: int
    words: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Says what all ranks together send of one payload, each time it is sent."""

    payload: Payload
    words: int
    itemsize: int
    period: int
    """Steps from one time to the next."""

    @property
    def words_per_step(self) -> Fraction:
        return Fraction(self.words, self.period)

    @property
    def bytes_per_step(self) -> Fraction:
        return self.words_per_step * self.itemsize


@dataclass(frozen=True, slots=True)
class Memory:
    """Counts the bytes on one rank, besides the model and its gradients.

    Attributes:
        sums: averages of its own since the last refresh, packed.
        averages: running averages of the parts that it refreshes, packed.
        inverses: the inverses of the layers that it preconditions or refreshes.
        buffers: packed factor sums on their way.
        momentum: the momentum of the parameters that it updates.
    """

    sums: int
    averages: int
    inverses: int
    buffers: int
    momentum: int

    @property
    def total(self) -> int:
        return self.sums + self.averages + self.inverses + self.buffers + self.momentum


def part_plans(parts: Sequence[Part], where: LayerPlace, mass: int) -> tuple[PartPlan, ...]:
    """Return the plans of the parts of a layer; a mass takes so many words."""
    return tuple(
        PartPlan(part, where.owners[part.name], packed_words(part) + mass * sum(factor.masses for factor in part.sums))
        for part in parts
    )


def packed_words(part: Part) -> int:
    """Return the words of the running averages of a part, packed."""
    return sum(factor.packed for factor in part.sums)


def with_owner(workers: range, owner: int) -> range:
    """Return the group in which an owner sends to `workers`; if the owner is not among them there is only one."""
    if owner in workers:
        return workers
    low, high = sorted((workers.start, owner))
    return range(low, high + 1, high - low)
