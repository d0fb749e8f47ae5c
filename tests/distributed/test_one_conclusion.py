"""What backward adds to `.grad` against what was captured, on several ranks: they all draw one conclusion."""

import warnings

import pytest
import torch
from helpers.ranks import Ranks
from helpers.wrapped import batch, loss, mlp, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded, Strategy

# None is FSDP2.
STRATEGIES: tuple[Strategy | None, ...] = (Replicated(), Sharded(), None)


def wrapped_model(strategy: Strategy | None, model: nn.Module) -> nn.Module:
    if strategy is None:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        return model
    return DistributedDataParallel(model)


def train(strategy: Strategy | None, rank: int, factor: float) -> tuple[nn.Module, KFACOptimizer]:
    """Three steps, in which rank 1 adds to the loss what no call shows: a penalty on the first weight."""
    model = wrapped_model(strategy, seeded(mlp))
    config = None if strategy is None else DistributedConfig(strategy=strategy)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1, distributed=config)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_loss_terms(len(batch(rank)))  # the ranks have different numbers
        total = loss(model, batch(rank))
        if rank == 1 and factor:
            total = total + factor * penalty(model)
        total.backward()
        optimizer.step()
    return model, optimizer


def penalty(model: nn.Module) -> Tensor:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    first: nn.Linear = next(module for module in inner.modules() if isinstance(module, nn.Linear))
    # As a function of the module's own parameter, which FSDP2 has gathered here.
    first_weight: Tensor = first.weight
    return first_weight.pow(4).sum()


def of_one_rank(rank: int, strategy: Strategy | None) -> tuple[list[str], dict[str, float]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, optimizer = train(strategy, rank, 0.1)
    names = [str(each.message) for each in told if "only a part was captured" in str(each.message)]
    assert len(names) == 1
    left_out = [each.name for each in optimizer.summary().parameters if each.reason is not None]
    return left_out, optimizer.metrics()


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_what_one_rank_alone_sees_all_ranks_leave_to_sgd(two_ranks: Ranks, strategy: Strategy) -> None:
    found = two_ranks.run(of_one_rank, strategy)
    assert found[0][0] == found[1][0] != []
    assert found[0][1]["left_out_parameters"] == found[1][1]["left_out_parameters"] > 0


def of_whole_gradient(rank: int, strategy: Strategy | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = train(strategy, rank, 0.0)
    assert all(block.check.is_done for block in optimizer._binding.coverage.blocks)
    assert optimizer.metrics()["measured_parameters"] == 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_is_captured_on_each_rank_is_its_whole_local_gradient(two_ranks: Ranks, strategy: Strategy | None) -> None:
    two_ranks.run(of_whole_gradient, strategy)
