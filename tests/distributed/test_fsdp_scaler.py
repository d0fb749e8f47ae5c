"""With a `GradScaler` FSDP2 takes the step of a run without one; an overflow on one rank is skipped by all."""

from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kfac_optim import KFACOptimizer

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1}
SCALE = 2.0**10


def on_rank(rank: int, scaled: bool, unscale: bool, overflow: str = "") -> tuple[list[Tensor], float, float]:
    """Train three steps; give the parameters, how many steps were skipped, and the scale at the end.

    An `overflow` comes in the second step on rank 1: in its "loss", and so in all shards, or in its "shard" alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = KFACOptimizer(model, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        loss = model(x).square().mean()
        overflows = overflow if step == 1 and rank == 1 else ""
        scaler.scale(loss * torch.inf if overflows == "loss" else loss).backward()
        if overflows == "shard":
            model[0].weight.grad.to_local()[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    params = [param.full_tensor().detach() for param in model.parameters()]
    return params, optimizer.metrics()["skipped_steps"], scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_step_is_that_without_a_scaler(two_ranks: Ranks, unscale: bool) -> None:
    plain, ours = (two_ranks.run(on_rank, scaled, scaled and unscale) for scaled in (False, True))
    for (expected, _, _), (found, skipped, _) in zip(plain, ours, strict=True):
        assert skipped == 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("overflow", ["loss", "shard"])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_is_skipped_by_all_ranks(two_ranks: Ranks, unscale: bool, overflow: str) -> None:
    (first, *told), (second, *others) = two_ranks.run(on_rank, True, unscale, overflow)
    assert told == others == [1, SCALE / 2]
    assert all(map(torch.equal, first, second))
    assert all(param.isfinite().all() for param in first)
