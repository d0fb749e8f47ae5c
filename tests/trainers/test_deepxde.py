"""DeepXDE: `model.compile(optimizer)` trains physics-informed networks by closures, and the loss holds derivatives."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import ExactGGN, KFACOptimizer, LineSearch, LossTerms, SampleSpace

os.environ.setdefault("DDE_BACKEND", "pytorch")  # else it writes a file into the home folder
deepxde = pytest.importorskip("deepxde")

STEPS = 4


def poisson() -> Any:
    """Make the problem `u'' = -π² sin πx` on [-1, 1], `u = 0` at both ends."""

    def residual(x: Tensor, u: Tensor) -> Tensor:
        second: Tensor = deepxde.grad.hessian(u, x)
        return second + torch.pi**2 * torch.sin(torch.pi * x)

    domain = deepxde.geometry.Interval(-1, 1)
    ends = deepxde.icbc.DirichletBC(domain, lambda _: 0, lambda _, at_the_end: at_the_end)
    return deepxde.data.PDE(domain, residual, ends, num_domain=16, num_boundary=2, train_distribution="uniform")


def network() -> Any:
    torch.manual_seed(0)
    return deepxde.nn.FNN([1, 8, 8, 1], "tanh", "Glorot uniform")


def train(data: Any, net: Any, optimizer: KFACOptimizer, loss: Any = "MSE") -> Any:
    model = deepxde.Model(data, net)
    model.compile(optimizer, loss=loss)
    history, _ = model.train(iterations=STEPS, display_every=1, verbose=0)
    return history.loss_train


def test_a_run_is_that_of_a_plain_loop() -> None:
    """The plain loop differentiates by itself, and adds the two terms."""
    data, net = poisson(), network()
    twin = copy.deepcopy(net.linears)
    model = nn.Sequential(twin[0], nn.Tanh(), twin[1], nn.Tanh(), twin[2])
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "factor_update_period": 1, "loss_terms": LossTerms.SUM}
    optimizer, reference = KFACOptimizer(net, **options), KFACOptimizer(model, **options)
    train(data, net, optimizer)
    points = torch.as_tensor(data.train_x)
    ends = int(data.num_bcs[0])
    for _ in range(STEPS):
        reference.zero_grad()
        x = points.clone().requires_grad_()
        u = model(x)
        first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        second = torch.autograd.grad(first, x, torch.ones_like(first), create_graph=True)[0]
        residual = (second + torch.pi**2 * torch.sin(torch.pi * x))[ends:]
        (residual.square().mean() + u[:ends].square().mean()).backward()
        reference.step()
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_gauss_newton_steps_take_the_residuals_of_both_terms() -> None:
    """DeepXDE calls its losses with the target first, and the criterion has the residual first."""
    criterion = nn.MSELoss()
    net = network()
    optimizer = KFACOptimizer(
        net, lr=1.0, damping=1e-6, inverse=SampleSpace(), step_size=LineSearch(), estimate=ExactGGN(criterion)
    )
    losses = train(poisson(), net, optimizer, lambda target, residual: criterion(residual, target))
    assert sum(losses[-1]) < sum(losses[0])
    assert optimizer.metrics()["measured_parameters"] == 1.0
