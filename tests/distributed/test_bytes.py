"""What steps send, counted as it is handed to `torch.distributed`, is to the byte what the plan predicts."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import counted_bytes
from helpers.ranks import Ranks
from helpers.volumes import control, replicated, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import (
    EKFAC,
    Background,
    Cholesky,
    DoublyFactored,
    Eigen,
    InverseAndRoot,
    KFACOptimizer,
    LowRank,
    NewtonSchulz,
    Staggered,
    SumOfTerms,
    TrustRegion,
)
from kfac_optim.distributed import (
    DistributedConfig,
    FullySharded,
    Placement,
    Plan,
    Replicated,
    Sharded,
    Statistics,
    Strategy,
)
from kfac_optim.distributed.communication.message import Message, all_reduction
from kfac_optim.distributed.planning.buckets import Payload

INVERSES: dict[str, Any] = {
    type(inverse).__name__: inverse
    for inverse in (Cholesky(), Eigen(), InverseAndRoot(), EKFAC(), LowRank(1), NewtonSchulz(), SumOfTerms())
} | {"DoublyFactored": {"5": DoublyFactored(2)}}
FRACTIONS = {2: (1.0, 0.5), 4: (1.0, 0.5, 0.25)}
FACTOR_PERIOD, PERIOD = 2, 4

# What nothing here may use, since it is not counted.
UNCOUNTED = (
    *("all_gather_single", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier", "batch_isend_irecv"),
    *("broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send"),
)


class Wrapper(Enum):
    NONE = auto()
    DDP = auto()
    FSDP2 = auto()


class Mixed(nn.Sequential):
    """Layers of several shapes, one of them without a bias, two of a norm's vectors, one parameter left to SGD."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
        )


def linear() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))


@contextmanager
def nothing_uncounted() -> Iterator[None]:
    with ExitStack() as stack:
        for name in UNCOUNTED:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"{name} is not counted")))
        yield


