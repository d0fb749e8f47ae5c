"""Collectives on gloo processes against sums on paper, whatever the ranks report, and in whatever order."""

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankError, Ranks
from torch import Tensor

from kfac_optim.distributed.comm import (
    Cause,
    Communicator,
    Event,
    InFlight,
    Late,
    Launch,
    Reducer,
    fingerprint,
)
from kfac_optim.distributed.layouts import Contributions, Merged, Parcel, ReduceBucket, ShareBucket, Slot
from kfac_optim.linalg import pack_triangle, triangle_size, unpack_triangle

CPU = torch.device("cpu")
PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Report(NamedTuple):
    """One call of `Reducer.ready`."""

    name: str
    values: Tensor
    mass: float


# -- the reducer, without communication -------------------------------------------------------------------------


class Recorder:
    """Takes the place of a communicator: notes what would be launched."""

    device = CPU

    def __init__(self, anyones_late: Tensor | None = None) -> None:
        self.launched: list[tuple[str, Cause, Tensor]] = []
        self.late: Tensor | None = None
        self._anyones_late = anyones_late

    def reduce(self, bucket: ReduceBucket, contributions: Contributions, cause: Cause) -> InFlight[dict[str, Merged]]:
        self.launched.append((bucket.name, cause, contributions.sections))
        return InFlight({}, Event(lambda: None))

    def all_reduce(self, name: str, values: Tensor, operation: object, layers: Sequence[str]) -> InFlight[Tensor]:
        assert operation == dist.ReduceOp.MAX
        self.late = values
        return InFlight(values if self._anyones_late is None else self._anyones_late, Event(lambda: None))


def play(
    buckets: Sequence[ReduceBucket], late: Late, reports: Sequence[Sequence[Report]], flushes: int = 1
) -> list[Recorder]:
    """What each rank launches when it reports that, as many rounds as told, the reports all in the first."""

    def one_pass(anyones_late: Tensor | None) -> list[Recorder]:
        recorders = [Recorder(anyones_late) for _ in reports]
        for recorder, own in zip(recorders, reports, strict=True):
            reducer = Reducer(recorder, buckets, late)  # type: ignore[arg-type]
            for report in own:
                reducer.ready(*report)
            for _ in range(flushes):
                reducer.flush()
        return recorders

    first = one_pass(None)
    if late is Late.CARRY:
        assert all(recorder.late is None for recorder in first)
        return first
    flags = [recorder.late for recorder in first if recorder.late is not None]
    assert len(flags) == len(first)
    return one_pass(torch.stack(flags).amax(0))


def sums(buckets: Sequence[ReduceBucket], recorders: Sequence[Recorder]) -> dict[str, float]:
    """Of each slot, of one element and not weighted, over all launches of all ranks."""
    by_name = {bucket.name: bucket for bucket in buckets}
    totals: defaultdict[str, float] = defaultdict(float)
    for recorder in recorders:
        for name, _, sections in recorder.launched:
            parts = torch.split(sections, list(by_name[name].sections))
            for owner, section in enumerate(parts):
                for slot, merged in by_name[name].merged(section, owner).items():
                    totals[slot] += float(merged.total)
    return dict(totals)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[ReduceBucket], list[list[Report]]]:
    """Buckets, and what each rank reports: anything, any number of times, in an order of its own."""
    world_size = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    buckets, names = [], []
    for i, size in enumerate(sizes):
        slots = tuple(Slot(f"{i}.{j}", 1, draw(st.integers(0, world_size - 1)), weighted=False) for j in range(size))
        buckets.append(ReduceBucket(f"bucket {i}", slots, world_size, torch.float64))
        names += [slot.name for slot in slots]
    # Powers of two: no sum rounds, and no two sums are equal by chance.
    powers = iter(range(48))
    reports = [
        [
            Report(name, torch.tensor(2.0 ** next(powers)), 1)
            for name in draw(st.lists(st.sampled_from(names), max_size=16))
        ]
        for _ in range(world_size)
    ]
    return buckets, reports


