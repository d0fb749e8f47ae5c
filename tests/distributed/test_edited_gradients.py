"""Clipping where each rank has the mean of some gradients alone: torch's is told of, and too early is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical
from helpers.ranks import Ranks
from helpers.training import Mixed, build, examples, share, squares, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

FLAGS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "DDP": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}

Between = Callable[[nn.Module, KFACOptimizer], Any]
"""What comes between backward and step."""


def nothing(_: nn.Module, __: KFACOptimizer) -> None:
    pass


def torchs(model: nn.Module, _: KFACOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def ours(_: nn.Module, optimizer: KFACOptimizer) -> None:
    optimizer.clip_grad_norm_(0.1)


def of_rank(rank: int, strategy: Strategy, flags: str, between: Between, scaled: str, micro: int = 1) -> list[int]:
    """How often it was told at each step."""
    model = wrap(build(Mixed), FLAGS[flags])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=bool(scaled))
    config = DistributedConfig(strategy=strategy)
    named = {"grad_scaler": scaler} if scaled else {}
    optimizer = KFACOptimizer(model, lr=0.05, distributed=config, **named)
    told = []
    for step in range(4):
        x, y = share(examples(step), [6, 6], rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(micro):
                scaler.scale(squares(model(x), y).mean() / micro).backward()
            if scaled == "unscaled":
                scaler.unscale_(optimizer)
            between(model, optimizer)
            scaler.step(optimizer)
            scaler.update()
        told.append(sum("optimizer.clip_grad_norm_" in str(each.message) for each in caught))
    return told


@pytest.mark.parametrize("scaled", ["", "unscaled"])
@pytest.mark.parametrize("flags", FLAGS)
def test_clipping_by_torch_is_told_of_once(two_ranks: Ranks, flags: str, scaled: str) -> None:
    for told in two_ranks.run(of_rank, Sharded(), flags, torchs, scaled):
        assert told == [1, 0, 0, 0]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("between", "scaled"),  # who clips unscales before
    [(nothing, ""), (nothing, "unscaled"), (nothing, "handed"), (ours, ""), (ours, "unscaled")],
)
def test_what_is_right_is_not_told_of(two_ranks: Ranks, flags: str, between: Between, scaled: str) -> None:
    for told in two_ranks.run(of_rank, Sharded(), flags, between, scaled, 1 if flags == "static" else 2):
        assert told == [0, 0, 0, 0]


def test_where_all_ranks_have_all_gradients_torchs_own_is_right(two_ranks: Ranks) -> None:
    for told in two_ranks.run(of_rank, Replicated(), "DDP", torchs, ""):
        assert told == [0, 0, 0, 0]


def frozen(rank: int) -> list[int]:
    """How often it was told at each step where the first parameter is frozen after the first step."""
    model = build(Mixed)
    optimizer, told = KFACOptimizer(model, lr=0.05, distributed=DistributedConfig(strategy=Sharded())), []
    for step in range(4):
        x, y = share(examples(step), [6, 6], rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            squares(model(x), y).mean().backward()
            if step == 2:
                torchs(model, optimizer)
            optimizer.step()
        told.append(sum("optimizer.clip_grad_norm_" in str(each.message) for each in caught))
        model.gain.requires_grad_(False)
    return told


def test_another_gradient_is_watched_where_the_first_parameter_is_frozen(two_ranks: Ranks) -> None:
    assert two_ranks.run(frozen) == [[0, 0, 1, 0]] * 2


def zeroed(rank: int) -> list[str]:
    """Gradients are thrown away in place after backward."""
    model = DistributedDataParallel(build(Mixed))
    optimizer = KFACOptimizer(model, lr=0.05, distributed=DistributedConfig(strategy=Sharded()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            x, y = share(examples(step), [6, 6], rank)
            squares(model(x), y).mean().backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    return [str(each.message) for each in caught if "clip_grad_norm_" in str(each.message)]


def test_gradients_that_are_thrown_away_are_not_told_of(two_ranks: Ranks) -> None:
    assert two_ranks.run(zeroed) == [[], []]


def refused(rank: int, flags: str, clips: list[str]) -> list[torch.Tensor]:
    """Train, and in the second step clip these micro-batches before the last, which is refused and thrown away."""
    model = wrap(build(Mixed), FLAGS[flags])
    optimizer = KFACOptimizer(model, lr=0.05, distributed=DistributedConfig(strategy=Sharded()))

    def backward(step: int, micro: int) -> None:
        x, y = share(examples(step, micro), [6, 6], rank)
        squares(model(x), y).mean().backward()

    def clip_early(step: int) -> None:
        for micro, clip in enumerate(clips):
            backward(step, micro)
            if clip:
                optimizer.clip_grad_norm_(0.1)
        optimizer.step()

    for step in range(3):
        optimizer.zero_grad()
        if step == 1 and clips:
            with pytest.raises(RuntimeError, match="Call clip_grad_norm_ after the last backward of a step"):
                clip_early(step)
            optimizer.zero_grad()
        backward(step, 2)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("flags", ["bare", "DDP"])
@pytest.mark.parametrize("clips", [["clip", ""], ["clip", "clip"]], ids=["once", "twice"])
def test_a_backward_after_clipping_is_refused_and_leaves_the_run_as_it_was(
    two_ranks: Ranks, flags: str, clips: list[str]
) -> None:
    assert_identical(two_ranks.run(refused, flags, clips), two_ranks.run(refused, flags, []))


def refused_on_one(rank: int) -> str:
    """On rank 1 alone a backward comes after the call."""
    model, (x, y) = build(Mixed), examples(0)
    optimizer = KFACOptimizer(model, lr=0.05, distributed=DistributedConfig(strategy=Sharded()))
    squares(model(x), y).mean().backward()
    optimizer.clip_grad_norm_(0.1)
    if rank == 1:
        squares(model(x), y).mean().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_all_ranks_are_told_of_a_backward_that_one_of_them_has_after_clipping(two_ranks: Ranks) -> None:
    for told in two_ranks.run(refused_on_one):
        assert "step() with gradients that came after clip_grad_norm_()" in told
        assert told.endswith("call optimizer.zero_grad(), which drops these gradients.")
        assert "collective" not in told


def dropped(rank: int) -> list[torch.Tensor]:
    """In the second step what was clipped is thrown away by the model, which tells nobody."""
    model = build(Mixed)
    optimizer = KFACOptimizer(model, lr=0.05, distributed=DistributedConfig(strategy=Sharded()))
    for step in range(3):
        for micro in range(2 if step == 1 else 1):
            model.zero_grad()
            x, y = share(examples(step, micro), [6, 6], rank)
            squares(model(x), y).mean().backward()
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def test_gradients_that_the_model_has_dropped_since_are_no_reason_to_refuse(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(dropped)
    assert_identical(one, other)
