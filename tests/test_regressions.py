"""Regressions: ways of using a model that once gave other numbers, or none, than their plain equivalents."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import (
    Factors,
    assert_identical,
    assert_same_factors,
    batch,
    clones,
    factors_after,
    mlp,
    square_loss,
    train,
)
from torch import Tensor, nn

from kfac_optim import KFACOptimizer
from kfac_optim.capture import graph_calls

BACKEND = "aot_eager"
F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def weight_norm_linear(inputs: int, outputs: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs))


def attention(width: int, _: int) -> nn.Module:
    return nn.MultiheadAttention(width, 1)


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64)


class Then(nn.Module):
    """A layer, and what is done with its output."""

    def __init__(self, layer: nn.Module, rest: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer.to(F64)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.layer, x)


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight, self.shift)


VIEWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Tensor]]] = {
    "Linear with shared positions": (lambda: nn.Linear(4, 5), (3, 6, 4), call),
    "Conv2d without a batch": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), call),
    "ConvTranspose1d without a batch": (lambda: nn.ConvTranspose1d(2, 3, 3), (2, 5), call),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 5), call),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 6, 4), attend),
    "function of a parameter": (Product, (3, 6, 4), call),
}


def changed_in_place(run: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
    output = run(layer, x)
    skip = 2 * output
    output.sub_(0.1).mul_(3)
    return skip + output


def changed_out_of_place(run: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
    output = run(layer, x)
    return 2 * output + (output - 0.1) * 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", VIEWS.values(), ids=VIEWS)
def test_a_layers_output_may_be_a_view_that_is_changed_in_place(case: Any, compiled: bool) -> None:
    """A view is moved to another place in the graph then, and leaves the hooks that were set on it behind."""
    build, shape, run = case
    torch.manual_seed(0)
    layer = build()
    found: list[Factors] = []
    for change in (changed_in_place, changed_out_of_place):
        model = Then(copy.deepcopy(layer), lambda layer, x, change=change: change(run, layer, x))
        forward = torch.compile(model, backend=BACKEND) if compiled and change is changed_in_place else model
        loss = lambda _, forward=forward: forward(seeded(*shape)).square().mean().backward()  # noqa: E731
        found.append(factors_after(model, loss))
    assert_same_factors(found[0], found[1], rtol=1e-9)


def test_a_compiled_step_is_the_eager_step() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, momentum=0.9, factor_update_period=1),
    )
    step = torch.compile(optimizer.step, backend=BACKEND)
    for i in range(3):
        optimizer.zero_grad()
        square_loss(model(batch(100 + i))).backward()
        step()
    train(twin, reference, 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


class Methods(nn.Module):
    def __init__(self, use: Callable[["Methods", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cell = nn.LSTMCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


TRACED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "norm of a parameter": lambda m, x: m.linear(x) @ (m.weight / m.weight.norm(dim=1, keepdim=True)),
    "norm of its transpose": lambda m, x: m.linear(x) / m.weight.T.norm(),
    "unflatten of a parameter": lambda m, x: m.linear(x) @ m.weight.unflatten(0, (2, 2)).flatten(0, 1),
    "reversed parameter": lambda m, x: m.linear(x) @ torch.stack(list(reversed(m.weight))),
    "LSTMCell after a layer": lambda m, x: m.cell(m.linear(x))[0],
    "padding mask of attention": lambda m, x: m.attention(x[None], x[None], x[None], x[None, :, 0] > 1)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("use", TRACED.values(), ids=TRACED)
def test_what_compiles_whole_without_the_optimizer_does_so_with_it(use: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Methods(use).double()
    twin = copy.deepcopy(model)
    torch.compile(copy.deepcopy(model), backend=BACKEND, fullgraph=True)(batch())  # else it proves nothing
    torch._dynamo.reset()
    found = []
    for each, forward in ((model, torch.compile(model, backend=BACKEND, fullgraph=True)), (twin, twin)):
        optimizer = KFACOptimizer(each, lr=0.0)
        square_loss(forward(batch())).backward()
        optimizer.step()
        found.append(optimizer.factors())
    compiled, eager = found
    # Within a graph other views of a bare parameter than its transpose are not known.
    assert compiled.keys() >= eager.keys() - {""}
    assert_same_factors(compiled, {name: eager[name] for name in compiled}, rtol=1e-9)


def compiled_and_eager(between: Callable[[nn.Module, int], None], steps: int, dtypes: dict[int, torch.dtype]) -> Any:
    models = mlp(), mlp()
    optimizers = [KFACOptimizer(model, lr=0.0, inverse_update_period=1, factor_update_period=1) for model in models]
    for model, optimizer, forward in zip(
        models, optimizers, (torch.compile(models[0], backend=BACKEND), models[1]), strict=True
    ):
        for i in range(steps):
            between(model, i)
            optimizer.zero_grad()
            square_loss(forward(batch(i, dtype=dtypes.get(i, F64)))).backward()
            optimizer.step()
    return [optimizer.factors() for optimizer in optimizers]


def test_a_weight_may_be_frozen_for_a_while_in_a_compiled_model() -> None:
    def freeze(model: nn.Module, step: int) -> None:
        model.get_parameter("0.weight").requires_grad_(not 2 <= step < 4)

    ours, eager = compiled_and_eager(freeze, 6, {})
    assert_same_factors(ours, eager, rtol=1e-9)


def test_a_compiled_model_moved_to_another_dtype_is_measured_in_its_first_step_there() -> None:
    def move(model: nn.Module, step: int) -> None:
        if step == 2:
            model.to(torch.float32)

    ours, eager = compiled_and_eager(move, 3, {2: torch.float32})
    assert_same_factors(ours, eager, rtol=1e-4)


@pytest.mark.parametrize("terms", [float("nan"), float("inf"), -3.0])
def test_stated_terms_that_cannot_be_true_do_not_spoil_the_averages(terms: float) -> None:
    """A tensor's value is not waited for, so it cannot be refused when it is stated."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    train(model, optimizer, 2)
    before = optimizer.factors()
    optimizer.zero_grad()
    optimizer.set_loss_terms(torch.tensor(terms))
    square_loss(model(batch())).backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), before)
    assert optimizer.metrics()["refused_statistics"] > 0


