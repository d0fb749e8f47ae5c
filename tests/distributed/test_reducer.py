"""Buckets launched as their slots are reported: in any order, any number of times, never, or not by all ranks."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import CPU, communicator, counted_bytes
from helpers.ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.distributed.communication.launches import Event, InFlight
from kfac_optim.distributed.communication.layouts import Contributions, Merged, ReduceBucket, Slot
from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.communication.reducer import Reducer
from kfac_optim.linalg.triangles import pack_triangle, triangle_size, unpack_triangle

# -- without communication ---------------------------------------------------------------------------------------


class Recorder:
    """Takes the place of a communicator: notes what would be launched."""

    device = CPU

    def __init__(self, rank: int, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.launched: list[tuple[str, Tensor]] = []
        self.waited = 0

    def reduce(self, bucket: ReduceBucket, contributions: Contributions) -> InFlight[dict[str, Merged]]:
        self.launched.append((bucket.name, contributions.sections))

        def wait() -> None:
            self.waited += 1

        # Which launch this was, in the place of a sum.
        mark = Merged(torch.tensor(float(len(self.launched))), None)
        return InFlight({slot.name: mark for slot in bucket.owned[self.rank]}, Event(wait))

    reduce_to_segments = reduce


def recorded(rank: int, buckets: Sequence[ReduceBucket]) -> tuple[Recorder, Reducer]:
    recorder = Recorder(rank)
    return recorder, Reducer(recorder, buckets)  # type: ignore[arg-type]


def together(found: Iterable[dict[str, Merged]]) -> dict[str, Merged]:
    return {name: merged for each in found for name, merged in each.items()}


class Did(Enum):
    REPORT = "report"
    INVALIDATE = "invalidate"


class Move(NamedTuple):
    """What one rank does to one slot."""

    did: Did
    name: str
    value: float


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[ReduceBucket], list[list[Move]]]:
    """Buckets, and what each rank does before the end of the round, in an order of its own."""
    world_size = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    buckets, names = [], []
    for i, size in enumerate(sizes):
        slots = tuple(Slot(f"{i}.{j}", 1, draw(st.integers(0, world_size - 1)), masses=0) for j in range(size))
        buckets.append(ReduceBucket(f"bucket {i}", slots, world_size, torch.float64))
        names += [slot.name for slot in slots]
    # Powers of two: no sum rounds, and no two sums are equal by chance.
    powers = iter(range(60))
    ways = st.sampled_from([Did.REPORT, Did.REPORT, Did.REPORT, Did.INVALIDATE])
    moves = st.tuples(ways, st.sampled_from(names))
    events = [
        [Move(*move, 2.0 ** next(powers)) for move in draw(st.lists(moves, max_size=16))] for _ in range(world_size)
    ]
    return buckets, events


def act(reducer: Reducer, event: Move) -> None:
    if event.did is Did.REPORT:
        reducer.ready(event.name, torch.tensor(event.value, dtype=torch.float64), 1)
    else:
        reducer.invalidate(event.name)


def holds(events: Sequence[Move]) -> dict[str, float]:
    """What was last reported of each slot, and not invalidated since."""
    last = {event.name: event for event in events}
    return {name: event.value for name, event in last.items() if event.did is Did.REPORT}


def final_value(rank: int, name: str, held: dict[str, float]) -> float:
    """What a rank gives in the end: what holds, or something else of its own."""
    bucket, slot = map(int, name.split("."))
    return held.get(name, 2.0 ** -(1 + rank + 3 * (bucket + 4 * slot)))


@given(program=programs())
def test_all_ranks_launch_the_same_in_the_same_order_and_the_last_word_counts(
    program: tuple[list[ReduceBucket], list[list[Move]]],
) -> None:
    buckets, events = program
    recorders, reducers = zip(*(recorded(rank, buckets) for rank in range(len(events))), strict=True)
    for reducer, own in zip(reducers, events, strict=True):
        for event in own:
            act(reducer, event)
    early = [len(recorder.launched) for recorder in recorders]
    again = [any(flags) for flags in zip(*(reducer.stale_flags() for reducer in reducers), strict=True)]
    sums: defaultdict[str, float] = defaultdict(float)
    expected: defaultdict[str, float] = defaultdict(float)
    for rank, (recorder, reducer) in enumerate(zip(recorders, reducers, strict=True)):
        held, asked = holds(events[rank]), []

        def final(name: str, rank: int = rank, held: dict[str, float] = held, asked: list[str] = asked) -> Any:
            asked.append(name)
            return torch.tensor(final_value(rank, name, held), dtype=torch.float64), 1.0

        merged = together(reducer.finish(final, again))
        foreign = [slot.name for bucket in buckets for slot in bucket.slots if slot.owner != rank]
        needed = {
            slot.name
            for index, bucket in enumerate(buckets)
            for slot in bucket.slots
            if again[index] or (index >= early[rank] and slot.name not in held)
        }
        assert sorted(asked) == sorted(needed.intersection(foreign)), "asked for too much, too little, or its own"
        last = {name: (number, sections) for number, (name, sections) in enumerate(recorder.launched, 1)}
        for index, bucket in enumerate(buckets):
            number, sections = last[bucket.name]
            for owner, section in enumerate(torch.split(sections, list(bucket.sections))):
                if owner == rank:
                    assert not section.any(), "an owner sends itself nothing"
                for name, part in bucket.merged(section, owner).items():
                    sums[name] += float(part.total)
                    expected[name] += final_value(rank, name, held) if owner != rank else 0.0
            for slot in bucket.owned[rank]:
                assert merged[slot.name].total == number, "not the sums of the last launch"
            times = sum(name == bucket.name for name, _ in recorder.launched)
            assert times == (2 if again[index] else 1)
        assert merged.keys() == {slot.name for bucket in buckets for slot in bucket.owned[rank]}
        assert recorder.waited == len(recorder.launched)
    assert sums == expected
    orders = [[name for name, _ in recorder.launched] for recorder in recorders]
    assert all(order == orders[0] for order in orders)
    assert orders[0][: len(buckets)] == [bucket.name for bucket in buckets]


@given(program=programs())
def test_a_bucket_goes_when_it_and_all_before_it_are_complete_and_not_before(
    program: tuple[list[ReduceBucket], list[list[Move]]],
) -> None:
    buckets, events = program
    recorder, reducer = recorded(0, buckets)
    seen: set[str] = set()
    gone, stale = 0, [False] * len(buckets)
    for event in events[0]:
        act(reducer, event)
        index = int(event.name.split(".")[0])
        owner = next(slot.owner for slot in buckets[index].slots if slot.name == event.name)
        if index < gone:
            stale[index] |= owner != 0
        elif event.did is Did.REPORT:
            seen.add(event.name)
        else:
            seen.discard(event.name)
        while gone < len(buckets) and seen.issuperset(buckets[gone].names):
            gone += 1
        assert [name for name, _ in recorder.launched] == [bucket.name for bucket in buckets[:gone]]
        assert [reducer.launched(number) for number in range(len(buckets))] == [n < gone for n in range(len(buckets))]
        assert reducer.stale_flags() == stale


def one_slot_each(world_size: int, *names: str) -> list[ReduceBucket]:
    return [ReduceBucket(f"of {name}", (Slot(name, 1, 0, masses=0),), world_size) for name in names]


def nothing(_: str) -> tuple[Tensor, float]:
    return torch.zeros(1), 0.0


def test_a_bucket_goes_again_on_all_ranks_and_what_is_under_way_stays_as_it_is() -> None:
    """On one rank slot "a" is stale; the other has not reported it, and is asked once."""
    buckets = one_slot_each(3, "a", "b")
    for rank, reports in ((1, (("a", 1.0), ("b", 2.0), ("a", 3.0))), (2, ())):
        recorder, reducer = recorded(rank, buckets)
        for name, value in reports:
            reducer.ready(name, torch.tensor(value), 1)
        assert reducer.stale_flags() == [rank == 1, False]
        asked: list[str] = []

        def final(name: str, asked: list[str] = asked) -> tuple[Tensor, float]:
            asked.append(name)
            return torch.tensor(3.0), 1.0

        together(reducer.finish(final, [True, False]))
        assert asked == (["a"] if rank == 1 else ["b", "a"])
        early = [("of a", [1.0]), ("of b", [2.0])]
        left = [("of a", [0.0]), ("of b", [3.0])]
        assert [(name, sections.tolist()) for name, sections in recorder.launched] == [
            *(early if rank == 1 else left),
            ("of a", [3.0]),
        ]


def test_all_buckets_that_go_again_are_under_way_before_the_first_of_them_is_waited_for() -> None:
    recorder, reducer = recorded(1, one_slot_each(2, "a", "b"))
    for name in ("a", "b", "a", "b"):
        reducer.ready(name, torch.tensor(1.0), 1)
    next(reducer.finish(nothing, [True, True]))
    assert [name for name, _ in recorder.launched] == ["of a", "of b"] * 2


def test_while_backward_runs_no_bucket_under_way_is_waited_for() -> None:
    """Another rank may be elsewhere in its backward: to wait for it there could last forever."""
    slots = [(Slot(name, 1, owner, masses=0),) for owner, name in enumerate("ab")]
    buckets = [ReduceBucket(f"of {each.name}", (each,), 2, segmented=True) for (each,) in slots]
    recorder = Recorder(1, world_size=2)
    reducer = Reducer(recorder, buckets, limit=100)  # type: ignore[arg-type]
    for name in "ab":
        reducer.ready(name, torch.tensor(1.0), 1)
        assert recorder.waited == 0
    assert [name for name, _ in recorder.launched] == ["of a", "of b"], "the second would have had to wait"


def test_each_round_starts_from_nothing() -> None:
    recorder, reducer = recorded(1, one_slot_each(2, "a", "b"))
    for value in (1.0, 2.0):
        reducer.ready("a", torch.tensor(value), 1)
        reducer.ready("a", torch.tensor(value), 1)
        assert reducer.stale_flags() == [True, False]
        assert together(reducer.finish(nothing, [False, False])) == {}
        assert reducer.stale_flags() == [False, False]
    assert [sections.tolist() for _, sections in recorder.launched] == [[1], [0], [2], [0]]


def test_a_round_that_is_abandoned_launches_what_is_left_and_leaves_nothing_behind() -> None:
    recorder, reducer = recorded(1, one_slot_each(2, "a", "b"))
    reducer.ready("a", torch.tensor(1.0), 1)
    reducer.abandon()
    assert [name for name, _ in recorder.launched] == ["of a", "of b"]
    together(reducer.finish(nothing, [False, False]))
    assert [sections.tolist() for _, sections in recorder.launched[2:]] == [[0], [0]]


def test_two_slots_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="kfac_optim: a name may be in one bucket only, got 'a' more than once"):
        recorded(0, one_slot_each(1, "a", "b", "a"))


# -- on processes: means of factors ------------------------------------------------------------------------------


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
    """Several rounds, each reporting in another order; what a rank has not is asked for at the end."""
    trace: list[Message] = []
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
            sizes = {slot.name: slot.elements for bucket in buckets for slot in bucket.slots}
            final = lambda name, sizes=sizes: (torch.empty(sizes[name]), 0.0)  # noqa: E731
            merged = together(reducer.finish(final, [False, False]))
            rounds.append({name: (part.total.clone(), part.mass) for name, part in merged.items()})
    return {"rounds": rounds, "trace": trace, "counted": counted}


def check_merged_factors(ranks: Ranks) -> None:
    world_size = ranks.world_size
    answers = ranks.run(merge_factors, torch.float64, 4)
    buckets = factor_buckets(world_size, torch.float64)
    owners = {slot.name: slot.owner for bucket in buckets for slot in bucket.slots}
    for rank, answer in enumerate(answers):
        first, *others = answer["rounds"]
        assert set(first) == {name for name, owner in owners.items() if owner == rank}
        for layer, (total, mass) in first.items():
            same_order = torch.zeros_like(total)
            rows = 0
            for other in range(world_size):
                if other != rank and ROWS[other].get(layer, 0):
                    moment, count = local_means(other)[layer]
                    same_order += (pack_triangle(moment) * count).flatten()
                    rows += count
            assert torch.equal(total, same_order)
            assert mass == rows
            # With what the owner holds itself, it is the mean of all rows.
            held, own = local_means(rank).get(layer, (torch.zeros(()), 0))
            if own:
                total, mass = total + (pack_triangle(held) * own).flatten(), mass + own
            together = torch.cat([inputs(r, layer, ROWS[r].get(layer, 0)) for r in range(world_size)], 1)
            joined = together.mT @ together / max(together.shape[1], 1)
            dim, groups = LAYERS[layer]
            mean = (total / mass).nan_to_num().view(groups, -1)
            torch.testing.assert_close(unpack_triangle(mean, dim), joined, rtol=1e-12, atol=1e-14)
        for other in others:
            assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], other[name], strict=True))
    for rank, answer in enumerate(answers):
        assert [launch.name for launch in answer["trace"]] == ["first", "second"] * 4
        predicted = [message.sent_bytes for bucket in buckets for message in bucket.messages(rank)] * 4
        assert answer["counted"] == [launch.sent_bytes for launch in answer["trace"]] == predicted


def test_means_merge_exactly_on_two_ranks_in_any_order_of_reports_and_send_what_was_predicted(two_ranks: Ranks) -> None:
    check_merged_factors(two_ranks)


def test_and_on_four(four_ranks: Ranks) -> None:
    check_merged_factors(four_ranks)


# -- on processes: any order, any number of times ----------------------------------------------------------------


SEEDS = range(24)


def wild_buckets(seed: int, world_size: int) -> list[ReduceBucket]:
    chance = random.Random(seed)
    buckets = []
    for i in range(chance.randint(1, 4)):
        slots = tuple(Slot(f"{i}.{j}", chance.randint(0, 9), chance.randrange(world_size)) for j in range(3))
        buckets.append(ReduceBucket(f"bucket {i}", slots, world_size, torch.float64))
    return buckets


class Report(NamedTuple):
    """One call of `Reducer.ready`."""

    name: str
    values: Tensor
    mass: float


def wild_reports(seed: int, buckets: Sequence[ReduceBucket], rank: int) -> list[Report]:
    """In an order of its own; some slots never, some twice or three times, and late then more often than not."""
    chance = random.Random(1000 * seed + rank)
    slots = [slot for bucket in buckets for slot in bucket.slots for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))]
    chance.shuffle(slots)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        Report(slot.name, torch.randn(slot.elements, generator=generator, dtype=torch.float64), chance.randint(0, 3))
        for slot in slots
    ]


def last_word(seed: int, buckets: Sequence[ReduceBucket], rank: int) -> dict[str, tuple[Tensor, float]]:
    """What a rank gives in the end: ones where it reported nothing."""
    silent = {slot.name: (torch.ones(slot.elements), 1.0) for bucket in buckets for slot in bucket.slots}
    return silent | {name: (values, mass) for name, values, mass in wild_reports(seed, buckets, rank)}


def run_wild(rank: int) -> list[tuple[list[str], dict[str, tuple[Tensor, Tensor | None]]]]:
    answers = []
    for seed in SEEDS:
        trace: list[Message] = []
        with communicator(trace) as comm, communicator() as votes:
            buckets = wild_buckets(seed, comm.world_size)
            reducer = Reducer(comm, buckets)
            for report in wild_reports(seed, buckets, rank):
                reducer.ready(*report)
            vote = votes.all_reduce("vote", torch.tensor(reducer.stale_flags()).byte(), dist.ReduceOp.MAX).wait()
            merged = together(reducer.finish(last_word(seed, buckets, rank).__getitem__, vote.bool().tolist()))
        answers.append(([launch.name for launch in trace], {name: tuple(part) for name, part in merged.items()}))
    return answers


def check_wild(ranks: Ranks) -> None:
    answers = ranks.run(run_wild)
    resent = 0
    for index, seed in enumerate(SEEDS):
        traces = [answer[index][0] for answer in answers]
        assert all(trace == traces[0] for trace in traces)
        buckets = wild_buckets(seed, ranks.world_size)
        resent += len(traces[0]) - len(buckets)
        words = [last_word(seed, buckets, rank) for rank in range(ranks.world_size)]
        for owner, answer in enumerate(answers):
            merged = answer[index][1]
            slots = {slot.name: slot for bucket in buckets for slot in bucket.owned[owner]}
            assert merged.keys() == slots.keys()
            for name, (total, mass) in merged.items():
                others = [word[name] for rank, word in enumerate(words) if rank != owner]
                expected = sum((weight * values for values, weight in others), torch.zeros(slots[name].elements))
                torch.testing.assert_close(total, expected.double(), rtol=1e-12, atol=1e-12)
                assert mass == sum(weight for _, weight in others)
    assert resent > 0


def test_slots_reported_twice_never_or_on_some_ranks_in_any_order_count_once(two_ranks: Ranks) -> None:
    check_wild(two_ranks)


def test_slots_reported_at_random_on_four_ranks(four_ranks: Ranks) -> None:
    check_wild(four_ranks)
