"""Gradients in a row, as a wrapper has them in one of its buckets, on paper: the messages that sum them."""

from dataclasses import dataclass
from functools import cached_property

import torch

from kfac_optim.distributed.communication.message import Collective, Message, all_reduction
from kfac_optim.distributed.communication.segments import Segments


@dataclass(frozen=True)
class OwnedRow:
    """Pieces in a row that are summed over ranks, owners included, each to its owner.

    Attributes:
        name: a name for messages and traces.
        pieces: owner and number of elements of each, in the order of the row; an owner of -1 is all ranks, and where a
            piece has that the whole row is summed to all.
        world_size: number of ranks.
        payload: dtype on the wire.
        by_segments: whether what has owners goes by segments, see [Note: the way by segments]; or each piece directly.
    """

    name: str
    pieces: tuple[tuple[int, int], ...]
    world_size: int
    payload: torch.dtype
    by_segments: bool = False

    @cached_property
    def to_all(self) -> bool:
        """Return whether the row is summed to all ranks, in an all-reduce."""
        return any(owner < 0 for owner, _ in self.pieces)

    @property
    def segmented(self) -> bool:
        """Return whether it goes by segments."""
        return self.by_segments and not self.to_all

    @property
    def elements(self) -> int:
        """Return the elements of the row."""
        return self.segments.elements

    @cached_property
    def segments(self) -> Segments:
        """Return the equal segments of the row."""
        return Segments(self.pieces, self.world_size)

    @cached_property
    def owned_elements(self) -> tuple[int, ...]:
        """Return the elements that each rank owns."""
        sizes = [0] * self.world_size
        for owner, size in self.pieces:
            sizes[owner] += size
        return tuple(sizes)

    def messages(self, rank: int) -> tuple[Message, ...]:
        """Return the collectives of one launch, in their order, as `rank` takes part in them.

        On accelerators the segments of a reduce-scatter are filled up to one length, which makes the first of two
        messages longer by less than `P` elements.
        """
        size, everyone = self.payload.itemsize, self.world_size
        if self.to_all:
            return (all_reduction(self.name, rank, everyone, self.elements, size),)
        if not self.segmented:
            from_ = (self.owned_elements[rank],) * everyone
            return (Message(self.name, Collective.ALL_TO_ALL, rank, self.owned_elements, from_, size),)
        segments = self.segments
        lengths = segments.lengths
        to, from_ = segments.for_owners(rank), segments.from_segments(rank)
        return (
            Message(self.name, Collective.REDUCE_SCATTER, rank, lengths, (lengths[rank],) * everyone, size),
            Message(self.name, Collective.ALL_TO_ALL, rank, to, from_, size),
        )