def test_the_terms_are_those_of_the_moment_they_were_stated() -> None:
    terms = torch.tensor(8.0)
    found = []
    for later in (8.0, 99.0):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.0)
        optimizer.set_loss_terms(terms)
        square_loss(model(batch())).backward()
        terms.fill_(later)
        optimizer.step()
        terms.fill_(8.0)
        found.append(optimizer.factors())
    assert_same_factors(found[1], found[0])


def test_terms_that_were_stated_for_a_batch_that_was_left_out_do_not_count() -> None:
    found = []
    for left_out, micro_batches in ((0, 1), (2, 1), (0, 2), (2, 2)):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.0)
        for _ in range(left_out):
            optimizer.zero_grad()
            optimizer.set_loss_terms(8)
        optimizer.zero_grad()
        for _ in range(micro_batches):
            optimizer.set_loss_terms(8)
            square_loss(model(batch())).div(micro_batches).backward()
        optimizer.step()
        found.append(optimizer.factors())
    for factors in found[1:]:
        assert_same_factors(factors, found[0])


def test_a_cast_between_backward_and_the_step_leaves_out_its_statistics() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    before = {
        name: tuple(side.double() for side in pair if side is not None) for name, pair in optimizer.factors().items()
    }
    optimizer.zero_grad()
    square_loss(model(batch(dtype=torch.float32))).backward()
    model.double()
    optimizer.step()
    assert_same_factors(optimizer.factors(), before)
    train(model, optimizer, 1)
    assert not torch.equal(optimizer.factors()["2"][1], before["2"][1])


def test_conversions_may_swap_parameters() -> None:
    """`torch.__future__.set_swap_module_params_on_conversion`, which refuses parameters with weak references."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = mlp(dtype=torch.float32)
        optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            train(model, optimizer, 2)
            model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_scaled_step_that_was_refused_can_be_taken_again() -> None:
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(square_loss(model(batch(100, dtype=torch.float32)))).backward()
    optimizer.param_groups[0]["damping"] = -1.0
    with pytest.raises(ValueError, match="damping"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["damping"] = 1e-3
    scaler.step(optimizer)
    train(twin, KFACOptimizer(twin, lr=0.1), 1)
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()))


def test_a_copy_of_an_optimizer_whose_hooks_were_taken_off_has_none_either() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    optimizer.remove_hooks()
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, start=2)
    train(twin, other, 2, start=2)
    assert_same_factors(other.factors(), optimizer.factors())


def test_compiled_forwards_that_no_step_follows_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_calls, "_MOST_CALLS", 30)
    model, twin = mlp(), mlp()
    optimizer, reference = KFACOptimizer(model, lr=0.1), KFACOptimizer(twin, lr=0.1)
    forward = torch.compile(model, backend=BACKEND)
    for i in range(40):
        forward(batch(i))
    assert len(optimizer._window.graphs._kept) == 30
    for call, each in ((forward, optimizer), (twin, reference)):
        each.zero_grad()
        square_loss(call(batch(100))).backward()
        each.step()
    assert_same_factors(optimizer.factors(), reference.factors())


class Recursive(nn.Module):
    """Calls itself, and then multiplies by the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, dtype=torch.float64)
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, ids: Tensor, *, again: bool = True) -> Tensor:
        if not again:
            return self.inner(self.embedding(ids))
        return F.linear(torch.tanh(self(ids, again=False)), self.embedding.weight)


