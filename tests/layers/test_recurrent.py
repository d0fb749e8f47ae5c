"""The oracle runs every sequence by itself, time step by time step, with a module of its own for each matrix."""

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import STRUCTURES, any_loss, sizes, snapshot
from helpers.oracles import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.layers.recurrent import RecurrentAdapter

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

SEQUENCE = (nn.RNN, nn.LSTM, nn.GRU)
CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
ADAPTERS = {**DEFAULT_ADAPTERS, **dict.fromkeys(SEQUENCE + CELLS, RecurrentAdapter())}
KINDS = ("LSTM", "GRU", "tanh", "relu")
TERMS = 5


def kfac(model: nn.Module, **options: Any) -> KFACOptimizer:
    return KFACOptimizer(model, adapters=ADAPTERS, **{"lr": 0.0, "factor_update_period": 1, **options})


# -- oracle ------------------------------------------------------------------------------------------------------


class Linears(nn.Module):
    """A recurrent module's matrices as linear layers, with copies of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.matrices = nn.ModuleDict()
        self.module = (module,)  # not a child
        for name, weight in module.named_parameters():
            if name.startswith("weight"):
                bias = getattr(module, name.replace("weight", "bias"), None)
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
                linear.weight = copy.deepcopy(weight)
                linear.bias = copy.deepcopy(bias)
                self.matrices[name] = linear

    def step(self, suffix: str, layer_input: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """`[1, features]` each."""
        (module,) = self.module
        of_input, of_hidden = self.matrices["weight_ih" + suffix](layer_input), self.matrices["weight_hh" + suffix](h)
        if isinstance(module, (nn.LSTM, nn.LSTMCell)):
            enter, forget, new, leave = (of_input + of_hidden).chunk(4, dim=-1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
            h = torch.sigmoid(leave) * torch.tanh(c)
            return (self.matrices["weight_hr" + suffix](h) if "weight_hr" + suffix in self.matrices else h), c
        if isinstance(module, (nn.GRU, nn.GRUCell)):
            size = h.shape[-1]
            reset = torch.sigmoid(of_input[:, :size] + of_hidden[:, :size])
            update = torch.sigmoid(of_input[:, size : 2 * size] + of_hidden[:, size : 2 * size])
            new = torch.tanh(of_input[:, 2 * size :] + reset * of_hidden[:, 2 * size :])
            return (1 - update) * new + update * h, c
        return getattr(torch, module.nonlinearity)(of_input + of_hidden), c

    def forward(
        self, sequences: list[Tensor], h: Tensor, c: Tensor, masks: list[list[Tensor]]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Sequences `[time, features]`, states `[layers · directions, batch, size]`, dropout masks by layer."""
        (module,) = self.module
        directions = ["", "_reverse"][: 2 if module.bidirectional else 1]
        last_h, last_c = {}, {}
        for layer in range(module.num_layers):
            outputs = []
            for n, sequence in enumerate(sequences):
                columns = []
                for direction, reverse in enumerate(directions):
                    at = layer * len(directions) + direction
                    rows = [row[None] for row in sequence]
                    state = h[at, n][None], c[at, n][None]
                    column = []
                    for row in rows[::-1] if reverse else rows:
                        state = self.step(f"_l{layer}{reverse}", row, *state)
                        column.append(state[0])
                    columns.append(torch.cat(column[::-1] if reverse else column))
                    last_h[at, n], last_c[at, n] = state
                outputs.append(torch.cat(columns, dim=-1))
            if layer < len(masks):
                outputs = [output * mask for output, mask in zip(outputs, masks[layer], strict=True)]
            sequences = outputs
        finals = [
            torch.stack([torch.cat([last[at, n] for n in range(len(sequences))]) for at in range(len(h))])
            for last in (last_h, last_c)
        ]
        return sequences, finals[0], finals[1]


class Form(Enum):
    BATCH = "batch"
    SINGLE = "one sequence without a batch dimension"
    SORTED = "packed, longest first"
    UNSORTED = "packed"


