"""Damping that follows the reduction ratio, and steps that are taken back."""

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from helpers.plain import FREQUENT
from torch import Tensor, nn

from kfac_optim import (
    Background,
    Eigen,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    MonteCarlo,
    QuadraticModel,
    SampleSpace,
    TrustRegion,
)
from kfac_optim.step.step_size import StepSize

pytestmark = pytest.mark.usefixtures("float64")


def data(n: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 4, generator=generator), torch.randn(n, 3, generator=generator)


def network(*, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(5)] if batch_norm else []
    return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def build(model: nn.Module, rule: LevenbergMarquardt | None, **options: Any) -> KFACOptimizer:
    chosen = {"lr": 0.3, "momentum": 0.9, "damping": 0.5, "estimate": ExactGGN(nn.MSELoss()), **FREQUENT, **options}
    return KFACOptimizer(model, adapt_damping=rule, **chosen)


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    x, y = data()
    return F.mse_loss(model(x[part]), y[part])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice = slice(None)) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
        return loss.detach()

    return optimizer.step(closure)


STEP_SIZES: dict[str, StepSize] = {
    "trust region": TrustRegion(),
    "quadratic model": QuadraticModel(),
}
step_sizes = pytest.mark.parametrize("step_size", STEP_SIZES.values(), ids=STEP_SIZES)


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        *((1.0, 0.95**3), (0.76, 0.95**3), (0.75, 1.0), (0.5, 1.0), (0.25, 1.0), (0.24, 0.95**-3), (-2.0, 0.95**-3)),
        *((math.inf, 0.95**3), (-math.inf, 0.95**-3), (math.nan, 0.95**-3), (None, 1.0)),
    ],
)
def test_damping_falls_where_the_model_is_right_and_rises_where_it_is_wrong(ratio: float | None, factor: float) -> None:
    assert LevenbergMarquardt(interval=3).adapted(2.0, ratio) == pytest.approx(2.0 * factor, rel=1e-14)


def test_damping_stays_between_its_bounds() -> None:
    rule = LevenbergMarquardt(interval=100, minimum=0.1, maximum=10.0)
    assert rule.adapted(0.2, 1.0) == 0.1
    assert rule.adapted(2.0, 0.0) == 10.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval of LevenbergMarquardt must be at least 1"),
        ({"decay": 0.0}, "decay of LevenbergMarquardt"),
        ({"decay": 1.5}, "decay of LevenbergMarquardt"),
        ({"decay": 0.5, "interval": 2000}, r"decay \*\* interval of LevenbergMarquardt must be finite, above 0"),
        ({"minimum": 0.0}, "minimum of LevenbergMarquardt"),
        ({"minimum": 2.0, "maximum": 1.0}, "maximum of LevenbergMarquardt must be finite, at least 2"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LevenbergMarquardt(**options)


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="reject of LevenbergMarquardt must be True or False, got None"):
        LevenbergMarquardt(reject=None)  # type: ignore[arg-type]


def test_an_estimate_that_does_not_name_the_loss_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LevenbergMarquardt\(.*needs the curvature of the loss"):
        KFACOptimizer(linear(), adapt_damping=LevenbergMarquardt())
    with pytest.raises(TypeError, match="adapt_damping must be a LevenbergMarquardt"):
        KFACOptimizer(linear(), adapt_damping=0.95)


# -- the ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.2, "l2_in_curvature": True}], ids=["bare", "l2"])
@step_sizes
def test_on_a_quadratic_loss_the_ratio_is_one_and_damping_falls(step_size: StepSize, options: dict[str, Any]) -> None:
    model = linear()
    optimizer = build(model, LevenbergMarquardt(interval=1), step_size=step_size, **options)
    for i in range(1, 6):
        step(model, optimizer)
        assert optimizer.metrics()["reduction_ratio"] == pytest.approx(1, rel=1e-8)
        assert optimizer.param_groups[0]["damping"] == pytest.approx(0.5 * 0.95**i)


def test_with_dropout_the_ratio_is_that_of_the_mask_that_was_drawn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    optimizer = build(model, LevenbergMarquardt(interval=1))
    for _ in range(4):
        step(model, optimizer)
        assert optimizer.metrics()["reduction_ratio"] == pytest.approx(1, rel=1e-8)


@step_sizes
def test_the_ratio_of_a_network_is_that_of_its_dense_model(step_size: StepSize) -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=1), step_size=step_size, weight_decay=0.0)
    x, y = data()
    for _ in range(3):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(before)
        flat = torch.cat([part.reshape(y.numel(), -1) for part in jacobian.values()], dim=1)
        old = float(F.mse_loss(model(x), y).detach())
        step(model, optimizer)
        moved = torch.cat([(param.detach() - before[name]).flatten() for name, param in model.named_parameters()])
        gradient = torch.cat([param.grad.flatten() for param in model.parameters()])
        predicted = gradient @ moved + (flat @ moved).square().sum() / y.numel()
        actual = float(F.mse_loss(model(x), y).detach()) - old
        assert optimizer.metrics()["reduction_ratio"] == pytest.approx(actual / float(predicted), rel=1e-8)