def test_a_compiled_model_that_calls_itself_is_measured_to_its_end() -> None:
    torch.manual_seed(0)
    model = Recursive()
    twin = copy.deepcopy(model)
    optimizer, reference = (
        KFACOptimizer(model, lr=0.0, factor_update_period=1),
        KFACOptimizer(twin, lr=0.0, factor_update_period=1),
    )
    ids = torch.randint(5, (6,))
    for call, each in ((torch.compile(model, backend=BACKEND, fullgraph=True), optimizer), (twin, reference)):
        for _ in range(2):
            each.zero_grad()
            square_loss(call(ids)).backward()
            each.step()
    assert_same_factors(optimizer.factors(), reference.factors())


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.layer(x)[index]


def test_a_graph_that_raises_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = Fragile()
    twin = copy.deepcopy(model)
    optimizer, reference = KFACOptimizer(model, lr=0.0), KFACOptimizer(twin, lr=0.0)
    compiled = torch.compile(lambda x, index: model(x, index), backend=BACKEND)
    for call, each in ((compiled, optimizer), (twin, reference)):
        with pytest.raises((IndexError, RuntimeError)):
            call(batch(0, size=4), torch.tensor([0, 1, 2, 9]))
        for seed in (1, 2):
            (call(batch(seed, size=4), torch.arange(4)).square().sum() / 8).backward()
        each.step()
    assert_same_factors(optimizer.factors(), reference.factors())


def test_the_remedy_for_a_graph_that_was_compiled_without_hooks_works() -> None:
    forward = torch.compile(lambda model, x: model(x), backend=BACKEND)

    def train_with(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        model = mlp()
        optimizer = kind(model)
        square_loss(forward(model, batch())).backward()
        optimizer.step()
        return optimizer

    train_with(lambda model: torch.optim.SGD(model.parameters()))
    with pytest.warns(UserWarning, match=r"call torch\._dynamo\.reset\(\) before the optimizer is built"):
        train_with(KFACOptimizer)
    torch._dynamo.reset()
    optimizer = train_with(KFACOptimizer)
    assert isinstance(optimizer, KFACOptimizer)
    assert optimizer.metrics()["measured_parameters"] == 1


def test_where_backward_is_called_within_a_compiled_function_nothing_of_ours_is_compiled_by_itself() -> None:
    traces: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        found = [node.meta["stack_trace"] for node in graph.graph.nodes if node.meta.get("stack_trace")]
        traces.append("".join(found))
        return graph

    model = mlp()
    optimizer = KFACOptimizer(model)
    torch.compile(lambda: square_loss(model(batch())).backward(), backend=backend)()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1
    assert traces
    assert all(__file__ in each for each in traces)


@pytest.mark.parametrize("make", [nn.Linear, weight_norm_linear, nn.LSTM, nn.RNNCell, attention])
def test_what_takes_the_place_of_a_layer_may_be_given_its_hooks(make: Callable[[int, int], nn.Module]) -> None:
    """Quantization swaps layers so, and calls the hooks without keywords."""
    old, new = make(4, 4), make(4, 4)
    optimizer = KFACOptimizer(nn.ModuleList([old]), lr=0.1)
    for hook in old._forward_pre_hooks.values():
        new.register_forward_pre_hook(hook)
    for hook in old._forward_hooks.values():
        new.register_forward_hook(hook)
    x = torch.randn(3, 4)
    assert new(*[x] * (3 if isinstance(new, nn.MultiheadAttention) else 1)) is not None
    assert old._forward_hooks, "it is watched"
    optimizer.step()


def test_notes_of_another_tool_in_the_state_are_left_alone() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    optimizer.state["notes of a tool"] = {"sum": torch.ones(2)}
    train(model, optimizer, 2)
    assert optimizer.state["notes of a tool"]["sum"].sum() == 2
