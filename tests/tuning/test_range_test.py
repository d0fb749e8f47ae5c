"""The range test: what it leaves as it was, what it refuses, and what it recommends."""

import copy
import itertools
import math
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.plain import mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from kfac_optim import (
    Background,
    Cholesky,
    ExactGGN,
    HyperparameterScheduler,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    MonteCarlo,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    TrustRegion,
)
from kfac_optim.tuning import RangeTest, Trial, range_test
from kfac_optim.tuning.range_test import _RATES, _RATES_OF_ADAMW, _start
from kfac_optim.tuning.search import Start, search

Batch = tuple[Tensor, Tensor]
CRITERION = nn.MSELoss()
FEW = 56  # 8 steps for each trial
OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "average": {"average": IterateAverage()},
    "adapted damping": {"estimate": MonteCarlo(CRITERION), "adapt_damping": LevenbergMarquardt(interval=2)},
    "quadratic model": {"estimate": MonteCarlo(CRITERION), "step_size": QuadraticModel(), "momentum": 0.9},
    "selected": {"step_size": SelectedUpdates(), "momentum": 0.9},
    "background": {"refresh": Background(max_staleness=1)},
}


def network() -> nn.Sequential:
    """A model whose forwards draw random numbers and change buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def batches(count: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def loss_with(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: CRITERION(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: KFACOptimizer, steps: int) -> list[float]:
    losses = []
    for batch in itertools.islice(itertools.cycle(batches()), steps):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_with(model)(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(optimizer.step(closure).item())  # type: ignore[arg-type, attr-defined]
    return losses


# -- everything is put back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_goes_on_to_the_bit_as_if_it_had_not_been(options: dict[str, Any]) -> None:
    runs = []
    for tests in (True, False):
        model = network()
        optimizer = KFACOptimizer(model, lr=0.02, factor_update_period=2, inverse_update_period=4, **options)
        losses = train(model, optimizer, 5)
        held = [param.grad for param in model.parameters()]
        before = [None if grad is None else grad.clone() for grad in held]
        hooks = [list(module._forward_hooks) for module in model.modules()]
        if tests:
            range_test(optimizer, batches(), loss_with(model), steps=FEW)
            assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
            torch.testing.assert_close(held, before, rtol=0, atol=0)
            assert [list(module._forward_hooks) for module in model.modules()] == hooks
        losses += train(model, optimizer, 8)
        runs.append((losses, copy.deepcopy(model.state_dict()), dict(optimizer.metrics())))
    (losses, state, metrics), (wanted, wanted_state, wanted_metrics) = runs
    assert losses == wanted
    assert all(torch.equal(state[name], wanted_state[name]) for name in wanted_state)
    assert metrics == pytest.approx(wanted_metrics, rel=0, abs=0, nan_ok=True)


def test_an_optimizer_that_has_not_stepped_stays_without_state() -> None:
    model = network()
    optimizer = KFACOptimizer(model, lr=0.02)
    groups = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
    range_test(optimizer, batches(), loss_with(model), steps=FEW)
    assert not optimizer.state
    assert [{**group, "params": None} for group in optimizer.param_groups] == groups
    assert "damping" not in optimizer.metrics()


def test_a_forward_with_gradients_before_it_changes_nothing_of_the_training() -> None:
    """It has the optimizer wait for a backward; those of the trials are none of its own."""
    runs = []
    for tests in (True, False):
        model = mlp(dtype=torch.float32)
        optimizer = KFACOptimizer(model, lr=0.02, factor_update_period=2)
        loss_with(model)(batches()[0])
        if tests:
            range_test(optimizer, batches(), loss_with(model), steps=FEW)
        runs.append(train(model, optimizer, 4))
    assert runs[0] == runs[1]


def test_no_hooks_are_left_on_parameters() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.02)
    range_test(optimizer, batches(), loss_with(model), steps=FEW)
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in model.parameters())


def test_casts_of_autocast_are_those_of_the_parameters_that_were_put_back() -> None:
    model = mlp(dtype=torch.float32)
    inputs, _ = batches()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(inputs)
        range_test(KFACOptimizer(model, lr=0.02), batches(), loss_with(model), steps=FEW)
        assert torch.equal(model(inputs), wanted)


def test_a_sparse_buffer_is_left_alone() -> None:
    model = network()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    optimizer = KFACOptimizer(model, lr=0.1)
    range_test(optimizer, batches(), loss_with(model), steps=FEW)
    assert model.adjacency.is_sparse


def test_random_numbers_go_on_as_they_would() -> None:
    model = network()
    optimizer = KFACOptimizer(model)

    def loss_of(batch: Batch) -> Tensor:
        return loss_with(model)(batch) * (1 + 0.01 * (random.random() + np.random.rand()))

    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    range_test(optimizer, batches(), loss_of, steps=FEW)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[2])


class Stretch:
    """Multiplies by a number of a generator of its own."""

    def __init__(self) -> None:
        self.of_numpy = np.random.default_rng(6)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of_numpy.random()


class Composed:
    """Applies several transforms in turn, as torchvision's `Compose` does."""

    def __init__(self, *transforms: Stretch) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


