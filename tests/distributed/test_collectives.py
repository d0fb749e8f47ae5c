"""Collectives on gloo processes against sums on paper."""

import os
import random
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import CPU, PAYLOADS, communicator, counted_bytes
from helpers.ranks import RankError, Ranks
from torch import Tensor

from kfac_optim import Cholesky, LayerSpec
from kfac_optim.distributed import CostModel, Covered, Plan, Sharded, differences, make_plan
from kfac_optim.distributed.communication import collectives
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.launcher import Launcher
from kfac_optim.distributed.communication.launches import Event, InFlight
from kfac_optim.distributed.communication.layouts import Contributions, ReduceBucket, Slot
from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket
from kfac_optim.distributed.planning.plan import remedy

SEEDS = range(24)


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_as_a_look_out_ends_has_come(fails: bool) -> None:
    """A rank waits in look-outs of a second or so; one that times out says nothing of the message itself."""
    work = mock.Mock()
    work.wait.side_effect = [RuntimeError("timed out"), RuntimeError("broken") if fails else True]
    work.is_completed.return_value = True
    launcher = mock.Mock(timeout=timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        Launcher._wait_on_host(launcher, work)
    assert work.wait.call_count == 2


def test_what_has_ended_is_not_waited_for_again() -> None:
    waits: list[str] = []
    flight = InFlight("result", Event(lambda: waits.append("once")))
    assert flight.wait() == flight.wait() == "result"
    flight.event.wait()
    assert waits == ["once"]


# -- sums --------------------------------------------------------------------------------------------------------


def given_by(rank: int, slot: Slot) -> tuple[Tensor, int]:
    """Values and mass; some ranks have nothing."""
    generator = torch.Generator().manual_seed(100 * rank + slot.elements)
    return torch.randn(slot.elements, generator=generator, dtype=torch.float64), (3 * rank + slot.elements) % 4


def reduced(comm: Communicator, bucket: ReduceBucket) -> dict[str, tuple[Tensor, Tensor | None]]:
    contributions = Contributions(bucket, comm.rank, CPU)
    for slot in bucket.slots:
        if slot.owner != comm.rank:
            contributions.put(slot.name, *given_by(comm.rank, slot))
    return {name: tuple(part) for name, part in comm.reduce(bucket, contributions).wait().items()}


def uneven_bucket(world_size: int, payload: torch.dtype) -> ReduceBucket:
    """With more than two ranks some own nothing."""
    slots = (Slot("a", 3, 1), Slot("b", 2, 0), Slot("c", 5, 0, masses=0), Slot("d", 7, 1))
    return ReduceBucket("uneven", slots, world_size, payload)


def reduce_in_all_payloads(_: int) -> list[tuple[dict[str, tuple[Tensor, Tensor | None]], list[float], list[float]]]:
    answers = []
    for payload in PAYLOADS:
        trace: list[Message] = []
        with communicator(trace) as comm, counted_bytes() as counted:
            merged = reduced(comm, uneven_bucket(comm.world_size, payload))
            answers.append((merged, counted, [launch.sent_bytes for launch in trace]))
    return answers


def check_sums(ranks: Ranks) -> None:
    """Exact, in the order of ranks; a narrow payload rounds what is sent once, and nothing else."""
    everyones = ranks.run(reduce_in_all_payloads)
    for index, payload in enumerate(PAYLOADS):
        bucket, wide = uneven_bucket(ranks.world_size, payload), torch.promote_types(payload, torch.float32)
        for rank, answers in enumerate(everyones):
            merged, counted, traced = answers[index]
            assert counted == traced == [message.sent_bytes for message in bucket.messages(rank)]
            assert list(merged) == [slot.name for slot in bucket.slots if slot.owner == rank]
            for slot in bucket.owned[rank]:
                total, mass = merged[slot.name]
                shares = [given_by(other, slot) for other in range(ranks.world_size) if other != rank]
                expected = torch.zeros(slot.elements, dtype=wide)
                for values, weight in shares:
                    expected += (values.to(wide) * weight).to(payload).to(wide)
                assert torch.equal(total, expected)
                assert total.dtype == wide
                if slot.masses:
                    assert mass.dtype == wide
                    assert mass == sum(weight for _, weight in shares)
                else:
                    assert mass is None


def test_sums_go_to_their_owners_and_take_the_bytes_that_were_predicted(two_ranks: Ranks) -> None:
    check_sums(two_ranks)


def test_and_on_four(four_ranks: Ranks) -> None:
    check_sums(four_ranks)


class Scattering(Communicator):
    """Reduces as on an accelerator, on gloo."""

    def _scatters(self, bucket: ReduceBucket) -> bool:
        return True


def scatter(_: int) -> tuple[list[dict[str, tuple[Tensor, Tensor | None]]], list[bool]]:
    slots = (Slot("a", 3, 1), Slot("b", 2, 0), Slot("c", 2, 0, masses=0))
    even = ReduceBucket("even", (*slots, Slot("d", 1, 1, masses=0)), 2, torch.float64)
    with communicator(kind=Scattering) as comm, communicator() as exchanging:
        merged = [reduced(each, even) for each in (comm, exchanging)]
        narrow = ReduceBucket("narrow", even.slots, 2, torch.bfloat16)
        uneven = ReduceBucket("uneven", slots, 2)
        on = [Communicator(comm.group, torch.device(kind), timedelta(1)) for kind in ("cuda", "cpu")]
        return merged, [each._scatters(bucket) for each in on for bucket in (even, narrow, uneven)]


def test_a_reduce_scatter_gives_the_same_and_is_taken_for_even_sections_on_accelerators(two_ranks: Ranks) -> None:
    for rank, ((scattered, exchanged), scatters) in enumerate(two_ranks.run(scatter)):
        assert scatters == [True, False, False, False, False, False]
        assert list(scattered) == list(exchanged) == [["b", "c"], ["a", "d"]][rank]
        for (total, mass), (same_total, same_mass) in zip(scattered.values(), exchanged.values(), strict=True):
            assert torch.equal(total, same_total)
            assert mass == same_mass


def scatter_segments(_: int) -> list[Tensor]:
    bucket = ReduceBucket("even", (Slot("a", 3, 1), Slot("b", 2, 0)), 2, torch.float64, segmented=True)
    found = []
    for scatters in (False, True):
        with communicator() as comm, mock.patch.object(collectives, "has_reduce_scatter", return_value=scatters):
            contributions = Contributions(bucket, comm.rank, CPU)
            for slot in bucket.slots:
                if slot.owner != comm.rank:
                    contributions.put(slot.name, *given_by(comm.rank, slot))
            found.append(comm.reduce_to_segments(bucket, contributions).wait())
    return found


def test_segments_that_are_scattered_are_those_that_are_exchanged(two_ranks: Ranks) -> None:
    for exchanged, scattered in two_ranks.run(scatter_segments):
        assert exchanged.numel() > 0
        assert torch.equal(scattered, exchanged)


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
        trace: list[Message] = []
        with communicator(trace) as comm, counted_bytes() as counted:
            bucket = wild_shares(seed, comm.world_size)
            mine = {parcel.name: parcel_values(parcel) for parcel in bucket.parcels if parcel.source == rank}
            got = comm.share(bucket, mine).wait()
            (message,) = bucket.messages(rank)
            answers.append((got, counted, [launch.sent_bytes for launch in trace], message.sent_bytes))
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
    return told


def test_what_cannot_be_sent_is_refused_by_name(two_ranks: Ranks) -> None:
    for rank, (missing, short) in enumerate(two_ranks.run(refuse)):
        send = f"rank {rank} is to send 3 elements of 'fc {rank}' in bucket 'inverses', got "
        assert missing.endswith(send + "nothing.")
        assert short.endswith(send + "2.")


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


def plan_of(rank: int, world_size: int, odd: int) -> Plan:
    """All alike but of one rank, that has one more layer than is wise."""
    layers = [Covered(LayerSpec(f"l{i}", ("weight",), 6, 4), Cholesky()) for i in range(3)]
    if rank == odd:
        layers[1] = Covered(LayerSpec("l1", ("weight",), 5, 4), Cholesky())
    return make_plan(layers, world_size, Sharded(), CostModel(1, 1))


def agree(rank: int) -> list[str]:
    """What the ranks are told where one of them, each in turn, has planned otherwise."""
    told = []
    with communicator() as comm:
        for odd in range(-1, comm.world_size):
            mine = plan_of(rank, comm.world_size, odd).agreement()
            if odd < 0:
                comm.check_agreement(dict(reversed(mine.items())) if rank else mine, differences, remedy)
                continue
            with pytest.raises(RuntimeError) as error:
                comm.check_agreement(mine, differences, remedy)
            told.append(str(error.value))
        assert comm.all_reduce("after", torch.ones(1)).wait() == comm.world_size
    return told


def test_ranks_that_planned_otherwise_are_told_so_on_all_ranks(four_ranks: Ranks) -> None:
    for rank, told in enumerate(four_ranks.run(agree)):
        for odd, message in enumerate(told):
            others = "1, 2, 3" if odd == 0 else str(odd)
            here, there = (5, 6) if odd == 0 else (6, 5)
            assert message.startswith("kfac_optim: the ranks disagree about what is to be communicated. Of 4 ranks ")
            assert f"ranks {others} differ from rank 0 (this is rank {rank}). Rank 0 (here) and rank " in message
            assert f"rank {odd or 1} (there): layer 'l1': weight 1×4×{here}, " in message
            assert f" here, weight 1×4×{there}, " in message
            assert "hand over the same parameters, with the same arguments, on every rank" in message


def disagree_about_much(rank: int) -> str:
    with communicator() as comm, pytest.raises(RuntimeError) as error:
        comm.check_agreement({f"layer {i}": str(rank) for i in range(20)}, differences, remedy)
    return str(error.value)


def test_only_the_first_differences_are_told(two_ranks: Ranks) -> None:
    for message in two_ranks.run(disagree_about_much):
        assert message.count(" here, 1 there") == 8
        assert "; layer 7: 0 here, 1 there and 12 more. Where" in message


def disagree_in_a_group(rank: int) -> str:
    group, timeout = dist.new_group([2, 3]), timedelta(seconds=30)
    if rank < 2:
        return ""
    own = {"owner of 'layer'": str(rank - 2)}
    with pytest.raises(RuntimeError) as error:
        Communicator(group, CPU, timeout).check_agreement(own, differences, remedy)
    return str(error.value)


def test_of_a_part_of_all_ranks_it_is_told_how_they_are_counted(four_ranks: Ranks) -> None:
    for message in four_ranks.run(disagree_in_a_group)[2:]:
        assert "rank 3 (there): owner of 'layer': 0 here, 1 there (where a plan names ranks" in message
        assert "it counts them within the group of ranks 2, 3)" in message


# -- faults ------------------------------------------------------------------------------------------------------


def one_slot_each(world_size: int, name: str) -> ReduceBucket:
    """Every rank waits for all others."""
    slots = tuple(Slot(f"{name} {owner}", 1, owner) for owner in range(world_size))
    return ReduceBucket(f"of {name}", slots, world_size)


def wait_for_a_slow_rank(rank: int) -> str:
    with communicator() as patient:
        comm = Communicator(patient.group, CPU, timedelta(seconds=1.5))
        if rank == 1:
            time.sleep(5.5)
            return ""
        bucket = one_slot_each(2, "fc1")
        flight = comm.reduce(bucket, Contributions(bucket, rank, CPU))
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            flight.wait()
        assert time.monotonic() - start < 5
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.slow
def test_a_collective_that_takes_too_long_names_its_bucket_its_layers_and_the_rank_that_never_came(
    two_ranks: Ranks,
) -> None:
    told, _ = two_ranks.run(wait_for_a_slow_rank)
    assert re.match(
        r"CollectiveError: kfac_optim: on rank 0 of 2 the collective of 'of fc1' \(layers 'fc1 0', 'fc1 1'\) "
        r"failed after 1\.[56] s \(time-out 1\.5 s\): .* No word from rank 1: gone, or at another place in the "
        r"program\.",
        told,
    )


def go_on_without_one(rank: int) -> str:
    with communicator() as comm:
        first, second = one_slot_each(4, "fc1 A"), one_slot_each(4, "fc1 G")
        comm.reduce(first, Contributions(first, rank, CPU)).wait()
        if rank == 2:
            os._exit(1)
        with pytest.raises(RuntimeError) as error:
            comm.reduce(second, Contributions(second, rank, CPU)).wait()
        return f"{type(error.value).__name__}: {error.value}"


def test_when_a_rank_dies_the_others_name_it_and_what_they_were_waiting_for(four_ranks: Ranks) -> None:
    with pytest.raises(RankError) as error:
        four_ranks.run(go_on_without_one)
    told: Mapping[str, str] = dict(re.findall(r"-- rank (\d): (.*)", str(error.value)))
    assert told.pop("2") == "died, exit code 1"
    for rank, message in told.items():
        assert re.match(
            rf"CollectiveError: kfac_optim: on rank {rank} of 4 the collective of 'of fc1 G' "
            rf"\(layers 'fc1 G 0', 'fc1 G 1', 'fc1 G 2', 'fc1 G 3'\) failed after .* "
            rf"No word from rank 2: gone, or at another place in the "
            rf"program\.",
            message,
        ), message
