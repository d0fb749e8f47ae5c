"""Heads of which each step uses another: ranks agree on who has missed a turn, and train as one process does."""

import warnings

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded, Statistics, Strategy

HEADS, PERIOD, STEPS = 2, 4, 12


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(5, 3, dtype=torch.float64) for _ in range(HEADS))

    def forward(self, x: Tensor, task: int) -> Tensor:
        output: Tensor = self.heads[task](self.trunk(x).tanh())
        return output


def trained(rank: int, strategy: Strategy | None, to_none: bool) -> tuple[list[Tensor], list[tuple[int, bool]]]:
    """The parameters, and of each layer how often statistics were taken and whether it waits for them."""
    model = Tasks()
    net = model if strategy is None else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = KFACOptimizer(
        net,
        lr=0.1,
        factor_update_period=PERIOD,
        inverse_update_period=PERIOD,
        distributed=False if strategy is None else DistributedConfig(strategy),
    )
    for step in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad(set_to_none=to_none)
        net(x if strategy is None else x[rank::2], step % HEADS).square().sum(1).mean().backward()
        optimizer.step()
    clocks = [block.clock for block in optimizer._binding.coverage.blocks]
    return [param.detach().clone() for param in model.parameters()], [(each.folds, each.missed) for each in clocks]


@pytest.mark.parametrize(
    ("strategy", "to_none"),
    [
        (Replicated(0.5), True),
        (Sharded(), True),
        (Sharded(statistics=Statistics.OWN), True),
        (Replicated(0.5), False),
        (Sharded(), False),
    ],
    ids=str,
)
def test_ranks_agree_on_what_was_missed(two_ranks: Ranks, strategy: Strategy, to_none: bool) -> None:
    expected, clocks = trained(0, None, to_none)
    assert [folds for folds, _ in clocks] == [3, 3, 3]
    for params, of_rank in two_ranks.run(trained, strategy, to_none):
        assert of_rank == clocks
        if strategy.statistics is Statistics.ALL:
            torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-12)


def trained_out_of_sight(rank: int, strategy: Strategy | None) -> tuple[list[Tensor], list[bool]]:
    """The parameters after some steps whose gradients are taken by `autograd.grad`, and which layers have an inverse.

    The second head has, after the first step, the gradient of a penalty alone.
    """
    model = Tasks()
    optimizer = KFACOptimizer(
        model,
        lr=0.1,
        factor_update_period=2,
        distributed=False if strategy is None else DistributedConfig(strategy),
    )
    params = list(model.parameters())
    for step in range(8):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = x if strategy is None else x[rank::2]
        optimizer.zero_grad()
        loss = model(x, 0).square().sum(1).mean()
        loss = loss + (model(x, 1).square().sum(1).mean() if step == 0 else model.heads[1].weight.square().sum())
        if step == 0:
            loss.backward()
        else:
            for param, gradient in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
                param.grad = gradient
        for param in params:
            if strategy is not None and param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= 2
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gradients but no statistics.*from now on")
            optimizer.step()
    return [param.detach().clone() for param in params], [b.is_ready for b in optimizer._binding.coverage.blocks]


@pytest.mark.parametrize("strategy", [Replicated(0.5), Replicated(1)], ids=str)
def test_ranks_agree_on_the_layers_whose_calls_are_seen_no_more(two_ranks: Ranks, strategy: Strategy) -> None:
    expected, ready = trained_out_of_sight(0, None)
    assert ready == [False, False, True]
    for params, of_rank in two_ranks.run(trained_out_of_sight, strategy):
        assert of_rank == ready
        torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-12)
