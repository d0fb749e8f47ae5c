"""Models that are called by other ways than their own forward train as those that are called by it."""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.plain import FREQUENT, assert_same_factors, batch, clones
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms, MonteCarlo

pytestmark = pytest.mark.usefixtures("float64")

ASSUMED = r"averaged over is taken to be {}, .*set_loss_terms\(n\)"


@dataclass
class Batch:
    size: int
    x: Tensor


class Opaque:
    """No container that anybody looks into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor | None = None, *, named: Tensor | None = None, held: Any = None) -> Tensor:
        given = named if x is None else x
        if held is not None:
            given = held["x"] if isinstance(held, Mapping) else held.x
        assert given is not None
        return self.decode(self.encode(given))

    def encode(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x)
        return hidden.tanh()

    def decode(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.decoder(hidden)
        return output

    def evaluate(self, x: Tensor) -> Tensor:
        return Coder.forward(self, x)


Call = Callable[[Coder, Tensor], Tensor]

OUTSIDE: dict[str, Call] = {
    "another method": lambda model, x: model.evaluate(x),
    "two methods": lambda model, x: model.decode(model.encode(x)),
    "parts": lambda model, x: model.decoder(model.encoder(x).tanh()),
    "an argument without tensors": lambda model, x: model(held=Opaque(x)),
}

WITHIN: dict[str, Call] = {
    "keywords": lambda model, x: model(named=x),
    "a dataclass": lambda model, x: model(held=Batch(3, x)),
    "a mapping of its own kind": lambda model, x: model(held=UserDict(size=3, x=x)),
    "functional_call": lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "forward after a part": lambda model, x: model(x) + 0 * model.encode(x[:1]).sum(),
}


def cost(output: Tensor) -> Tensor:
    return (output - 1).square().sum() / (2 * len(output))


def whole(model: nn.Module, call: Call, x: Tensor) -> None:
    cost(call(model, x)).backward()  # type: ignore[arg-type]


def accumulated(model: nn.Module, call: Call, x: Tensor) -> None:
    for part in x.chunk(2):
        (cost(call(model, part)) / 2).backward()  # type: ignore[arg-type]


def two_losses(model: nn.Module, call: Call, x: Tensor) -> None:
    """Two backwards through one graph, of which the second comes to other layers first."""
    output = call(model, x)  # type: ignore[arg-type]
    cost(output).backward(retain_graph=True)
    cost(output.square()).backward()


def forward(model: Coder, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def trained(call: Call, run: Callable[[nn.Module, Call, Tensor], None], **options: Any) -> tuple[Coder, KFACOptimizer]:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.1, **FREQUENT, **options)
    for i in range(3):
        optimizer.zero_grad()
        run(model, call, batch(i))
        optimizer.step()
    return model, optimizer


def assert_trains_alike(call: Call, run: Callable[[nn.Module, Call, Tensor], None], **options: Any) -> None:
    model, optimizer = trained(call, run, **options)
    twin, reference = trained(forward, run, **options)
    assert_same_factors(optimizer.factors(), reference.factors())
    for ours, theirs in zip(clones(model.parameters()), clones(twin.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("run", [whole, accumulated, two_losses])
@pytest.mark.parametrize("call", OUTSIDE.values(), ids=OUTSIDE)
def test_layers_outside_the_models_forward_show_the_number_of_terms(
    call: Call, run: Callable[[nn.Module, Call, Tensor], None]
) -> None:
    with pytest.warns(UserWarning, match=ASSUMED.format(8)) as caught:
        assert_trains_alike(call, run)
    assert len(caught) == 1, "it is said once"
    assert "test_entry_points" in caught[0].filename


@pytest.mark.parametrize("call", WITHIN.values(), ids=WITHIN)
def test_calls_that_show_the_number_of_terms_need_no_word(call: Call) -> None:
    assert_trains_alike(call, whole)


@pytest.mark.parametrize(("rule", "terms"), [(LossTerms.POSITIONS, 8), (LossTerms.ELEMENTS, 32)])
def test_rules_of_the_output_look_at_the_layer_that_ran_last(rule: LossTerms, terms: int) -> None:
    with pytest.warns(UserWarning, match=ASSUMED.format(terms)):
        assert_trains_alike(OUTSIDE["parts"], whole, loss_terms=rule)


def test_summed_losses_and_stated_terms_need_no_word() -> None:
    assert_trains_alike(OUTSIDE["parts"], whole, loss_terms=LossTerms.SUM)
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.1)
    cost(model.evaluate(batch())).backward()
    optimizer.set_loss_terms(8)
    optimizer.step()


class Recurrence(nn.Module):
    """A layer that runs several times, and one that is handed all of its rows at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for _ in range(3):
            hidden = self.cell(hidden).tanh()
        output: Tensor = self.head(hidden)
        return output

    def evaluate(self, x: Tensor) -> Tensor:
        return Recurrence.forward(self, x)


@pytest.mark.parametrize("x", [batch(), batch()[0]], ids=["batch", "single example"])
def test_layers_that_run_several_times_are_of_one_call(x: Tensor) -> None:
    model, twin = Recurrence(), Recurrence()
    ours, theirs = KFACOptimizer(model), KFACOptimizer(twin)
    for _ in range(2):
        model.evaluate(x).square().mean().backward()
        twin(x).square().mean().backward()
    with pytest.warns(UserWarning, match=ASSUMED.format(16 if x.dim() > 1 else 2)):
        ours.step()
    theirs.step()
    assert_same_factors(ours.factors(), theirs.factors())


class Families(nn.Module):
    """Layers that hand over their rows with the batch elsewhere than in front."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden, _ = self.recurrent(hidden)
        output: Tensor = self.head(hidden.mT)
        return output

    def evaluate(self, x: Tensor) -> Tensor:
        return Families.forward(self, x)


def test_the_batch_is_found_wherever_a_layer_has_it() -> None:
    model, twin = Families(), Families()
    ours, theirs = KFACOptimizer(model), KFACOptimizer(twin)
    x = torch.arange(15).view(3, 5) % 7
    model.evaluate(x).square().mean().backward()
    twin(x).square().mean().backward()
    with pytest.warns(UserWarning, match=ASSUMED.format(3)):
        ours.step()
    theirs.step()
    assert_same_factors(ours.factors(), theirs.factors())


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_part_shows_the_number_of_terms() -> None:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.1)
    encode = torch.compile(model.encoder, backend="aot_eager")
    cost(model.decoder(encode(batch()))).backward()
    with pytest.warns(UserWarning, match=ASSUMED.format(8)):
        optimizer.step()
    assert optimizer.factors()["encoder"][1] is not None


def test_estimates_that_name_the_loss_leave_such_layers_to_sgd_and_say_so() -> None:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(nn.MSELoss()))
    before = clones(model.parameters())
    cost(model.evaluate(batch())).backward()
    with pytest.warns(UserWarning, match="2 layers have gradients but no statistics"):
        optimizer.step()
    for start, param in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), start - 0.1 * param.grad)


def test_ordinary_training_needs_no_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(forward, whole)
