"""Layers that scale features, known by what they do: against torch's own norms, and by per-example gradients."""

from collections.abc import Callable

import pytest
import torch
from helpers.cases import any_loss
from helpers.oracles import assert_same
from torch import Tensor, nn

from kfac_optim import KFACOptimizer
from kfac_optim.layers.scale import scale_adapter

pytestmark = pytest.mark.usefixtures("float64")


class Rms(nn.Module):
    """As in Llama."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(features)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OffByOne(Rms):
    """As in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class OfChannels(nn.LayerNorm):
    """As timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Gamma(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def per_example(model: nn.Module, x: Tensor, seeds: Tensor) -> list[Tensor]:
    """Gradients `[examples, features, params]` of each example's part of the loss, by autograd alone."""
    rows = []
    for example, seed in zip(x, seeds, strict=True):
        gradients = torch.autograd.grad((model(example[None]) * seed[None]).sum(), list(model.parameters()))
        rows.append(torch.stack(gradients, dim=-1))
    return rows


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Rms(4), (6, 4)),
        (lambda: OffByOne(4), (6, 4)),
        (lambda: OfChannels(4), (6, 4, 1, 1)),
        (lambda: Gamma(4), (6, 4)),
    ],
    ids=["RMS", "off by one", "of channels", "a scale"],
)
def test_g_holds_the_second_moments_of_per_example_gradients(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x, seeds = build(), torch.randn(shape), torch.randn(shape)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(1)
    (model(x) * seeds).sum().backward()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    a, g = optimizer.factors()[""]
    assert a is None
    assert_same(g, sum(u.unsqueeze(-1) * u.unsqueeze(-2) for u in per_example(model, x, seeds)))


def test_an_rms_norm_of_somebody_trains_as_torchs_own() -> None:
    torch.manual_seed(0)
    model, twin = Rms(4, eps=1e-3), nn.RMSNorm(4, eps=1e-3)
    twin.load_state_dict(model.state_dict())
    optimizers = [KFACOptimizer(each, lr=0.1, factor_update_period=1) for each in (model, twin)]
    for _ in range(3):
        x, target = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (each(x) - target).square().mean().backward()
            optimizer.step()
    assert_same(model.weight, twin.weight)


def test_one_example_to_which_no_gradient_comes_gives_no_sample() -> None:
    """The output of the branch is multiplied by zero, as where its last weight begins at zero."""
    model = nn.Sequential(Rms(6), nn.Linear(6, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    optimizer = KFACOptimizer(model, lr=0.1)
    any_loss(model(torch.randn(1, 3, 6))).backward()
    optimizer.step()
    assert "0" not in optimizer.factors()


class Squared(Gamma):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.square()


class Mixed(Gamma):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.roll(1)


class Half(Gamma):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :2] * self.gamma[:2], x[..., 2:]], dim=-1)


class OfPairs(Gamma):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gamma).unflatten(-1, (2, -1))


class Uneven(Gamma):
    """A scale, and a parameter of another size."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.power = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.power * x * self.gamma


@pytest.mark.parametrize("kind", [Squared, Mixed, Half, OfPairs, Uneven])
def test_what_does_not_scale_its_features_is_not_taken_for_it(kind: type[Gamma]) -> None:
    assert scale_adapter(kind(4)) is None


def test_to_probe_draws_no_random_numbers_of_torchs() -> None:
    module, state = Rms(4), torch.get_rng_state()
    scale_adapter(module)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_are_not_called_by_what_statistics_ask() -> None:
    model, called = Rms(4), []
    model.register_forward_hook(lambda *_: called.append(1))
    optimizer = KFACOptimizer(model, lr=0.0)
    any_loss(model(torch.randn(5, 4))).backward()
    optimizer.step()
    assert optimizer.factors().keys() == {""}
    assert len(called) == 1


class Shifted(Gamma):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.beta = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma + self.beta


def test_a_shift_whose_scale_is_frozen_takes_the_step_of_sgd() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Shifted(4))
    model[1].gamma.requires_grad_(False)
    optimizer, before = KFACOptimizer(model, lr=0.1), model[1].beta.detach().clone()
    any_loss(model(torch.randn(5, 4))).backward()
    optimizer.step()
    assert optimizer.factors().keys() == {"0"}
    assert torch.equal(model[1].beta, before.add(model[1].beta.grad, alpha=-0.1))


def test_a_scale_whose_forward_is_replaced_later_is_refused() -> None:
    model = Gamma(4)
    optimizer = KFACOptimizer(nn.Sequential(nn.Linear(4, 4), model), lr=0.1)
    use = optimizer._binding.coverage.blocks[1].uses[0]
    assert use.adapter.refusal(model) is None
    model.forward = lambda x: x * model.gamma.square()  # type: ignore[method-assign]
    reason = use.adapter.refusal(model)
    assert reason == "Gamma was changed after the optimizer was built: its weight, its bias or its forward"
