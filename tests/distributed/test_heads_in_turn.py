"""Heads of which each step uses another: ranks agree on who has missed a turn, and train as one process does."""

import pytest
import torch
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