def test_under_autocast_around_the_step_the_loss_is_evaluated_where_the_step_has_led() -> None:
    x, y = (each.float() for each in data())
    cast, ratios = partial(torch.autocast, "cpu", dtype=torch.bfloat16), []
    for around in (True, False):
        model = network().float()
        optimizer = build(model, LevenbergMarquardt(interval=1))

        def closure(model: nn.Module = model, optimizer: KFACOptimizer = optimizer, around: bool = around) -> Tensor:
            optimizer.zero_grad()
            with nullcontext() if around else cast():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            return loss.detach()

        with cast() if around else nullcontext():
            optimizer.step(closure)
        ratios.append(optimizer.metrics()["reduction_ratio"])
    assert ratios[0] == pytest.approx(ratios[1])


def test_damping_is_adapted_once_in_an_interval() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=3))
    seen = []
    for _ in range(7):
        step(model, optimizer)
        seen.append(optimizer.param_groups[0]["damping"])
    assert seen[0] == seen[1] == 0.5
    assert seen[2] == seen[3] == seen[4] == pytest.approx(0.5 * 0.95**3)
    assert seen[5] == seen[6] == pytest.approx(0.5 * 0.95**6)


def test_with_the_default_periods_the_inverses_keep_up() -> None:
    """0.95⁴⁰ is 0.13: λ is halved twice between steps 20 and 60, where by the periods one refresh is due."""
    model = network()
    options: dict[str, Any] = {"estimate": ExactGGN(nn.MSELoss()), "step_size": TrustRegion()}
    optimizer = KFACOptimizer(model, lr=0.3, damping=0.5, adapt_damping=LevenbergMarquardt(interval=1), **options)
    for _ in range(60):
        step(model, optimizer)
        applied = [block.clock.damping for block in optimizer._binding.coverage.blocks]
        judged = optimizer.param_groups[0]["damping"] / 0.95
        assert applied == pytest.approx([judged] * len(applied), rel=1.0 + 1e-9)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.5 * 0.95**60)


def test_each_param_group_keeps_its_share_and_the_preconditioner_its_own_damping() -> None:
    model = network()
    first, last = model[0], model[-1]
    groups = [{"params": list(first.parameters()), "damping": 2.0}, {"params": list(last.parameters())}]
    optimizer = KFACOptimizer(
        groups,
        lr=0.3,
        model=model,
        damping=0.5,
        preconditioner_damping=0.7,
        estimate=ExactGGN(nn.MSELoss()),
        step_size=QuadraticModel(),
        adapt_damping=LevenbergMarquardt(interval=1),
    )
    step(model, optimizer)
    assert [group["damping"] for group in optimizer.param_groups] == pytest.approx([2.0 * 0.95, 0.5 * 0.95])
    assert all(group["preconditioner_damping"] == 0.7 for group in optimizer.param_groups)


def test_a_step_that_overflows_the_loss_raises_the_damping() -> None:
    class Steep(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).pow(2).exp()

    torch.manual_seed(0)
    model = Steep(4, 3)
    optimizer = build(model, LevenbergMarquardt(interval=1), lr=1e6, kl_clip=None, damping=1.0)
    step(model, optimizer)
    assert optimizer.metrics()["reduction_ratio"] == -math.inf
    assert optimizer.param_groups[0]["damping"] == pytest.approx(1 / 0.95)


