"""Models under `torch.compile`: the factors and steps of the eager model; one graph with statistics, one without."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from helpers.plain import assert_identical, clones
from torch import Tensor, nn

from kfac_optim import BlockDiagonal, KFACOptimizer, LossTerms, Structure, Subsample

BACKEND = "aot_eager"  # traces and partitions as inductor does, and computes with eager kernels
BACKENDS = [BACKEND, "eager"]  # which calls torch's functions as the model does, in whatever mode the graph is called


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


class Causal(nn.Conv1d):
    """Pads by itself what it convolves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))


class Cropping(nn.ConvTranspose1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :-2]


def causal_net() -> nn.Module:
    return nn.Sequential(
        Causal(2, 3, 3), nn.Tanh(), Cropping(3, 2, 4, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(20, 3)
    )


class Gated(nn.Conv1d):
    """Layers and a matrix of its own within its forward."""

    def __init__(self) -> None:
        super().__init__(2, 3, 1)
        self.gate, self.mix = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.mix @ super().forward(x)) * self.gate(x.mean(-1)).sigmoid().unsqueeze(-1)


def gated_net() -> nn.Module:
    return nn.Sequential(Gated(), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3))


class Attentive(nn.Module):
    """Attention to another sequence, and of one sequence to itself without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.own = nn.MultiheadAttention(8, 1, kdim=8, vdim=8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        seen, _ = self.cross(x, memory, memory)
        return self.own(seen[0], seen[0], seen[0], need_weights=False)[0]


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
    "convolutions with forwards of their own": Case(causal_net, lambda seed: ((random(seed, 4, 2, 5),), {})),
    "layers within a forward of its own": Case(gated_net, lambda seed: ((random(seed, 4, 2, 5),), {})),
    "some rows": Case(conv_net, images, {"subsample": Subsample(examples=4, positions=3)}),
    "blocks": Case(
        lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
        lambda seed: ((random(seed, 8, 4),), {}),
        {"structure": {"0": (Structure.DENSE, BlockDiagonal(3)), "2": (BlockDiagonal(3), Structure.DENSE)}},
    ),
    "attention": Case(transformer, lambda seed: ((random(seed, 3, 5, 8),), {}), {"loss_terms": LossTerms.POSITIONS}),
    "cross attention": Case(Attentive, lambda seed: ((random(seed, 1, 5, 8), random(seed + 99, 1, 4, 8)), {})),
    "functions of parameters": Case(
        Tied,
        lambda seed: ((torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(seed)),), {}),
        {"loss_terms": LossTerms.POSITIONS},
    ),
    "keywords and reuse": Case(
        Branch, lambda seed: ((random(seed, 6, 4),), {"shift": random(seed + 1000, 6, 4)}), {"kl_clip": None}
    ),
}


# Dynamo asks tensors inside a graph for their `.grad`, and hides the warning from users but not from pytest.
reads_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


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


# Each case in half of the orders in turn, and in each of these on one backend, in turn as well.
COMBINATIONS = {
    f"{name}-{order.__name__}-{backend}": (case, order, backend)
    for row, (name, case) in enumerate(CASES.items())
    for column, order in enumerate(ORDERS)
    for backend in [BACKENDS[(row + column) // 2 % 2]]
    if (row + column) % 2 == 0
}


@pytest.mark.parametrize(("case", "order", "backend"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_a_compiled_model_takes_the_steps_of_the_eager_one_in_two_graphs(case: Case, order: Any, backend: str) -> None:
    model, twin = build(case)
    options = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 4, **case.options}
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
def test_inductor_gives_the_steps_of_the_eager_model_also_where_a_second_backward_adds_to_the_first() -> None:
    """Its kernels round differently; nothing else may."""
    case = Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), images)
    model, twin = build(case)
    optimizers = [KFACOptimizer(each, lr=0.1, factor_update_period=1) for each in (model, twin)]
    with torch._functorch.config.patch(donated_buffer=False):  # as torch says where a graph is retained later
        for call, each, optimizer in zip(
            (torch.compile(model, fullgraph=True), twin), (model, twin), optimizers, strict=True
        ):
            train(call, optimizer, case, range(2))
            optimizer.zero_grad()
            two_backwards(Loop(call, each, optimizer))
            optimizer.step()
    torch.testing.assert_close(*map(all_factors, optimizers), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()), rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Loop:
    call: Callable[..., Any]
    model: nn.Module
    optimizer: KFACOptimizer


def accumulate(loop: Loop) -> None:
    for seed, size in ((0, 5), (1, 3), (2, 2)):
        (loop.call(random(seed, size, 4)).square().sum() / 10).backward()


def two_backwards(loop: Loop) -> None:
    output = loop.call(random(0, 8, 4))
    output[:, 0].square().mean().backward(retain_graph=True)
    output[:, 1:].cos().mean().backward()


def attack_first(loop: Loop) -> None:
    x = random(0, 8, 4).requires_grad_()
    (slope,) = torch.autograd.grad(loop.call(x).square().mean(), x)
    loop.call((x + 0.1 * slope.sign()).detach()).square().mean().backward()


def evaluate_between(loop: Loop) -> None:
    output = loop.call(random(0, 8, 4))
    loop.model.eval()
    with torch.no_grad():
        loop.call(random(1, 8, 4))
    loop.model.train()
    loop.call(random(2, 8, 4))  # a graph that no backward comes to
    output.square().mean().backward()


def discard_a_backward(loop: Loop) -> None:
    loop.call(random(1, 8, 4)).square().mean().backward()
    loop.optimizer.zero_grad()
    loop.call(random(0, 8, 4)).square().mean().backward()


def discard_by_the_model(loop: Loop) -> None:
    loop.call(random(1, 8, 4)).square().mean().backward()
    loop.model.zero_grad()
    loop.call(random(0, 8, 4)).square().mean().backward()


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_layers_that_come_after_the_graph_are_measured_in_it(is_exchanged: bool) -> None:
    """One of the same shape in the place of another; or one that was frozen from the beginning."""
    model, twin = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizers = []
    for each in (model, twin):
        each[2].requires_grad_(is_exchanged)
        optimizers.append(KFACOptimizer(each, lr=0.1, momentum=0.9, factor_update_period=1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(6):
        for each, call, optimizer in zip((model, twin), (compiled, twin), optimizers, strict=True):
            if step == 3 and is_exchanged:
                torch.manual_seed(3)
                each[2] = nn.Linear(4, 4).double()
                optimizer.param_groups[0]["params"][-2:] = list(each[2].parameters())
            elif step == 3:
                each[2].requires_grad_(True)
            optimizer.zero_grad()
            mean_square(call(random(step, 8, 4))).backward()
            optimizer.step()
    assert_identical(all_factors(optimizers[0]), all_factors(optimizers[1]))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert optimizers[0].metrics()["measured_parameters"] == 1.0


HABITS = [accumulate, two_backwards, attack_first, evaluate_between, discard_a_backward, discard_by_the_model]


@pytest.mark.parametrize("habit", HABITS)
def test_the_habits_of_a_loop_give_compiled_what_they_give_eager(habit: Callable[[Loop], None]) -> None:
    model, twin = build(CASES["linear"])
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    call = torch.compile(model, backend=BACKEND, fullgraph=True)
    for forward, of, each in ((call, model, optimizer), (twin, twin, reference)):
        for _ in range(2):
            each.zero_grad()
            habit(Loop(forward, of, each))
            each.step()
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0.0


def test_batches_of_other_sizes_are_counted_by_their_size() -> None:
    model, twin = build(CASES["linear"])
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    call = torch.compile(model, backend=BACKEND, fullgraph=True, dynamic=True)
    for forward, each in ((call, optimizer), (twin, reference)):
        for seed, size in enumerate((8, 5, 3, 11)):
            each.zero_grad()
            forward(random(seed, size, 4)).square().mean().backward()
            each.step()
    assert_identical(all_factors(optimizer), all_factors(reference))


def test_under_autocast_and_a_grad_scaler_factors_are_those_of_the_eager_model() -> None:
    model, twin = (each.float() for each in build(CASES["linear"]))
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    call = torch.compile(model, backend=BACKEND, fullgraph=True)
    for forward, each in ((call, optimizer), (twin, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for seed in range(3):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = forward(random(seed, 8, 4).float())
            scaler.scale(output.float().square().mean()).backward()
            scaler.step(each)
            scaler.update()
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert {factor.dtype for pair in all_factors(optimizer).values() for factor in pair} == {torch.float32}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=self.reentrant))


def test_activation_checkpointing_in_a_graph_counts_once() -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False).double()
    twin = copy.deepcopy(model)
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    case = CASES["linear"]
    train(torch.compile(model, backend=BACKEND), optimizer, case, range(3))
    train(twin, reference, case, range(3))
    assert_identical(all_factors(optimizer), all_factors(reference))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 3)
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.after = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.lstm(torch.tanh(self.before(x)))[0])


@pytest.mark.parametrize("backend", BACKENDS)
@reads_grad
def test_a_model_that_breaks_the_graph_is_measured_in_all_its_pieces(backend: str) -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.1, "factor_update_period": 1, "loss_terms": LossTerms.POSITIONS}
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    case = Case(Recurrent, lambda seed: ((random(seed, 3, 5, 4),), {}))
    train(torch.compile(model, backend=backend), optimizer, case, range(3))
    train(twin, reference, case, range(3))
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


@pytest.mark.parametrize("backend", BACKENDS)
@reads_grad
def test_blocks_compiled_one_by_one_are_measured(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual(), nn.Linear(4, 3)).double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.1, "factor_update_period": 2}
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for residual in model[:2]:
        residual.compile(backend=counter, fullgraph=True)
    train(model, optimizer, CASES["linear"], range(4))
    train(twin, reference, CASES["linear"], range(4))
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert counter.frame_count == 4, "two for each block"


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OwnMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.matrix))


class Reversed(nn.Module):
    """Its layers stand in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(nn.Module):
    """A frozen layer, and a trained product of two thin ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.thin, self.back = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.back(self.thin(x)))


@pytest.mark.parametrize(
    ("block", "skipped"),
    [
        (TwoLinear, []),
        (Reversed, []),
        (Residual, []),
        (OwnMatrix, []),
        (Adapted, []),
        (TwoLinear, ["1.up"]),
        (TwoLinear, ["3"]),
    ],
)
@reads_grad
def test_equal_blocks_compiled_one_by_one_are_told_apart(block: type[nn.Module], skipped: list[str]) -> None:
    """Also where some are left to SGD; the graph of one multiplies by no weight of another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(block() for _ in range(3)), nn.Linear(4, 3)).double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.1, "factor_update_period": 2, "skip_layers": skipped}
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    for each in model[1:4]:
        each.compile(backend=counter, fullgraph=True)
    train(model, optimizer, CASES["linear"], range(4))
    train(twin, reference, CASES["linear"], range(4))
    assert_identical(all_factors(optimizer), all_factors(reference))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert counter.frame_count <= 2 * 3, "two for each block"


