"""Layers without elements, without examples, or out of reach of hooks take the plain SGD step, and nothing crashes."""

from collections.abc import Callable

import pytest
import torch
from helpers.plain import FREQUENT, batch, clones, mlp
from torch import Tensor, nn

from kfac_optim import KFACOptimizer

pytestmark = pytest.mark.usefixtures("float64")


def assert_sgd(model: nn.Module, twin: nn.Module, x: Tensor, reason: str) -> None:
    """Both take the same steps, the one by ours; the reason stands in the summary."""
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for net, each in ((model, optimizer), (twin, reference)):
            each.zero_grad()
            net(x).square().sum().backward()
            each.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert reason in str(optimizer.summary())


def empty_embedding() -> nn.Module:
    return nn.Embedding(3, 0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Linear(3, 0), torch.ones(4, 3)),
        (lambda: nn.Linear(0, 3), torch.ones(4, 0)),
        (empty_embedding, torch.arange(3)),
        (lambda: nn.LayerNorm(0), torch.ones(4, 0)),
    ],
    ids=["linear to nothing", "linear of nothing", "embedding", "norm"],
)
def test_layers_without_elements(build: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    model = build()
    twin = build()
    twin.load_state_dict(model.state_dict())
    assert_sgd(model, twin, x if build is empty_embedding else x.double(), "has no elements")


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, batch())])
def test_models_compiled_by_jit(compiled: Callable[[nn.Module], nn.Module]) -> None:
    assert_sgd(compiled(mlp()), mlp(), batch(), "was compiled by torch.jit")


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_parts_compiled_by_jit_leave_the_rest_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(mlp()))
    optimizer = KFACOptimizer(model, lr=0.1)
    model(batch()).square().sum().backward()
    optimizer.step()
    assert optimizer.factors().keys() == {"0"}
    assert "'1' was compiled by torch.jit" in str(optimizer.summary())


def test_batches_without_examples_change_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, **FREQUENT)
    for examples in (0, 8, 0):
        optimizer.zero_grad()
        before = clones(model.parameters())
        model(torch.randn(examples, 4)).square().sum().backward()
        optimizer.step()
        moved = [not torch.equal(then, now) for then, now in zip(before, model.parameters(), strict=True)]
        assert all(moved) if examples else not any(moved)
