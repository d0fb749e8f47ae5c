"""Sequences of their own lengths as a nested tensor: the statistics are those of the sequences one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_same_factors
from torch import Tensor, nn

from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer, LossTerms, MonteCarlo, WeightSharing
from kfac_optim.fisher.estimates import Empirical, Estimate

pytestmark = pytest.mark.usefixtures("float64")

LENGTHS = (3, 1, 4)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(9, 4), nn.Linear(4, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.hidden(self.embedding(ids)).tanh()))
        return output


def sequences() -> list[Tensor]:
    return [torch.arange(length) * 2 + i for i, length in enumerate(LENGTHS)]


def jagged(model: nn.Module) -> Tensor:
    values: Tensor = model(torch.nested.nested_tensor(sequences(), layout=torch.jagged)).values()
    return values


def padded(model: nn.Module) -> Tensor:
    """The same by hand: the rows that are padding do not enter the loss."""
    ids = nn.utils.rnn.pad_sequence(sequences(), batch_first=True)
    output: Tensor = model(ids)
    return torch.cat([row[:length] for row, length in zip(output, LENGTHS, strict=True)])


def trained(forward: Callable[[nn.Module], Tensor], **options: Any) -> tuple[Tagger, KFACOptimizer]:
    model = Tagger()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        forward(model).square().sum(-1).mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("inverse", [Cholesky(), EKFAC(per_example=True)])
@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_statistics_and_steps(inverse: Inverse, sharing: WeightSharing) -> None:
    options = {"inverse": inverse, "weight_sharing": sharing}
    model, optimizer = trained(jagged, **options)
    twin, reference = trained(padded, **options)
    assert_same_factors(optimizer.factors(), reference.factors(), rtol=1e-9)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("rule", "terms"), [(LossTerms.POSITIONS, 8), (LossTerms.ELEMENTS, 24)])
def test_rules_of_the_output_count_what_is_there(rule: LossTerms, terms: int) -> None:
    model = Tagger()
    optimizer = KFACOptimizer(model, loss_terms=rule)
    jagged(model).square().mean().backward()
    optimizer.step()
    assert optimizer._record is not None
    assert optimizer._record.count.averaged == terms


class Pooled(Tagger):
    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return torch.stack([row.mean(0) for row in rows.unbind()])


@pytest.mark.parametrize("estimate", [Empirical(), MonteCarlo(nn.MSELoss())])
def test_layers_within_a_model_of_plain_outputs(estimate: Estimate) -> None:
    model = Pooled()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=estimate)
    model(torch.nested.nested_tensor(sequences(), layout=torch.jagged)).square().mean().backward()
    optimizer.step()
    assert optimizer.metrics()["blocks_without_statistics"] == 0
    assert float(optimizer.factors()["hidden"][0][0, -1, -1]) == pytest.approx(1)  # type: ignore[index]
