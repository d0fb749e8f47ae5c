"""The length of steps by a search, and the loss evaluated again; covers step/line_search.py, step/reevaluation.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.oracles import assert_same
from helpers.plain import batch, clones, mlp
from torch import Tensor, nn

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, LevenbergMarquardt, LineSearch, QuadraticModel, SampleSpace

Closure = Callable[[], Tensor]


def problem() -> tuple[nn.Module, KFACOptimizer]:
    model = mlp()
    return model, KFACOptimizer(model, lr=1.0, damping=1e-2, inverse=Cholesky(), step_size=LineSearch())


def test_the_length_is_the_best_near_the_last_and_the_loss_falls() -> None:
    model, optimizer = problem()
    x, calls = batch(), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss.detach()

    for _ in range(5):
        before, calls[:] = clones(model.parameters()), []
        loss = float(optimizer.step(closure))
        length = optimizer.metrics()["step_length"]
        grads = clones(param.grad for param in model.parameters())
        moved = [new - old for old, new in zip(before, model.parameters(), strict=True)]
        evaluated = {}
        for each in (length / 2, length, 2 * length):
            with torch.no_grad():
                for param, old, step in zip(model.parameters(), before, moved, strict=True):
                    param.copy_(old + step * (each / length))
                evaluated[each] = (model(x) - 1).square().mean().item()
                for param, old, step in zip(model.parameters(), before, moved, strict=True):
                    param.copy_(old + step)
        assert evaluated[length] < loss
        assert evaluated[length] <= evaluated[length / 2]
        assert length == 1 or evaluated[length] <= evaluated[2 * length]
        assert all(torch.equal(old, param.grad) for old, param in zip(grads, model.parameters(), strict=True))


def test_twice_the_rate_is_twice_the_longest_step() -> None:
    moved = []
    for lr, longest in ((2.0, 1.0), (1.0, 2.0)):
        model = mlp()
        before = clones(model.parameters())
        optimizer = KFACOptimizer(model, lr=lr, damping=10.0, inverse=Cholesky(), step_size=LineSearch(longest=longest))

        def closure(model: nn.Module = model, optimizer: KFACOptimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (model(batch()) - 1).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        assert optimizer.metrics()["step_length"] == longest, "the damping makes all steps too short"
        moved.append([new - old for old, new in zip(before, model.parameters(), strict=True)])
    assert_same(*moved)


def test_evaluations_leave_buffers_random_numbers_and_statistics_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    optimizer = KFACOptimizer(model, lr=1.0, damping=1e-2, step_size=LineSearch())
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    assert model[1].num_batches_tracked == 1
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    twin(batch())
    assert torch.equal(state, torch.get_rng_state())
    assert len(seen) > 2


def test_an_error_in_an_evaluation_leaves_the_parameters_where_they_were() -> None:
    model, optimizer = problem()
    before, count = clones(model.parameters()), []

    def closure() -> Tensor:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_where_no_length_lowers_the_loss_no_step_is_taken() -> None:
    model, optimizer = problem()
    before, losses = clones(model.parameters()), iter(range(1000))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss.detach() * 0 + next(losses)

    optimizer.step(closure)
    assert optimizer.metrics()["step_length"] == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_what_does_not_go_together_is_refused() -> None:
    model, optimizer = problem()
    with pytest.raises(RuntimeError, match=r"LineSearch.*pass step\(\) a closure"):
        optimizer.step()
    optimizer = KFACOptimizer(model, lr=1.0, momentum=0.9, step_size=LineSearch())
    model(batch()).square().mean().backward()
    with pytest.raises(ValueError, match="momentum of param group 0 must be 0"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="longest of LineSearch"):
        LineSearch(longest=0)


def test_an_interrupted_evaluation_leaves_no_mode_behind() -> None:
    model, optimizer = problem()
    calls: list[int] = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    model[1].register_forward_hook(interrupt)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss.detach()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    leaf = torch.ones(1, requires_grad=True)
    (2 * leaf).sum().backward()
    assert leaf.grad is not None


def test_far_too_long_steps_are_halved_until_the_loss_falls_at_all() -> None:
    search = LineSearch(halvings=12)
    losses = {0: 5.0, 1: 9.0, 2: 7.0, 3: 8.0, 4: 3.0, 5: 0.9, 6: 0.5, 7: 0.8}
    assert search._search(lambda k: losses.get(k, 1.0), 0, 1.0) == (6, 0.5)
    assert search._search(lambda k: losses.get(k, 1.0), 7, 1.0) == (6, 0.5)
    assert search._search(lambda _: 2.0, 3, 1.0) == (12, 2.0)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_closure_may_drop_the_gradients_after_its_forward(evaluated: bool) -> None:
    """And the criterion may have been called with gradients before, as DeepXDE does to show the losses."""
    runs = []
    for drops_first in (True, False):
        model, criterion = mlp(), nn.MSELoss()
        optimizer = KFACOptimizer(
            model, lr=1.0, inverse=SampleSpace(), step_size=LineSearch(), estimate=ExactGGN(criterion)
        )

        def closure(
            optimizer: KFACOptimizer = optimizer,
            model: nn.Module = model,
            criterion: nn.Module = criterion,
            drops_first: bool = drops_first,
        ) -> Tensor:
            if drops_first:
                optimizer.zero_grad()
            output = model(batch())
            loss = criterion(output, torch.ones_like(output))
            if not drops_first:
                optimizer.zero_grad()
            loss.backward()
            return loss

        if evaluated and not drops_first:
            criterion(model(batch(1, size=3)), torch.ones(3, 3, dtype=torch.float64))
        for _ in range(3):
            optimizer.step(closure)
        runs.append(clones(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def closure_of(model: nn.Module, optimizer: KFACOptimizer, edit: Callable[[], object] = lambda: None) -> Closure:
    x = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        edit()
        return loss.detach()

    return closure


def test_a_closure_may_look_at_gradients_and_change_them() -> None:
    """What it sees behind a backward that is not run are copies of the first gradients."""
    found = []
    for edits in (False, True):
        model, optimizer = problem()
        seen: list[list[float]] = []

        def edit(model: nn.Module = model, seen: list[list[float]] = seen, edits: bool = edits) -> None:
            seen.append([float(param.grad.norm()) for param in model.parameters()])
            if edits and len(seen) > 1:
                for param in model.parameters():
                    param.grad.mul_(torch.nan)

        optimizer.step(closure_of(model, optimizer, edit))
        assert len(seen) > 2
        assert all(each == seen[0] for each in seen)
        found.append([*clones(model.parameters()), *clones(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *found))


def test_the_rate_may_be_a_tensor_of_one_element() -> None:
    found = []
    for lr in (0.5, torch.tensor([0.5])):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=lr, damping=1e-2, inverse=Cholesky(), step_size=LineSearch())
        optimizer.step(closure_of(model, optimizer))
        found.append(clones(model.parameters()))
    assert_same(*found)


def test_weight_decay_that_is_part_of_the_curvature_is_part_of_the_loss_that_is_searched() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(40, size, dtype=torch.float64, generator=generator) for size in (3, 1))
    eta = 0.3
    # h = mean (xw - y)² + ½ η w², from the minimum of the loss alone, which no step against h lowers.
    ridge = torch.linalg.solve(2 * x.T @ x / 40 + eta * torch.eye(3, dtype=torch.float64), 2 * x.T @ y / 40)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(x.T @ x, x.T @ y).T)
    options = {"weight_decay": eta, "l2_in_curvature": True, "inverse": Cholesky(), "damping": 1e-6}
    optimizer = KFACOptimizer(model, lr=1.0, step_size=LineSearch(), factor_update_period=1, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(60):
        optimizer.step(closure)
    assert_same(model.weight, ridge.T, rtol=1e-5)


def test_complex_parameters_are_searched_with_their_imaginary_part() -> None:
    """The penalty alone is lowest at zero, which is one whole step away."""
    model = nn.ParameterList([torch.full((3,), 1j, dtype=torch.complex128)])
    options = {"weight_decay": 1.0, "l2_in_curvature": True, "step_size": LineSearch()}
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        optimizer = KFACOptimizer(model, lr=1.0, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0 * model[0].abs().square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert optimizer.metrics()["step_length"] == 1
    assert not model[0].any()


@pytest.mark.parametrize("step_size", [LineSearch(), QuadraticModel()], ids=repr)
def test_gradients_may_have_a_dtype_of_their_own(step_size: Any) -> None:
    model, criterion = mlp(dtype=torch.float32), nn.MSELoss()
    model[2].weight.grad_dtype = torch.bfloat16
    options = {"estimate": ExactGGN(criterion), "step_size": step_size, "skip_layers": ["2"]}
    optimizer = KFACOptimizer(model, lr=0.1, **options)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(batch(dtype=torch.float32)), torch.ones(8, 3))
        loss.backward()
        losses.append(loss.item())
        return loss.detach()

    before = model[2].weight.detach().clone()
    for _ in range(2):
        optimizer.step(closure)
    assert model[2].weight.dtype == torch.float32
    assert not torch.equal(model[2].weight, before)
    assert closure() < losses[0]


def test_the_default_goes_on_from_its_checkpoint_with_a_region_of_its_own() -> None:
    model, optimizer = problem()
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
    saved = optimizer.state_dict()
    (memory,) = {tuple(block["kfac"]["step_size"].tolist()) for block in saved["state"].values() if "kfac" in block}
    assert memory[0] == 0, "the logarithm of the size of a trust region"
    default = KFACOptimizer(model, lr=0.1, inverse=Cholesky())
    default.load_state_dict(saved)
    default.step(closure_of(model, default))
    assert default.metrics()["kl_clip"] == pytest.approx(default.param_groups[0]["kl_clip"])
    searched = KFACOptimizer(model, lr=1.0, damping=1e-2, inverse=Cholesky(), step_size=LineSearch())
    searched.load_state_dict(saved)
    assert searched._memory.get([], [*model.parameters()]).tolist() == optimizer._memory.get([], []).tolist()


def test_a_step_whose_search_fails_counts_its_statistics_once() -> None:
    model = mlp()
    options = {"damping": 1e-2, "inverse": Cholesky(), "factor_update_period": 1, "step_size": LineSearch()}
    optimizer = KFACOptimizer(model, lr=1.0, **options)
    calls = 0

    def edit() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError

    closure = closure_of(model, optimizer, edit)
    with pytest.raises(MemoryError):
        optimizer.step(closure)
    for _ in range(2):
        optimizer.step(closure)
    clocks = [block.clock for block in optimizer._binding.coverage.blocks]
    assert [(clock.step, clock.folds) for clock in clocks] == [(3, 3)] * len(clocks)
    KFACOptimizer(model, lr=1.0, **options).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("options", [{"step_size": LineSearch()}, {"adapt_damping": LevenbergMarquardt(interval=1)}])
def test_buffers_that_are_expanded_views_are_put_back(options: dict[str, Any]) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("seen", torch.zeros(1, 3).expand(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] += 1
            return super().forward(x) + 0 * self.seen[1]

    model, criterion = Masked(), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion), **options)
    x, y = torch.randn(8, 4), torch.randn(8, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(x), y)
        loss.backward()
        return loss

    for number in range(3):
        optimizer.step(closure)
        assert model.seen.tolist() == [[number + 1.0] * 3] * 2


@pytest.mark.parametrize("choice", ["length", "damping"])
@pytest.mark.parametrize("steps", [0, 1])  # taken before: statistics come at the first of ten
def test_a_step_is_not_judged_by_a_part_of_its_examples(choice: str, steps: int) -> None:
    model, criterion = mlp(), nn.MSELoss()
    named: dict[str, Any] = {"estimate": ExactGGN(criterion)}
    named |= {"step_size": LineSearch()} if choice == "length" else {"adapt_damping": LevenbergMarquardt(interval=1)}
    optimizer = KFACOptimizer(model, lr=0.1, **named)
    x = batch()

    def half(part: Tensor = x[4:]) -> Tensor:
        loss: Tensor = criterion(model(part), torch.ones(len(part), 3).to(x)) / 2
        loss.backward()
        return loss.detach()

    def both(zero: Callable[..., None] = optimizer.zero_grad, **how: bool) -> Tensor:
        zero(**how)
        return half(x[:4]) + half()

    def zero_data() -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.data.zero_()

    for _ in range(steps):
        optimizer.step(both)
    optimizer.zero_grad()
    half(x[:4])
    before = clones(model.parameters())
    with pytest.raises(RuntimeError, match="of an earlier backward as well"):
        optimizer.step(half)
    assert all(map(torch.equal, before, model.parameters()))
    for zero in (optimizer.zero_grad, model.zero_grad, zero_data):  # as after an attack on the inputs
        for how in [{}] if zero is zero_data else [{"set_to_none": True}, {"set_to_none": False}]:
            half(x[:4])
            optimizer.step(partial(both, zero, **how))
    assert not all(map(torch.equal, before, model.parameters()))