class Noisy(TensorDataset):
    """Adds noise of generators of its own."""

    def __init__(self) -> None:
        super().__init__(torch.randn(32, 4), torch.randn(32, 3))
        self.transform, self.target_transform = Composed(Stretch()), Stretch()
        self.generator = torch.Generator().manual_seed(3)
        self.of_python, self.of_numpy = random.Random(3), np.random.default_rng(3)

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)  # type: ignore[no-untyped-call]
        scale = self.of_python.random() + self.of_numpy.random()
        noise = 0.1 * scale * torch.randn(x.shape, generator=self.generator)
        return self.transform(x) + noise, self.target_transform(y)


def test_a_loader_goes_on_with_the_batches_that_it_would_have_given() -> None:
    epochs = []
    for tests in (True, False):
        model = network()
        data = Noisy()
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))
        loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator().manual_seed(5))
        if tests:
            range_test(KFACOptimizer(model), loader, loss_with(model), steps=FEW)
        epochs.append([torch.cat([x, y], dim=1) for x, y in loader])
    assert all(torch.equal(one, other) for one, other in zip(*epochs, strict=True))


class Remembering(nn.Module):
    """Keeps what it has seen outside of buffers, and draws noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.mean, self.means = torch.zeros(4), [torch.zeros(4)]
        self.listed, self.kinds, self.latest = [0], {0}, deque([0], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        for mean in (self.mean, *self.means):
            mean.mul_(0.9).add_(x.detach().mean(0))
        for add in (self.listed.append, self.kinds.add, self.latest.append):
            add(len(self.listed))
        return x - self.mean + torch.randn(x.shape, generator=self.generator)

    def kept(self) -> tuple[object, ...]:
        tensors = [tensor.tolist() for tensor in (self.mean, *self.means, self.generator.get_state())]
        return tensors, [*self.listed], {*self.kinds}, [*self.latest]


def test_what_modules_keep_outside_of_buffers_is_put_back() -> None:
    model = nn.Sequential(Remembering(), nn.Linear(4, 3))
    before = model[0].kept()
    result = range_test(KFACOptimizer(model, lr=0.02), batches(), loss_with(model), steps=FEW)
    assert model[0].kept() == before
    assert len({trial.losses[0] for trial in result.records}) == 1


def test_workers_that_persist_are_left_alone() -> None:
    model = network()
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), batch_size=8)
    loader._iterator = workers = iter(loader)  # as persistent workers have it
    range_test(KFACOptimizer(model), loader, loss_with(model), steps=FEW)
    assert loader._iterator is workers


class Stateful:
    """An iterator that can be put back."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.place += 1
        return batches()[self.place % 8]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_an_iterator_that_knows_its_place_is_put_back_there() -> None:
    model, loader = network(), Stateful()
    next(loader)
    range_test(KFACOptimizer(model), loader, loss_with(model), steps=FEW)
    assert loader.place == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_midway_leaves_everything_as_it_was(error: type[BaseException]) -> None:
    model = network()
    optimizer = KFACOptimizer(model, lr=0.02)
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hooks = [list(module._forward_hooks) for module in model.modules()]
    calls = itertools.count()

    def loss_of(batch: Batch) -> Tensor:
        if next(calls) == 13:
            model.eval()
            raise error
        return loss_with(model)(batch)

    with pytest.raises(error):
        range_test(optimizer, batches(), loss_of, steps=FEW)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(param.grad is None for param in model.parameters())
    assert [list(module._forward_hooks) for module in model.modules()] == hooks