# -- no trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimate", [MonteCarlo, ExactGGN])
def test_judging_a_step_leaves_no_trace_but_the_damping(estimate: Any) -> None:
    """Steps, statistics, buffers, gradients and random numbers are those of a run that judges nothing."""
    ends = []
    for rule in (None, LevenbergMarquardt(interval=1, decay=1.0)):
        model = network(batch_norm=True, dropout=0.3)
        optimizer = build(model, rule, estimate=estimate(nn.MSELoss()), step_size=TrustRegion())
        torch.manual_seed(5)
        for _ in range(4):
            step(model, optimizer)
        factors = [f for pair in optimizer.factors().values() for f in pair if f is not None]
        grads = [param.grad for param in model.parameters()]
        ends.append([*model.state_dict().values(), *factors, *grads, torch.rand(3)])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


def test_a_buffer_that_a_forward_replaces_is_that_of_the_training() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("forwards", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x: Tensor) -> Tensor:
            self.forwards = self.forwards + 1
            self.last = x.mean()
            return super().forward(x)

    model = Counts()
    optimizer = build(model, LevenbergMarquardt(interval=1))
    for _ in range(3):
        step(model, optimizer)
    assert model.forwards == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_gradients_are_those_before_the_step(set_to_none: bool) -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=1))
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model)
        loss.backward()
        seen.append([param.grad.clone() for param in model.parameters()])
        return loss

    for _ in range(2):
        seen.clear()
        optimizer.step(closure)
        assert len(seen) == 2
        assert all(torch.equal(old, param.grad) for old, param in zip(seen[0], model.parameters(), strict=True))
        assert not all(torch.equal(old, new) for old, new in zip(*seen, strict=True))


def test_a_closure_that_states_the_loss_terms_states_them_once() -> None:
    model, twin = network(), network()
    rules = (LevenbergMarquardt(interval=1, decay=1.0), None)
    ours, theirs = (build(m, r, step_size=TrustRegion()) for m, r in zip((model, twin), rules, strict=True))

    def run(model: nn.Module, optimizer: KFACOptimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            optimizer.set_loss_terms(60)
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)

    for _ in range(3):
        run(model, ours)
        run(twin, theirs)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# -- closures that will not do -----------------------------------------------------------------------------------------


def test_a_step_without_a_closure_is_refused() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=5))
    loss_of(model).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"pass step\(\) a closure"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_loss_that_is_maximised_is_refused_before_it_is_evaluated() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=5, reject=True), maximize=True)
    with pytest.raises(ValueError, match="maximize of param group 0 must be False, got True"):
        optimizer.step(lambda: pytest.fail("the closure was called"))


def test_a_closure_that_returns_nothing_is_refused() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="the closure returned None"):
        optimizer.step(lambda: loss_of(model).backward())
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_closure_that_draws_another_batch_is_told_of() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=1))
    parts = iter([slice(0, 10), slice(10, 20)])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, next(parts))
        loss.backward()
        return loss

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="the model was called with other inputs than the first time"):
        optimizer.step(closure)
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_the_step_has_made_of_its_inputs_is_no_other_batch() -> None:
    """Of two modules in a row the second is called with what the first returns."""
    found = []
    for is_one in (True, False):
        torch.manual_seed(0)
        encoder, decoder, criterion = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3), nn.MSELoss()
        whole, (x, y) = nn.Sequential(encoder, decoder), data()
        options = {"estimate": ExactGGN(criterion), "adapt_damping": LevenbergMarquardt(interval=1), **FREQUENT}
        trained = whole if is_one else list(whole.parameters())
        optimizer = KFACOptimizer(trained, lr=1.0, step_size=QuadraticModel(), **options)

        def closure(
            optimizer: KFACOptimizer = optimizer,
            run: Callable[[Tensor], Tensor] = whole if is_one else lambda x, e=encoder, d=decoder: d(e(x)),
            criterion: nn.Module = criterion,
            x: Tensor = x,
            y: Tensor = y,
        ) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = criterion(run(x), y)
            loss.backward()
            return loss.detach()

        for _ in range(2):
            optimizer.step(closure)
        found.append([torch.tensor(optimizer.metrics()["reduction_ratio"]), *whole.parameters()])
    assert_same(found[1], found[0])


