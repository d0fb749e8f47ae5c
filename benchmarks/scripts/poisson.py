"""Solve −Δu = f on the unit square, with u = 0 on its sides, by a physics-informed network that K-FAC trains."""
# mypy: ignore-errors

import torch
from torch import nn

from kfac_optim import ExactGGN, KFACOptimizer, LineSearch, SampleSpace

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inside, sides, test = torch.rand(900, 2, requires_grad=True), torch.rand(120, 2), torch.rand(9000, 2)
sides[torch.arange(120), torch.randint(2, (120,))] = torch.randint(2, (120,)).double()
source = 2 * torch.pi**2 * torch.sin(torch.pi * inside.detach()).prod(1, keepdim=True)
solution = torch.sin(torch.pi * test).prod(1, keepdim=True)  # known here, to see the error

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
criterion = nn.MSELoss()
inverse = SampleSpace(momentum=0.0, scope="joint")
optimizer = KFACOptimizer(
    model, lr=1.0, momentum=0, damping=1e-10, inverse=inverse, step_size=LineSearch(), estimate=ExactGGN(criterion)
)


def closure():
    optimizer.zero_grad()
    (gradient,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    twice = [torch.autograd.grad(gradient[:, i].sum(), inside, create_graph=True)[0][:, i] for i in (0, 1)]
    residual = sum(twice).unsqueeze(1) + source
    loss = criterion(residual, torch.zeros_like(residual)) + criterion(model(sides), torch.zeros(len(sides), 1))
    loss.backward()
    return loss


for step in range(101):
    loss = optimizer.step(closure)
    if step % 10 == 0:
        with torch.no_grad():
            error = (model(test) - solution).square().mean().sqrt()
        print(f"step {step}: loss {loss:.2e}, error {error:.2e}")
