"""Ranks that run out of examples before others do, within `Join([model, optimizer])`: they shadow the others' steps."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import EXAMPLES, Mixed, build, close, examples, share, squares
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer, LevenbergMarquardt, MonteCarlo
from kfac_optim.distributed import DistributedConfig, Exchange, Placement, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

NUMBERS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "factor_update_period": 2, "inverse_update_period": 3}
EPOCHS = {2: [(4, 9), (2, 2), (3, 0)], 4: [(3, 6, 5, 9), (2, 2, 2, 2), (0, 1, 3, 2)]}
"""Steps that each rank has examples for, epoch by epoch."""


def on_rank(
    rank: int,
    strategy: Strategy,
    exchange: Exchange | None,
    micro: int = 1,
    flags: dict[str, Any] | None = None,
    net: Callable[[], nn.Module] = Mixed,
) -> list[Tensor]:
    ranks = dist.get_world_size()
    bare = build(net)
    model = DistributedDataParallel(bare, **(flags or {}))
    config = DistributedConfig(strategy, timeout=timedelta(seconds=20), exchange=exchange)
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=config)
    start = 0
    for lengths in EPOCHS[ranks]:
        with Join([model, optimizer]):
            for step in range(start, start + lengths[rank]):
                optimizer.zero_grad()
                for number in range(micro):
                    x, y = share(examples(step, number), [EXAMPLES // ranks] * ranks, rank)
                    with model.no_sync() if number < micro - 1 else nullcontext():
                        (squares(model(x), y).mean() / micro).backward()
                optimizer.step()
        start += max(lengths)
    return [param.detach() for param in bare.parameters()]


def on_one_process(ranks: int, micro: int = 1, net: Callable[[], nn.Module] = Mixed) -> list[Tensor]:
    """With the examples of those ranks that go on, whose gradients DDP divides by the number of all."""
    model = build(net)
    optimizer = KFACOptimizer(model, **NUMBERS)
    start = 0
    for lengths in EPOCHS[ranks]:
        for step in range(max(lengths)):
            going = [rank for rank in range(ranks) if step < lengths[rank]]
            optimizer.zero_grad()
            for number in range(micro):
                shares = [share(examples(start + step, number), [EXAMPLES // ranks] * ranks, rank) for rank in going]
                x, y = (torch.cat(parts) for parts in zip(*shares, strict=True))
                (squares(model(x), y).mean() / micro).backward()
            for param in model.parameters():
                if param.grad is not None:
                    # To the bit a half would be taken for a scale of the loss.
                    param.grad *= len(going) / ranks * (1 + 2**-48 * (len(going) < ranks))
            optimizer.step()
        start += max(lengths)
    return [param.detach() for param in model.parameters()]


def check(found: list[list[Tensor]], micro: int = 1, net: Callable[[], nn.Module] = Mixed) -> None:
    for params in found:
        for ours, first, expected in zip(params, found[0], on_one_process(len(found), micro, net), strict=True):
            assert torch.equal(ours, first)
            close(ours, expected, "a parameter", 1e-12)


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_two_ranks_of_which_one_runs_out_train_as_one_process_on_what_is_left(
    two_ranks: Ranks, strategy: Strategy
) -> None:
    check(two_ranks.run(on_rank, strategy, None))


def channels_last() -> nn.Module:
    layers = nn.Linear(4, 18), nn.Unflatten(1, (2, 3, 3)), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("exchange", [Exchange.DIRECT, Exchange.SEGMENTS])
def test_weights_may_lie_in_memory_as_they_like(two_ranks: Ranks, exchange: Exchange) -> None:
    check(two_ranks.run(on_rank, Sharded(), exchange, 1, None, channels_last), net=channels_last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        (Replicated(0.5), Exchange.SEGMENTS),
        (Sharded(), Exchange.DIRECT),
        (Sharded(), Exchange.SEGMENTS),
        (Sharded(Placement.FACTORS), Exchange.DIRECT),
    ],
    ids=str,
)
def test_so_do_four_ranks(four_ranks: Ranks, strategy: Strategy, exchange: Exchange) -> None:
    check(four_ranks.run(on_rank, strategy, exchange))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_a_rank_that_has_run_out_takes_no_step_where_others_accumulate(two_ranks: Ranks, strategy: Strategy) -> None:
    check(two_ranks.run(on_rank, strategy, Exchange.DIRECT, 2, {"find_unused_parameters": True}), micro=2)


def left_over(rank: int, strategy: Strategy) -> bool:
    """Whether it makes no difference that a rank runs out of examples in the middle of a step of two micro-batches."""
    ends = []
    for lengths in [(4, 2), (4, 3)]:
        bare = build(Mixed)
        model = DistributedDataParallel(bare)
        numbers = {**NUMBERS, "factor_update_period": 1, "inverse_update_period": 1}
        optimizer = KFACOptimizer(model, **numbers, distributed=DistributedConfig(strategy))
        with Join([model, optimizer]):
            for number in range(lengths[rank]):
                x, y = share(examples(number), [6, 6], rank)
                with nullcontext() if number % 2 else model.no_sync():
                    (squares(model(x), y).mean() / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        ends.append([param.detach().clone() for param in bare.parameters()])
    return all(map(torch.equal, *ends))


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_a_step_that_a_rank_begins_and_does_not_end_leaves_no_statistics(two_ranks: Ranks, strategy: Strategy) -> None:
    assert two_ranks.run(left_over, strategy) == [True, True]


def refused(rank: int, strategy: Strategy, flags: dict[str, Any], options: dict[str, Any]) -> str:
    model = DistributedDataParallel(build(Mixed), **flags)
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy))
    first = [optimizer, model] if options.pop("turned", False) else [model, optimizer]
    try:
        with Join(first, **options):
            squares(model(share(examples(0), [6, 6], rank)[0]), torch.zeros(6, 2)).mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "flags", "options", "told"),
    [
        (Sharded(), {}, {"divide_by_initial_world_size": False}, "leave divide_by_initial_world_size of Join at True"),
        (Sharded(), {"find_unused_parameters": True}, {}, "pass DistributedConfig(exchange=Exchange.DIRECT)"),
        (Replicated(), {}, {"turned": True}, "Use `with Join([model, optimizer]):`"),
    ],
)
def test_what_would_go_wrong_is_refused_at_the_first_step(
    two_ranks: Ranks, strategy: Strategy, flags: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    for message in two_ranks.run(refused, strategy, flags, options):
        assert told in message


def clipped_or_scaled(rank: int, way: str) -> tuple[list[Tensor], int]:
    """Rank 1 runs out of examples; rank 0 clips, or scales a loss that overflows in the second of its steps."""
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    config = DistributedConfig(Replicated(), timeout=timedelta(seconds=20))
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=config)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled", init_scale=2.0**10)
    with Join([model, optimizer]):
        for step in range((5, 1)[rank]):
            optimizer.zero_grad()
            x, y = share(examples(step), [6, 6], rank)
            loss = squares(model(x), y).mean()
            scaler.scale(loss * torch.inf if step == 1 and way == "scaled" else loss).backward()
            if way == "clipped":
                optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
    return [param.detach() for param in bare.parameters()], int(optimizer.metrics()["skipped_steps"])


@pytest.mark.parametrize("way", ["clipped", "scaled"])
def test_ranks_that_go_on_may_clip_and_scale_under_replicated(two_ranks: Ranks, way: str) -> None:
    (ours, skipped), (theirs, also) = two_ranks.run(clipped_or_scaled, way)
    assert skipped == also == int(way == "scaled")
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def found_late(rank: int, given: str, shows: bool) -> str:
    """Rank 1 has no examples, and the wrapper is in none of what the optimizer is given."""
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    config = DistributedConfig(timeout=timedelta(seconds=5))
    optimizer = KFACOptimizer(bare if given == "module" else bare.parameters(), **NUMBERS, distributed=config)
    if shows:
        squares(model(examples(0)[0]), examples(0)[1]).mean().backward()
        optimizer.zero_grad()
    try:
        with Join([model, optimizer]):
            for step in range((2, 0)[rank]):
                optimizer.zero_grad()
                squares(model(examples(step)[0]), examples(step)[1]).mean().backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", ["module", "parameters"])
def test_a_join_before_the_wrapper_is_known_is_refused_and_a_forward_shows_it(two_ranks: Ranks, given: str) -> None:
    for message in two_ranks.run(found_late, given, False, timeout=20):
        assert "Join([model, optimizer]) came before the optimizer knows the DistributedDataParallel" in message
        assert "or run one forward with gradients on all ranks before" in message
    assert two_ranks.run(found_late, given, True) == ["", ""]


class Spare(Mixed):
    """Has a parameter that the loss never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def in_two_epochs(rank: int) -> list[Tensor]:
    """Rank 1 has compared gradients in one step of the first epoch, rank 0 in as many as are looked at."""
    bare = build(Spare)
    model = DistributedDataParallel(bare, find_unused_parameters=True)
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(timeout=timedelta(seconds=20)))
    for lengths in [(4, 1), (2, 2)]:
        with Join([model, optimizer]):
            for step in range(lengths[rank]):
                x, y = share(examples(step), [6, 6], rank)
                optimizer.zero_grad()
                squares(model(x), y).mean().backward()
                optimizer.step()
    return [param.detach() for param in bare.parameters()]


