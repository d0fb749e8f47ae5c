"""The default trust region, whose size follows what steps do to the loss."""

import copy
import io
import math
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from helpers.plain import FREQUENT, assert_identical, batch, block, clones, mlp, snapshot, square_loss, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    AdaptiveTrustRegion,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    LossTerms,
    QuadraticModel,
    TrustRegion,
)
from kfac_optim.step import gate
from kfac_optim.step.scalars import scalars
from kfac_optim.step.trust_region import follow, slope_ratio

ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(slope=ANY, before=ANY, multiplier=st.floats(-5, 25), held=st.booleans())
def test_whatever_the_slopes_the_region_stays_finite_and_grows_only_where_it_held(
    slope: float, before: float, multiplier: float, held: bool
) -> None:
    ratio = slope_ratio(torch.tensor(slope), torch.tensor(before))
    assert -1 <= float(ratio) <= 1
    start = torch.tensor(multiplier)
    after = follow(start, ratio, torch.tensor(held))
    assert math.log(1e-3) * (1 + 1e-6) <= float(after) <= math.log(1e12)
    assert float(after) <= float(start) or held


def steps_of(optimizer: KFACOptimizer, model: nn.Module, count: int, scale: float) -> list[dict[str, Any]]:
    """Take steps, and note of each what momentum, gradient and metrics were, and what moved."""
    seen = []
    params = list(model.parameters())
    for i in range(count):
        optimizer.zero_grad()
        (square_loss(model(batch(i))) * scale).backward()
        buffers = [optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)).clone() for p in params]
        before = clones(params)
        optimizer.step()
        seen.append(
            {
                "slope": float(sum((b * p.grad).sum() for b, p in zip(buffers, params, strict=True))),
                "moved": [b - p.detach() for b, p in zip(before, params, strict=True)],
                "weights": before,
                "buffers": buffers,
                "grads": [p.grad.clone() for p in params],
                **optimizer.metrics(),
            }
        )
    return seen


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)])
def test_each_step_has_the_size_that_the_slopes_of_the_one_before_give_it(
    momentum: float, decay: float, scale: float, maximize: bool
) -> None:
    lr, dampening = 0.3, 0.25 if momentum and maximize else 0.0
    model = mlp()
    options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "maximize": maximize, **FREQUENT}
    optimizer = KFACOptimizer(model, lr=lr, kl_clip=1e-4, weight_decay=decay, **options)
    sign = -1 if maximize else 1
    logarithm, before, held = 0.0, 0.0, False
    sizes = set()
    for step, seen in enumerate(steps_of(optimizer, model, 12, scale)):
        slope = sign * lr * seen["slope"]
        if before > 0:
            ratio = max(-1.0, min(1.0, slope / before))
            change = 0.4 * ratio * abs(ratio)
            logarithm = max(math.log(1e-3), logarithm + (change if held else min(change, 0.0)))
        size = math.exp(logarithm)
        assert seen["kl_clip"] == pytest.approx(1e-4 * size**2, rel=1e-9)
        # What was added to the momentum that was left, but for the decay; torch does not dampen what comes first.
        taken = 1 - dampening if step > 0 else 1
        added = [
            sign * (m / lr - momentum * seen["momentum_scale"] * b - taken * decay * w)
            for m, b, w in zip(seen["moved"], seen["buffers"], seen["weights"], strict=True)
        ]
        decrease = lr * float(sum((a * g).sum() for a, g in zip(added, seen["grads"], strict=True)))
        if step > 0:  # torch begins with the first direction, undampened
            decrease /= 1 - dampening
        nu = seen["trust_region_scale"]
        free = decrease / nu
        assert nu == pytest.approx(min(max(size, 1), math.sqrt(seen["kl_clip"] / max(lr * free, free**2))), rel=1e-6)
        promised = (1 - dampening) * decrease
        if momentum * slope < -0.25 * promised:
            assert momentum * slope * seen["momentum_scale"] == pytest.approx(-0.25 * promised, rel=1e-6)
        else:
            assert seen["momentum_scale"] == 1
        decayed = (
            sign * lr * decay * float(sum((w * g).sum() for w, g in zip(seen["weights"], seen["grads"], strict=True)))
        )
        # Without momentum the direction alone is kept.
        before = momentum * seen["momentum_scale"] * slope + promised + (1 - dampening) * decayed * (momentum > 0)
        held = nu < max(size, 1) * (1 - 1e-9)
        sizes.add(size)
    assert len(sizes) > 6 or (decay and maximize)  # where decay pulls back, no slope is positive at the start


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_region_that_holds_every_step_does_not_look_at_rates_that_jump(as_tensor: bool) -> None:
    def trained(*rates: float) -> list[Tensor]:
        model = mlp()
        optimizer = KFACOptimizer(model, lr=torch.tensor(1.0) if as_tensor else 1.0, kl_clip=1e-6, **FREQUENT)
        for i in range(20):
            for group in optimizer.param_groups:
                rate = rates[i % len(rates)]
                group["lr"] = torch.tensor(rate, dtype=torch.float64) if as_tensor else rate
            optimizer.zero_grad()
            square_loss(model(batch(i))).backward()
            optimizer.step()
        assert optimizer.metrics()["kl_clip"] != 1e-6
        return clones(model.parameters())

    torch.testing.assert_close(trained(10.0, 1000.0, 30.0), trained(100.0), rtol=1e-8, atol=1e-12)