# -- trials ------------------------------------------------------------------------------------------------------


def test_a_trial_trains_as_the_optimizer_would() -> None:
    model = network()
    optimizer = KFACOptimizer(model, lr=0.02, momentum=0.9, factor_update_period=2)
    train(model, optimizer, 3)
    trial = range_test(optimizer, batches(), loss_with(model), steps=FEW).records[1]
    optimizer.param_groups[0]["lr"] = trial.lr
    assert train(model, optimizer, 8) == list(trial.losses)


@pytest.mark.parametrize("states", ["terms", "residuals"])
def test_what_the_loss_states_counts_for_the_trials_alone(states: str) -> None:
    model = mlp(dtype=torch.float32)
    options: dict[str, Any] = {} if states == "terms" else {"estimate": ExactGGN(CRITERION), "inverse": SampleSpace()}
    optimizer = KFACOptimizer(model, lr=0.02, factor_update_period=1, **options)

    def loss_of(batch: Batch) -> Tensor:
        residual = model(batch[0]) - batch[1]
        if states == "terms":
            optimizer.set_loss_terms(2)
        else:
            optimizer.observe(residual)
        return residual.square().mean()

    def train_on(these: list[Batch]) -> list[float]:
        losses = []
        for batch in these:
            optimizer.zero_grad()
            losses.append(loss_of(batch))
            losses[-1].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return [loss.item() for loss in losses]

    train_on(batches(3))
    trial = range_test(optimizer, batches(), loss_of, steps=FEW).records[1]
    assert optimizer._window.tally.result().averaged == 0
    optimizer.param_groups[0]["lr"] = trial.lr
    assert train_on(batches()) == list(trial.losses)


def test_a_progress_bar_is_told_of_each_step() -> None:
    model, told = network(), []
    result = range_test(KFACOptimizer(model), batches(), loss_with(model), steps=FEW, advance=lambda: told.append(1))
    assert len(told) == result.steps > 0


@pytest.mark.parametrize(("then", "ended"), [(1.9, False), (2.1, True), (math.inf, True)])
def test_a_trial_ends_where_a_step_has_doubled_the_loss(then: float, ended: bool) -> None:
    model = nn.Linear(4, 1)
    begun = model.weight.detach().clone()

    def loss_of(batch: Tensor) -> Tensor:
        found = model(batch).sum()
        return found - found.detach() + (1.0 if torch.equal(model.weight, begun) else then)

    result = range_test(KFACOptimizer(model), [batches()[0][0]], loss_of, steps=FEW)
    assert result.records[0].losses == pytest.approx([1.0, then] if ended else [1.0, *7 * [then]])


@pytest.mark.parametrize("losses", [(1.0, 2.1), (-0.01, 0.3)], ids=str)
def test_batches_that_differ_in_difficulty_end_no_trial(losses: tuple[float, ...]) -> None:
    model = network()
    result = range_test(KFACOptimizer(model), losses, lambda batch: batch + 0 * model(batches()[0][0]).sum(), steps=FEW)
    assert result.records[0].losses == pytest.approx([*losses] * 4)


def test_autocast_around_it_is_as_autocast_within_the_loss() -> None:
    model = mlp(dtype=torch.float32)
    optimizer, cast = KFACOptimizer(model, lr=0.02), partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def loss_of(batch: Batch) -> Tensor:
        with cast():
            return loss_with(model)(batch)

    within = range_test(optimizer, batches(), loss_of, steps=FEW)
    with cast():
        around = range_test(optimizer, batches(), loss_with(model), steps=FEW)
    assert around.records == within.records


def test_trials_do_not_warn_of_rates_that_the_user_has_not_set() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-9, step_size=TrustRegion())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 200)
        range_test(optimizer, batches(), loss_with(model), steps=FEW)
    (warned,) = (str(each.message) for each in caught)  # by the training
    assert "made nearly all of the last hundred steps shorter" in warned