@dataclass(frozen=True)
class Case:
    kind: str
    inputs: int
    hidden: int
    layers: int
    bidirectional: bool
    bias: bool
    frozen_bias: bool
    batch_first: bool
    dropout: float
    training: bool
    projected: int
    lengths: tuple[int, ...]
    form: Form
    stated: bool

    def module(self) -> nn.Module:
        options: dict[str, Any] = {
            "num_layers": self.layers,
            "bidirectional": self.bidirectional,
            "bias": self.bias,
            "batch_first": self.batch_first,
            "dropout": self.dropout if self.layers > 1 else 0.0,
        }
        if self.kind == "LSTM":
            options["proj_size"] = self.projected
        if self.kind in ("tanh", "relu"):
            options["nonlinearity"] = self.kind
        module = getattr(nn, "RNN" if self.kind in ("tanh", "relu") else self.kind)(self.inputs, self.hidden, **options)
        if self.bias and self.frozen_bias:
            module.bias_ih_l0.requires_grad_(False)
        return module.train(self.training)

    @property
    def size(self) -> int:
        """Of `h`."""
        return self.projected if self.kind == "LSTM" and self.projected else self.hidden

    def sequences(self) -> list[Tensor]:
        return [torch.randn(length, self.inputs, requires_grad=True) for length in self.lengths]

    def states(self) -> tuple[Tensor, Tensor]:
        draw = torch.randn if self.stated else torch.zeros
        shape = self.layers * (1 + self.bidirectional), len(self.lengths)
        return draw(*shape, self.size, requires_grad=self.stated), draw(*shape, self.hidden, requires_grad=self.stated)

    def packed(self, sequences: list[Tensor]) -> PackedSequence:
        return pack_sequence(sequences, enforce_sorted=self.form is not Form.UNSORTED)

    def run(
        self, module: nn.Module, sequences: list[Tensor], h: Tensor, c: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """The module's own outputs `[time, features]` for each sequence, and its last states."""
        module_input: Any
        if self.form is Form.SINGLE:
            module_input, h, c = sequences[0], h.squeeze(1), c.squeeze(1)
        elif self.form is Form.BATCH:
            module_input = torch.stack(sequences, dim=0 if self.batch_first else 1)
        else:
            module_input = self.packed(sequences)
        state = (h, c) if self.kind == "LSTM" else h
        output, last = module(module_input, state) if self.stated else module(module_input)
        last_h, last_c = last if self.kind == "LSTM" else (last, None)
        if self.form is Form.SINGLE:
            return [output], last_h[:, None], None if last_c is None else last_c[:, None]
        if self.form is Form.BATCH:
            return list(output if self.batch_first else output.transpose(0, 1)), last_h, last_c
        return unpack_sequence(output), last_h, last_c

    def masks(self, sequences: list[Tensor]) -> list[list[Tensor]]:
        """What dropout multiplies by, for each layer but the last and each sequence: drawn as torch draws it."""
        if not (self.dropout and self.training):
            return []
        wide = self.size * (1 + self.bidirectional)
        like = pack_sequence([sequence.new_ones(len(sequence), wide) for sequence in sequences], enforce_sorted=False)
        if self.form is Form.SORTED:
            like = self.packed([sequence.new_ones(len(sequence), wide) for sequence in sequences])
        return [unpack_sequence(like._replace(data=F.dropout(like.data, self.dropout))) for _ in range(self.layers - 1)]


@st.composite
def cases(draw: st.DrawFn, forms: Iterable[Form] = Form, kinds: Iterable[str] = KINDS) -> Case:
    form = draw(st.sampled_from(list(forms)))
    lengths = [draw(sizes(4))] * (1 if form is Form.SINGLE else draw(sizes(3)))
    if form in (Form.SORTED, Form.UNSORTED):
        lengths = draw(st.lists(sizes(4), min_size=1, max_size=3, unique=True))
    if form is Form.SORTED:
        lengths.sort(reverse=True)
    hidden = draw(st.integers(2, 4))
    return Case(
        kind=draw(st.sampled_from(list(kinds))),
        inputs=draw(sizes(3)),
        hidden=hidden,
        layers=draw(sizes(3)),
        bidirectional=draw(st.booleans()),
        bias=draw(st.booleans()),
        frozen_bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.4, 0.0])),
        training=draw(st.booleans()),
        projected=draw(st.integers(0, hidden - 1)),
        lengths=tuple(lengths),
        form=form,
        stated=draw(st.booleans()),
    )


def objective(tensors: Iterable[Tensor | None]) -> Tensor:
    """Differs in every element, the same for equal tensors."""
    generator = torch.Generator().manual_seed(7)
    present = [tensor for tensor in tensors if tensor is not None]
    weights = [torch.randn(tensor.shape, generator=generator) for tensor in present]
    return sum(((w * x + x.square() / 2).sum() for w, x in zip(weights, present, strict=True)), torch.zeros(()))


