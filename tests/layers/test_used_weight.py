"""Layers with `weight_norm` and `spectral_norm`: against twins that have the weight in use for their parameter."""

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

from kfac_optim import KFACOptimizer

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