FORMS: list[Callable[[nn.Parameter], Tensor]] = [
    lambda weight: weight.T,
    lambda weight: weight.t(),
    lambda weight: torch.transpose(input=weight, dim0=-1, dim1=0),
    lambda weight: weight.permute(1, 0),
    lambda weight: torch.swapaxes(weight, 0, 1),
    lambda weight: weight.to(torch.float64).adjoint(),
    lambda weight: weight.t().to(torch.float64),
    lambda weight: weight.double().contiguous(),
]


class InManyForms(nn.Module):
    """Multiplies by what a function makes of each matrix, and by a view of a parameter that is none."""

    def __init__(self, forms: list[Callable[[nn.Parameter], Tensor]], size: int) -> None:
        super().__init__()
        self.forms = forms
        self.matrices = nn.ParameterList(torch.randn(size, size) for _ in forms)
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        for form, matrix in zip(self.forms, self.matrices, strict=True):
            x = torch.tanh(x @ form(matrix))
        return x * self.scale.view(1, -1)


def test_products_with_what_functions_make_of_a_parameter_have_the_factors_of_the_eager_model() -> None:
    case = Case(lambda: InManyForms(FORMS, 4), lambda seed: ((random(seed, 8, 4),), {}))
    model, twin = build(case)
    options: dict[str, Any] = {"lr": 0.1, "factor_update_period": 2}
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    train(torch.compile(model, backend=BACKEND, fullgraph=True), optimizer, case, range(3))
    train(twin, reference, case, range(3))
    assert len(all_factors(reference)) == len(FORMS)
    assert_identical(all_factors(optimizer), all_factors(reference))