def outcome(case: Case, module: nn.Module, seed: int = 3) -> list[Tensor]:
    """Outputs, last states, all gradients, and the state of the random numbers, of one forward and backward."""
    torch.manual_seed(seed)
    sequences, states = case.sequences(), case.states()
    outputs, h, c = case.run(module, sequences, *states)
    objective([*outputs, h, c]).backward()
    gradients = [leaf.grad for leaf in (*sequences, *states, *module.parameters())]
    values = [*outputs, h, *([] if c is None else [c]), *(grad for grad in gradients if grad is not None)]
    return [*(value.detach() for value in values), torch.get_rng_state().double()]


def reference(case: Case, linears: Linears, seed: int = 3) -> Tensor:
    """The loss of `outcome`, by the oracle."""
    torch.manual_seed(seed)
    sequences, states = case.sequences(), case.states()
    outputs, h, c = linears(sequences, *states, case.masks(sequences))
    return objective([*outputs, h, c if case.kind == "LSTM" else None])


def recorded(case: Case, linears: Linears) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """For each matrix, of each sequence, input rows `[time, in]` and gradient rows `[time, out]`."""
    calls: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            output.retain_grad()
            calls[name].append((args[0].detach(), output))

        return hook

    for name, linear in linears.matrices.items():
        linear.register_forward_hook(watch(name))
    reference(case, linears).backward()
    rows = {}
    for name, each in calls.items():
        a = torch.cat([layer_input for layer_input, _ in each])
        g = torch.cat([output.grad if output.grad is not None else 0 * output.detach() for _, output in each])
        rows[name] = list(a.split(list(case.lengths))), list(g.split(list(case.lengths)))
    return rows


def expected_factors(
    a: list[Tensor], g: list[Tensor], bias: bool, sharing: WeightSharing, structure: tuple[Structure, Structure]
) -> Any:
    # Time steps without any gradient (of a dead ReLU, or those that only lead to such) count for nothing.
    kept = [(rows[grads.any(1)], grads[grads.any(1)]) for rows, grads in zip(a, g, strict=True) if grads.any()]
    if not kept:
        nothing = oracles.factors(a[0][None, None], g[0][None, None], terms=TERMS, bias=bias, structure=structure)
        return tuple(None if factor is None else torch.zeros_like(factor) for factor in nothing)
    a, g = [rows for rows, _ in kept], [grads for _, grads in kept]
    if sharing is WeightSharing.EXPAND:
        a, g = [torch.cat(a)], [torch.cat(g)]  # rows are rows, whichever sequence they come from
        return oracles.factors(a[0][None, None], g[0][None, None], terms=TERMS, bias=bias, structure=structure)
    means, sums = torch.stack([rows.mean(0) for rows in a]), torch.stack([rows.sum(0) for rows in g])
    return oracles.factors(means[None, :, None], sums[None, :, None], terms=TERMS, bias=bias, structure=structure)


# -- sequences ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_step_with_statistics_equals_the_fused_call_in_values_gradients_and_random_numbers(
    kind: str, data: st.DataObject
) -> None:
    case = data.draw(cases(kinds=[kind]))
    module = case.module()
    plain = outcome(case, copy.deepcopy(module))
    optimizer = kfac(module, loss_terms=LossTerms.SUM)
    with _Seen() as seen:
        measured = outcome(case, module)
    assert_same(measured, plain, rtol=1e-12)
    assert seen.names == []
    optimizer.step()


@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("form", Form)
@given(data=st.data(), structure=st.sampled_from(STRUCTURES))
def test_factors_of_every_matrix_equal_their_definition(
    form: Form, sharing: WeightSharing, data: st.DataObject, structure: tuple[Structure, Structure]
) -> None:
    case = data.draw(cases(forms=[form]))
    module = case.module()
    optimizer = kfac(module, weight_sharing=sharing, structure=structure)
    optimizer.set_loss_terms(TERMS)
    outcome(case, module)
    optimizer.step()
    rows = recorded(case, Linears(module))
    factors = optimizer.factors()
    assert set(rows) == {name for name, _ in module.named_parameters() if name.startswith("weight")}
    # Where every output gradient is zero, as behind units that are all off, there is no sample.
    assert set(factors) == {name for name, (_, g) in rows.items() if any(part.any() for part in g)}
    for name in factors:
        a, g = rows[name]
        bias = getattr(module, name.replace("weight", "bias"), None)
        trains_bias = bias is not None and bias.requires_grad
        assert_same(factors[name], expected_factors(a, g, trains_bias, sharing, structure))


