"""Matrices that functions multiply by: `addmm`, `matmul`, output layers tied to embeddings, a Linear's own weight."""

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import any_loss, sizes
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, clones, direction, square_loss, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kfac_optim import DEFAULT_ADAPTERS, Eigen, KFACOptimizer, LayerSpec, Structure, WeightSharing
from kfac_optim.blocks import functional
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.layers.product import ProductStatistics

pytestmark = pytest.mark.usefixtures("float64")


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a Linear whose weight is stored the other way round."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.nf = d_out
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / 2)
        self.bias = nn.Parameter(torch.randn(d_out) / 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


def linear_twin(layer: Conv1D) -> nn.Linear:
    twin = nn.Linear(*layer.weight.shape)
    twin.load_state_dict({"weight": layer.weight.detach().T.clone(), "bias": layer.bias.detach().clone()})
    return twin


def reasons(optimizer: KFACOptimizer) -> dict[str, str | None]:
    return {record.name: record.reason for record in optimizer.summary().parameters}


def owners(optimizer: KFACOptimizer) -> dict[str, str | None]:
    records = optimizer.summary().parameters
    assert len({record.name for record in records}) == len(records)
    return {record.name: record.block for record in records}


# -- raw parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_hugging_faces_conv1d_trains_as_its_linear_twin(
    shape: tuple[int, ...], kl_clip: float | None, momentum: float
) -> None:
    model = nn.Sequential(Conv1D(4, 5), nn.Tanh(), Conv1D(5, 3))
    twin = nn.Sequential(linear_twin(model[0]), nn.Tanh(), linear_twin(model[2]))
    options: dict[str, Any] = {"lr": 0.05, "momentum": momentum, "kl_clip": kl_clip, "weight_decay": 0.01}
    options |= {"factor_update_period": 2, "inverse_update_period": 3}
    ours, theirs = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    for _ in range(6):
        features = torch.randn(shape)
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            square_loss(net(features)).backward()
            optimizer.step()
        assert ours.factors().keys() == theirs.factors().keys() == {"0", "2"}
        for name, pair in ours.factors().items():
            assert_same(pair, theirs.factors()[name])
        for i in (0, 2):
            assert_same(model[i].weight.T, twin[i].weight)
            assert_same(model[i].bias, twin[i].bias)
    assert {name: value for name, value in ours.metrics().items() if name.startswith("condition")} == pytest.approx(
        {name: value for name, value in theirs.metrics().items() if name.startswith("condition")}
    )


Use = Callable[["Matrix", Tensor], Tensor]


class Matrix(nn.Module):
    """A bare matrix and how a function uses it; remembers what it saw."""

    def __init__(self, use: Use, shape: tuple[int, int], bias: bool) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        output = self.use(self, x)
        output.retain_grad()
        self.seen = (x.detach(), output)
        return output


# Name → function, whether the weight is stored [in, out], whether the bias is part of the product.
USES: dict[str, tuple[Use, bool, bool]] = {
    "linear": (lambda m, x: F.linear(x, m.weight), False, False),
    "linear with a bias": (lambda m, x: F.linear(x, m.weight, m.bias), False, True),
    "linear by keywords": (lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias), False, True),
    "linear of W.t()": (lambda m, x: F.linear(x, m.weight.t(), m.bias), True, True),
    "matmul": (lambda m, x: torch.matmul(x, m.weight), True, False),
    "matmul by keyword": (lambda m, x: torch.matmul(x, other=m.weight), True, False),
    "Tensor.matmul": (lambda m, x: x.matmul(m.weight), True, False),
    "@": (lambda m, x: x @ m.weight, True, False),
    "@ W.t()": (lambda m, x: x @ m.weight.t(), False, False),
    "@ W.T": (lambda m, x: x @ m.weight.T, False, False),
    "@ W.mT": (lambda m, x: x @ m.weight.mT, False, False),
    "@ W.transpose": (lambda m, x: x @ m.weight.transpose(0, 1), False, False),
    "mm": (lambda m, x: torch.mm(x, m.weight), True, False),
    "mm by keyword": (lambda m, x: torch.mm(x, mat2=m.weight), True, False),
    "Tensor.mm": (lambda m, x: x.mm(m.weight), True, False),
    "Tensor.mm by keyword": (lambda m, x: x.mm(mat2=m.weight.t()), False, False),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight), True, True),
    "addmm by keywords": (lambda m, x: torch.addmm(input=m.bias, mat1=x, mat2=m.weight.t()), False, True),
    "Tensor.addmm": (lambda m, x: m.bias.addmm(x, m.weight), True, True),
    "addmm of a constant": (lambda m, x: torch.addmm(torch.ones(5), x, m.weight), True, False),
}


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_matrix_that_a_function_multiplies_by_is_preconditioned(name: str, square: bool) -> None:
    """A square matrix is told from its transpose, too."""
    use, stored_in_out, bias = USES[name]
    d_in = 5 if square else 4
    model = Matrix(use, (d_in, 5) if stored_in_out else (5, d_in), bias)
    optimizer = KFACOptimizer(model, lr=1.0, damping=0.02, kl_clip=None)
    before = clones(model.parameters())
    any_loss(model(torch.randn(7, d_in))).backward()
    optimizer.step()
    features, output = model.seen
    expected = oracles.factors(oracles.linear_rows(features), oracles.linear_rows(output.grad), terms=7, bias=bias)
    (factors,) = optimizer.factors().values()
    assert_same(factors, expected)
    grads = [param.grad for param in model.parameters()]
    matrix = torch.cat([grads[0].T if stored_in_out else grads[0], *(grad[:, None] for grad in grads[1:])], dim=1)
    moved = direction(matrix, expected[0][0], expected[1][0], 0.02)
    steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    assert_same(steps[0], moved[:, :d_in].T if stored_in_out else moved[:, :d_in])
    if bias:
        assert_same(steps[1], moved[:, -1])


@given(leading=st.lists(sizes(4), max_size=3), sharing=st.sampled_from(WeightSharing), bias=st.booleans())
def test_factors_equal_their_definition_whatever_the_leading_dimensions(
    leading: list[int], sharing: WeightSharing, bias: bool
) -> None:
    model = Matrix(lambda m, x: F.linear(x, m.weight, m.bias), (5, 3), bias)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    any_loss(model(torch.randn(*leading, 3))).backward()
    optimizer.step()
    features, output = model.seen
    rows = oracles.linear_rows(features), oracles.linear_rows(output.grad)
    terms = leading[0] if leading else 1
    assert_same(optimizer.factors()[""], oracles.factors(*rows, terms=terms, bias=bias, sharing=sharing))