@given(program=programs(), late=st.sampled_from(Late))
def test_all_ranks_launch_the_same_in_the_same_order_and_nothing_is_lost(
    program: tuple[list[ReduceBucket], list[list[Report]]], late: Late
) -> None:
    buckets, reports = program
    # What is carried goes with the next round.
    recorders = play(buckets, late, reports, flushes=1 if late is Late.RESEND else 2)
    orders = [[name for name, _, _ in recorder.launched] for recorder in recorders]
    names = [bucket.name for bucket in buckets]
    assert all(order == orders[0] for order in orders)
    assert orders[0][: len(names)] == names
    expected = dict.fromkeys((slot for bucket in buckets for slot in bucket.names), 0.0)
    for report in (report for own in reports for report in own):
        expected[report.name] += float(report.values)
    assert sums(buckets, recorders) == expected


@given(program=programs())
def test_a_bucket_goes_when_it_and_all_before_it_are_complete_and_not_before(
    program: tuple[list[ReduceBucket], list[list[Report]]],
) -> None:
    buckets, reports = program
    recorder = Recorder()
    reducer = Reducer(recorder, buckets, Late.CARRY)  # type: ignore[arg-type]
    seen: set[str] = set()
    for report in reports[0]:
        reducer.ready(*report)
        seen.add(report.name)
        complete = [seen.issuperset(bucket.names) for bucket in buckets]
        assert len(recorder.launched) == [*complete, False].index(False)
    early = len(recorder.launched)
    reducer.flush()
    causes = [cause for _, cause, _ in recorder.launched]
    assert causes == [Cause.COMPLETE] * early + [Cause.FLUSHED] * (len(buckets) - early)


def one_slot_each(world_size: int, *names: str) -> list[ReduceBucket]:
    return [ReduceBucket(f"of {name}", (Slot(name, 1, 0, weighted=False),), world_size) for name in names]


def test_a_late_report_on_one_rank_sends_its_bucket_again_on_all_and_no_other() -> None:
    buckets = one_slot_each(2, "a", "b")
    first, second = Report("a", torch.ones(()), 1), Report("b", torch.ones(()), 1)
    quiet, late = play(buckets, Late.RESEND, [[first, second], [first, second, first]])
    for recorder, last in ((quiet, 0.0), (late, 1.0)):
        assert [(name, cause) for name, cause, _ in recorder.launched] == [
            ("of a", Cause.COMPLETE),
            ("of b", Cause.COMPLETE),
            ("of a", Cause.LATE),
        ]
        assert recorder.launched[-1][2].tolist() == [last]


def test_each_round_starts_from_nothing() -> None:
    recorder = Recorder()
    reducer = Reducer(recorder, one_slot_each(1, "a", "b"))  # type: ignore[arg-type]
    for value in (1.0, 2.0):
        reducer.ready("a", torch.tensor(value), 1)
        reducer.flush()
    assert [(cause, sections.tolist()) for _, cause, sections in recorder.launched] == [
        (Cause.COMPLETE, [1]),
        (Cause.FLUSHED, [0]),
        (Cause.COMPLETE, [2]),
        (Cause.FLUSHED, [0]),
    ]


