"""Models and optimizers are freed with the last reference to them, before the garbage collector runs."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.plain import FREQUENT, mlp
from helpers.saved import SavedTensors
from torch import Tensor, nn

from kfac_optim import Background, KFACOptimizer, MonteCarlo, QuadraticModel

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Families(nn.Module):
    """Layers of most kinds, of which one is tied to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.GRU(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden, _ = self.recurrent(hidden)
        hidden = self.norm(self.conv(hidden.mT).mT)
        output: Tensor = hidden @ self.embedding.weight.mT
        return output


def take_steps(model: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model(x)  # without a backward


SQUARES = MonteCarlo(nn.MSELoss())
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "empirical": (mlp, {}),
    "monte carlo": (mlp, {"estimate": SQUARES}),
    "quadratic model": (mlp, {"estimate": SQUARES, "step_size": QuadraticModel()}),
    "background": (mlp, {"refresh": Background(max_staleness=0)}),
    "families": (Families, {}),
    "families, monte carlo": (Families, {"estimate": SQUARES}),
}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("given", ["model", "parameters"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_garbage_collector(case: str, given: str) -> None:
    build, options = CASES[case]
    model = build()
    x = torch.randn(6, 4) if build is mlp else torch.arange(15).view(5, 3) % 7
    optimizer = KFACOptimizer(model if given == "model" else model.parameters(), **FREQUENT, **options)
    take_steps(model, optimizer, x)
    alive = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    assert not any(ref() is not None for ref in alive)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    "use",
    [
        lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda model, optimizer: copy.deepcopy((model, optimizer)),
        lambda _, optimizer: optimizer.remove_hooks(),
    ],
    ids=["checkpoint", "copy", "remove_hooks"],
)
def test_nor_after_other_uses(use: Callable[[nn.Module, KFACOptimizer], object]) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model)
    take_steps(model, optimizer, torch.randn(6, 4))
    use(model, optimizer)
    alive = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    assert not any(ref() is not None for ref in alive)


def test_an_optimizer_that_outlives_the_modules_of_its_process_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = KFACOptimizer(mlp())
    monkeypatch.setattr(f"{KFACOptimizer.__module__}.sys", None)  # as an interpreter leaves it when it ends
    del optimizer
    gc.collect()


def test_an_optimizer_that_is_gone_leaves_no_hooks_on_parameters() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model)
    model(torch.randn(6, 4))
    assert any(param._post_accumulate_grad_hooks for param in model.parameters())
    del optimizer
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.usefixtures("_no_collector")
def test_a_model_trains_on_after_its_optimizer() -> None:
    """What was traced or hooked before holds nothing of the optimizer that is gone."""
    model = mlp()
    optimizer = KFACOptimizer(model)
    output = model(torch.randn(6, 4))
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None
    output.square().mean().backward()
    model(torch.randn(6, 4)).square().mean().backward()


@pytest.mark.parametrize("called", [True, False], ids=["at the criterion", "at the model's output"])
def test_losses_that_are_kept_keep_no_outputs(called: bool) -> None:
    model, criterion = mlp(sizes=(4, 6, 11)), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, estimate=MonteCarlo(criterion), factor_update_period=1)
    kept = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (criterion if called else nn.CrossEntropyLoss())(model(torch.randn(29, 4)), torch.randint(11, (29,)))
        kept.append(loss)
        loss.backward()
        optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Tensor and each.shape == (29, 11)]


@pytest.mark.parametrize("read", [0, 1])
def test_a_layer_that_runs_behind_the_first_output_keeps_no_graph_alive(read: int) -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).tanh()
            return hidden, self.head(hidden)

    model, criterion = TwoOutputs(), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(criterion), factor_update_period=1)
    with SavedTensors() as saved:
        outputs = model(torch.randn(5, 4))
        criterion(outputs[read], torch.zeros_like(outputs[read])).backward()
    del outputs
    optimizer.step()
    assert saved.all_gone()
    assert optimizer.metrics()["measured_parameters"] > 0.4
