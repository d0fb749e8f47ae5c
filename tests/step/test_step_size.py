"""How far a step goes: the exact quadratic model and the fixed trust region, against dense mathematics."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from helpers.plain import FREQUENT, batch, mlp, square_loss
from torch import Tensor, nn

from kfac_optim import ExactGGN, KFACOptimizer, LevenbergMarquardt, LossTerms, MonteCarlo, QuadraticModel, TrustRegion
from kfac_optim.step.step_size import StepSize

pytestmark = pytest.mark.usefixtures("float64")

SQUARES = nn.MSELoss()


def regression(layers: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """A model whose loss is quadratic, with one layer, and its examples."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 3)
    if layers > 1:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.randn(20, 4), torch.randn(20, 3)


def build(params: Any, step_size: StepSize | None = None, **options: Any) -> KFACOptimizer:
    chosen = {"lr": 1.0, "momentum": 0.9, "damping": 0.1, "estimate": ExactGGN(SQUARES), **FREQUENT, **options}
    return KFACOptimizer(params, step_size=step_size or QuadraticModel(), **chosen)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def objective(model: nn.Module, x: Tensor, y: Tensor, eta: float) -> Callable[[Tensor], Tensor]:
    """`h` of the flattened parameters."""
    shapes = {name: param.shape for name, param in model.named_parameters()}

    def h(point: Tensor) -> Tensor:
        parts = torch.split(point, [shape.numel() for shape in shapes.values()])
        state = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, state, (x,)), y) + eta / 2 * point.square().sum()

    return h


@pytest.mark.parametrize("eta", [0.0, 0.3])
@pytest.mark.parametrize("rates", [(1.0, 1.0), (0.01, 3.0)], ids=["one rate", "weight and bias apart"])
def test_rate_and_momentum_are_those_that_minimise_the_damped_loss(eta: float, rates: tuple[float, float]) -> None:
    """The loss is quadratic, so that autograd of the loss itself says whether a point of the plane is its minimum."""
    model, x, y = regression()
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
    optimizer = build(groups, model=model, weight_decay=eta, l2_in_curvature=True)
    before_last = None
    for _ in range(4):
        start = flat(model.parameters())
        backward(model, optimizer, x, y)
        optimizer.step()
        step = flat(model.parameters()) - start
        measures = optimizer.metrics()
        # The directions, told apart by what the optimizer says of its rate and momentum.
        carried = torch.zeros_like(step) if before_last is None else before_last
        direction = (step - measures["momentum"] * carried) / measures["learning_rate"]
        weights = torch.tensor([measures["learning_rate"], measures["momentum"]], requires_grad=True)
        moved = weights[0] * direction + weights[1] * carried
        value = objective(model, x, y, eta)(start + moved) + 0.1 / 2 * moved.square().sum()
        (slope,) = torch.autograd.grad(value, weights)
        scale = torch.stack([direction.norm(), carried.norm().clamp(min=1e-12)])
        assert (slope / scale).abs().max() < 1e-9
        before_last = step
    assert measures["momentum"] != 0


def test_the_predicted_change_is_what_the_quadratic_loss_does() -> None:
    model, x, y = regression()
    optimizer = build(model, weight_decay=0.2, l2_in_curvature=True)
    h = objective(model, x, y, 0.2)
    for _ in range(3):
        before = float(h(flat(model.parameters())))
        backward(model, optimizer, x, y)
        optimizer.step()
        assert optimizer.metrics()["predicted_change"] == pytest.approx(
            float(h(flat(model.parameters()))) - before, rel=1e-9
        )


def test_without_momentum_there_is_a_rate_alone() -> None:
    model, x, y = regression()
    optimizer = build(model, momentum=0.0)
    for _ in range(3):
        start = flat(model.parameters())
        backward(model, optimizer, x, y)
        optimizer.step()
        assert optimizer.metrics()["momentum"] == 0
        assert all("momentum_buffer" not in state for state in optimizer.state.values())
        assert not torch.equal(start, flat(model.parameters()))


