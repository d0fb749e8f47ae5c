"""When inverses are refreshed: spread over the period, or beside the training and taken over between two steps."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain import (
    FREQUENT,
    assert_identical,
    batch,
    block,
    clones,
    direction,
    gradient_matrix,
    mlp,
    snapshot,
    square_loss,
    train,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    Background,
    BlockDiagonal,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    KFACOptimizer,
    LowRank,
    NewtonSchulz,
    Staggered,
    Structure,
    Together,
)
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.step.background_refresh import BackgroundRefresher, _refresh
from kfac_optim.step.execution import Executor
from kfac_optim.step.roles import Statistics

SIZES = (4, 6, 3)
INVERSES = [Cholesky(), LowRank(1), Eigen(), EKFAC(), NewtonSchulz(4, 1e-4), DoublyFactored(2)]
each_inverse = pytest.mark.parametrize("inverse", INVERSES, ids=repr)


def blocks(optimizer: KFACOptimizer) -> list[KFACBlock]:
    return optimizer._binding.coverage.blocks


def settle(optimizer: KFACOptimizer) -> None:
    """Let refreshes under way finish, so that a run does not depend on how fast the machine is."""
    for each in blocks(optimizer):
        if each.under_way is not None:
            each.under_way.done.exception()


class Gate(Cholesky):
    """Refreshes on another thread stay under way until the gate is opened; those are counted."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[int] = []

    def refresh(self, states: Sequence[Any], dampings: Sequence[float]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.begun.append(len(states))
            assert self.open.wait(60), "nobody opened the gate"
        super().refresh(states, dampings)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


@contextmanager
def opened_after(gate: Gate, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, gate.open.set)
    timer.start()
    yield
    timer.join()


def gated(gate: Gate, **background: Any) -> tuple[nn.Sequential, KFACOptimizer]:
    """A run of two steps whose second refresh, of the first two steps' factors, is under way."""
    model = mlp(sizes=SIZES)
    optimizer = KFACOptimizer(
        model, lr=0.1, inverse=gate, inverse_update_period=100, refresh=Background(**background), factor_update_period=1
    )
    train(model, optimizer, 2)
    assert all(each.under_way is not None for each in blocks(optimizer))
    return model, optimizer


# -- schedules ---------------------------------------------------------------------------------------------------

costs_lists = st.lists(st.integers(0, 10**6).map(float) | st.sampled_from([0.0, 1e3, 1e12]), min_size=1, max_size=40)


@example(costs=[0.0] * 30 + [1e6] * 10, period=10)
@given(costs=costs_lists, period=st.integers(1, 50))
def test_staggered_blocks_fall_due_once_in_a_period_and_share_it_by_their_cost(costs: list[float], period: int) -> None:
    phases = Staggered().phases(costs)
    assert len(phases) == len(costs)
    assert all(0 <= phase < 1 for phase in phases)
    loads = [0.0] * period
    for cost, phase in zip(costs, phases, strict=True):
        loads[int(phase * period)] += cost + 1
    sizes = [cost + 1 for cost in costs]
    assert max(loads) <= max(max(sizes), 2 * sum(sizes) / period) * (1 + 1e-12)
    assert Staggered().phases(costs) == phases


@pytest.mark.parametrize("count", [1, 7, 100])
def test_as_many_equal_blocks_as_steps_fall_one_on_each(count: int) -> None:
    phases = Staggered().phases([123.0] * count)
    assert sorted(int(phase * count) for phase in phases) == list(range(count))


def test_together_nothing_is_spread() -> None:
    assert Together().phases([3.0, 5.0]) == [Fraction(0), Fraction(0)]


def refreshed_at(model: nn.Module, optimizer: KFACOptimizer, steps: range) -> dict[str, list[int]]:
    """The steps at which each block got its inverse."""
    found: dict[str, list[int]] = {each.name: [] for each in blocks(optimizer)}
    for step in steps:
        before = {each.name: each.clock.refreshed_at for each in blocks(optimizer)}
        train(model, optimizer, 1, start=step)
        for each in blocks(optimizer):
            if each.clock.refreshed_at != before[each.name]:
                found[each.name].append(step)
    return found


@pytest.mark.parametrize("refresh", [Staggered(), Background(Staggered(), max_staleness=0)], ids=repr)
@pytest.mark.parametrize("period", [1, 4, 7])
def test_after_the_young_phase_each_block_is_refreshed_once_in_each_period(period: int, refresh: Any) -> None:
    model = mlp(sizes=(4, 9, 8, 7, 6, 3))
    optimizer = KFACOptimizer(model, lr=0.01, inverse_update_period=period, refresh=refresh, factor_update_period=1)
    young = 4 * period
    train(model, optimizer, young)
    found = refreshed_at(model, optimizer, range(young, young + 5 * period))
    costs = {each.name: each.inverse.flops(each.spec.by_blocks()).refresh for each in blocks(optimizer)}
    loads = dict.fromkeys(range(period), 0.0)
    for name, steps in found.items():
        assert [step - steps[0] for step in steps] == [i * period for i in range(5)], name
        loads[steps[0] % period] += costs[name]
    total = sum(costs.values())
    assert max(loads.values()) <= max(*costs.values(), 2 * total / period) + 5
    if period > 1:
        assert max(loads.values()) < total


def test_a_factor_in_blocks_takes_its_own_share_of_the_period() -> None:
    """Two of 16 rows in the place of one of 32: 2 · 16³ + 32³ operations for the one layer, 32³ + 32³ for the other."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    structure = {"0": (Structure.DENSE, BlockDiagonal(16)), "1": (Structure.DENSE, Structure.DENSE)}
    optimizer = KFACOptimizer(model, lr=0.01, structure=structure, refresh=Staggered())
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    cut, whole = blocks(optimizer)
    assert whole.phase == 0
    assert float(cut.phase) == pytest.approx(2 * 32**3 / (2 * 16**3 + 3 * 32**3), abs=1e-3)


def test_periods_of_groups_are_spread_each_for_itself() -> None:
    model = mlp(sizes=(4, 5, 6, 3))
    groups = [
        {"params": list(model[0].parameters()), "inverse_update_period": 3},
        {"params": [*model[2].parameters(), *model[4].parameters()], "inverse_update_period": 5},
    ]
    optimizer = KFACOptimizer(
        groups, lr=0.01, model=model, refresh=Staggered(), factor_update_period=1, inverse_update_period=10
    )
    train(model, optimizer, 30)
    found = refreshed_at(model, optimizer, range(30, 60))
    gaps = {name: {b - a for a, b in pairwise(steps)} for name, steps in found.items()}
    assert gaps == {"0": {3}, "2": {5}, "4": {5}}
    # By cost, of 433, 371 and 251, they begin at 0, 0.41 and 0.76 of the period.
    assert [found[name][0] % period for name, period in (("2", 5), ("4", 5), ("0", 3))] == [0, 2, 2]


def test_blocks_that_come_later_are_spread_with_the_others() -> None:
    model = mlp(sizes=(4, 5, 5, 5, 3))
    optimizer = KFACOptimizer(model[0].parameters(), lr=0.01, model=model, refresh=Staggered(), factor_update_period=1)
    train(model, optimizer, 1)
    assert [each.phase for each in blocks(optimizer)] == [0]
    optimizer.add_param_group({"params": [p for layer in (model[2], model[4], model[6]) for p in layer.parameters()]})
    train(model, optimizer, 1)
    assert len({each.phase for each in blocks(optimizer)}) == 4


# -- λ that moves --------------------------------------------------------------------------------------------------

_RISES_AND_FALLS = (1.0, 1.9, 2.1, 3.9, 4.3, 2.2, 2.0, 1.0)
_LEAVES_THE_LAST_BEHIND = [2, 4, 6, 7]


def refreshed_as_damping_moves(optimizer: KFACOptimizer, model: nn.Module, dampings: Sequence[float]) -> list[int]:
    """Steps at which all blocks were refreshed; some only is an error."""
    found = []
    for step, damping in enumerate(dampings, start=blocks(optimizer)[0].clock.step):
        for group in optimizer.param_groups:
            group["damping"] = 0.1 * damping
        steps = refreshed_at(model, optimizer, range(step, step + 1)).values()
        assert len({bool(each) for each in steps}) == 1
        found += [step] if all(steps) else []
    return found


def rarely(model: nn.Module, **options: Any) -> KFACOptimizer:
    """After its first step no period brings a refresh."""
    return KFACOptimizer(model, lr=0.01, factor_update_period=1000, inverse_update_period=1000, **options)


@pytest.mark.parametrize("refresh", [Together(), Staggered(), Background(max_staleness=0)], ids=repr)
@each_inverse
def test_a_damping_that_doubled_or_halved_brings_a_refresh(inverse: Inverse[Any], refresh: Any) -> None:
    """Of inverses that have it from the refresh: those in an eigenbasis take it as it is at each step."""
    model = mlp(sizes=SIZES)
    optimizer = rarely(model, inverse=inverse, refresh=refresh)
    expected = [] if isinstance(inverse, Eigen | EKFAC) else _LEAVES_THE_LAST_BEHIND
    assert refreshed_as_damping_moves(optimizer, model, _RISES_AND_FALLS) == [0, *expected]


def test_a_preconditioner_with_a_damping_of_its_own_is_not_left_behind() -> None:
    model = mlp(sizes=SIZES)
    optimizer = rarely(model, preconditioner_damping=0.1)
    assert refreshed_as_damping_moves(optimizer, model, _RISES_AND_FALLS) == [0]


@pytest.mark.parametrize("stop", range(1, len(_RISES_AND_FALLS)))
def test_a_checkpoint_knows_the_damping_of_its_inverses(stop: int) -> None:
    model = mlp(sizes=SIZES)
    optimizer = rarely(model)
    before = refreshed_as_damping_moves(optimizer, model, _RISES_AND_FALLS[:stop])
    resumed = rarely(model)
    resumed.load_state_dict(optimizer.state_dict())
    assert before + refreshed_as_damping_moves(resumed, model, _RISES_AND_FALLS[stop:]) == [0, *_LEAVES_THE_LAST_BEHIND]


def test_weight_decay_in_the_curvature_counts() -> None:
    """A damping of 0.1, 0.19, … beside 0.9 never doubles what the inverse is damped by."""
    model = mlp(sizes=SIZES)
    optimizer = rarely(model, weight_decay=0.9, l2_in_curvature=True)
    assert refreshed_as_damping_moves(optimizer, model, _RISES_AND_FALLS) == [0]


def test_a_checkpoint_knows_the_damping_of_what_is_under_way() -> None:
    model = mlp(sizes=SIZES)
    optimizer = rarely(model, refresh=Background(max_staleness=3, deterministic=True))
    train(model, optimizer, 1)
    for damping in (2.1e-3, 3e-3):  # begun at the first
        optimizer.param_groups[0]["damping"] = damping
        train(model, optimizer, 1)
    resumed = rarely(model, refresh=Background(max_staleness=3, deterministic=True))
    resumed.load_state_dict(optimizer.state_dict())
    train(model, resumed, 2)
    assert [each.clock.damping for each in blocks(resumed)] == pytest.approx([2.1e-3] * 2)


def test_an_inverse_from_the_background_has_the_damping_it_was_begun_with() -> None:
    model = mlp(sizes=SIZES)
    optimizer = rarely(model, refresh=Background(max_staleness=2, deterministic=True))
    train(model, optimizer, 1)
    for damping, known in ((2.1, 1.0), (3.0, 1.0), (4.0, 2.1)):
        optimizer.param_groups[0]["damping"] = damping * 1e-3
        train(model, optimizer, 1)
        assert [each.clock.damping for each in blocks(optimizer)] == pytest.approx([known * 1e-3] * 2)


def test_what_a_move_of_the_model_has_interrupted_is_begun_again() -> None:
    model = mlp(sizes=SIZES)
    optimizer = KFACOptimizer(model, lr=0.1, refresh=Background(max_staleness=10, deterministic=True))
    train(model, optimizer, 101)
    assert all(each.under_way is not None for each in blocks(optimizer))
    model.float()
    for number in range(11):
        optimizer.zero_grad()
        square_loss(model(batch(number).float())).backward()
        optimizer.step()
    assert all(each.clock.refreshed_at >= 101 for each in blocks(optimizer))


# -- without staleness all are the same ----------------------------------------------------------------------------

STRUCTURED = {"structure": {"0": (Structure.DIAGONAL, Structure.DENSE), "2": (Structure.DENSE, Structure.IDENTITY)}}


def trajectory(refresh: Any, steps: int = 25, **options: Any) -> list[Any]:
    model = mlp(sizes=SIZES)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, refresh=refresh, **{**FREQUENT, **options})
    train(model, optimizer, steps)
    return [clones(model.parameters()), snapshot(optimizer), optimizer.metrics()]


@each_inverse
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("schedule", [Together(), Staggered()], ids=repr)
def test_with_no_staleness_the_background_is_the_foreground_bit_for_bit(
    schedule: Any, deterministic: bool, inverse: Inverse[Any]
) -> None:
    background = Background(schedule, max_staleness=0, deterministic=deterministic)
    options = {"inverse": inverse, "inverse_update_period": 4}
    assert_identical(trajectory(background, **options), trajectory(schedule, **options))


def test_without_staleness_of_structured_factors_too() -> None:
    background = Background(max_staleness=0)
    assert_identical(trajectory(background, **STRUCTURED), trajectory(Together(), **STRUCTURED))


@each_inverse
def test_with_a_period_of_one_step_nothing_is_staggered(inverse: Inverse[Any]) -> None:
    options = {"inverse": inverse, "inverse_update_period": 1}
    assert_identical(trajectory(Staggered(), **options), trajectory(Together(), **options))


# -- with a staleness of k steps: K-FAC written out ----------------------------------------------------------------


class PlainKFAC:
    """A two-layer run in which an inverse is used from k steps after its factors on; the first one at once.

    Args:
        ekfac: in the eigenbases, with second moments that go on, instead of factored damping.
        staleness: k, at least 1.
        offsets: the steps of the period in which each layer is due.
    """

    MOMENTUM, LR, DECAY, PERIOD = 0.9, 0.1, 0.9, 4

    def __init__(self, ekfac: bool, staleness: int, offsets: dict[int, int]) -> None:
        self.model = mlp(sizes=SIZES)
        self.ekfac, self.staleness, self.offsets = ekfac, staleness, offsets
        self.held: dict[int, dict[str, Any]] = {
            index: {"A": 0.0, "G": 0.0, "S": 0.0, "mass": 0.0, "S_mass": 0.0, "folds": 0, "behind": (-1, 0)}
            for index in offsets
        }

    def step(self, number: int, damping: float) -> None:
        inputs, outputs = {}, {}
        x = batch(100 + number)
        for index, module in enumerate(self.model):
            inputs[index] = x
            x = outputs[index] = module(x)
            x.retain_grad()
        self.model.zero_grad()
        square_loss(x).backward()
        for index in self.offsets:
            layer = self.model[index]
            rows = torch.cat([inputs[index].detach(), torch.ones(8, 1, dtype=torch.float64)], dim=1)
            gradients = outputs[index].grad
            with torch.no_grad():
                grad = gradient_matrix(layer.weight.grad, layer.bias.grad)
                self.fold(self.held[index], rows, gradients)
                self.refresh(self.held[index], number, self.offsets[index], damping)
                self.update(self.held[index], layer, self.precondition(self.held[index], grad, damping))

    def fold(self, held: dict[str, Any], rows: Tensor, gradients: Tensor) -> None:
        held["mass"] = self.DECAY * held["mass"] + 8
        gain = 8 / held["mass"]
        held["A"] = held["A"] + gain * (rows.T @ rows / 8 - held["A"])
        held["G"] = held["G"] + gain * (8 * gradients.T @ gradients - held["G"])
        held["folds"] += 1
        if "bases" in held:
            u_a, u_g = held["bases"]
            sample = 8 * sum((u_g.T @ torch.outer(g, a) @ u_a) ** 2 for a, g in zip(rows, gradients, strict=True))
            held["S_mass"] = self.DECAY * held["S_mass"] + 8
            held["S"] = held["S"] + 8 / held["S_mass"] * (sample - held["S"])

    def refresh(self, held: dict[str, Any], number: int, offset: int, damping: float) -> None:
        if "pending" in held and held["pending"]["step"] == number - self.staleness:
            self.take(held, held.pop("pending"))
        _, folds_behind = held["behind"]
        then = held["used"]["damping"] if "used" in held and not self.ekfac else damping
        moved = not then / 2 < damping < then * 2
        if number % self.PERIOD == offset or held["folds"] >= 1.5 * folds_behind or moved:
            factors = {name: held[name].clone() for name in "AG"}
            pending = {"step": number, "folds": held["folds"], "damping": damping, **factors}
            if held["behind"] == (-1, 0):
                self.take(held, pending)
            else:
                held.setdefault("pending", pending)

    def take(self, held: dict[str, Any], pending: dict[str, Any]) -> None:
        held["behind"] = pending["step"], pending["folds"]
        held["used"] = pending
        s_a, u_a = torch.linalg.eigh(pending["A"])
        s_g, u_g = torch.linalg.eigh(pending["G"])
        if "bases" not in held or held["S_mass"] == 0:
            held["S"] = torch.outer(s_g.clamp(min=0), s_a.clamp(min=0))
        else:  # the diagonal of the present curvature in the new basis
            old = torch.kron(held["bases"][1], held["bases"][0])
            new = torch.kron(u_g, u_a)
            dense = old @ torch.diag(held["S"].flatten()) @ old.T
            held["S"] = (new.T @ dense @ new).diagonal().view_as(held["S"])
        held["bases"] = u_a, u_g

    def precondition(self, held: dict[str, Any], grad: Tensor, damping: float) -> Tensor:
        if not self.ekfac:
            return direction(grad, held["used"]["A"], held["used"]["G"], held["used"]["damping"])
        u_a, u_g = held["bases"]
        return u_g @ ((u_g.T @ grad @ u_a) / (held["S"] + damping)) @ u_a.T

    def update(self, held: dict[str, Any], layer: nn.Linear, step: Tensor) -> None:
        held["momentum"] = self.MOMENTUM * held["momentum"] + step if "momentum" in held else step
        layer.weight -= self.LR * held["momentum"][:, :-1]
        layer.bias -= self.LR * held["momentum"][:, -1]


@pytest.mark.parametrize("staleness", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("schedule", "offsets"), [(Together(), {0: 0, 2: 0}), (Staggered(), {0: 2, 2: 0})], ids=["together", "staggered"]
)
@pytest.mark.parametrize("inverse", [Cholesky(), EKFAC()], ids=repr)
def test_deterministic_lag_is_that_of_a_run_with_the_factors_of_k_steps_ago(
    inverse: Inverse[Any], schedule: Any, offsets: dict[int, int], staleness: int
) -> None:
    """Damping changes at every step: a refresh takes that of its own step."""
    plain = PlainKFAC(isinstance(inverse, EKFAC), staleness, offsets)
    model = mlp(sizes=SIZES)
    optimizer = KFACOptimizer(
        model,
        lr=PlainKFAC.LR,
        momentum=PlainKFAC.MOMENTUM,
        factor_decay=PlainKFAC.DECAY,
        inverse_update_period=PlainKFAC.PERIOD,
        kl_clip=None,
        inverse=inverse,
        refresh=Background(schedule, max_staleness=staleness, deterministic=True),
        factor_update_period=1,
    )
    for number in range(30):
        damping = 0.1 + 0.05 * (number % 7)
        optimizer.param_groups[0]["damping"] = damping
        train(model, optimizer, 1, start=number)
        plain.step(number, damping)
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11, msg=f"step {number}")
        oldest = min(held["behind"][0] for held in plain.held.values())
        assert optimizer.metrics()["inverse_age"] == number - oldest


# -- when results are taken over -------------------------------------------------------------------------------------


def test_a_result_is_taken_over_at_the_first_step_after_it_is_done(gate: Gate) -> None:
    model, optimizer = gated(gate, max_staleness=1000)
    before = block(optimizer, "0").state.a.inverse.clone()
    train(model, optimizer, 3, start=2)
    assert torch.equal(block(optimizer, "0").state.a.inverse, before)
    assert optimizer.metrics()["inverse_age"] == 4.0
    assert gate.begun == [2], "what is under way is not begun again, though it is due"
    gate.open.set()
    settle(optimizer)
    train(model, optimizer, 1, start=5)
    assert not torch.equal(block(optimizer, "0").state.a.inverse, before)
    assert optimizer.metrics()["inverse_age"] == 4.0, "of the factors at step 1"
    assert {each.clock.folds_at_refresh for each in blocks(optimizer)} == {2}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_result_that_is_not_done_is_waited_for_at_the_bound(gate: Gate, deterministic: bool) -> None:
    model, optimizer = gated(gate, max_staleness=3, deterministic=deterministic)
    train(model, optimizer, 2, start=2)
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {0}
    with opened_after(gate, 0.2):
        train(model, optimizer, 1, start=4)
        assert gate.open.is_set(), "the step did not wait"
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {1}


def test_deterministic_results_are_not_taken_over_sooner_than_the_bound(gate: Gate) -> None:
    gate.open.set()
    model, optimizer = gated(gate, max_staleness=3, deterministic=True)
    settle(optimizer)
    train(model, optimizer, 2, start=2)
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {0}
    train(model, optimizer, 1, start=4)
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {1}


def test_staggered_blocks_are_each_taken_over_in_their_turn() -> None:
    model = mlp(sizes=SIZES)
    refresh = Background(Staggered(), max_staleness=2, deterministic=True)
    optimizer = KFACOptimizer(model, lr=0.01, inverse_update_period=6, refresh=refresh, factor_update_period=1)
    train(model, optimizer, 24)
    assert refreshed_at(model, optimizer, range(24, 42)) == {"0": [29, 35, 41], "2": [26, 32, 38]}


def test_copies_are_made_in_the_same_place_each_time() -> None:
    model = mlp(sizes=SIZES)
    refresh = Background(max_staleness=1, deterministic=True)
    optimizer = KFACOptimizer(model, lr=0.01, inverse_update_period=2, refresh=refresh, factor_update_period=1)
    found = set()
    for step in range(10):
        train(model, optimizer, 1, start=step)
        found |= {each.under_way.shadow for each in blocks(optimizer) if each.under_way is not None}
    assert len(found) == len(blocks(optimizer))


class Recorded(Cholesky):
    """Notes the circumstances of each refresh."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def refresh(self, states: Sequence[Any], dampings: Sequence[float]) -> None:
        where = "main" if threading.current_thread() is threading.main_thread() else "worker"
        self.seen[where] = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads())
        super().refresh(states, dampings)


