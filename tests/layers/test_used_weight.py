"""Layers with `weight_norm` and `spectral_norm`: against twins that have the weight in use for their parameter."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.cases import any_loss
from helpers.oracles import assert_same
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from kfac_optim import EKFAC, AdaptiveTrustRegion, DoublyFactored, Inverse, KFACOptimizer, SelectedUpdates, Subsample
from kfac_optim.step.step_size import StepSize

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated"),
]

Build = Callable[[], nn.Module]

LAYERS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (20, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (20, 4)),
    "convolution with groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1), (8, 4, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(4, 3, 2, stride=2), (8, 4, 5)),
}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm along the last": lambda layer: parametrizations.weight_norm(layer, dim=layer.weight.dim() - 1),
    "weight_norm of all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "old weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
}
cases = pytest.mark.parametrize(
    ("layer", "way"),
    [(layer, way) for layer in LAYERS for way in WAYS if layer == "linear" or way in ("weight_norm", "spectral_norm")],
)


def pair(layer: str, way: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A layer whose weight is made of others and is not where it was at first, its twin, and an input."""
    torch.manual_seed(0)
    build, shape = LAYERS[layer]
    model, twin = WAYS[way](build()), build()
    for param in model.parameters():
        param.data += 0.1 * torch.rand_like(param)
    model.eval()  # power iterations stand still
    x = torch.randn(shape)
    model(x)  # the old ways compute the weight in a forward
    twin.weight.data.copy_(model.weight)
    if twin.bias is not None:
        twin.bias.data.copy_(model.bias)
    return model, twin, x


def measured(model: nn.Module, x: Tensor, **options: Any) -> KFACOptimizer:
    torch.manual_seed(1)
    optimizer = KFACOptimizer(model, momentum=0.0, kl_clip=None, **options)
    any_loss(model(x)).backward()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    return optimizer


@cases
def test_factors_are_those_of_the_weight_in_use(layer: str, way: str) -> None:
    model, twin, x = pair(layer, way)
    assert_same(measured(model, x, lr=0.0).factors()[""], measured(twin, x, lr=0.0).factors()[""])


@pytest.mark.parametrize("way", [way for way in WAYS if "weight_norm" in way])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_weight_in_use_moves_as_if_it_were_the_parameter(layer: str, way: str) -> None:
    model, twin, x = pair(layer, way)
    rate = 1e-6
    before = twin.weight.detach().clone()
    for each in (model, twin):
        measured(each, x, lr=rate)
    model(x)
    assert_same((model.weight - before) / rate, (twin.weight - before) / rate, rtol=1e-5)


@pytest.mark.parametrize("inverse", [EKFAC(), DoublyFactored(2)], ids=str)
def test_an_inverse_that_asks_for_rows_has_those_of_the_weight_in_use(inverse: Inverse[Any]) -> None:
    model, twin, x = pair("linear", "weight_norm")
    rate, start = 1e-6, twin.weight.detach().clone()
    options = {"momentum": 0.0, "kl_clip": None, "factor_update_period": 1, "subsample": Subsample(examples=10)}
    for each in (model, twin):
        optimizer = KFACOptimizer(each, lr=rate, inverse=inverse, **options)
        for seed in range(2):  # EKFAC measures in the bases of the first
            torch.manual_seed(seed)
            optimizer.zero_grad()
            any_loss(each(x)).backward()
            optimizer.step()
    assert_same((model.weight - start) / rate, (twin.weight - start) / rate, rtol=1e-4)


class Between(nn.Module):
    """A layer between others, which is called in several ways."""

    def __init__(self, layer: nn.Module, call: Callable[["Between", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.layer, self.last, self.call = nn.Linear(4, 4), layer, nn.Linear(3, 2), call

    def rest(self, hidden: Tensor) -> Tensor:
        return self.last(self.layer(hidden).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.first(x))


CALLS: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "by the model": lambda model, x: model(x),
    "alone": lambda model, x: model.rest(model.first(x)),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_steps_between_statistics_and_recomputed_forwards_leave_the_factors_as_they_are(
    call: str, recomputes: bool
) -> None:
    normed, plain, _ = pair("linear", "weight_norm")
    factors = []
    for layer, again in ((normed, recomputes), (plain, False)):
        model = Between(layer, (lambda m, h: checkpoint(m.rest, h, use_reentrant=True)) if again else Between.rest)
        optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=2)
        for seed in range(4):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            optimizer.set_loss_terms(5)
            any_loss(CALLS[call](model, torch.randn(5, 4))).backward()
            optimizer.step()
        factors.append(optimizer.factors())
    for name in ("first", "layer", "last"):
        assert_same(factors[0][name], factors[1][name])


@pytest.mark.parametrize("frozen", ["original0", "original1"])
def test_a_normed_weight_of_which_a_part_is_frozen_is_left_to_sgd(frozen: str) -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 3))
    parts = layer.parametrizations.weight
    getattr(parts, frozen).requires_grad_(False)
    model = nn.Sequential(layer, nn.Linear(3, 2))
    optimizer = KFACOptimizer(model, lr=0.1)
    before = [param.detach().clone() for param in layer.parameters()]
    any_loss(model(torch.randn(5, 4))).backward()
    optimizer.step()
    assert optimizer.factors().keys() == {"1"}
    for param, start in zip(layer.parameters(), before, strict=True):
        assert torch.equal(param, start if param.grad is None else start.add(param.grad, alpha=-0.1))


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_spectrally_normed_moves_as_if_sigma_stood_still(layer: str) -> None:
    """The gradient is that of the parameter, `∇W = σ ∇V`; and `ΔV = σ ΔW`."""
    model, twin, x = pair(layer, "spectral_norm")
    original = model.parametrizations.weight.original
    before = original.detach().clone()
    sigma = (original / model.weight).mean().detach()
    measured(model, x, lr=1.0)
    torch.manual_seed(1)
    optimizer = KFACOptimizer(twin, lr=1.0, momentum=0.0, kl_clip=None)
    any_loss(twin(x)).backward()
    start = twin.weight.detach().clone()
    twin.weight.grad.copy_(sigma * original.grad)
    optimizer.step()
    assert_same(original - before, sigma * (twin.weight - start))