@pytest.mark.parametrize(("count", "read_again"), [(7, True), (8, False)])
def test_a_loader_of_fewer_batches_than_a_trial_has_steps_is_told_of(count: int, read_again: bool) -> None:
    model = network()
    result = range_test(KFACOptimizer(model), batches(count), loss_with(model), steps=FEW)
    assert result.read_again == read_again


def test_param_groups_keep_their_ratios() -> None:
    """Plain steps of one group are three times those of the other, whatever the rate."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1].parameters(), "lr": 0.03}]
    optimizer = KFACOptimizer(groups, model=model, skip_layers=["*"])
    moved = []
    begun = [param.detach().clone() for param in model.parameters()]

    def loss_of(_: Tensor) -> Tensor:
        moved.append([float((now - then).detach()) for now, then in zip(model.parameters(), begun, strict=True)])
        return sum((param.sum() for param in model.parameters()), torch.zeros(()))

    result = range_test(optimizer, [torch.zeros(1)], loss_of, steps=FEW)
    assert all(other == pytest.approx(3 * one) for one, other in moved)
    assert min(one for one, _ in moved) < -1
    result.apply(optimizer)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == pytest.approx((result.lr, 3 * result.lr))


def test_the_damping_is_given_to_all_groups_in_their_ratios() -> None:
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "damping": 0.1},
        {"params": model[2].parameters(), "damping": 0.2, "preconditioner_damping": 0.5},
    ]
    optimizer = KFACOptimizer(groups, lr=1.0, model=model)
    RESULT.apply(optimizer)
    first, second = optimizer.param_groups
    assert (first["damping"], second["damping"]) == pytest.approx((0.01, 0.02))
    assert first["preconditioner_damping"] is None
    assert second["preconditioner_damping"] == pytest.approx(0.05)
    with pytest.raises(TypeError, match=r"RangeTest\.apply is given"):
        RESULT.apply(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("options", "rates", "bounded"),
    [
        ({}, _RATES, True),
        ({"kl_clip": None}, _RATES, False),
        ({"step_size": SelectedUpdates(), "momentum": 0.9}, _RATES_OF_ADAMW, False),
        ({"step_size": LineSearch(), "inverse": Cholesky()}, (), True),
        ({"inverse": SampleSpace(), "estimate": ExactGGN(CRITERION)}, _RATES, False),
        ({"inverse": {"*": SampleSpace()}, "estimate": ExactGGN(CRITERION)}, _RATES, False),
        ({"inverse": {"0": SampleSpace()}, "estimate": ExactGGN(CRITERION)}, _RATES, True),
    ],
    ids=["default", "no region", "selected", "search", "sample space", "by name", "beside sample space"],
)
def test_what_is_tried_depends_on_the_step_size(
    options: dict[str, Any], rates: tuple[float, ...], bounded: bool
) -> None:
    start = _start(KFACOptimizer(mlp(), **options))
    assert (start.rates, start.bounded) == (rates, bounded)


@pytest.mark.slow
def test_a_compiled_model_is_tested_uncompiled() -> None:
    model = mlp(dtype=torch.float32)
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    optimizer = KFACOptimizer(model, lr=0.02)
    plain = range_test(optimizer, batches(), loss_with(model), steps=FEW)
    assert range_test(optimizer, batches(), loss_with(compiled), steps=FEW).records == plain.records


# -- what is recommended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [10.0, 20_000.0])
def test_a_rate_is_recommended_that_descends_and_does_not_diverge(curvature: float) -> None:
    """Plain steps on a noisy quadratic diverge above `2 / curvature`, and hardly move below a hundredth of it."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    optimizer = KFACOptimizer(model, lr=1.0, skip_layers=["*"])
    noise = [torch.randn(1, 1, generator=torch.Generator().manual_seed(i)).double() for i in range(20)]
    result = range_test(optimizer, noise, lambda z: curvature * (model.weight - 0.1 * z).square().sum() / 2)
    assert 0.02 / curvature < result.lr < 2 / curvature


def trials_of(gain: Callable[[float, float], float]) -> Callable[[float, float], Trial]:
    """Losses begin at 10; what is gained of 10 is nothing but a diverged run."""

    def run(lr: float, damping: float) -> Trial:
        gained = gain(lr, damping)
        return Trial(lr, damping, (10.0, 10 - gained), (gained, gained) if gained > -1 else ())

    return run


