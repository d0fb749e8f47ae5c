"""`metrics()` on several ranks: the numbers of all layers, the same on each, though each refreshes a part."""

from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import Mixed, build, examples, share, squares, wrap
from torch import Tensor, nn

from kfac_optim import Cholesky, KFACOptimizer, LowRank
from kfac_optim.distributed import DistributedConfig, Placement, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.inverses.base import Inverse

OPTIONS: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 3}
MEASURES = ("condition_A", "condition_G", "cutoff_A", "cutoff_G")


def train(model: nn.Module, optimizer: KFACOptimizer, rank: int | None, ranks: int) -> dict[str, float]:
    for step in range(5):
        x, y = examples(step) if rank is None else share(examples(step), [12 // ranks] * ranks, rank)
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        optimizer.step()
    return optimizer.metrics()


def of_rank(rank: int, ranks: int, strategy: Strategy, inverse: Inverse[Any]) -> dict[str, float]:
    model = wrap(build(Mixed), {})
    optimizer = KFACOptimizer(model, **OPTIONS, inverse=inverse, distributed=DistributedConfig(strategy=strategy))
    return train(model, optimizer, rank, ranks)


@pytest.mark.parametrize(
    ("count", "strategy", "inverse"),
    [
        (2, Replicated(), Cholesky()),
        (2, Sharded(), LowRank(2)),
        (4, Sharded(Placement.FACTORS), Cholesky()),
        (4, Replicated(0.5), LowRank(2)),
    ],
    ids=str,
)
def test_they_are_those_of_one_process_on_all_ranks(
    request: pytest.FixtureRequest, count: int, strategy: Strategy, inverse: Inverse[Any]
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[count])
    model = build(Mixed)
    expected = train(model, KFACOptimizer(model, **OPTIONS, inverse=inverse), None, 1)
    answers = ranks.run(of_rank, count, strategy, inverse)
    assert all(found == answers[0] for found in answers)
    for name in MEASURES:
        assert (name in answers[0]) is (name in expected)
        if name in expected:
            assert answers[0][name] == pytest.approx(expected[name], rel=1e-9)


def factors_of_rank(rank: int, strategy: Strategy) -> tuple[set[str], dict[str, tuple[Tensor | None, Tensor | None]]]:
    """The layers whose factors are returned after training, and the factors once all batches are in."""
    model = wrap(build(Mixed), {})
    optimizer = KFACOptimizer(model, **OPTIONS, inverse=Cholesky(), distributed=DistributedConfig(strategy=strategy))
    train(model, optimizer, rank, 2)
    names = set(optimizer.factors())
    optimizer.consolidate_state_dict(to=None)
    return names, optimizer.factors()


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_factors_are_those_of_one_process_on_the_rank_that_holds_them_alone(
    two_ranks: Ranks, strategy: Strategy
) -> None:
    model = build(Mixed)
    optimizer = KFACOptimizer(model, **OPTIONS, inverse=Cholesky())
    train(model, optimizer, None, 1)
    expected = optimizer.factors()
    (names, found), (others, more) = two_ranks.run(factors_of_rank, strategy)
    assert names == set(found)
    assert others == set(more)
    assert not names & others
    assert names | others == set(expected)
    for name, pair in {**found, **more}.items():
        for ours, theirs in zip(pair, expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


class Overflowing(nn.Sequential):
    """The square of an input overflows where an example begins with 1."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        huge = 1 + (x[:, :1] == 1).to(x) * 1e200
        out: torch.Tensor = self[2](self[1](self[0](x * huge) / huge))
        return out


def of_overflow(rank: int) -> list[float]:
    """Statistics of rank 1 are refused at step 1, and told of at the refresh."""
    model = wrap(build(Overflowing), {})
    optimizer = KFACOptimizer(model, **OPTIONS, distributed=DistributedConfig())
    told = []
    for step in range(5):
        x, y = share(examples(step), [6, 6], rank)
        if step == 1 and rank == 1:
            x[0, 0] = 1.0
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        optimizer.step()
        told.append(optimizer.metrics()["refused_statistics"])
    return told


def test_events_of_one_rank_are_counted_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(of_overflow)
    assert first == second
    assert first[0] == 0
    assert first[-1] == 1