def test_names_that_no_bucket_has_or_two_have_are_refused() -> None:
    recorder = Recorder()
    reducer = Reducer(recorder, one_slot_each(1, "a"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kfac_optim: no bucket has 'c'; was the model changed"):
        reducer.ready("c", torch.ones(1), 1)
    with pytest.raises(ValueError, match="kfac_optim: a name may be in one bucket only, got 'a' more than once"):
        Reducer(recorder, one_slot_each(1, "a", "b", "a"))  # type: ignore[arg-type]


def test_what_has_ended_is_not_waited_for_again() -> None:
    waits: list[str] = []
    flight = InFlight("result", Event(lambda: waits.append("once")))
    assert flight.wait() == flight.wait() == "result"
    flight.event.wait()
    assert waits == ["once"]


# -- on processes ------------------------------------------------------------------------------------------------


@contextmanager
def communicator(trace: list[Launch] | None = None, kind: type[Communicator] = Communicator) -> Iterator[Communicator]:
    observe = None if trace is None else trace.append
    made = kind.of_all_ranks(CPU, timedelta(seconds=30), observe)
    yield made
    dist.destroy_process_group(made.group)


@contextmanager
def counted_bytes() -> Iterator[list[float]]:
    """What each collective is given to send to others, in the order of calls."""
    counted: list[float] = []

    def exchange(out: Tensor, given_: Tensor, out_splits: Any, in_splits: list[int], group: Any, **kw: Any) -> Any:
        counted.append((given_.numel() - in_splits[dist.get_rank(group)]) * given_.itemsize)
        return originals[0](out, given_, out_splits, in_splits, group=group, **kw)

    def gather(out: Tensor, given_: Tensor, group: Any, **kw: Any) -> Any:
        counted.append(given_.nbytes * (dist.get_world_size(group) - 1))
        return originals[1](out, given_, group=group, **kw)

    def reduce(values: Tensor, group: Any, **kw: Any) -> Any:
        size = dist.get_world_size(group)
        counted.append(2 * (size - 1) * values.nbytes / size)
        return originals[2](values, group=group, **kw)

    originals = dist.all_to_all_single, dist.all_gather_single, dist.all_reduce
    with (
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(dist, "all_gather_single", gather),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        yield counted


LAYERS = {"fc1": (3, 1), "conv": (5, 2), "fc2": (4, 1), "unused": (2, 1), "head": (6, 1)}
"""Size, and number of groups, of a factor of each."""
ROWS = ({"fc1": 3, "conv": 2, "fc2": 0, "head": 7}, {"fc1": 1, "conv": 9, "fc2": 4}, {}, {"fc1": 2, "head": 5})
"""That each rank has for each layer: it reports a layer that has 0, and not one that is left out."""


def factor_buckets(world_size: int, payload: torch.dtype) -> list[ReduceBucket]:
    """Two buckets; with more than two ranks some own nothing."""
    slots = [Slot(name, groups * triangle_size(dim), dim % 2) for name, (dim, groups) in LAYERS.items()]
    return [
        ReduceBucket("first", tuple(slots[:2]), world_size, payload),
        ReduceBucket("second", tuple(slots[2:]), world_size, payload),
    ]


def inputs(rank: int, layer: str, rows: int) -> Tensor:
    """`[groups, rows, dim]`."""
    dim, groups = LAYERS[layer]
    generator = torch.Generator().manual_seed(100 * rank + dim)
    return torch.randn(groups, rows, dim, generator=generator, dtype=torch.float64)


def local_means(rank: int) -> dict[str, tuple[Tensor, int]]:
    """Of each layer that `rank` reports: its mean second moment `[groups, dim, dim]`, and its rows."""
    means = {}
    for layer, rows in ROWS[rank].items():
        x = inputs(rank, layer, rows)
        means[layer] = x.mT @ x / rows, rows
    return means


def merge_factors(rank: int, payload: torch.dtype, orders: int) -> dict[str, Any]:
    """Several rounds, each reporting in another order."""
    trace: list[Launch] = []
    with communicator(trace) as comm, counted_bytes() as counted:
        buckets = factor_buckets(comm.world_size, payload)
        reducer = Reducer(comm, buckets)
        shuffle = random.Random(rank).shuffle
        rounds = []
        for _ in range(orders):
            reports = [(layer, pack_triangle(mean), rows) for layer, (mean, rows) in local_means(rank).items()]
            shuffle(reports)
            for report in reports:
                reducer.ready(*report)
            merged = reducer.flush().wait()
            rounds.append({name: (part.total.clone(), part.mass, part.mean()) for name, part in merged.items()})
    return {"rounds": rounds, "trace": trace, "counted": counted}


def check_merged_factors(ranks: Ranks) -> None:
    world_size = ranks.world_size
    answers = ranks.run(merge_factors, torch.float64, 4)
    buckets = factor_buckets(world_size, torch.float64)
    owners = {slot.name: slot.owner for bucket in buckets for slot in bucket.slots}
    for rank, answer in enumerate(answers):
        first, *others = answer["rounds"]
        assert set(first) == {name for name, owner in owners.items() if owner == rank}
        for layer, (total, mass, mean) in first.items():
            shares = [local_means(each)[layer] for each in range(world_size) if ROWS[each].get(layer, 0)]
            same_order = torch.zeros_like(total)
            for moment, rows in shares:
                same_order += (pack_triangle(moment) * rows).flatten()
            assert torch.equal(total, same_order)
            assert mass == sum(rows for _, rows in shares)
            together = torch.cat([inputs(r, layer, ROWS[r].get(layer, 0)) for r in range(world_size)], 1)
            joined = together.mT @ together / max(together.shape[1], 1)
            dim, groups = LAYERS[layer]
            torch.testing.assert_close(unpack_triangle(mean.view(groups, -1), dim), joined, rtol=1e-12, atol=1e-14)
        for other in others:
            assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], other[name], strict=True))
    for rank, answer in enumerate(answers):
        assert [launch.bucket for launch in answer["trace"]] == ["first", "second", "late members"] * 4
        predicted = [*(bucket.sent_bytes(rank) for bucket in buckets), 2 * (world_size - 1) * 2 / world_size] * 4
        assert answer["counted"] == [launch.sent_bytes for launch in answer["trace"]] == predicted


