"""Wrappers that users copy, save, replace, or run out of examples in."""

import copy
import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import Mixed, build, close, examples, share, squares
from test_process_groups import NUMBERS, one_process_of, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Message, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.utils.autograd import in_backward

each_strategy = pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)


def built(strategy: Strategy, **options: Any) -> tuple[nn.Module, DistributedDataParallel, KFACOptimizer]:
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    config = DistributedConfig(strategy=strategy, **options)
    return bare, model, KFACOptimizer(model, **NUMBERS, distributed=config)


# -- copies ------------------------------------------------------------------------------------------------------


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    copied: nn.Module = AveragedModel(model).module
    return copied


def copied(rank: int, strategy: Strategy, how: Callable[[nn.Module], nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """The original, and a copy with an optimizer of its own, from the middle of a training."""
    bare, model, optimizer = built(strategy)
    train(model, optimizer, 0, rank, range(2))
    other = how(model)
    train(model, optimizer, 0, rank, range(2, 5))
    again = KFACOptimizer(other, **NUMBERS, distributed=DistributedConfig(strategy=strategy))
    with torch.no_grad():
        for param, start in zip(other.parameters(), build(Mixed).parameters(), strict=True):
            param.copy_(start)
    train(other, again, 0, rank)
    return [param.detach() for param in bare.parameters()], [param.detach() for param in other.parameters()]


@each_strategy
@pytest.mark.parametrize("how", [copy.deepcopy, averaged, saved])
def test_a_wrapped_model_is_copied_and_saved_as_without_the_optimizer(
    two_ranks: Ranks, how: Callable[[nn.Module], nn.Module], strategy: Strategy
) -> None:
    expected = one_process_of(0)
    for found in two_ranks.run(copied, strategy, how):
        for params in found:
            for ours, theirs in zip(params, expected, strict=True):
                close(ours, theirs, "a parameter", 1e-12)


def copied_with_its_optimizer(rank: int) -> tuple[list[Tensor], list[Tensor], int]:
    trace: list[Message] = []
    bare, model, optimizer = built(Sharded(), observe=trace.append)
    train(model, optimizer, 0, rank, range(2))
    other, again = copy.deepcopy((model, optimizer))
    train(model, optimizer, 0, rank, range(2, 5))
    trace.clear()
    train(other, again, 0, rank, range(2, 5))
    sent = sum(launch.name.startswith("gradients of DDP") for launch in trace)
    return [param.detach() for param in bare.parameters()], [param.detach() for param in other.parameters()], sent


def test_a_copy_with_its_optimizer_sends_gradients_to_owners_too(two_ranks: Ranks) -> None:
    for ours, others, sent in two_ranks.run(copied_with_its_optimizer):
        assert all(map(torch.equal, ours, others))
        assert sent > 0


# -- a new wrapper -----------------------------------------------------------------------------------------------


def unfreeze(rank: int | None, strategy: Strategy, given: str) -> tuple[list[Tensor], int]:
    """The first layer trains from the third step on; DDP asks for a new wrapper then."""
    by_backward: list[str] = []
    bare = build(Mixed)
    bare.first.requires_grad_(False)
    model = bare if rank is None else DistributedDataParallel(bare)

    def note(message: Message) -> None:
        if in_backward():
            by_backward.append(message.name)

    config = {} if rank is None else {"distributed": DistributedConfig(strategy=strategy, observe=note)}
    params = {"model": model, "parameters": model.parameters(), "bare": bare}[given]
    optimizer = KFACOptimizer(params, **{**NUMBERS, "inverse_update_period": 1}, **config)
    train(model, optimizer, 0, rank, range(2))
    bare.first.requires_grad_(True)
    if rank is not None:
        model = DistributedDataParallel(bare)
        by_backward.clear()
    train(model, optimizer, 0, rank, range(2, 5))
    what = "gradients of DDP" if isinstance(strategy, Sharded) else "factor sums"
    return [param.detach() for param in bare.parameters()], sum(name.startswith(what) for name in by_backward)


@each_strategy
@pytest.mark.parametrize("given", ["model", "parameters", "bare"])
def test_a_new_wrapper_takes_the_place_of_the_old_one(two_ranks: Ranks, given: str, strategy: Strategy) -> None:
    expected, _ = unfreeze(None, strategy, given)
    for params, by_backward in two_ranks.run(unfreeze, strategy, given):
        assert by_backward > 0
        for ours, theirs in zip(params, expected, strict=True):
            close(ours, theirs, "a parameter", 1e-12)


def in_turns(rank: int, strategy: Strategy) -> list[Tensor]:
    """Forwards run in one wrapper and in another, and in the first again."""
    bare, first, optimizer = built(strategy)
    train(first, optimizer, 0, rank, range(2))
    second = DistributedDataParallel(bare)
    train(second, optimizer, 0, rank, range(2, 4))
    train(first, optimizer, 0, rank, range(4, 5))
    return [param.detach() for param in bare.parameters()]


class Caller(nn.Module):
    """Calls a model that is no part of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.one, self.others = nn.Parameter(torch.ones((), dtype=torch.float64)), [model]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.one * self.others[0](x)
        return output


def called_by_another(rank: int, strategy: Strategy) -> list[Tensor]:
    """Another model's wrapper averages none of its gradients, which `Sharded` does."""
    bare = build(Mixed)
    optimizer = KFACOptimizer(bare, **NUMBERS, distributed=DistributedConfig(strategy=strategy))
    train(DistributedDataParallel(Caller(bare)), optimizer, 0, rank)
    return [param.detach() for param in bare.parameters()]


@pytest.mark.parametrize(
    ("how", "strategy"),
    [(in_turns, Replicated()), (in_turns, Sharded()), (called_by_another, Sharded())],
    ids=["in turns, replicated", "in turns, sharded", "another's"],
)
def test_wrappers_take_turns_and_those_of_others_do_not_count(
    two_ranks: Ranks, how: Callable[[int, Strategy], list[Tensor]], strategy: Strategy
) -> None:
    expected = one_process_of(0)
    for params in two_ranks.run(how, strategy):
        for ours, theirs in zip(params, expected, strict=True):
            close(ours, theirs, "a parameter", 1e-12)


# -- examples that run out ---------------------------------------------------------------------------------------


def joined(rank: int, strategy: Strategy, flags: dict[str, bool]) -> tuple[str, float]:
    _, model, optimizer = built(strategy)
    train(model, optimizer, 0, rank, range(1))
    began = time.monotonic()
    try:
        with model.join(**flags):
            train(model, optimizer, 0, rank, range(2 + rank))
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@each_strategy
def test_ranks_that_run_out_of_examples_are_refused_at_once(two_ranks: Ranks, strategy: Strategy) -> None:
    for message, seconds in two_ranks.run(joined, strategy, {}):
        assert message.startswith("kfac_optim: within join() of DistributedDataParallel ranks that have run out of")
        assert seconds < 20


@each_strategy
def test_an_epoch_may_end_on_all_ranks_with_the_first_that_runs_out(two_ranks: Ranks, strategy: Strategy) -> None:
    (first, _), (second, _) = two_ranks.run(joined, strategy, {"throw_on_early_termination": True})
    assert first == "Rank 0 exhausted all inputs."
    assert "Detected at least one rank that exhausted inputs" in second


def joined_before(rank: int) -> str:
    _, model, optimizer = built(Replicated())
    with model.join():
        for _ in range(2):
            squares(model(share(examples(0), [6, 6], rank)[0]), torch.zeros(6, 2)).mean().backward()
    with model.join(enable=False):
        pass
    dist.barrier()
    try:
        train(model, optimizer, 0, rank, range(2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_join_that_was_left_is_ended_as_the_message_says(two_ranks: Ranks) -> None:
    assert two_ranks.run(joined_before) == ["", ""]


# -- one wrapper after another -------------------------------------------------------------------------------------


def handed_on(rank: int, how: str, following: Strategy | None) -> list[Tensor]:
    """A wrapper is trained by a second optimizer, after the first was released, deleted, or with a new wrapper."""
    bare, model, optimizer = built(Sharded())
    train(model, optimizer, 0, rank, range(3))
    if how == "deleted":
        del optimizer
    else:
        optimizer.remove_hooks()
    if how == "wrapped":
        model = DistributedDataParallel(bare)
    if following is None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, sgd, 0, rank, range(3, 7))
    else:
        second = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=following))
        train(model, second, 0, rank, range(3, 7))
    return [param.detach() for param in bare.parameters()]


@pytest.mark.parametrize(
    ("how", "following"), [("deleted", None), ("released", Replicated()), ("released", Sharded())], ids=str
)
def test_a_wrapper_is_handed_to_another_optimizer(two_ranks: Ranks, how: str, following: Strategy | None) -> None:
    expected = two_ranks.run(handed_on, "wrapped", following)[0]
    for params in two_ranks.run(handed_on, how, following):
        for ours, theirs in zip(params, expected, strict=True):
            close(ours, theirs, "a parameter", 1e-12)


def kept_by_two(rank: int, following: Strategy, wraps: bool) -> tuple[str, list[Tensor]]:
    """What is said where the first optimizer is still there; then the training goes on as that says."""
    bare, model, optimizer = built(Sharded())
    train(model, optimizer, 0, rank, range(3))
    model, message = DistributedDataParallel(bare) if wraps else model, ""
    for _ in range(2):
        second = None  # so that the one before is gone
        try:
            second = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=following))
            train(model, second, 0, rank, range(3, 7))
            break
        except RuntimeError as error:
            message = str(error)
        optimizer.remove_hooks()
    return message, [param.detach() for param in bare.parameters()]