START = Start(lr=0.5, damping=0.1, rates=(0.01, 0.1, 1.0), has_damping=True, bounded=True)


def test_the_middle_of_what_does_equally_well_is_recommended() -> None:
    found = search(trials_of(lambda lr, _: 5.0 if 0.02 < lr < 2 else -2.0), START)
    assert found.rates == (0.032, 1.0)
    assert found.lr == 0.18


def test_the_lowest_is_recommended_where_nothing_bounds_the_steps() -> None:
    start = Start(lr=0.5, damping=0.1, rates=(0.01, 0.1, 1.0), has_damping=False, bounded=False)
    assert search(trials_of(lambda lr, _: 5.0 if lr > 0.02 else 1.0), start).lr == 0.032


@pytest.mark.parametrize(
    ("gains", "damping"), [((5.0, 6.0), 1.0), ((5.0, 5.4), 0.1), ((6.0, 5.0), 0.1), ((7.0, 5.0), 0.01)]
)
def test_another_damping_has_to_do_much_better(gains: tuple[float, float], damping: float) -> None:
    """More of it a little less than less of it, which looks good in few steps."""
    by_damping = {0.01: gains[0], 0.1: 5.0, 1.0: gains[1]}
    assert search(trials_of(lambda _, tried: by_damping[tried]), START).damping == damping


def test_another_damping_has_to_do_better_by_more_than_two_standard_errors_of_the_difference() -> None:
    def run(_: float, damping: float) -> Trial:  # the better one gains (-1, 4) more: 1.5, and two errors are 5
        return Trial(0.1, damping, (9.0, 9.0), (1.0, 6.0) if damping == 1 else (2.0, 2.0))

    assert search(run, START).damping == 0.1


def test_a_trial_learns_that_gains_more_than_two_standard_errors_of_the_mean() -> None:
    """Of four numbers two such errors are one standard deviation: 1.29 of these, whose means are 2.5 and 1.25."""
    above, below = (Trial(0.1, 0.1, (5.0,), gains) for gains in ((1.0, 2.0, 3.0, 4.0), (-0.25, 0.75, 1.75, 2.75)))
    assert above.error() == pytest.approx((5 / 3) ** 0.5 / 2)
    assert (above.learns, below.learns) == (True, False)


def test_a_damping_that_the_preconditioner_has_of_its_own_is_tried_along() -> None:
    model = nn.Linear(4, 3)
    inputs, _ = batches()[0]

    def losses(**options: Any) -> list[tuple[float, ...]]:
        optimizer = KFACOptimizer(model, lr=0.02, damping=0.3, **options)
        records = range_test(optimizer, [(inputs, inputs[:, :3])], loss_with(model), steps=FEW).records
        assert len({trial.damping for trial in records}) == 3
        return [trial.losses for trial in records]

    assert losses(preconditioner_damping=0.3) == losses()


def test_numbers_stay_where_no_trial_learns() -> None:
    model = network()
    optimizer = KFACOptimizer(model, lr=0.02, damping=0.3)
    result = range_test(optimizer, batches(), lambda batch: 0 * loss_with(model)(batch), steps=FEW)
    assert (result.lr, result.damping, result.learnt) == (0.02, 0.3, False)
    assert "No trial lowered the loss" in str(result)


@pytest.mark.parametrize("name", ["quadratic model", "selected"])
def test_only_what_has_an_effect_is_tried(name: str) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.02, **OPTIONS[name])
    result = range_test(optimizer, batches(1), loss_with(model), steps=FEW)
    rates, dampings = ({getattr(trial, each) for trial in result.records} for each in ("lr", "damping"))
    assert (len(rates) == 1, len(dampings) == 1) == (name == "quadratic model", name == "selected")


# -- words and pictures ------------------------------------------------------------------------------------------

RESULT = RangeTest(
    lr=0.1,
    damping=0.01,
    rates=(0.03, 0.3),
    records=(
        Trial(0.03, 0.001, (3.0, 2.0, 1.0), (2.0, 2.2)),
        Trial(0.3, 0.001, (3.0, 1.9, 1.1), (2.1, 2.1)),
        Trial(3.0, 0.001, (3.0, 9.0), ()),
        Trial(0.1, 0.01, (3.0, 1.0, 0.5), (3.0, 2.5)),
    ),
    steps=11,
    forwards=2,
    learnt=True,
    finds_rate=True,
    before=(0.001, 0.001),
)


