"""Traces of `torch.jit` hold the model alone, and leave training as it was."""

import pytest
import torch
from helpers.plain import batch, mlp, train

from kfac_optim import KFACOptimizer


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.:DeprecationWarning")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_is_traced_on_every_step_and_trains_on_as_if_it_was_not(steps: int) -> None:
    ends = []
    for traces in (False, True):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=2)
        train(model, optimizer, steps)
        if traces:
            traced = torch.jit.trace(model, batch())  # type: ignore[no-untyped-call]
            assert torch.equal(traced(batch(1)), model(batch(1)))
        train(model, optimizer, 3, start=steps)
        ends.append(list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))
