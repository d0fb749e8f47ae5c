"""Losses that an estimate names, of models under `torch.compile`: passes through the backward of the compiled graph."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from helpers.oracles import assert_same
from helpers.plain import assert_identical, assert_same_factors, batch, clones, mlp
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.utils.checkpoint import checkpoint

from kfac_optim import (
    CurvaturePropagation,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    MonteCarlo,
    QuadraticModel,
    SampleSpace,
)

BACKEND = "aot_eager"  # traces and partitions as inductor does, and computes with eager kernels

Call = Callable[..., Any]
Loop = Callable[[Call, nn.Module, int], None]
Ways = Callable[[nn.Module], Call]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert torch._functorch.config.donated_buffer, "the compiler's setting was put back"


# -- models, and ways to compile them ------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Returns means and variances."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.mean(hidden), F.softplus(self.spread(hidden))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Broken(nn.Module):
    """Two graphs, and something between them that is in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(hidden)


def one_number() -> nn.Module:
    return nn.Sequential(*mlp(sizes=(4, 5, 1)), nn.Flatten(0))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten(), nn.Linear(27, 3))


def whole(model: nn.Module) -> Call:
    return torch.compile(model, backend=BACKEND)


def by_size(model: nn.Module) -> Call:
    return torch.compile(model, backend=BACKEND, dynamic=True)


def functions(model: nn.Module) -> Call:
    """The backend that makes no graph of the backward."""
    return torch.compile(model, backend="eager")


def within_a_function(model: nn.Module) -> Call:
    return torch.compile(lambda *args: model(*args), backend=BACKEND)


def in_place(model: nn.Module) -> Call:
    model.compile(backend=BACKEND)
    return model


def by_parts(model: nn.Module) -> Call:
    for part in model.children():
        part.compile(backend=BACKEND)
    return model


def in_part(model: nn.Module) -> Call:
    next(model.children()).compile(backend=BACKEND)
    return model


# -- training loops ------------------------------------------------------------------------------------------------


def classes(step: int, size: int = 8) -> Tensor:
    return torch.randint(3, (size,), generator=torch.Generator().manual_seed(step))


def plain(call: Call, criterion: nn.Module, step: int) -> None:
    criterion(call(batch(step)), classes(step)).backward()


def other_sizes(call: Call, criterion: nn.Module, step: int) -> None:
    size = (8, 5, 3, 11)[step]
    criterion(call(batch(step, size)), classes(step, size)).backward()


def after_an_attack(call: Call, criterion: nn.Module, step: int) -> None:
    """The first backward through the graph is none that counts, and does not keep it."""
    x = batch(step).requires_grad_()
    (slope,) = torch.autograd.grad(criterion(call(x), classes(step)), x)
    criterion(call((x + 0.1 * slope.sign()).detach()), classes(step)).backward()


def of_the_last_layer(call: Call, criterion: nn.Module, step: int) -> None:
    """The graph computes gradients of all layers, of which the loop asks for one layer's."""
    *_, last = call.children()
    criterion(call(batch(step)), classes(step)).backward(inputs=list(last.parameters()))


def accumulated(call: Call, criterion: nn.Module, step: int) -> None:
    for part in range(3):
        (criterion(call(batch(10 * step + part)), classes(step + part)) / 3).backward()


def in_two_backwards(call: Call, criterion: nn.Module, step: int) -> None:
    output = call(batch(step))
    criterion(output[:4], classes(step, 4)).backward(retain_graph=True)
    criterion(output[4:], classes(step, 4)).backward()


def beside_what_does_not_count(call: Call, criterion: nn.Module, step: int) -> None:
    output = call(batch(step))
    with torch.no_grad():
        criterion(call(batch(step + 9)), classes(step))
    criterion(call(batch(step + 19)), classes(step))
    criterion(output, classes(step)).backward()


def behind_a_head(call: Call, criterion: nn.Module, step: int) -> None:
    (7 * criterion(2 * torch.tanh(call(batch(step))), classes(step))).backward()


def by_another_function(call: Call, _: nn.Module, step: int) -> None:
    F.cross_entropy(call(batch(step)), classes(step)).backward()


def attacked_by_another_function(call: Call, _: nn.Module, step: int) -> None:
    after_an_attack(call, F.cross_entropy, step)  # type: ignore[arg-type]


