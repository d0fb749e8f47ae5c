"""One rank of many on a faked group: what it holds does not grow with the ranks, and it sends what the plan says."""

from typing import Any

import pytest

from benchmarks.counted_group import count
from kfac_optim import Cholesky, LayerSpec
from kfac_optim.distributed import CostModel, Covered, Exchange, Sharded
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import all_buckets

COST = CostModel(flop_rate=1e14, bandwidth=1e10)

# Inputs and outputs of layers.
EQUAL = [(512, 512)] * 8
SHAPES = {
    "factors are the largest buckets": [(1024, 512), (4608, 512)] * 4 + [(1024, 1024)] * 4,
    "all buckets are of about one size": [(3700, 64)] + [(1300, 1300)] * 12,
}


def counted(ranks: int, exchange: Exchange, shapes: list[tuple[int, int]] = EQUAL, rank: int = -1) -> Any:
    layers = [
        Covered(LayerSpec(f"l{i}", ("weight", "bias"), inputs + 1, outputs), Cholesky(), 1)
        for i, (inputs, outputs) in enumerate(shapes)
    ]
    return count(list(layers), ranks, rank % ranks, Sharded(), COST, exchange=exchange, periods=(10, 100))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 1024])
def test_by_segments_a_bucket_is_held_twice_at_most_whatever_the_ranks(ranks: int, shapes: str) -> None:
    found = counted(ranks, Exchange.SEGMENTS, SHAPES[shapes])
    for phase in ("gradients", "sums", "parameters"):
        assert found.phases[phase].buffers <= 2 * found.largest_bucket, phase


def test_a_gradient_that_all_ranks_have_the_mean_of_is_summed_in_place() -> None:
    wide = (4096, 4096)  # more than an owner's share of all layers, so that it has no owner
    found = counted(64, Exchange.SEGMENTS, [wide, *EQUAL], rank=1)
    assert any(owner < 0 for row in found.rows for owner, _ in row)
    assert found.phases["gradients"].buffers < 0.1 * found.largest_bucket


def test_directly_an_owner_holds_what_all_ranks_send() -> None:
    found = counted(64, Exchange.DIRECT, rank=0)
    assert found.phases["parameters"].buffers >= 7 * found.largest_bucket  # its eighth, for each of 63 others


@pytest.mark.parametrize("exchange", Exchange)
def test_one_rank_of_many_sends_and_receives_what_the_plan_says(exchange: Exchange) -> None:
    found = counted(16, exchange)
    for phase, payload in (("sums", Payload.SUMS), ("parameters", Payload.PARAMETERS)):
        messages = [message for layout in all_buckets(found.plan, payload) for message in layout.messages(15)]
        assert found.phases[phase].sent == sum(message.sent_bytes for message in messages)
        assert found.phases[phase].received == sum(message.received_bytes for message in messages)
