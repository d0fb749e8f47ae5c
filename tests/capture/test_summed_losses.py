"""The number of terms of a summed loss is that of the step, on steps with statistics and without."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.plain import mlp
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms, MonteCarlo, TrustRegion

pytestmark = pytest.mark.usefixtures("float64")

KAPPA = 1e-3


def judged_by(optimizer: KFACOptimizer) -> float:
    """The number of terms by which the trust region has judged the step."""
    record = optimizer._record
    assert record is not None
    inner, scale = float(record.measures["inner"]), optimizer.metrics()["trust_region_scale"]
    assert scale < math.sqrt(KAPPA / inner), "the other bound held the step"
    return scale**2 * inner**2 / KAPPA


def build(**options: Any) -> tuple[nn.Module, KFACOptimizer]:
    model = mlp()
    chosen = {"loss_terms": LossTerms.SUM, "factor_update_period": 2, "inverse_update_period": 2}
    chosen |= {"step_size": TrustRegion(), **options}
    return model, KFACOptimizer(model, lr=1.0, damping=0.1, kl_clip=KAPPA, **chosen)


def once(model: nn.Module, _: KFACOptimizer, x: Tensor) -> None:
    (model(x) - 3).square().sum().backward()


def in_two(model: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> None:
    for half in x.chunk(2):
        once(model, optimizer, half)


def twice_through(model: nn.Module, _: KFACOptimizer, x: Tensor) -> None:
    loss = (model(x) - 3).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def beside_others(model: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> None:
    """An evaluation that builds a graph, and a backward to the inputs."""
    model(torch.randn(77, 4))
    probe = torch.randn(55, 4, requires_grad=True)
    torch.autograd.grad(model(probe).sum(), probe)
    once(model, optimizer, x)


def after_a_false_start(model: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> None:
    once(model, optimizer, torch.randn(99, 4))
    optimizer.zero_grad()
    once(model, optimizer, x)


def after_one_that_the_model_forgot(model: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> None:
    once(model, optimizer, torch.randn(99, 4))
    model.zero_grad()
    once(model, optimizer, x)


@pytest.mark.parametrize(
    "backward",
    [once, in_two, twice_through, beside_others, after_a_false_start, after_one_that_the_model_forgot],
)
def test_the_terms_are_those_of_the_step(backward: Callable[[nn.Module, KFACOptimizer, Tensor], None]) -> None:
    model, optimizer = build()
    found = []
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        backward(model, optimizer, torch.randn(terms, 4))
        optimizer.step()
        found.append(judged_by(optimizer))
    assert found == pytest.approx([4, 4, 4, 400])


@pytest.mark.usefixtures("_fresh_graphs")
def test_the_terms_of_a_named_loss_are_those_of_the_step_in_compiled_graphs() -> None:
    criterion = nn.CrossEntropyLoss(reduction="sum")
    model, optimizer = build(estimate=MonteCarlo(criterion))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    counts = []
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        criterion(compiled(torch.randn(terms, 4)), torch.arange(terms) % 3).backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [4, 4, 4, 400]


def test_the_terms_of_a_named_loss_are_those_of_the_step() -> None:
    model, optimizer = build(estimate=MonteCarlo(nn.CrossEntropyLoss(reduction="sum")))
    counts = []
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(terms, 4)), torch.arange(terms) % 3, reduction="sum").backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [4, 4, 4, 400]


def test_a_single_example_without_a_batch_dimension_is_one_term_at_every_step() -> None:
    model, optimizer = build()
    counts = []
    for _ in range(4):
        optimizer.zero_grad()
        once(model, optimizer, torch.randn(4))
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [1, 1, 1, 1]


def test_a_step_is_bounded_by_the_terms_of_the_step() -> None:
    """A batch that is a hundred times as large allows a step ten times as long."""
    model, optimizer = build(step_size=TrustRegion())
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        once(model, optimizer, torch.randn(terms, 4))
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        pairs = zip(before, model.parameters(), strict=True)
        decrease = sum(float(((old - new.detach()) * new.grad).sum()) for old, new in pairs)
    assert decrease == pytest.approx(math.sqrt(KAPPA * 400))


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_graphs")
@pytest.mark.parametrize("is_discarded", [False, True])
def test_the_terms_are_those_of_the_step_in_compiled_graphs(is_discarded: bool) -> None:
    model, optimizer = build()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        discarded = compiled(torch.randn(77, 4))
        if is_discarded:
            discarded.sum().backward()
            model.zero_grad()
        (compiled(torch.randn(terms, 4)) - 3).square().sum().backward()
        optimizer.step()
        found.append(judged_by(optimizer))
    assert found == pytest.approx([4, 4, 4, 400])


@pytest.mark.usefixtures("_fresh_graphs")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_last_stage_of_a_pipeline_counts_the_terms_of_a_mean_at_every_step_too(is_compiled: bool) -> None:
    model, optimizer = build(loss_terms=LossTerms.ELEMENTS)
    tally = optimizer._window.tally
    tally.tells = True
    called = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if is_compiled else model
    told = []
    for terms in (4, 4, 4, 400):
        optimizer.zero_grad()
        called(torch.randn(77, 4))
        called(torch.randn(terms, 4)).square().mean().backward()
        told.append(tally.told())
        optimizer.step()
    outputs = model(torch.randn(1, 4)).numel()
    assert told == [4 * outputs, 4 * outputs, 4 * outputs, 400 * outputs]