@pytest.mark.slow
@settings(max_examples=40)
@given(case=cases(), periods=st.sampled_from([{}, {"factor_update_period": 2, "inverse_update_period": 3}]))
def test_training_equals_that_of_linear_layers_called_in_a_loop(case: Case, periods: dict[str, int]) -> None:
    module = case.module()
    linears = Linears(module)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **periods}
    optimizers = kfac(module, **options), kfac(linears, **options)
    for seed in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
            optimizer.set_loss_terms(TERMS)
        outcome(case, module, seed)
        reference(case, linears, seed).backward()
        for optimizer in optimizers:
            optimizer.step()
    trained = dict(module.named_parameters())
    for name, linear in linears.matrices.items():
        assert_same(trained[name], linear.weight)
        if linear.bias is not None:
            assert_same(trained[name.replace("weight", "bias")], linear.bias)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", SEQUENCE)
def test_float32_equals_the_fused_call_with_the_same_dropout(kind: type[nn.Module], bidirectional: bool) -> None:
    module = kind(4, 5, 3, dropout=0.5, bidirectional=bidirectional, dtype=torch.float32)
    optimizer = kfac(module, loss_terms=LossTerms.SUM)
    features = torch.randn(6, 3, 4, dtype=torch.float32)
    torch.manual_seed(1)
    output = module(features)[0]
    after = torch.get_rng_state()
    optimizer.remove_hooks()
    torch.manual_seed(1)
    fused = module(features)[0]
    assert torch.equal(torch.get_rng_state(), after)
    assert output.dtype == fused.dtype
    assert output.stride() == fused.stride()
    assert_same(output, fused, rtol=1e-5)


@pytest.mark.parametrize("kind", SEQUENCE)
def test_an_output_can_be_changed_in_place(kind: type[nn.Module]) -> None:
    module = kind(3, 4, batch_first=True)
    optimizer = kfac(module)
    features = torch.randn(2, 5, 3)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        output, last = module(features)
        output.mul_(2).add_(1)
        objective([output, last if kind is not nn.LSTM else last[0].add_(1)]).backward()
        gradients.append([param.grad.clone() for param in module.parameters()])
        optimizer.remove_hooks()
    assert_same(*gradients)


def test_an_empty_batch_counts_nothing() -> None:
    module = nn.GRU(3, 4, 2)
    optimizer = kfac(module)
    for features in (torch.randn(3, 2, 3), torch.randn(3, 0, 3)):
        before = optimizer.factors()
        any_loss(module(features)[0]).backward()
        optimizer.step()
    assert_same([f for pair in optimizer.factors().values() for f in pair], [f for p in before.values() for f in p])


