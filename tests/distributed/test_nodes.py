"""What a plan sends between nodes, where it is told how many ranks are on each."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from helpers.plans import COST, gpt
from helpers.ranks import Ranks
from helpers.training import EXAMPLES, Mixed, build, close, examples, share, squares
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import (
    Collective,
    DistributedConfig,
    Exchange,
    Plan,
    PlanOptions,
    Replicated,
    Sharded,
    Strategy,
    make_plan,
)
from kfac_optim.distributed.planning import assignment
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import all_buckets

PER_NODE = 4
SHAPES = [(8, 2), (8, 4), (16, 4), (16, 8)]  # ranks, and those of them that precondition a layer
TAKEN: dict[str, Callable[..., list[range]] | None] = {
    "ours": None,
    "neighbours": lambda _, ranks, workers, *__: [range(at, at + workers) for at in range(0, ranks, workers)],
    "spread": lambda _, ranks, workers, *__: [range(at, ranks, ranks // workers) for at in range(ranks // workers)],
}
NUMBERS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 2}


def planned(strategy: Strategy, ranks: int, per_node: int | None, layers: int = 24) -> Plan:
    cost = replace(COST, ranks_per_node=per_node, bandwidth_in_node=20 * COST.bandwidth)
    return make_plan(gpt(layers, width=64), ranks, strategy, cost, PlanOptions(exchange=Exchange.DIRECT))


def from_other_nodes(plan: Plan, payload: Payload) -> list[float]:
    """Bytes that each node gets of one payload in a step, on average, as the messages of the plan have them."""
    found = [0.0] * (plan.ranks // PER_NODE)
    for bucket in all_buckets(plan, payload):
        for rank in range(plan.ranks):
            for message in bucket.messages(rank):
                others = [size for other, size in enumerate(message.from_) if other // PER_NODE != rank // PER_NODE]
                found[rank // PER_NODE] += sum(others) * message.itemsize
    period = plan.options.inverse_update_period if payload is Payload.INVERSES else 1
    return [each / period for each in found]


@pytest.mark.parametrize(("ranks", "workers", "ratio"), [(8, 2, 0.01), (8, 4, 0.01), (16, 4, 0.01), (16, 8, 0.02)])
def test_workers_of_a_layer_are_spread_so_that_results_stay_in_their_node(
    ranks: int, workers: int, ratio: float
) -> None:
    plans = [planned(Replicated(workers / ranks), ranks, known) for known in (None, PER_NODE)]
    payloads = Payload.INVERSES, Payload.PRECONDITIONED
    before, after = (sum(sum(from_other_nodes(plan, each)) for each in payloads) for plan in plans)
    assert 0 < after < ratio * before
    assert sum(from_other_nodes(plans[1], Payload.PRECONDITIONED)) == 0
    assert plans[1].seconds.preconditioned < plans[0].seconds.preconditioned / 5
    words = [sum(each.words for each in plan.traffic if each.payload in payloads) for plan in plans]
    assert words[0] == words[1]


def test_inverses_stay_in_their_node_where_they_are_what_is_sent_most() -> None:
    cost = replace(COST, ranks_per_node=PER_NODE)
    options = PlanOptions(factor_update_period=1, inverse_update_period=1)
    wide = [replace(each, spec=replace(each.spec, out_dim=1)) for each in gpt(1, width=64)]  # factors, hardly gradients
    plan = make_plan(wide, 8, Replicated(1 / 4), cost, options)
    assert sum(from_other_nodes(plan, Payload.INVERSES)) == 0


@given(width=st.integers(1, 256), narrow=st.integers(1, 256), period=st.integers(1, 8), shape=st.sampled_from(SHAPES))
@example(width=117, narrow=7, period=4, shape=(8, 4))  # both send nearly the same
@example(width=130, narrow=5, period=7, shape=(8, 2))
def test_of_two_ways_to_group_workers_the_one_is_taken_that_sends_less_between_nodes(
    width: int, narrow: int, period: int, shape: tuple[int, int]
) -> None:
    ranks, workers = shape
    cost = replace(COST, ranks_per_node=PER_NODE)
    options = PlanOptions(factor_update_period=1, inverse_update_period=period)
    layers = [replace(each, spec=replace(each.spec, out_dim=narrow)) for each in gpt(1, width=width)]
    sent = {}
    for way, taken in TAKEN.items():
        with pytest.MonkeyPatch.context() as patch:
            if taken is not None:
                patch.setattr(assignment, "groups_of", taken)
            plan = make_plan(layers, ranks, Replicated(workers / ranks), cost, options)
        sent[way] = sum(sum(from_other_nodes(plan, each)) for each in (Payload.INVERSES, Payload.PRECONDITIONED))
    assert sent["ours"] <= min(sent.values()) * (1 + 1e-9)


def test_owners_of_few_layers_are_on_different_nodes() -> None:
    before, after = (
        from_other_nodes(planned(Sharded(), 8, known, layers=1), Payload.GRADIENTS) for known in (None, PER_NODE)
    )
    assert sum(before) == sum(after)
    assert max(after) < 0.6 * max(before), "of the node that gets most"


def trained(model: nn.Module, optimizer: KFACOptimizer, rank: int | None) -> list[Tensor]:
    for step in range(5):
        x, y = examples(step)
        if rank is not None:
            x, y = share((x, y), [EXAMPLES // 4] * 4, rank)
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def on_two_nodes(rank: int) -> tuple[list[Tensor], set[range]]:
    model = DistributedDataParallel(build(Mixed))
    config = DistributedConfig(Replicated(0.5), cost=replace(COST, ranks_per_node=dist.get_world_size() // 2))
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=config)
    params, plan = trained(model, optimizer, rank), optimizer.plan()
    assert plan is not None
    return params, {layer.workers for layer in plan.layers}


def test_workers_on_different_nodes_train_as_one_process(four_ranks: Ranks) -> None:
    model = build(Mixed)
    alone = trained(model, KFACOptimizer(model, **NUMBERS), None)
    for params, workers in four_ranks.run(on_two_nodes):
        assert workers == {range(0, 4, 2), range(1, 4, 2)}
        for ours, expected in zip(params, alone, strict=True):
            close(ours, expected, "a parameter", 1e-12)


def test_ranks_of_one_node_send_at_its_bandwidth() -> None:
    cost = replace(COST, ranks_per_node=4, bandwidth_in_node=50 * COST.bandwidth, latency=0.0)
    seconds = {
        ranks: cost.among(ranks).communicating(Collective.ALL_GATHER, 1e6, 2)
        for ranks in (range(4, 8), range(3, 5), range(0, 8, 4), range(1, 3))
    }
    assert seconds[range(3, 5)] == seconds[range(0, 8, 4)] == 0.5e6 / COST.bandwidth
    assert seconds[range(4, 8)] == seconds[range(1, 3)] == pytest.approx(0.01e6 / COST.bandwidth)