def test_the_undamped_step_of_a_normed_weight_is_the_natural_gradient_of_its_parameters() -> None:
    """By the Jacobian of the weight: `Jᵀ (G ⊗ A) J δ = ∇`."""
    model, _, x = pair("linear without bias", "weight_norm")
    direction, length = (model.parametrizations.weight.original1, model.parametrizations.weight.original0)
    start = [length.detach().clone(), direction.detach().clone()]
    of_g, of_v = jacrev(lambda g, v: g * v / v.square().sum(1, keepdim=True).sqrt(), (0, 1))(*start)
    jacobian = torch.cat([of_g.reshape(12, -1), of_v.reshape(12, -1)], dim=1)
    optimizer = measured(model, x, lr=1.0, damping=1e-12)
    fisher = jacobian.T @ oracles.kronecker(*optimizer.factors()[""])[0] @ jacobian
    step = torch.cat([(then - now.detach()).flatten() for then, now in zip(start, (length, direction), strict=True)])
    gradient = torch.cat([length.grad.flatten(), direction.grad.flatten()])
    assert_same(fisher @ step, gradient, rtol=1e-5)


def test_the_step_of_a_direction_is_across_it() -> None:
    """Along it nothing would change but its length."""
    model, _, x = pair("linear", "weight_norm")
    direction = model.parametrizations.weight.original1
    before = direction.detach().clone()
    measured(model, x, lr=1.0)
    assert_same(before + ((direction - before) * before).sum(1, keepdim=True), before)


def test_other_parametrizations_are_left_to_sgd_by_name() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 3))
    assert "is parametrized" in str(KFACOptimizer(model).summary())


def test_a_normed_weight_that_is_none_any_more_takes_the_step_of_sgd() -> None:
    model = parametrizations.weight_norm(nn.Linear(4, 3))
    optimizer = KFACOptimizer(nn.Sequential(model, nn.Linear(3, 2)), lr=0.1)
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert optimizer._binding.coverage.blocks[0].uses[0].is_refused()


@pytest.mark.parametrize("way", ["spectral_norm", "old spectral_norm"])
def test_what_was_spectrally_normed_trains_on_without(way: str) -> None:
    layer = WAYS[way](nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.Linear(3, 2))
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for removed in (False, True):
        if removed and way == "spectral_norm":
            nn.utils.parametrize.remove_parametrizations(layer, "weight")
        elif removed:
            nn.utils.remove_spectral_norm(layer)
        any_loss(model(torch.randn(8, 4))).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(each.message)[:30] for each in caught] == ["kfac_optim: 1 layer has gradie"] * removed
        optimizer.zero_grad()


@pytest.mark.parametrize("way", ["spectral_norm", "old spectral_norm"])
def test_two_forwards_in_training_mode_before_one_backward_leave_a_layer_in(way: str) -> None:
    """As discriminators of GANs are trained; each forward moves the vectors of the power iteration."""
    torch.manual_seed(0)
    model = nn.Sequential(WAYS[way](nn.Linear(4, 8)), nn.Tanh(), WAYS[way](nn.Linear(8, 1)))
    optimizer = KFACOptimizer(model, lr=1e-3, factor_update_period=1)
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.randn(20, 4)).mean() - model(torch.randn(20, 4)).square().mean()).backward()
        optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    assert all(block.check.is_done for block in optimizer._binding.coverage.blocks)


@pytest.mark.parametrize("way", ["spectral_norm", "old spectral_norm"])
def test_the_check_sees_what_a_penalty_makes_of_a_layer_whose_vectors_move(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(WAYS[way](nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    optimizer = KFACOptimizer(model, lr=1e-3, factor_update_period=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            x = torch.randn(9, 4, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (model(torch.randn(9, 4)).mean() + slope.square().sum(1).mean()).backward()
            optimizer.step()
    assert any("only a part was captured" in str(each.message) for each in caught)
    blocks = optimizer._binding.coverage.blocks
    assert [block.param_names for block in blocks] == [("2.weight", "2.bias")]


@pytest.mark.parametrize("step_size", [AdaptiveTrustRegion(), SelectedUpdates()], ids=["default", "selected"])
def test_a_branch_that_begins_with_lengths_of_zero_is_trained(step_size: StepSize) -> None:
    torch.manual_seed(0)
    last = parametrizations.weight_norm(nn.Linear(6, 3))
    nn.init.zeros_(last.parametrizations.weight.original0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), last)
    optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, step_size=step_size, factor_update_period=1)
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert last.parametrizations.weight.original0.abs().min() > 0


def test_ekfac_tells_of_two_backwards_through_one_forward() -> None:
    found = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = parametrizations.weight_norm(nn.Linear(4, 3))
        optimizer = KFACOptimizer(model, lr=0.0, inverse=EKFAC(), factor_update_period=1)
        output = model(torch.randn(20, 4))
        if parts == 2:
            (1e-2 * output.sin().sum()).backward(retain_graph=True)
            output.square().sum().backward()
        else:
            (1e-2 * output.sin().sum() + output.square().sum()).backward()
        optimizer.step()
        found.append(optimizer.metrics().get("substituted_statistics", 0))
    assert found == [0, 1], "what cannot be taken as one is told of"