def test_the_worker_has_no_grad_no_autocast_and_the_threads_of_the_step() -> None:
    recorded, model = Recorded(), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(
        model, inverse=recorded, refresh=Background(max_staleness=1), inverse_update_period=1, factor_update_period=1
    )
    threads = torch.get_num_threads()
    try:
        for count in (threads, threads + 1):
            torch.set_num_threads(count)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                train(model, optimizer, 3)
            settle(optimizer)
            assert recorded.seen["worker"] == (*recorded.seen["main"][:2], count) == (False, False, count)
    finally:
        torch.set_num_threads(threads)


# -- failures --------------------------------------------------------------------------------------------------------


class Faulty(Cholesky):
    """Raises on the worker, while it is to."""

    def __init__(self) -> None:
        self.fails = True

    def refresh(self, states: Sequence[Any], dampings: Sequence[float]) -> None:
        if self.fails and threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("no such thing")
        super().refresh(states, dampings)


def test_what_a_refresh_raises_is_raised_at_the_swap_with_the_layers_and_training_goes_on() -> None:
    faulty, model = Faulty(), mlp(sizes=(4, 5, 6, 3))
    inverse = {"0": Cholesky(), "*": faulty}
    background = Background(max_staleness=3, deterministic=True)
    optimizer = KFACOptimizer(
        model, lr=0.1, inverse=inverse, inverse_update_period=5, refresh=background, factor_update_period=1
    )
    train(model, optimizer, 4)
    state = copy.deepcopy(optimizer.state_dict())
    assert not any("under_way" in held.get("kfac", ()) for held in state["state"].values())
    before = clones(model.parameters())
    message = r"kfac_optim: the background refresh of '0', '2', '4', begun at step 1, raised ArithmeticError: no such"
    with pytest.raises(RuntimeError, match=message) as raised:
        train(model, optimizer, 1, start=4)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert_identical(clones(model.parameters()), before)
    faulty.fails = False
    train(model, optimizer, 6, start=5)
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {4}, "the step that raised is not counted"
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def poison(optimizer: KFACOptimizer, name: str) -> None:
    """Statistics that no refresh survives, which no sample could bring."""
    block(optimizer, name).state.pair.g.packed.fill_(torch.nan)