def test_means_merge_exactly_on_two_ranks_in_any_order_of_reports_and_send_what_was_predicted(two_ranks: Ranks) -> None:
    check_merged_factors(two_ranks)


def test_and_on_four(four_ranks: Ranks) -> None:
    check_merged_factors(four_ranks)


def merge_in(rank: int, payloads: Sequence[torch.dtype]) -> list[dict[str, tuple[Tensor, Tensor | None]]]:
    merged = []
    with communicator() as comm:
        for payload in payloads:
            reducer = Reducer(comm, factor_buckets(comm.world_size, payload))
            for layer, (mean, rows) in local_means(rank).items():
                reducer.ready(layer, pack_triangle(mean), rows)
            merged.append({name: tuple(part) for name, part in reducer.flush().wait().items()})
    return merged


def test_a_narrow_payload_rounds_what_is_sent_once_and_nothing_else(two_ranks: Ranks) -> None:
    answers = two_ranks.run(merge_in, PAYLOADS)
    for index, payload in enumerate(PAYLOADS):
        wide = torch.promote_types(payload, torch.float32)
        for answer in answers:
            for layer, (total, mass) in answer[index].items():
                shares = [local_means(rank)[layer] for rank in range(2) if ROWS[rank].get(layer, 0)]
                expected = torch.zeros(total.shape, dtype=wide)
                for moment, rows in shares:
                    expected += (pack_triangle(moment).flatten().to(wide) * rows).to(payload).to(wide)
                assert total.dtype == mass.dtype == wide
                assert torch.equal(total, expected)
                assert mass == sum(rows for _, rows in shares)


class Scattering(Communicator):
    """Reduces as on an accelerator, on gloo."""

    def _scatters(self, bucket: ReduceBucket) -> bool:
        return True


def scatter(rank: int) -> tuple[dict[str, tuple[Tensor, Tensor | None]], list[bool]]:
    slots = (Slot("a", 3, 1), Slot("b", 2, 0), Slot("c", 2, 0, weighted=False))
    even = ReduceBucket("even", (*slots, Slot("d", 1, 1, weighted=False)), 2, torch.float64)
    with communicator(kind=Scattering) as comm:
        reducer = Reducer(comm, [even])
        for slot in even.slots:
            reducer.ready(slot.name, torch.arange(slot.elements) + rank, rank + 1)
        merged = {name: tuple(part) for name, part in reducer.flush().wait().items()}
        narrow = ReduceBucket("narrow", even.slots, 2, torch.bfloat16)
        uneven = ReduceBucket("uneven", slots, 2)
        on = [Communicator(comm.group, torch.device(kind), timedelta(1)) for kind in ("cuda", "cpu")]
        return merged, [each._scatters(bucket) for each in on for bucket in (even, narrow, uneven)]


def test_a_reduce_scatter_gives_the_same_and_is_taken_for_even_sections_on_accelerators(two_ranks: Ranks) -> None:
    for rank, (merged, scatters) in enumerate(two_ranks.run(scatter)):
        assert scatters == [True, False, False, False, False, False]
        assert list(merged) == [["b", "c"], ["a", "d"]][rank]
        for name, (total, mass) in merged.items():
            start = torch.arange(len(total))
            assert torch.equal(total, (start + 2 * (start + 1)).double())
            assert mass is None if name in "cd" else mass == 3


