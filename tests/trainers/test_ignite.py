"""Ignite: `create_supervised_trainer` trains with the optimizer as a plain loop does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from kfac_optim import KFACOptimizer

engines = pytest.importorskip("ignite.engine")
handlers = pytest.importorskip("ignite.handlers")

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1}
EPOCHS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(4)]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_is_that_of_a_plain_loop(accumulated: int) -> None:
    """With a scheduler of torch, which Ignite steps."""
    model, twin = network(), network()
    optimizer, reference = KFACOptimizer(model, **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    trainer = engines.create_supervised_trainer(
        model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=accumulated
    )
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer.add_event_handler(engines.Events.EPOCH_COMPLETED, lambda _: scheduler.step())
    trainer.run(batches(), max_epochs=EPOCHS)
    plain = StepLR(reference, 1, gamma=0.5)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(batches()):
            if i % accumulated == 0:
                reference.zero_grad()
            (nn.functional.cross_entropy(twin(x), y) / accumulated).backward()
            if (i + 1) % accumulated == 0:
                reference.step()
        plain.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizer.metrics() == reference.metrics()
