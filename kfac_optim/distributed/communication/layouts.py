"""What is sent together, on paper: layouts of buckets, what a rank gives, what an owner gets. Sends nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.distributed.communication.layout_checks import check_elements, check_layout, check_rank
from kfac_optim.distributed.communication.message import Collective, Message
from kfac_optim.distributed.communication.segments import Segments, sections, splits


@dataclass(frozen=True, slots=True)
class Slot:
    """Describes one tensor in a `ReduceBucket`.

    Attributes:
        name: names the layer, and what of it this is: for messages, and to report it.
        elements: how many; those of a packed triangle for a symmetric matrix (`linalg.pack_triangle`).
        owner: rank that gets the sum.
        masses: how many are summed too, each in one more element, of as many equal parts of the tensor. A plain sum has
            none.
    """

    name: str
    elements: int
    owner: int
    masses: int = 1


class SlotPlace(NamedTuple):
    """A place is where a slot lies in a flat tensor."""

    values: slice
    masses: slice | None


@dataclass(frozen=True)
class ReduceBucket:
    """Slots that are summed over ranks, each to its owner, in one collective.

    What an owner itself has of its slots takes no part: it adds the sums to what it holds.

    The section of an owner holds the values of its slots, in the order given, and then their masses. Masses are never
    rounded: where the payload is narrower than the sum, their bits travel as two numbers of the payload's dtype.

    Attributes:
        name: a name for messages and traces.
        slots: one or more; names differ.
        world_size: number of ranks.
        payload: dtype on the wire.
        segmented: whether it goes by segments, see [Note: the way by segments]; or each section to its owner directly.
    """

    name: str
    slots: tuple[Slot, ...]
    world_size: int
    payload: torch.dtype = torch.float32
    segmented: bool = False

    def __post_init__(self) -> None:
        where = check_layout(self.name, self.names, self.payload)
        for slot in self.slots:
            check_elements(where, slot.name, slot.elements)
            check_rank(f"the owner of {slot.name!r} in {where}", slot.owner, self.world_size)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Give the names of the slots."""
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def sum_dtype(self) -> torch.dtype:
        """Give the dtype of what a rank gives, of masses and of sums: at least float32."""
        return torch.promote_types(self.payload, torch.float32)

    @cached_property
    def owned(self) -> tuple[tuple[Slot, ...], ...]:
        """Return the slots of each rank."""
        slots: list[list[Slot]] = [[] for _ in range(self.world_size)]
        for slot in self.slots:
            slots[slot.owner].append(slot)
        return tuple(map(tuple, slots))

    @cached_property
    def sections(self) -> tuple[int, ...]:
        """Return elements of each owner's section in the dtype of sums."""
        return tuple(sum(slot.elements + slot.masses for slot in slots) for slots in self.owned)

    @cached_property
    def wire_sections(self) -> tuple[int, ...]:
        """Return elements of each owner's section in the dtype of the payload."""
        return tuple(sum(slot.elements + self._words * slot.masses for slot in slots) for slots in self.owned)

    @cached_property
    def places(self) -> Mapping[str, SlotPlace]:
        """Give the place of each slot in its owner's section."""
        places = {}
        for slots in self.owned:
            start, mass = 0, sum(slot.elements for slot in slots)
            for slot in slots:
                masses = slice(mass, mass + slot.masses) if slot.masses else None
                places[slot.name] = SlotPlace(slice(start, start + slot.elements), masses)
                start += slot.elements
                mass += slot.masses
        return places

    @cached_property
    def segments(self) -> Segments:
        """Return the equal segments of all sections in a row, in the dtype of sums."""
        return sections(self.sections)

    @property
    def owned_elements(self) -> tuple[int, ...]:
        """Return the elements that each rank owns."""
        return self.sections

    @cached_property
    def wire_segments(self) -> tuple[int, ...]:
        """Return elements of each segment in the dtype of the payload."""
        places = map(self.segments.segment, range(self.world_size))
        return tuple(self._on_the_wire(place) for place in places)

    def messages(self, rank: int) -> tuple[Message, ...]:
        """Return the collectives of one launch, in their order, as `rank` takes part in them.

        On accelerators the segments of a reduce-scatter are filled up to one length, which makes the first of two
        messages longer by less than `P` elements.
        """
        size = self.payload.itemsize
        if not self.segmented:
            sent, received = tuple(self.sent_sections(rank)), tuple(self.received_sections(rank))
            return (Message(self.name, Collective.ALL_TO_ALL, rank, sent, received, size),)
        given, segments = self.wire_segments, self.segments
        scatter = Message(self.name, Collective.REDUCE_SCATTER, rank, given, (given[rank],) * self.world_size, size)
        to, from_ = segments.for_owners(rank), segments.from_segments(rank)
        deliver = Message(self.name, Collective.ALL_TO_ALL, rank, to, from_, self.sum_dtype.itemsize)
        return scatter, deliver

    @property
    def moved_bytes(self) -> int:
        """Return what all ranks together send in one launch."""
        moved = (self.world_size - 1) * sum(self.wire_sections) * self.payload.itemsize
        return moved + (self.segments.crossing() * self.sum_dtype.itemsize if self.segmented else 0)

    def sent_sections(self, rank: int) -> list[int]:
        """Return elements that `rank` sends to each rank, in the dtype of the payload: to itself none."""
        return [0 if owner == rank else size for owner, size in enumerate(self.wire_sections)]

    def received_sections(self, rank: int) -> list[int]:
        """Return the elements that `rank` gets from each rank."""
        return [0 if source == rank else self.wire_sections[rank] for source in range(self.world_size)]

    def encode(self, sections: Tensor, rank: int) -> Tensor:
        """Return all sections, `[sum(sections)]` in the dtype of sums, as `rank` sends them, `[sum(sent_sections)]`."""
        pieces = [self.to_wire(sections, place) for owner, place in enumerate(splits(self.sections)) if owner != rank]
        return torch.cat(pieces) if pieces else sections.new_empty(0, dtype=self.payload)

    def to_wire(self, row: Tensor, place: slice) -> Tensor:
        """Return a part of all sections in a row as it is sent."""
        if self.payload == self.sum_dtype:
            return row[place]
        parts = [
            row[start:stop].view(self.payload) if masses else row[start:stop].to(self.payload)
            for start, stop, masses in self._kinds(place)
        ]
        return torch.cat(parts) if parts else row.new_empty(0, dtype=self.payload)

    def decode(self, sent: Tensor, place: slice) -> Tensor:
        """Return what `to_wire` made of a part of all sections, in the dtype of sums, `[place.stop - place.start]`."""
        if self.payload == self.sum_dtype:
            return sent
        kinds, words = list(self._kinds(place)), self._words
        sizes = [(stop - start) * (words if masses else 1) for start, stop, masses in kinds]
        # The words are copied to where a number of the wider dtype may start.
        parts = [
            part.clone().view(self.sum_dtype) if masses else part.to(self.sum_dtype)
            for part, (_, _, masses) in zip(torch.split(sent, sizes), kinds, strict=True)
        ]
        return torch.cat(parts) if parts else sent.new_empty(0, dtype=self.sum_dtype)

    def merged(self, section: Tensor, owner: int) -> dict[str, "Merged"]:
        """Return the slots of an owner as views of its summed section, `[sections[owner]]`."""
        views = {}
        for slot in self.owned[owner]:
            values, masses = self.places[slot.name]
            views[slot.name] = Merged(section[values], None if masses is None else section[masses])
        return views

    @property
    def _words(self) -> int:
        """Return numbers of the payload's dtype that a mass takes on the wire."""
        return self.sum_dtype.itemsize // self.payload.itemsize

    @cached_property
    def _kind_ends(self) -> tuple[tuple[int, bool], ...]:
        """Return where values, and masses, end in the row of all sections."""
        ends, stop = [], 0
        for slots in self.owned:
            for masses in (False, True):
                stop += sum(slot.masses if masses else slot.elements for slot in slots)
                ends.append((stop, masses))
        return tuple(ends)

    def _kinds(self, place: slice) -> Iterator[tuple[int, int, bool]]:
        """Cut a part of the row of all sections into values and masses: start, stop, and whether it is masses."""
        start = place.start
        for end, masses in self._kind_ends:
            if start < (stop := min(end, place.stop)):
                yield start, stop, masses
                start = stop

    def _on_the_wire(self, place: slice) -> int:
        """Return elements of a part of the row of all sections in the dtype of the payload."""
        if self.payload == self.sum_dtype:
            return int(place.stop - place.start)
        return sum((stop - start) * (self._words if masses else 1) for start, stop, masses in self._kinds(place))