def test_the_rate_of_parameters_without_a_layer_is_not_looked_at() -> None:
    def trained(*rates: float) -> list[Tensor]:
        model, alone = mlp(), nn.Parameter(torch.zeros(3))
        groups = [{"params": list(model.parameters())}, {"params": [alone]}]
        optimizer = KFACOptimizer(groups, model=model, lr=0.3, kl_clip=1e-4, **FREQUENT)
        for i in range(12):
            optimizer.param_groups[1]["lr"] = rates[i % len(rates)]
            optimizer.zero_grad()
            (square_loss(model(batch(i))) + 0 * alone.sum()).backward()
            optimizer.step()
        return clones(model.parameters())

    torch.testing.assert_close(trained(1.0, 1e-3), trained(1.0), rtol=1e-10, atol=1e-12)


def test_strong_weight_decay_does_not_shrink_the_region() -> None:
    """It makes momentum go uphill step by step, as its slope was at the start: no step went too far."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.tanh(x @ torch.randn(8, 16)) @ torch.randn(16, 2)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    options = {"momentum": 0.9, "weight_decay": 0.05, "loss_terms": LossTerms.ELEMENTS}
    optimizer = KFACOptimizer(model, lr=0.1, **options)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    assert optimizer.metrics()["kl_clip"] > 1e-7
    assert loss < y.var() / 4


def loss_after(scale: float, **options: Any) -> float:
    """A regression's loss in units of its first, where targets are `scale` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(256, 4)
    y = torch.sin(x @ torch.randn(4, 2)) * scale
    optimizer = KFACOptimizer(model, lr=0.1, loss_terms=LossTerms.ELEMENTS, **options)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) <= 1.5 * losses[0]
    return losses[-1] / losses[0]


def test_a_loss_of_any_size_falls_where_the_bound_that_stays_holds_every_step() -> None:
    assert max(loss_after(scale, momentum=0.9) for scale in (0.01, 1.0, 30.0)) < 0.3
    assert loss_after(30.0, momentum=0.9, step_size=TrustRegion()) > 0.9


def test_a_loss_that_is_noise_alone_does_not_shrink_the_region_to_nothing() -> None:
    model = mlp(sizes=(4, 5, 1))
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    for i in range(400):
        optimizer.zero_grad()
        signs = torch.randn(8, 1, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        (model(batch(i)) * signs).mean().backward()
        optimizer.step()
    assert 1e-3 * 1e-4 < optimizer.metrics()["kl_clip"] < 1e-3 * 1e2


def test_targets_that_are_noise_alone_hardly_raise_the_expected_loss() -> None:
    # The loss of a batch says little here: the highest of 2,000 is 1.8 times the first where no weight moves.
    model = mlp(sizes=(4, 16, 16, 2))
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 4, generator=generator, dtype=torch.float64)
    expected = []
    for i in range(400):
        optimizer.zero_grad()
        targets = torch.randn(16, 2, generator=generator, dtype=torch.float64)
        square_loss(model(batch(i, 16)) - targets).backward()
        optimizer.step()
        if i % 10 == 0:
            expected.append(1 + model(inputs).detach().square().mean().item())
    assert max(expected) < 1.25 * expected[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("way", ["checkpoint", "copy", "pickle"])
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(way: str, momentum: float, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "kl_clip": 1e-5, **FREQUENT}
    model = mlp(dtype=dtype)
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 5)
    assert optimizer.metrics()["kl_clip"] != pytest.approx(1e-5, rel=0.1)
    if way == "checkpoint":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin = copy.deepcopy(model)
        resumed = KFACOptimizer(twin, **options)
        resumed.load_state_dict(torch.load(file, weights_only=True))
    elif way == "copy":
        twin, resumed = copy.deepcopy((model, optimizer))
    else:
        twin, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 4, start=5)
    train(twin, resumed, 4, start=5)
    assert_identical(clones(twin.parameters()), clones(model.parameters()))
    assert resumed.metrics()["kl_clip"] == optimizer.metrics()["kl_clip"]


