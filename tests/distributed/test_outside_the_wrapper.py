"""Parameters whose gradients DistributedDataParallel does not average: beside it, or to be ignored by it."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Placement, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.9,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 2,
}
STEPS = 5


class Net(nn.Module):
    """A backbone, which may be wrapped, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5))
        self.head, self.shift = nn.Linear(5, 2), nn.Parameter(torch.zeros(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x).tanh()) + self.shift
        return out


def beside(flags: dict[str, Any]) -> Net:
    """The head is called outside the wrapper."""
    net = Net()
    net.backbone = DistributedDataParallel(net.backbone, **flags)
    return net


def apart(flags: dict[str, Any]) -> Net:
    """Both have wrappers of their own."""
    net = beside(flags)
    net.head = DistributedDataParallel(net.head, **flags)  # type: ignore[assignment]
    return net


def ignoring(flags: dict[str, Any]) -> DistributedDataParallel:
    """Of two layers the wrapper ignores the weight of one and the bias of the other."""
    net = Net()
    ignored = ["head.weight", "backbone.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    return DistributedDataParallel(net, **flags)


WRAPPED: dict[str, Callable[[dict[str, Any]], nn.Module]] = {"beside": beside, "apart": apart, "ignored": ignoring}


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def train(
    net: nn.Module, optimizer: KFACOptimizer, batches: Callable[[int], list[Tensor]], between: Callable[[], Any]
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        *first, last = batches(step)
        for x in first:
            (net(x).square().mean() / (len(first) + 1)).backward()
        (net(last).square().mean() / (len(first) + 1)).backward()
        between()
        optimizer.step()


def of_rank(rank: int, wrapped: str, strategy: Strategy, flags: dict[str, Any], micro: int, how: str) -> list[Tensor]:
    net = WRAPPED[wrapped](flags)
    optimizer = KFACOptimizer(net, **OPTIONS, distributed=DistributedConfig(strategy=strategy))

    def between() -> None:
        if how == "clipped":
            optimizer.clip_grad_norm_(0.05)
        if how == "by hand":
            for param in net.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    train(net, optimizer, lambda step: [batch(rank, micro * step + each) for each in range(micro)], between)
    return [param.detach().clone() for param in net.parameters()]


def alone(ranks: int, micro: int, how: str) -> list[Tensor]:
    net = Net()
    optimizer = KFACOptimizer(net, **OPTIONS)

    def batches(step: int) -> list[Tensor]:
        return [torch.cat([batch(rank, micro * step + each) for rank in range(ranks)]) for each in range(micro)]

    train(net, optimizer, batches, lambda: optimizer.clip_grad_norm_(0.05) if how == "clipped" else None)
    return [param.detach() for param in net.parameters()]


def compare(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for params in found:
        assert all(map(torch.equal, found[0], params)), "the ranks have drifted apart"
        for number, (ours, theirs) in enumerate(zip(params, expected, strict=True)):
            close(ours, theirs, f"parameter {number}", 1e-12)


CASES: list[tuple[str, int, Strategy, dict[str, Any], int, str]] = [
    ("beside", 2, Sharded(), {}, 1, ""),
    ("beside", 4, Sharded(Placement.FACTORS), {"gradient_as_bucket_view": True}, 1, ""),
    ("beside", 2, Sharded(), {}, 2, ""),
    ("beside", 2, Sharded(), {}, 1, "clipped"),
    ("ignored", 2, Sharded(), {}, 1, ""),
    ("ignored", 4, Sharded(), {}, 2, "clipped"),
    ("beside", 2, Replicated(0.5), {}, 1, "by hand"),
    ("apart", 2, Sharded(), {}, 2, ""),
    ("apart", 2, Replicated(), {}, 1, "by hand"),
]


@pytest.mark.parametrize(("wrapped", "count", "strategy", "flags", "micro", "how"), CASES, ids=str)
def test_they_are_brought_to_their_owners(
    request: pytest.FixtureRequest,
    wrapped: str,
    count: int,
    strategy: Strategy,
    flags: dict[str, Any],
    micro: int,
    how: str,
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[count])
    compare(ranks.run(of_rank, wrapped, strategy, flags, micro, how), alone(count, micro, how))


def of_growing(rank: int) -> list[Tensor]:
    """Owners change between backward and step, as a parameter was frozen."""
    net = beside({})
    optimizer = KFACOptimizer(net, **OPTIONS, distributed=DistributedConfig(strategy=Sharded()))
    freeze(net, optimizer, lambda step: batch(rank, step))
    return [param.detach().clone() for param in net.parameters()]


def freeze(net: Net, optimizer: KFACOptimizer, batches: Callable[[int], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batches(step)).square().mean().backward()
        if step == 2:
            net.shift.requires_grad_(False)
            net.shift.grad = None
        optimizer.step()
        net.shift.requires_grad_(True)


def test_they_stay_their_own_where_owners_change_before_the_step(two_ranks: Ranks) -> None:
    net = Net()
    optimizer = KFACOptimizer(net, **OPTIONS)
    freeze(net, optimizer, lambda step: torch.cat([batch(rank, step) for rank in range(2)]))
    compare(two_ranks.run(of_growing), [param.detach() for param in net.parameters()])


# -- replicated ------------------------------------------------------------------------------------------------------


def refused(rank: int, wrapped: str, unsynchronised: bool) -> tuple[int, str]:
    """The step that raises, and what it says; `unsynchronised` are the backwards from the third on."""
    net = DistributedDataParallel(Net()) if wrapped == "whole" else WRAPPED[wrapped]({})
    optimizer = KFACOptimizer(net, **OPTIONS, distributed=DistributedConfig(strategy=Replicated()))
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [param.detach().clone() for param in net.parameters()]
        assert not unsynchronised or isinstance(net, DistributedDataParallel)
        with net.no_sync() if unsynchronised and step >= 2 else nullcontext():  # type: ignore[operator]
            net(batch(rank, step)).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, net.parameters()))
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [("beside", r"'shift', 'head\.weight', 'head\.bias'"), ("ignored", r"'backbone\.0\.bias', 'head\.weight'")],
)
def test_ranks_that_would_drift_apart_are_told_so(two_ranks: Ranks, wrapped: str, name: str) -> None:
    for step, message in two_ranks.run(refused, wrapped, False):
        assert step == 0
        assert re.match(rf"kfac_optim: the gradients of {name} differ .*Wrap the whole model.*Sharded\(\)", message)


def test_steps_without_a_synchronised_backward_are_told_of(two_ranks: Ranks) -> None:
    for step, message in two_ranks.run(refused, "whole", True):
        assert step == 2
        assert re.match("kfac_optim: the gradients of this step differ from rank to rank.*no_sync", message), message


def late(rank: int, how: str) -> tuple[int, str]:
    """The step that raises, and what it says: until the fourth the loop averages all that the wrapper does not."""
    net = Net()
    bare, last = net.backbone, net.head
    if how == "unfrozen":
        last.requires_grad_(False)
    ignored = [name for name, _ in net.named_parameters() if name.startswith("backbone.0")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model = DistributedDataParallel(net)
    optimizer = KFACOptimizer(model, **OPTIONS, distributed=DistributedConfig(strategy=Replicated()))
    for step in range(6):
        last.requires_grad_(how != "unfrozen" or step >= 4)
        optimizer.zero_grad()
        with model.no_sync() if how == "accumulated" and step >= 4 else nullcontext():
            model(batch(rank, step)).square().mean().backward()
        for param in bare.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        if how == "accumulated":  # what runs before the step, and averages nothing, is no reason to look
            with torch.no_grad():
                model(batch(rank, step))
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize(("how", "name"), [("unfrozen", r"'head\.weight', 'head\.bias'"), ("accumulated", "this step")])
def test_what_was_averaged_before_is_no_reason_not_to_look(two_ranks: Ranks, how: str, name: str) -> None:
    for step, message in two_ranks.run(late, how):
        assert step == 4
        assert re.match(rf"kfac_optim: the gradients of {name} differ", message), message
