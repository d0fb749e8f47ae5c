import math
from typing import Any

import pytest
import torch
from helpers.cases import any_loss, snapshot
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import AdaptiveTrustRegion, Cholesky, ExactGGN, KFACOptimizer, LossTerms, SampleSpace, TrustRegion
from kfac_optim.step.step_size import StepSize
from kfac_optim.step.trust_region import inner_product, square_sum, trust_region_scale

pytestmark = pytest.mark.usefixtures("float64")

LAYERS = ("0", "2")


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def param_groups(model: nn.Module, lrs: dict[str, float | Tensor]) -> list[dict[str, Any]]:
    """One group per parameter."""
    return [{"params": [param], "lr": lrs[name]} for name, param in model.named_parameters()]


def one_step(
    lrs: dict[str, Any], kl_clip: float | None, scale: float = 1.0, **options: Any
) -> tuple[dict, dict, float]:
    """Displacements and gradients of every parameter, and `ν`, of one step from the same start."""
    model = build()
    optimizer = KFACOptimizer(param_groups(model, lrs), model=model, kl_clip=kl_clip, skip_layers=["1"], **options)
    before = snapshot(model)
    torch.manual_seed(2)
    (any_loss(model(torch.randn(6, 4))) * scale).backward()
    optimizer.step()
    moved = {name: before[name] - param.detach() for name, param in model.named_parameters()}
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    return moved, gradients, optimizer.metrics().get("trust_region_scale", 1.0)


def covered(name: str) -> bool:
    return name.split(".")[0] in LAYERS


NAMES = [name for name, _ in build().named_parameters()]
LEARNING_RATES = {
    "equal": dict.fromkeys(NAMES, 0.3),
    "weights and biases apart": {name: 0.7 if "weight" in name else 0.2 for name in NAMES},
    "all different": {name: 0.1 * (1 + i) for i, name in enumerate(NAMES)},
    "some zero": {name: 0.4 * (i % 2) for i, name in enumerate(NAMES)},
}


def lengths(lrs: dict[str, float], moved: dict[str, Tensor], gradients: dict[str, Tensor]) -> tuple[float, float]:
    """Both estimates of the squared length of an unclipped step: `Σ lr² Δᵀ∇`, and `(Σ lr Δᵀ∇)²`."""
    # A displacement is lr Δ.
    products = {name: float((moved[name] * gradients[name]).sum()) for name in NAMES if covered(name)}
    return sum(lrs[name] * product for name, product in products.items()), sum(products.values()) ** 2


# The smaller the damping, the larger Δᵀ∇, and with it the share of the second estimate.
REGIMES = pytest.mark.parametrize(("damping", "larger"), [(10.0, 0), (1e-4, 1)], ids=["quadratic", "decrease"])


@REGIMES
@pytest.mark.parametrize("lrs", LEARNING_RATES.values(), ids=LEARNING_RATES.keys())
@pytest.mark.parametrize("kl_clip", [1e-5, 1e-3, 10.0, 1e6])
def test_scale_equals_the_bound_computed_from_the_unclipped_step(
    lrs: dict[str, float], kl_clip: float, damping: float, larger: int
) -> None:
    free, gradients, unscaled = one_step(lrs, None, damping=damping)
    clipped, _, scale = one_step(lrs, kl_clip, damping=damping)
    estimates = lengths(lrs, free, gradients)
    assert estimates[larger] == max(estimates)
    assert unscaled == 1
    assert scale == pytest.approx(min(1, math.sqrt(kl_clip / max(estimates))), rel=1e-9)
    assert (scale < 1) == (kl_clip < max(estimates))
    for name in NAMES:
        # What no block covers takes its own step, whatever the trust region.
        expected = free[name] * scale if covered(name) else lrs[name] * gradients[name]
        assert_same(clipped[name], expected, rtol=1e-8)


@REGIMES
@pytest.mark.parametrize("lrs", LEARNING_RATES.values(), ids=LEARNING_RATES.keys())
def test_a_binding_bound_is_met_exactly(lrs: dict[str, float], damping: float, larger: int) -> None:
    moved, gradients, scale = one_step(lrs, 1e-4, damping=damping)
    assert scale < 1
    linear, square = lengths(lrs, moved, gradients)
    estimates = (scale * linear, square)  # a clipped displacement holds ν once
    assert estimates[larger] == pytest.approx(1e-4, rel=1e-9)
    assert max(estimates) <= 1e-4 * (1 + 1e-9)


