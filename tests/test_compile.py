"""Models under `torch.compile`: the factors and steps of the eager model, in one graph with statistics and one without."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from plain import assert_identical, clones
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms

BACKEND = "aot_eager"  # traces and partitions as inductor does, and computes with eager kernels


class Tied(nn.Module):
    """A language model whose output layer is a function of the embedding's weight, with a weight of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.mixed = nn.Parameter(torch.randn(5, 5))
        self.shift = nn.Parameter(torch.randn(5))
        self.norm = nn.RMSNorm(5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.addmm(self.shift, self.embedding(ids).flatten(0, 1), self.mixed).unflatten(0, ids.shape)
        return F.linear(self.norm(torch.tanh(hidden)), self.embedding.weight)


class Branch(nn.Module):
    """A layer that runs twice, a residual added in place, a keyword input, a structured output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        hidden += x
        torch.relu_(hidden)
        return {"a": self.twice(hidden), "b": self.twice(torch.tanh(hidden + shift))}


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 2, stride=2),
        nn.GroupNorm(3, 3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


def mean_square(output: Any) -> Tensor:
    return torch.stack([leaf.square().mean() for leaf in torch.utils._pytree.tree_leaves(output)]).sum()


def images(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (random(seed, 6, 2, 4, 4),), {}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    options: dict[str, Any] = field(default_factory=dict)
    fullgraph: bool = True


CASES = {
    "linear": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        lambda seed: ((random(seed, 8, 4),), {}),
    ),
    "convolutions and norms": Case(conv_net, images),
    "attention": Case(transformer, lambda seed: ((random(seed, 3, 5, 8),), {}), {"loss_terms": LossTerms.POSITIONS}),
    "functions of parameters": Case(
        Tied,
        lambda seed: ((torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(seed)),), {}),
        {"loss_terms": LossTerms.POSITIONS},
    ),
    "keywords and reuse": Case(
        Branch, lambda seed: ((random(seed, 6, 4),), {"shift": random(seed + 1000, 6, 4)}), {"kl_clip": None}
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Compiled = tuple[Callable[..., Any], KFACOptimizer]


def optimizer_then_compile(model: nn.Module, backend: Any, fullgraph: bool, **options: Any) -> Compiled:
    optimizer = KFACOptimizer(model, **options)
    return torch.compile(model, backend=backend, fullgraph=fullgraph), optimizer


def compile_then_optimizer(model: nn.Module, backend: Any, fullgraph: bool, **options: Any) -> Compiled:
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    return compiled, KFACOptimizer(compiled, **options)


def compile_in_place(model: nn.Module, backend: Any, fullgraph: bool, **options: Any) -> Compiled:
    optimizer = KFACOptimizer(model, **options)
    model.compile(backend=backend, fullgraph=fullgraph)
    return model, optimizer


def compile_a_function(model: nn.Module, backend: Any, fullgraph: bool, **options: Any) -> Compiled:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    optimizer = KFACOptimizer(model, **options)
    return torch.compile(forward, backend=backend, fullgraph=fullgraph), optimizer


ORDERS = [optimizer_then_compile, compile_then_optimizer, compile_in_place, compile_a_function]


def train(call: Callable[..., Any], optimizer: KFACOptimizer, case: Case, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        args, kwargs = case.inputs(seed)
        mean_square(call(*args, **kwargs)).backward()
        optimizer.step()


def build(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = case.build().double()
    return model, copy.deepcopy(model)


def all_factors(optimizer: KFACOptimizer) -> dict[str, list[Tensor]]:
    return {name: [f for f in pair if f is not None] for name, pair in optimizer.factors().items()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_compiled_model_takes_the_steps_of_the_eager_one_in_two_graphs(case: Case, order: Any) -> None:
    model, twin = build(case)
    options = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 4, **case.options}
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    torch._dynamo.utils.counters.clear()
    call, optimizer = order(model, counter, case.fullgraph, **options)
    reference = KFACOptimizer(twin, **options)
    train(call, optimizer, case, range(7))
    train(twin, reference, case, range(7))
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0.0
    assert counter.frame_count == 2, "one graph with statistics, one without"
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
