"""The inner step of directions on a CPU: torch's fused kernel where it fits, and the same step by any other way."""

from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import AdaptiveTrustRegion, KFACOptimizer, SelectedUpdates
from kfac_optim.step import inner_step


def trained(foreach: bool | None, **options: Any) -> list[torch.Tensor]:
    """Parameters and momentum after four steps of a model with a layer of strange strides and one without a block."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = KFACOptimizer(model, foreach=foreach, skip_layers=["4"], factor_update_period=2, **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 2, 4, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    buffers = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
    return [param.detach() for param in model.parameters()] + [buffer for buffer in buffers if buffer is not None]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True, "lr": 1e-3},
        {"weight_decay": 0.1, "l2_in_curvature": True},
        {"kl_clip": None},
    ],
    ids=["nesterov", "dampening", "l2", "no momentum"],
)
def test_the_fused_kernel_takes_the_step_of_the_for_loop(options: dict[str, Any], monkeypatch: Any) -> None:
    fused: list[int] = []
    update = inner_step._update

    def counted(pairs: Any, numbers: Any, *rest: Any) -> None:
        fused.append(len(pairs) if numbers["fused"] else 0)
        update(pairs, numbers, *rest)

    monkeypatch.setattr(inner_step, "_update", counted)
    options = {"lr": 0.1} | options
    ours = trained(None, **options)
    assert max(fused) == 3, "a bias and one whole layer"
    fused.clear()
    loop = trained(False, **options)
    assert max(fused) == 0
    assert len(ours) == len(loop)
    for one, other in zip(ours, loop, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("step_size", [AdaptiveTrustRegion(), SelectedUpdates()], ids=repr)
@pytest.mark.parametrize("foreach", [None, False, True])
def test_weight_decay_may_be_a_tensor_of_shape_1(step_size: Any, foreach: bool | None) -> None:
    decays = torch.tensor([0.1]), torch.tensor(0.1)
    one, other = (trained(foreach, lr=0.1, momentum=0.9, weight_decay=decay, step_size=step_size) for decay in decays)
    assert all(map(torch.equal, one, other))


def test_a_fused_step_without_gradients_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    before = [param.detach().clone() for param in model.parameters()]
    KFACOptimizer(model, lr=0.1, fused=True).step()
    assert all(map(torch.equal, before, model.parameters()))


def test_the_fused_kernel_takes_parameters_with_and_without_momentum_as_sgd_does() -> None:
    """The second layer has its first gradient when the first one has momentum."""
    models = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
        optimizer: Any = (
            KFACOptimizer(model, fused=True, skip_layers=["*"], **numbers)
            if fused
            else torch.optim.SGD(model.parameters(), foreach=False, **numbers)
        )
        for number in range(3):
            optimizer.zero_grad()
            (model[0](torch.ones(1, 3)) if number == 0 else model(torch.ones(1, 3))).square().sum().backward()
            optimizer.step()
        models.append([*model.parameters()])
    for ours, theirs in zip(*models, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("skipped", [[], ["*"]], ids=["directions", "raw gradients"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_step_moves_parameters_of_16_bits_as_the_loop_does(dtype: torch.dtype, skipped: list[str]) -> None:
    """Torch's own fused kernel leaves whole vectors of them where they are on a CPU."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(16, 8).to(dtype)
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, fused=fused, skip_layers=skipped)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
            optimizer.step()
        found.append(
            [*model.parameters(), *(optimizer.state[param]["momentum_buffer"] for param in model.parameters())]
        )
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("step_size", [AdaptiveTrustRegion(), SelectedUpdates()], ids=str)
def test_fused_kernels_get_directions_that_lie_as_the_parameters(step_size: Any) -> None:
    """They read all tensors side by side, as they lie: on a CPU another layout would be another step, in silence."""
    inverse = {"inverse": None} if isinstance(step_size, SelectedUpdates) else {}
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)).double().to(memory_format=torch.channels_last)
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, step_size=step_size, fused=fused, **inverse)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4, 4, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        found.append([param.detach() for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