@pytest.mark.parametrize("staleness", [0, 2])
def test_failed_refreshes_count_once_and_raise_at_the_swap_when_they_are_too_many(staleness: int) -> None:
    model = mlp(sizes=SIZES)
    refresh = Background(max_staleness=staleness, deterministic=True)
    optimizer = KFACOptimizer(
        model, lr=0.01, inverse_update_period=5, refresh=refresh, nonfinite_limit=2, factor_update_period=1
    )
    train(model, optimizer, 30)
    for _ in range(5):
        poison(optimizer, "2")
        train(model, optimizer, 1, start=30)
    assert optimizer.metrics()["failed_refreshes"] == 1.0
    for _ in range(staleness):
        poison(optimizer, "2")
        train(model, optimizer, 1, start=30)
    poison(optimizer, "2")
    with pytest.raises(RuntimeError, match=r"the inverse of layer '2' could not be computed 2 times in a row"):
        train(model, optimizer, 1, start=30)
    assert block(optimizer, "2").clock.step == 35 + staleness
    assert optimizer.metrics()["failed_refreshes"] == 2.0


def test_steps_that_are_skipped_do_not_count_towards_the_staleness() -> None:
    options = {
        **FREQUENT,
        "lr": 0.1,
        "refresh": Background(max_staleness=2, deterministic=True),
        "inverse_update_period": 3,
    }
    model, twin = mlp(sizes=SIZES), mlp(sizes=SIZES)
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    for i in range(10):
        (square_loss(model(batch())) * torch.nan).backward()
        optimizer.step()
        train(model, optimizer, 1, start=i)
    train(twin, reference, 10)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(snapshot(optimizer)[1], snapshot(reference)[1])