def test_a_checkpoint_that_knows_of_no_region_starts_at_kl_clip() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, kl_clip=1e-5, **FREQUENT)
    train(model, optimizer, 5)
    state = optimizer.state_dict()
    for each in state["state"].values():
        each.get("kfac", {}).pop("step_size", None)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1, start=5)
    assert optimizer.metrics()["kl_clip"] == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), r"a tensor \[3\] of torch.float32, not four floating numbers"),
        (torch.zeros(4, dtype=torch.int64), r"a tensor \[4\] of torch.int64, not four"),
        (1.0, "is 1.0, not four"),
        (torch.tensor([math.nan, 0.0, 0.0, 0.0]), "'step_size' of '0' is not finite"),
    ],
)
def test_a_checkpoint_with_something_else_is_refused_and_nothing_changes(value: Any, message: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, **FREQUENT)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["kfac"]["step_size"] = value
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_identical(snapshot(optimizer), before)


def test_a_step_that_is_not_taken_leaves_the_region_as_it_is() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, **FREQUENT)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    square_loss(model(batch(9))).backward()
    before = snapshot(optimizer)
    next(model.parameters()).grad[0, 0] = math.nan
    optimizer.step()
    assert_identical(snapshot(optimizer), before)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_on_an_accelerator_the_region_has_the_same_size(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made to believe that numbers and gradients are far away, steps end where they end on the host."""
    found = []
    for is_far in (False, True):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.1, momentum=momentum, fused=True, factor_update_period=3)
        train(model, optimizer, 1)
        if is_far:
            monkeypatch.setattr(scalars, "__code__", (lambda values: list(values.unbind())).__code__)
            monkeypatch.setattr(gate, "fused_kernels_look", lambda *_: True)
        train(model, optimizer, 5, start=1)
        found.append(snapshot(optimizer))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def kept(optimizer: KFACOptimizer) -> list[Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]


@pytest.mark.parametrize(
    ("options", "keeps"),
    [({}, True), ({"kl_clip": None}, False), ({"step_size": TrustRegion()}, False), ({"skip_layers": ["*"]}, False)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:kfac_optim. nothing is preconditioned")
def test_without_momentum_a_direction_is_kept_where_the_region_needs_it(options: dict[str, Any], keeps: bool) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, **options)
    train(model, optimizer, 2)
    assert len(kept(optimizer)) == (4 if keeps else 0)


def test_momentum_that_is_switched_on_later_begins_with_the_last_direction() -> None:
    model, twin = mlp(), mlp()
    ours = KFACOptimizer(model, lr=0.1, kl_clip=1e6, **FREQUENT)
    theirs = KFACOptimizer(twin, lr=0.1, kl_clip=1e6, momentum=0.9, **FREQUENT)
    train(model, ours, 1)
    train(twin, theirs, 1)
    ours.param_groups[0]["momentum"] = 0.9
    train(model, ours, 2, start=1)
    train(twin, theirs, 2, start=1)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


class Heads(nn.Module):
    """Uses each head in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(5, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, step: int) -> Tensor:
        output: Tensor = self.heads[step % 2](self.trunk(x).tanh())
        return output


def test_a_head_without_a_gradient_has_moved_by_nothing() -> None:
    found = []
    for to_none in (True, False):
        model = Heads()
        optimizer = KFACOptimizer(model, lr=0.1, **FREQUENT)
        for step in range(12):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad(set_to_none=to_none)
            (model(x, step) - 1).square().sum(1).mean().backward()
            optimizer.step()
        found.append(clones(model.parameters()))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def warned(optimizer: KFACOptimizer, model: nn.Module, steps: int, scale: float = 1e4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            optimizer.zero_grad()
            (square_loss(model(batch(i)) - 1) * scale).backward()
            optimizer.step()
    return [f"{warning.filename == __file__} {warning.message}" for warning in caught]


def test_a_region_that_stays_and_makes_a_hundred_steps_too_short_is_warned_of_once() -> None:
    model = mlp()
    (found,) = warned(KFACOptimizer(model, lr=0.1, momentum=0.9, step_size=TrustRegion()), model, 230)
    assert found.startswith("True kfac_optim: TrustRegion() made nearly all of the last hundred")
    assert "default" in found


@pytest.mark.parametrize(
    "options", [{}, {"step_size": AdaptiveTrustRegion()}, {"step_size": TrustRegion(), "kl_clip": 1e9}], ids=str
)
def test_a_region_that_suits_the_loss_is_not_warned_of(options: dict[str, Any]) -> None:
    model = mlp()
    assert warned(KFACOptimizer(model, lr=0.01, momentum=0.9, **options), model, 230) == []


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_an_ordinary_rate_is_not_warned_of_although_the_region_holds_most_steps(lr: float, scale: float) -> None:
    model = mlp()
    assert warned(KFACOptimizer(model, lr=lr, momentum=0.9), model, 230, scale) == []


def test_a_rate_without_effect_is_warned_of_once_and_divided_as_told_it_is_not() -> None:
    model = mlp()
    (found,) = warned(KFACOptimizer(model, lr=1e5, momentum=0.9), model, 330, 1.0)
    assert found.startswith("True kfac_optim: AdaptiveTrustRegion() made nearly all of the last hundred steps shorter")
    told = re.search(r"Divide the learning rate by about (\S+);", found)
    assert told is not None
    model = mlp()
    assert warned(KFACOptimizer(model, lr=1e5 / float(told[1]), momentum=0.9), model, 330, 1.0) == []


@pytest.mark.parametrize(
    ("size", "scale", "idle"),
    [(1.0, 2e-3, False), (1.0, 5e-4, True), (0.01, 5e-4, False), (0.01, 5e-6, True), (1e4, 0.1, False)],
)
def test_a_region_that_noise_has_shrunk_or_the_loss_has_grown_tells_nothing_of_the_rate(
    size: float, scale: float, idle: bool
) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=1.0, momentum=0.9, **FREQUENT)

    def step_with(lr: float) -> tuple[float, float]:
        """Take a step from the same weights with a region of this size, and give its scale and the share."""
        twin, ours = copy.deepcopy((model, optimizer))
        ours.param_groups[0]["lr"] = lr
        ours._memory.put(torch.tensor([math.log(size), 0.0, 0.0, 0.0], dtype=torch.float64))
        train(twin, ours, 1, start=3)
        return ours.metrics()["trust_region_scale"], float(ours._memory.get([], [])[3])

    train(model, optimizer, 3)
    first = 1e9
    found, share = step_with(first * step_with(first)[0] / scale)  # what is held is inverse to the rate
    assert found == pytest.approx(scale, rel=0.1)
    assert (share > 0) == idle


def test_a_region_that_cannot_grow_enough_is_warned_of_and_not_once_kl_clip_is_raised() -> None:
    for kl_clip, count in ((1e-60, 1), (1e-3, 0)):
        model = mlp()
        found = warned(KFACOptimizer(model, lr=0.1, momentum=0.9, kl_clip=kl_clip), model, 230)
        assert ["raise kl_clip" in each for each in found] == [True] * count


def test_the_default_is_the_region_that_adapts() -> None:
    assert KFACOptimizer(mlp(), lr=0.1)._choices.step_size == AdaptiveTrustRegion() != QuadraticModel()


def test_the_damping_is_in_the_unit_of_the_loss_where_the_region_has_grown() -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model, lr=0.1, momentum=0.9, damping=0.02, l2_in_curvature=True, weight_decay=0.3, **FREQUENT
    )
    sizes = [1.0]
    for seen in steps_of(optimizer, model, 6, 1e3):
        assert seen["damping"] == pytest.approx(0.02 * sizes[-1], rel=1e-9)  # of the region that the step before left
        sizes.append(max(1.0, math.sqrt(seen["kl_clip"] / 1e-3)))
    assert max(sizes) > 2
    for each in optimizer._binding.coverage.blocks:
        assert each.damping == pytest.approx(0.02 * sizes[-2] + 0.3, rel=1e-9)


