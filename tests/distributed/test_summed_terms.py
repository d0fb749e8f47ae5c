"""All ranks judge the step of a summed loss by the terms of that step, with statistics or without."""

import pytest
import torch
from helpers.ranks import Ranks
from helpers.wrapped import mlp, seeded
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer, LossTerms
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy


def of_steps(rank: int, strategy: Strategy, wraps: bool) -> None:
    model = seeded(mlp)
    weight = next(model.parameters())
    called = DistributedDataParallel(model) if wraps else model
    config = DistributedConfig(strategy)
    optimizer = KFACOptimizer(called, loss_terms=LossTerms.SUM, factor_update_period=2, distributed=config)
    counts = []
    for terms in (4, 5, 6, 40):
        optimizer.zero_grad()
        called(weight.new_ones(terms + 4 * rank, weight.shape[1])).square().sum().backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [6, 7, 8, 42]


@pytest.mark.parametrize(
    ("strategy", "wraps"),
    [(Replicated(), True), (Sharded(), True), (Sharded(), False)],
    ids=["replicated", "sharded", "sharded, no wrapper"],
)
def test_the_terms_are_the_mean_over_ranks_in_this_step(two_ranks: Ranks, strategy: Strategy, wraps: bool) -> None:
    two_ranks.run(of_steps, strategy, wraps)


def of_parts(rank: int) -> None:
    model = seeded(mlp)
    config = DistributedConfig(Sharded())
    optimizer = KFACOptimizer(model, loss_terms=LossTerms.SUM, factor_update_period=2, distributed=config)
    counts = []
    for terms in (4, 6):
        optimizer.zero_grad()
        x = torch.ones(terms + 2 * rank, 3, dtype=torch.float64)
        for part in model if rank == 1 else [model]:  # layers are counted at steps with statistics alone
            x = part(x)
        x.square().sum().backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [5, 6]


def test_a_rank_that_has_counted_none_is_taken_to_have_as_many(two_ranks: Ranks) -> None:
    two_ranks.run(of_parts)


def of_join(rank: int, by_all: bool) -> None:
    model = DistributedDataParallel(seeded(mlp))
    optimizer = KFACOptimizer(model, loss_terms=LossTerms.SUM)
    counts = []
    with Join([model, optimizer], divide_by_initial_world_size=by_all):
        for _ in range(2 - rank):
            optimizer.zero_grad()
            model(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert rank or counts == [4, 2 if by_all else 4]


@pytest.mark.parametrize("by_all", [True, False])
def test_a_rank_without_examples_counts_where_gradients_are_divided_by_all(two_ranks: Ranks, by_all: bool) -> None:
    two_ranks.run(of_join, by_all)