# -- within a model ----------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 4)
        self.rnn = nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.write = nn.Linear(10, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.write(self.rnn(self.read(features).tanh())[0])


def test_within_a_model_all_layers_are_covered_and_their_matrices_named() -> None:
    model = Tagger()
    optimizer = kfac(model)
    any_loss(model(torch.randn(4, 3, 3))).backward()
    optimizer.step()
    suffixes = [f"_l{layer}{reverse}" for layer in range(2) for reverse in ("", "_reverse")]
    matrices = [f"rnn.weight_{side}{suffix}" for suffix in suffixes for side in ("ih", "hh")]
    assert list(optimizer.factors()) == ["read", *matrices, "write"]
    assert all(record.block is not None for record in optimizer.summary().parameters)
    a, g = optimizer.factors()["rnn.weight_hh_l1_reverse"]
    assert (a.shape, g.shape) == ((1, 6, 6), (1, 20, 20))


@pytest.mark.parametrize("kind", SEQUENCE)
def test_a_module_called_twice_averages_a_over_the_rows_of_both_calls_and_sums_g(kind: type[nn.Module]) -> None:
    module = kind(3, 4)
    parts = [torch.randn(5, 2, 3), torch.randn(5, 1, 3)]
    factors = []
    for inputs in (parts, [torch.cat(parts, dim=1)]):
        model = copy.deepcopy(module)
        optimizer = kfac(model)
        optimizer.set_loss_terms(TERMS)
        objective([torch.cat([model(features)[0] for features in inputs], dim=1)]).backward()
        optimizer.step()
        factors.append([factor for pair in optimizer.factors().values() for factor in pair])
    assert_same(*factors)


@pytest.mark.parametrize("kind", SEQUENCE)
def test_biases_and_weights_that_are_not_trained_are_left_out(kind: type[nn.Module]) -> None:
    module = kind(3, 4)
    module.bias_ih_l0.requires_grad_(False)
    module.weight_hh_l0.requires_grad_(False)
    optimizer = kfac(module)
    any_loss(module(torch.randn(5, 2, 3))[0]).backward()
    optimizer.step()
    assert {name: a.shape[-1] for name, (a, _) in optimizer.factors().items()} == {"weight_ih_l0": 3}


def test_weights_that_are_computed_or_that_are_one_are_not_covered() -> None:
    pruned, shared, parametrized = nn.LSTM(3, 4), nn.GRU(3, 3), nn.RNN(3, 4)
    prune.identity(pruned, "weight_hh_l0")
    shared.weight_hh_l0 = shared.weight_ih_l0
    parametrizations.weight_norm(parametrized, "weight_ih_l0")
    model = nn.ModuleList([pruned, shared, parametrized])
    optimizer = kfac(nn.ModuleList([model, nn.Linear(2, 2)]))
    assert [record.name for record in optimizer.summary().blocks] == ["1"]
    text = str(optimizer.summary())
    assert "computed from other parameters" in text
    assert "one and the same parameter" in text


# -- cells -------------------------------------------------------------------------------------------------------


class Rolled(nn.Module):
    """A cell, called at every time step; each state is also an output."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, sequence: Tensor, state: Any = None) -> list[Tensor]:
        outputs = []
        for row in sequence:
            state = self.cell(row, state)
            outputs += [*state] if isinstance(state, tuple) else [state]
        return outputs


@dataclass(frozen=True)
class CellCase:
    kind: type[nn.Module]
    bias: bool
    nonlinearity: str
    leading: tuple[int, ...]
    stated: bool

    def module(self) -> nn.Module:
        options = {"nonlinearity": self.nonlinearity} if self.kind is nn.RNNCell else {}
        return self.kind(3, 4, bias=self.bias, **options)

    def states(self) -> tuple[Tensor, Tensor]:
        draw = torch.randn if self.stated else torch.zeros
        return draw(*self.leading, 4, requires_grad=True), draw(*self.leading, 4, requires_grad=True)


cell_cases = st.builds(
    CellCase,
    kind=st.sampled_from(CELLS),
    bias=st.booleans(),
    nonlinearity=st.sampled_from(["tanh", "relu"]),
    leading=st.sampled_from([(), (1,), (3,)]),
    stated=st.booleans(),
)


@settings(max_examples=60)
@given(case=cell_cases, time=sizes(3), sharing=st.sampled_from(WeightSharing))
def test_cells_equal_the_fused_ones_and_linear_layers_in_a_loop(
    case: CellCase, time: int, sharing: WeightSharing
) -> None:
    cell = case.module()
    model, linears = Rolled(cell), Linears(cell)
    optimizer, other = kfac(model, weight_sharing=sharing), kfac(linears, weight_sharing=sharing)
    sequence = torch.randn(time, *case.leading, 3, requires_grad=True)
    h, c = case.states()
    state = (h, c) if case.kind is nn.LSTMCell else h

    def gradients(outputs: list[Tensor]) -> list[Tensor | None]:
        objective(outputs).backward()
        found = [leaf.grad for leaf in (sequence, h, c, *cell.parameters())]
        sequence.grad = h.grad = c.grad = None
        cell.zero_grad()
        return [*outputs, *(grad for grad in found if grad is not None)]

    optimizer.set_loss_terms(TERMS)
    measured = gradients(model(sequence, state if case.stated else None))
    optimizer.step()
    factors = optimizer.factors()
    optimizer.remove_hooks()
    fused = gradients(model(sequence, state if case.stated else None))
    assert_same(measured, fused, rtol=1e-12)

    other.set_loss_terms(TERMS)
    step_h, step_c = h.detach().reshape(-1, 4), c.detach().reshape(-1, 4)
    outputs = []
    for row in sequence.detach():
        step_h, step_c = linears.step("", row.reshape(-1, 3), step_h, step_c)
        outputs += [step_h.reshape(h.shape)] + ([step_c.reshape(c.shape)] if case.kind is nn.LSTMCell else [])
    objective(outputs).backward()
    other.step()
    for name, pair in other.factors().items():
        assert_same(factors["cell." + name.removeprefix("matrices.")], pair)


NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")


class ByName(TorchFunctionMode):
    """Has torch's own functions called with all arguments by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.gru_cell:
            names: tuple[str, ...] = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
        elif func is torch.lstm:
            packed = isinstance(args[1], Tensor)
            names = ("data", "batch_sizes", "hx", *NAMES) if packed else ("input", "hx", *NAMES, "batch_first")
        else:
            return func(*args, **(kwargs or {}))
        return func(**dict(zip(names, args, strict=True)))


@pytest.mark.parametrize("form", ["cell", "sequence", "packed"])
def test_arguments_of_the_fused_call_may_be_given_by_name(form: str) -> None:
    kind = nn.GRUCell if form == "cell" else nn.LSTM

    class Named(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> Any:
            with ByName():
                return super().forward(*args)

    x = torch.randn(2, 3) if form == "cell" else torch.randn(5, 2, 3)
    features: Any = pack_sequence([x[:, 0], x[:3, 1]]) if form == "packed" else x
    plain, named = kind(3, 4), Named(3, 4)
    named.load_state_dict(plain.state_dict())

    def run(model: nn.Module, _: KFACOptimizer) -> None:
        objective(leaf for leaf in tree_leaves(model(features)) if getattr(leaf, "requires_grad", False)).backward()

    assert_same(factors_after(named, run), factors_after(plain, run))


# -- what counts -------------------------------------------------------------------------------------------------

PAIR = pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(3, 4, 2, proj_size=2), lambda: nn.GRU(3, 4), lambda: nn.RNN(3, 4)]
)