def test_a_step_that_is_refused_leaves_what_is_under_way_alone() -> None:
    options = {**FREQUENT, "lr": 0.1, "refresh": Background(max_staleness=3, deterministic=True)}
    model, twin = mlp(sizes=SIZES), mlp(sizes=SIZES)
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["damping"] = -1.0
    with pytest.raises(ValueError, match="damping"):
        train(model, optimizer, 1, start=3)
    optimizer.param_groups[0]["damping"] = 1e-3
    train(model, optimizer, 6, start=3)
    train(twin, reference, 9)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


# -- checkpoints and copies ------------------------------------------------------------------------------------------

MODES = [
    Together(),
    Staggered(),
    Background(max_staleness=0),
    Background(max_staleness=3, deterministic=True),
    Background(Staggered(), max_staleness=2, deterministic=True),
    Background(max_staleness=100),
    Background(Staggered(), max_staleness=1),
]


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def steady(model: nn.Module, optimizer: KFACOptimizer, steps: range) -> None:
    """Steps between which every refresh under way finishes."""
    for step in steps:
        train(model, optimizer, 1, start=step)
        settle(optimizer)


# While the averages are young, and later, in turn.
RESUMED = [
    (inverse, refresh, (2, 10)[(row + column) % 2])
    for row, inverse in enumerate(INVERSES)
    for column, refresh in enumerate(MODES)
]