def of_two_outputs(call: Call, criterion: nn.Module, step: int) -> None:
    mean, variance = call(batch(step))
    criterion(mean, batch(step + 3, dim=2), variance).backward()


def of_one_of_two_outputs(call: Call, criterion: nn.Module, step: int) -> None:
    criterion(call(batch(step))[0], batch(step + 3, dim=2)).backward()


def of_numbers(call: Call, criterion: nn.Module, step: int) -> None:
    criterion(call(batch(step)), batch(step + 3, dim=1)[:, 0]).backward()


def regression(call: Call, criterion: nn.Module, step: int) -> None:
    criterion(call(batch(step)), batch(step + 3, dim=3)).backward()


def train(
    model: nn.Module, call: Call, criterion: nn.Module, estimate: Any, loop: Loop, steps: int = 4, **options: Any
) -> tuple[KFACOptimizer, list[list[Tensor]]]:
    """Every other step has statistics; gives the gradients of each step as well."""
    settings: dict[str, Any] = {"lr": 0.1, "factor_update_period": 2, "inverse_update_period": 2}
    optimizer = KFACOptimizer(model, **settings | options, estimate=estimate(criterion))
    gradients = []
    torch.manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        loop(call, criterion, step)
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return optimizer, gradients


Case = tuple[Callable[[], nn.Module], Ways, Callable[[], nn.Module], Any, Loop, dict[str, Any]]

CASES: dict[str, Case] = {
    "a model": (mlp, whole, nn.CrossEntropyLoss, CurvaturePropagation, plain, {}),
    "a function": (mlp, within_a_function, nn.CrossEntropyLoss, MonteCarlo, plain, {}),
    "in place": (mlp, in_place, nn.CrossEntropyLoss, ExactGGN, plain, {}),
    "no graph of the backward": (mlp, functions, nn.CrossEntropyLoss, ExactGGN, plain, {}),
    "by parts": (mlp, by_parts, nn.CrossEntropyLoss, ExactGGN, plain, {}),
    "in part": (mlp, in_part, nn.CrossEntropyLoss, MonteCarlo, plain, {}),
    "by parts, no criterion": (mlp, by_parts, nn.CrossEntropyLoss, ExactGGN, by_another_function, {}),
    "by parts, attacked": (mlp, by_parts, nn.CrossEntropyLoss, MonteCarlo, attacked_by_another_function, {}),
    "graphs in a row": (Broken, whole, nn.CrossEntropyLoss, ExactGGN, plain, {}),
    "other sizes": (mlp, by_size, nn.CrossEntropyLoss, ExactGGN, other_sizes, {"factor_update_period": 1}),
    "one layer asked for": (mlp, in_place, nn.CrossEntropyLoss, ExactGGN, of_the_last_layer, {}),
    "attacked": (mlp, whole, nn.CrossEntropyLoss, MonteCarlo, after_an_attack, {}),
    "attacked, other sizes": (mlp, by_size, nn.CrossEntropyLoss, MonteCarlo, after_an_attack, {}),
    "accumulated": (mlp, whole, nn.CrossEntropyLoss, MonteCarlo, accumulated, {}),
    "two backwards": (mlp, whole, nn.CrossEntropyLoss, ExactGGN, in_two_backwards, {}),
    "evaluations": (mlp, whole, nn.CrossEntropyLoss, MonteCarlo, beside_what_does_not_count, {}),
    "a head": (mlp, whole, nn.CrossEntropyLoss, MonteCarlo, behind_a_head, {}),
    "checkpointed": (Checkpointed, whole, nn.CrossEntropyLoss, ExactGGN, plain, {}),
    "two outputs": (TwoHeads, whole, nn.GaussianNLLLoss, ExactGGN, of_two_outputs, {}),
    "one of two outputs": (TwoHeads, whole, nn.MSELoss, ExactGGN, of_one_of_two_outputs, {}),
    "numbers": (one_number, whole, nn.MSELoss, ExactGGN, of_numbers, {}),
    "a sum": (mlp, within_a_function, lambda: nn.MSELoss(reduction="sum"), MonteCarlo, regression, {}),
    "convolutions": (convolutions, whole, nn.CrossEntropyLoss, MonteCarlo, plain, {}),
    "sample space": (one_number, whole, nn.MSELoss, ExactGGN, of_numbers, {"inverse": SampleSpace()}),
}