def average(observe: Callable[[Message], None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does by itself, where it can be counted."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, group=dist.group.WORLD, async_op=True)
    ranks = dist.get_rank(), dist.get_world_size()
    observe(all_reduction("gradients of DDP", *ranks, buffer.numel(), buffer.itemsize))
    return work.get_future().then(lambda future: future.value()[0])


def payload_of(name: str) -> Payload:
    return next(payload for payload in Payload if name.startswith(payload.value))


def counted(
    rank: int,
    strategy: Strategy,
    inverse: str = "Cholesky",
    *,
    net: Callable[[], nn.Module] = Mixed,
    dtype: torch.dtype = torch.float32,
    wrapper: Wrapper = Wrapper.DDP,
    groups: bool = False,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[Payload, float], Plan]:
    """Bytes that this rank sends in a period of steps, once the averages are old."""
    torch.manual_seed(0)
    model = net().to(dtype)
    wrapped: Any = model
    trace: list[Message] = []
    if wrapper is Wrapper.DDP:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        if isinstance(strategy, Replicated):
            wrapped.register_comm_hook(trace.append, average)
    elif wrapper is Wrapper.FSDP2:
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    params: Any = wrapped
    if groups:
        params = [{"params": [param]} for param in model.parameters()]
        options["model"] = wrapped
    optimizer = KFACOptimizer(
        params,
        lr=1e-3,
        momentum=0.9,
        factor_update_period=FACTOR_PERIOD,
        inverse_update_period=PERIOD,
        inverse=INVERSES[inverse],
        distributed=DistributedConfig(strategy, bucket_bytes=300, observe=trace.append, **(config or {})),
        **options,
    )

    def step(number: int) -> None:
        # Without a wrapper nobody averages gradients: they are to be equal.
        generator = torch.Generator().manual_seed(10 * number + (0 if wrapper is Wrapper.NONE else rank))
        inputs = torch.randn(8, model[0].in_features, generator=generator).to(dtype)
        optimizer.zero_grad()
        (wrapped(inputs) - 1).square().mean().backward()
        optimizer.step()

    for number in range(PERIOD):
        step(number)
    for block in optimizer._binding.coverage.blocks:
        block.clock.folds = block.clock.folds_at_refresh = 10**6
    trace.clear()
    with ExitStack() as stack:
        if wrapper is not Wrapper.FSDP2:  # it gathers and reduces by itself
            sent = stack.enter_context(counted_bytes())
            stack.enter_context(nothing_uncounted())
        for number in range(PERIOD):
            step(PERIOD + number)
    if wrapper is not Wrapper.FSDP2:
        assert [launch.sent_bytes for launch in trace] == sent, "every collective is told of"
    found: Counter[Payload] = Counter()
    for launch in trace:
        if launch.name != "counts":  # a few numbers of what needs them, which the plan leaves out
            found[payload_of(launch.name)] += launch.sent_bytes  # type: ignore[assignment]
    plan = optimizer.plan()
    assert plan is not None
    return {payload: float(size) for payload, size in found.items()}, plan


def check(ranks: Ranks, strategy: Strategy, *args: Any, **kwargs: Any) -> Plan:
    """That all ranks together send what the plan says."""
    answers = ranks.run(by_keywords, strategy, args, kwargs, timeout=20)
    total: Counter[Payload] = Counter()
    for found, _ in answers:
        total.update(found)  # type: ignore[arg-type]
    plan: Plan = answers[0][1]
    predicted = {each.payload: each.bytes_per_step * PERIOD for each in plan.traffic}
    if isinstance(strategy, Replicated) and "wrapper" in kwargs:  # bare: gradients are averaged by nobody
        del predicted[Payload.GRADIENTS]
    assert {payload: Fraction(size) for payload, size in total.items() if size} == predicted
    assert all(Fraction(each.period) in (1, PERIOD) for each in plan.traffic)
    return plan


def by_keywords(rank: int, strategy: Strategy, args: Any, kwargs: Any) -> tuple[dict[Payload, float], Plan]:
    return counted(rank, strategy, *args, **kwargs)


def strategies(ranks: int) -> list[Strategy]:
    return [
        made
        for placement in Placement
        for made in (*(Replicated(fraction, placement) for fraction in FRACTIONS[ranks]), Sharded(placement))
    ]


def covering(ranks: int, each: int) -> list[tuple[Strategy, str]]:
    """Every strategy with so many of the inverses, in turn."""
    inverses = itertools.cycle(INVERSES)
    return [(strategy, inverse) for strategy in strategies(ranks) for inverse in itertools.islice(inverses, each)]


@pytest.mark.parametrize(("strategy", "inverse"), covering(2, 3), ids=str)
def test_on_two_ranks(two_ranks: Ranks, strategy: Strategy, inverse: str) -> None:
    check(two_ranks, strategy, inverse)


@pytest.mark.parametrize(("strategy", "inverse"), covering(4, 1), ids=str)
def test_on_four_ranks(four_ranks: Ranks, strategy: Strategy, inverse: str) -> None:
    check(four_ranks, strategy, inverse)


@pytest.mark.parametrize("strategy", [Replicated(0.5), Sharded()], ids=str)
@pytest.mark.parametrize(
    "choice",
    [
        {"wrapper": Wrapper.NONE},
        {"groups": True},
        {"refresh": Staggered()},
        {"refresh": Background(max_staleness=1, deterministic=True)},
        {"kl_clip": None},
        {"step_size": TrustRegion()},
        {"dtype": torch.float64},
        {"config": {"sums_dtype": torch.bfloat16}},
        {"config": {"overlap": False}},
        {"skip_layers": ("*",)},
    ],
    ids=str,
)
def test_with_other_choices(two_ranks: Ranks, strategy: Strategy, choice: dict[str, Any]) -> None:
    check(two_ranks, strategy, **choice)


@pytest.mark.parametrize("strategy", [Replicated(0.25, statistics=Statistics.OWN), Sharded(statistics=Statistics.OWN)])
def test_of_statistics_of_ones_own(four_ranks: Ranks, strategy: Strategy) -> None:
    plan = check(four_ranks, strategy)
    assert not plan.buckets_of(Payload.SUMS)


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("inverse", ["Cholesky", "EKFAC"])
def test_beside_fsdp2s_own(two_ranks: Ranks, placement: Placement, inverse: str) -> None:
    """Of rows that are even; what is told of each launch is held to what was counted by the tests above."""
    plan = check(two_ranks, Sharded(placement), inverse, net=linear, wrapper=Wrapper.FSDP2)
    assert plan.strategy == FullySharded(placement)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


def test_with_ranks_that_own_nothing(four_ranks: Ranks) -> None:
    check(four_ranks, Sharded(), net=one_layer, dtype=torch.float64)


@pytest.mark.parametrize("strategy", [Replicated(1.0), Replicated(0.5), Replicated(0.25), Sharded()], ids=str)
def test_the_closed_forms_are_what_is_sent(four_ranks: Ranks, strategy: Strategy) -> None:
    plan = check(four_ranks, strategy, net=linear)
    layers, dims = 3, (7, 6)
    n = layers * dims[0] * dims[1]
    t = layers * sum(dim * (dim + 1) // 2 for dim in dims)
    with_masses = t + 2 * layers
    if isinstance(strategy, Sharded):
        words, scalars = sharded(4, n, with_masses, PERIOD), 3 + 3
    else:
        words, scalars = replicated(4, strategy.workers(4), n, with_masses, t, PERIOD), 0
    agreeing = control(4, layers, len(plan.buckets_of(Payload.SUMS)), 0, scalars, PERIOD)
    assert plan.bytes_per_step == 4 * words + 8 * agreeing