@pytest.mark.parametrize(("inverse", "refresh", "stop"), RESUMED, ids=repr)
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(
    inverse: Inverse[Any], refresh: Any, stop: int
) -> None:
    def make() -> tuple[nn.Sequential, KFACOptimizer]:
        model = mlp(sizes=SIZES)
        options = {**FREQUENT, "inverse": inverse, "inverse_update_period": 4, "refresh": refresh}
        return model, KFACOptimizer(model, lr=0.1, momentum=0.9, **options)

    (whole, uninterrupted), (first, saving), (second, resumed) = make(), make(), make()
    steady(whole, uninterrupted, range(14))
    steady(first, saving, range(stop))
    saved = through_a_file([first.state_dict(), saving.state_dict()])
    copied, copying = pickle.loads(pickle.dumps((first, saving)))
    steady(first, saving, range(50, 55))  # what happens after saving must not reach the checkpoint
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for model, optimizer in ((second, resumed), (copied, copying)):
        steady(model, optimizer, range(stop, 14))
        assert_identical(clones(model.parameters()), clones(whole.parameters()))
        assert_identical(optimizer.state_dict()["state"], uninterrupted.state_dict()["state"])
        assert_identical(optimizer.metrics(), uninterrupted.metrics())


def test_a_checkpoint_holds_what_is_under_way_finished(gate: Gate) -> None:
    _, optimizer = gated(gate, max_staleness=5, deterministic=True)
    with opened_after(gate, 0.2):
        state = optimizer.state_dict()["state"][0]["kfac"]
    assert state["under_way"]["clock"]["step"] == 1
    old, new = (held["inverse"]["A_inverse"] for held in (state, state["under_way"]))
    assert not torch.equal(old, new)
    twin = mlp(sizes=SIZES)
    synchronous = KFACOptimizer(twin, lr=0.1, factor_update_period=1)
    train(twin, synchronous, 2)
    assert torch.equal(new, block(synchronous, "0").state.a.inverse)


