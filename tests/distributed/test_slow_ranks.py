"""Ranks that come too late."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from helpers.ranks import Ranks
from torch import nn

from kfac_optim import Cholesky, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Sharded
from kfac_optim.distributed.communication.launches import CollectiveError

SLOW = 6.0  # seconds: longer than the time-out and the roll call


class SlowRefresh(Cholesky):
    """Takes long to refresh."""

    seconds: ClassVar[float] = 0.0

    def refresh(self, states: Sequence[Any], dampings: Sequence[float]) -> None:
        time.sleep(self.seconds)
        super().refresh(states, dampings)


def slow_on_rank_1(rank: int, in_backward: bool) -> str:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    config = DistributedConfig(strategy=Sharded(), timeout=timedelta(seconds=2.0))
    optimizer = KFACOptimizer(
        net, lr=0.1, inverse=SlowRefresh(), inverse_update_period=1, distributed=config, factor_update_period=1
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        if rank == 1 and step == 2 and in_backward:
            net[2].weight.register_hook(lambda _: time.sleep(SLOW))
        elif rank == 1 and step == 2:
            SlowRefresh.seconds = SLOW
        loss.backward()
        try:
            optimizer.step()
        except CollectiveError as error:
            return str(error)
    return "no time-out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_backward", "told"),
    [(True, "'votes'"), (False, "'status' (layers '0', '2')")],
    ids=["backward", "refresh"],
)
def test_a_collective_that_times_out_names_bucket_layers_and_ranks(
    in_backward: bool, told: str, two_ranks: Ranks
) -> None:
    try:
        found = two_ranks.run(slow_on_rank_1, in_backward, timeout=60.0)
    finally:
        two_ranks.stop()  # their groups are of no more use
    assert f"kfac_optim: on rank 0 of 2 the collective of {told} failed after 2." in found[0]
    assert "(time-out 2 s)" in found[0]
    assert "No word from rank 1" in found[0]
    assert "start all ranks again from the last checkpoint" in found[0]
    assert "on rank 1 of 2 the collective of" in found[1]
