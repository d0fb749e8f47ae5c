"""One rank of many on a faked group: what it holds does not grow with the ranks, and it sends what the plan says."""

from typing import Any

import pytest

from benchmarks.counted_group import count
from kfac_optim import Cholesky, LayerSpec
from kfac_optim.distributed import CostModel, Covered, Exchange, Sharded
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import all_buckets

COST = CostModel(flop_rate=1e14, bandwidth=1e10)


def counted(ranks: int, exchange: Exchange, rank: int = -1) -> Any:
    layers = [Covered(LayerSpec(f"l{i}", ("weight", "bias"), 513, 512), Cholesky(), 1) for i in range(8)]
    return count(list(layers), ranks, rank % ranks, Sharded(), COST, exchange=exchange)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_by_segments_a_bucket_is_held_twice_at_most_whatever_the_ranks(ranks: int) -> None:
    """Beside what is held of a sum of factors a rank keeps a segment of each, as on the CPU it takes all there is."""
    found = counted(ranks, Exchange.SEGMENTS)
    for phase in ("gradients", "parameters"):
        assert found.phases[phase].buffers <= 2 * found.largest_bucket, phase
    assert found.phases["sums"].buffers <= 3 * found.largest_bucket


def test_directly_an_owner_holds_what_all_ranks_send() -> None:
    found = counted(64, Exchange.DIRECT, rank=0)
    assert found.phases["parameters"].buffers >= 7 * found.largest_bucket  # its eighth, for each of 63 others


@pytest.mark.parametrize("exchange", Exchange)
def test_one_rank_of_many_sends_and_receives_what_the_plan_says(exchange: Exchange) -> None:
    found = counted(16, exchange)
    for phase, payload in (("sums", Payload.SUMS), ("parameters", Payload.PARAMETERS)):
        layouts = all_buckets(found.plan, payload)
        assert found.phases[phase].sent == sum(layout.sent_bytes(15) for layout in layouts)
        assert found.phases[phase].received == sum(layout.received_bytes(15) for layout in layouts)
