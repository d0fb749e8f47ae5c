"""Squares that are finite as a sum and overflow where they are multiplied by the terms of the loss are no sample."""

import pytest
import torch
from helpers.plain import assert_same_factors
from torch import nn

from kfac_optim import EKFAC, Cholesky, DoublyFactored, Inverse, KFACOptimizer, LowRank


@pytest.mark.parametrize("layers", [1, 3], ids=["alone", "in a batch"])
@pytest.mark.parametrize("inverse", [Cholesky(), EKFAC(), DoublyFactored(2), LowRank(2, sketch=4)], ids=repr)
def test_a_sum_that_its_scale_makes_infinite_is_refused(inverse: Inverse, layers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(layers)))
    optimizer = KFACOptimizer(model, lr=0.0, inverse=inverse, factor_update_period=1, inverse_update_period=1)
    for size in (1.0, 1.0, 1e20):
        before = optimizer.factors()
        optimizer.zero_grad()
        (size * model(torch.randn(1000, 12)).square().sum(1)).mean().backward()
        optimizer.step()
    assert_same_factors(optimizer.factors(), before, rtol=0)
    assert optimizer.metrics()["refused_statistics"] == layers