def test_the_text_says_what_was_tried_and_how_sure_it_is() -> None:
    text = str(RESULT)
    assert re.search(r"\n +3 +0\.001 +doubled\n", text)
    assert "4 trials of 3 steps on the same batches: 11 steps, and 2 forwards more." in text
    assert "Recommended: lr 0.1, damping 0.01.\nThe rate makes no difference between 0.03 and 0.3." in text
    assert text.endswith("Damping 0.001 did worse.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finds_rate": False}, "Recommended: damping 0.01.\nNo rate was looked for, as the step size finds its own."),
        ({"rates": (0.1, 0.1)}, "Of the rates tried, 0.1 did better than those beside it."),
        ({"damping": 0.001}, "Damping 0.01 did not do much better."),
        ({"records": RESULT.records[:3]}, "Damping was left as it is."),
        ({"read_again": True}, "The loader has fewer batches than a trial has steps"),
        ({"learnt": False}, "stay. Pass more steps, or look at the data and the loss."),
        ({"learnt": False, "records": RESULT.records[2:3]}, "stay. Look at the data and the loss."),
    ],
    ids=["no rate", "one rate", "other damping", "one damping", "loader", "nothing", "all ended"],
)
def test_the_text_gives_the_reason_of_each_choice(changes: dict[str, Any], words: str) -> None:
    assert words in str(replace(RESULT, **changes))


def test_the_picture_shows_all_trials_and_the_recommendation(tmp_path: Path) -> None:
    figure = RESULT.plot(tmp_path / "range.png")
    assert (tmp_path / "range.png").read_bytes().startswith(b"\x89PNG")
    losses, gains = figure.axes
    assert len(losses.lines) == len(RESULT.records)
    words = "recommended: lr 0.1, damping 0.01"
    assert words in [text.get_text() for text in gains.get_legend().get_texts()]
    _, gains = replace(RESULT, finds_rate=False).plot(tmp_path / "damping.png").axes
    assert words not in [text.get_text() for text in gains.get_legend().get_texts()]


@pytest.mark.parametrize("key", ["lr", "damping"])
def test_a_recommendation_is_not_applied_behind_the_back_of_a_scheduler(key: str) -> None:
    optimizer = KFACOptimizer(network(), lr=0.02)
    if key == "lr":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    else:
        HyperparameterScheduler(optimizer, key, lambda _: 1.0)
    with pytest.raises(RuntimeError, match=f"after a scheduler of '{key}' was made"):
        RESULT.apply(optimizer)


def test_the_base_value_of_a_scheduler_that_a_checkpoint_has_brought_is_dropped_as_told() -> None:
    model = network()
    old = KFACOptimizer(model, lr=0.5)
    torch.optim.lr_scheduler.StepLR(old, 1)
    optimizer = KFACOptimizer(model, lr=0.02)
    optimizer.load_state_dict(old.state_dict())
    with pytest.raises(RuntimeError, match="a checkpoint of a run that had one was loaded") as refusal:
        RESULT.apply(optimizer)
    exec(str(refusal.value).partition("drop the old value: ")[2], {"optimizer": optimizer})
    RESULT.apply(optimizer)
    assert torch.optim.lr_scheduler.StepLR(optimizer, 1).base_lrs == pytest.approx([RESULT.lr])


def test_a_recommendation_is_not_applied_to_a_rate_of_zero() -> None:
    with pytest.raises(ValueError, match=r"lr of param group 0 is 0\.0\. Set it to 0\.001"):
        RESULT.apply(KFACOptimizer(network(), lr=0.0))


# -- refusals ----------------------------------------------------------------------------------------------------


def stepless(model: nn.Module, optimizer: KFACOptimizer) -> None:
    train(model, optimizer, 1)
    optimizer.zero_grad()
    loss_with(model)(batches()[0]).backward()  # type: ignore[no-untyped-call]


def released(_: nn.Module, optimizer: KFACOptimizer) -> None:
    optimizer.remove_hooks()


