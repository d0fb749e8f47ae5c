"""The average of the iterates on several ranks: that of one process, under every strategy, and in checkpoints."""

import copy
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import Mixed, build, examples, share, squares, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kfac_optim import IterateAverage, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded

OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 3,
    "average": IterateAverage(),
}
WAYS = {"replicated": Replicated(0.5), "sharded": Sharded(), "fully sharded": None}
STEPS = 6


def step(model: nn.Module, optimizer: KFACOptimizer, number: int, rank: int | None) -> None:
    x, y = examples(number) if rank is None else share(examples(number), [6, 6], rank)
    optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    params = (param.detach() for param in model.parameters())
    return [(param.full_tensor() if isinstance(param, DTensor) else param).clone() for param in params]


def evaluated(model: nn.Module, optimizer: KFACOptimizer) -> tuple[Tensor, list[Tensor]]:
    """What the model with the averages makes of some examples, and the averages."""
    optimizer.eval()
    with torch.no_grad():
        output = model(examples(99)[0])
    averages = whole(model)
    optimizer.train()
    return output, averages


def make(way: str) -> tuple[nn.Module, KFACOptimizer]:
    model = build(Mixed)
    if way == "fully sharded":
        mesh = init_device_mesh("cpu", (2,))
        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)  # stays gathered after a forward without a backward
    else:
        model = wrap(model, {})
    strategy = WAYS[way]
    optimizer = KFACOptimizer(
        model, **OPTIONS, distributed=None if strategy is None else DistributedConfig(strategy=strategy)
    )
    return model, optimizer


def on_rank(rank: int, way: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    model, optimizer = make(way)
    for number in range(STEPS):
        step(model, optimizer, number, rank)
        output, averages = evaluated(model, optimizer)
    return whole(model), output, averages


def resumed(rank: int, way: str) -> tuple[list[Tensor], list[Tensor]]:
    """Averages of a run that was saved and loaded as `torch.distributed.checkpoint` has it, and of one that was not."""
    ran = []
    for saves in (True, False):
        model, optimizer = make(way)
        for number in range(STEPS):
            if saves and number == 3:
                optimizer.consolidate_state_dict(to=None)
                weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
                weights, state = copy.deepcopy((weights, state))
                model, optimizer = make(way)
                set_model_state_dict(model, weights)
                set_optimizer_state_dict(model, optimizer, state)
            step(model, optimizer, number, rank)
        ran.append(evaluated(model, optimizer)[1])
    return ran[0], ran[1]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_have_the_average_of_one_process(two_ranks: Ranks, way: str) -> None:
    model = build(Mixed)
    optimizer = KFACOptimizer(model, **OPTIONS)
    for number in range(STEPS):
        step(model, optimizer, number, None)
    iterates = whole(model)
    output, averages = evaluated(model, optimizer)
    for ours, seen, held in two_ranks.run(on_rank, way):
        for one, other in zip((*ours, seen, *held), (*iterates, output, *averages), strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_averages_are_saved_and_loaded_with_the_parameters(two_ranks: Ranks, way: str) -> None:
    for ours, theirs in two_ranks.run(resumed, way):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)