# -- any order, any number of times ------------------------------------------------------------------------------


SEEDS = range(24)


def wild_buckets(seed: int, world_size: int) -> list[ReduceBucket]:
    chance = random.Random(seed)
    buckets = []
    for i in range(chance.randint(1, 4)):
        slots = tuple(Slot(f"{i}.{j}", chance.randint(0, 9), chance.randrange(world_size)) for j in range(3))
        buckets.append(ReduceBucket(f"bucket {i}", slots, world_size, torch.float64))
    return buckets


def wild_reports(seed: int, buckets: Sequence[ReduceBucket], rank: int) -> list[Report]:
    """In an order of its own; some members never, some twice or three times, and late then more often than not."""
    chance = random.Random(1000 * seed + rank)
    slots = [slot for bucket in buckets for slot in bucket.slots for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))]
    chance.shuffle(slots)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        Report(slot.name, torch.randn(slot.elements, generator=generator, dtype=torch.float64), chance.randint(0, 3))
        for slot in slots
    ]


def run_wild(rank: int, late: Late) -> list[tuple[list[str], dict[str, tuple[Tensor, Tensor | None]]]]:
    answers = []
    for seed in SEEDS:
        trace: list[Launch] = []
        with communicator(trace) as comm:
            buckets = wild_buckets(seed, comm.world_size)
            reducer = Reducer(comm, buckets, late)
            for report in wild_reports(seed, buckets, rank):
                reducer.ready(*report)
            merged = reducer.flush().wait()
            if late is Late.CARRY:
                rest = reducer.flush().wait()
                merged = {name: part.plus(rest[name]) for name, part in merged.items()}
        answers.append(([launch.bucket for launch in trace], {name: tuple(part) for name, part in merged.items()}))
    return answers


def check_wild(ranks: Ranks, late: Late) -> None:
    answers = ranks.run(run_wild, late)
    resent = 0
    for index, seed in enumerate(SEEDS):
        traces = [answer[index][0] for answer in answers]
        assert all(trace == traces[0] for trace in traces)
        buckets = wild_buckets(seed, ranks.world_size)
        resent += len(traces[0]) - len(buckets) - 1
        totals = {slot.name: torch.zeros(slot.elements, dtype=torch.float64) for b in buckets for slot in b.slots}
        masses = dict.fromkeys(totals, 0.0)
        for rank in range(ranks.world_size):
            for name, values, mass in wild_reports(seed, buckets, rank):
                totals[name] += mass * values
                masses[name] += mass
        merged: dict[str, tuple[Tensor, Tensor]] = {}
        for answer in answers:
            assert not merged.keys() & answer[index][1]
            merged |= answer[index][1]
        assert merged.keys() == totals.keys()
        for name, (total, mass) in merged.items():
            torch.testing.assert_close(total, totals[name], rtol=1e-12, atol=1e-12)
            assert mass == masses[name]
    assert resent > 0 or late is Late.CARRY


@pytest.mark.parametrize("late", Late)
def test_members_reported_twice_never_or_on_some_ranks_in_any_order_are_each_counted_once(
    two_ranks: Ranks, late: Late
) -> None:
    check_wild(two_ranks, late)


def test_members_reported_at_random_on_four_ranks(four_ranks: Ranks) -> None:
    check_wild(four_ranks, Late.RESEND)


# -- parcels -----------------------------------------------------------------------------------------------------


def wild_shares(seed: int, world_size: int) -> ShareBucket:
    """The first is an even all-gather."""
    chance = random.Random(seed)
    everyone = tuple(range(world_size))
    payload = PAYLOADS[seed % 4]
    if seed == 0:
        return ShareBucket("even", tuple(Parcel(f"{r}", 3, r, everyone) for r in everyone), world_size, payload)
    parcels = [
        Parcel(
            f"p{i}",
            chance.randint(0, 7),
            chance.randrange(world_size),
            tuple(sorted(chance.sample(everyone, chance.randint(0, world_size)))),
        )
        for i in range(chance.randint(1, 6))
    ]
    return ShareBucket("uneven", tuple(parcels), world_size, payload)