def test_missing_data_marked_by_nan_are_the_same_data() -> None:
    class Filled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.nan_to_num())

    torch.manual_seed(0)
    model = Filled(4, 3)
    optimizer = build(model, LevenbergMarquardt(interval=1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = data()
        x[::3, 1] = math.nan
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.metrics()["reduction_ratio"] == pytest.approx(1, rel=1e-8)


def test_steps_are_counted_where_every_layer_is_skipped() -> None:
    model = linear()
    optimizer = build(model, LevenbergMarquardt(interval=3), skip_layers=["*"], step_size=QuadraticModel())
    seen = []
    for _ in range(6):
        step(model, optimizer)
        seen.append(optimizer.param_groups[0]["damping"])
    assert seen == pytest.approx([0.5] * 2 + [0.5 * 0.95**3] * 3 + [0.5 * 0.95**6])


@pytest.mark.parametrize("rule", [LevenbergMarquardt(interval=1), LevenbergMarquardt(interval=5, reject=True)])
def test_a_forward_that_was_not_seen_is_told_of_before_the_step(rule: LevenbergMarquardt) -> None:
    model = network()
    optimizer = build(model, rule)
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        optimizer.set_loss_terms(60)
        h = x
        for layer in model:
            h = layer(h)
        loss = F.mse_loss(h, y)
        loss.backward()
        return loss

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="no forward of the model with a backward was seen"):
        optimizer.step(closure)
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_closure_without_gradients_is_a_step_of_nothing() -> None:
    model = network()
    optimizer = build(model, LevenbergMarquardt(interval=1))
    optimizer.step(lambda: loss_of(model))
    assert optimizer.param_groups[0]["damping"] == 0.5


# -- rejection -------------------------------------------------------------------------------------------------------


@step_sizes
def test_steps_that_lower_the_loss_are_those_of_a_run_without_rejection(step_size: StepSize) -> None:
    ends = []
    for reject in (False, True):
        model = linear()
        optimizer = build(model, LevenbergMarquardt(interval=2, reject=reject), step_size=step_size)
        for _ in range(5):
            step(model, optimizer)
        assert optimizer.metrics()["rejected_steps"] == 0
        ends.append([*model.state_dict().values(), torch.tensor(optimizer.param_groups[0]["damping"])])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


@pytest.mark.parametrize("extra", [{}, {"inverse": Eigen()}, {"refresh": Background()}], ids=str)
def test_a_step_that_raises_the_loss_is_taken_back(extra: dict[str, Any]) -> None:
    """Whatever the interval; momentum starts anew, and the inverses take the new damping with the next step."""
    model = linear()
    optimizer = build(
        model,
        LevenbergMarquardt(interval=4, reject=True),
        kl_clip=None,
        lr=0.5,
        factor_update_period=100,
        inverse_update_period=100,
        **extra,
    )
    step(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    ages = optimizer.metrics()["inverse_age"]
    optimizer.param_groups[0]["lr"] = 1e4
    step(model, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))
    assert optimizer.metrics()["rejected_steps"] == 1
    assert optimizer.metrics()["reduction_ratio"] == -math.inf
    assert optimizer.metrics()["inverse_age"] == ages + 1
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.5 * 0.95**-4)
    assert all("momentum_buffer" not in state for state in optimizer.state.values())
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    assert optimizer.metrics()["inverse_age"] == 0
    step(model, optimizer)
    assert optimizer.metrics()["inverse_age"] == 1
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_rejection_brings_a_hopeless_start_to_convergence() -> None:
    model = network()
    first = float(loss_of(model).detach())
    options: dict[str, Any] = {"kl_clip": None, "lr": 1.0, "momentum": 0.0, "damping": 1e-8, "estimate": None}
    options["estimate"] = MonteCarlo(nn.MSELoss())
    optimizer = build(model, LevenbergMarquardt(interval=5, decay=0.8, reject=True), **options)
    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert max(losses) <= first * (1 + 1e-12)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(losses))
    assert optimizer.metrics()["rejected_steps"] > 0
    assert losses[-1] < first / 2


def test_a_run_with_rejections_is_resumed_at_any_step() -> None:
    """A step may be rejected while a refresh is under way, which is then not the one that the rejection asks for."""

    def start() -> tuple[nn.Module, KFACOptimizer]:
        model = network()
        rule = LevenbergMarquardt(interval=2, reject=True)
        refresh = Background(max_staleness=2, deterministic=True)
        options = {"step_size": QuadraticModel(), "damping": 0.01, "inverse_update_period": 3, "refresh": refresh}
        return model, build(model, rule, **options)

    def run(model: nn.Module, optimizer: KFACOptimizer, steps: range) -> None:
        for i in steps:
            step(model, optimizer, slice(3 * (i % 6), 3 * (i % 6) + 3))

    model, optimizer = start()
    run(model, optimizer, range(12))
    assert 0 < optimizer.metrics()["rejected_steps"] < 12
    for saved_at in range(1, 12):
        first, (second, resumed) = start(), start()
        run(*first, range(saved_at))
        second.load_state_dict(first[0].state_dict())
        resumed.load_state_dict(copy.deepcopy(first[1].state_dict()))
        run(second, resumed, range(saved_at, 12))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True)), saved_at