def test_a_common_learning_rate_has_no_effect_and_zero_stands_still() -> None:
    ends = []
    for lr in (1.0, torch.tensor(0.125), 0.0):
        model, x, y = regression(layers=2)
        start = flat(model.parameters())
        optimizer = build(model, lr=lr)
        for _ in range(3):
            backward(model, optimizer, x, y)
            optimizer.step()
        ends.append(flat(model.parameters()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    assert torch.equal(ends[2], start)


def test_on_a_quadratic_loss_the_exact_model_is_done_in_a_few_steps() -> None:
    model, x, y = regression()
    optimizer = build(model, damping=1e-9)
    for _ in range(4):
        backward(model, optimizer, x, y)
        optimizer.step()
    design = F.pad(x, (0, 1), value=1.0)
    best = torch.linalg.lstsq(design, y).solution
    torch.testing.assert_close(torch.cat([model.weight, model.bias[:, None]], dim=1), best.T, rtol=1e-6, atol=1e-8)


def test_parameters_that_no_layer_covers_go_along_their_gradient() -> None:
    model, x, y = regression(layers=2)
    optimizer = build(model, skip_layers=["0"], momentum=0.0)
    before = copy.deepcopy(model.state_dict())
    backward(model, optimizer, x, y)
    optimizer.step()
    moved = before["0.weight"] - model[0].weight.detach()
    assert_same(moved, model[0].weight.grad * optimizer.metrics()["learning_rate"], rtol=1e-9)


def test_a_scalar_parameter_takes_a_rate_that_is_a_tensor() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    _, x, y = regression()
    ends = []
    for lr in (0.5, torch.tensor([0.5])):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = build(model, lr=lr)
        backward(model, optimizer, x, y)
        optimizer.step()
        ends.append(flat(model.parameters()))
    assert torch.equal(*ends)


def test_with_every_layer_skipped_the_model_still_chooses_the_rate() -> None:
    model, x, y = regression()
    optimizer = build(model, skip_layers=["*"], momentum=0.0)
    gradient_of = objective(model, x, y, 0.0)
    start = flat(model.parameters())
    backward(model, optimizer, x, y)
    optimizer.step()
    gradient = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    rate = torch.tensor(optimizer.metrics()["learning_rate"], requires_grad=True)
    value = gradient_of(start - rate * gradient) + 0.1 / 2 * (rate * gradient).square().sum()
    (slope,) = torch.autograd.grad(value, rate)
    assert abs(float(slope)) < 1e-9
    assert_same(start - flat(model.parameters()), gradient * rate.detach(), rtol=1e-12)


@pytest.mark.parametrize(
    "loop",
    ["closure", "micro-batches", "ordinary"],
)
def test_every_loop_takes_the_same_steps(loop: str) -> None:
    reference, x, y = regression(layers=2)
    model = copy.deepcopy(reference)
    theirs, ours = build(reference), build(model)
    for _ in range(3):
        backward(reference, theirs, x, y)
        theirs.step()
        if loop == "closure":
            ours.step(lambda: backward(model, ours, x, y))
        else:
            ours.zero_grad()
            for part in (slice(0, 10), slice(10, 20)) if loop == "micro-batches" else (slice(None),):
                share = len(x[part]) / len(x)
                (F.mse_loss(model(x[part]), y[part]) * share).backward()
            ours.step()
        for left, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_a_summed_loss_takes_the_steps_of_the_mean_with_everything_scaled() -> None:
    """`h`, `C` and `λ` are M times as large: the minimum is the same."""
    mean, x, y = regression(layers=2)
    summed = copy.deepcopy(mean)
    terms = y.numel()
    theirs = build(mean)
    ours = build(summed, estimate=ExactGGN(nn.MSELoss(reduction="sum")), damping=0.1 * terms)
    for _ in range(3):
        backward(mean, theirs, x, y)
        theirs.step()
        ours.zero_grad()
        F.mse_loss(summed(x), y, reduction="sum").backward()
        ours.step()
    for left, right in zip(summed.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nesterov": True}, "nesterov of param group 0 must be False, got True"),
        ({"dampening": 0.5}, "dampening of param group 0 must be 0, got 0.5"),
        ({"maximize": True}, "maximize of param group 0 must be False"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 of param group 0 is no part of the loss"),
    ],
)
def test_numbers_that_do_not_go_with_the_model_are_refused_before_anything_changes(
    options: dict[str, Any], message: str
) -> None:
    model, x, y = regression()
    optimizer = build(model, **options)
    before = flat(model.parameters())
    backward(model, optimizer, x, y)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(before, flat(model.parameters()))
    assert optimizer.metrics()["blocks_without_statistics"] == 1


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    optimizer = build(model)
    before = flat(model.parameters())
    F.mse_loss(model(torch.arange(4).view(2, 2)), torch.ones(2, 3)).backward()
    with pytest.raises(RuntimeError, match=r"parameter \[5, 3\] of param group 0 has a torch.sparse_coo gradient"):
        optimizer.step()
    assert torch.equal(before, flat(model.parameters()))


def test_gradients_and_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    twin = copy.deepcopy(model)
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    optimizer, sgd = build(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    torch.manual_seed(1)
    backward(model, optimizer, x, y)
    optimizer.step()
    after = torch.rand(3)
    torch.manual_seed(1)
    backward(twin, sgd, x, y)
    assert torch.equal(after, torch.rand(3))
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    for left, right in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(left, right)


def test_a_resumed_run_takes_the_same_steps() -> None:
    model, x, y = regression(layers=2)
    options: dict[str, Any] = {
        "estimate": MonteCarlo(SQUARES),
        "factor_update_period": 2,
        "inverse_update_period": 3,
        "weight_decay": 1e-3,
        "l2_in_curvature": True,
        "adapt_damping": LevenbergMarquardt(interval=2, reject=True),
    }
    optimizer = build(model, **options)

    def run(model: nn.Module, optimizer: KFACOptimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.step(lambda: backward(model, optimizer, x, y))

    run(model, optimizer, 3)
    twin = copy.deepcopy(model)
    resumed = build(twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, 5)
    run(twin, resumed, 5)
    assert resumed.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"] != 0.1
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_model_in_half_precision_steps() -> None:
    model, x, y = regression(layers=2)
    model = model.bfloat16()
    optimizer = build(model)
    first = backward(model, optimizer, x.bfloat16(), y.bfloat16())
    for _ in range(5):
        last = backward(model, optimizer, x.bfloat16(), y.bfloat16())
        optimizer.step()
    assert last < first


# -- L2 in the curvature, and a damping of the preconditioner's own --------------------------------------------------


def dense_direction(model: nn.Linear, optimizer: KFACOptimizer, eta: float, damping: float, sign: float = 1) -> Tensor:
    """`(G + (√λ/π) I)⁻¹ (∇ + ηθ) (A + π√λ I)⁻¹` with `λ + η` for `λ`."""
    (factors,) = optimizer.factors().values()
    a, g = (factor[0] for factor in factors)
    pi = (a.trace() / len(a) / (g.trace() / len(g))).sqrt()
    root = (damping + eta) ** 0.5
    matrix = torch.cat([model.weight, model.bias[:, None]], dim=1).detach()
    grad = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1) + sign * eta * matrix
    eye_a, eye_g = torch.eye(len(a)), torch.eye(len(g))
    return torch.linalg.solve(g + root / pi * eye_g, grad) @ torch.linalg.inv(a + pi * root * eye_a)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("own", [None, 0.5])
def test_l2_in_the_curvature_is_preconditioned_and_damps(maximize: bool, own: float | None) -> None:
    model, x, y = regression()
    before = torch.cat([model.weight, model.bias[:, None]], dim=1).detach().clone()
    optimizer = build(
        model,
        TrustRegion(),
        momentum=0.0,
        kl_clip=None,
        weight_decay=0.3,
        l2_in_curvature=True,
        maximize=maximize,
        preconditioner_damping=own,
    )
    backward(model, optimizer, x, y)
    start = copy.deepcopy(model)
    start.weight.grad, start.bias.grad = model.weight.grad, model.bias.grad
    optimizer.step()
    sign = -1 if maximize else 1
    expected = dense_direction(start, optimizer, 0.3, own or 0.1, sign)
    after = torch.cat([model.weight, model.bias[:, None]], dim=1)
    assert_same(before - after, sign * expected, rtol=1e-9)


def test_what_no_layer_covers_decays_as_with_sgd_either_way() -> None:
    for in_curvature in (False, True):
        model = mlp()
        twin = copy.deepcopy(model)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True}
        ours = KFACOptimizer(model, **options, skip_layers=["*"], l2_in_curvature=in_curvature)
        theirs = torch.optim.SGD(twin.parameters(), **options)
        for i in range(3):
            for m, o in ((model, ours), (twin, theirs)):
                o.zero_grad()
                square_loss(m(batch(i))).backward()
                o.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_tensor_for_the_decay_is_refused_in_the_curvature() -> None:
    with pytest.raises(TypeError, match="weight_decay must be a number with l2_in_curvature=True"):
        KFACOptimizer(mlp(), weight_decay=torch.tensor(0.1), l2_in_curvature=True)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_damping_of_the_preconditioner_must_be_positive(value: float) -> None:
    with pytest.raises(ValueError, match="preconditioner_damping"):
        KFACOptimizer(mlp(), preconditioner_damping=value)


# -- the fixed trust region ----------------------------------------------------------------------------------------

SGD_OPTIONS = {
    "no momentum": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "ascent": {"momentum": 0.9, "maximize": True},
    "ascent with nesterov": {"momentum": 0.9, "nesterov": True, "maximize": True},
}


@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_a_bound_that_does_not_bind_changes_nothing(options: dict[str, Any]) -> None:
    ends = []
    for step_size, kl_clip in ((TrustRegion(), 1e9), (TrustRegion(), None)):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.1, kl_clip=kl_clip, step_size=step_size, **FREQUENT, **options)
        for i in range(4):
            optimizer.zero_grad()
            square_loss(model(batch(i))).backward()
            optimizer.step()
        ends.append(flat(model.parameters()))
    assert torch.equal(*ends)


def test_a_summed_loss_is_bounded_by_its_own_fisher() -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model,
        lr=1.0,
        kl_clip=1e-3,
        loss_terms=LossTerms.SUM,
        step_size=TrustRegion(),
        factor_update_period=1,
    )
    for i in range(3):
        optimizer.zero_grad()
        (square_loss(model(batch(i))) * 8).backward()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer.step()
        steps = {name: param.detach() - before[name] for name, param in model.named_parameters()}
        decrease = sum(float((step * dict(model.named_parameters())[name].grad).sum()) for name, step in steps.items())
        scale = optimizer.metrics()["trust_region_scale"]
        length = max(-scale * decrease, decrease**2 / 8)  # at a rate of 1 the first is `νΔᵀ(F + λI)νΔ`
        assert length == pytest.approx(1e-3, rel=1e-9)


