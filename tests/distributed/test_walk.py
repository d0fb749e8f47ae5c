"""The plan, message by message and in its order: what each rank is seen to send and receive in a period of steps."""

import re
from collections import Counter
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

from benchmarks.counted_scaling import on_paper
from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer
from kfac_optim.distributed import Collective, DistributedConfig, Exchange, Placement, Replicated, Sharded, Strategy
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
RARE = (Payload.SUMS, Payload.INVERSES, Payload.TRACES, Payload.STATUS)
TO_SEGMENTS = "gradients of DDP"
BESIDE = (Payload.SUMS.value, TO_SEGMENTS)
Moved = tuple[float, float]
Lines = dict[str, list[Message]]


class Mixed(nn.Sequential):
    """Layers of several shapes, two of a norm's vectors, one parameter left to SGD."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
        )


def line_of(launch: Message) -> str:
    """Say in which order a message is: those of one payload have one, and those that two process groups take have two.

    Gradients of DDP's buckets go to segments on the wrapper's group, and from there to owners on one of ours.
    """
    kind = re.split(r" \d+", launch.name)[0]
    return f"{kind}, to owners" if kind == TO_SEGMENTS and launch.collective is Collective.ALL_TO_ALL else kind


def in_lines(launches: Iterable[Message]) -> Lines:
    found: Lines = {}
    for launch in launches:
        found.setdefault(line_of(launch), []).append(launch)
    return found


def planned(plan: Plan, rank: int, rows: dict[int, list[nn.Parameter]], model: nn.Module) -> Lines:
    """What the plan says of a period of steps, in order; `rows` are the parameters in each of DDP's buckets."""
    owners = {layer.name: layer.owner for layer in plan.layers}
    owners |= {each.name: -1 if each.owner is None else each.owner for each in plan.parameters}
    name_of = {param: name for name, param in model.named_parameters()}

    def pieces(params: list[nn.Parameter]) -> list[tuple[int, int]]:
        names = [name_of[param] for param in params]
        return [
            (owners[n if n in owners else n.rpartition(".")[0]], p.numel()) for n, p in zip(names, params, strict=True)
        ]

    found: list[Message] = []

    def add(messages: Iterable[Message], payload: Payload) -> None:
        found.extend(list(messages) * (1 if payload in RARE else PERIOD))

    for payload in Payload:
        if payload.is_control:
            for bucket in plan.buckets_of(payload):
                add([all_reduction(payload.value, rank, plan.ranks, bucket.words, 8)], payload)
        elif payload is Payload.GRADIENTS and rows:
            of_ddp = [gradient_row(plan, n, pieces(params), torch.float32) for n, params in sorted(rows.items())]
            add([row.messages(rank)[0] for row in of_ddp], payload)
            if plan.by_segments(payload):
                both = on_paper(of_ddp, rank, delivery_limit(plan))
                add([each for each in both if each.collective is Collective.ALL_TO_ALL], payload)
        else:
            if payload is Payload.GRADIENTS and isinstance(plan.strategy, Sharded):
                add(on_paper([*gradient_means(plan, list(owners))], rank), payload)
            bounds: tuple[Any, ...] = (delivery_limit(plan),) if payload is Payload.PARAMETERS else ()
            if payload in (Payload.GRADIENTS, Payload.SUMS):
                bounds = sum_limit(plan, payload), plan.ranks
            add(on_paper(all_buckets(plan, payload), rank, *bounds), payload)
    return in_lines(found)


def walk(
    rank: int, strategy: Strategy, exchange: Exchange, inverse: Inverse[Any], wrapped: bool, everywhere: bool
) -> tuple[Lines, Lines, list[Message], list[Moved], Plan]:
    """What was told of, what the plan says, and all that was told of and handed over, in order."""
    torch.manual_seed(0)
    model = Mixed()
    trace: list[Message] = []
    net: Any = DistributedDataParallel(model, bucket_cap_mb=1e-4) if wrapped else model
    rows: dict[int, list[nn.Parameter]] = {}
    send = OwnersHook._send
    optimizer = KFACOptimizer(
        net,
        lr=1e-3,
        momentum=0.9,
        factor_update_period=1,
        inverse_update_period=PERIOD,
        inverse=inverse,
        distributed=DistributedConfig(strategy, bucket_bytes=120, observe=trace.append, exchange=exchange),
    )

    def seen(hook: OwnersHook, bucket: Any) -> Any:
        rows[bucket.index()] = bucket.parameters()
        return send(hook, bucket)

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
    with counted_calls() as handed_over, mock.patch.object(OwnersHook, "_send", seen):
        for number in range(PERIOD):
            step(PERIOD + number)
    plan = optimizer.plan()
    assert plan is not None
    moved = [(each.sent, each.received) for each in handed_over]
    return in_lines(trace), planned(plan, rank, rows, model), trace, moved, plan


def check(ranks: Ranks, strategy: Strategy, wrapped: bool, everywhere: bool, exchange: Exchange) -> None:
    inverse = Cholesky() if wrapped else EKFAC()
    answers = ranks.run(walk, strategy, exchange, inverse, wrapped, everywhere, timeout=300)
    for told, said, traced, handed_over, plan in answers:
        assert bool(plan.everywhere) is everywhere
        moved = [(launch.sent_bytes, launch.received_bytes) for launch in traced]
        assert sorted(moved) == sorted(handed_over), "every collective is told of, and nothing else"
        assert Counter(told.pop("scalars", [])) == Counter(said.pop("scalars", [])), "of several sizes"
        assert told == said
        segmented = exchange is Exchange.SEGMENTS
        for payload in (Payload.GRADIENTS, Payload.SUMS, Payload.PARAMETERS):
            if plan.buckets_of(payload) and (payload is not Payload.GRADIENTS or isinstance(strategy, Sharded)):
                assert plan.by_segments(payload) is segmented
                kinds = [
                    each.collective
                    for line, of_line in told.items()
                    if line.startswith(payload.value)
                    for each in of_line
                ]
                # So that there is an order to keep: several messages between segments and owners in a step.
                several = 1 if everywhere or payload is Payload.GRADIENTS else 2
                times = 1 if payload in RARE else PERIOD
                assert kinds.count(Collective.ALL_TO_ALL) >= several * times
    # What is launched on the group for the main line of the program, outside of backward.
    for _, _, traced, _, _ in answers:
        main, first = (
            [launch.name for launch in each if not launch.name.startswith(BESIDE)] for each in (traced, answers[0][2])
        )
        assert main == first


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
def test_each_rank_sends_what_the_plan_says_message_by_message(
    request: pytest.FixtureRequest,
    several: str,
    strategy: Strategy,
    wrapped: bool,
    everywhere: bool,
    exchange: Exchange,
) -> None:
    check(request.getfixturevalue(several), strategy, wrapped, everywhere, exchange)


@pytest.mark.slow
def test_and_each_of_eight(eight_ranks: Ranks) -> None:
    check(eight_ranks, Sharded(), wrapped=True, everywhere=True, exchange=Exchange.SEGMENTS)