def parcel_values(parcel: Parcel) -> Tensor:
    generator = torch.Generator().manual_seed(hash((parcel.elements, parcel.source)))
    return torch.randn(parcel.elements, generator=generator, dtype=torch.float64)


def share(rank: int) -> list[tuple[dict[str, Tensor], list[float], list[float], int]]:
    answers = []
    for seed in SEEDS:
        trace: list[Launch] = []
        with communicator(trace) as comm, counted_bytes() as counted:
            bucket = wild_shares(seed, comm.world_size)
            mine = {parcel.name: parcel_values(parcel) for parcel in bucket.parcels if parcel.source == rank}
            got = comm.share(bucket, mine).wait()
            answers.append((got, counted, [launch.sent_bytes for launch in trace], bucket.sent_bytes(rank)))
    return answers


def test_parcels_reach_their_targets_rounded_alike_and_nobody_else(four_ranks: Ranks) -> None:
    for rank, answer in enumerate(four_ranks.run(share)):
        for seed, (got, counted, traced, predicted) in zip(SEEDS, answer, strict=True):
            bucket = wild_shares(seed, 4)
            expected = {p.name: parcel_values(p).to(bucket.payload) for p in bucket.parcels if rank in p.targets}
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], value) for name, value in expected.items())
            assert counted == traced == [predicted]


def refuse(rank: int) -> list[str]:
    told = []
    with communicator() as comm:
        bucket = ShareBucket("inverses", tuple(Parcel(f"fc {r}", 3, r, (0, 1)) for r in range(2)), 2)
        for values in ({}, {f"fc {rank}": torch.ones(2)}):
            with pytest.raises(ValueError, match="kfac_optim") as error:
                comm.share(bucket, values)
            told.append(str(error.value))
        larger = ReduceBucket("factors", (Slot("a", 1, 0),), 3)
        with pytest.raises(ValueError, match="kfac_optim") as error:
            comm.reduce(larger, Contributions(larger, CPU))
        told.append(str(error.value))
    return told


def test_what_cannot_be_sent_is_refused_by_name(two_ranks: Ranks) -> None:
    for rank, (missing, short, world) in enumerate(two_ranks.run(refuse)):
        send = f"rank {rank} is to send 3 elements of 'fc {rank}' in bucket 'inverses', got "
        assert missing.endswith(send + "nothing.")
        assert short.endswith(send + "2.")
        assert "bucket 'factors' was laid out for 3 ranks, the process group has 2" in world


# -- scalars, agreement ------------------------------------------------------------------------------------------


