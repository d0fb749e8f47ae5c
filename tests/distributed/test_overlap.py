"""What is launched while backward goes on: read off traces, since on few cores wall time says nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Message, Placement, Plan, Replicated, Sharded, Strategy
from kfac_optim.distributed.communication.message import all_reduction
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.statistics import overlap

BACKWARD_ENDS = all_reduction("(backward ends)", 0, 1, 0, 1)
STEPS = 4
PERIOD = 2


class Residual(nn.Module):
    """Convolutions with a branch around them, a norm, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.around = nn.Conv1d(2, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(x).tanh()) + self.around(x)
        scores: Tensor = self.head(self.norm(h.mT).mean(1))
        return scores


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for width in range(4, 10) for layer in (nn.Linear(width, width + 1), nn.Tanh())))


NETS = {"mlp": (mlp, (8, 4)), "residual": (Residual, (8, 2, 5))}


def traced(
    rank: int,
    net: str,
    strategy: Strategy,
    inverse: Inverse[Any] = Cholesky(),  # noqa: B008 (immutable)
    *,
    overlap: bool = True,
    **flags: Any,
) -> tuple[list[list[Message]], Plan]:
    """What this rank launched in each step, with a mark where backward ends; and the plan."""
    make, shape = NETS[net]
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), bucket_cap_mb=1e-4, **flags)
    trace: list[Message] = []
    config = DistributedConfig(strategy, overlap=overlap, bucket_bytes=100, observe=trace.append)
    optimizer = KFACOptimizer(
        model, lr=1e-3, inverse_update_period=PERIOD, inverse=inverse, distributed=config, factor_update_period=1
    )
    steps = []
    for number in range(STEPS + 2):
        generator = torch.Generator().manual_seed(10 * number + rank)
        trace.clear()
        optimizer.zero_grad()
        scores = model(torch.randn(shape, generator=generator))
        nn.functional.cross_entropy(scores, torch.zeros(shape[0], dtype=torch.int64)).backward()
        trace.append(BACKWARD_ENDS)
        optimizer.step()
        steps.append(list(trace))
        for block in optimizer._binding.coverage.blocks:
            block.clock.folds = block.clock.folds_at_refresh = 10**6  # old averages are refreshed by the period alone
    plan = optimizer.plan()
    assert plan is not None
    return steps[2:], plan  # DDP has rebuilt its buckets by then


def with_flags(rank: int, args: Any, flags: Any) -> tuple[list[list[Message]], Plan]:
    return traced(rank, *args, **flags)


def of(launches: list[Message], payload: Payload) -> list[Message]:
    return [launch for launch in launches if launch.name.startswith(payload.value)]


def check_overlap(ranks: Ranks, *args: Any, **flags: Any) -> list[list[Message]]:
    """Sums go in backward, in the plan's order, at steps that refresh and no others; alike on all ranks."""
    answers = ranks.run(with_flags, args, flags)
    for steps, plan in answers:
        wanted = [f"{Payload.SUMS.value} {number}" for number in range(len(plan.buckets_of(Payload.SUMS)))]
        assert len(wanted) > 3
        for number, launches in enumerate(steps):
            sums = of(launches, Payload.SUMS)
            if number % PERIOD:
                assert not sums
                continue
            assert [launch.name for launch in sums] == wanted, "none goes twice, all in the plan's order"
            ended = launches.index(BACKWARD_ENDS)
            assert all(launches.index(launch) < ended for launch in sums[:-1])
    orders = [[[launch.name for launch in launches] for launches in steps] for steps, _ in answers]
    assert all(order == orders[0] for order in orders)
    first: list[list[Message]] = answers[0][0]
    return first


@pytest.mark.parametrize("flags", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_sums_go_while_backward_goes_on(two_ranks: Ranks, net: str, flags: dict[str, Any]) -> None:
    check_overlap(two_ranks, net, Replicated(), **flags)


@pytest.mark.parametrize("strategy", [Replicated(0.25, Placement.FACTORS), Sharded()], ids=str)
def test_whoever_the_owners_are(four_ranks: Ranks, strategy: Strategy) -> None:
    check_overlap(four_ranks, "residual", strategy)


def test_sums_of_other_inverses(two_ranks: Ranks) -> None:
    check_overlap(two_ranks, "mlp", Replicated(), EKFAC())


@pytest.mark.parametrize("net", NETS)
def test_gradients_go_to_their_owners_while_backward_goes_on(two_ranks: Ranks, net: str) -> None:
    for launches in check_overlap(two_ranks, net, Sharded()):
        gradients, ended = of(launches, Payload.GRADIENTS), launches.index(BACKWARD_ENDS)
        assert [launch.name for launch in gradients] == [f"gradients of DDP {n}" for n in range(len(gradients))]
        assert len(gradients) > 3
        assert all(launches.index(launch) < ended for launch in gradients)
        # While backward goes on nothing else is launched but sums, and after it no gradients are.
        assert {launch.name.rsplit(" ", 1)[0] for launch in launches[:ended]} <= {"gradients of DDP", "factor sums"}
        assert all(launches.index(launch) > ended for launch in of(launches, Payload.PARAMETERS))


def test_without_overlap_sums_go_at_the_step(two_ranks: Ranks) -> None:
    """The trace tells the two apart."""
    for steps, _ in two_ranks.run(with_flags, ("mlp", Replicated()), {"overlap": False}):
        for launches in steps:
            ended = launches.index(BACKWARD_ENDS)
            assert all(launches.index(launch) > ended for launch in of(launches, Payload.SUMS))
        assert any(of(launches, Payload.SUMS) for launches in steps)


def test_a_report_holds_if_the_terms_are_the_same_without_a_look_at_tensors() -> None:
    one, other = torch.ones(()), torch.ones(())
    cases = [(2.0, 2.0, True), (2.0, 3.0, False), (one, one, True), (one, other, False), (one, 1.0, False)]
    for reported, now, holds in cases:
        for scale in (False, True):
            terms = [(SimpleNamespace(averaged=1 if scale else each), each if scale else 1) for each in (reported, now)]
            assert overlap._equal(*terms) == holds  # type: ignore[arg-type]