@pytest.mark.parametrize("loss_terms", [LossTerms.EXAMPLES, LossTerms.SUM])
def test_a_step_within_the_bound_by_the_factors_and_by_the_dense_fisher_is_left_alone(loss_terms: LossTerms) -> None:
    # Examples that agree are the worst case: (E sᵀg)² is then all of E(sᵀg)².
    features, mixed = torch.randn(1, 3).expand(8, 3), torch.randn(2)

    def step(kl_clip: float | None) -> tuple[Tensor, Tensor, float]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2, bias=False)
        optimizer = KFACOptimizer(model, lr=0.5, damping=1e-4, kl_clip=kl_clip, loss_terms=loss_terms)
        losses = (model(features) * mixed).sum(-1)
        (losses.sum() if loss_terms is LossTerms.SUM else losses.mean()).backward()
        before = model.weight.detach().clone()
        optimizer.step()
        return before - model.weight.detach(), model.weight.grad, optimizer.metrics()["trust_region_scale"]

    moved, gradient, _ = step(None)
    per_example = torch.stack([torch.outer(mixed, row) for row in features]).flatten(1)
    fisher = per_example.mT @ per_example
    if loss_terms is LossTerms.EXAMPLES:
        fisher /= len(features)
    length = float(moved.flatten() @ fisher @ moved.flatten())
    by_factors = 0.5 * float((moved * gradient).sum())
    *_, scale = step(max(length, by_factors) * (1 + 1e-9))
    assert scale == 1


def test_a_tensor_learning_rate_counts_as_its_number() -> None:
    lrs = LEARNING_RATES["all different"]
    plain = one_step(lrs, 1e-3)
    tensors = one_step({name: torch.tensor([lr]) for name, lr in lrs.items()}, 1e-3, foreach=False)
    assert tensors[2] == pytest.approx(plain[2], rel=1e-12)
    for name in NAMES:
        assert_same(tensors[0][name], plain[0][name])


def test_a_step_of_zero_gradient_stays_finite() -> None:
    lrs = LEARNING_RATES["equal"]
    moved, _, scale = one_step(lrs, 1e-3, scale=0.0)
    assert scale == 1
    assert all(not displacement.any() for displacement in moved.values())


def test_the_step_of_a_layer_without_a_bias_is_bounded_too() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = KFACOptimizer(model, lr=1.0, kl_clip=1e-6, step_size=TrustRegion())
    any_loss(model(torch.randn(6, 4))).backward()
    optimizer.step()
    assert optimizer.metrics()["trust_region_scale"] < 1


@pytest.mark.parametrize("step_size", [TrustRegion(), AdaptiveTrustRegion()])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_layers_beside_those_of_sample_space_are_bounded_as_if_they_were_alone(
    step_size: StepSize, momentum: float
) -> None:
    def moved(*names: str) -> list[Tensor]:
        """How a model of two layers side by side moves, with Gauss-Newton steps of the first."""
        torch.manual_seed(0)
        model, criterion = nn.ModuleDict({"left": nn.Linear(2, 3), "right": nn.Linear(2, 3)}), nn.MSELoss()
        optimizer = KFACOptimizer(
            model,
            lr=1.0,
            momentum=momentum,
            damping=1e-3,
            kl_clip=1e-3,
            step_size=step_size,
            inverse={"left": SampleSpace(), "right": Cholesky()},
            estimate=ExactGGN(criterion),
        )
        x = torch.randn(8, 2)
        before = {name: [param.detach().clone() for param in model[name].parameters()] for name in model}
        for _ in range(3):
            optimizer.zero_grad()
            sum(criterion(model[name](x), 9 * torch.ones(8, 3)) for name in names).backward()
            optimizer.step()
        if "right" in names:
            assert optimizer.metrics()["trust_region_scale"] < 0.5
        return [new - old for name in names for new, old in zip(model[name].parameters(), before[name], strict=True)]

    assert_same(moved("left", "right"), [*moved("left"), *moved("right")])


def test_the_measured_length_of_a_step_beside_sample_space_is_that_of_the_step() -> None:
    torch.manual_seed(0)
    model, criterion = nn.ModuleDict({"left": nn.Linear(2, 3), "right": nn.Linear(2, 3)}), nn.MSELoss()
    inverse = {"left": SampleSpace(), "right": Cholesky()}
    options: dict[str, Any] = {"lr": 1.0, "damping": 1e-3, "kl_clip": 1e-3, "step_size": TrustRegion()}
    optimizer = KFACOptimizer(model, inverse=inverse, estimate=ExactGGN(criterion), **options)
    x = torch.randn(8, 2)
    sum(criterion(layer(x), 9 * torch.ones(8, 3)) for layer in model.values()).backward()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["trust_region_scale"] < 0.5
    moved = [(new.detach() - old).flatten() for new, old in zip(model.parameters(), before, strict=True)]
    assert metrics["direction_norm"] == pytest.approx(float(torch.cat(moved).norm()))
    assert {type(value) for value in metrics.values()} == {float}


def test_momentum_of_earlier_steps_is_not_scaled() -> None:
    displacements = []
    for momentum in (0.0, 0.9):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.zero_()
        optimizer = KFACOptimizer(model, lr=1.0, momentum=momentum, kl_clip=1e-3, factor_update_period=1)
        torch.manual_seed(3)
        features, mixed = torch.randn(4, 3), torch.randn(4, 2)
        moves = []
        for _ in range(2):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            (model(features) * mixed).sum().backward()  # the same gradient at every weight
            optimizer.step()
            assert optimizer.metrics()["trust_region_scale"] < 1
            moves.append(before - model.weight.detach())
        displacements.append(moves)
    plain, heavy = displacements
    assert_same(heavy[1], plain[1] + 0.9 * plain[0])