def test_without_factors_the_checkpoint_holds_nothing_under_way_either(gate: Gate) -> None:
    gate.open.set()
    model = mlp(sizes=SIZES)
    refresh = Background(max_staleness=5, deterministic=True)
    optimizer = KFACOptimizer(
        model, lr=0.1, inverse=gate, refresh=refresh, include_factors=False, factor_update_period=1
    )
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert state["state"][0]["kfac"].keys() == {
        "version",
        "name",
        "params",
        "follows_uses",
        "clock",
        "opposed",
        "shared_input",
        "spread",
        "factors",
        "refreshing",
        "momenta",
        "step_size",
    }
    optimizer.load_state_dict(state)
    assert all(each.under_way is None and not each.is_ready for each in blocks(optimizer))


def test_a_checkpoint_in_mid_flight_loads_into_an_optimizer_without_background() -> None:
    """Its inverse is then the old one until the next refresh."""
    model, twin = mlp(sizes=SIZES), mlp(sizes=SIZES)
    optimizer = KFACOptimizer(
        model, lr=0.1, refresh=Background(max_staleness=50, deterministic=True), factor_update_period=1
    )
    train(model, optimizer, 2)
    loaded = KFACOptimizer(twin, lr=0.1)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(block(loaded, "0").state.a.inverse, block(optimizer, "0").state.a.inverse)
    train(twin, loaded, 1, start=2)
    assert {each.clock.refreshed_at for each in blocks(loaded)} == {2}
    assert all("under_way" not in held.get("kfac", ()) for held in loaded.state_dict()["state"].values())


