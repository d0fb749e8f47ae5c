"""What a compiled model writes into an object in its forward is there when it reads it back, whatever its layers are.

torch.compile (2.13) forgets it where a hook of ours is traced, if the object's dict was looked into before: models then
go on with what the object held at first, as those of Hugging Face did, which choose their loss by their config.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import assert_same_factors
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms

X = (3, 2, 4)


class Config:
    def __init__(self) -> None:
        self.loss: str | None = None
        self.wanted = "square"


class Writing(nn.Module):
    """Looks into its config, runs its layer, writes which loss it takes into the config and goes by that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.config = layer, Config()

    def forward(self, x: Tensor) -> Tensor:
        wanted = vars(self.config)["wanted"]
        output = self.layer(x)
        self.config.loss = wanted
        if self.config.loss == "square":
            return output.square().mean()
        raise AssertionError(f"the loss is {self.config.loss!r}")


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """A functional product by the weight of an embedding, and one by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixed = nn.Embedding(5, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embedding(x.argmax(-1)) @ self.mixed, self.embedding.weight)


class First(nn.Module):
    """The output of a recurrent layer, without its state; of a cell it is the state after two steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNNBase):
            return self.layer(x)[0]
        state = self.layer(x[:, 0])
        state = self.layer(x[:, 1], state)
        return state[0] if isinstance(state, tuple) else state


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(4, 2, batch_first=True),
    "convolution": lambda: nn.Conv1d(2, 3, 3),
    "linear": lambda: nn.Linear(4, 3),
    "tied and functional": Tied,
    "LSTM": lambda: First(nn.LSTM(4, 3, batch_first=True, bidirectional=True, proj_size=2)),
    "LSTM cell": lambda: First(nn.LSTMCell(4, 3)),
    "GRU cell": lambda: First(nn.GRUCell(4, 3)),
}


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    # Without it a graph ends at recurrent layers, which then run as in eager mode.
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


def factors_of(layer: Callable[[], nn.Module], backend: Any) -> Any:
    torch.manual_seed(0)
    model = Writing(layer()).double()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    called: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for step in range(2):
        optimizer.zero_grad()
        model.config.loss = None
        called(torch.randn(X, dtype=torch.float64, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    return optimizer.factors()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_is_written_after_a_layer_is_read_back(layer: Callable[[], nn.Module]) -> None:
    assert_same_factors(factors_of(layer, "aot_eager"), factors_of(layer, None), rtol=1e-9)


def without_dead_code(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_a_backend_that_removes_dead_code_leaves_what_watches_a_recurrence() -> None:
    """Nothing is made of what it gives back: its input is known when its output has been used."""
    cell = LAYERS["LSTM cell"]
    assert_same_factors(factors_of(cell, without_dead_code), factors_of(cell, None), rtol=1e-9)


def test_what_is_written_after_a_model_with_a_summed_loss_is_read_back() -> None:
    """On steps without statistics, too, a graph tells of the backward that comes to the model's output."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = KFACOptimizer(model, lr=0.1, loss_terms=LossTerms.SUM, factor_update_period=3)
    writing = Writing(model)
    around = torch.compile(writing, backend="aot_eager", fullgraph=True)
    counts = []
    for _ in range(3):
        optimizer.zero_grad()
        writing.config.loss = None
        around(torch.randn(5, 4)).backward()
        optimizer.step()
        counts.append(optimizer._record.count.summed)  # type: ignore[union-attr]
    assert counts == [5, 5, 5]