@pytest.mark.parametrize("wraps", [False, True], ids=["same wrapper", "new wrapper"])
@pytest.mark.parametrize("following", [Sharded(), Replicated()], ids=["Sharded", "Replicated"])
def test_a_wrapper_is_not_shared_with_an_optimizer_that_is_still_there_and_the_remedy_works(
    two_ranks: Ranks, following: Strategy, wraps: bool
) -> None:
    expected = two_ranks.run(handed_on, "wrapped", following)[0]
    for message, params in two_ranks.run(kept_by_two, following, wraps):
        assert re.search(r"remove_hooks\(\) on (the one that is done|that optimizer), on all ranks", message)
        for ours, theirs in zip(params, expected, strict=True):
            close(ours, theirs, "a parameter", 1e-12)


# -- what a wrapper does not average -------------------------------------------------------------------------------


def unfrozen_later(rank: int, strategy: Strategy, rebuilds: bool) -> str:
    """DDP does not average what was frozen as it was built."""
    bare = build(Mixed)
    bare.hidden.requires_grad_(False)
    model = DistributedDataParallel(bare)
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=strategy))
    train(model, optimizer, 0, rank, range(2))
    bare.hidden.requires_grad_()
    if rebuilds:
        optimizer.remove_hooks()
        optimizer = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=strategy))
    try:
        train(model, optimizer, 0, rank, range(2, 4))
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_a_wrapper_does_not_know_are_told_of(two_ranks: Ranks) -> None:
    for message in two_ranks.run(unfrozen_later, Replicated(), False):
        assert "the gradients of 'hidden.weight' differ from rank to rank" in message
    for message in two_ranks.run(unfrozen_later, Replicated(), True):
        assert re.search("the gradients of this step differ from rank to rank.* anew where layers were unfro", message)
    assert two_ranks.run(unfrozen_later, Sharded(), False) == ["", ""]


def past_the_wrapper(rank: int, given: str, since: int) -> tuple[int, str]:
    """The step that raises, and what it says; forwards go past the wrapper since a step, where there is one."""
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    optimizer = KFACOptimizer({"model": model, "bare": bare}[given], **NUMBERS)
    for step in range(6):
        try:
            train(bare if step >= since else model, optimizer, 0, rank, range(step, step + 1))
        except RuntimeError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize(("given", "since"), [("model", 0), ("model", 4), ("bare", 4), ("model", 6)])
def test_forwards_that_go_past_the_wrapper_are_told_of(two_ranks: Ranks, given: str, since: int) -> None:
    for step, message in two_ranks.run(past_the_wrapper, given, since):
        assert step == (-1 if since == 6 else since)
        assert since == 6 or re.search("gradients of this step differ.* call the wrapper and not its module", message)