@pytest.mark.parametrize("loss_terms", [LossTerms.EXAMPLES, LossTerms.SUM])
def test_momentum_may_raise_a_summed_loss_by_more(loss_terms: LossTerms) -> None:
    """By `√(κN)`, as the Fisher of a sum of N terms is a sum, too."""
    model = build()
    options: dict[str, Any] = {"loss_terms": loss_terms, "step_size": TrustRegion(), "kl_clip": 1e-4}
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, skip_layers=["1"], **options)
    features = torch.randn(6, 4)
    for sign in (1, 1, -5):  # the loss turns round
        optimizer.zero_grad()
        losses = model(features).square().sum(1)
        (sign * (losses.sum() if loss_terms is LossTerms.SUM else losses.mean())).backward()
        held = {name: optimizer.state[param].get("momentum_buffer") for name, param in model.named_parameters()}
        held = {name: buffer.clone() for name, buffer in held.items() if buffer is not None and covered(name)}
        optimizer.step()
    rise = -0.1 * 0.9 * sum(float((buffer * model.get_parameter(name).grad).sum()) for name, buffer in held.items())
    terms = 6 if loss_terms is LossTerms.SUM else 1
    assert rise > math.sqrt(1e-4 * terms)
    assert optimizer.metrics()["momentum_scale"] == pytest.approx(math.sqrt(1e-4 * terms) / rise, rel=1e-9)


@given(
    quadratic=st.floats(1e-12, 1e12),
    decrease=st.floats(-1e6, 1e6),
    summed_terms=st.sampled_from([1, 7, math.inf]),
    kl_clip=st.floats(1e-9, 1e3),
)
def test_scale_is_the_square_root_of_the_ratio_capped_at_one(
    quadratic: float, decrease: float, summed_terms: float, kl_clip: float
) -> None:
    scale = trust_region_scale(torch.tensor(quadratic), torch.tensor(decrease), summed_terms, kl_clip)
    expected = min(1, math.sqrt(kl_clip / max(quadratic, decrease**2 / summed_terms)))
    assert float(scale) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("quadratic", [0.0, -1.0, -1e-300])
def test_scale_is_one_without_a_positive_length(quadratic: float) -> None:
    assert float(trust_region_scale(torch.tensor(quadratic), torch.tensor(0.0), 1, 1e-3)) == 1


def test_a_reloaded_optimizer_bounds_the_next_step_of_a_summed_loss_like_an_uninterrupted_one() -> None:
    # Between statistics the number of summed examples is remembered, and so must be part of the state.
    def optimizer_of(model: nn.Module) -> KFACOptimizer:
        return KFACOptimizer(
            model, lr=0.5, damping=1e-4, kl_clip=1e-3, loss_terms=LossTerms.SUM, factor_update_period=100
        )

    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, reloaded = optimizer_of(model), optimizer_of(twin)
    features, mixed = torch.randn(1, 3).expand(8, 3), torch.randn(2)

    def step(model: nn.Module, optimizer: KFACOptimizer, scale: float) -> float:
        optimizer.zero_grad()
        (model(features) * mixed * scale).sum().backward()
        optimizer.step()
        return optimizer.metrics()["trust_region_scale"]

    step(model, optimizer, 1.0)
    twin.load_state_dict(model.state_dict())
    reloaded.load_state_dict(optimizer.state_dict())
    # Gradients have grown since the factors were measured, so the estimate without factors is the larger one.
    assert step(twin, reloaded, 3.0) == step(model, optimizer, 3.0)


DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


@st.composite
def tensors(draw: st.DrawFn, shapes: list[list[int]]) -> list[Tensor]:
    """Of these shapes, their dimensions in any order in memory."""
    made = []
    for shape in shapes:
        order = draw(st.permutations(range(len(shape))))
        backwards = sorted(range(len(shape)), key=lambda axis: order[axis])
        made.append(torch.randn([shape[axis] for axis in order]).permute(backwards))
    return made


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4), data=st.data())
def test_inner_product_sums_over_tensors_of_any_shape_and_layout(shapes: list[list[int]], data: st.DataObject) -> None:
    left, right = data.draw(tensors(shapes)), data.draw(tensors(shapes))
    assert [list(tensor.shape) for tensor in left] == shapes
    expected = sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))
    product = inner_product(left, right, torch.device("cpu"))
    assert product.shape == ()
    assert float(product) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4), data=st.data())
def test_square_sum_is_taken_in_at_least_float32(shapes: list[list[int]], data: st.DataObject) -> None:
    mixed = [tensor.to(data.draw(DTYPES)) for tensor in data.draw(tensors(shapes))]
    found = square_sum(mixed, torch.device("cpu"))
    expected = sum(float(tensor.double().square().sum()) for tensor in mixed)
    narrow = any(tensor.dtype != torch.float64 for tensor in mixed)
    assert found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-6 if narrow else 1e-14, abs=1e-12)
