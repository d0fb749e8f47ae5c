"""Buckets of sums launched during backward, in one order on all ranks, whatever their hooks do."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.launches import InFlight
from kfac_optim.distributed.communication.layout_checks import repeated
from kfac_optim.distributed.communication.layouts import Contributions, Merged, ReduceBucket
from kfac_optim.distributed.communication.segments import batches, shares
from kfac_optim.utils.text import listed

Final = Callable[[str], tuple[Tensor, Tensor | float]]
"""Gives values and mass of a slot."""


class Reducer:
    """Launches buckets in their order, each as soon as it and all before it are complete.

    By segments what was reported is kept until the step, so that buckets of the first batch go early alone; the others
    follow at the step, batch by batch, see [Note: what sums hold].

    Slots may be reported in any order, any number of times, or never, and differently on each rank: every rank launches
    the same collectives in the same order. What is reported is the whole of what a rank gives: a slot that is reported
    again before its bucket goes is replaced; if the bucket is under way, it is stale, and where any rank finds it so,
    `finish` sends it again on all ranks. Owners give nothing to their own slots, and get the sum of the others.

    Not thread-safe: it serves the hooks of one device.

    Args:
        communicator: see [Note: one order].
        buckets: the same on all ranks, in the order in which they are to be launched; slot names differ throughout.
        limit: elements of the largest bucket that there is, the same on all ranks; of larger ones here theirs.

    Raises:
        ValueError: two slots of one name.
    """

    def __init__(self, communicator: Communicator, buckets: Sequence[ReduceBucket], limit: float = 0.0) -> None:
        if twice := repeated([name for bucket in buckets for name in bucket.names]):
            raise ValueError(f"kfac_optim: a name may be in one bucket only, got {listed(twice)} more than once.")
        self._communicator = communicator
        self._buckets = tuple(buckets)
        self._index = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
        self._owned = {slot.name for bucket in buckets for slot in bucket.owned[communicator.rank]}
        self._segmented = any(bucket.segmented for bucket in buckets)
        self._limit = max((float(sum(bucket.owned_elements)) for bucket in buckets), default=0.0)
        self._limit = max(self._limit, limit)
        self._early = self._batches(range(len(buckets)))[0].stop if self._segmented else len(buckets)
        self._start_round()

    def ready(self, name: str, values: Tensor, mass: float | Tensor) -> None:
        """Report all that this rank gives to a slot; launches what is complete by that.

        Args:
            name: the name of a slot. Where this rank owns it the report alone counts, not what it holds.
            values: a mean, of as many elements as the slot, in any shape; copied.
            mass: the mass of the mean, a number, or as many as the slot has, on the same device; 0 if there is nothing,
                whatever the values are then. Of a plain sum it is what the values are to be multiplied by.

        Raises:
            ValueError: the slot has another size.
        """
        index = self._index[name]
        if self.launched(index):
            self._note_stale(name, index)
            return
        if index >= self._early:
            return  # it goes at the step
        if name not in self._owned:
            self._contributions(index).put(name, values, mass)
        self._unseen[index].discard(name)
        while self._next < self._early and not self._unseen[self._next]:
            self._launch(self._next)
            self._next += 1

    def invalidate(self, name: str) -> None:
        """Note that what was reported for a slot does not hold any more: it comes again, or `finish` asks for it."""
        index = self._index[name]
        if self.launched(index):
            self._note_stale(name, index)
        else:
            self._unseen[index].add(name)

    def launched(self, index: int) -> bool:
        """Return whether this rank has launched that bucket in this round."""
        return index < self._next

    def stale_flags(self) -> list[bool]:
        """Tell of each bucket whether this rank launched it and has other numbers for it now."""
        return list(self._stale)

    def finish(self, final: Final, again: Sequence[bool]) -> Iterator[dict[str, Merged]]:
        """Launch what is left, and once more what is stale; wait for all of it, and start the next round.

        All ranks must call it at the same place in the program.

        Args:
            final: gives values and mass of a slot, as for `ready`. It is asked for what was not reported, or does not
                hold any more, and for all slots of the buckets that go again; never for slots that this rank owns.
            again: whether each bucket is stale on any rank, by its `stale_flags`: the same on all ranks.

        Returns:
            The sums over the other ranks of the slots that this rank owns, by name, bucket by bucket: to be asked for
            to the end, on all ranks at the same place in the program.

        Raises:
            CollectiveError: a collective failed, or took too long.
        """
        self._launch_early_ones(again, final)
        flights, early = self._flights, self._early
        self._start_round()
        for flight, resend in zip(flights, again, strict=False):
            if resend:
                flight.wait()  # of what is sent twice only the second counts
        counting = [number for number in range(early) if not again[number]]
        coming = [flights[number] for number in counting]
        del flights
        return self._all_of(counting, coming, again, final)

    def _all_of(
        self, early: list[int], flights: list[InFlight[Any]], again: Sequence[bool], final: Final
    ) -> Iterator[dict[str, Merged]]:
        """Give what was launched early, and then launch the rest, batch by batch."""
        for batch in self._batches(early):
            coming = [flights.pop(0) for _ in early[batch]]
            yield from self._delivered(early[batch], coming)
        rest = [*range(self._early, len(self._buckets)), *(number for number, resend in enumerate(again) if resend)]
        for batch in self._batches(rest):
            for number in rest[batch]:
                self._fill(number, self._buckets[number].names, final)
                self._launch(number, settle=True)
            launched = list(self._flights)
            self._flights.clear()
            yield from self._delivered(rest[batch], launched)

    def _delivered(self, numbers: Sequence[int], coming: list[InFlight[Any]]) -> Iterator[dict[str, Merged]]:
        """Wait for buckets, and give what came of each; none is held when it was given."""
        if not self._segmented:
            while coming:
                yield coming.pop(0).wait()
            return
        segments = [flight.wait() for flight in coming]
        coming.clear()
        buckets = [self._buckets[number] for number in numbers]
        yield from self._communicator.deliver(buckets, segments)

    def abandon(self) -> None:
        """Launch what is left, wait for all of it, throw it away, and start the next round.

        All ranks must call it at the same place in the program.

        Raises:
            CollectiveError: a collective failed, or took too long.
        """
        self._launch_early_ones([True] * len(self._buckets), None)
        flights = self._flights
        self._start_round()
        for flight in flights:
            flight.wait()  # by segments nothing goes on to the owners

    def _launch_early_ones(self, again: Sequence[bool], final: Final | None) -> None:
        """Launch what was left of that which may go early; zeros where it goes again."""
        while self._next < self._early:
            if final is not None and not again[self._next]:
                self._fill(self._next, self._unseen[self._next], final)
            self._launch(self._next, settle=final is not None)
            self._next += 1

    def _start_round(self) -> None:
        self._flights: list[InFlight[Any]] = []
        self._next = 0
        self._unseen = [set(bucket.names) for bucket in self._buckets]
        self._stale = [False] * len(self._buckets)
        self._filling: list[Contributions | None] = [None] * len(self._buckets)

    def _note_stale(self, name: str, index: int) -> None:
        if name not in self._owned:
            self._stale[index] = True

    def _contributions(self, index: int, *, settle: bool = False) -> Contributions:
        """Return what the next launch of a bucket takes; `settle` is that of `_give_up_buffers`."""
        contributions = self._filling[index]
        if contributions is None:
            self._give_up_buffers(settle=settle)
            contributions = Contributions(self._buckets[index], self._communicator.rank, self._communicator.device)
            self._filling[index] = contributions
        return contributions

    def _fill(self, index: int, names: Collection[str], final: Final) -> None:
        """Ask for those slots of a bucket, in its order."""
        for name in self._buckets[index].names:
            if name in names and name not in self._owned:
                self._contributions(index, settle=True).put(name, *final(name))

    def _launch(self, index: int, *, settle: bool = False) -> None:
        """Launch a bucket; `settle` is that of `_give_up_buffers`."""
        self._give_up_buffers(settle=settle)
        contributions = self._contributions(index)
        self._filling[index] = None
        bucket = self._buckets[index]
        launch = self._communicator.reduce_to_segments if bucket.segmented else self._communicator.reduce
        self._flights.append(launch(bucket, contributions))

    def _give_up_buffers(self, *, settle: bool) -> None:
        """Have what is under way give up its buffers, before another bucket needs some.

        Within backward nothing may be waited for: another rank may get to its part of a bucket after this one's part of
        something else. There only what has ended gives them up.

        Args:
            settle: says that all ranks launch what is left, so that what is under way by segments is waited for.
        """
        for flight in self._flights:
            if self._segmented or not settle:
                flight.event.wait(only_if_over=not settle)

    def _batches(self, numbers: Sequence[int]) -> list[slice]:
        """Return where those of these buckets lie that go to owners together; all, where they go directly."""
        if not self._segmented:
            return [slice(0, len(numbers))]
        ranks = self._communicator.world_size
        return batches([shares(self._buckets[number].owned_elements) for number in numbers], self._limit, ranks)
