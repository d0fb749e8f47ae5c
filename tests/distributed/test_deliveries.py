"""Gradients by segments: the second message follows while backward goes on, in one order, or backward raises."""

import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import Collective, DistributedConfig, Exchange, Message, Sharded
from kfac_optim.distributed.communication.launcher import Launcher
from kfac_optim.distributed.gradients import ddp


class Gone:
    """A message that does not arrive."""

    def get_future(self) -> torch.futures.Future[Any]:
        future = torch.futures.Future[Any]()
        future.set_exception(RuntimeError("the network is gone"))
        return future


def trained(rank: int, delayed: bool, broken: str) -> tuple[list[str], list[Tensor], str]:
    """Names of all second messages in their order, parameters, and what backward raised after two steps.

    The second messages are broken when they are due, before the first ones have ended or "behind" them, or "under way".
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]).double()
    trace: list[Message] = []
    net = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    config = DistributedConfig(Sharded(), exchange=Exchange.SEGMENTS, bucket_bytes=400, observe=trace.append)
    optimizer = KFACOptimizer(net, lr=1e-2, momentum=0.9, distributed=config)
    chance, mean, begin = random.Random(rank), ddp._mean, ddp.begin

    def late(*given: Any) -> Tensor:
        time.sleep(chance.random() / 100 if delayed else 0)
        return mean(*given)

    def ended(*given: Any) -> Any:
        work = begin(*given)
        work.wait()
        return work

    def fail(*_: object) -> Any:
        if broken != "under way":
            raise RuntimeError("the network is gone")
        return Gone()

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
        net(x).square().mean().backward()
        optimizer.step()

    with mock.patch.object(ddp, "_mean", late):
        for number in range(4):
            step(number)
    said = ""
    if broken:
        with (
            mock.patch.object(ddp, "begin", ended if broken == "behind" else begin),
            mock.patch.object(Launcher, "begin", fail),
            pytest.raises(RuntimeError) as raised,
        ):
            step(4)
        said = str(raised.value)
    second = [each.name for each in trace if " of DDP " in each.name and each.collective is Collective.ALL_TO_ALL]
    return second, [param.detach().clone() for param in model.parameters()], said


def test_second_messages_have_one_order_whenever_the_first_ones_end(two_ranks: Ranks) -> None:
    found = two_ranks.run(trained, True, "", timeout=30)
    (names, params, _), (others, same, _) = found
    assert names == others
    assert len(names) >= 3 * 2, "of several batches in each backward by segments"
    for one, other in zip(params, same, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(params, two_ranks.run(trained, False, "", timeout=30)[0][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("when", ["before", "behind", "under way"])
def test_what_fails_on_the_way_to_owners_is_raised_by_backward(two_ranks: Ranks, when: str) -> None:
    for _, _, said in two_ranks.run(trained, False, when, timeout=30):
        assert "the network is gone" in said
