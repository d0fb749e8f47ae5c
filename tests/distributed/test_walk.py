"""The plan, message by message: what each rank is seen to send and receive in a period is what the plan says."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.collectives import counted_calls
from helpers.plans import largest_everywhere
from helpers.ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Exchange, Launch, Placement, Replicated, Sharded, Strategy
from kfac_optim.distributed.communication.laid_out import on_paper
from kfac_optim.distributed.communication.message import Message, all_reduction
from kfac_optim.distributed.gradients.ddp import OwnersHook
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import (
    all_buckets,
    delivery_limit,
    gradient_means,
    gradient_row,
    sum_limit,
)
from kfac_optim.distributed.planning.plan import Plan

PERIOD = 3
Moved = tuple[float, float]
RARE = (Payload.SUMS, Payload.INVERSES, Payload.TRACES, Payload.STATUS)


class Mixed(nn.Sequential):
    """Layers of several shapes, two of a norm's vectors, one parameter left to SGD."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
        )


def planned(plan: Plan, rank: int, rows: dict[int, list[nn.Parameter]], model: nn.Module) -> dict[str, list[Moved]]:
    """What the plan says of each bucket in a period of steps; `rows` are the parameters in each of DDP's buckets."""
    owners = {layer.name: layer.owner for layer in plan.layers}
    owners |= {each.name: -1 if each.owner is None else each.owner for each in plan.parameters}
    name_of = {param: name for name, param in model.named_parameters()}

    def pieces(params: list[nn.Parameter]) -> list[tuple[int, int]]:
        names = [name_of[param] for param in params]
        return [
            (owners[n if n in owners else n.rpartition(".")[0]], p.numel()) for n, p in zip(names, params, strict=True)
        ]

    found: dict[str, list[Moved]] = {}

    def add(messages: Iterable[Message], payload: Payload) -> None:
        for _ in range(1 if payload in RARE else PERIOD):
            for message in messages:
                found.setdefault(message.name, []).append((message.sent_bytes, message.received_bytes))

    for payload in Payload:
        if payload.is_control:
            for bucket in plan.buckets_of(payload):
                add([all_reduction(payload.value, rank, plan.ranks, bucket.words, 8)], payload)
        elif payload is Payload.GRADIENTS and rows:
            of_ddp = [gradient_row(plan, n, pieces(params), torch.float32) for n, params in sorted(rows.items())]
            add(on_paper(of_ddp, rank, delivery_limit(plan)), payload)
        else:
            limit = delivery_limit(plan) if payload in (Payload.GRADIENTS, Payload.PARAMETERS) else None
            bounds = (sum_limit(plan), plan.ranks) if payload is Payload.SUMS else (limit, None)
            add(on_paper(all_buckets(plan, payload), rank, *bounds), payload)
            if payload is Payload.GRADIENTS and isinstance(plan.strategy, Sharded):
                add(on_paper([*gradient_means(plan, list(owners))], rank), payload)
    return found


def walk(
    rank: int, strategy: Strategy, exchange: Exchange, inverse: Inverse[Any], wrapped: bool, everywhere: bool
) -> tuple[dict[str, list[Moved]], dict[str, list[Moved]], list[Moved], list[Moved], Plan]:
    """What was told of each bucket, what the plan says of it, and all that was told and handed over, in order."""
    torch.manual_seed(0)
    model = Mixed()
    trace: list[Launch] = []
    net: Any = DistributedDataParallel(model, bucket_cap_mb=1e-4) if wrapped else model
    rows: dict[int, list[nn.Parameter]] = {}
    begin = OwnersHook._make_local
    optimizer = KFACOptimizer(
        net,
        lr=1e-3,
        momentum=0.9,
        factor_update_period=1,
        inverse_update_period=PERIOD,
        inverse=inverse,
        distributed=DistributedConfig(strategy, bucket_bytes=300, observe=trace.append, exchange=exchange),
    )

    def seen(hook: OwnersHook, bucket: Any, flow: Any) -> None:
        rows[bucket.index()] = bucket.parameters()
        begin(hook, bucket, flow)

    def step(number: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + (rank if wrapped else 0))
        (net(torch.randn(8, 5, generator=generator)) - 1).square().mean().backward()
        optimizer.step()

    with largest_everywhere(on=everywhere):
        for number in range(PERIOD):
            step(number)
    for block in optimizer._binding.coverage.blocks:
        block.clock.folds = block.clock.folds_at_refresh = 10**6
    trace.clear()
    with counted_calls() as handed_over, mock.patch.object(OwnersHook, "_make_local", seen):
        for number in range(PERIOD):
            step(PERIOD + number)
    plan = optimizer.plan()
    assert plan is not None
    told = defaultdict(list)
    for launch in trace:
        told[launch.bucket].append((launch.sent_bytes, launch.received_bytes))
    return (
        dict(told),
        planned(plan, rank, rows, model),
        [(launch.sent_bytes, launch.received_bytes) for launch in trace],
        [(each.sent, each.received) for each in handed_over],
        plan,
    )


@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize(
    ("strategy", "wrapped", "everywhere"),
    [
        (Sharded(), True, False),
        (Sharded(Placement.FACTORS), False, False),
        (Sharded(), True, True),
        (Sharded(Placement.FACTORS), False, True),
        (Replicated(), True, False),
        (Replicated(0.01), False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("several", ["two_ranks", "four_ranks"])
def test_what_each_rank_sends_and_receives_is_what_the_plan_says(
    request: pytest.FixtureRequest,
    several: str,
    strategy: Strategy,
    wrapped: bool,
    everywhere: bool,
    exchange: Exchange,
) -> None:
    ranks: Ranks = request.getfixturevalue(several)
    inverse = Cholesky() if wrapped else EKFAC()
    answers = ranks.run(walk, strategy, exchange, inverse, wrapped, everywhere, timeout=30)
    for told, said, traced, handed_over, plan in answers:
        assert bool(plan.everywhere) is everywhere
        assert sorted(traced) == sorted(handed_over), "every collective is told of, and nothing else"
        scalars = told.pop(Payload.SCALARS.value, [])
        assert sorted(scalars) == sorted(said.pop(Payload.SCALARS.value, []))  # of several sizes
        assert told == said
        for payload in (Payload.GRADIENTS, Payload.SUMS, Payload.PARAMETERS):
            if plan.buckets_of(payload) and (payload is not Payload.GRADIENTS or isinstance(strategy, Sharded)):
                segmented = exchange is Exchange.SEGMENTS
                assert plan.by_segments(payload) is segmented
                times = 1 if payload in RARE else PERIOD
                alone = [
                    name for name, each in told.items() if name.startswith(payload.value) and " of all " not in name
                ]
                mine = [told[name] for name in alone]
                # One message for each bucket; by segments one more for each batch, with the last or one of its own.
                assert {len(each) for each in mine} <= ({times, 2 * times} if segmented else {times})
