"""All ranks judge the step of a summed loss by the terms of that step, with statistics or without."""

import pytest
from helpers.ranks import Ranks
from helpers.wrapped import mlp, seeded
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
    for terms in (4, 5, 6, 400):
        optimizer.zero_grad()
        called(weight.new_ones(terms + rank, weight.shape[1])).square().sum().backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [5, 6, 7, 401]


@pytest.mark.parametrize(
    ("strategy", "wraps"),
    [(Replicated(), True), (Sharded(), True), (Sharded(), False)],
    ids=["replicated", "sharded", "sharded, no wrapper"],
)
def test_the_terms_are_the_most_of_any_rank_in_this_step(two_ranks: Ranks, strategy: Strategy, wraps: bool) -> None:
    two_ranks.run(of_steps, strategy, wraps)