def averaged(model: nn.Module, optimizer: KFACOptimizer) -> None:
    train(model, optimizer, 1)
    optimizer.eval()


@pytest.mark.parametrize(
    ("options", "arguments", "prepare", "words"),
    [
        ({}, {"loader": iter(batches())}, None, "use up the batches of a list_iterator"),
        ({}, {"loader": []}, None, "yields no batch"),
        ({}, {"loader": None}, None, "loader of range_test must yield batches, got NoneType"),
        ({}, {"advance": 3}, None, "advance of range_test must be a function, got 3"),
        ({}, {"steps": 20}, None, "at least 56 steps, got 20"),
        ({}, {"steps": 60.5}, None, "steps of range_test must be an integer, got 60.5"),
        ({}, {"loss_of": lambda _: 3.0}, None, "got float"),
        ({}, {"loss_of": lambda _: torch.tensor(3.0)}, None, "requires_grad=False"),
        ({}, {"loss_of": lambda _: torch.tensor(math.inf, requires_grad=True)}, None, "not finite before any step"),
        ({"lr": 0.0}, {}, None, "lr of param group 0 is 0.0"),
        ({"maximize": True}, {}, None, "this optimizer has maximize=True. Have loss_of return the negative"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, {}, None, "grad_scaler"),
        ({"average": IterateAverage()}, {}, averaged, "optimizer.train()"),
        ({}, {}, released, "remove_hooks() has ended them"),
        ({"factor_update_period": 1}, {}, stepless, "between backward() and step()"),
    ],
    ids=[
        "iterator",
        "empty",
        "no loader",
        "bar",
        "steps",
        "part",
        "number",
        "graph",
        "loss",
        "rate",
        "ascent",
        "scaler",
        "averages",
        "hooks",
        "gradients",
    ],
)
def test_refusals_leave_no_trace(
    options: dict[str, Any], arguments: dict[str, Any], prepare: Callable[..., None] | None, words: str
) -> None:
    model = network()
    optimizer = KFACOptimizer(model, **options)
    if prepare is not None:
        prepare(model, optimizer)
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    given = {"loader": batches(), "loss_of": loss_with(model), "steps": FEW, **arguments}
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError), match=re.escape(words)):
        range_test(optimizer, **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_iterator_is_refused_unread() -> None:
    model, iterator = network(), iter(batches())
    with pytest.raises(TypeError):
        range_test(KFACOptimizer(model), iterator, loss_with(model), steps=FEW)
    assert len(list(iterator)) == 8


def test_a_model_that_is_not_known_yet_is_asked_for() -> None:
    model = network()
    with pytest.raises(RuntimeError, match=r"KFACOptimizer\(model, \.\.\.\)"):
        range_test(KFACOptimizer(model.parameters()), batches(), loss_with(model), steps=FEW)


def test_a_parameter_without_a_shape_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(RuntimeError, match=r"cannot restore '0\.weight', which gets its shape at the first forward"):
        range_test(KFACOptimizer(model), batches(), loss_with(model))


def test_another_optimizer_is_refused() -> None:
    model = network()
    with pytest.raises(TypeError, match="got SGD"):
        range_test(torch.optim.SGD(model.parameters()), batches(), loss_with(model))  # type: ignore[arg-type]


# -- the guide ---------------------------------------------------------------------------------------------------


def test_the_script_of_the_guide_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[2] / "kfac_optim" / "README.md").read_text()
    script = re.search(r"<!-- a range test -->\n```python\n(.*?)```", guide, flags=re.DOTALL)
    assert script is not None
    monkeypatch.chdir(tmp_path)
    exec(script[1], {})
    assert "Recommended: lr" in capsys.readouterr().out
    assert Path("range.png").exists()


def test_buffers_that_are_expanded_views_are_put_back() -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("seen", torch.zeros(1, 3).expand(2, 3))
    optimizer = KFACOptimizer(model, lr=0.1)

    def loss_of(batch: Tensor) -> Tensor:
        model.seen[0] += 1
        return model(batch).square().mean()

    range_test(optimizer, [torch.randn(8, 4) for _ in range(20)], loss_of, steps=56)
    assert not bool(model.seen.any())