def test_a_detached_parameter_of_one_element_is_not_taken_for_its_transpose_in_a_graph() -> None:
    case = Case(lambda: InManyForms([nn.Parameter.t, nn.Parameter.detach], 1), lambda seed: ((random(seed, 8, 1),), {}))
    model, twin = build(case)
    optimizers = [KFACOptimizer(each, lr=0.1) for each in (model, twin)]
    train(torch.compile(model, backend=BACKEND, fullgraph=True), optimizers[0], case, range(1))
    train(twin, optimizers[1], case, range(1))
    assert [p.grad for p in model.parameters()] == [p.grad for p in twin.parameters()]


class Borrowed(nn.Module):
    """The kernel of one convolution is used by a function as well: half of its uses are out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.conv1d(torch.tanh(self.conv(x)), self.conv.weight, padding=1)
        return self.head(hidden.mean(-1))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return output


@pytest.mark.parametrize("evaluates", ["the bare model", "the compiled model"])
def test_an_evaluation_in_each_epoch_makes_no_further_graphs(evaluates: str) -> None:
    torch.manual_seed(0)
    model = Attends()
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(model, backend=counter)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=2)
    inputs, graphs = torch.randn(2, 4, 4), []
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            compiled(inputs).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            (model if evaluates == "the bare model" else compiled)(inputs)
        graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_is_also_used_out_of_sight_is_left_to_sgd_as_in_eager_mode(backend: str) -> None:
    torch.manual_seed(0)
    model = Borrowed().double()
    twin = copy.deepcopy(model)
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        KFACOptimizer(twin, lr=0.1, factor_update_period=1),
    )
    case = Case(Borrowed, lambda seed: ((random(seed, 6, 2, 5),), {}))
    for call, each in ((torch.compile(model, backend=backend, fullgraph=True), optimizer), (twin, reference)):
        with pytest.warns(UserWarning, match=r"'conv\.weight' is used by conv1d in a way that is not measured"):
            train(call, each, case, range(1))
        train(call, each, case, range(1, 3))
        assert list(each.factors()) == ["head"]
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


class HalfFrozen(nn.Module):
    """Multiplies by two matrices, of which one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.trained) @ self.frozen