def reduce_scalars(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.tensor([[1.0, 2.0], [3.0, rank]], dtype=torch.float64).mT
    with communicator() as comm:
        total, most = comm.all_reduce("scalars", values), comm.all_reduce("most", values, dist.ReduceOp.MAX)
        return total.wait(), most.wait(), values


def test_scalars_are_reduced_to_all_and_those_given_stay(two_ranks: Ranks) -> None:
    for rank, (total, most, given_) in enumerate(two_ranks.run(reduce_scalars)):
        assert total.tolist() == [[2, 6], [4, 1]]
        assert most.tolist() == [[1, 3], [2, 1]]
        assert given_.tolist() == [[1, 3], [2, rank]]


PLAN = ["fc1 [3, 4] owner 0", "fc2 [4, 4] owner 1", "fc2 [4, 4] owner 1"]
DISAGREEMENTS = {
    "lacks 'fc2 [4, 4] owner 1'": PLAN[:2],
    "has 'extra' that rank 0 has not": [*PLAN, "extra"],
    "lacks 'fc1 [3, 4] owner 0' and has 'fc1 [3, 5] owner 0' that rank 0 has not": ["fc1 [3, 5] owner 0", *PLAN[1:]],
    "has the same in another order: as number 1 'fc2 [4, 4] owner 1', where rank 0 has 'fc1 [3, 4] owner 0'": PLAN[
        ::-1
    ],
}


def agree(rank: int) -> list[str]:
    """What each disagreement of rank 1 is told as."""
    told = []
    with communicator() as comm:
        comm.check_agreement(fingerprint(PLAN), PLAN)
        for others in (*DISAGREEMENTS.values(), None):
            lines = PLAN if rank != 1 or others is None else others
            number = fingerprint(lines) + (rank == 1 and others is None)
            with pytest.raises(RuntimeError) as error:
                comm.check_agreement(number, lines)
            told.append(str(error.value))
        assert comm.all_reduce("after", torch.ones(1)).wait() == comm.world_size
    return told


def test_ranks_that_planned_otherwise_are_told_so_on_all_ranks(four_ranks: Ranks) -> None:
    for rank, told in enumerate(four_ranks.run(agree)):
        *listed, unlisted = told
        for message, expected in zip(listed, DISAGREEMENTS, strict=True):
            who = f"Of 4 ranks 1 differ from rank 0 (this is rank {rank}). Rank 1: {expected}."
            assert message.startswith("kfac_optim: the ranks disagree")
            assert who in message
        assert "Rank 1: has the same names, but other shapes, owners or settings." in unlisted


def test_a_fingerprint_is_the_same_in_every_process_and_another_for_other_lines(two_ranks: Ranks) -> None:
    here = fingerprint(PLAN)
    assert two_ranks.run(fingerprint_of, PLAN) == [here, here]
    others = (PLAN[:2], PLAN[::-1], ["".join(PLAN)], [*PLAN, ""], [])
    assert len({here, *map(fingerprint, others)}) == 6
    assert all(-(2**63) <= fingerprint([str(i)]) < 2**63 for i in range(20))
    assert any(fingerprint([str(i)]) < 0 for i in range(20))


def fingerprint_of(_: int, lines: Sequence[str]) -> int:
    return fingerprint(lines)


# -- faults ------------------------------------------------------------------------------------------------------


def wait_for_a_slow_rank(rank: int) -> str:
    with communicator() as patient:
        reducer = Reducer(Communicator(patient.group, CPU, timedelta(seconds=1.5)), one_slot_each(2, "fc1 A", "fc1 G"))
        if rank == 1:
            time.sleep(5.5)
            return ""
        reducer.ready("fc1 A", torch.ones(1), 1)
        bucket = reducer._flights[0]
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            bucket.wait()
        assert time.monotonic() - start < 5
    return f"{type(error.value).__name__}: {error.value}"


def test_a_collective_that_takes_too_long_names_its_bucket_its_layers_and_the_rank_that_never_came(
    two_ranks: Ranks,
) -> None:
    told, _ = two_ranks.run(wait_for_a_slow_rank)
    assert re.match(
        r"CollectiveError: kfac_optim: on rank 0 of 2 the collective of 'of fc1 A' \(layers 'fc1 A'\) failed after "
        r"1\.[56] s \(time-out 1\.5 s\): .* No word from rank 1: gone, or at another place in the program\.",
        told,
    )


def go_on_without_one(rank: int) -> str:
    with communicator() as comm:
        reducer = Reducer(comm, one_slot_each(4, "fc1 A", "fc1 G"))
        reducer.ready("fc1 A", torch.ones(1), 1)
        reducer._flights[0].wait()
        if rank == 2:
            os._exit(1)
        reducer.ready("fc1 G", torch.ones(1), 1)
        with pytest.raises(RuntimeError) as error:
            reducer.flush().wait()
        return f"{type(error.value).__name__}: {error.value}"


def test_when_a_rank_dies_the_others_name_it_and_what_they_were_waiting_for(four_ranks: Ranks) -> None:
    with pytest.raises(RankError) as error:
        four_ranks.run(go_on_without_one)
    told: Mapping[str, str] = dict(re.findall(r"-- rank (\d): (.*)", str(error.value)))
    assert told.pop("2") == "died, exit code 1"
    for rank, message in told.items():
        assert re.match(
            rf"CollectiveError: kfac_optim: on rank {rank} of 4 the collective of '(of fc1 G' \(layers|late members' "
            rf"\(layers 'fc1 A',) 'fc1 G'\) failed after .* No word from rank 2: gone, or at another place in the "
            rf"program\.",
            message,
        ), message
