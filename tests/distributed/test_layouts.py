"""Layouts of buckets, without communication: an exchange is played by cutting and adding here."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfac_optim.distributed.communication.layouts import Contributions, Merged, ReduceBucket, Slot
from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket
from kfac_optim.distributed.communication.segments import Segments, batches, splits
from kfac_optim.linalg.triangles import pack_triangle, triangle_size, unpack_triangle

CPU = torch.device("cpu")
PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def exchanged(bucket: ReduceBucket, given_: list[Contributions]) -> dict[str, Merged]:
    """All slots, each as its owner sums it."""
    merged: dict[str, Merged] = {}
    wires = [
        torch.split(bucket.encode(each.sections, rank), bucket.sent_sections(rank)) for rank, each in enumerate(given_)
    ]
    for owner in range(bucket.world_size):
        total = torch.zeros(bucket.sections[owner], dtype=bucket.sum_dtype)
        assert [len(wire[owner]) for wire in wires] == bucket.received_sections(owner)
        for rank, wire in enumerate(wires):
            if rank != owner:
                total += bucket.decode(wire[owner], splits(bucket.sections)[owner])
        merged |= bucket.merged(total, owner)
    return merged


@st.composite
def reduce_buckets(draw: st.DrawFn) -> ReduceBucket:
    world_size = draw(st.integers(1, 4))
    slots = []
    for i in range(draw(st.integers(1, 5))):
        masses = draw(st.integers(0, 2))
        elements = draw(st.integers(0, 5)) * max(masses, 1)
        slots.append(Slot(f"layer{i}", elements, draw(st.integers(0, world_size - 1)), masses))
    return ReduceBucket("bucket", tuple(slots), world_size, draw(st.sampled_from(PAYLOADS)))


# Rows of a rank: three or more take more bits than bfloat16 has.
MASSES = st.sampled_from([0.0, 1.0, 3.0, 1001.0, 100003.0])


@given(bucket=reduce_buckets(), data=st.data())
def test_every_slot_comes_out_as_the_sum_of_what_travelled_and_masses_are_exact(
    bucket: ReduceBucket, data: st.DataObject
) -> None:
    contributions = [Contributions(bucket, rank, CPU) for rank in range(bucket.world_size)]
    totals = {slot.name: torch.zeros(slot.elements, dtype=bucket.sum_dtype) for slot in bucket.slots}
    masses = {slot.name: torch.zeros(max(slot.masses, 1), 1, dtype=bucket.sum_dtype) for slot in bucket.slots}
    for rank, each in enumerate(contributions):
        for slot in bucket.slots:
            if slot.owner != rank and data.draw(st.booleans()):
                values = torch.randn(slot.elements, dtype=torch.float64)
                mass = torch.tensor([[data.draw(MASSES)] for _ in masses[slot.name]], dtype=bucket.sum_dtype)
                each.put(slot.name, values, mass)
                parts = values.to(bucket.sum_dtype).view(len(mass), slot.elements // len(mass))
                totals[slot.name] += (parts * mass).to(bucket.payload).to(bucket.sum_dtype).flatten()
                masses[slot.name] += mass
    merged = exchanged(bucket, contributions)
    assert set(merged) == set(bucket.names)
    for slot in bucket.slots:
        total, mass = merged[slot.name]
        assert torch.equal(total, totals[slot.name])
        assert (mass is not None) == bool(slot.masses)
        if mass is not None:
            assert torch.equal(mass, masses[slot.name].flatten())


@given(bucket=reduce_buckets())
def test_bytes_are_those_of_the_values_and_of_one_mass_in_the_dtype_of_sums(bucket: ReduceBucket) -> None:
    mass = max(bucket.payload.itemsize, 4)
    size = {slot.name: slot.elements * bucket.payload.itemsize + mass * slot.masses for slot in bucket.slots}
    for rank in range(bucket.world_size):
        sent = sum(size[slot.name] for slot in bucket.slots if slot.owner != rank)
        assert sum(message.sent_bytes for message in bucket.messages(rank)) == sent
        assert bucket.encode(Contributions(bucket, rank, CPU).sections, rank).nbytes == sent
    everyones = sum(message.sent_bytes for rank in range(bucket.world_size) for message in bucket.messages(rank))
    assert everyones == (bucket.world_size - 1) * sum(size.values())


def test_triangles_take_half_of_what_matrices_take() -> None:
    """`(P - 1) t` words, with `t = d(d + 1) / 2` of each factor, and a mass."""
    dims = (5, 8, 64)
    slots = tuple(Slot(f"{dim}", triangle_size(dim), dim % 4) for dim in dims)
    bucket = ReduceBucket("bucket", slots, 4)
    t = sum(dim * (dim + 1) // 2 for dim in dims)
    sent = sum(message.sent_bytes for rank in range(4) for message in bucket.messages(rank))
    assert sent == 3 * (t + len(dims)) * 4


@given(rows=st.lists(st.integers(0, 6), min_size=1, max_size=4), groups=st.integers(1, 2), dim=st.integers(1, 4))
def test_the_merged_sum_is_that_of_all_rows_however_they_are_spread(rows: list[int], groups: int, dim: int) -> None:
    """Those of the ranks that do not own it."""
    bucket = ReduceBucket("bucket", (Slot("A", groups * triangle_size(dim), 0),), len(rows) + 1, torch.float64)
    inputs = [torch.randn(groups, count, dim, dtype=torch.float64) for count in rows]
    contributions = [Contributions(bucket, rank, CPU) for rank in range(len(rows) + 1)]
    for each, x, count in zip(contributions[1:], inputs, rows, strict=True):
        each.put("A", pack_triangle(x.mT @ x / count), count)  # 0/0 where a rank saw nothing
    total, mass = exchanged(bucket, contributions)["A"]
    assert mass == sum(rows)
    together = torch.cat(inputs, 1)
    expected = together.mT @ together
    merged = unpack_triangle(total.view(groups, -1), dim)
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-14)


def test_what_weighs_nothing_counts_for_nothing_and_the_last_report_holds() -> None:
    bucket = ReduceBucket("bucket", (Slot("a", 2, 0), Slot("b", 2, 0)), 2)
    contributions = Contributions(bucket, 1, CPU)
    both = [Contributions(bucket, 0, CPU), contributions]
    contributions.put("a", torch.tensor([4.0, 8.0], dtype=torch.bfloat16), torch.tensor(0.5, dtype=torch.float64))
    assert exchanged(bucket, both)["a"].total.tolist() == [2, 4]
    contributions.put("a", torch.tensor([[1.0], [2.0]], requires_grad=True), 3)
    merged = exchanged(bucket, both)
    assert merged["a"].total.tolist() == [3, 6]
    assert merged["a"].mass == 3
    assert merged["b"].total.tolist() == [0, 0]
    assert merged["b"].mass == 0
    for mass in (0, 0.0, torch.tensor(0), torch.tensor(torch.nan), -1.0):
        contributions.put("a", torch.ones(2), 1)
        contributions.put("a", torch.tensor([torch.nan, torch.inf]), mass)
        assert not contributions.sections.any()


def test_values_of_another_size_are_refused_before_anything_is_put_in() -> None:
    contributions = Contributions(ReduceBucket("factors 0", (Slot("fc A", 3, 0),), 2), 1, CPU)
    with pytest.raises(ValueError, match=re.escape("kfac_optim: 'fc A' in bucket 'factors 0' has 3 elements, got 1;")):
        contributions.put("fc A", torch.ones(1), 1)
    assert not contributions.sections.any()


def test_a_layout_that_cannot_be_is_refused() -> None:
    a, b = Slot("a", 1, 0), Slot("b", 1, 1)
    for slots, payload, told in (
        ((), torch.float32, "'x' holds nothing"),
        ((a, b, a), torch.float32, "names in bucket 'x' must differ, got 'a' more than once"),
        ((Slot("a", 1, 2),), torch.float32, "the owner of 'a' in bucket 'x' must be ranks from 0 to 1, got 2"),
        ((Slot("a", -1, 0),), torch.float32, "'a' in bucket 'x' must have 0 elements or more, got -1"),
        ((a,), torch.int32, "the payload of bucket 'x' must be one of torch.float64, .* got torch.int32"),
    ):
        with pytest.raises(ValueError, match=f"kfac_optim: .*{told}"):
            ReduceBucket("x", slots, 2, payload)
    for parcels, told in (
        ((), "'x' holds nothing"),
        ((Parcel("p", 1, 2, ()),), "the source and the targets of 'p' in bucket 'x' must be ranks from 0 to 1, got 2"),
        ((Parcel("p", 1, 0, (-1,)),), "must be ranks from 0 to 1, got -1"),
        ((Parcel("p", 1, 0, (1, 0)),), r"the targets of 'p' in bucket 'x' must ascend, got \(1, 0\)"),
        ((Parcel("p", 1, 0, (1, 1)),), r"must ascend, got \(1, 1\)"),
        ((Parcel("p", -1, 0, ()),), "must have 0 elements or more"),
    ):
        with pytest.raises(ValueError, match=f"kfac_optim: .*{told}"):
            ShareBucket("x", parcels, 2)


def test_long_lists_of_names_are_cut_short_in_messages() -> None:
    slots = tuple(Slot(f"{i // 2}", 1, 0) for i in range(24))
    with pytest.raises(ValueError, match="got '0', '1', '2', '3', '4', '5', '6', '7' and 4 more more than once"):
        ReduceBucket("x", slots, 1)


@st.composite
def share_buckets(draw: st.DrawFn) -> ShareBucket:
    world_size = draw(st.integers(1, 4))
    rank = st.integers(0, world_size - 1)
    parcels = [
        Parcel(f"p{i}", draw(st.integers(0, 5)), draw(rank), tuple(sorted(draw(st.sets(rank)))))
        for i in range(draw(st.integers(1, 5)))
    ]
    return ShareBucket("bucket", tuple(parcels), world_size, draw(st.sampled_from(PAYLOADS)))


@given(bucket=share_buckets())
def test_what_one_rank_sends_another_expects_and_each_target_gets_each_parcel_once(bucket: ShareBucket) -> None:
    ranks = range(bucket.world_size)
    pairs = [(source, target) for source in ranks for target in ranks]
    crossing = [(parcel, target) for s, target in pairs for parcel in bucket.sent_by(s)[target]]
    assert all(bucket.sent_by(source)[target] == bucket.received_by(target)[source] for source, target in pairs)
    expected = [(parcel, target) for parcel in bucket.parcels for target in parcel.targets]
    assert sorted(crossing, key=str) == sorted(expected, key=str)
    words = sum(parcel.elements for parcel, target in expected if target != parcel.source)
    sent = sum(message.sent_bytes for rank in ranks for message in bucket.messages(rank))
    assert sent == words * bucket.payload.itemsize


def test_an_even_gather_is_told_from_what_only_looks_like_one() -> None:
    def bucket(*parcels: tuple[int, int, tuple[int, ...]]) -> ShareBucket:
        return ShareBucket("x", tuple(Parcel(f"{i}", *parcel) for i, parcel in enumerate(parcels)), 2)

    assert bucket((2, 0, (0, 1)), (1, 1, (0, 1)), (1, 1, (0, 1))).is_even_gather
    assert not bucket((2, 0, (0, 1)), (1, 1, (0, 1))).is_even_gather
    assert not bucket((2, 0, (0, 1))).is_even_gather
    assert not bucket((2, 0, (1,)), (2, 1, (0, 1))).is_even_gather


@given(pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8), ranks=st.just(4))
def test_segments_take_every_element_to_its_owner_and_no_further(pieces: list[tuple[int, int]], ranks: int) -> None:
    segments = Segments(tuple(pieces), ranks)
    owners = [owner for owner, size in pieces for _ in range(size)]
    found = list(owners)
    for rank in range(ranks):
        place = segments.segment(rank)
        assert place.stop - place.start == segments.lengths[rank] <= segments.length
        for owner, start, stop in segments.within(rank):
            assert set(owners[place][start:stop]) == {owner}
            found[place.start + start : place.start + stop] = [-1] * (stop - start)
        assert segments.for_owners(rank) == tuple(owners[place].count(owner) for owner in range(ranks))
        assert segments.at_home[rank] == segments.for_owners(rank)[rank]
        assert segments.from_segments(rank) == tuple(segments.for_owners(other)[rank] for other in range(ranks))
    assert set(found) <= {-1}
    assert segments.crossing() == len(owners) - sum(segments.at_home)


def test_rows_go_to_owners_together_while_no_owner_has_more_than_the_largest_row() -> None:
    rows: list[dict[int, float]] = [{0: 4}, {1: 4}, {0: 3, 1: 1}, {0: 1, 1: 1}, {0: 5}]
    assert batches(rows) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert batches(rows, 3) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert batches(rows, 8) == [slice(0, 4), slice(4, 5)]
    assert batches([{0: 1, 1: 1}]) == [slice(0, 1)]
    assert batches([]) == []


def test_by_segments_what_some_rank_does_not_need_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"bucket 'x' goes by segments.* but 'p' is for ranks \(1,\); send it directly"
    ):
        ShareBucket("x", (Parcel("p", 1, 0, (1,)),), 3, segmented=True)