def factors_after(module: nn.Module, run: Callable[[nn.Module, KFACOptimizer], None]) -> list[Tensor]:
    model = copy.deepcopy(module)
    optimizer = kfac(model)
    optimizer.set_loss_terms(TERMS)
    run(model, optimizer)
    optimizer.step()
    return [factor for pair in optimizer.factors().values() for factor in pair]


@PAIR
def test_several_backwards_through_one_forward_equal_one_of_the_sum(make: Callable[[], nn.Module]) -> None:
    module, features = make(), torch.randn(5, 2, 3)

    def twice(model: nn.Module, _: KFACOptimizer) -> None:
        output = model(features)[0]
        output.square().sum().backward(retain_graph=True)
        objective([output]).backward()

    def once(model: nn.Module, _: KFACOptimizer) -> None:
        output = model(features)[0]
        (output.square().sum() + objective([output])).backward()

    assert_same(factors_after(module, twice), factors_after(module, once))


@PAIR
def test_a_second_forward_before_the_step_adds_its_rows(make: Callable[[], nn.Module]) -> None:
    module, features = make(), torch.randn(5, 4, 3)

    def both(model: nn.Module, _: KFACOptimizer) -> None:
        for part in features.split([1, 3], dim=1):
            model(part)[0].square().sum().backward()

    def whole(model: nn.Module, _: KFACOptimizer) -> None:
        model(features)[0].square().sum().backward()

    assert_same(factors_after(module, both), factors_after(module, whole))


def _evaluated(model: nn.Module, features: Tensor) -> None:
    with torch.no_grad():
        model(features)


def _forward(model: nn.Module, features: Tensor) -> None:
    model(features)


def _saliency(model: nn.Module, features: Tensor) -> None:
    features = features.clone().requires_grad_()
    torch.autograd.grad(model(features)[0].square().sum(), features)


def _grad_of_weights(model: nn.Module, features: Tensor) -> None:
    torch.autograd.grad(model(features)[0].square().sum(), [*model.parameters()], allow_unused=True)


@PAIR
@pytest.mark.parametrize("between", [_evaluated, _forward, _saliency, _grad_of_weights])
def test_what_is_no_training_pass_counts_nothing(
    make: Callable[[], nn.Module], between: Callable[[nn.Module, Tensor], None]
) -> None:
    module, features = make(), torch.randn(5, 2, 3)

    def train(model: nn.Module, _: KFACOptimizer) -> None:
        model(features)[0].square().sum().backward()

    def disturbed(model: nn.Module, optimizer: KFACOptimizer) -> None:
        between(model, torch.randn(2, 3, 3))
        train(model, optimizer)

    assert_same(factors_after(module, disturbed), factors_after(module, train), rtol=0)


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (make, weight)
        for make in PAIR.args[1]
        for weight in ("weight_ih_l0", "weight_hh_l0", "weight_hr_l0")
        if hasattr(make(), weight)
    ],
)
def test_a_backward_with_inputs_counts_the_matrices_whose_weights_it_reaches(
    make: Callable[[], nn.Module], chosen: str
) -> None:
    module, features = make(), torch.randn(5, 2, 3)
    optimizer, other = kfac(module), kfac(model := copy.deepcopy(module))
    for each in (optimizer, other):
        each.set_loss_terms(TERMS)
    module(features)[0].square().sum().backward(inputs=[module.get_parameter(chosen)])
    model(features)[0].square().sum().backward()
    optimizer.step()
    other.step()
    for name, pair in optimizer.factors().items():
        if name == chosen:
            assert_same(pair, other.factors()[name])
        else:
            assert all(factor.count_nonzero() == 0 for factor in pair)