def test_a_bound_that_stays_leaves_the_damping_as_it_is() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, damping=0.02, step_size=TrustRegion(), **FREQUENT)
    assert {seen["damping"] for seen in steps_of(optimizer, model, 6, 1e3)} == {0.02}


@pytest.mark.parametrize("end", ["kl_clip", "LevenbergMarquardt"])
def test_the_unit_of_the_loss_leaves_the_damping_with_the_region_that_found_it(end: str) -> None:
    model, criterion = mlp(), nn.MSELoss()

    def build(**options: Any) -> KFACOptimizer:
        return KFACOptimizer(model, lr=1e-6, estimate=ExactGGN(criterion), **FREQUENT, **options)

    def step(optimizer: KFACOptimizer) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = criterion(model(batch()), torch.zeros(8, 3))
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        return block(optimizer, "0").damping / optimizer.param_groups[0]["damping"]

    optimizer = build()
    step(optimizer)
    optimizer._memory.put(torch.tensor([math.log(1000.0), 0.0, 0.0, 0.0], dtype=torch.float64))
    assert step(optimizer) == pytest.approx(1000.0, rel=0.5)
    if end == "kl_clip":
        optimizer.param_groups[0]["kl_clip"] = None
    else:
        before, optimizer = optimizer, build(adapt_damping=LevenbergMarquardt())
        optimizer.load_state_dict(before.state_dict())
    assert step(optimizer) == 1.0
