"""Optimizers that are handed to processes of their own, as `torch.multiprocessing.spawn` does."""

import copy

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from kfac_optim import EKFAC, Cholesky, KFACOptimizer
from kfac_optim.inverses.base import Inverse


def step(model: nn.Module, optimizer: KFACOptimizer, number: int) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


def go_on(_: int, model: nn.Module, optimizer: KFACOptimizer, results: list[Tensor]) -> None:
    for number in range(3, 5):
        step(model, optimizer, number)
    for result, param in zip(results, model.parameters(), strict=True):
        result.copy_(param.detach())


@pytest.mark.parametrize("inverse", [Cholesky(), EKFAC()], ids=str)
def test_a_spawned_process_goes_on_as_this_one_would(inverse: Inverse[object]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KFACOptimizer(
        model, lr=0.1, momentum=0.9, inverse=inverse, factor_update_period=1, inverse_update_period=2
    )
    for number in range(3):
        step(model, optimizer, number)
    here, its_optimizer = copy.deepcopy((model, optimizer))
    results = [torch.zeros_like(param).share_memory_() for param in model.parameters()]
    mp.spawn(go_on, (model, optimizer, results), nprocs=1)
    for number in range(3, 5):
        step(here, its_optimizer, number)
    assert all(map(torch.equal, results, here.parameters()))
