"""Two ranks on CUDA train as one process on the CPU does, with their messages over NCCL."""

import pytest
import test_fsdp_training as fsdp
import torch
from helpers.ranks import Ranks
from helpers.training import EMPTY, UNEVEN, Case, check, on_rank

from kfac_optim import EKFAC, Background, Eigen, SelectedUpdates
from kfac_optim.distributed import Exchange, Placement, Replicated, Sharded, measure_costs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SEGMENTS = {"exchange": Exchange.SEGMENTS}
FACTORS = Placement.FACTORS
EACH = {"factor_update_period": 1, "inverse_update_period": 1}
SELECTED = {"step_size": SelectedUpdates(), "momentum": 0.9, "weight_decay": 0.1, "inverse": None}
CASES = {
    "replicated": Case(split=UNEVEN),
    "factors": Case("tied", Replicated(1, FACTORS), {"inverse": Eigen()}, split=UNEVEN),
    "one worker, by segments": Case("tied", Replicated(0.5, FACTORS), {"inverse": EKFAC(), **EACH}, **SEGMENTS),
    "sharded": Case("mixed", Sharded(), {"momentum": 0.9}, split=EMPTY),
    "sharded, by segments": Case("mixed", Sharded(), {"momentum": 0.9}, split=EMPTY, **SEGMENTS),
    "sharded, several buckets": Case("mixed", Sharded(), split=UNEVEN, wrapped={"bucket_cap_mb": 1e-4}, **SEGMENTS),
    "sharded, no wrapper": Case("tied", Sharded(), split=UNEVEN, wrapped=None),
    "sharded, micro-batches": Case("tokens", Sharded(FACTORS), split=EMPTY, micro=2, **SEGMENTS),
    "selected": Case("mixed", Sharded(), SELECTED, split=UNEVEN),
    "scaler": Case("mixed", Sharded(), split=UNEVEN, scaler="named", micro=2),
    "background": Case(
        "mixed", Replicated(0.5), {"refresh": Background(max_staleness=2, deterministic=True)}, split=UNEVEN
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_where_one_process_does(two_cuda_ranks: Ranks, name: str) -> None:
    check(CASES[name], two_cuda_ranks.run(on_rank, CASES[name]), rtol=1e-9)


@pytest.mark.parametrize(("inverse", "shard"), [("Cholesky", "nested"), ("Eigen", "root_only")])
def test_two_ranks_under_fsdp2_end_where_one_process_does(two_cuda_ranks: Ranks, inverse: str, shard: str) -> None:
    case = fsdp.Case(fsdp.INVERSES[inverse], shard=fsdp.SHARDS[shard], sizes=(3, 5))
    fsdp.check(two_cuda_ranks, case, 1e-9)


def costs_here(_: int) -> tuple[float, ...]:
    costs = measure_costs()
    return costs.flop_rate, costs.bandwidth, costs.latency


def test_costs_are_measured_on_the_device(two_cuda_ranks: Ranks) -> None:
    first, second = two_cuda_ranks.run(costs_here)
    assert first == second
    assert all(number > 0 for number in first)
