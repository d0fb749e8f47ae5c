"""What a plan predicts, and what its layouts send: the same bytes, to whom they are needed, in the plan's order."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from helpers.collectives import communicator, counted_bytes
from helpers.plans import COST, equal_layers, models, options_, strategies_
from helpers.ranks import Ranks
from helpers.training import EXAMPLES, Mixed, build, examples, share, squares
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import EKFAC, BlockDiagonal, Cholesky, KFACOptimizer, LayerSpec, Structure
from kfac_optim.distributed import (
    Collective,
    Covered,
    DistributedConfig,
    Placement,
    Plan,
    PlanOptions,
    Replicated,
    Sharded,
    Statistics,
    Uncovered,
    make_plan,
)
from kfac_optim.distributed.communication.layouts import Contributions, ReduceBucket
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import (
    all_buckets,
    gradient_buckets,
    gradient_means,
    parameter_buckets,
    preconditioned_buckets,
    preconditioned_name,
    result_buckets,
    result_name,
    slot_name,
    sum_buckets,
    sum_limit,
)
from kfac_optim.distributed.statistics import exchange

Layout = Callable[[Plan, Collection[str]], tuple[ReduceBucket, ...] | tuple[ShareBucket, ...]]

LAYOUTS: dict[Payload, Layout] = {
    Payload.SUMS: sum_buckets,
    Payload.INVERSES: result_buckets,
    Payload.PRECONDITIONED: preconditioned_buckets,
    Payload.GRADIENTS: gradient_buckets,
    Payload.PARAMETERS: parameter_buckets,
}


def layouts_of(plan: Plan) -> dict[Payload, Layout]:
    """Those that the strategy has; gradients under `Replicated` are left to DDP."""
    ours = dict(LAYOUTS)
    if isinstance(plan.strategy, Replicated):
        del ours[Payload.GRADIENTS], ours[Payload.PARAMETERS]
    return ours


def all_names(plan: Plan, payload: Payload) -> list[str]:
    names = [layer.name for layer in plan.layers]
    return names + [p.name for p in plan.parameters if payload in (Payload.GRADIENTS, Payload.PARAMETERS)]


def sent_bytes(plan: Plan, buckets: Collection[ReduceBucket | ShareBucket]) -> float:
    messages = (message for bucket in buckets for rank in range(plan.ranks) for message in bucket.messages(rank))
    return sum(message.sent_bytes for message in messages)


plans = st.builds(
    lambda model, ranks, strategy, options: make_plan(model, ranks, strategy, COST, options),
    models(),
    st.integers(1, 9),
    strategies_,
    options_,
)


@given(plan=plans)
def test_all_layers_together_send_what_the_plan_predicts(plan: Plan) -> None:
    predicted = {each.payload: each.words * each.itemsize for each in plan.traffic}
    for payload, layout in layouts_of(plan).items():
        buckets = layout(plan, all_names(plan, payload))
        by_all = [b for b in plan.buckets_of(payload) if b.collective is Collective.ALL_REDUCE]
        in_all = sum(2 * (plan.ranks - 1) * bucket.size for bucket in by_all)
        assert sent_bytes(plan, buckets) + in_all == predicted.get(payload, 0)
        by_group = Counter(bucket.members for bucket in plan.buckets_of(payload) if bucket not in by_all)
        assert len(buckets) == max(by_group.values(), default=0)
        assert all(bucket.payload.itemsize == plan.options.itemsize(payload) for bucket in buckets)
        assert all(bucket.world_size == plan.ranks for bucket in buckets)
        assert buckets == all_buckets(plan, payload)


@given(plan=plans)
def test_what_one_rank_sends_another_another_receives(plan: Plan) -> None:
    for payload, layout in layouts_of(plan).items():
        for bucket in layout(plan, all_names(plan, payload)):
            everyones = [bucket.messages(rank) for rank in range(plan.ranks)]
            for rank, own in enumerate(everyones):
                for number, message in enumerate(own):
                    to = tuple(others[number].from_[rank] for others in everyones)
                    assert message.to == to
            assert sent_bytes(plan, [bucket]) == bucket.moved_bytes


@given(plan=plans, data=st.data())
def test_layers_apart_send_together_what_all_send_and_nothing_twice(plan: Plan, data: st.DataObject) -> None:
    for payload, layout in layouts_of(plan).items():
        names = all_names(plan, payload)
        turns = [data.draw(st.booleans()) for _ in names]
        halves = [[n for n, turn in zip(names, turns, strict=True) if turn is which] for which in (False, True)]
        whole, parts = layout(plan, names), [layout(plan, half) for half in halves]
        if not plan.by_segments(payload):  # where segments end depends on what else is in a bucket
            assert sum(sent_bytes(plan, part) for part in parts) == sent_bytes(plan, whole)
        everything = sorted(name for bucket in whole for name in bucket.names)
        assert sorted(name for part in parts for bucket in part for name in bucket.names) == everything
        assert len(set(everything)) == len(everything)
        assert all(len(part) <= len(whole) for part in parts), "the vote has no room for them"
        order = [name for bucket in whole for name in bucket.names]
        if payload is not Payload.INVERSES:  # those of different groups are not in one order
            for part in parts:
                places = [order.index(name) for bucket in part for name in bucket.names]
                assert places == sorted(places)
        assert layout(plan, []) == ()
        assert layout(plan, set(names)) == whole


@given(plan=plans)
def test_each_rank_gets_what_it_needs(plan: Plan) -> None:
    ranks, workers = range(plan.ranks), plan.strategy.workers(plan.ranks)
    names = [layer.name for layer in plan.layers]
    slots = {slot.name: slot for bucket in sum_buckets(plan, names) for slot in bucket.slots}
    results = {parcel.name: parcel for bucket in result_buckets(plan, names) for parcel in bucket.parcels}
    rows = {parcel.name: parcel for bucket in preconditioned_buckets(plan, names) for parcel in bucket.parcels}
    merges = plan.ranks > 1 and plan.strategy.statistics is Statistics.ALL
    for layer in plan.layers:
        for each in layer.parts:
            part = each.part
            for number, factor in enumerate(part.sums if merges else ()):
                slot = slots.pop(slot_name(layer.name, part.name, number))
                assert (slot.elements, slot.owner, slot.masses) == (factor.packed, each.owner, factor.masses)
            takers = set(ranks) if merges else {*layer.workers, each.owner}
            for measuring, words, group in (
                (True, part.measuring, takers),
                (False, part.sent - part.measuring, {*layer.workers, each.owner}),
            ):
                parcel = results.pop(result_name(layer.name, part.name, measuring=measuring), None)
                assert (parcel is None) == (words == 0 or len(group) == 1)
                if parcel is not None:
                    assert (parcel.elements, parcel.source) == (words, each.owner)
                    assert set(parcel.targets) == group
        if isinstance(plan.strategy, Replicated) and workers < plan.ranks:
            for place, worker in enumerate(layer.workers):
                parcel = rows.pop(preconditioned_name(layer.name, place))
                assert (parcel.elements, parcel.source) == (layer.words, worker)
                assert parcel.targets == tuple(rank for rank in ranks if rank % workers == place)
                assert worker in parcel.targets
    assert not slots
    assert not results
    assert not rows


@given(model=models(), ranks=st.integers(1, 9), placement=st.sampled_from(Placement), options=options_)
def test_gradients_and_parameters_change_between_owners_and_all_others(
    model: list[Covered | Uncovered], ranks: int, placement: Placement, options: PlanOptions
) -> None:
    plan = make_plan(model, ranks, Sharded(placement), COST, options)
    owners = {layer.name: (layer.workers.start, layer.words) for layer in plan.layers}
    owners |= {parameter.name: (parameter.owner or 0, parameter.words) for parameter in plan.parameters}
    owners = {n: owned for n, owned in owners.items() if owned[1] and plan.ranks > 1 and n not in plan.everywhere}
    means = gradient_means(plan, all_names(plan, Payload.GRADIENTS))
    assert {name for held in means.values() for name in held} == plan.everywhere
    assert sum(row.elements for row in means) == sum(each.words for each in model if each.name in plan.everywhere)
    gradients = [slot for bucket in gradient_buckets(plan, all_names(plan, Payload.GRADIENTS)) for slot in bucket.slots]
    parcels = [p for bucket in parameter_buckets(plan, all_names(plan, Payload.PARAMETERS)) for p in bucket.parcels]
    assert {slot.name: (slot.owner, slot.elements) for slot in gradients} == owners
    assert {parcel.name: (parcel.source, parcel.elements) for parcel in parcels} == owners
    assert [slot.name for slot in gradients] == [parcel.name for parcel in parcels][::-1]
    assert not any(slot.masses for slot in gradients)
    for parcel in parcels:
        assert parcel.targets == tuple(rank for rank in range(plan.ranks) if rank != parcel.source)


def test_buckets_keep_to_the_bound_and_are_in_the_order_of_backward() -> None:
    """Of a layer 21 + 1 and 10 + 1 words of 4 bytes; of one with bfloat16 sums 21 + 2 and 10 + 2 of 2."""
    model = equal_layers(3, 6, 4)
    plan = make_plan(model, 2, Sharded(), COST, PlanOptions(bucket_bytes=33 * 4))
    found = [bucket.names for bucket in sum_buckets(plan, ["l0", "l2"])]
    assert found == [("l2 G 0", "l2 A 0"), ("l0 G 0", "l0 A 0")]
    tight = make_plan(model, 2, Sharded(), COST, PlanOptions(bucket_bytes=33 * 4 - 1))
    assert [bucket.names for bucket in sum_buckets(tight, ["l0"])] == [("l0 G 0",), ("l0 A 0",)]
    narrow = make_plan(model, 2, Sharded(), COST, PlanOptions(bucket_bytes=70, sums_dtype=torch.bfloat16))
    (bucket,) = sum_buckets(narrow, ["l0"])
    assert sum(bucket.wire_sections) * 2 == 70
    assert (bucket.payload, bucket.name) == (torch.bfloat16, "factor sums 0")


def test_names_leave_out_what_is_empty() -> None:
    model = [Covered(LayerSpec("", ("weight",), 3, 2), EKFAC())]
    plan = make_plan(model, 2, Replicated(0.5), COST)
    assert [bucket.names for bucket in sum_buckets(plan, [""])] == [("0", "1", "2")]
    assert [bucket.names for bucket in result_buckets(plan, [""])] == [("(bases)",)]
    assert slot_name("fc", "A", 0) == "fc A 0"
    assert result_name("fc", "", measuring=False) == "fc"


def test_groups_send_side_by_side_in_one_launch() -> None:
    plan = make_plan(equal_layers(4, 6, 4), 4, Replicated(0.5), COST, PlanOptions(bucket_bytes=31 * 4))
    buckets = result_buckets(plan, [layer.name for layer in plan.layers])
    assert len(plan.buckets_of(Payload.INVERSES)) == 4
    assert [{parcel.targets for parcel in bucket.parcels} for bucket in buckets] == [{(0, 1), (2, 3)}] * 2


# -- on processes ------------------------------------------------------------------------------------------------

MODEL: list[Covered | Uncovered] = [
    Covered(LayerSpec("conv", ("weight", "bias"), 7, 4), Cholesky()),
    Uncovered("scale", 5),
    Covered(LayerSpec("norm", ("weight", "bias"), 1, 2, 6, (Structure.IDENTITY, Structure.DENSE)), Cholesky()),
    Covered(LayerSpec("mid", ("weight",), 5, 5), EKFAC()),
    Covered(LayerSpec("head", ("weight",), 4, 9, structure=(Structure.DENSE, BlockDiagonal(4))), Cholesky()),
]
STRATEGIES = [
    Sharded(),
    Sharded(Placement.FACTORS),
    Replicated(),
    Replicated(0.5, Placement.FACTORS),
    Replicated(0.01, Placement.FACTORS),
    Replicated(0.5, statistics=Statistics.OWN),
]
OPTIONS = [
    PlanOptions(),
    PlanOptions(bucket_bytes=100, sums_dtype=torch.bfloat16, parameter_dtype=torch.bfloat16),
    PlanOptions(bucket_bytes=200, factor_dtype=torch.float64, parameter_dtype=torch.float64),
]


def send_all(rank: int) -> list[dict[Payload, float]]:
    """Bytes that this rank hands to collectives, of one refreshing step of each plan."""
    answers = []
    with communicator() as comm:
        for strategy in STRATEGIES:
            for options in OPTIONS:
                plan = make_plan(MODEL, comm.world_size, strategy, COST, options)
                sent: dict[Payload, float] = {}
                for payload, layout in layouts_of(plan).items():
                    with counted_bytes() as counted:
                        for bucket in layout(plan, all_names(plan, payload)):
                            send(comm, bucket, rank)
                    sent[payload] = sum(counted)
                for traffic in plan.traffic:
                    if traffic.payload.is_control:
                        with counted_bytes() as counted:
                            for bucket in plan.buckets_of(traffic.payload):
                                comm.all_reduce("control", torch.zeros(bucket.words, dtype=torch.int64)).wait()
                        sent[traffic.payload] = sum(counted)
                answers.append(sent)
    return answers


def send(comm: Any, bucket: ReduceBucket | ShareBucket, rank: int) -> None:
    if isinstance(bucket, ReduceBucket):
        comm.reduce(bucket, Contributions(bucket, rank, comm.device)).wait()
        return
    values: dict[str, Tensor] = {p.name: torch.ones(p.elements) for p in bucket.parcels if p.source == rank}
    got = comm.share(bucket, values).wait()
    assert got.keys() == {parcel.name for parcel in bucket.parcels if rank in parcel.targets}


def check_bytes(ranks: Ranks) -> None:
    answers = zip(*ranks.run(send_all), strict=True)
    for strategy in STRATEGIES:
        for options in OPTIONS:
            plan = make_plan(MODEL, ranks.world_size, strategy, COST, options)
            counted: Counter[Payload] = Counter()
            for sent in next(answers):
                counted.update(sent)
            predicted = {each.payload: each.words * each.itemsize for each in plan.traffic}
            if isinstance(strategy, Replicated):
                del predicted[Payload.GRADIENTS]
            assert {payload: size for payload, size in counted.items() if size} == predicted


def test_bytes_handed_to_collectives_are_those_of_the_plan(two_ranks: Ranks) -> None:
    check_bytes(two_ranks)


def test_and_on_four(four_ranks: Ranks) -> None:
    check_bytes(four_ranks)


def test_sums_wait_for_each_other_up_to_the_largest_bucket() -> None:
    plan = make_plan(equal_layers(3, 40, 2), 2, Replicated(), COST, PlanOptions(bucket_bytes=10**4))
    sizes = [bucket.size for payload in LAYOUTS for bucket in plan.buckets_of(payload)]
    assert sum_limit(plan, Payload.SUMS) == max(sizes) / torch.float32.itemsize


def left_of_each_bucket(rank: int) -> list[int]:
    """How many results of a bucket are held when the next one begins, in a run with buckets of one layer each."""
    before, left = exchange.shared, []

    def watched(*args: Any, **options: Any) -> Iterator[dict[str, Tensor]]:
        for received in before(*args, **options):
            yield received
            left.append(len(received))

    model = DistributedDataParallel(build(Mixed))
    optimizer = KFACOptimizer(model, lr=0.1, distributed=DistributedConfig(bucket_bytes=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "shared", watched)
        x, y = share(examples(0), [EXAMPLES // 2] * 2, rank)
        squares(model(x), y).mean().backward()
        optimizer.step()
    return left


def test_results_of_one_bucket_are_let_go_of_before_the_next_comes(two_ranks: Ranks) -> None:
    for left in two_ranks.run(left_of_each_bucket):
        assert len(left) > 1
        assert not any(left)
