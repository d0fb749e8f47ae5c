"""What is sent together, on paper: layouts of buckets, what a rank gives, what an owner gets. Sends nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.utils.text import listed

_PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def repeated(names: Sequence[str]) -> list[str]:
    """Return names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


# -- sums to their owners ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """Describes one tensor in a `ReduceBucket`.

    Attributes:
        name: of the layer, and of what it is of it: for messages, and to report it.
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
        name: for messages and traces.
        slots: at least one; names differ.
        world_size: number of ranks.
        payload: dtype on the wire.
    """

    name: str
    slots: tuple[Slot, ...]
    world_size: int
    payload: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        where = _check_layout(self.name, self.names, self.payload)
        for slot in self.slots:
            _check_elements(where, slot.name, slot.elements)
            _check_rank(f"the owner of {slot.name!r} in {where}", slot.owner, self.world_size)

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
        words = self.sum_dtype.itemsize // self.payload.itemsize
        return tuple(sum(slot.elements + words * slot.masses for slot in slots) for slots in self.owned)

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

    def sent_bytes(self, rank: int) -> int:
        """Return what `rank` sends to others in one launch. All ranks together send `P - 1` times the bucket."""
        return (sum(self.wire_sections) - self.wire_sections[rank]) * self.payload.itemsize

    def sent_sections(self, rank: int) -> list[int]:
        """Return elements that `rank` sends to each rank, in the dtype of the payload: to itself none."""
        return [0 if owner == rank else size for owner, size in enumerate(self.wire_sections)]

    def received_sections(self, rank: int) -> list[int]:
        """Return the elements that `rank` gets from each rank."""
        return [0 if source == rank else self.wire_sections[rank] for source in range(self.world_size)]

    def encode(self, sections: Tensor, rank: int) -> Tensor:
        """Return all sections, `[sum(sections)]` in the dtype of sums, as `rank` sends them, `[sum(sent_sections)]`."""
        pieces = []
        for owner, section in enumerate(torch.split(sections, list(self.sections))):
            if owner == rank:
                continue
            values, masses = self._parts(section, owner)
            pieces += [values.to(self.payload), masses.view(self.payload)]
        return torch.cat(pieces) if pieces else sections.new_empty(0, dtype=self.payload)

    def decode(self, section: Tensor, owner: int) -> Tensor:
        """Return a section that `encode` made, `[wire_sections[owner]]`, in the dtype of sums, `[sections[owner]]`."""
        if self.payload == self.sum_dtype:
            return section
        values, words = self._parts(section, owner)
        # The words are copied to where a number of the wider dtype may start.
        return torch.cat((values.to(self.sum_dtype), words.clone().view(self.sum_dtype)))

    def merged(self, section: Tensor, owner: int) -> dict[str, "Merged"]:
        """Return the slots of an owner as views of its summed section, `[sections[owner]]`."""
        views = {}
        for slot in self.owned[owner]:
            values, masses = self.places[slot.name]
            views[slot.name] = Merged(section[values], None if masses is None else section[masses])
        return views

    def _parts(self, section: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return values and masses."""
        count = sum(slot.elements for slot in self.owned[owner])
        return section[:count], section[count:]


class Merged(NamedTuple):
    """Holds one slot, summed over all ranks but its owner."""

    total: Tensor
    """`Σ w·S`, `[elements]`."""
    mass: Tensor | None
    """`Σ w`, `[masses]`, 0 where none of them had anything; None of a plain sum."""

    def mean(self) -> Tensor:
        """Return `Σ w·S / Σ w`, `[elements]`; zeros if no rank had anything."""
        assert self.mass is not None, "a plain sum has no mean"
        mass = self.mass.unsqueeze(-1)
        return torch.where(mass > 0, _by_mass(self.total, len(mass)) / mass, 0.0).flatten()