@PAIR
def test_of_a_gradient_penalty_the_outer_backward_counts_and_its_gradients_are_the_fused_ones(
    make: Callable[[], nn.Module],
) -> None:
    module = make()
    features = torch.randn(5, 2, 3, requires_grad=True)
    optimizer = kfac(module, loss_terms=LossTerms.SUM)
    gradients = []
    for _ in range(2):
        module.zero_grad()
        (slope,) = torch.autograd.grad(module(features)[0].square().sum(), features, create_graph=True)
        slope.square().sum().backward()
        gradients.append([param.grad.clone() for param in module.parameters()])
        optimizer.remove_hooks()
    assert_same(*gradients, rtol=1e-12)


@PAIR
def test_the_gradients_of_a_function_transform_are_the_fused_ones(make: Callable[[], nn.Module]) -> None:
    module, features = make(), torch.randn(5, 2, 3)
    params = {name: param.detach() for name, param in module.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, params, (features,))[0].square().sum()

    plain = torch.func.grad(loss)(params)
    optimizer = kfac(module)
    assert_same([*torch.func.grad(loss)(params).values()], [*plain.values()], rtol=1e-12)
    optimizer.step()
    assert all(factor.count_nonzero() == 0 for pair in optimizer.factors().values() for factor in pair)


def test_a_matrix_parametrized_after_construction_is_no_longer_measured() -> None:
    module = nn.LSTM(3, 4)
    optimizer = kfac(module, lr=0.1)
    parametrizations.weight_norm(module, "weight_hh_l0")
    module(torch.randn(5, 2, 3))[0].square().sum().backward()
    with pytest.warns(UserWarning, match="parametrized or pruned since"):
        optimizer.step()
    assert optimizer.factors().keys() == {"weight_ih_l0"}