NOT_A_PRODUCT: dict[str, Use] = {
    "a sum": lambda m, x: x[:, :1] + m.weight.sum(0),
    "a product with something computed": lambda m, x: F.linear(x, m.weight * 2),
    "a product with a slice": lambda m, x: F.linear(x[:, :3], m.weight[:, :3]),
    "a scaled addmm": lambda m, x: torch.addmm(torch.ones(5), x, m.weight.t(), alpha=2),
    "a deprecated scaled addmm": lambda m, x: torch.addmm(2, torch.ones(5), 3, x, m.weight.t()),
    "a detached weight": lambda m, x: F.linear(x, m.weight.detach()) + m.weight.sum(),
}


@pytest.mark.filterwarnings("ignore:.*overload of .*is deprecated")
@pytest.mark.parametrize("name", NOT_A_PRODUCT)
def test_what_is_no_product_with_the_parameter_is_left_to_sgd(name: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), Matrix(NOT_A_PRODUCT[name], (5, 5), bias=False))
    optimizer = KFACOptimizer(model, lr=0.5)
    any_loss(model(torch.randn(5, 5))).backward()
    weight, grad = model[1].weight.detach().clone(), model[1].weight.grad.clone()
    optimizer.step()
    assert optimizer.factors().keys() == {"0"}
    torch.testing.assert_close(model[1].weight.detach(), weight - 0.5 * grad, rtol=1e-14, atol=1e-14)