# Dynamo asks tensors inside a graph for their `.grad`, and hides the warning from users but not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_statistics_and_steps_are_those_of_the_eager_model(case: Case) -> None:
    build, compile_it, criterion, estimate, loop, options = case
    torch.manual_seed(0)
    twin = build().double()
    model = copy.deepcopy(twin)
    expected, gradients = train(twin, twin, criterion(), estimate, loop, **options)
    found, ours = train(model, compile_it(model), criterion(), estimate, loop, **options)
    assert_same_factors(found.factors(), expected.factors())
    assert_identical(ours[0], gradients[0])
    assert_same(torch.cat([p.flatten() for p in clones(model.parameters())]), _flat(twin), rtol=1e-11)
    for count in ("unpreconditioned_blocks", "dropped_calls"):
        assert found.metrics()[count] == expected.metrics()[count], count


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, at its first jvp
def test_the_exact_matrix_of_one_example_is_the_dense_one() -> None:
    model, criterion = mlp(), nn.CrossEntropyLoss()
    x, target = batch(size=1), torch.tensor([1])
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion))
    criterion(torch.compile(model, backend=BACKEND, fullgraph=True)(x), target).backward()
    optimizer.step()
    params = {name: param.detach() for name, param in model.named_parameters()}
    jacobians = jacrev(lambda values: functional_call(model, values, (x,))[0])(params)
    curvature = hessian(lambda logits: F.cross_entropy(logits, target))(model(x).detach())[0, :, 0]
    for name, (a, g) in optimizer.factors().items():
        assert a is not None
        assert g is not None
        weight, bias = jacobians[f"{name}.weight"], jacobians[f"{name}.bias"]
        rows = torch.cat([weight, bias.unsqueeze(-1)], -1).flatten(1)
        assert_same(torch.kron(g[0], a[0]), rows.mT @ curvature @ rows, rtol=1e-9)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    # The loop's own, one for the one column, one for where it comes to; and once to see that rows are examples.
    [(MonteCarlo, [2, 1, 2, 1, 2]), (ExactGGN, [4, 1, 3, 1, 3])],
)
def test_there_are_two_graphs_and_passes_on_statistics_steps_alone(estimate: Any, expected: list[int]) -> None:
    passes: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def of_backward(backward: torch.fx.GraphModule, _: Any) -> Any:
            def run(args: Any) -> Any:
                passes[-1] += 1
                return backward(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        forward: Any = lambda module, _: make_boxed_func(module)  # noqa: E731
        return aot_module_simplified(graph, inputs, fw_compiler=forward, bw_compiler=of_backward)

    def loop(call: Call, criterion: nn.Module, step: int) -> None:
        passes.append(0)
        of_numbers(call, criterion, step)

    counter = torch._dynamo.testing.CompileCounterWithBackend(counting)
    model = one_number().double()
    train(model, torch.compile(model, backend=counter, fullgraph=True), nn.MSELoss(), estimate, loop, 5)
    assert passes == expected
    assert counter.frame_count == 2, "one graph with statistics, one without"


QUADRATIC: dict[str, Any] = {"step_size": QuadraticModel()}
MARQUARDT: dict[str, Any] = {"adapt_damping": LevenbergMarquardt(interval=1)}


def judged_steps(model: nn.Module, call: Call, options: dict[str, Any], function: Call | None = None) -> None:
    """Take four steps, for which the curvature along the step is asked of the model."""
    criterion = nn.CrossEntropyLoss()
    loss_of = function or criterion
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion), **options)
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_of(call(batch(step)), classes(step))
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("options", [QUADRATIC, MARQUARDT], ids=["quadratic", "marquardt"])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_forward_that_is_run_again_leaves_all_models_compiled(options: dict[str, Any], is_in_place: bool) -> None:
    runs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        run = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        return lambda *args: (runs.append(0), run(*args))[1]  # type: ignore[func-returns-value]

    model, twin = mlp(), mlp()
    call: Any = torch.compile(model, backend=counting)
    if is_in_place:
        model.compile(backend=counting)
        call = model
    judged_steps(call, call, options)
    assert len(runs) == (4 if options is QUADRATIC else 8), "one graph for each forward of a closure"
    judged_steps(twin, twin, options)
    assert_same(_flat(model), _flat(twin), rtol=1e-9)
    runs.clear()
    torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(), backend=counting)(batch())
    assert len(runs) == 1, "another model is one graph as well"


