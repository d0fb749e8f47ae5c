"""Bucketed asynchronous collectives that every rank launches in one fixed order.

A collective is matched between ranks by its place in the order in which they launch, and by nothing else: ranks that
launch in another order hang, or take each other's numbers for their own where the sizes agree. Hooks run in the
order in which a backward happens to reach them, once, twice or never. So buckets have a fixed layout and a fixed
order, and hooks launch nothing themselves (see `reducer`).

Two kinds of bucket, by what they are for:

- `ReduceBucket`: each slot's sum over all other ranks, for the one rank that owns it. A rank sends `(w·S, w)`, its mean
  and the mass `w` behind it, so that means merge exactly, `Σ w·S / Σ w`, whatever the ranks' shares, none included.
- `ShareBucket`: each parcel goes from one rank to some or all others, bit by bit.

[Note: one form for each device] gloo's reduce-scatter moves as much as its all-reduce, and its reduce overwrites what
the other ranks gave; its all-to-all moves the least and takes uneven parts, empty ones too. So on the CPU a sum is an
all-to-all, and then a sum on the owner in the order of ranks, the same bits every time. On accelerators it is a
reduce-scatter where all sections have one size; otherwise an all-to-all too, since padding would move zeros. A payload
narrower than float32 is always exchanged and summed in float32: each sum in bfloat16 would round again.

A bucket goes directly, in one collective, or by segments, in two (see `segments`): its layout says which, and gives the
messages, which are carried out as they stand. Between segments and owners several buckets may go in one message
(`message.together`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.launcher import Launcher, has_reduce_scatter
from kfac_optim.distributed.communication.launches import InFlight, listed_ranks
from kfac_optim.distributed.communication.layouts import Contributions, Merged, ReduceBucket
from kfac_optim.distributed.communication.message import Collective, Message, together
from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket
from kfac_optim.distributed.communication.segments import by_row, filled_up, splits, to_owners

# Differences between ranks in one message.
_SHOWN = 8


class Communicator(Launcher):
    """Carries out buckets on one process group, in the form that suits the device; see [Note: one order]."""

    def reduce(self, bucket: ReduceBucket, contributions: Contributions) -> InFlight[dict[str, Merged]]:
        """Sum a bucket that goes directly over all ranks but the owner of each slot, to that owner.

        Args:
            bucket: the same on all ranks.
            contributions: those of this rank; not to be written to until the event was waited for.

        Returns:
            The slots that this rank owns, by name.
        """
        given = contributions.sections
        (message,) = bucket.messages(self.rank)
        total = given.new_empty(bucket.sections[self.rank])
        if self._scatters(bucket):
            event = self.scatter(message, bucket.names, given, total)
        else:
            place = splits(bucket.sections)[self.rank]
            received = torch.empty(sum(message.from_), dtype=bucket.payload, device=given.device)

            def add_up() -> None:
                total.zero_()
                for part in received.view(self.world_size - 1, -1):  # in the order of ranks
                    total.add_(bucket.decode(part, place))

            event = self.exchange(message, bucket.names, bucket.encode(given, self.rank), received, add_up)
        return InFlight(bucket.merged(total, self.rank), event)

    def reduce_to_segments(self, bucket: ReduceBucket, contributions: Contributions) -> InFlight[Tensor]:
        """Sum a bucket that goes by segments over all ranks but the owner of each slot, to segments.

        Args:
            bucket: the same on all ranks.
            contributions: what this rank gives, as for `reduce`.

        Returns:
            This rank's segment of the row.
        """
        given, segments = contributions.sections, bucket.segments
        message = bucket.messages(self.rank)[0]
        place = segments.segment(self.rank)
        total = given.new_empty(0)  # gets its memory when what was sent has given up its own
        if has_reduce_scatter(self.device) and bucket.payload == bucket.sum_dtype:
            whole = filled_up(given, segments.length * self.world_size)
            filled = whole.new_empty(segments.length)

            def take() -> None:
                total.data = filled[: segments.lengths[self.rank]]

            return InFlight(total, self.scatter(message, bucket.names, whole, filled, take))
        whole = bucket.to_wire(given, slice(0, len(given)))
        parts = whole.new_empty(sum(message.from_))

        def add_up() -> None:
            if bucket.payload == bucket.sum_dtype:
                total.data = parts.view(self.world_size, -1).sum(0)
                return
            total.data = total.new_zeros(segments.lengths[self.rank])
            for part in parts.view(self.world_size, -1):
                total.add_(bucket.decode(part, place))

        return InFlight(total, self.exchange(message, bucket.names, whole, parts, add_up))

    def deliver(self, buckets: Sequence[ReduceBucket], segments: list[Tensor]) -> Iterator[dict[str, Merged]]:
        """Bring segments of a batch of buckets to owners; a collective.

        Args:
            buckets: the same on all ranks.
            segments: what `reduce_to_segments` gave for each bucket; taken out of the list as they are copied.

        Returns:
            The slots that this rank owns, by name, bucket by bucket.
        """
        messages = [bucket.messages(self.rank)[1] for bucket in buckets]
        message = together(messages)
        sent = to_owners([bucket.segments for bucket in buckets], self.rank, segments)
        received = sent.new_empty(sum(message.from_))
        names = [name for bucket in buckets for name in bucket.names]
        event = self.exchange(message, names, sent, received)
        del sent
        event.wait()
        sections = by_row(received, [each.from_ for each in messages])
        del received
        for bucket in buckets:
            yield bucket.merged(sections.pop(0), self.rank)

    def share(self, bucket: ShareBucket, values: Mapping[str, Tensor]) -> InFlight[dict[str, Tensor]]:
        """Send parcels that go directly from their sources to their targets.

        Args:
            bucket: the same on all ranks.
            values: the parcels whose source this rank is, by name, in any shape; others are left alone.

        Returns:
            The parcels that this rank is a target of, by name, `[elements]`: the same bits on all of their targets.
        """
        (message,) = bucket.messages(self.rank)
        going, coming = bucket.sent_by(self.rank), bucket.received_by(self.rank)
        arriving = [parcel for parcels in coming for parcel in parcels]
        received = torch.empty(sum(message.from_), dtype=bucket.payload, device=self.device)
        to_all = message.collective is Collective.ALL_GATHER
        leaving = going[self.rank] if to_all else [parcel for parcels in going for parcel in parcels]
        sent = self._joined(bucket, leaving, values)
        event = self.exchange(message, bucket.names, sent, received)
        return InFlight(_cut(received, arriving), event)

    def spread(
        self, buckets: Sequence[ShareBucket], values: Callable[[ShareBucket], Mapping[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        """Send the parcels of a batch of buckets by segments; a collective.

        Args:
            buckets: the same on all ranks.
            values: gives the parcels of a bucket whose source this rank is, as for `share`.

        Returns:
            The parcels that this rank is a target of, by name, `[elements]`, bucket by bucket: to be asked for to the
            end, on all ranks at the same place in the program.
        """
        rank, device, payload = self.rank, self.device, buckets[0].payload
        messages = [bucket.messages(rank)[0] for bucket in buckets]
        message = together(messages)
        rows = [self._joined(each, [p for p in each.row if p.source == rank], values(each)) for each in buckets]
        cut = zip(*(torch.split(row, list(each.to)) for row, each in zip(rows, messages, strict=True)), strict=True)
        sent = rows[0] if len(rows) == 1 else torch.cat([part for of_rank in cut for part in of_rank])
        del rows, cut
        received = torch.empty(sum(message.from_), dtype=payload, device=device)
        names = [name for bucket in buckets for name in bucket.names]
        event = self.exchange(message, names, sent, received)
        del sent
        event.wait()
        parts = by_row(received, [each.from_ for each in messages])
        del received
        for bucket in buckets:
            segments, gather = bucket.segments, bucket.messages(rank)[1]
            own = filled_up(parts.pop(0), segments.length)
            row = torch.empty(segments.length * self.world_size, dtype=payload, device=device)
            self.exchange(gather, bucket.names, own, row).wait()
            found = _cut(row[: segments.elements], bucket.row)
            del row
            yield {parcel.name: found[parcel.name] for parcel in bucket.row if rank in parcel.targets}
            del found  # the next row needs its memory

    def check_agreement(
        self,
        mine: Mapping[str, str],
        differences: Callable[[Mapping[str, str], Mapping[str, str]], Sequence[str]],
        remedy: Callable[[Mapping[str, str], Mapping[str, str]], str],
    ) -> None:
        """Raise on all ranks alike, unless all have planned the same.

        Args:
            mine: all that decides on the order and the sizes of collectives, by name (`Plan.agreement`).
            differences: tells in what two of these differ, in words that call the first "here" and the second "there"
                (`plan.differences`).
            remedy: says what the user may do about the differences (`plan.remedy`).

        Raises:
            RuntimeError: names layers, owners or options in which ranks differ.
            CollectiveError: some rank never came.
        """
        name = "agreement"
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
        own = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=self.device)
        gathered = own.new_empty(self.world_size)
        one = (1,) * self.world_size
        message = Message(name, Collective.ALL_GATHER, self.rank, one, one, own.itemsize)
        self.exchange(message, (), own, gathered).wait()
        fingerprints = gathered.tolist()
        odd = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
        if not odd:
            return
        # All ranks compare the same fingerprints, so that all of them come here.
        everyones: list[dict[str, str]] = [{} for _ in range(self.world_size)]
        with self._blaming(name, ()):
            dist.all_gather_object(everyones, dict(mine), group=self.group)
        found = differences(everyones[0], everyones[odd[0]])
        here, first, *others = (self._names[rank] for rank in (self.rank, 0, *odd))
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        if self._names != list(range(self.world_size)):  # owners, workers and members are told by other numbers
            more += f" (where a plan names ranks, it counts them within the group of {listed_ranks(self._names)})"
        raise RuntimeError(
            f"kfac_optim: the ranks disagree about what is to be communicated. Of {self.world_size} ranks "
            f"{', '.join(map(str, others))} differ from rank {first} (this is rank {here}). Rank {first} (here) and "
            f"rank {others[0]} (there): {'; '.join(found[:_SHOWN])}{more}. {remedy(everyones[0], everyones[odd[0]])}"
        )

    def _scatters(self, bucket: ReduceBucket) -> bool:
        """See [Note: one form for each device]."""
        even = len(set(bucket.sections)) == 1
        return has_reduce_scatter(self.device) and even and bucket.payload == bucket.sum_dtype

    def _joined(self, bucket: ShareBucket, parcels: Iterable[Parcel], values: Mapping[str, Tensor]) -> Tensor:
        """Return the elements of all parcels, `[elements]`, as they travel."""
        pieces = []
        for parcel in parcels:
            value = values.get(parcel.name)
            if value is None or value.numel() != parcel.elements:
                raise ValueError(
                    f"kfac_optim: rank {self._names[self.rank]} is to send {parcel.elements} elements of "
                    f"{parcel.name!r} in bucket {bucket.name!r}, got {'nothing' if value is None else value.numel()}."
                )
            pieces.append(value.detach().flatten().to(bucket.payload))
        if not pieces:
            return torch.empty(0, dtype=bucket.payload, device=self.device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(row: Tensor, parcels: Sequence[Parcel]) -> dict[str, Tensor]:
    parts = torch.split(row, [parcel.elements for parcel in parcels])
    return {parcel.name: part for parcel, part in zip(parcels, parts, strict=True)}
