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


def after_a_false_start(model: nn.Module, call: Call, x: Tensor) -> None:
    (100 * cost(call(model, x))).backward()  # type: ignore[arg-type]
    model.zero_grad()
    whole(model, call, x)


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


@pytest.mark.parametrize("run", [whole, accumulated, two_losses, after_a_false_start])
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


class Halves(nn.Module):
    """A part that owns a matrix which a function multiplies by, beside a layer; and one with a fused LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Mixed(), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x).unsqueeze(1))[0].squeeze(1)
        return output


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).tanh() @ self.mix
        return output


def by_parts(model: Halves, x: Tensor) -> Tensor:
    output: Tensor = model.second(model.first(x).unsqueeze(1))[0].squeeze(1)
    return output


def test_gradients_that_the_model_forgot_count_nowhere_in_layers_that_others_note() -> None:
    """In the mode that looks for matrices, and in the layer that runs as several calls."""
    factors = []
    for call, dropped in ((by_parts, True), (lambda model, x: model(x), False)):
        model = Halves()
        optimizer = KFACOptimizer(model, lr=0.1, **FREQUENT)
        for i in range(4):
            if dropped and i > 1:
                (100 * cost(call(model, batch(9)))).backward()
                model.zero_grad()
            cost(call(model, batch(i))).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            optimizer.zero_grad()
        factors.append(optimizer.factors())
    assert_same_factors(*factors)


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


# -- forwards of which nobody wants to hear anything -----------------------------------------------------------------


def idle_within(model: nn.Module, layer: nn.Module, optimizer: KFACOptimizer, x: Tensor) -> bool:
    """Whether layers of the model return at once in a forward, after which they never do."""
    seen = []
    with layer.register_forward_hook(lambda *_: seen.append(optimizer._window.idle.on)):
        model(x).square().mean().backward()
    assert not optimizer._window.idle.on
    return all(seen)


def test_layers_ask_nothing_in_forwards_of_plain_steps_alone() -> None:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=3)
    idle = []
    for i in range(7):
        optimizer.zero_grad()
        idle.append(idle_within(model, model.encoder, optimizer, batch(i)))
        optimizer.step()
    assert idle == [i % 3 != 0 for i in range(7)]
    optimizer.param_groups[0]["factor_update_period"] = 1
    assert not idle_within(model, model.encoder, optimizer, batch(7)), "a period that was edited counts at once"


@pytest.mark.parametrize("call", ["two methods", "parts"])
def test_parts_of_a_model_are_measured_after_plain_steps_of_the_whole(call: str) -> None:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=3)
    for i in range(4):
        optimizer.zero_grad()
        out = OUTSIDE[call](model, batch(i)) if i == 3 else model(batch(i))
        out.square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    assert [block.clock.folded_at for block in optimizer._binding.coverage.blocks] == [3, 3]


def test_a_forward_that_was_interrupted_leaves_no_layer_deaf() -> None:
    model = Coder()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=2)
    model(batch(0)).square().mean().backward()
    optimizer.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with model.decoder.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        model(batch(1))
    optimizer.zero_grad()
    assert not optimizer._window.idle.on


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late = nn.Linear(4, 3), nn.LazyLinear(3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.late(x) if both else out


def test_a_lazy_layer_that_runs_first_in_a_plain_step_is_measured_in_it() -> None:
    model = Branches()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=100)
    for i in range(3):
        optimizer.zero_grad()
        model(batch(i), i == 2).square().mean().backward()
        optimizer.step()
    assert {block.name: block.clock.folds for block in optimizer._binding.coverage.blocks} == {"first": 1, "late": 1}
