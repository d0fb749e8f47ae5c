"""Ranks whose losses have different numbers of terms: of what share of the loss one gradient is, they have to state."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import ExactGGN, KFACOptimizer, LossTerms
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.1, "factor_update_period": 2, "inverse_update_period": 2}
STEPS = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(rank: int, step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64)


def sizes(ranks: int, *, even: bool = False) -> list[int]:
    return [3 if even else 1 + 2 * rank for rank in range(ranks)]


def of_rank(rank: int, strategy: Strategy, how: str) -> tuple[list[Tensor], list[list[str]]]:
    """The parameters, and warnings of each step."""
    ranks = dist.get_world_size()
    counts = sizes(ranks, even=how == "even")
    model = DistributedDataParallel(net())
    options: dict[str, Any] = {"sum": {"loss_terms": LossTerms.SUM}, "named": {"estimate": ExactGGN(nn.MSELoss())}}.get(
        how, {}
    )
    optimizer = KFACOptimizer(model, **OPTIONS, **options, distributed=DistributedConfig(strategy=strategy))
    told = []
    for step in range(STEPS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            losses = model(batch(rank, step, counts[rank])).square().sum(1)
            if how == "stated":
                optimizer.set_loss_terms(sum(counts) / ranks)
            elif how == "stated means":
                optimizer.set_loss_terms(counts[rank])
            means = how in ("even", "stated means")
            (losses.mean() if means else losses.sum() * ranks / sum(counts)).backward()
            optimizer.step()
        told.append([str(each.message) for each in caught if "loss terms" in str(each.message)])
    return [param.detach().clone() for param in model.parameters()], told


def alone(ranks: int) -> list[Tensor]:
    model = net()
    optimizer = KFACOptimizer(model, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.cat([batch(rank, step, size) for rank, size in enumerate(sizes(ranks))])
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_shares_of_a_sum_over_all_ranks_are_right_where_stated(
    request: pytest.FixtureRequest, count: int, strategy: Strategy
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[count])
    expected = alone(count)
    for params, told in ranks.run(of_rank, strategy, "stated"):
        assert not any(told)
        for number, (ours, theirs) in enumerate(zip(params, expected, strict=True)):
            close(ours, theirs, f"parameter {number}", 1e-12)


def test_uneven_terms_that_nobody_stated_are_warned_of_once_on_all_ranks(two_ranks: Ranks) -> None:
    for _, told in two_ranks.run(of_rank, Replicated(), "counted"):
        assert [len(each) for each in told] == [1, 0, 0, 0, 0]
        assert "from 1 to 3" in told[0][0]
        assert "optimizer.set_loss_terms(total / processes)" in told[0][0]


@pytest.mark.parametrize("how", ["even", "stated means", "sum", "named"])
def test_terms_that_are_known_are_not_warned_of(two_ranks: Ranks, how: str) -> None:
    for _, told in two_ranks.run(of_rank, Replicated(), how):
        assert not any(told)