@pytest.mark.parametrize(
    ("compile_it", "options", "function"),
    [
        (whole, QUADRATIC, None),
        (whole, MARQUARDT, None),
        (within_a_function, QUADRATIC, F.cross_entropy),
    ],
)
def test_a_model_whose_call_is_in_a_graph_cannot_be_run_again_which_says_how_to_compile_it(
    compile_it: Ways, options: dict[str, Any], function: Call | None
) -> None:
    model = mlp()
    before = clones(model.parameters())
    with pytest.raises(RuntimeError, match=r"what torch.compile\(model\) returns, or compile by model.compile\(\)"):
        judged_steps(model, compile_it(model), options, function)
    assert_identical(clones(model.parameters()), before)


def test_passes_leave_gradients_and_their_hooks_alone() -> None:
    model, criterion = mlp(), nn.CrossEntropyLoss()
    called: list[str] = []
    for name, param in model.named_parameters():
        param.register_hook(lambda _, name=name: called.append(name))
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion))
    plain(torch.compile(model, backend=BACKEND), criterion, 0)
    assert sorted(called) == sorted(2 * [name for name, _ in model.named_parameters()])
    optimizer.step()
    assert list(optimizer.factors()) == ["0", "2"]


class Borrowed(torch.autograd.Function):
    """Twice a product with the weight, of which half has a gradient that nobody sees."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.mT @ hidden


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Borrowed.apply(torch.tanh(self.first(x)), self.first.weight))  # type: ignore[no-untyped-call]


def test_a_gradient_of_which_a_part_was_captured_is_found() -> None:
    torch.manual_seed(0)
    model = Borrowing().double()
    with pytest.warns(UserWarning, match=r"only a part was captured.*'first'"):
        optimizer, _ = train(model, whole(model), nn.CrossEntropyLoss(), MonteCarlo, plain, 3)
    assert list(optimizer.factors()) == ["last"]


def test_a_criterion_within_a_graph_is_not_seen_which_a_warning_says() -> None:
    model, criterion = mlp(), nn.CrossEntropyLoss()
    loss = torch.compile(lambda x, target: criterion(model(x), target), backend=BACKEND)
    optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(criterion))
    loss(batch(), classes(0)).backward()
    with pytest.warns(UserWarning, match=r"no statistics.*'0', '2'.*call the criterion .* outside of what is compiled"):
        optimizer.step()


def test_a_forward_that_no_criterion_reads_is_warned_of() -> None:
    model = mlp()

    def loop(call: Call, criterion: nn.Module, step: int) -> None:
        (criterion(call(batch(step)), classes(step)) + call(batch(step + 5)).square().mean()).backward()

    with pytest.warns(UserWarning, match="on some outputs of the model.*left out where the model is compiled"):
        train(model, within_a_function(model), nn.CrossEntropyLoss(), MonteCarlo, loop, 1)


def test_a_second_backward_after_zero_grad_is_of_the_same_statistics() -> None:
    factors = []
    for again in (False, True):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=MonteCarlo(criterion))
        loss = criterion(whole(model)(batch()), classes(0))
        loss.backward(retain_graph=True)
        if again:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        factors.append(optimizer.factors())
    assert_same_factors(*factors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("estimate", "loop"), [(MonteCarlo, plain), (ExactGGN, in_two_backwards)])
def test_inductor_gives_the_statistics_of_the_eager_model(estimate: Any, loop: Loop) -> None:
    """Layers have one width, so that gradients are written over one another."""
    model = mlp(sizes=(4, 8, 8, 8, 8, 3))
    twin = copy.deepcopy(model)
    found, _ = train(model, torch.compile(model, fullgraph=True), nn.CrossEntropyLoss(), estimate, loop, 1)
    expected, _ = train(twin, twin, nn.CrossEntropyLoss(), estimate, loop, 1)
    assert_same_factors(found.factors(), expected.factors(), rtol=1e-11)
