"""Ranks that call other things at the same place, or come with other arguments: all are told, and in the same words."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import batch, mlp, square_loss
from helpers.ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.blocks.selection import in_order
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded
from kfac_optim.distributed.experts import Experts

Act = Callable[[nn.Module, KFACOptimizer, int], object]


def train(model: nn.Module, optimizer: KFACOptimizer, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        square_loss(model(batch(2 * step + rank))).backward()
        optimizer.step()


def told(rank: int, act: Act, is_wrapped: bool, options: dict[str, Any]) -> str:
    """What this rank is told, "" if it is nothing."""
    bare = mlp()
    model = DistributedDataParallel(bare) if is_wrapped else bare
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, **options)
    try:
        act(model, optimizer, rank)
    except Exception as error:
        return str(error)
    return ""


def consolidate_to_itself(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=rank)


def consolidate_on_one(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    train(model, optimizer, rank)
    if rank == 0:
        optimizer.consolidate_state_dict()
    train(model, optimizer, rank)


def clip_on_one(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    train(model, optimizer, rank)
    square_loss(model(batch(rank))).backward()
    if rank == 1:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def load_on_one(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    train(model, optimizer, rank)
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what only other ranks have
            optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank)


def without_gradients_on_one(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    for step in range(2):
        if rank == 0:
            square_loss(model(batch(step))).backward()
        optimizer.step()


CASES: dict[str, tuple[Act, bool, str]] = {
    "each to itself": (
        consolidate_to_itself,
        True,
        r"call: consolidate_state_dict\(to=0\) here, consolidate_state_dict\(to=1\) there\. .* with the same `to`",
    ),
    "consolidated on one": (
        consolidate_on_one,
        False,
        r"call: consolidate_state_dict\(to=0\) here, step\(\) there\. Each of these is a collective: call it on every",
    ),
    "clipped on one": (clip_on_one, False, r"call: step\(\) here, clip_grad_norm_\(\) there\. Each of these is"),
    "loaded on one": (
        load_on_one,
        True,
        r"checkpoints loaded: 1, .* here, none there\. Call load_state_dict on every rank, with the same checkpoint",
    ),
    "no gradient on one": (without_gradients_on_one, False, r"the gradients of this step differ from rank to rank"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_do_not_do_the_same_are_all_told_what_they_do(two_ranks: Ranks, case: str) -> None:
    act, is_wrapped, words = CASES[case]
    strategy = Replicated() if case == "no gradient on one" or is_wrapped else Sharded()
    for message in two_ranks.run(told, act, is_wrapped, {"distributed": DistributedConfig(strategy=strategy)}):
        assert re.search(words, message), message


def other_config(rank: int) -> str:
    def act(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
        train(model, optimizer, rank)

    return told(rank, act, True, {"distributed": DistributedConfig(overlap=rank == 0)})


def test_another_config_is_named(two_ranks: Ranks) -> None:
    for message in two_ranks.run(other_config):
        assert "DistributedConfig.overlap: True here, False there" in message


def overflow_on_one(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        (square_loss(model(batch(step))) * (torch.inf if rank == 1 else 1)).backward()
        optimizer.step()


def test_a_rank_whose_gradients_are_finite_is_told_that_those_of_another_are_not(two_ranks: Ranks) -> None:
    options = {"distributed": DistributedConfig(strategy=Sharded()), "nonfinite_limit": 2}
    first, second = two_ranks.run(told, overflow_on_one, False, options)
    assert "now those of another process" in first
    assert "now those of '0.weight'" in second


def test_patterns_in_a_set_have_one_order_in_all_processes() -> None:
    names = {f"layer{number}" for number in range(20)}
    assert in_order(names) == tuple(sorted(names)) == Experts(names).layers  # type: ignore[arg-type]
    assert in_order(["b", "a"]) == ("b", "a"), "an order that was given counts"
