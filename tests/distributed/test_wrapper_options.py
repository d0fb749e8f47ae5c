"""An option of DDP by which gradients go past our hook, and a model of FSDP2 that only a forward shows."""

import pytest
import torch
from helpers.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Exchange, Replicated, Sharded


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def refused(_: int) -> str:
    wrapper = DistributedDataParallel(net(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    directly, by_segments = (DistributedConfig(Sharded(), exchange=way) for way in (Exchange.DIRECT, Exchange.SEGMENTS))
    for config in (directly, DistributedConfig(Replicated())):
        KFACOptimizer(wrapper, lr=0.01, distributed=config).remove_hooks()
    with pytest.raises(RuntimeError) as caught:
        KFACOptimizer(wrapper, lr=0.01, distributed=by_segments)
    return str(caught.value)


def test_buckets_that_are_left_out_cannot_go_by_segments(two_ranks: Ranks) -> None:
    for answer in two_ranks.run(refused):
        assert "exchange=Exchange.DIRECT" in answer


def headless(_: int) -> float:
    """Train with a head of zeros, whose only row one rank has: the others have no gradient but zeros at first."""
    model = net()
    nn.init.zeros_(model[1].weight)
    for child in model:
        fully_shard(child)
    fully_shard(model)
    optimizer = KFACOptimizer(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return optimizer.metrics()["measured_parameters"]


def test_a_sharded_model_is_known_from_its_first_forward_on(two_ranks: Ranks) -> None:
    assert two_ranks.run(headless, timeout=60) == [1.0, 1.0]