class Several(nn.Module):
    """Matrices in one module, in a ParameterList, and parameters that nothing multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 4))
        self.shift = nn.Parameter(torch.randn(5))
        self.stack = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.inner = Conv1D(5, 5)
        self.table = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.first, self.shift)
        for weight in self.stack:
            hidden = (hidden @ weight).tanh()
        return self.inner(hidden) + self.table.sum(0)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, and a real matrix beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.complex128))
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.einsum("bix,iox->box", torch.fft.rfft(x), self.modes)
        return torch.fft.irfft(spectrum, n=4) @ self.mix


def test_of_a_complex_parameter_the_reason_is_that_it_is_complex() -> None:
    model = Spectral()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    assert "@ W or an einsum" in str(reasons(optimizer)["mix"])
    for _ in range(2):
        assert (
            reasons(optimizer)["modes"]
            == "modes is torch.complex128: only real floating-point parameters are preconditioned"
        )
        model(torch.randn(3, 2, 4)).square().mean().backward()
        optimizer.step()
    assert owners(optimizer) == {"modes": None, "mix": "mix"}


def test_blocks_of_bare_matrices_have_the_names_of_their_parameters() -> None:
    model = Several()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    before = owners(optimizer)
    assert set(before) == dict(model.named_parameters()).keys()
    assert set(before.values()) == {None}
    assert (
        reasons(optimizer)["first"] == "no adapter for Several; "
        "a matrix is preconditioned once F.linear, x @ W or an einsum of two operands multiplies rows by it"
    )
    train(model, optimizer, 2)
    assert owners(optimizer) == {
        "first": "first",
        "shift": "first",
        "table": None,
        "stack.0": "stack.0",
        "stack.1": "stack.1",
        "inner.weight": "inner",
        "inner.bias": "inner",
    }
    shown = {record.name: record.params for record in optimizer.summary().blocks}
    assert shown["first"] == ("first", "shift")
    assert shown["inner"] == ("inner.weight", "inner.bias")
    assert "inner.weight" in str(optimizer.summary())


def test_what_a_product_adds_is_a_bias_only_if_it_has_its_shape() -> None:
    model = Matrix(USES["addmm"][0], (4, 5), bias=True)
    model.bias = nn.Parameter(torch.randn(7, 5))
    optimizer = KFACOptimizer(model, lr=0.1)
    any_loss(model(torch.randn(7, 4))).backward()
    optimizer.step()
    assert owners(optimizer) == {"weight": "", "bias": None}


def test_a_matrix_of_two_modules_is_one_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Conv1D(4, 4), Conv1D(4, 4)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    model = Twice()
    optimizer = KFACOptimizer(model, lr=0.1)
    train(model, optimizer, 1)
    assert optimizer.factors().keys() == {"first"}
    assert owners(optimizer) == {"first.weight": "first", "first.bias": "first"}


# -- which parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["0", Conv1D, "*"])
def test_skipped_matrices_take_the_plain_step(skip: Any) -> None:
    model = nn.Sequential(Conv1D(4, 5), nn.Linear(5, 3))
    optimizer = KFACOptimizer(model, lr=0.1, skip_layers=[skip])
    any_loss(model(torch.randn(6, 4))).backward()
    expected = [torch.add(param.detach(), param.grad, alpha=-0.1) for param in model[0].parameters()]
    optimizer.step()
    assert_identical(clones(model[0].parameters()), expected)
    assert optimizer.factors().keys() == (set() if skip == "*" else {"1"})
    assert all("skip_layers" in str(reasons(optimizer)[f"0.{name}"]) for name in ("weight", "bias"))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_matrices_stay_and_a_frozen_bias_leaves_the_block(frozen: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 5))
    model[1].get_parameter(frozen).requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    before = clones(model[1].parameters())
    train(model, optimizer, 2)
    if frozen == "weight":
        assert optimizer.factors().keys() == {"0"}
        assert torch.equal(model[1].weight, before[0])
        assert not torch.equal(model[1].bias, before[1])
    else:
        assert optimizer.factors()["1"][0].shape == (1, 4, 4)
        assert torch.equal(model[1].bias, before[1])


def test_a_matrix_outside_the_groups_stays_put() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 5))
    optimizer = KFACOptimizer(model[0].parameters(), lr=0.1, model=model, factor_update_period=1)
    before = clones(model[1].parameters())
    train(model, optimizer, 2)
    assert_identical(clones(model[1].parameters()), before)
    assert optimizer.factors().keys() == {"0"}


def test_a_group_added_later_leaves_claimed_blocks_as_they_are() -> None:
    model, twin = (nn.Sequential(Conv1D(4, 5), nn.Tanh(), Conv1D(5, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1, "inverse_update_period": 2}
    optimizer = KFACOptimizer(model, **options)
    extra = nn.Parameter(torch.zeros(3))
    train(model, optimizer, 2)
    kept = block(optimizer, "0")
    optimizer.add_param_group({"params": [extra], "lr": 0.2})
    assert block(optimizer, "0") is kept
    train(model, optimizer, 3, start=2)
    train(twin, KFACOptimizer(twin, **options), 5)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_group_added_between_forward_and_backward_loses_no_statistics() -> None:
    model = nn.Sequential(Conv1D(4, 3))
    optimizer = KFACOptimizer(model, lr=0.1)
    loss = any_loss(model(torch.randn(5, 4)))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    loss.backward()
    optimizer.step()
    assert optimizer.metrics()["blocks_without_statistics"] == 0


def test_a_matrix_added_in_the_middle_is_preconditioned_from_then_on() -> None:
    model = nn.Sequential(Conv1D(4, 5), nn.Tanh(), Conv1D(5, 3))
    optimizer = KFACOptimizer(model[0].parameters(), lr=0.1, model=model, factor_update_period=1)
    train(model, optimizer, 2)
    assert optimizer.factors().keys() == {"0"}
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, 2, start=2)
    assert optimizer.factors().keys() == {"0", "2"}
    assert owners(optimizer)["2.bias"] == "2"


# -- matrices used from both sides -------------------------------------------------------------------------------

TOKENS, WIDTH = 6, 3


class Language(nn.Module):
    """Token ids to logits; the output layer shares the embedding's weight, in one way or another."""

    def __init__(self, head: Callable[["Language", Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.head = head
        self.embedding = nn.Embedding(TOKENS, width)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        hidden = embedded.tanh() * 2
        logits = self.head(self, hidden)
        for tensor in (embedded, logits):
            tensor.retain_grad()
        self.seen = (ids, embedded, hidden.detach(), logits)
        return logits


class ByModule(Language):
    """The output layer is an `nn.Linear`, registered before or after the embedding."""

    def __init__(self, first: bool, width: int = WIDTH) -> None:
        super().__init__(lambda self, hidden: self.output(hidden), width)
        self.output = nn.Linear(width, TOKENS, bias=False)
        self.output.weight = self.embedding.weight
        if first:
            self._modules["embedding"] = self._modules.pop("embedding")


TIED: dict[str, Callable[[], Language]] = {
    "F.linear": lambda: Language(lambda m, h: F.linear(h, m.embedding.weight)),
    "@ W.T": lambda: Language(lambda m, h: h @ m.embedding.weight.T),
    "mm": lambda: Language(lambda m, h: torch.mm(h.flatten(0, 1), m.embedding.weight.t()).unflatten(0, h.shape[:2])),
    "a module, registered last": lambda: ByModule(first=False),
    "a module, registered first": lambda: ByModule(first=True),
}


def language(name: str, width: int = WIDTH) -> Language:
    torch.manual_seed(3)
    model = TIED[name]()
    if width != WIDTH:
        with torch.no_grad():
            model.embedding.weight = nn.Parameter(torch.randn(TOKENS, width))
            model.embedding.embedding_dim = width
    return model


def ids_of(seed: int, size: int = 5, length: int = 4) -> Tensor:
    return torch.randint(TOKENS, (size, length), generator=torch.Generator().manual_seed(seed))


def language_loss(logits: Tensor) -> Tensor:
    return (logits.square() / 2 + logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum() / len(logits)


def train_language(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        optimizer.zero_grad()
        language_loss(model(ids_of(i))).backward()
        optimizer.step()


def sides_of_uses(model: Language) -> list[tuple[Tensor, Tensor]]:
    """`(P, Q)` of the embedding and of the output layer, over tokens (diagonal) and over the width."""
    ids, embedded, hidden, logits = model.seen
    one_hots = torch.eye(TOKENS)[ids.flatten()]
    g = embedded.grad.flatten(0, 1)
    uses = [(one_hots.mean(0), len(ids) * g.T @ g)]
    g, h = logits.grad.flatten(0, 1), hidden.flatten(0, 1)
    return [*uses, (len(ids) * g.square().sum(0), h.T @ h / len(h))]


def pooled(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`Σ s P̂ / Σ s` and `Σ s Q̂` with `s = n(P) n(Q)`, `n` the mean eigenvalue."""

    def mean(side: Tensor) -> Tensor:
        return side.mean() if side.dim() == 1 else side.trace() / len(side)

    scales = [mean(p) * mean(q) for p, q in uses]
    left = sum(s * p / mean(p) for s, (p, _) in zip(scales, uses, strict=True)) / sum(scales)
    right = sum(s * q / mean(q) for s, (_, q) in zip(scales, uses, strict=True))
    return left, right


def on_both_sides(optimizer: KFACOptimizer) -> tuple[Tensor, Tensor]:
    """The block's factors over tokens and over the width, whichever of them is `A`."""
    ((a, g),) = optimizer.factors().values()
    return (a[0], g[0]) if a.dim() == 2 else (g[0], a[0])


@pytest.mark.parametrize("name", TIED)
def test_an_output_layer_tied_to_an_embedding_pools_both_uses(name: str) -> None:
    model = language(name)
    optimizer = KFACOptimizer(model, lr=1.0, damping=0.03, kl_clip=None)
    before = model.embedding.weight.detach().clone()
    language_loss(model(ids_of(0))).backward()
    optimizer.step()
    uses = sides_of_uses(model)
    tokens, width = pooled(uses)
    ours = on_both_sides(optimizer)
    # Which of the two carries the scale depends on which is `A`; no step does.
    scale = ours[0].sum() / tokens.sum()
    assert_same(ours[0], scale * tokens)
    assert_same(ours[1], width / scale)
    if name != "a module, registered first":
        assert_same(scale, torch.tensor(1.0))
    exact = sum(p.sum() * q.trace() for p, q in uses)
    assert_same(ours[0].sum() * ours[1].trace(), exact)
    grad = model.embedding.weight.grad[None]
    curvature = oracles.damped_kronecker(width[None], tokens[None], grad, 0.03)
    assert_same(before - model.embedding.weight.detach(), oracles.solve(curvature, grad)[0])
    assert len(optimizer.summary().blocks) == 1
    assert set(owners(optimizer)) == {next(iter(dict(model.named_parameters())))}


def test_every_way_to_tie_takes_the_same_steps() -> None:
    """Also over periods, with momentum and the trust region."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 3}
    results = []
    for name in TIED:
        model = language(name)
        optimizer = KFACOptimizer(model, **options)
        train_language(model, optimizer, 6)
        tokens, width = on_both_sides(optimizer)
        results.append((model.embedding.weight.detach(), torch.kron(width, torch.diag(tokens))))
    for weight, product in results[1:]:
        assert_same(weight, results[0][0])
        assert_same(product, results[0][1])


@pytest.mark.parametrize("name", TIED)
def test_pooling_is_the_exact_sum_where_one_side_is_proportional(name: str) -> None:
    """As it must be where that side has one dimension."""
    model = language(name, width=1)
    if isinstance(model, ByModule):
        model.output.weight, model.output.in_features = model.embedding.weight, 1
    optimizer = KFACOptimizer(model, lr=0.0)
    language_loss(model(ids_of(0))).backward()
    optimizer.step()
    tokens, width = on_both_sides(optimizer)
    assert_same(tokens * width.squeeze(), sum(p * q.squeeze() for p, q in sides_of_uses(model)))


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder transposed."""

    def __init__(self, bias: bool = True, width: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        output = F.linear(hidden.tanh(), self.encoder.weight.t())
        for tensor in (hidden, output):
            tensor.retain_grad()
        self.seen = (x, hidden, hidden.detach().tanh(), output)
        return output


@given(
    bias=st.booleans(), width=sizes(4), positions=st.lists(sizes(3), max_size=1), sharing=st.sampled_from(WeightSharing)
)
def test_a_linear_used_transposed_elsewhere_pools_both_uses(
    bias: bool, width: int, positions: list[int], sharing: WeightSharing
) -> None:
    model = Tied(bias, width)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    any_loss(model(torch.randn(6, *positions, 4))).backward()
    optimizer.step()
    x, hidden, code, output = model.seen
    rows = [oracles.linear_rows(tensor) for tensor in (x, hidden.grad, code, output.grad)]
    (a,), (g,) = oracles.factors(rows[0], rows[1], terms=6, bias=bias, sharing=sharing)
    (over_code,), (over_input,) = oracles.factors(rows[2], rows[3], terms=6, bias=False, sharing=sharing)
    if bias:
        over_input = F.pad(over_input, (0, 1, 0, 1))
    expected = pooled([(a, g), (over_input, over_code)])
    assert_same(optimizer.factors()["encoder"], (expected[0][None], expected[1][None]))


def test_the_transpose_of_a_square_weight_is_an_opposed_use() -> None:
    model = Tied(bias=False, width=4)
    optimizer = KFACOptimizer(model, lr=0.0)
    any_loss(model(torch.randn(6, 4))).backward()
    optimizer.step()
    x, hidden, code, output = model.seen
    expected = pooled(
        [(x.T @ x / 6, 6 * hidden.grad.T @ hidden.grad), (6 * output.grad.T @ output.grad, code.T @ code / 6)]
    )
    assert_same(optimizer.factors()["encoder"], (expected[0][None], expected[1][None]))


class Both(Matrix):
    """A bare matrix and its transpose, or the matrix alone."""

    alone = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).tanh()
        return hidden if self.alone else hidden @ self.weight.t()


def test_a_matrix_of_no_layer_may_be_used_from_both_sides() -> None:
    model = Both(None, (4, 3), bias=False)
    linear = Tied(bias=False)
    linear.encoder.weight.data = model.weight.detach().T.clone()
    ours, theirs = (
        KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1),
        KFACOptimizer(linear, lr=0.1, momentum=0.9, factor_update_period=1),
    )
    train(model, ours, 3)
    train(linear, theirs, 3)
    assert_same(model.weight.T, linear.encoder.weight)
    assert_same(ours.factors()[""], theirs.factors()["encoder"])


@pytest.mark.parametrize("structure", [(Structure.DENSE, Structure.IDENTITY), (Structure.IDENTITY, Structure.DENSE)])
def test_an_identity_on_one_side_stays_one(structure: tuple[Structure, Structure]) -> None:
    model = Tied()
    optimizer = KFACOptimizer(model, lr=0.1, structure=structure, factor_update_period=1)
    train(model, optimizer, 2)
    a, g = optimizer.factors()["encoder"]
    assert (a is None) == (structure[0] is Structure.IDENTITY)
    assert (g is None) == (structure[1] is Structure.IDENTITY)
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_weight_that_another_module_holds_but_does_not_use_in_a_known_way_is_left_to_sgd() -> None:
    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, hidden: Tensor) -> Tensor:
            return F.linear(hidden, self.weight)

    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.append(Head(model[0].weight))
    optimizer = KFACOptimizer(model, lr=0.1)
    train_language(model, optimizer, 1)
    assert optimizer.factors().keys() == {"1"}
    assert reasons(optimizer)["0.weight"] == "shared with Head '2', which is not preconditioned"


class Sometimes(nn.Module):
    """A Linear of which each forward uses one side or both, and another Linear before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, *, own: bool, opposed: bool) -> Tensor:
        hidden = self.first(x)
        self.uses = []
        for wanted, use in ((own, self.layer), (opposed, lambda h: F.linear(h[:, :3], self.layer.weight.t()))):
            if wanted:
                output = use(hidden)
                output.retain_grad()
                self.uses.append((hidden.detach()[:, : 7 - output.shape[1]], output))
        return torch.cat([output for _, output in self.uses], dim=1)

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        return [(x.T @ x / len(x), len(x) * output.grad.T @ output.grad) for x, output in self.uses]


def step_of(model: Sometimes, optimizer: KFACOptimizer, **uses: bool) -> None:
    optimizer.zero_grad()
    any_loss(model(torch.randn(6, 4), **uses)).backward()
    optimizer.step()


def test_a_transposed_use_that_comes_later_is_measured_from_the_next_statistics_on() -> None:
    """Not from a forward in between that other layers are measured in."""
    model = Sometimes()
    groups = [{"params": model.first.parameters(), "factor_update_period": 1}, {"params": model.layer.parameters()}]
    optimizer = KFACOptimizer(groups, lr=0.0, model=model, factor_update_period=2)
    step_of(model, optimizer, own=True, opposed=False)
    before = optimizer.factors()["layer"]
    assert_same(before, tuple(side[None] for side in model.sides()[0]))
    step_of(model, optimizer, own=True, opposed=True)
    assert_identical(optimizer.factors()["layer"], before)
    step_of(model, optimizer, own=True, opposed=True)
    (a, g), (over_g, over_a) = model.sides()
    expected = pooled([(a, g), (over_a, over_g)])
    assert_same(optimizer.factors()["layer"], (expected[0][None], expected[1][None]))


def test_of_two_sides_one_without_a_sample_ages() -> None:
    """Each has running averages of its own, which weigh by the same clock."""
    model = Sometimes()
    optimizer = KFACOptimizer(model, lr=0.0, factor_decay=0.5, factor_update_period=1)
    own, opposed = [], []
    for uses in ((True, True), (False, True), (True, True)):
        step_of(model, optimizer, own=uses[0], opposed=uses[1])
        *first, second = model.sides()
        own += first
        opposed.append(second)
    a, g = (0.2 * old + 0.8 * new for old, new in zip(*own, strict=True))  # 0.25 : 1, two steps apart
    over_g, over_a = ((old + 2 * mid + 4 * new) / 7 for old, mid, new in zip(*opposed, strict=True))
    expected = pooled([(a, g), (over_a, over_g)])
    assert_same(optimizer.factors()["layer"], (expected[0][None], expected[1][None]))


# -- a Linear, as a module and by its weight -----------------------------------------------------------------------


class Reused(nn.Module):
    """A Linear called twice, as a module or by its weight."""

    def __init__(self, *ways: str, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.ways = ways
        self.layer = nn.Linear(4, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for way in self.ways:
            features = x
            if way == "module":
                x = self.layer(x)
            else:
                x = F.linear(x, self.layer.weight, self.layer.bias if way == "function" else None)
            if x.requires_grad:
                x.retain_grad()
                self.seen.append((features.detach(), x))
            x = x + features.square()
        return x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ways", [("module", "function"), ("function", "module"), ("function", "function")])
def test_a_linear_used_by_its_weight_counts_as_if_called(ways: tuple[str, ...], bias: bool) -> None:
    model, twin = Reused(*ways, bias=bias), Reused("module", "module", bias=bias)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "factor_update_period": 2}
    ours, theirs = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    train(model, ours, 5)
    train(twin, theirs, 5)
    assert_identical(ours.factors(), theirs.factors())
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_use_without_the_bias_has_a_zero_in_its_column() -> None:
    model = Reused("module", "weight")
    optimizer = KFACOptimizer(model, lr=0.0)
    any_loss(model(torch.randn(6, 4))).backward()
    optimizer.step()
    rows = torch.cat([F.pad(x, (0, 1), value=value) for (x, _), value in zip(model.seen, (1.0, 0.0), strict=True)])
    gradients = torch.cat([output.grad for _, output in model.seen])
    expected = rows.T @ rows / 12, 6 * gradients.T @ gradients
    assert_same(optimizer.factors()["layer"], (expected[0][None], expected[1][None]))


class Scaled(nn.Linear):
    """Its product is not its output, and is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(3 * x)
        product.retain_grad()
        self.seen = (3 * x.detach(), product)
        return product * 2 + product.square()


def test_a_subclass_of_linear_is_measured_at_its_product() -> None:
    model = nn.Sequential(Scaled(4, 3))
    optimizer = KFACOptimizer(model, lr=0.0)
    any_loss(model(torch.randn(6, 4))).backward()
    optimizer.step()
    features, product = model[0].seen
    rows = oracles.linear_rows(features), oracles.linear_rows(product.grad)
    assert_same(optimizer.factors()["0"], oracles.factors(*rows, terms=6, bias=True))


class Standardised(nn.Linear):
    """Its product is with something computed from its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Standardises(nn.Module):
    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.plain, self.layer, self.elsewhere = nn.Linear(4, 4), Standardised(4, 4), elsewhere

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(x)
        if self.elsewhere:
            F.linear(hidden, self.layer.weight)  # without a backward
        return self.layer(hidden)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_subclass_of_linear_that_multiplies_by_something_else_is_not_measured_and_the_user_is_told(
    elsewhere: bool,
) -> None:
    """Also after a product with its very weight."""
    model = Standardises(elsewhere)
    optimizer = KFACOptimizer(model, lr=0.1)
    any_loss(model(torch.randn(6, 4))).backward()
    expected = torch.add(model.layer.weight.detach(), model.layer.weight.grad, alpha=-0.1)
    with pytest.warns(UserWarning, match=r"1 layer has gradients but no statistics.*'layer'") as seen:
        optimizer.step()
    assert [str(warning.filename) for warning in seen] == [__file__]
    assert torch.equal(model.layer.weight, expected)
    assert optimizer.metrics()["unpreconditioned_blocks"] == 1
    assert optimizer.metrics()["blocks_without_statistics"] == 1


class Apart(nn.Linear):
    """Adds its bias by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def test_a_subclass_of_linear_that_adds_its_bias_apart_is_measured_as_plain() -> None:
    model, twin = nn.Sequential(Apart(4, 5), nn.Linear(5, 3)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    twin.load_state_dict(model.state_dict())
    ours, theirs = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    train(model, ours, 3)
    train(twin, theirs, 3)
    for name, pair in theirs.factors().items():
        assert_same(ours.factors()[name], pair)
    assert_same(model[0].bias, twin[0].bias)


def test_a_layer_with_an_adapter_of_the_users_own_is_left_to_that() -> None:
    """Tied to it, a Linear is measured by its hook, for functions do not know the matrix."""

    class Own(nn.Linear):
        pass

    class OwnAdapter(type(DEFAULT_ADAPTERS[nn.Linear])):
        transposes = None

    torch.manual_seed(0)
    model = nn.Sequential(Own(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    twin = copy.deepcopy(model)
    ours = KFACOptimizer(model, lr=0.1, adapters={**DEFAULT_ADAPTERS, Own: OwnAdapter()}, factor_update_period=1)
    train(model, ours, 2)
    train(twin, theirs := KFACOptimizer(twin, lr=0.1, factor_update_period=1), 2)
    assert_same(ours.factors()["0"], theirs.factors()["0"])


# -- nothing is disturbed ------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Embedding, matrices, dropout, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(TOKENS, 4)
        self.inner = nn.Sequential(Conv1D(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 4))
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.inner(self.embedding(ids)) @ self.mix
        return F.linear(hidden, self.embedding.weight)


def test_outputs_gradients_and_random_numbers_are_those_without_the_optimizer() -> None:
    model, twin = Everything(), Everything()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=2)
    for step in range(4):
        results = []
        for net in (model, twin):
            torch.manual_seed(step)
            net.zero_grad()
            output = net(ids_of(step))
            language_loss(output).backward()
            results.append((output.detach(), clones(param.grad for param in net.parameters()), torch.get_rng_state()))
        assert_identical(results[0], results[1])
        optimizer.step()


def test_forwards_that_are_not_measured_enter_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Spy(functional.ProductMode):
        def __enter__(self) -> Any:
            entered.append(1)
            return super().__enter__()

    monkeypatch.setattr(functional, "ProductMode", Spy)
    model = Everything()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=3)
    counts = []
    for step in range(7):
        with torch.no_grad():
            model(ids_of(50))
        assert not entered
        train_language(model, optimizer, 1, start=step)
        counts.append(len(entered))
        entered.clear()
    assert counts == [1, 0, 0, 1, 0, 0, 1]


def stack() -> list[Any]:
    return list(_get_current_function_mode_stack())


class Interrupted(nn.Module):
    """Raises within its forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Conv1D(4, 3)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.inner(x)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("after", ["forward", "evaluation", "zero_grad", "step", "drop", "remove_hooks"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_forward_that_fails_leaves_no_mode_behind(after: str, error: BaseException, nested: bool) -> None:
    model = nn.Sequential(Interrupted()) if nested else Interrupted()
    failing: Any = model[0] if nested else model
    optimizer = KFACOptimizer(model, lr=0.1)
    features = torch.randn(5, 4)
    failing.error = error
    with pytest.raises(type(error)):
        model(features)
    failing.error = None
    if isinstance(error, Exception):
        assert not stack()
    if after == "forward":
        loss = any_loss(model(features))
        assert not stack()
        loss.backward()
        optimizer.step()
        a, _ = next(iter(optimizer.factors().values()))
        assert_same(a[0, :4, :4], features.T @ features / 5)
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    elif after == "evaluation":
        with torch.no_grad():
            model(features)
    elif after == "drop":
        del optimizer
        gc.collect()
    else:
        getattr(optimizer, after)()
    assert not stack()


def test_an_interrupted_forward_counts_no_loss_terms() -> None:
    model = Interrupted()
    optimizer = KFACOptimizer(model, lr=0.0)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(50, 4))
    model.error = None
    output = model(torch.randn(5, 4))
    output.retain_grad()
    any_loss(output).backward()
    optimizer.step()
    assert_same(optimizer.factors()["inner"][1][0], 5 * output.grad.T @ output.grad)


# -- forwards and backwards ----------------------------------------------------------------------------------------


def conv1d_pair() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(Conv1D(4, 3))
    return model, nn.Sequential(linear_twin(model[0]))


PASSES: dict[str, Callable[[nn.Module], None]] = {
    "one": lambda m: any_loss(m(batch(1))).backward(),
    "micro-batches": lambda m: [(any_loss(m(batch(i, size=3 + i))) / 2).backward() for i in range(2)],
    "a forward without a backward": lambda m: (m(batch(3)), any_loss(m(batch(1))).backward()),
    "a forward without gradients": lambda m: (torch.no_grad()(m)(batch(3)), any_loss(m(batch(1))).backward()),
    "gradients by hand": lambda m: (
        torch.autograd.grad(any_loss(m(batch(1).requires_grad_())), next(m.parameters()))
        and any_loss(m(batch(2))).backward()
    ),
}


def two_backwards(model: nn.Module) -> None:
    output = model(batch(1))
    square_loss(output).backward(retain_graph=True)
    output.sum().backward()


PASSES |= {"two backwards": two_backwards}


@pytest.mark.parametrize("name", PASSES)
def test_the_commit_rule_holds_for_functions_as_for_modules(name: str) -> None:
    results = []
    for model in conv1d_pair():
        torch.manual_seed(0)
        optimizer = KFACOptimizer(model, lr=0.0)
        PASSES[name](model)
        optimizer.step()
        results.append(optimizer.factors()["0"])
    assert_same(results[0], results[1])
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("name", ["F.linear", "a module, registered first"])
def test_micro_batches_and_two_backwards_of_tied_layers_give_the_factors_of_one_pass(name: str) -> None:
    def whole(model: nn.Module) -> None:
        language_loss(model(ids_of(0))).backward()

    def halves(model: nn.Module) -> None:
        logits = model(ids_of(0))
        language_loss(logits).div(2).backward(retain_graph=True)
        language_loss(logits).div(2).backward()

    def repeated(model: nn.Module) -> None:
        for _ in range(2):
            language_loss(model(ids_of(0))).div(2).backward()

    results = []
    for run in (whole, halves, repeated):
        model = language(name)
        optimizer = KFACOptimizer(model, lr=0.0)
        run(model)
        optimizer.step()
        results.append(on_both_sides(optimizer))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_of_tied_layers_one_without_a_backward_does_not_count() -> None:
    model = language("F.linear")
    optimizer = KFACOptimizer(model, lr=0.0)
    model(ids_of(0))
    ids, embedded, *_ = model.seen
    any_loss(embedded).backward()
    optimizer.step()
    tokens, width = on_both_sides(optimizer)
    g = embedded.grad.flatten(0, 1)
    counts = torch.bincount(ids.flatten(), minlength=TOKENS) / ids.numel()
    assert_same(torch.kron(width, torch.diag(tokens)), torch.kron(len(ids) * g.T @ g, torch.diag(counts)))


def test_activation_checkpoints_that_keep_the_graph_change_nothing() -> None:
    class Checkpointed(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for kind in (Conv1D, Checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(kind(4, 5), nn.Tanh(), kind(5, 3))
        train(model, optimizer := KFACOptimizer(model, lr=0.1, factor_update_period=1), 3)
        results.append((clones(model.parameters()), optimizer.factors()))
    assert_identical(results[0], results[1])


def test_where_no_function_multiplies_by_a_candidate_after_all_the_user_is_told() -> None:
    model = Matrix(NOT_A_PRODUCT["a sum"], (5, 5), bias=False)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    optimizer.step()  # no gradient yet, no verdict
    any_loss(model(torch.randn(5, 5))).backward()
    with pytest.warns(UserWarning, match="nothing is preconditioned; every parameter takes the plain SGD") as seen:
        optimizer.step()
    assert [str(warning.filename) for warning in seen] == [__file__]
    optimizer.step()


# -- checkpoints ---------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 3}
MODELS: dict[str, Callable[[], nn.Module]] = {"everything": Everything} | {
    name: (lambda name=name: language(name)) for name in TIED
}


@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(name: str, stop: int, forward_first: bool) -> None:
    whole, first, second = (MODELS[name]() for _ in range(3))
    torch.manual_seed(0)
    train_language(whole, uninterrupted := KFACOptimizer(whole, **OPTIONS), 7)
    torch.manual_seed(0)
    train_language(first, optimizer := KFACOptimizer(first, **OPTIONS), stop)
    saved = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    random = torch.get_rng_state()
    train_language(first, optimizer, 2, start=50)
    resumed = KFACOptimizer(second, **OPTIONS)
    if forward_first:
        train_language(second, resumed, 2, start=60)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_identical(resumed.state_dict(), saved["optimizer"])
    torch.set_rng_state(random)
    train_language(second, resumed, 7 - stop, start=stop)
    assert_identical(second.state_dict(), whole.state_dict())
    assert_identical(resumed.state_dict(), uninterrupted.state_dict())
    assert_identical(resumed.factors(), uninterrupted.factors())


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_from_before_the_first_forward_starts_anew(name: str) -> None:
    """A rollback to the beginning: functions have shown nothing in it yet."""
    model, twin = MODELS[name](), MODELS[name]()
    optimizer = KFACOptimizer(model, **OPTIONS)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_language(model, optimizer, 3, start=30)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.manual_seed(0)
    train_language(model, optimizer, 4)
    torch.manual_seed(0)
    train_language(twin, fresh := KFACOptimizer(twin, **OPTIONS), 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(optimizer.state_dict(), fresh.state_dict())


def test_going_back_to_before_the_first_forward_forgets_that_a_matrix_was_used_from_both_sides() -> None:
    results = []
    for detour in (True, False):
        torch.manual_seed(0)
        model = Both(None, (4, 3), bias=False)
        optimizer = KFACOptimizer(model, **OPTIONS)
        if detour:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            train(model, optimizer, 2)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        model.alone = True
        train(model, optimizer, 2)
        results.append((clones(model.parameters()), optimizer.state_dict()))
    assert_identical(results[0], results[1])


def test_layers_of_a_checkpoint_that_never_turn_up_are_not_lost() -> None:
    model, second = Everything(), Everything()
    train_language(model, optimizer := KFACOptimizer(model, **OPTIONS), 3)
    saved = through_a_file(optimizer.state_dict())
    resumed = KFACOptimizer(second, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert_identical(resumed.state_dict(), saved)
    language_loss(F.linear(second.embedding(ids_of(0)), second.embedding.weight)).backward()
    resumed.set_loss_terms(5)
    resumed.step()
    kept = resumed.state_dict()["state"]
    for index, state in saved["state"].items():
        if "kfac" in state:
            assert_identical(kept[index]["kfac"]["name"], state["kfac"]["name"])
    mix = next(i for i, param in enumerate(second.parameters()) if param is second.mix)
    saved["state"][mix]["kfac"]["clock"]["step"] += 1  # the layer waits, and time goes on
    saved["state"][mix]["kfac"]["step_size"] = kept[mix]["kfac"]["step_size"]  # what all blocks have
    assert_identical(kept[mix]["kfac"], saved["state"][mix]["kfac"])


def test_without_factors_statistics_start_anew_at_the_same_step() -> None:
    model, second = Everything(), Everything()
    train_language(model, optimizer := KFACOptimizer(model, include_factors=False, **OPTIONS), 3)
    resumed = KFACOptimizer(second, include_factors=False, **OPTIONS)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train_language(second, resumed, 1)
    assert {block.clock.step for block in resumed._binding.coverage.blocks} == {4}
    assert {block.clock.folds for block in resumed._binding.coverage.blocks} == {1}


def test_a_checkpoint_of_another_size_is_refused_before_the_first_forward_or_at_it() -> None:
    model, other = nn.Sequential(Conv1D(4, 5), nn.Linear(5, 3)), nn.Sequential(Conv1D(4, 6), nn.Linear(6, 3))
    train(model, optimizer := KFACOptimizer(model, lr=0.1, kl_clip=None, momentum=0), 1)
    resumed = KFACOptimizer(other, lr=0.1)
    with pytest.raises(ValueError, match=r"of '1' is \[1, 6, 6\], here \[1, 7, 7\]"):
        resumed.load_state_dict(optimizer.state_dict())
    late = nn.Sequential(Conv1D(4, 6), nn.Flatten(), nn.Linear(6, 3))
    resumed = KFACOptimizer(late[0].parameters(), lr=0.1, model=late)
    saved = {"state": {0: optimizer.state_dict()["state"][0]}, "param_groups": resumed.state_dict()["param_groups"]}
    resumed.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"of '0' is \[1, 5, 5\], here \[1, 6, 6\]"):
        late(batch())


@pytest.mark.parametrize("name", TIED)
def test_a_copy_between_unfreezing_a_tied_matrix_and_its_first_forward_measures_both_sides(name: str) -> None:
    """Its optimizer may make the block at once, for which the other has no state yet."""
    model = nn.Sequential(language(name), nn.Linear(TOKENS, 3))
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model, **OPTIONS)
    model[0].requires_grad_(True)
    twin, other = copy.deepcopy((model, optimizer))
    for each, its in ((model, optimizer), (twin, other)):
        train_language(each, its, 3)
    assert_identical(clones(twin.parameters()), clones(model.parameters()))
    assert_identical(other.state_dict(), optimizer.state_dict())


# -- outside a forward of the model ------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A bare matrix and attention, run again within backward where `recompute`."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = Conv1D(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.out = nn.Linear(4, 3)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        x = self.matrix(x).tanh()
        return x + self.attention(x, x, x)[0]

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.out(self.body(x))
        return self.out(checkpoint(self.body, x, use_reentrant=True))


class RecomputesItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.weight, self.out = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(checkpoint(lambda h: torch.tanh(h @ self.weight), self.into(x), use_reentrant=True))
        return output


def test_a_matrix_whose_products_reentrant_checkpointing_hides_is_named_and_takes_the_sgd_step() -> None:
    torch.manual_seed(0)
    model = RecomputesItsOwn().double()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for step in range(3):
        optimizer.zero_grad()
        square_loss(model(batch(step))).backward()
        before = model.weight.detach().clone()
        if step == 0:
            with pytest.warns(UserWarning, match=r"no product with 'weight' is seen.*use_reentrant=True"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(model.weight, before - 0.1 * model.weight.grad)


def test_what_reentrant_checkpointing_runs_again_is_measured_as_if_run_once() -> None:
    models = [Recomputed(recompute) for recompute in (False, True)]
    optimizers = [KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1) for model in models]
    for seed in range(4):
        x = batch(seed, size=6).view(3, 2, 4).requires_grad_()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            square_loss(model(x)).backward()
            optimizer.step()
            assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert owners(optimizers[0]) == owners(optimizers[1])
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


class KeptInPart(nn.Sequential):
    """Runs its layers within a checkpoint that saves what every operator gives."""

    def forward(self, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=kept)


@pytest.mark.parametrize("rows", [2, 9], ids=["as-many-rows-as-inputs", "more"])
def test_selective_checkpointing_leaves_gradients_as_they_are(rows: int) -> None:
    models = []
    for kind in (KeptInPart, nn.Sequential):
        torch.manual_seed(0)
        models.append(kind(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
    optimizers = [KFACOptimizer(model, lr=0.1, factor_update_period=1) for model in models]
    for seed in range(3):
        x = batch(seed, size=2 * rows).view(2, rows, 4).requires_grad_()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            square_loss(model(x)).backward()
            optimizer.step()
            assert optimizer.metrics()["unpreconditioned_blocks"] == 0
        for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-12, atol=1e-14)


def test_a_bare_matrix_whose_module_is_called_by_hand_is_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(4, 4), nn.Tanh(), nn.Linear(4, 3))
    whole = copy.deepcopy(model)
    ours, theirs = KFACOptimizer(model, lr=0.0), KFACOptimizer(whole, lr=0.0)
    ours.set_loss_terms(8)
    square_loss(model[2](model[1](model[0](batch())))).backward()
    square_loss(whole(batch())).backward()
    ours.step()
    theirs.step()
    for name, pair in theirs.factors().items():
        assert_same(ours.factors()[name], pair)


class Beside(nn.Linear):
    """Takes a mask before its input, and returns that input beside its product."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x * mask, self.weight) + self.bias, x], -1)


class CallsBeside(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layer, self.head = nn.Linear(4, 4), Beside(4, 2), nn.Linear(6, 3)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        given = (hidden > 0).to(x.dtype), hidden
        return self.head(checkpoint(self.layer, *given, use_reentrant=True) if self.recompute else self.layer(*given))


@pytest.mark.parametrize("way", ["recomputed", "by hand"])
def test_a_subclass_of_linear_is_measured_at_its_product_outside_of_the_models_forward(way: str) -> None:
    model, whole = CallsBeside(way == "recomputed"), CallsBeside(False)
    ours, theirs = KFACOptimizer(model, lr=0.0), KFACOptimizer(whole, lr=0.0)
    ours.set_loss_terms(8)
    square_loss(model.forward(batch()) if way == "by hand" else model(batch())).backward()
    square_loss(whole(batch())).backward()
    ours.step()
    theirs.step()
    assert ours.factors().keys() == {"stem", "layer", "head"}
    for name, pair in theirs.factors().items():
        assert_same(ours.factors()[name], pair)


# -- uses that are out of sight ----------------------------------------------------------------------------------


class Filters(nn.Module):
    """A convolution whose weight is used once more, by a function; and an embedding likewise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.embedding, self.out = nn.Conv1d(4, 4, 1), nn.Embedding(4, 4), nn.Linear(4, 3)
        self.again: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(dim=-1)
        x = self.conv(x[..., None]).squeeze(-1) + self.embedding(ids)
        if "conv" in self.again:
            x = x + F.conv1d(x[..., None], self.conv.weight).squeeze(-1)
        if "embedding" in self.again:
            x = x + F.embedding(ids, self.embedding.weight)
        return self.out(x)


@pytest.mark.parametrize("layer", ["conv", "embedding"])
def test_a_weight_used_by_a_function_that_is_not_measured_is_left_to_sgd_and_the_user_is_told(layer: str) -> None:
    model = Filters()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-6, factor_update_period=1)
    train(model, optimizer, 2)
    assert owners(optimizer)[f"{layer}.weight"] == layer
    model.again = {layer}
    weight = model.get_parameter(f"{layer}.weight")
    function = {"conv": "conv1d", "embedding": "embedding"}[layer]
    for step in range(2):
        before = weight.detach().clone()
        optimizer.zero_grad()
        square_loss(model(batch(step))).backward()
        told = pytest.warns(
            UserWarning, match=rf"'{layer}\.weight' is used by {function} in a way that is not measured"
        )
        with told if step == 0 else contextlib.nullcontext():
            optimizer.step()
        assert torch.equal(weight, torch.add(before, weight.grad, alpha=-0.1))
    assert owners(optimizer)[f"{layer}.weight"] is None
    assert "in a way that is not measured" in str(reasons(optimizer)[f"{layer}.weight"])
    assert owners(optimizer)["out.weight"] == "out"


def out_of_sight(again: set[str]) -> tuple[nn.Module, KFACOptimizer]:
    """A model with such uses, and an optimizer."""
    model = Filters()
    model.again = again
    return model, KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=2, inverse_update_period=3)


TOLD = "in a way that is not measured"


def trained_out_of_sight(again: set[str]) -> tuple[nn.Module, KFACOptimizer]:
    model, optimizer = out_of_sight(again)
    with pytest.warns(UserWarning, match=TOLD):
        train(model, optimizer, 3)
    return model, optimizer


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_what_was_left_to_sgd_is_so_in_the_run_that_resumes_and_nobody_is_told_again(given: bool) -> None:
    """Even where the use does not come again."""
    models = [Filters() for _ in range(2)]
    optimizers = [KFACOptimizer(model if given else model.parameters(), lr=0.1, momentum=0.9) for model in models]
    models[0].again = {"embedding"}
    with pytest.warns(UserWarning, match=TOLD):
        train(models[0], optimizers[0], 3)
    saved = through_a_file({"model": models[0].state_dict(), "optimizer": optimizers[0].state_dict()})
    models[1].load_state_dict(saved["model"])
    optimizers[1].load_state_dict(saved["optimizer"])
    assert_identical(optimizers[1].state_dict(), saved["optimizer"])
    models[0].again = set()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3, start=3)
    assert_identical(clones(models[1].parameters()), clones(models[0].parameters()))
    assert_identical(optimizers[1].state_dict(), optimizers[0].state_dict())
    assert owners(optimizers[1])["embedding.weight"] is None
    assert TOLD in str(reasons(optimizers[1])["embedding.weight"])


def test_a_copy_leaves_to_sgd_what_was_left_to_it() -> None:
    model, optimizer = trained_out_of_sight({"embedding"})
    twin, copied = copy.deepcopy((model, optimizer))
    assert_identical(owners(copied), owners(optimizer))
    for each, its in ((model, optimizer), (twin, copied)):
        train(each, its, 3, start=3)
    assert_identical(clones(twin.parameters()), clones(model.parameters()))
    assert_identical(copied.state_dict(), optimizer.state_dict())


def test_going_back_to_before_the_first_use_out_of_sight_preconditions_again() -> None:
    model, optimizer = out_of_sight(set())
    train(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model.again = {"embedding"}
    with pytest.warns(UserWarning, match=TOLD):
        train(model, optimizer, 3, start=3)
    model.again = set()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    twin, fresh = out_of_sight(set())
    twin.load_state_dict(saved[0])
    fresh.load_state_dict(copy.deepcopy(saved[1]))
    for each, its in ((model, optimizer), (twin, fresh)):
        train(each, its, 3, start=3)
    assert owners(optimizer)["embedding.weight"] == "embedding"
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(optimizer.state_dict(), fresh.state_dict())


def test_a_load_that_brings_a_layer_back_in_another_shape_is_refused_before_anything_is_changed() -> None:
    model = Filters()
    other = KFACOptimizer(model, lr=0.1, inverse={"embedding": Eigen()})
    train(model, other, 1)
    trained, optimizer = trained_out_of_sight({"embedding"})
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'embedding'.*"):
        optimizer.load_state_dict(other.state_dict())
    assert_identical(optimizer.state_dict(), before)
    trained.again = set()
    train(trained, optimizer, 1, start=3)


def test_a_layer_left_to_sgd_may_be_skipped_in_the_run_that_resumes_and_is_told_from_another() -> None:
    saved = trained_out_of_sight({"embedding"})[1].state_dict()
    skipping = KFACOptimizer(Filters(), skip_layers=["embedding"])
    skipping.load_state_dict(saved)
    assert owners(skipping)["embedding.weight"] is None
    other = Filters()
    other.table, other.head = other.embedding, other.out
    del other.embedding, other.out
    with pytest.raises(ValueError, match="it has 'out' where 'head' should stand; it has 'embedding' where"):
        KFACOptimizer(other).load_state_dict(saved)


def test_taking_the_hooks_off_before_the_step_that_leaves_a_layer_to_sgd_is_for_good() -> None:
    model, optimizer = out_of_sight({"embedding"})
    square_loss(model(batch())).backward()
    optimizer.remove_hooks()
    with pytest.warns(UserWarning, match=TOLD):
        optimizer.step()
    assert owners(optimizer)["embedding.weight"] is None
    factors = optimizer.factors()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    for i in range(2):
        square_loss(model(batch(i))).backward()
        optimizer.step()
    assert_identical(optimizer.factors(), factors)


def test_rows_of_output_gradients_are_no_copy() -> None:
    gradient = torch.randn(2, 5, 4)
    call = LayerCall(input=None, gradient=gradient)
    statistics = ProductStatistics(LayerSpec("layer", ("weight",), 3, 4), call, torch.float64)
    assert statistics.gradient_rows(gradient).data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("way", ["unfrozen", "added"])
def test_a_convolution_that_comes_after_a_forward_that_showed_it_is_measured(way: str) -> None:
    """Nobody had taken what its module did for the module's own, as it was no layer then."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))
    late = list(model[1].parameters())
    for param in late:
        param.requires_grad_(way == "added")
    params = list(model.parameters()) if way == "unfrozen" else [*model[0].parameters(), *model[4].parameters()]
    optimizer = KFACOptimizer(params, model=model, lr=0.01, factor_update_period=1)
    x = torch.randn(4, 2, 5)
    for step in range(6):
        if step == 3:
            model(x)
            for param in late:
                param.requires_grad_(True)
            if way == "added":
                optimizer.add_param_group({"params": late})
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert set(optimizer.factors()) == {"0", "1", "4"}