@pytest.mark.parametrize("kind", SEQUENCE)
def test_under_autocast_factors_are_those_of_full_precision_up_to_its_rounding(kind: type[nn.Module]) -> None:
    module = kind(3, 4, 2, dtype=torch.float32)
    features = torch.randn(5, 2, 3, dtype=torch.float32)
    found = []
    for enabled in (False, True):
        optimizer = kfac(module)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = module(features)[0]
        output.float().square().sum().backward()
        optimizer.step()
        found.append([factor for pair in optimizer.factors().values() for factor in pair])
        optimizer.remove_hooks()
    assert_same(found[1], found[0], rtol=0.05)
    assert any(not torch.equal(left, right) for left, right in zip(*found, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"proj_size": 2}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_under_autocast_results_have_the_dtypes_of_the_fused_call(
    kind: type[nn.Module], options: dict[str, Any], packed: bool
) -> None:
    """Which oneDNN's LSTM, for whole batches without a projection, has otherwise than the others."""
    if kind is nn.GRU and "proj_size" in options:
        return
    by_onednn = kind is nn.LSTM and not packed and "proj_size" not in options
    if by_onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("on a CPU without instructions for bfloat16 torch itself raises here")
    module, x = kind(3, 4, dtype=torch.float32, **options), torch.randn(5, 2, 3, dtype=torch.float32)
    features: Any = pack_sequence([x[:, 0], x[:3, 1]]) if packed else x
    found = []
    for measured in (False, True):
        optimizer = kfac(module) if measured else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, state = module(features)
        states = state if isinstance(state, tuple) else (state,)
        found.append([each.dtype for each in (output.data if packed else output, *states)])
        assert optimizer is None or optimizer._binding.coverage.blocks[0].takes_statistics()
    assert found[0] == found[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_equals_the_plain_run(use_reentrant: bool) -> None:
    class Checkpointed(Tagger):
        def forward(self, features: Tensor) -> Tensor:
            hidden = self.read(features).tanh()
            return self.write(checkpoint(lambda x: self.rnn(x)[0], hidden, use_reentrant=use_reentrant))

    plain, saving = Tagger(), Checkpointed()
    saving.load_state_dict(plain.state_dict())
    features, results = torch.randn(4, 3, 3), []
    for model in (plain, saving):
        optimizer = kfac(model, lr=0.1)
        torch.manual_seed(5)
        objective([model(features)]).backward()
        optimizer.step()
        results.append([*snapshot(model).values(), *(f for pair in optimizer.factors().values() for f in pair)])
    assert_same(*results)


_FUSED = {name + cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}


class _Seen(TorchFunctionMode):
    """Names of the fused functions that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FUSED:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SEQUENCE + CELLS)
def test_the_fused_call_runs_untouched_where_no_statistics_are_wanted(kind: type[nn.Module]) -> None:
    module = kind(3, 4)
    optimizer = kfac(module, loss_terms=LossTerms.SUM, factor_update_period=3)
    features = torch.randn(5, 2, 3) if kind in SEQUENCE else torch.randn(2, 3)
    counts = []
    for _ in range(6):
        for backward in (False, True):
            with torch.set_grad_enabled(backward), _Seen() as seen:
                state = module(features)
            counts.append(len(seen.names))
        optimizer.zero_grad()
        (state if isinstance(state, Tensor) else state[0]).sum().backward()
        optimizer.step()
    assert counts == [1, 0, 1, 1, 1, 1] * 2
    with _Seen() as seen:
        module.eval()(features)
    assert len(seen.names) == 0, "training in eval mode is training"


class _Count(TorchFunctionMode):
    """Counts the calls of torch's functions."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SEQUENCE)
def test_function_modes_see_as_much_of_a_long_sequence_as_of_a_short_one(kind: type[nn.Module]) -> None:
    """Thousands of small calls would each go through the mode that watches the model."""
    module = kind(3, 4)
    optimizer = kfac(module, loss_terms=LossTerms.SUM)
    counts = []
    for time in (2, 9):
        with _Count() as count:
            module(torch.randn(time, 2, 3))
        counts.append(count.calls)
    optimizer.remove_hooks()  # not before: without it nothing would be unrolled
    assert counts[0] == counts[1]


# -- loss terms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEQUENCE)
def test_a_sequence_without_a_batch_dimension_is_one_example(kind: type[nn.Module]) -> None:
    module = kind(3, 4, batch_first=True)
    features = torch.randn(5, 3)
    factors = []
    for shaped in (features, features[None]):
        model = copy.deepcopy(module)
        optimizer = kfac(model, weight_sharing=WeightSharing.REDUCE)
        model(shaped)[0].square().sum().backward()
        optimizer.step()
        factors.append([factor for pair in optimizer.factors().values() for factor in pair])
    assert_same(*factors)


class Chain(nn.Module):
    """Its examples are the time steps of one sequence, a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.rnn(features[None])[0]
        return output[0]


def test_examples_that_a_model_makes_one_sequence_of_are_counted_all_the_same() -> None:
    model, features = Chain(), torch.randn(5, 3)
    factors = []
    for stated in (False, True):
        twin = copy.deepcopy(model)
        optimizer = kfac(twin)
        if stated:
            optimizer.set_loss_terms(len(features))
        twin(features).square().sum(1).mean().backward()
        optimizer.step()
        factors.append([factor for pair in optimizer.factors().values() for factor in pair])
    assert_same(*factors)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_without_a_batch_dimension_has_one_example(kind: type[nn.Module]) -> None:
    module = kind(3, 4)
    features = torch.randn(3)
    factors = []
    for shaped in (features, features[None]):
        model = copy.deepcopy(module)
        optimizer = kfac(model)
        state = model(shaped)
        (state if isinstance(state, Tensor) else state[0]).square().sum().backward()
        optimizer.step()
        factors.append([factor for pair in optimizer.factors().values() for factor in pair])
    assert_same(*factors)


# -- lifetimes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEQUENCE + CELLS)
def test_the_model_does_not_keep_the_optimizer_and_goes_on_without_it(kind: type[nn.Module]) -> None:
    module = kind(3, 4)
    features = torch.randn(5, 2, 3) if kind in SEQUENCE else torch.randn(2, 3)
    optimizer = kfac(module)
    gone = [weakref.ref(optimizer), weakref.ref(optimizer._window)]
    del optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    with _Seen() as seen:
        module(features)
    assert len(seen.names) == 1
    copy.deepcopy(module)(features)


def test_after_the_step_no_rows_are_alive() -> None:
    module = nn.LSTM(3, 4, 2)
    optimizer = kfac(module, loss_terms=LossTerms.SUM)
    output = module(torch.randn(7, 2, 3))[0]
    output.sum().backward()
    optimizer.step()
    del output
    gc.collect()
    rows = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.dim() == 2 and t.shape[0] == 14]
    assert rows == []