class Contributions:
    """Collects what one rank gives to one launch of a bucket: zeros, until something is put in.

    Args:
        bucket: which.
        rank: which gives it; its own section stays zeros.
        device: where the bucket is put together.

    Attributes:
        sections: of all owners, one after the other, `[sum(bucket.sections)]`.
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
            name: of a slot that another rank owns.
            values: of as many elements as the slot, in any shape; copied.
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
        counts = weight > 0
        # What weighs nothing may be anything: 0 · inf must not reach the sum.
        weighed = _by_mass(values.detach().to(total.dtype), len(weight)) * weight
        total.copy_(torch.where(counts, weighed, 0.0).flatten())
        if masses is not None:
            masses.copy_(torch.where(counts, weight, 0.0).flatten())


def _by_mass(values: Tensor, masses: int) -> Tensor:
    """Return values `[masses, elements / masses]`."""
    return values.reshape(masses, values.numel() // masses)


# -- parcels from their sources ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parcel:
    """Describes one tensor in a `ShareBucket`.

    Attributes:
        name: of the layer, and of what it is of it: for messages, and in results.
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
        name: for messages and traces.
        parcels: at least one; names differ.
        world_size: number of ranks.
        payload: dtype on the wire, and of results.
    """

    name: str
    parcels: tuple[Parcel, ...]
    world_size: int
    payload: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        where = _check_layout(self.name, self.names, self.payload)
        for parcel in self.parcels:
            _check_elements(where, parcel.name, parcel.elements)
            for rank in (parcel.source, *parcel.targets):
                _check_rank(f"the source and the targets of {parcel.name!r} in {where}", rank, self.world_size)
            if parcel.targets != tuple(sorted(set(parcel.targets))):
                raise ValueError(
                    f"kfac_optim: the targets of {parcel.name!r} in {where} must ascend, got {parcel.targets}."
                )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Give the names of the parcels."""
        return tuple(parcel.name for parcel in self.parcels)

    @cached_property
    def is_even_gather(self) -> bool:
        """Return whether all ranks have equally much, and all of it goes to all."""
        everyone = tuple(range(self.world_size))
        held = dict.fromkeys(everyone, 0)
        for parcel in self.parcels:
            held[parcel.source] += parcel.elements
        return len(set(held.values())) == 1 and all(parcel.targets == everyone for parcel in self.parcels)

    def sent_by(self, rank: int) -> list[list[Parcel]]:
        """Return what `rank` sends to each rank, in order."""
        own = [parcel for parcel in self.parcels if parcel.source == rank]
        return [[parcel for parcel in own if target in parcel.targets] for target in range(self.world_size)]

    def received_by(self, rank: int) -> list[list[Parcel]]:
        """Return what `rank` gets from each rank, in order."""
        own = [parcel for parcel in self.parcels if rank in parcel.targets]
        return [[parcel for parcel in own if parcel.source == source] for source in range(self.world_size)]

    def sent_bytes(self, rank: int) -> int:
        """Return what `rank` sends to others in one launch."""
        going = (parcels for target, parcels in enumerate(self.sent_by(rank)) if target != rank)
        return sum(parcel.elements for parcels in going for parcel in parcels) * self.payload.itemsize


def _check_layout(name: str, members: Sequence[str], payload: torch.dtype) -> str:
    """Refuse a layout that is not possible; return what to call the bucket in messages."""
    where = f"bucket {name!r}"
    if not members:
        raise ValueError(f"kfac_optim: {where} holds nothing; leave it out.")
    if twice := repeated(members):
        raise ValueError(f"kfac_optim: names in {where} must differ, got {listed(twice)} more than once.")
    if payload not in _PAYLOADS:
        allowed = ", ".join(map(str, _PAYLOADS))
        raise ValueError(f"kfac_optim: the payload of {where} must be one of {allowed}, got {payload}.")
    return where


def _check_elements(where: str, name: str, elements: int) -> None:
    if elements < 0:
        raise ValueError(f"kfac_optim: {name!r} in {where} must have 0 elements or more, got {elements}.")


def _check_rank(what: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"kfac_optim: {what} must be ranks from 0 to {world_size - 1}, got {rank}.")
