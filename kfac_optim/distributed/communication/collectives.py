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
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_optim.distributed.communication.launches import Cause, CollectiveError, Event, InFlight, Launch
from kfac_optim.distributed.communication.layouts import Contributions, Merged, Parcel, ReduceBucket, ShareBucket
from kfac_optim.utils.text import listed

# How often a rank that waits looks whether another has given up: gloo tells only those that were to hear from a rank
# that is gone, not those that wait for them in turn.
_LOOKOUT = timedelta(seconds=1)

# How long a rank that gives up waits for all others that wait to do so too.
_ROLL_CALL = timedelta(seconds=3)

# Differences between ranks in one message.
_SHOWN = 8

# Key in the store of a process group.
_GIVEN_UP = "kfac_optim/given-up"


class Communicator:
    """Launches the collectives of one process group, in the form that suits the device.

    [Note: one order] All ranks must call its methods in the same order. A `Reducer` does so whatever its hooks do, if
    nothing else is launched between the first report of a round and its end; what has to be then goes through another
    communicator.

    Args:
        group: of our own, see `groups`.
        device: that all tensors lie on.
        timeout: how long an event waits on the CPU; on accelerators that of the group counts.
        observe: is called with every launch, for traces.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        observe: Callable[[Launch], None] | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self.timeout = timeout
        self._observe = observe

    def reduce(
        self, bucket: ReduceBucket, contributions: Contributions, cause: Cause = Cause.CALLED
    ) -> InFlight[dict[str, Merged]]:
        """Sum a bucket over all ranks but the owner of each slot, to that owner.

        Args:
            bucket: the same on all ranks.
            contributions: of this rank; not to be written to until the event was waited for.
            cause: for the trace.

        Returns:
            The slots that this rank owns, by name.
        """
        self._check_world(bucket.name, bucket.world_size)
        given = contributions.sections
        total = given.new_empty(bucket.sections[self.rank])
        record = Launch(bucket.name, cause, bucket.sent_bytes(self.rank))
        if self._scatters(bucket):
            event = self._launch(
                record, bucket.names, lambda: dist.reduce_scatter_single(total, given, group=self.group, async_op=True)
            )
        else:
            sent = bucket.encode(given, self.rank)
            received = sent.new_empty(self.world_size - 1, bucket.wire_sections[self.rank])

            def add_up() -> None:
                total.zero_()
                for part in received:  # in the order of ranks
                    total.add_(bucket.decode(part, self.rank))

            to, from_ = bucket.sent_sections(self.rank), bucket.received_sections(self.rank)
            event = self._exchange(record, bucket.names, (sent, to), (received.flatten(), from_), add_up)
        return InFlight(bucket.merged(total, self.rank), event)

    def share(self, bucket: ShareBucket, values: Mapping[str, Tensor]) -> InFlight[dict[str, Tensor]]:
        """Send parcels from their sources to their targets.

        Args:
            bucket: the same on all ranks.
            values: the parcels whose source this rank is, by name, in any shape; others are left alone.

        Returns:
            The parcels that this rank is a target of, by name, `[elements]`: the same bits on all of their targets.
        """
        self._check_world(bucket.name, bucket.world_size)
        going, coming = bucket.sent_by(self.rank), bucket.received_by(self.rank)
        arriving = list(itertools.chain(*coming))
        received = torch.empty(_elements(arriving), dtype=bucket.payload, device=self.device)
        record = Launch(bucket.name, Cause.CALLED, bucket.sent_bytes(self.rank))
        if bucket.is_even_gather:
            own = self._joined(bucket, going[self.rank], values)
            event = self._launch(
                record, bucket.names, lambda: dist.all_gather_single(received, own, group=self.group, async_op=True)
            )
        else:
            sent = self._joined(bucket, itertools.chain(*going), values)
            to, from_ = list(map(_elements, going)), list(map(_elements, coming))
            event = self._exchange(record, bucket.names, (sent, to), (received, from_))
        parts = torch.split(received, [parcel.elements for parcel in arriving])
        return InFlight({parcel.name: part for parcel, part in zip(arriving, parts, strict=True)}, event)

    def all_reduce(
        self,
        name: str,
        values: Tensor,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        layers: Sequence[str] = (),
    ) -> InFlight[Tensor]:
        """Reduce a few numbers to all ranks, the same bits on each.

        Args:
            name: for messages and traces.
            values: of one shape and dtype on all ranks; left as they are.
            operation: `SUM`, `MAX`, …
            layers: that the numbers are about, for messages.
        """
        result = values.detach().clone(memory_format=torch.contiguous_format)
        record = Launch(name, Cause.CALLED, 2 * (self.world_size - 1) * result.nbytes / self.world_size)
        event = self._launch(
            record, layers, lambda: dist.all_reduce(result, op=operation, group=self.group, async_op=True)
        )
        return InFlight(result, event)

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
        record = Launch(name, Cause.CALLED, (self.world_size - 1) * own.nbytes)
        self._launch(record, (), lambda: dist.all_gather_single(gathered, own, group=self.group, async_op=True)).wait()
        fingerprints = gathered.tolist()
        odd = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
        if not odd:
            return
        # All ranks compare the same fingerprints, so that all of them come here.
        everyones: list[dict[str, str]] = [{} for _ in range(self.world_size)]
        with self._blaming(name, ()):
            dist.all_gather_object(everyones, dict(mine), group=self.group)
        found = differences(everyones[0], everyones[odd[0]])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise RuntimeError(
            f"kfac_optim: the ranks disagree about what is to be communicated. Of {self.world_size} ranks "
            f"{', '.join(map(str, odd))} differ from rank 0 (this is rank {self.rank}). Rank 0 (here) and rank "
            f"{odd[0]} (there): {'; '.join(found[:_SHOWN])}{more}. {remedy(everyones[0], everyones[odd[0]])}"
        )

    def _scatters(self, bucket: ReduceBucket) -> bool:
        """See [Note: one form for each device]."""
        even = len(set(bucket.sections)) == 1
        return self.device.type != "cpu" and even and bucket.payload == bucket.sum_dtype

    def _joined(self, bucket: ShareBucket, parcels: Iterable[Parcel], values: Mapping[str, Tensor]) -> Tensor:
        """Return the elements of all parcels, `[elements]`, as they travel."""
        pieces = [torch.empty(0, dtype=bucket.payload, device=self.device)]
        for parcel in parcels:
            value = values.get(parcel.name)
            if value is None or value.numel() != parcel.elements:
                raise ValueError(
                    f"kfac_optim: rank {self.rank} is to send {parcel.elements} elements of {parcel.name!r} in bucket "
                    f"{bucket.name!r}, got {'nothing' if value is None else value.numel()}."
                )
            pieces.append(value.detach().flatten().to(bucket.payload))
        return torch.cat(pieces)

    def _check_world(self, name: str, world_size: int) -> None:
        if world_size != self.world_size:
            raise ValueError(
                f"kfac_optim: bucket {name!r} was laid out for {world_size} ranks, the process group has "
                f"{self.world_size}; plan again for this group."
            )

    def _exchange(
        self,
        record: Launch,
        names: Sequence[str],
        sent: tuple[Tensor, Sequence[int]],
        received: tuple[Tensor, Sequence[int]],
        finish: Callable[[], None] | None = None,
    ) -> Event:
        """Launch an all-to-all: each buffer comes with the numbers of elements for, or from, each rank."""
        (source, to), (target, from_) = sent, received
        return self._launch(
            record,
            names,
            lambda: dist.all_to_all_single(target, source, list(from_), list(to), group=self.group, async_op=True),
            finish,
        )

    def _launch(
        self,
        record: Launch,
        names: Sequence[str],
        launch: Callable[[], dist.Work | None],
        finish: Callable[[], None] | None = None,
    ) -> Event:
        """Launch, and make the event that waits for the end, and then finishes."""
        with self._blaming(record.bucket, names):
            work = launch()
        assert work is not None, "only a rank outside of the group gets none"
        if self._observe is not None:
            self._observe(record)

        def wait() -> None:
            with self._blaming(record.bucket, names):
                if self.device.type == "cpu":
                    self._wait_on_host(work)
                else:
                    work.wait()  # makes the stream wait; with a time-out it would be the host
            if finish is not None:
                finish()

        return Event(wait)

    def _wait_on_host(self, work: dist.Work) -> None:
        """Wait until it is done, the time is out, or another rank has given up."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _LOOKOUT))
                return
            except RuntimeError as error:
                if work.is_completed() or left <= _LOOKOUT:
                    raise
                if self.group.get_group_store().check([_GIVEN_UP]):
                    raise RuntimeError("another rank gave up") from error

    @contextmanager
    def _blaming(self, bucket: str, names: Sequence[str]) -> Iterator[None]:
        """Turn what `torch.distributed` raises into an error that says what was under way, and who is missing."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - start
            layers = f" (layers {listed(names)})" if names else ""
            raise CollectiveError(
                f"kfac_optim: on rank {self.rank} of {self.world_size} the collective of {bucket!r}{layers} failed "
                f"after {seconds:.1f} s (time-out {self.timeout.total_seconds():g} s): {error}. "
                f"{self._call_the_roll()} Look for the first error in the logs of the other ranks; where one was only "
                f"slow, raise the time-out. To go on, start all ranks again from the last checkpoint."
            ) from error

    def _call_the_roll(self) -> str:
        """Return the ranks that do not give up too: they are gone, or not waiting."""
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _ROLL_CALL.total_seconds()
        try:
            store = self.group.get_group_store()
            store.set(f"{_GIVEN_UP}/{self.rank}", "")
            store.set(_GIVEN_UP, "")
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [rank for rank in silent if not store.check([f"{_GIVEN_UP}/{rank}"])]
        except RuntimeError as error:
            return f"Who is missing is not known, as the store of the process group is gone too ({error})."
        if not silent:
            return "All ranks gave up in a collective."
        ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"No word from {ranks}: gone, or at another place in the program."


def _elements(parcels: Iterable[Parcel]) -> int:
    return sum(parcel.elements for parcel in parcels)