def test_a_frozen_matrix_in_a_graph_is_not_measured() -> None:
    torch.manual_seed(0)
    model = HalfFrozen().double()
    twin = copy.deepcopy(model)
    optimizers = [KFACOptimizer(each, lr=0.1, factor_update_period=1) for each in (model, twin)]
    case = Case(HalfFrozen, lambda seed: ((random(seed, 6, 4),), {}))
    for call, each in zip((torch.compile(model, backend="aot_eager", fullgraph=True), twin), optimizers, strict=True):
        train(call, each, case, range(2))
    assert_identical(*(each.factors() for each in optimizers))


def recording(graphs: list[list[Any]]) -> Callable[..., Any]:
    """A backend that notes what each graph calls."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    return backend


def test_hooks_taken_off_leave_the_graph_of_the_bare_model() -> None:
    case = CASES["linear"]
    model, _ = build(case)
    optimizer = KFACOptimizer(model, lr=0.1)
    optimizer.remove_hooks()
    graphs: list[list[Any]] = []
    torch.compile(model, backend=recording(graphs), fullgraph=True)(random(0, 8, 4))
    assert len(graphs) == 1
    assert not any("kfac_optim" in str(function) for function in graphs[0])


def test_graphs_of_steps_without_statistics_are_those_of_the_bare_model() -> None:
    case = CASES["linear"]
    model, twin = build(case)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=2)
    graphs: list[list[Any]] = []
    train(torch.compile(model, backend=recording(graphs), fullgraph=True), optimizer, case, range(2))
    torch._dynamo.reset()
    torch.compile(twin, backend=recording(graphs), fullgraph=True)(random(0, 8, 4))
    with_statistics, without, bare = graphs
    assert any("kfac_optim" in str(function) for function in with_statistics)
    assert without == bare


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_is_found_as_its_compiled_forward_begins_is_measured_from_the_first_step() -> None:
    case, trained = CASES["linear"], []
    for given in (True, False):
        model, _ = build(case)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = KFACOptimizer(model if given else model.parameters(), lr=0.1)
        train(compiled, optimizer, case, range(2))
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
        trained.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *trained))


class Switch(nn.Module):
    """Runs one of two layers, by `torch.cond` or by a condition in Python."""

    def __init__(self, *, by_torch: bool) -> None:
        super().__init__()
        self.by_torch = by_torch
        self.up, self.down, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        above = x.sum() > 0
        branches = lambda x: self.up(x).tanh(), lambda x: self.down(x).sin()
        return self.head(torch.cond(above, *branches, (x,)) if self.by_torch else branches[not above](x))


@pytest.mark.filterwarnings("ignore:kfac_optim. 1 layer has gradients but no statistics")
@pytest.mark.parametrize("backend", [BACKEND, None])
def test_layers_in_branches_of_a_graph_take_the_sgd_step(backend: str | None) -> None:
    """Also where the model is not compiled, as `torch.cond` compiles itself."""
    models = [Switch(by_torch=by_torch).double() for by_torch in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    options: dict[str, Any] = {"lr": 0.1, "factor_update_period": 2}
    optimizer = KFACOptimizer(models[0], **options)
    reference = KFACOptimizer(models[1], skip_layers=["up", "down"], **options)
    call = torch.compile(models[0], backend=backend) if backend else models[0]
    for seed in range(5):
        for forward, each in ((call, optimizer), (models[1], reference)):
            each.zero_grad(set_to_none=False)  # the branch that is not taken has gradients of zero
            mean_square(forward(random(seed, 8, 4))).backward()
            each.step()
    torch.testing.assert_close(optimizer.factors()["head"], reference.factors()["head"])
    torch.testing.assert_close(clones(models[0].parameters()), clones(models[1].parameters()))


def test_a_layer_that_an_eager_step_has_measured_and_graphs_hide_is_named() -> None:
    model, _ = build(Case(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))), images))
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=2)
    forward = torch.compile(model, backend=BACKEND)

    def step(seed: int) -> None:
        optimizer.zero_grad()
        mean_square((model if seed == 0 else forward)(random(seed, 8, 4))).backward()
        optimizer.step()

    for seed in range(5):
        step(seed)
    with pytest.warns(UserWarning, match="compiled after its first step"):
        step(5)


def by_func(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(torch.vmap(torch.func.grad(lambda point: model(point).sum()))(x))


def by_grad(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    return mean_square([output, *torch.autograd.grad(output.sum(), x, create_graph=True)])


def by_branch(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: model(x).sin(), lambda x: model(x).cos(), (x,)).square().sum()


@pytest.mark.parametrize(
    ("loss_of", "backend", "words"),
    [
        (by_func, BACKEND, "no statistics"),
        (by_grad, "eager", "only a part was captured"),
        (by_branch, BACKEND, "no statistics"),
    ],
)
def test_a_model_in_a_derivative_or_branch_of_a_graph_takes_the_sgd_step(
    loss_of: Any, backend: str, words: str
) -> None:
    model, twin = build(Case(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), images))
    terms = LossTerms.SUM if loss_of is by_branch else LossTerms.EXAMPLES
    optimizers = (
        KFACOptimizer(model, lr=0.1, factor_update_period=2, loss_terms=terms),
        torch.optim.SGD(twin.parameters(), lr=0.1),
    )
    compiled = torch.compile(lambda x: loss_of(model, x), backend=backend)

    def steps() -> None:
        for seed in range(3):
            for loss, optimizer in zip((compiled, partial(loss_of, twin)), optimizers, strict=True):
                optimizer.zero_grad()
                loss(random(seed, 8, 4)).backward()
                optimizer.step()

    with pytest.warns(UserWarning, match=words):
        steps()
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()))


@pytest.mark.parametrize("whole", [True, False])
def test_a_changed_period_holds_from_the_next_forward_on(whole: bool) -> None:
    """It does not come too late for graphs: zero_grad() shows it, or a forward that begins outside of all graphs."""
    model, _ = build(CASES["linear"])
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=5)
    call: Any = torch.compile(model, backend=BACKEND) if whole else model
    if not whole:
        model[0].compile(backend=BACKEND)
    ages = []
    for step in range(5):
        if step == 2:
            optimizer.param_groups[0]["factor_update_period"] = 2
        (optimizer if whole else model).zero_grad()
        mean_square(call(random(step, 8, 4))).backward()
        optimizer.step()
        ages.append(optimizer.metrics()["factor_age"])
    assert ages == [0, 1, 0, 1, 0]


def test_graphs_are_compiled_whatever_memory_their_backward_may_take() -> None:
    model, twin = build(Case(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), images))
    optimizer, reference = (KFACOptimizer(each, lr=0.1, factor_update_period=2) for each in (model, twin))
    call = torch.compile(model, backend=BACKEND)
    for forward, each in ((call, optimizer), (twin, reference)):
        for seed in range(4):
            each.zero_grad()
            with torch._functorch.config.patch(activation_memory_budget=0.0):
                loss = mean_square([forward(random(seed + more, 8, 4)) for more in (0, 9)])
                assert torch._functorch.config.activation_memory_budget == 0.0, "the setting was put back"
            loss.backward()
            each.step()
    assert_identical(all_factors(optimizer), all_factors(reference))


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_that_a_scaler_leaves_out_are_counted_and_leave_stated_terms_alone(compiled: bool) -> None:
    model = build(CASES["linear"])[0].float()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=4)
    call = torch.compile(model, backend=BACKEND) if compiled else model
    scaler, stated = torch.amp.GradScaler("cpu", init_scale=2.0), []
    for step in range(7):
        optimizer.set_loss_terms(5)
        optimizer.zero_grad()
        loss = mean_square(call(random(step, 8, 4).float()))
        scaler.scale(loss * torch.inf if step in (1, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        stated.append(optimizer._record.count.averaged)  # type: ignore[union-attr]
    assert optimizer.metrics()["skipped_steps"] == 2
    assert stated == [5] * 7
