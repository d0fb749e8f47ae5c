"""Parcels that go from their sources to their targets, on paper: what each rank sends, and gets. Sends nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kfac_optim.distributed.communication.layout_checks import check_elements, check_layout, check_rank
from kfac_optim.distributed.communication.message import Collective, Message
from kfac_optim.distributed.communication.segments import Segments, sections


@dataclass(frozen=True, slots=True)
class Parcel:
    """Describes one tensor in a `ShareBucket`.

    Attributes:
        name: names the layer, and what of it this is: for messages, and in results.
        elements: how many.
        source: rank that has it.
        targets: ranks that get it, ascending. The source may be one of them: it then gets what the others get, its
            own numbers in the dtype of the payload.
    """

    name: str
    elements: int
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class ShareBucket:
    """Parcels that go from their sources to their targets in one collective.

    That is an all-gather where all ranks are targets, a broadcast where they have one source, and the way of row
    shards to the owner of a matrix and back.

    Attributes:
        name: a name for messages and traces.
        parcels: one or more; names differ.
        world_size: number of ranks.
        payload: dtype on the wire, and of results.
        segmented: whether it goes by segments, see [Note: the way by segments], which only what goes to all ranks can;
            or from each source to its targets directly.

    Raises:
        ValueError: not a possible layout, or one by segments of which some rank needs only a part.
    """

    name: str
    parcels: tuple[Parcel, ...]
    world_size: int
    payload: torch.dtype = torch.float32
    segmented: bool = False

    def __post_init__(self) -> None:
        where = check_layout(self.name, self.names, self.payload)
        for parcel in self.parcels:
            check_elements(where, parcel.name, parcel.elements)
            for rank in (parcel.source, *parcel.targets):
                check_rank(f"the source and the targets of {parcel.name!r} in {where}", rank, self.world_size)
            if parcel.targets != tuple(sorted(set(parcel.targets))):
                raise ValueError(
                    f"kfac_optim: the targets of {parcel.name!r} in {where} must ascend, got {parcel.targets}."
                )
            if self.segmented and len({parcel.source, *parcel.targets}) < self.world_size:
                raise ValueError(
                    f"kfac_optim: {where} goes by segments, which bring all of it to all ranks, but {parcel.name!r} is "
                    f"for ranks {parcel.targets}; send it directly."
                )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Give the names of the parcels."""
        return tuple(parcel.name for parcel in self.parcels)

    @cached_property
    def is_even_gather(self) -> bool:
        """Return whether all ranks have equally much, and all of it goes to all."""
        everyone = tuple(range(self.world_size))
        return len(set(self.owned_elements)) == 1 and all(parcel.targets == everyone for parcel in self.parcels)

    def sent_by(self, rank: int) -> list[list[Parcel]]:
        """Return what `rank` sends to each rank, in order."""
        own = [parcel for parcel in self.parcels if parcel.source == rank]
        return [[parcel for parcel in own if target in parcel.targets] for target in range(self.world_size)]

    def received_by(self, rank: int) -> list[list[Parcel]]:
        """Return what `rank` gets from each rank, in order."""
        own = [parcel for parcel in self.parcels if rank in parcel.targets]
        return [[parcel for parcel in own if parcel.source == source] for source in range(self.world_size)]

    @cached_property
    def row(self) -> tuple[Parcel, ...]:
        """Return the parcels by their sources, as they lie in a row that goes by segments."""
        return tuple(sorted(self.parcels, key=lambda parcel: parcel.source))

    @cached_property
    def owned_elements(self) -> tuple[int, ...]:
        """Return the elements that each rank has."""
        sizes = [0] * self.world_size
        for parcel in self.parcels:
            sizes[parcel.source] += parcel.elements
        return tuple(sizes)

    @cached_property
    def segments(self) -> Segments:
        """Return the equal segments of all parcels in a row."""
        return sections(self.owned_elements)

    def messages(self, rank: int) -> tuple[Message, ...]:
        """Return the collectives of one launch, in their order, as `rank` takes part in them."""
        size, ranks = self.payload.itemsize, self.world_size
        if self.segmented:
            segments = self.segments
            to, from_ = segments.from_segments(rank), segments.for_owners(rank)
            gathered = (segments.length,) * ranks
            return (
                Message(self.name, Collective.ALL_TO_ALL, rank, to, from_, size),
                Message(self.name, Collective.ALL_GATHER, rank, gathered, gathered, size),
            )
        to, from_ = (tuple(map(_elements, parcels)) for parcels in (self.sent_by(rank), self.received_by(rank)))
        kind = Collective.ALL_GATHER if self.is_even_gather else Collective.ALL_TO_ALL
        return (Message(self.name, kind, rank, to, from_, size),)

    @property
    def moved_bytes(self) -> int:
        """Return what all ranks together send in one launch."""
        if self.segmented:
            ranks = self.world_size
            moved = self.segments.crossing() + ranks * (ranks - 1) * self.segments.length
        else:
            moved = sum(p.elements * (len(p.targets) - (p.source in p.targets)) for p in self.parcels)
        return moved * self.payload.itemsize


def _elements(parcels: Sequence[Parcel]) -> int:
    return sum(parcel.elements for parcel in parcels)