def test_a_rank_that_had_run_out_compares_gradients_in_the_next_epoch_as_others_do(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(in_two_epochs)
    assert all(map(torch.equal, first, second))


class Heads(nn.Module):
    """Two heads, of which the second is used in the first two steps alone: later DDP leaves it without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        is_other = any(bool((x[0] == example).all()) for step in (0, 1) for example in examples(step)[0])
        out: Tensor = (self.other if is_other else self.one)(self.first(x).tanh())
        return out


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_a_head_that_no_rank_uses_stays_where_its_owner_has_run_out(two_ranks: Ranks, strategy: Strategy) -> None:
    flags = {"find_unused_parameters": True}
    check(two_ranks.run(on_rank, strategy, Exchange.DIRECT, 1, flags, Heads), net=Heads)


def clipped_after(rank: int | None) -> list[Tensor]:
    """Two steps within a `Join`, and two that clip after it."""
    bare = build(Mixed)
    model = bare if rank is None else DistributedDataParallel(bare)
    config = {} if rank is None else {"distributed": DistributedConfig(Sharded(), timeout=timedelta(seconds=20))}
    optimizer = KFACOptimizer(model, **NUMBERS, **config)
    for steps in (range(2), range(2, 4)):
        with Join([model, optimizer]) if rank is not None and steps[0] == 0 else nullcontext():
            for step in steps:
                x, y = examples(step) if rank is None else share(examples(step), [6, 6], rank)
                optimizer.zero_grad()
                squares(model(x), y).mean().backward()
                if steps[0] > 0:
                    optimizer.clip_grad_norm_(0.05)
                optimizer.step()
    optimizer.consolidate_state_dict()
    return [param.detach() for param in bare.parameters()]


def test_ranks_clip_and_write_checkpoints_after_a_join_has_ended(two_ranks: Ranks) -> None:
    for params in two_ranks.run(clipped_after):
        for ours, expected in zip(params, clipped_after(None), strict=True):
            close(ours, expected, "a parameter", 1e-12)


def refused_by_name(_: int) -> list[str]:
    model, criterion, found = DistributedDataParallel(build(Mixed)), nn.MSELoss(), []
    judged = {"estimate": MonteCarlo(criterion), "adapt_damping": LevenbergMarquardt()}
    try:
        Join([model, KFACOptimizer(model, lr=0.1, **judged)])
    except NotImplementedError as error:
        found.append(str(error))
    sharded = KFACOptimizer(model, lr=0.1, distributed=DistributedConfig(Sharded()))
    try:
        with Join([model, sharded]):
            model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
            sharded.clip_grad_norm_(1.0)
    except NotImplementedError as error:
        found.append(str(error))
    try:
        with Join([model, sharded]):
            sharded.consolidate_state_dict()
    except NotImplementedError as error:
        found.append(str(error))
    with Join([model, sharded], enable=False):  # the remedy where an exception has ended the block
        pass
    sharded.consolidate_state_dict()
    return found


def test_judged_steps_clipping_of_shards_and_checkpoints_are_refused_by_name(two_ranks: Ranks) -> None:
    for judged, clipped, consolidated in two_ranks.run(refused_by_name):
        assert "LevenbergMarquardt" in judged
        assert "has no loss" in judged
        assert "does not come to clip_grad_norm_() under Sharded()" in clipped
        assert "does not come to consolidate_state_dict(), for which the others would wait. Call it aft" in consolidated
