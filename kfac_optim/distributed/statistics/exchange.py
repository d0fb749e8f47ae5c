"""Statistics go from all ranks to the ones that refresh, and results to the ones that need them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import from_ordered, largest, ordered
from kfac_optim.distributed.communication.laid_out import LaidOut, shared
from kfac_optim.distributed.communication.layouts import Merged
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.communication.reducer import Reducer
from kfac_optim.distributed.communication.transfer import Transfer, carry_out
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import result_buckets, result_name, slot_name, sum_buckets, sum_limit
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.plan_options import STATUS_WORDS, TOLD_COUNTERS
from kfac_optim.distributed.planning.plan_parts import LayerPlan, PartPlan
from kfac_optim.distributed.planning.strategies import Statistics
from kfac_optim.factors.factor import Elsewhere, Factor
from kfac_optim.inverses.state import Result
from kfac_optim.utils.tensor_storage import drop, hold


class Status(NamedTuple):
    """The status of one block at its last refresh is the same on all ranks."""

    held: bool
    """Whether any sample was ever accepted."""
    refused: int
    """Samples refused in a row, on the rank that refused most."""
    failed: int
    """Refreshes failed in a row."""
    counters: Mapping[str, float]
    """The `TOLD_COUNTERS` that its inverse has; counts of events are those of the rank that counted most."""


class StatisticsExchange:
    """Sums to owners, and results from owners, as a plan lays them out.

    Args:
        plan: the plan of these blocks.
        early: the communicator for sums, which are launched in backward; nothing else may be launched on it.
        main: the communicator for the rest.
    """

    def __init__(self, plan: Plan, early: Communicator, main: Communicator) -> None:
        self.plan = plan
        self.status: dict[str, Status] = {}
        self._early, self._main = early, main
        self._layers = {layer.name: layer for layer in plan.layers}
        self.merges = plan.ranks > 1 and plan.strategy.statistics is Statistics.ALL
        self._reducers: dict[tuple[str, ...], Reducer] = {}
        self._result_buckets: dict[tuple[str, ...], LaidOut[ShareBucket]] = {}
        self._told: dict[str, dict[str, Elsewhere]] = {}

    @property
    def rank(self) -> int:
        return self._main.rank

    def owners(self, block: KFACBlock) -> list[int]:
        """Give the ranks that own its parts."""
        return [part.owner for part in self._layers[block.name].parts]

    def owns(self, block: KFACBlock) -> bool:
        """Return whether this rank refreshes any part of the block."""
        return self.rank in self.owners(block)

    def owns_all(self, block: KFACBlock) -> bool:
        """Return whether this rank refreshes all parts of the block."""
        return set(self.owners(block)) == {self.rank}

    def home(self, block: KFACBlock) -> int:
        """Return the rank whose state of the block is made whole for checkpoints."""
        return self.owners(block)[0]

    def measures(self, block: KFACBlock) -> bool:
        """Return whether this rank takes statistics of the block."""
        return self.merges or self.owns(block)

    def reducer(self, blocks: Sequence[KFACBlock]) -> Reducer:
        """Make the reducer for the sums of these blocks."""
        names = tuple(block.name for block in blocks)
        if names not in self._reducers:
            buckets, limit = sum_buckets(self.plan, names), sum_limit(self.plan, Payload.SUMS)
            self._reducers[names] = Reducer(self._early, buckets, limit)
        return self._reducers[names]

    def slots(self, block: KFACBlock, state: Any) -> Iterator[tuple[str, Factor]]:
        """Yield the running averages of a block, here or in a copy of its state, by name, in the order of buckets."""
        for part in reversed(self._layers[block.name].parts):
            for number, factor in enumerate(state.averages(part.part.name)):
                yield slot_name(block.name, part.part.name, number), factor

    def merge(self, blocks: Sequence[KFACBlock], again: Sequence[bool] = ()) -> None:
        """Average the factors of these blocks over the ranks, at their owners: bring there what others measured.

        Args:
            blocks: the same on all ranks.
            again: whether some rank launched each bucket with other numbers than it has now; what is beyond the buckets
                is not looked at, and empty says that all of them are right.
        """
        if self.merges:
            factors = {name: factor for block in blocks for name, factor in self.slots(block, block.state)}
            reducer = self.reducer(blocks)

            def final(name: str) -> tuple[Tensor, Tensor]:
                return factors[name].packed, factors[name].mass

            count = len(reducer.stale_flags())
            owned = {
                slot_name(block.name, part.part.name, 0): (block, part)
                for block, part in self._parts(blocks)
                if part.owner == self.rank
            }
            # All sums of one part are in one bucket.
            for merged in reducer.finish(final, list(again)[:count] or [False] * count):
                for block, part in [owned[name] for name in merged if name in owned]:
                    name = part.part.name
                    names = [slot_name(block.name, name, number) for number in range(len(part.part.sums))]
                    block.state.merge(name, [_weighted(merged[n]) for n in names])
                merged.clear()  # its memory goes to the next
            self.forget_others(blocks)
        self._tell_of_each_other([block for block in blocks if _is_apart(self._layers[block.name])])

    def add_up(self, counts: Mapping[KFACBlock, Tensor]) -> dict[KFACBlock, Tensor]:
        """Return the sum over ranks of each tensor, of the same blocks and shapes on all ranks, in float64."""
        own = torch.cat([each.to(self._main.device, torch.float64) for each in counts.values()])
        summed = self._main.all_reduce("counts", own, layers=[block.name for block in counts]).wait()
        parts = torch.split(summed, [len(each) for each in counts.values()])
        return {block: part.to(each.device) for (block, each), part in zip(counts.items(), parts, strict=True)}

    def abandon(self, blocks: Sequence[KFACBlock]) -> None:
        """Have no sums of these blocks under way; what was launched is thrown away."""
        self.reducer(blocks).abandon()

    def forget_others(self, blocks: Sequence[KFACBlock]) -> None:
        """Forget what this rank has measured of parts that other ranks own: the owners have it."""
        if self.merges:
            for block, part in self._parts(blocks):
                if part.owner != self.rank:
                    for factor in block.state.averages(part.part.name):
                        factor.forget()

    def mark_elsewhere(self, blocks: Sequence[KFACBlock]) -> None:
        """Have each state solve for what this rank owns alone; `blocks` may be copies, of before owners changed."""
        for block, part in self._parts(blocks):
            told = self._told.get(block.name, {})
            for factor in block.state.averages(part.part.name):
                factor.elsewhere = told.get(part.part.name)

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        """Share with all ranks how refreshes of these blocks went, and with some of them the results."""
        self._tell_status(blocks)
        by_name = {block.name: block for block in blocks}
        taken: set[str] = set()
        names = tuple(by_name)
        if names not in self._result_buckets:
            self._result_buckets[names] = LaidOut.of(result_buckets(self.plan, names))

        def give(bucket: ShareBucket) -> dict[str, Tensor]:
            values = {}
            wanted = {parcel.name for parcel in bucket.parcels if parcel.source == self.rank}
            for block, part in self._parts(blocks):
                for name, results in _parcels(block, part):
                    if name in wanted:
                        values[name] = _joined(results, bucket.payload)
            return values

        for received in shared(self._main, self._result_buckets[names], give, at_once=False):
            for block, part in self._parts(blocks):
                for name, results in _parcels(block, part):
                    if name in received:
                        block.state.take(part.part.name, _split(received[name], results))
                        taken.add(name)
            received.clear()  # its memory goes to the next
        # An owner is not sent those of its own results that no other rank needs, or that it does not need itself. It
        # takes them all the same, so that checkpoints of its state say what others apply.
        for block, part in self._parts(blocks):
            if part.owner == self.rank:
                for name, results in _parcels(block, part):
                    if name not in taken:
                        own = {number: each.tensor for number, each in results}
                        block.state.take(part.part.name, own)

    def place(self, block: KFACBlock) -> None:
        """Give up the memory of results that this rank does not need, or take it back."""
        device = block.params[0].device
        layer = self._layers[block.name]
        block.measured_here = self.measures(block)
        if device.type == "meta":
            return
        needed: list[Tensor] = []  # some by one part and not by another
        others: list[Tensor] = []
        for part in layer.parts:
            for result in block.state.results(part.part.name):
                here = self.rank == part.owner or self.rank in layer.workers or (result.measuring and self.merges)
                (needed if here else others).append(result.tensor)
        for tensor in needed:
            hold(tensor, device)
        for tensor in others:
            if not tensor.is_meta and not any(tensor is each for each in needed):
                drop(tensor)

    def bring_home(self, blocks: Iterable[KFACBlock]) -> list[KFACBlock]:
        """Copy parts that other ranks own to the homes of their blocks; the blocks that have such, for `send_off`."""
        apart = [block for block in blocks if _is_apart(self._layers[block.name])]
        transfers = []
        for block, part in self._parts(apart):
            name = part.part.name
            factors = block.state.averages(name)
            kept = [tensor for factor in factors for tensor in (factor.packed, factor.mass)]
            kept += block.state.measures(name)
            results = [result.tensor for result in block.state.results(name)]
            if self.rank == self.home(block):
                for tensor in results:
                    hold(tensor, self._main.device)
            transfers.append(Transfer(part.name_in(block.name), [*kept, *results], part.owner, [self.home(block)]))
        carry_out(self._main, transfers)
        return apart

    def send_off(self, blocks: Sequence[KFACBlock]) -> None:
        """Drop the copies that came by `bring_home`."""
        self.forget_others(blocks)
        for block in blocks:
            self.place(block)

    def _tell_status(self, blocks: Sequence[KFACBlock]) -> None:
        numbers = self._numbers(blocks)
        words: list[int] = []
        for block in blocks:
            owns = self.owns(block)
            nothing = owns and not block.is_ready and not block.state.has_statistics()
            refused, failed, counters = numbers[block]
            words += [int(nothing), int(refused), int(failed) if owns else 0]
            told = (counters.get(key, 0.0) if self._knows(block, key) else 0.0 for key in TOLD_COUNTERS)
            words += [ordered(abs(each)) for each in told]  # a NaN may have a sign, which would put it below all others
        found = largest(self._main, words, "status", [block.name for block in blocks])
        for index, block in enumerate(blocks):
            nothing_held, refused, failed, *told_words = found[STATUS_WORDS * index : STATUS_WORDS * (index + 1)]
            known = dict(zip(TOLD_COUNTERS, map(from_ordered, told_words), strict=True))
            counters = {key: value for key, value in known.items() if key in numbers[block][2]}
            self.status[block.name] = Status(not nothing_held, refused, failed, counters)

    def _numbers(self, blocks: Sequence[KFACBlock]) -> dict[KFACBlock, tuple[float, float, dict[str, float]]]:
        """Return setbacks and counters of each block, as they are here."""
        device, counted = self._main.device, {block: block.state.counters() for block in blocks}
        tensors = [
            number.to(device, torch.float64)
            for block, counters in counted.items()
            for number in (*block.state.setbacks(), *counters.values())
        ]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())  # the one host synchronisation of it
        return {
            block: (next(numbers), next(numbers), {key: next(numbers) for key in counters})
            for block, counters in counted.items()
        }

    def _knows(self, block: KFACBlock, key: str) -> bool:
        """Return whether what a counter measures was measured here; events are counted wherever they happen."""
        if not key.startswith(("condition", "cutoff")):
            return True
        parts = self._layers[block.name].parts
        owners = [part.owner for part in parts if part.part.name in ("", key[-1])] or self.owners(block)
        return self.rank in owners

    def _tell_of_each_other(self, blocks: Sequence[KFACBlock]) -> None:
        """Exchange traces where A and G have different owners, which share λ by them."""
        told = self._exchanged_traces([block for block in blocks if self._layers[block.name].trace_words])
        for block in blocks:
            factors = {part.part.name: block.state.averages(part.part.name)[0] for _, part in self._parts([block])}
            for factor in factors.values():
                factor.elsewhere = None  # known from the last refresh
            # Samples come for both at once.
            mass = torch.stack([factor.mass.amax() for factor in factors.values()]).amax()
            self._told[block.name] = {
                part.part.name: told.get(part.name_in(block.name), Elsewhere(factors[part.part.name].trace(), mass))
                for _, part in self._parts([block])
                if part.owner != self.rank
            }
        self.mark_elsewhere(blocks)

    def _exchanged_traces(self, blocks: Sequence[KFACBlock]) -> dict[str, Elsewhere]:
        """Return what its owner tells of each part of these blocks."""
        parts = [(block, part) for block, part in self._parts(blocks)]
        if not (parts and self.merges):
            return {}
        factors, pieces = [], []
        for block, part in parts:
            (factor,) = block.state.averages(part.part.name)
            factor.elsewhere = None  # known from the last refresh
            known = torch.cat([factor.trace().double(), factor.mass.double().amax().reshape(1)])
            pieces.append(known if part.owner == self.rank else torch.zeros_like(known))
            factors.append(factor)
        summed = self._main.all_reduce("traces", torch.cat(pieces), layers=[block.name for block in blocks]).wait()
        return {
            part.name_in(block.name): Elsewhere(words[:-1].to(factor.dtype), words[-1].to(factor.mass.dtype))
            for (block, part), factor, words in zip(
                parts, factors, torch.split(summed, [len(piece) for piece in pieces]), strict=True
            )
        }

    def _parts(self, blocks: Sequence[KFACBlock]) -> Iterator[tuple[KFACBlock, PartPlan]]:
        return ((block, part) for block in blocks for part in self._layers[block.name].parts)


def _is_apart(layer: LayerPlan) -> bool:
    return len({part.owner for part in layer.parts}) > 1


def _weighted(merged: Merged) -> tuple[Tensor, Tensor]:
    assert merged.mass is not None, "averages travel with their masses"
    return merged.total, merged.mass


_Numbered = list[tuple[int, Result]]


def _parcels(block: KFACBlock, part: PartPlan) -> Iterator[tuple[str, _Numbered]]:
    """Return the parcels that the results of a part may go in, with their numbers among these."""
    numbered = list(enumerate(block.state.results(part.part.name)))
    for measuring in (True, False):
        chosen = [(number, each) for number, each in numbered if each.measuring is measuring]
        yield result_name(block.name, part.part.name, measuring=measuring), chosen


def _joined(results: _Numbered, dtype: torch.dtype) -> Tensor:
    return torch.cat([each.packed().flatten().to(dtype) for _, each in results])


def _split(joined: Tensor, results: _Numbered) -> dict[int, Tensor]:
    """Cut numbers into the shapes of the tensors."""
    parts = torch.split(joined, [math.prod(each.sent_shape) for _, each in results])
    return {number: each.unpacked(part) for (number, each), part in zip(results, parts, strict=True)}