def test_the_count_of_rejected_steps_survives_a_copy() -> None:
    model = linear()
    optimizer = build(model, LevenbergMarquardt(interval=4, reject=True), kl_clip=None, lr=1e5)
    step(model, optimizer)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.metrics()["rejected_steps"] == optimizer.metrics()["rejected_steps"] == 1
    step(twin_model, twin)
    assert twin.metrics()["rejected_steps"] == 2


def test_the_momentum_of_an_inverse_starts_from_zero_behind_a_step_that_is_taken_back() -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = KFACOptimizer(
        model,
        lr=100.0,  # which raises the loss
        estimate=ExactGGN(criterion),
        inverse=SampleSpace(momentum=0.9),
        adapt_damping=LevenbergMarquardt(interval=1, reject=True),
    )
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(x), y)
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert optimizer.metrics()["rejected_steps"] == 1
    assert not any(bool(block.state.direction.any()) for block in optimizer._binding.coverage.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_that_the_dtype_of_the_model_rounds_away_says_nothing(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    optimizer = build(model, LevenbergMarquardt(interval=1), lr=1e-3, momentum=0.0, kl_clip=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = data()
        loss = F.mse_loss(model(x.to(dtype)), y.to(dtype))
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    damping = optimizer.param_groups[0]["damping"]
    assert damping == (0.5 if dtype is torch.bfloat16 else pytest.approx(0.5 * 0.95))


def test_what_it_cannot_judge_is_refused_before_the_step() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(RuntimeError, match=r"torch.sparse_coo gradient; LevenbergMarquardt needs dense ones"):
        refused(nn.Sequential(embedding, nn.Linear(3, 3)), torch.tensor([1, 2]), skip_layers=[nn.Embedding])
    model = nn.Sequential(linear(), Turned())
    with pytest.raises(RuntimeError, match=r"\[3\] of param group 0 is torch.complex128; LevenbergMarquardt"):
        refused(model, torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"preconditioner_damping in its place \(0.1 in the param groups\)"):
        refused(linear(), torch.randn(2, 4), preconditioner_damping=0.1)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.turn.abs()


def refused(model: nn.Module, x: Tensor, **options: Any) -> None:
    criterion = nn.MSELoss()
    options = {"estimate": ExactGGN(criterion), "adapt_damping": LevenbergMarquardt(interval=1), **options}
    optimizer = KFACOptimizer(model, lr=0.1, **options)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(x), torch.zeros(2, 3))
        loss.backward()
        return loss.detach()

    try:
        optimizer.step(closure)
    finally:
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_the_ratio_is_1_where_the_loss_is_quadratic_whatever_multiplies_the_criterion(zero: str) -> None:
    model, criterion, (x, y) = linear(), nn.MSELoss(), data()
    options = {"step_size": TrustRegion(), "estimate": ExactGGN(criterion)}
    optimizer = build(model, LevenbergMarquardt(interval=1), **options)

    def closure() -> Tensor:
        (optimizer if zero == "optimizer" else model).zero_grad()
        loss = 10 * criterion(model(x), y)
        loss.backward()
        return loss.detach()

    for _ in range(3):
        optimizer.step(closure)
        assert optimizer.metrics()["reduction_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["LineSearch", "LevenbergMarquardt"])
def test_without_a_module_to_call_again_the_step_is_refused_and_nothing_moves(name: str) -> None:
    param, criterion = nn.Parameter(torch.ones(3)), nn.MSELoss()
    named: dict[str, Any] = {"step_size": LineSearch()}
    if name == "LevenbergMarquardt":
        named = {"step_size": QuadraticModel(), "estimate": ExactGGN(criterion), "adapt_damping": LevenbergMarquardt(1)}
    optimizer = KFACOptimizer([param], lr=0.1, **named)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(param * 2, torch.zeros(3))
        loss.backward()
        return loss.detach()

    with pytest.raises(RuntimeError, match=rf"{name}.* evaluates the closure again, .*Pass the model"):
        optimizer.step(closure)
    assert param.tolist() == [1.0, 1.0, 1.0]
