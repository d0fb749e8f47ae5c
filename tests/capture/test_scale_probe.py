"""What the loop multiplies all gradients by scales `G`; what it does to some of them does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.plain import assert_same_factors, batch, mlp, square_loss
from torch import nn

from kfac_optim import KFACOptimizer
from kfac_optim.capture.scale_probe import ScaleProbe

Edit = Callable[[nn.Module], object]


def all_by(number: float) -> Edit:
    return lambda model: [param.grad.mul_(number) for param in model.parameters() if param.grad is not None]


def some_by(number: float, which: Callable[[str], bool]) -> Edit:
    return lambda model: [
        param.grad.mul_(number) for name, param in model.named_parameters() if which(name) and param.grad is not None
    ]


def own_norms(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad /= param.grad.norm()


CASES: dict[str, tuple[Edit, float]] = {
    "all": (all_by(0.125), 1 / 64),
    "biases": (some_by(2.0, lambda name: name.endswith("bias")), 1.0),
    "weights": (some_by(2.0, lambda name: name.endswith("weight")), 1.0),
    "the first layer": (some_by(0.5, lambda name: name.startswith("0.")), 1.0),
    "the last layer": (some_by(0.5, lambda name: name.startswith("4.")), 1.0),
    "own norms": (own_norms, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_only_a_factor_of_all_gradients_is_one_of_the_loss(name: str) -> None:
    edit, expected = CASES[name]
    found = []
    for edits in (False, True):
        model = mlp(sizes=(4, 9, 8, 10))
        optimizer = KFACOptimizer(model, lr=0.0)
        square_loss(model(batch())).backward()
        if edits:
            edit(model)
        optimizer.step()
        found.append(optimizer.factors())
    for layer, (_, g) in found[1].items():
        plain = found[0][layer][1]
        assert g is not None
        assert plain is not None
        torch.testing.assert_close(g, expected * plain, rtol=1e-9, atol=0)


def test_tokens_from_anywhere_in_a_large_vocabulary_show_it() -> None:
    tokens = torch.randint(5000, 10000, (300,), generator=torch.Generator().manual_seed(0))
    found = []
    for divisor in (1, 3):
        torch.manual_seed(0)
        model = nn.Embedding(10000, 4).double()
        optimizer = KFACOptimizer(model, lr=0.0)
        for part in tokens.chunk(divisor):
            model(part).square().mean().backward()
        all_by(1 / divisor)(model)
        optimizer.step()
        found.append(optimizer.factors())
    assert_same_factors(*found, rtol=1e-9)


class Part(nn.Parameter):
    """What looks like a parameter of which processes hold parts."""

    def to_local(self) -> torch.Tensor:
        return self


@pytest.mark.parametrize("kinds", [(Part, Part), (nn.Parameter, Part), (Part, nn.Parameter)])
def test_a_sharded_gradient_is_not_joined_with_another(kinds: tuple[type[nn.Parameter], type[nn.Parameter]]) -> None:
    small, large = (kind(torch.randn(size, 4)) for kind, size in zip(kinds, (3, 5), strict=True))
    probe = ScaleProbe()
    probe.choose([(small,), (large,)])
    (only,) = probe._params
    assert only is small


@pytest.mark.parametrize("way", ["saved", "copied"])
def test_a_scale_that_was_seen_holds_in_a_run_that_goes_on_elsewhere(way: str) -> None:
    """Clipping would hide it in the first step there."""

    def step(model: nn.Module, optimizer: KFACOptimizer, seed: int, most: float) -> None:
        optimizer.zero_grad()
        (256 * square_loss(model(batch(seed)))).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= 256
        nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()

    model = mlp(sizes=(4, 9, 8, 10))
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1)
    for seed in range(2):
        step(model, optimizer, seed, 1e9)
    if way == "copied":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        other = copy.deepcopy(model)
        resumed = KFACOptimizer(other, lr=0.01, factor_update_period=1)
        resumed.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 2, 1e-3)
    step(other, resumed, 2, 1e-3)
    assert_same_factors(resumed.factors(), optimizer.factors())