def test_the_choice_must_be_a_step_size() -> None:
    with pytest.raises(TypeError, match="step_size must be a StepSize"):
        KFACOptimizer(mlp(), step_size="quadratic")


def test_momentum_is_bounded_by_the_slope_of_the_loss_with_its_weight_decay() -> None:
    """Which is the slope that is preconditioned, where weight decay is part of the curvature."""
    model = nn.Linear(4, 3)
    numbers: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 20.0, "kl_clip": 1e-6}
    optimizer = KFACOptimizer(model, l2_in_curvature=True, step_size=TrustRegion(), **numbers)
    square_loss(model(batch())).backward()
    optimizer.step()
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = -param.detach().clone()  # uphill, by weight decay above all
    slopes = [param.detach() * (param.grad + 20 * param.detach()) for param in model.parameters()]
    promised = -0.5 * 0.9 * sum(float(slope.sum()) for slope in slopes)
    optimizer.step()
    assert optimizer.metrics()["momentum_scale"] == pytest.approx(-(1e-6**0.5) / promised)


def test_wide_factors_are_whole_where_no_inverse_is_named() -> None:
    model = nn.Linear(300, 3, dtype=torch.float32)
    model(torch.randn(5, 300, dtype=torch.float32))
    assert "301×301 " in str(build(model).summary())
    assert "301×301 from 64" in str(build(model, step_size=TrustRegion()).summary())


@pytest.mark.parametrize("rate", [0.0, torch.tensor([0.0])], ids=["number", "tensor"])
def test_a_group_at_a_rate_of_0_stands_still_whatever_momentum_it_had(rate: Any) -> None:
    model, x, y = regression(layers=2)
    optimizer = build([{"params": model[0].parameters()}, {"params": model[2].parameters()}], model=model)
    for number in range(6):
        if number == 3:
            optimizer.param_groups[0]["lr"] = rate
            stands, moves = model[0].weight.detach().clone(), model[2].weight.detach().clone()
        backward(model, optimizer, x, y)
        optimizer.step()
    assert torch.equal(stands, model[0].weight)
    assert not torch.equal(moves, model[2].weight)
