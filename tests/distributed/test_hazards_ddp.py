"""What makes other implementations hang or go wrong: each with a time-out, and the numbers of one process."""

import copy
import os
import pickle
import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import RankError, Ranks
from helpers.training import EXAMPLES, TIMEOUT, Batch, Mixed, build, close, examples, share, squares, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kfac_optim import (
    Background,
    BlockDiagonal,
    ExactGGN,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    MonteCarlo,
    QuadraticModel,
    Structure,
    Together,
)
from kfac_optim.blocks.shadow import make_shadow
from kfac_optim.distributed import DistributedConfig, Placement, Replicated, Sharded
from kfac_optim.distributed.gradients.sharded_gradients import _set_gradient
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.step.refresh_schedules import Refresh

STRATEGIES = (Replicated(0.5), Sharded(), Sharded(Placement.FACTORS))
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)

Step = Callable[[nn.Module, KFACOptimizer, Tensor, Tensor, int], None]
"""One step of a training loop on some examples; the number of the step comes last."""


class Training:
    """A model and its optimizer on one rank, or on the one process of the reference, where `rank` is None."""

    def __init__(
        self,
        rank: int | None,
        net: Callable[[], nn.Module] = Mixed,
        strategy: Strategy | None = None,
        flags: dict[str, Any] | None = None,
        timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.bare = build(net)
        self.model = self.bare if rank is None else wrap(self.bare, flags)
        self.options = {
            "lr": 0.05,
            "damping": 0.1,
            "momentum": 0.9,
            "factor_update_period": 1,
            "inverse_update_period": 3,
            **options,
        }
        if rank is not None:
            self.options["distributed"] = DistributedConfig(strategy=strategy or Replicated(), timeout=timeout)
        self.optimizer = KFACOptimizer(self.model, **self.options)

    def batch(self, step: int, ranks: int = 2) -> Batch:
        whole = examples(step)
        return whole if self.rank is None else share(whole, [EXAMPLES // ranks] * ranks, self.rank)

    def run(self, step: Step, numbers: Sequence[int]) -> None:
        for number in numbers:
            step(self.model, self.optimizer, *self.batch(number), number)

    @property
    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.bare.parameters()]


def plain(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    optimizer.step()


def on_rank(rank: int | None, step: Step, steps: int, arguments: dict[str, Any]) -> list[Tensor]:
    training = Training(rank, **arguments)
    training.run(step, range(steps))
    return training.params


def check(ranks: Ranks, step: Step, *, steps: int = 8, reference: Step | None = None, **arguments: Any) -> None:
    found = ranks.run(on_rank, step, steps, arguments)
    alone = {key: value for key, value in arguments.items() if key not in ("strategy", "flags")}
    compare(found, on_rank(None, reference or step, steps, alone))


def compare(found: Sequence[Sequence[Tensor]], expected: Sequence[Tensor], rtol: float = 1e-12) -> None:
    for params in found[1:]:
        assert all(map(torch.equal, found[0], params)), "the ranks have drifted apart"
    for number, (ours, theirs) in enumerate(zip(found[0], expected, strict=True)):
        close(ours, theirs, f"parameter {number}", rtol)


# -- layers and passes -------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Each half of the examples takes a layer of its own; another runs at some forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last, self.rare = (nn.Linear(4, 4) for _ in range(4))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        size = EXAMPLES // 2
        first, second = (
            (self.one, self.other) if x[0, 0] == examples(self.forwards - 1)[0][0, 0] else (self.other, None)
        )
        h = first(x) if second is None else torch.cat([first(x[:size]), second(x[size:])])
        h = self.last(h.tanh())
        return (self.rare(h) if self.forwards % 2 else h)[:, :2]


@each_strategy
def test_layers_that_run_on_some_ranks_and_at_some_steps_alone(two_ranks: Ranks, strategy: Strategy) -> None:
    check(two_ranks, plain, net=Routed, strategy=strategy, flags={"find_unused_parameters": True})
    check(two_ranks, plain, net=Routed, strategy=Sharded(), inverse_update_period=1)


class LateHeads(nn.Module):
    """From the sixth forward on each half of the examples takes a head of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.main, self.one, self.other = nn.Linear(4, 4), *(nn.Linear(4, 2) for _ in range(3))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        h, size = self.first(x).tanh(), EXAMPLES // 2
        out: Tensor = self.main(h)
        if self.forwards <= 5:
            return out
        if len(x) > size:
            return out + torch.cat([self.one(h[:size]), self.other(h[size:])])
        is_first = x[0, 0] == examples(self.forwards - 1)[0][0, 0]
        return out + (self.one if is_first else self.other)(h)


@each_strategy
def test_layers_that_begin_late_on_one_rank_each(two_ranks: Ranks, strategy: Strategy) -> None:
    """By then no more statistics of them were wanted, and all ranks have to see that they are."""
    periods = {"factor_update_period": 10, "inverse_update_period": 10}
    flags = {"find_unused_parameters": True}
    check(two_ranks, plain, net=LateHeads, strategy=strategy, flags=flags, **periods)


class Twice(nn.Module):
    """A layer twice in one forward, once of them checkpointed."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.reentrant is None:
            h = self.hidden(h).tanh()
        else:
            h = checkpoint(self.hidden, h, use_reentrant=self.reentrant).tanh()
        out: Tensor = self.last(h)
        return out


@each_strategy
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(two_ranks: Ranks, reentrant: bool, strategy: Strategy) -> None:
    found = two_ranks.run(
        on_rank, plain, 6, {"net": partial(Twice, reentrant=reentrant), "strategy": strategy, "flags": {}}
    )
    compare(found, on_rank(None, plain, 6, {"net": partial(Twice, reentrant=None)}))


def two_backwards(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    squares(model(x), y).mean().backward()
    squares(model(2 * x), y).mean().backward()
    optimizer.step()


def forward_beside(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    optimizer.zero_grad()
    losses = squares(model(x), y)
    with torch.no_grad():
        model.eval()
        model(3 * x)
        model.train()
    losses.mean().backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"kfac_optim. this state_dict\(\) lacks")
        optimizer.state_dict()
        with torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.state_dict()


def thrown_away(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    optimizer.zero_grad()
    squares(model(5 * x), y).mean().backward()
    plain(model, optimizer, x, y, number)


@each_strategy
@pytest.mark.parametrize("flags", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "views"])
def test_two_backwards_before_a_step(two_ranks: Ranks, flags: dict[str, Any], strategy: Strategy) -> None:
    check(two_ranks, two_backwards, strategy=strategy, flags=flags)


@each_strategy
def test_evaluations_and_checkpoints_at_any_place(two_ranks: Ranks, strategy: Strategy) -> None:
    check(two_ranks, forward_beside, strategy=strategy, flags={})


@each_strategy
def test_a_backward_that_is_thrown_away_counts_nothing(two_ranks: Ranks, strategy: Strategy) -> None:
    check(two_ranks, thrown_away, strategy=strategy, flags={}, reference=plain)
    check(two_ranks, thrown_away, strategy=strategy, flags={}, reference=plain, inverse_update_period=1)


class Optional(nn.Module):
    """A layer that runs for large inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if float(x.detach().abs().max()) > 10:
            h = self.hidden(h).tanh()
        out: Tensor = self.last(h)
        return out


def thrown_away_with_a_layer(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    """Sums of a layer are launched that then has no statistics in this step."""
    if number % 3 == 0:
        plain(model, optimizer, 100 * x, y, number)
    else:
        optimizer.zero_grad()
        squares(model(90 * x), y).mean().backward()
        plain(model, optimizer, x, y, number)


def sometimes_with_a_layer(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    plain(model, optimizer, x if number % 3 else 100 * x, y, number)


@each_strategy
def test_a_layer_that_ran_in_a_backward_that_is_thrown_away_alone(two_ranks: Ranks, strategy: Strategy) -> None:
    check(
        two_ranks,
        thrown_away_with_a_layer,
        net=Optional,
        strategy=strategy,
        flags={"find_unused_parameters": True},
        reference=sometimes_with_a_layer,
        inverse_update_period=1,
    )


# -- numbers that are not finite, refreshes that fail -------------------------------------------------------------


def bad_gradient(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    """At step 3 one example, of rank 0, has none that is finite."""
    optimizer.zero_grad()
    losses = squares(model(x), y)
    if number == 3 and torch.equal(x[0], examples(number)[0][0]):
        losses = losses * torch.tensor([torch.inf] + [1.0] * (len(x) - 1))
    losses.mean().backward()
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == (number >= 3)


@each_strategy
@pytest.mark.parametrize("flags", [None, {}], ids=["bare", "DDP"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    two_ranks: Ranks, flags: dict[str, Any] | None, strategy: Strategy
) -> None:
    if flags is None and isinstance(strategy, Replicated):
        pytest.skip("nobody averages gradients")
    check(two_ranks, bad_gradient, strategy=strategy, flags=flags)


def scale_after(rank: int) -> tuple[float, float]:
    """At step 2 the gradients of rank 0 overflow, which rank 1 does not see in its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    training = Training(rank, strategy=Sharded(), grad_scaler=scaler)
    for number in range(5):
        x, y = training.batch(number)
        training.optimizer.zero_grad()
        loss = squares(training.model(x), y).mean() * (torch.inf if number == 2 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
    return scaler.get_scale(), training.optimizer.metrics()["skipped_steps"]


def test_an_overflow_on_one_rank_lowers_the_scale_on_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(scale_after) == [(32.0, 1), (32.0, 1)]


def too_many(rank: int, strategy: Strategy) -> str:
    training = Training(rank, strategy=strategy, flags=None if isinstance(strategy, Sharded) else {}, nonfinite_limit=2)
    for number in range(3):
        x, y = training.batch(number)
        training.optimizer.zero_grad()
        (squares(training.model(x), y).mean() * (torch.inf if rank == 0 and number else 1.0)).backward()
        try:
            training.optimizer.step()
        except RuntimeError as error:
            return f"{number}: {error}"
    return ""


@each_strategy
def test_too_many_skipped_steps_raise_on_all_ranks_alike(two_ranks: Ranks, strategy: Strategy) -> None:
    for message in two_ranks.run(too_many, strategy):
        assert message.startswith("2: kfac_optim: 2 steps in a row were skipped")


class Overflowing(nn.Module):
    """A layer whose input overflows when it is squared, at examples that begin with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        huge = (x[:, :1] == 1) * 1e200 + (x[:, :1] != 1)
        return self.last(self.first(x * huge).tanh() / huge)


def bad_statistics(rank: int | None, strategy: Strategy) -> list[Tensor]:
    """At step 3 those of rank 0 are refused, so that the others' alone count."""
    training = Training(rank, Overflowing, strategy, {}, inverse_update_period=1, skip_layers=["last"])
    twin = build(Overflowing)
    for number in range(6):
        x, y = training.batch(number)
        size = EXAMPLES // 2
        training.optimizer.zero_grad()
        if rank != 1 and number == 3:
            x = torch.cat([torch.cat([torch.ones(size, 1), x[:size, 1:]], 1), x[size:]]) if rank is None else x
            if rank == 0:
                x = torch.cat([torch.ones(size, 1), x[:, 1:]], 1)
        if rank is None and number == 3:
            twin.load_state_dict(training.bare.state_dict())
            squares(training.model(x[size:]), y[size:]).mean().backward()
            for param, grad in zip(
                training.bare.parameters(),
                torch.autograd.grad(squares(twin(x), y).mean(), list(twin.parameters())),
                strict=True,
            ):
                assert param.grad is not None
                param.grad.copy_(grad)
        else:
            squares(training.model(x), y).mean().backward()
        training.optimizer.step()
    return training.params


@each_strategy
def test_a_rank_whose_statistics_are_not_finite_is_left_out_of_them(two_ranks: Ranks, strategy: Strategy) -> None:
    compare(two_ranks.run(bad_statistics, strategy), bad_statistics(None, strategy))


def failing_refresh(rank: int | None, strategy: Strategy) -> tuple[list[Tensor], float]:
    """From step 3 on the Cholesky decomposition of 5×5 matrices fails, at two steps."""
    training = Training(rank, strategy=strategy, flags={}, inverse_update_period=1)
    real = torch.linalg.cholesky_ex
    failed = 0.0

    def broken(matrix: Tensor, **options: Any) -> Any:
        factor, info = real(matrix, **options)
        return (factor, torch.ones_like(info)) if matrix.shape[-1] == 5 else (factor, info)

    for number in range(7):
        torch.linalg.cholesky_ex = broken if number in (3, 4) else real  # type: ignore[assignment]
        try:
            training.run(plain, [number])
        finally:
            torch.linalg.cholesky_ex = real  # type: ignore[assignment]
        failed = max(failed, training.optimizer.metrics()["failed_refreshes"])
    return training.params, failed


@each_strategy
def test_a_refresh_that_fails_on_its_owner_leaves_all_ranks_the_last_good_inverse(
    two_ranks: Ranks, strategy: Strategy
) -> None:
    found = two_ranks.run(failing_refresh, strategy)
    expected, failed = failing_refresh(None, strategy)
    compare([params for params, _ in found], expected)
    assert failed > 0
    assert max(count for _, count in found) > 0


# -- gradients are dropped, clipped, or somebody else's ----------------------------------------------------------


def zeroed_by_the_model(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    model.zero_grad()
    squares(model(x), y).mean().backward()
    optimizer.step()


def zeroed_before_backward(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    loss = squares(model(x), y).mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()


def made_zeros(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    model.zero_grad(set_to_none=False)
    squares(model(x), y).mean().backward()
    optimizer.step()


def made_zeros_before_backward(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    loss = squares(model(x), y).mean()
    model.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()


def made_zeros_between_backwards(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    optimizer.zero_grad()
    squares(model(3 * x), y).mean().backward()
    made_zeros_before_backward(model, optimizer, x, y, _)


def made_zeros_after_accumulation(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        squares(model(3 * x), y).mean().backward()
    made_zeros_before_backward(model, optimizer, x, y, _)


def made_zeros_after_evaluation(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    with torch.no_grad():
        model(x)
    model.zero_grad(set_to_none=False)
    squares(model(x), y).mean().backward()
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    (squares(model(x), y).mean() / 10).backward()
    optimizer.step()


def never_zeroed_in_parts(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        (squares(model(x), y).mean() / 20).backward()
    (squares(model(x).sin(), y).mean() / 20).backward()
    optimizer.step()


def weighed(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    """The first of two batches counts less."""
    optimizer.zero_grad()
    squares(model(3 * x), y).mean().backward()
    scale_gradients(model)
    squares(model(x), y).mean().backward()
    optimizer.step()


def decayed(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    (squares(model(x), y).mean() / 10).backward()
    optimizer.step()
    scale_gradients(model)


def clipped_and_kept(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    if number % 2 == 0:
        optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    optimizer.clip_grad_norm_(0.05)
    optimizer.step()


def scale_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad *= 0.7


@pytest.mark.parametrize("flags", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(
    "step",
    [
        zeroed_by_the_model,
        zeroed_before_backward,
        made_zeros,
        made_zeros_before_backward,
        made_zeros_between_backwards,
        made_zeros_after_accumulation,
        made_zeros_after_evaluation,
        never_zeroed,
        never_zeroed_in_parts,
    ],
)
def test_gradients_may_be_dropped_anywhere_or_not_at_all(two_ranks: Ranks, step: Step, flags: dict[str, Any]) -> None:
    check(two_ranks, step, strategy=Sharded(), flags=flags)


@pytest.mark.parametrize("flags", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("step", [weighed, decayed, clipped_and_kept])
def test_gradients_may_be_changed_between_two_backwards(two_ranks: Ranks, step: Step, flags: dict[str, Any]) -> None:
    check(two_ranks, step, strategy=Sharded(), flags=flags)


def never_zeroed_nor_reduced(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        (squares(model(x), y).mean() / 10).backward()
    optimizer.step()


@pytest.mark.parametrize("flags", [None, {}], ids=str)
@pytest.mark.parametrize("step", [decayed, clipped_and_kept, never_zeroed_nor_reduced])
def test_gradients_that_the_optimizer_averages_may_be_kept(
    two_ranks: Ranks, step: Step, flags: dict[str, Any] | None
) -> None:
    check(two_ranks, step, strategy=Sharded(), flags=flags)


def kept_under_another_plan(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(bare, Mixed)
    if number == 4:
        for param in (bare.gain, bare.norm.weight, bare.norm.bias):
            param.requires_grad_(False)
            param.grad = None
    (squares(model(x), y).mean() / 10).backward()
    optimizer.step()
    scale_gradients(model)


@pytest.mark.parametrize("flags", [None, {"find_unused_parameters": True}], ids=str)
def test_gradients_may_be_kept_where_the_plan_changes(two_ranks: Ranks, flags: dict[str, Any] | None) -> None:
    check(two_ranks, kept_under_another_plan, strategy=Sharded(), flags=flags, skip_layers=["norm"])


def penalised(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    """A penalty, the same on all ranks, has a backward of its own behind that of the loss."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    (bare.gain.square().sum() + bare.shift.square().sum()).backward()
    optimizer.step()


def test_a_penalty_may_have_a_backward_of_its_own_behind_the_one_that_reduces(two_ranks: Ranks) -> None:
    check(two_ranks, penalised, strategy=Sharded(), flags={})


def backward(model: DistributedDataParallel, how: str, x: Tensor, y: Tensor) -> None:
    """Take one backward that reduces, or one of those that do not; or drop the gradients behind the optimizer."""
    if how == "dropped":
        model.zero_grad()
        return
    with nullcontext() if how in ("reduces", "again") else model.no_sync():
        loss = squares((model.module if how == "bare" else model)(x), y).mean()
    if how == "grad":
        torch.autograd.grad(loss, [param for param in model.parameters() if param.requires_grad])
        return
    loss.backward(retain_graph=how == "again")
    if how == "again":
        loss.backward()


def in_order(rank: int, order: Sequence[str], flags: dict[str, Any]) -> tuple[int, str]:
    """The step that raises, of these backwards in this order; and what it says."""
    training = Training(rank, strategy=Sharded(), flags=flags)
    assert isinstance(training.model, DistributedDataParallel)
    for number in range(3):
        before = training.params
        training.optimizer.zero_grad()
        for how in order:
            backward(training.model, how, *training.batch(number))
        try:
            training.optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, training.params))
            return number, str(error)
    return -1, ""


@pytest.mark.parametrize("flags", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(
    ("order", "raises"),
    [  # at the first step nobody owns them yet
        (("reduces", "not"), 1),
        (("reduces", "not", "reduces"), -1),
        (("not", "not"), -1),
        (("reduces", "bare"), 1),
        (("bare", "reduces"), -1),
        (("again",), 1),
        (("again", "reduces"), -1),
        (("reduces", "grad"), -1),
        (("reduces", "not", "dropped", "not", "not"), -1),
    ],
)
def test_a_backward_that_reduces_nothing_behind_one_that_does_is_refused(
    two_ranks: Ranks, order: Sequence[str], raises: int, flags: dict[str, Any]
) -> None:
    for number, told in two_ranks.run(in_order, order, flags):
        assert number == raises
        assert raises < 0 or "Have the last backward before step() outside of no_sync()" in told


@pytest.mark.parametrize("step", [zeroed_before_backward, made_zeros_before_backward])
def test_gradients_of_layers_that_ran_elsewhere_may_be_dropped_before_backward(two_ranks: Ranks, step: Step) -> None:
    flags = {"find_unused_parameters": True}
    check(two_ranks, step, net=Routed, strategy=Sharded(), flags=flags)


def frozen_later(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(bare, Mixed)
    for param in bare.first.parameters():
        param.requires_grad_(number != 1)
    plain(model, optimizer, x, y, number)


@pytest.mark.parametrize("flags", [None, {"find_unused_parameters": True}], ids=str)
def test_a_layer_may_be_frozen_for_a_step(two_ranks: Ranks, flags: dict[str, Any] | None) -> None:
    check(two_ranks, frozen_later, strategy=Sharded(), flags=flags)


def pausing(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    assert isinstance(model, Mixed)
    for param in (model.gain, model.norm.weight, model.norm.bias):
        param.requires_grad_(not 3 <= number < 6)
    model.shift.requires_grad_(number < 5)  # so that owners are others when they come back
    plain(model, optimizer, x, y, number)


def test_momentum_of_what_is_frozen_for_some_steps_is_kept(two_ranks: Ranks) -> None:
    check(two_ranks, pausing, steps=9, strategy=Sharded(), skip_layers=["norm"])


def test_what_no_rank_has_a_gradient_of_gets_none_when_owners_change() -> None:
    param = nn.Parameter(torch.ones(2))
    _set_gradient(param, torch.zeros(2))
    assert param.grad is None
    _set_gradient(param, torch.ones(2))
    _set_gradient(param, torch.zeros(2))
    assert torch.equal(param.grad, torch.zeros(2))  # type: ignore[arg-type]


def clipped(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, number: int) -> None:
    """Some batches are left out after a look at their norm."""
    drops = optimizer if number < 4 else model
    drops.zero_grad()
    squares(model(x), y).mean().backward()
    optimizer.clip_grad_norm_(0.05)
    if number % 3 == 1:
        drops.zero_grad()
    else:
        optimizer.step()


def partly_frozen() -> nn.Module:
    model = Mixed()
    for param in (*model.first.parameters(), model.gain):
        param.requires_grad_(False)
    return model


@pytest.mark.parametrize("net", [Mixed, partly_frozen])
@pytest.mark.parametrize(("strategy", "flags"), [(Sharded(), None), (Sharded(), {}), (Replicated(0.5), {})], ids=str)
def test_clipping_and_leaving_out_a_batch(
    two_ranks: Ranks, strategy: Strategy, flags: dict[str, Any] | None, net: Callable[[], nn.Module]
) -> None:
    check(two_ranks, clipped, steps=9, net=net, strategy=strategy, flags=flags)


def beside_another(rank: int | None, keeps: bool) -> list[Tensor]:
    """Parameters of no layer are another optimizer's; gradients are zeroed, or kept after a decay."""
    training = Training(rank, Mixed, Replicated(), {})
    others = [training.bare.gain, training.bare.shift]
    ours = [param for param in training.bare.parameters() if not any(param is each for each in others)]
    sharded = {} if rank is None else {"distributed": DistributedConfig(strategy=Sharded(), timeout=TIMEOUT)}
    optimizer = KFACOptimizer(ours, model=training.model, **{**training.options, **sharded})
    training.optimizer.remove_hooks()
    sgd = torch.optim.SGD(others, lr=0.05)
    for number in range(8):
        x, y = training.batch(number)
        if keeps and number > 0:
            scale_gradients(training.model)
        else:
            optimizer.zero_grad()
            sgd.zero_grad()
        squares(training.model(x), y).mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        sgd.step()
    return training.params


@pytest.mark.parametrize("keeps", [False, True])
def test_parameters_may_be_another_optimizers(two_ranks: Ranks, keeps: bool) -> None:
    compare(two_ranks.run(beside_another, keeps), beside_another(None, keeps))


# -- the model changes -------------------------------------------------------------------------------------------


def grows(rank: int | None, strategy: Strategy, refresh: Refresh) -> list[Tensor]:
    """A layer comes at step 3, another is unfrozen at step 6 and one frozen at step 8."""
    training = Training(rank, Mixed, strategy, None, refresh=refresh)
    bare = training.bare
    bare.hidden.requires_grad_(False)
    late = list(bare.last.parameters())
    others = [param for param in bare.parameters() if not any(param is each for each in late)]
    optimizer = KFACOptimizer(others, model=bare, **training.options)
    del training.optimizer
    for number in range(12):
        if number == 3:
            optimizer.add_param_group({"params": late, "lr": 0.02})
        if number == 6:
            bare.hidden.requires_grad_(True)
        if number == 8:
            bare.first.requires_grad_(False)
        optimizer.zero_grad()
        x, y = training.batch(number)
        squares(bare(x), y).mean().backward()
        if rank is not None and isinstance(strategy, Replicated):
            for param in bare.parameters():
                if param.grad is not None:
                    torch.distributed.all_reduce(param.grad)
                    param.grad /= 2
        if rank is None and number in (3, 6):
            for block in optimizer._binding.coverage.blocks:
                block.under_way = None  # those that began it may own it no more
        optimizer.step()
        if rank is not None:
            for param, owner in optimizer._executor.states.updaters.items():
                assert owner in (None, rank) or "momentum_buffer" not in optimizer.state[param]
    return training.params


@pytest.mark.parametrize("refresh", [Together(), Background(max_staleness=2, deterministic=True)], ids=str)
@each_strategy
def test_layers_that_come_and_go_are_planned_anew(two_ranks: Ranks, strategy: Strategy, refresh: Refresh) -> None:
    compare(two_ranks.run(grows, strategy, refresh), grows(None, strategy, refresh))


def marks(rank: int) -> list[bool]:
    """Of the factors of a copy that was marked when another rank owned one of them, and now owns neither."""
    training = Training(rank, Mixed, Sharded(Placement.FACTORS), {})
    training.run(plain, range(2))
    exchange = training.optimizer._executor.planned.exchange
    (block,) = (each for each in training.optimizer._binding.coverage.blocks if each.name == "first")
    copy_ = make_shadow(block)
    exchange.mark_elsewhere([copy_])
    before = [factor.elsewhere is not None for _, factor in exchange.slots(copy_, copy_.state)]
    exchange._told.clear()
    exchange.mark_elsewhere([copy_])
    return before + [factor.elsewhere is not None for _, factor in exchange.slots(copy_, copy_.state)]


def test_copies_that_refresh_in_the_background_know_of_new_owners(two_ranks: Ranks) -> None:
    for found in two_ranks.run(marks):
        assert sum(found[:2]) == 1
        assert not any(found[2:])


def with_checkpoints(rank: int, busy: bool, saves: bool) -> list[Tensor]:
    """While the thread of the refreshes has other work, so that one that has begun waits for it."""
    refresh = Background(max_staleness=3, deterministic=True)
    training = Training(rank, Mixed, Sharded(Placement.FACTORS), {}, refresh=refresh, inverse_update_period=4)
    for step in range(12):
        if busy and step == 7:
            training.optimizer._engine.refresher._worker.submit(time.sleep, 0.5)
        training.run(plain, [step])
        if saves and step == 8:
            training.optimizer.consolidate_state_dict(to=0)
    return training.params


def test_a_checkpoint_while_a_refresh_waits_changes_nothing(two_ranks: Ranks) -> None:
    (expected, _), (found, _) = (two_ranks.run(with_checkpoints, *case) for case in ((False, False), (True, True)))
    assert all(map(torch.equal, found, expected))


class LateUse(nn.Module):
    """From the fifth forward on, the first weight is multiplied by from the other side as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        h = self.first(x).tanh()
        if self.forwards > 4:
            h = (h @ self.first.weight).tanh()
        out: Tensor = self.last(h)
        return out


@pytest.mark.parametrize("flags", [None, {}], ids=str)
@pytest.mark.parametrize("strategy", [Sharded(), Sharded(Placement.FACTORS)], ids=str)
def test_another_use_of_a_weight_may_come_after_the_first_steps(
    two_ranks: Ranks, strategy: Strategy, flags: dict[str, Any] | None
) -> None:
    for period in (1, 3):
        check(two_ranks, plain, net=LateUse, strategy=strategy, flags=flags, inverse_update_period=period)


def widened(rank: int | None) -> list[Tensor]:
    training = Training(rank, Mixed, Sharded(), None)
    training.bare.float()
    for number in range(8):
        if number == 4:
            training.bare.double()
        x, y = (each.to(training.bare.last.weight.dtype) for each in training.batch(number))
        plain(training.bare, training.optimizer, x, y, number)
    return training.params


def test_a_model_that_moves_to_another_dtype_is_planned_anew(two_ranks: Ranks) -> None:
    """Owners' parameters then reach the others whole: `compare` asks for equal bits."""
    compare(two_ranks.run(widened), widened(None), rtol=1e-4)


# -- ranks that differ -------------------------------------------------------------------------------------------


def told(rank: int, build_training: Callable[[int], Training], steps: int) -> str:
    training = build_training(rank)
    try:
        training.run(plain, range(steps))
    except RuntimeError as error:
        return str(error)
    return ""


def other_model(rank: int) -> Training:
    return Training(rank, partial(Sized, width=5 + rank), Sharded())


class Sized(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(4, width), nn.Linear(width, 2))


def other_damping(rank: int) -> Training:
    return Training(rank, strategy=Sharded(), flags={}, damping=0.1 * (1 + rank))


def other_skipping(rank: int) -> Training:
    return Training(rank, strategy=Replicated(), flags={}, skip_layers=["first"][:rank])


def other_limit(rank: int) -> Training:
    return Training(rank, strategy=Sharded(), flags={}, nonfinite_limit=20 + rank)


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (other_model, "layer '0'"),
        (other_damping, "damping of param group 0: 0.1 here, 0.2 there"),
        (other_skipping, "skip_layers: \\(\\) here, \\('first',\\) there"),
        (other_limit, "nonfinite_limit: 20 here, 21 there"),
    ],
)
def test_ranks_that_differ_are_told_in_what(two_ranks: Ranks, built: Callable[[int], Training], words: str) -> None:
    for message in two_ranks.run(told, built, 2):
        assert message.startswith("kfac_optim: the ranks disagree")
        assert re.search(words, message), message


def other_rate_later(rank: int) -> str:
    training = Training(rank, strategy=Replicated(), flags={})
    training.run(plain, range(3))
    training.optimizer.param_groups[0]["lr"] *= 1 + rank
    try:
        training.run(plain, range(3, 5))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_learning_rate_that_one_rank_changes_is_told(two_ranks: Ranks) -> None:
    for message in two_ranks.run(other_rate_later):
        assert "lr of param group 0: 0.05 here, 0.1 there" in message
        assert "Set the numbers of param groups alike on every rank" in message


def equal_numbers_of_other_kinds(rank: int) -> list[float]:
    """What one rank has computed, and the other was told."""
    average, width = IterateAverage(eta=(8, np.float64(8.0))[rank]), (2, np.int64(2))[rank]
    structure = {"hidden": (BlockDiagonal(width), Structure.DENSE)}
    strategy = Replicated((1, 1.0)[rank])
    training = Training(rank, strategy=strategy, flags={}, average=average, structure=structure)
    training.run(plain, range(3))
    training.optimizer.param_groups[0].update(lr=(1, np.float64(1.0))[rank], weight_decay=(0, 0.0)[rank])
    training.run(plain, range(3, 5))
    return [training.optimizer.param_groups[0]["lr"]]


def test_equal_numbers_of_other_kinds_are_equal(two_ranks: Ranks) -> None:
    assert two_ranks.run(equal_numbers_of_other_kinds) == [[1], [1]]


def other_tensor_later(rank: int, name: str, strategy: Strategy) -> tuple[int, str]:
    """The step that raises; statistics are taken at even ones."""
    training = Training(rank, strategy=strategy, flags={}, factor_update_period=2, **{name: torch.tensor(0.05)})
    training.run(plain, range(3))
    training.optimizer.param_groups[0][name] *= 1 + rank
    for number in range(3, 6):
        try:
            training.run(plain, [number])
        except RuntimeError as error:
            return number, str(error)
    return -1, ""


@pytest.mark.parametrize(
    ("name", "strategy"), [("lr", Replicated()), ("lr", Sharded()), ("weight_decay", Sharded())], ids=str
)
def test_a_tensor_that_one_rank_changes_is_told_at_the_next_statistics(
    two_ranks: Ranks, name: str, strategy: Strategy
) -> None:
    for number, message in two_ranks.run(other_tensor_later, name, strategy):
        assert number == 4
        assert re.search(f"{name} of param group 0: 0.05.* here, 0.1.* there", message), message


def unaveraged(rank: int) -> Training:
    return Training(rank, strategy=Replicated(0.5), flags=None)


def test_gradients_that_nobody_averaged_are_noticed_at_the_first_step(two_ranks: Ranks) -> None:
    for message in two_ranks.run(told, unaveraged, 1):
        assert message.startswith("kfac_optim: the gradients of this step differ from rank to rank")


# -- ranks that fail ---------------------------------------------------------------------------------------------


def failing_rank(rank: int, kill: bool) -> str:
    training = Training(rank, strategy=Sharded(), flags=None, timeout=timedelta(seconds=2))
    training.run(plain, range(2))
    if rank == 1:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)  # longer than the time-out and the roll call
        return ""
    try:
        training.run(plain, range(2, 4))
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return ""


def by_hand(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, y: Tensor, _: int) -> None:
    optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    for param in model.parameters():
        assert param.grad is not None
        torch.distributed.all_reduce(param.grad)
        param.grad /= 2
    optimizer.step()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_within_the_time_out() -> None:
    ranks = Ranks(2)
    try:
        began = time.monotonic()
        message = ranks.run(failing_rank, False, timeout=40)[0]
        assert time.monotonic() - began < 30
    finally:
        ranks.stop()
    assert message.startswith("CollectiveError kfac_optim: on rank 0 of 2 the collective of 'votes'")
    assert "No word from rank 1" in message


def test_a_rank_that_is_killed_does_not_leave_the_others_waiting() -> None:
    ranks = Ranks(2)
    try:
        with pytest.raises(RankError, match="died, exit code -9"):
            ranks.run(failing_rank, True, timeout=40)
    finally:
        ranks.stop()


# -- copies ------------------------------------------------------------------------------------------------------


def copied(rank: int, strategy: Strategy, by_pickle: bool) -> tuple[list[Tensor], list[Tensor]]:
    training = Training(rank, strategy=strategy, flags=None)
    step = plain if isinstance(strategy, Sharded) else by_hand
    training.run(step, range(4))
    pair = training.bare, training.optimizer
    bare, optimizer = pickle.loads(pickle.dumps(pair)) if by_pickle else copy.deepcopy(pair)
    training.run(step, range(4, 8))
    for number in range(4, 8):
        step(bare, optimizer, *training.batch(number), number)
    return training.params, [param.detach().clone() for param in bare.parameters()]


@each_strategy
@pytest.mark.parametrize("by_pickle", [False, True])
def test_copies_go_on_to_the_bit_as_the_original(two_ranks: Ranks, by_pickle: bool, strategy: Strategy) -> None:
    for original, other in two_ranks.run(copied, strategy, by_pickle):
        for left, right in zip(original, other, strict=True):
            assert torch.equal(left, right)


# -- judges, and random numbers ------------------------------------------------------------------------------------


def judged(rank: int | None, quadratic: bool, flags: dict[str, Any] | None) -> tuple[list[Tensor], dict[str, float]]:
    """Train with a step judge; where there are flags of DDP, with a loss that calls the very criterion."""
    criterion = nn.MSELoss()
    options: dict[str, Any] = {
        "estimate": ExactGGN(criterion),  # which draws nothing
        "adapt_damping": LevenbergMarquardt(interval=1, reject=True),
        "damping": 1e-3,
        "kl_clip": None,
        **({"step_size": QuadraticModel()} if quadratic else {"lr": 1.5, "momentum": 0.0}),
    }
    training = Training(rank, partial(Sized, width=5), Replicated(), flags or {}, **options)
    optimizer = training.optimizer
    x, y = training.batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (F.mse_loss if flags is None else criterion)(training.model(x), y)
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    metrics = optimizer.metrics()
    return training.params, {
        name: metrics[name] for name in ("damping", "rejected_steps", "reduction_ratio") if name in metrics
    }


@pytest.mark.parametrize(
    ("quadratic", "flags"),
    [
        (False, None),
        (True, None),
        (False, {"find_unused_parameters": True}),
        (True, {"find_unused_parameters": True}),
        (False, {"static_graph": True}),
        (True, {"static_graph": True}),
    ],
)
def test_ranks_judge_steps_as_one_process_does(two_ranks: Ranks, quadratic: bool, flags: dict[str, Any] | None) -> None:
    found = two_ranks.run(judged, quadratic, flags)
    params, metrics = judged(None, quadratic, flags)
    compare([each for each, _ in found], params)
    assert found[0][1] == found[1][1]
    assert found[0][1] == pytest.approx(metrics, rel=1e-9)
    assert metrics["damping"] != 1e-3


def refused_judge(rank: int) -> list[str]:
    messages = []
    for options in ({"step_size": QuadraticModel()}, {"adapt_damping": LevenbergMarquardt()}):
        try:
            Training(rank, strategy=Sharded(), estimate=MonteCarlo(nn.MSELoss()), **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_judges_are_refused_where_gradients_are_sharded(two_ranks: Ranks) -> None:
    for messages in two_ranks.run(refused_judge):
        assert len(messages) == 2
        assert all("needs all gradients and momentum on every process" in message for message in messages)


def drawn(rank: int) -> Tensor:
    """`G` of the last layer, from one batch that is the same on all ranks, before it is merged."""
    training = Training(rank, partial(Sized, width=5), Replicated(), None, estimate=MonteCarlo(nn.MSELoss()))
    x, y = examples(0)
    training.optimizer.zero_grad()
    F.mse_loss(training.model(x), y).backward()
    block = training.optimizer._binding.coverage.blocks[-1]
    return block.state.pair.g.pending.clone()


def test_ranks_draw_other_targets(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(drawn)
    assert not torch.allclose(one, other)
    alone = Training(None, partial(Sized, width=5), estimate=MonteCarlo(nn.MSELoss()))
    x, y = examples(0)
    F.mse_loss(alone.model(x), y).backward()
    torch.testing.assert_close(one, alone.optimizer._binding.coverage.blocks[-1].state.pair.g.pending)
