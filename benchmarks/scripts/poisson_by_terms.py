"""Solve −Δu = f as `poisson.py` does, by Kronecker factors for each term of the loss and the exact quadratic model.

The method is KFAC* of Dangel, Müller & Zeinhofer 2024 (arXiv 2405.15603): one pass through the model carries value,
gradient and Laplacian, so that each layer's factors are made of all of them.
"""
# mypy: ignore-errors

import argparse

import torch
from torch import nn

from kfac_optim import ExactGGN, KFACOptimizer, QuadraticModel, SumOfTerms
from kfac_optim.schedulers import HyperparameterScheduler
from kfac_optim.taylor import laplacian

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

# Weights and points are drawn as in the experiments of the paper; its published run has the seed 1.
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).double()
inside, sides = torch.rand(900, 2).double(), torch.rand(120, 2).double()
across, end = torch.randint(2, (120,)), torch.randint(2, (120,))
sides[torch.arange(120), across] = end.double()
test = torch.rand(9000, 2).double()
torch.set_default_dtype(torch.float64)
source = 2 * torch.pi**2 * torch.sin(torch.pi * inside).prod(1, keepdim=True)
solution = torch.sin(torch.pi * test).prod(1, keepdim=True)  # known here, to see the error

criterion = nn.MSELoss()
optimizer = KFACOptimizer(
    model,
    lr=1.0,
    momentum=0.9,  # above 0: the quadratic model finds both
    damping=1.0,
    factor_decay=0.5,
    factor_update_period=1,
    inverse_update_period=1,
    inverse=SumOfTerms(),
    step_size=QuadraticModel(),
    estimate=ExactGGN(criterion),
)
# Large while the factors are young, and then inversely proportional to the steps.
damping = HyperparameterScheduler(optimizer, "damping", lambda step: max(0.5**step, 1e-6 / (step + 1)))

for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    residual = laplacian(model, inside).laplacian + source
    loss = criterion(residual, torch.zeros_like(residual)) + criterion(model(sides), torch.zeros(len(sides), 1))
    loss.backward()
    optimizer.step()
    damping.step()
    if step in (10, 100, 300, 653, 1000, 1539, 2000, 3000) or step == args.steps:
        with torch.no_grad():
            error = (model(test) - solution).square().mean().sqrt()
        print(f"step {step}: loss {loss.item():.2e}, error {error:.2e}", flush=True)