class Merged(NamedTuple):
    """Holds one slot, summed over all ranks but its owner."""

    total: Tensor
    """`Σ w·S`, `[elements]`."""
    mass: Tensor | None
    """`Σ w`, `[masses]`, 0 where none of them had anything; None of a plain sum."""


class Contributions:
    """Collects what one rank gives to one launch of a bucket: zeros, until something is put in.

    Args:
        bucket: the bucket.
        rank: the rank that gives it; its own section stays zeros.
        device: the device on which the bucket is put together.

    Attributes:
        sections: the sections of all owners, one after the other, `[sum(bucket.sections)]`.
    """

    def __init__(self, bucket: ReduceBucket, rank: int, device: torch.device) -> None:
        self._bucket = bucket
        self.sections = torch.zeros(sum(bucket.sections), dtype=bucket.sum_dtype, device=device)
        self._slots: dict[str, Merged] = {}
        for owner, section in enumerate(torch.split(self.sections, list(bucket.sections))):
            if owner != rank:
                self._slots |= bucket.merged(section, owner)

    @torch.no_grad()
    def put(self, name: str, values: Tensor, mass: float | Tensor) -> None:
        """Make a slot `mass · values` and `mass`; zeros where the mass is not positive. What it held is gone.

        Args:
            name: the name of a slot that another rank owns.
            values: the values, as many elements as the slot has, in any shape; copied.
            mass: a number, or as many as the slot has masses, on the same device; of a plain sum what it is to be
                multiplied by.
        """
        total, masses = self._slots[name]
        if values.numel() != total.numel():
            raise ValueError(
                f"kfac_optim: {name!r} in bucket {self._bucket.name!r} has {total.numel()} elements, got "
                f"{values.numel()}; was the model changed after the plan was made?"
            )
        weight = mass if isinstance(mass, Tensor) else torch.full((), mass, device=total.device, dtype=total.dtype)
        weight = weight.to(total.dtype).view(-1, 1)
        nothing = ~(weight > 0)
        # What weighs nothing may be anything: 0 · inf must not reach the sum. In place, as it may be a whole bucket.
        total.copy_(values.detach().flatten())
        _by_mass(total, len(weight)).mul_(weight).masked_fill_(nothing, 0.0)
        if masses is not None:
            masses.copy_(weight.masked_fill(nothing, 0.0).flatten())


def _by_mass(values: Tensor, masses: int) -> Tensor:
    """Return values `[masses, elements / masses]`."""
    return values.reshape(masses, values.numel() // masses)