def test_a_checkpoint_whose_parts_under_way_do_not_fit_is_refused_and_nothing_changes() -> None:
    model = mlp(sizes=SIZES)
    optimizer = KFACOptimizer(
        model, lr=0.1, refresh=Background(max_staleness=50, deterministic=True), factor_update_period=1
    )
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["kfac"]["under_way"]["inverse"]["A_inverse"] = torch.zeros(1, 2, 2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"under_way\.A_inverse of '0' is \[1, 2, 2\], here \[1, 5, 5\]"):
        optimizer.load_state_dict(state)
    assert_identical(snapshot(optimizer), before)


# -- what happens meanwhile ------------------------------------------------------------------------------------------


def at_rest(gate: Gate, optimizer: KFACOptimizer) -> None:
    """Open the gate, and see the worker through all that it has to do."""
    gate.open.set()
    optimizer._engine.refresher._worker.submit(int).result(60)


def test_loading_gives_up_what_is_under_way_without_waiting(gate: Gate) -> None:
    start = mlp(sizes=SIZES)
    train(start, before := KFACOptimizer(start, lr=0.1, factor_update_period=1), 1, start=20)
    saved = copy.deepcopy(before.state_dict())
    saved["param_groups"][0]["inverse_update_period"] = 100
    model, optimizer = gated(gate, max_staleness=3, deterministic=True)
    dropped = [each.under_way for each in blocks(optimizer)]
    model.load_state_dict(start.state_dict())
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1, start=1)
    assert all(each.under_way.shadow is not old.shadow for each, old in zip(blocks(optimizer), dropped, strict=True))
    at_rest(gate, optimizer)
    train(model, optimizer, 6, start=2)
    twin = copy.deepcopy(start)
    reference = KFACOptimizer(twin, refresh=Background(max_staleness=3, deterministic=True), factor_update_period=1)
    reference.load_state_dict(saved)
    train(twin, reference, 7, start=1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def restart(_: nn.Module, optimizer: KFACOptimizer) -> None:
    for each in blocks(optimizer):
        each.restart()


def to_another_dtype(model: nn.Module, _: KFACOptimizer) -> None:
    model.float()


@pytest.mark.parametrize("change", [restart, to_another_dtype])
def test_what_was_begun_before_a_block_was_made_anew_is_dropped(gate: Gate, change: Callable[..., None]) -> None:
    model, optimizer = gated(gate, max_staleness=2, deterministic=True)
    change(model, optimizer)
    train(model, optimizer, 1, start=2)
    state = {each.name: each.state for each in blocks(optimizer)}
    at_rest(gate, optimizer)
    train(model, optimizer, 6, start=3)
    for each in blocks(optimizer):
        assert each.state is state[each.name]
        assert each.clock.refreshed_at > 1, "not of a step before the change"
        assert each.state.a.inverse.dtype == next(model.parameters()).dtype
        assert bool(each.state.a.inverse.isfinite().all())
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_without_hooks_steps_go_on_and_take_over_what_is_under_way(gate: Gate) -> None:
    model, optimizer = gated(gate, max_staleness=2, deterministic=True)
    optimizer.remove_hooks()
    at_rest(gate, optimizer)
    train(model, optimizer, 4, start=2)
    assert {each.clock.refreshed_at for each in blocks(optimizer)} == {1}


def test_an_optimizer_that_is_dropped_in_mid_flight_goes_at_once_and_its_thread_when_done(gate: Gate) -> None:
    others = set(threading.enumerate())
    model, optimizer = gated(gate, max_staleness=50)
    (worker,) = set(threading.enumerate()) - others
    gone = weakref.ref(optimizer), weakref.ref(model), weakref.ref(optimizer._engine.refresher)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert worker.is_alive()
    gate.open.set()
    worker.join(60)
    assert not worker.is_alive()


@pytest.mark.slow
def test_the_interpreter_exits_in_mid_flight() -> None:
    script = """
import torch, time
from kfac_optim import Background, Cholesky, KFACOptimizer

class Slow(Cholesky):
    def refresh(self, states, dampings):
        time.sleep(0.5)
        super().refresh(states, dampings)

model = torch.nn.Linear(4, 3)
optimizer = KFACOptimizer(model, inverse=Slow(), refresh=Background(max_staleness=100), factor_update_period=1)
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
assert optimizer._binding.coverage.blocks[0].under_way is not None
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_two_optimizers_refresh_beside_each_other() -> None:
    def make() -> tuple[nn.Sequential, KFACOptimizer]:
        model = mlp(sizes=SIZES)
        refresh = Background(max_staleness=2, deterministic=True)
        return model, KFACOptimizer(model, lr=0.1, inverse_update_period=3, refresh=refresh, factor_update_period=1)

    (one, first), (two, second) = make(), make()
    for step in range(12):
        train(one, first, 1, start=step)
        train(two, second, 1, start=step)
    assert_identical(clones(one.parameters()), clones(two.parameters()))


# -- around another executor -----------------------------------------------------------------------------------------


class Noted(Statistics):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        self.asked.append("merge")

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        self.asked.append("solve")
        super().solve(blocks)

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        self.asked.append("share")


@pytest.mark.parametrize("at_once", [True, False])
def test_statistics_are_merged_when_a_refresh_begins_and_results_shared_when_it_ends(at_once: bool) -> None:
    executor = Executor()
    executor.statistics = noted = Noted()
    model = mlp()
    optimizer = KFACOptimizer(
        model, refresh=Background(max_staleness=0 if at_once else 2, deterministic=True), factor_update_period=1
    )
    optimizer._executor = optimizer._engine.executor = executor
    optimizer._engine.refresher = BackgroundRefresher(executor, Background(max_staleness=0 if at_once else 2))
    asked = []
    for _ in range(5):
        noted.asked.clear()
        square_loss(model(torch.randn(8, model[0].in_features, dtype=model[0].weight.dtype))).backward()
        optimizer.step()
        optimizer._engine.refresher._worker.submit(int).result(60)
        asked.append(list(noted.asked))
        optimizer.zero_grad()
    together = ["merge", "solve", "share"]
    assert asked[:2] == ([together] * 2 if at_once else [together, ["merge", "solve"]])
    assert at_once or ["share"] in asked[2:]


class Stream:
    """Stands for a device's side stream."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("enter")

    def __exit__(self, *_: Any) -> None:
        self.log.append("exit")

    def wait_event(self, event: str) -> None:
        self.log.append(f"wait for {event}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_on_a_side_stream_a_refresh_waits_for_the_copies_and_is_done_when_the_device_is() -> None:
    log: list[str] = []
    _refresh(lambda _: log.append("refresh"), [], [(Stream(log), "copies")], torch.get_num_threads())
    assert log == ["enter", "wait for copies", "refresh", "exit", "synchronize"]


def test_on_the_meta_device_a_run_goes_through() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = KFACOptimizer(model, refresh=Background(max_staleness=1))
    square_loss(model(torch.randn(8, 4, device="meta"))).backward()
    optimizer.state_dict()


# -- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Background(max_staleness=-1), ValueError, r"max_staleness of Background must be at least 0, got -1"),
        (lambda: Background(max_staleness=1.5), TypeError, r"max_staleness of Background must be an integer, got 1.5"),
        (lambda: Background(3), TypeError, r"schedule of Background must be a Schedule, got 3"),
        (lambda: Background(Staggered), TypeError, r"schedule of Background must be a Schedule, got <class"),
        (lambda: Background(deterministic=1), TypeError, r"deterministic of Background must be True or False, got 1"),
    ],
)
def test_a_wrong_background_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
