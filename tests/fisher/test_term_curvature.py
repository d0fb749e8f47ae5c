"""The curvature of what criteria read, along directions; covers fisher/term_curvature.py, and outputs in graphs."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from helpers.saved import SavedTensors
from torch import Tensor, nn
from torch.autograd.functional import hvp
from torch.func import functional_call, hessian, jvp, vmap

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, LevenbergMarquardt, QuadraticModel

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, at the first jvp of a process
]

Call = Callable[[Tensor], Tensor]
Read = tuple[tuple[Tensor, ...], Tensor, float]
"""What a criterion reads of the model, its target, and what the loss multiplies it by."""


def network(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def inputs(n: int = 6) -> Tensor:
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(n))


def targets(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))


def of_boundary(call: Call) -> Read:
    return (call(inputs(4)),), targets(4, 1), 10.0


def nested(call: Call) -> Iterator[Read]:
    x = inputs().requires_grad_()
    u = call(x)
    slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    yield (second[0] + second[1] + 2 * u.squeeze(1),), targets(6), 1.0
    yield of_boundary(call)


def by_function(call: Call) -> Iterator[Read]:
    def residual(x: Tensor) -> Tensor:
        return hessian(lambda z: call(z).squeeze())(x).trace() + 2 * call(x).squeeze()

    yield (vmap(residual)(inputs()),), targets(6), 1.0
    yield of_boundary(call)


def read_twice(call: Call) -> Iterator[Read]:
    output = call(inputs())
    yield (output,), targets(6, 3), 3.0
    yield (output,), targets(6, 3) - 1, 0.5


def weighed(call: Call) -> Iterator[Read]:
    yield (call(inputs()),), targets(6, 3), 3.0
    yield (call(inputs(4)),), targets(4, 3), 0.5


def head_outside(call: Call) -> Iterator[Read]:
    yield ((call(inputs()) @ torch.ones(3, 2)).sin(),), targets(6, 2), 1.0


def tokens(call: Call) -> Iterator[Read]:
    classes = torch.tensor([0, 1, -100, 2, -100, 1])
    yield (call(inputs().view(2, 3, 2)).flatten(0, 1),), classes, 1.0


def tokens_by_head(call: Call) -> Iterator[Read]:
    ((logits,), classes, _) = next(tokens(call))
    yield (logits * 2,), classes, 1.0


def some_classes(call: Call) -> Iterator[Read]:
    yield (call(inputs())[:, :2],), torch.arange(6) % 2, 1.0


def classes_in_two_sets(call: Call) -> Iterator[Read]:
    yield (call(inputs()).view(12, 2),), torch.arange(12) % 2, 1.0


def mean_and_variance(call: Call) -> Iterator[Read]:
    output = call(inputs())
    yield (output[:, :1], F.softplus(output[:, 1:2]) + 0.1), targets(6, 1), 2.0


def variance_that_is_given(call: Call) -> Iterator[Read]:
    yield (call(inputs()), targets(6, 3) + 0.1), targets(6, 3), 2.0


def mean_that_is_given(call: Call) -> Iterator[Read]:
    ((mean, variance), target, weight) = next(mean_and_variance(call))
    yield (mean.detach(), variance), target, weight


FREE = torch.zeros(1, dtype=torch.float64, requires_grad=True)


def variance_of_a_parameter_of_nobody(call: Call) -> Iterator[Read]:
    yield (call(inputs()), F.softplus(FREE).expand(6, 1)), targets(6, 1), 2.0


Case = tuple[int, nn.Module, Callable[[Call], Iterator[Read]], Callable[[Call], Iterator[Read]]]
CASES: dict[str, Case] = {
    "nested derivatives": (1, nn.MSELoss(), nested, by_function),
    "torch.func": (1, nn.MSELoss(), by_function, by_function),
    "sum": (1, nn.MSELoss(reduction="sum"), nested, by_function),
    "read twice": (3, nn.MSELoss(), read_twice, read_twice),
    "weighed": (3, nn.MSELoss(), weighed, weighed),
    "head outside": (3, nn.BCEWithLogitsLoss(), head_outside, head_outside),
    "tokens": (3, nn.CrossEntropyLoss(), tokens, tokens),
    "tokens by a head": (3, nn.CrossEntropyLoss(), tokens_by_head, tokens_by_head),
    "some classes": (4, nn.CrossEntropyLoss(), some_classes, some_classes),
    "classes in two sets": (4, nn.CrossEntropyLoss(), classes_in_two_sets, classes_in_two_sets),
    "variance": (3, nn.GaussianNLLLoss(), mean_and_variance, mean_and_variance),
    "variance that is given": (3, nn.GaussianNLLLoss(), variance_that_is_given, variance_that_is_given),
    "mean that is given": (3, nn.GaussianNLLLoss(), mean_that_is_given, mean_that_is_given),
    "variance of nobody's": (1, nn.GaussianNLLLoss(), *[variance_of_a_parameter_of_nobody] * 2),
}


def loss_of(criterion: nn.Module, read: Read) -> Tensor:
    outputs, target, weight = read
    if isinstance(criterion, nn.GaussianNLLLoss):
        return weight * criterion(outputs[0], target, outputs[1])
    return weight * criterion(*outputs, target)


def quadratic(params: Any, criterion: nn.Module, **options: Any) -> KFACOptimizer:
    options = {"lr": 1.0, "momentum": 0.9, "damping": 1e-2, "inverse": Cholesky(), **options}
    class_dim = -1 if isinstance(criterion, nn.CrossEntropyLoss) else None
    estimate = ExactGGN(criterion, class_dim=class_dim)
    return KFACOptimizer(params, estimate=estimate, step_size=QuadraticModel(), **options)


def dense(model: nn.Module, criterion: nn.Module, reads: Callable[[Call], Iterator[Read]], ways: list[Any]) -> Tensor:
    """`vᵢᵀ Jᵀ H J vⱼ` by forward mode and the Hessian of each criterion in what it reads."""
    bare = copy.deepcopy(model)
    names = {param: name for name, param in model.named_parameters()}
    params = {name: param.detach() for name, param in bare.named_parameters()}
    tangents = [{names[param]: part for param, part in way.items()} for way in ways]

    def outputs(params: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
        return [read[0] for read in reads(lambda x: functional_call(bare, params, (x,)))]

    known = list(reads(lambda x: functional_call(bare, params, (x,))))
    pushed = [jvp(outputs, (params,), (tangent,))[1] for tangent in tangents]
    total = torch.zeros(len(ways), len(ways))
    for place, (at, target, weight) in enumerate(known):

        def loss(at: tuple[Tensor, ...], target: Tensor = target, weight: float = weight) -> Tensor:
            return loss_of(criterion, (at, target, weight))

        for i, left in enumerate(pushed):
            if isinstance(criterion, nn.GaussianNLLLoss):  # the expected Hessian
                variance = at[1]
                curved = tuple(
                    weight * v / (variance**power * scale) / variance.numel()
                    for v, power, scale in zip(left[place], (1, 2), (1, 2), strict=True)
                )
            else:
                curved = hvp(lambda *at: loss(at), at, left[place])[1]
            for j, right in enumerate(pushed):
                total[i, j] += sum((u * hv).sum() for u, hv in zip(right[place], curved, strict=True))
    return total


@pytest.mark.parametrize("name", CASES)
def test_forms_are_those_of_the_gauss_newton_matrix_at_the_criterion(name: str) -> None:
    outputs, criterion, live, pure = CASES[name]
    model = network(outputs)
    optimizer = quadratic(model, criterion)
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()} for _ in range(2)]
    expected = dense(model, criterion, pure, ways)
    sum(loss_of(criterion, read) for read in live(model)).backward()
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    forms = optimizer._objective.curvature(at, ways, optimizer._window.close())
    torch.testing.assert_close(forms, expected, rtol=1e-11, atol=1e-12)


def test_only_what_is_no_output_of_the_model_is_differentiated_twice() -> None:
    model, criterion = network(3), nn.CrossEntropyLoss()
    optimizer = quadratic(model, criterion)
    recorder = optimizer._recorder
    assert recorder is not None
    sum(loss_of(criterion, read) for read in tokens(model)).backward()
    assert recorder.read == []
    optimizer.step()
    sum(loss_of(criterion, read) for read in tokens_by_head(model)).backward()
    assert len(recorder.read) == 1


def test_what_the_criterion_reads_once_more_after_the_backward_takes_no_curvature_away() -> None:
    model, criterion = network(3), nn.CrossEntropyLoss()
    optimizer = quadratic(model, criterion)
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()}]
    expected = dense(model, criterion, tokens, ways)
    output, classes = model(inputs()), torch.tensor([0, 1, -100, 2, -100, 1])
    criterion(output, classes).backward()
    criterion(output, classes.flip(0))
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    assert_same(optimizer._objective.curvature(at, ways, optimizer._window.close()), expected, rtol=1e-11)


def test_what_is_observed_has_its_own_curvature_and_not_that_of_the_named_loss() -> None:
    model = network(3)
    optimizer = quadratic(model, nn.MSELoss())
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()}]

    def bits(call: Call) -> Iterator[Read]:
        yield (call(inputs()),), targets(6, 3).round(), 1.0

    expected = dense(model, nn.BCEWithLogitsLoss(), bits, ways)
    distribution = torch.distributions.Bernoulli(logits=model(inputs()))
    optimizer.observe(distribution)
    (-distribution.log_prob(targets(6, 3).round())).mean().backward()
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    assert_same(optimizer._objective.curvature(at, ways, optimizer._window.close()), expected, rtol=1e-11)


class Whole(nn.Module):
    """Is one module that computes what a function computes of two."""

    def __init__(self, run: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(*self.parts, x)


RUNS: dict[str, Callable[..., Tensor]] = {
    "two in a row": lambda first, second, x: second(first(x)),
    "one on its own output": lambda first, _, x: first(first(x)),
    "one on weights computed from its own": lambda first, _, x: functional_call(
        first, {name: param.sin() for name, param in first.named_parameters()}, (x,)
    ),
    "one on a parameter": lambda first, second, _: first(second[0].weight),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_curvature_is_the_same_in_one_module_and_where_a_forward_depends_on_other_parameters(name: str) -> None:
    found = []
    for is_whole in (True, False):
        parts, criterion = (network(2), network(2)), nn.MSELoss()
        whole = Whole(RUNS[name], *parts)
        apart: Any = parts[0] if "weights" in name else list(whole.parameters())
        optimizer = quadratic(whole if is_whole else apart, criterion)
        output = whole(inputs()) if is_whole else RUNS[name](*parts, inputs())
        criterion(output, torch.ones_like(output)).backward()
        params = [param for param in whole.parameters() if param.grad is not None]
        generator = torch.Generator().manual_seed(3)
        ways = [{param: torch.randn(param.shape, generator=generator) for param in params} for _ in range(2)]
        assert optimizer._objective is not None
        at = {param: param.detach() for param in params}
        found.append(optimizer._objective.curvature(at, ways, optimizer._window.close()))
    assert_same(found[1], found[0], rtol=1e-11)


def test_a_part_of_the_output_has_no_curvature_of_what_others_read_of_it() -> None:
    model, criterion = network(3), nn.MSELoss()
    optimizer = quadratic(model, criterion)
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()}]

    def first(call: Call) -> Iterator[Read]:
        yield (call(inputs())[:, :1],), targets(6, 1), 1.0

    def rest(call: Call) -> Iterator[Read]:
        yield (call(inputs())[:, 1:],), targets(6, 2).round(), 1.0

    expected = dense(model, criterion, first, ways) + dense(model, nn.BCEWithLogitsLoss(), rest, ways)
    output = model(inputs())
    distribution = torch.distributions.Bernoulli(logits=output[:, 1:])
    optimizer.observe(distribution)
    (criterion(output[:, :1], targets(6, 1)) - distribution.log_prob(targets(6, 2).round()).mean()).backward()
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    assert_same(optimizer._objective.curvature(at, ways, optimizer._window.close()), expected, rtol=1e-11)


def test_outputs_that_the_criterion_reads_in_another_order_are_not_mistaken() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output = self.body(x)
            return F.softplus(output[:, 1:]) + 0.1, output[:, :1]

    model, criterion = Reversed(), nn.GaussianNLLLoss()
    optimizer = quadratic(model, criterion)
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()}]

    def read(call: Call) -> Iterator[Read]:
        variance, mean = call(inputs())
        yield (mean, variance), targets(6, 1), 1.0

    expected = dense(model, criterion, read, ways)
    loss_of(criterion, next(read(model))).backward()
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    assert_same(optimizer._objective.curvature(at, ways, optimizer._window.close()), expected, rtol=1e-11)


def time_major(call: Call) -> Iterator[Read]:
    output = call(inputs()).view(2, 3, 3).transpose(0, 1)  # `[batch, time, classes]`
    yield (output.flatten(0, 1),), torch.tensor([0, 1, -100, 2, -100, 1]), 1.0


@pytest.mark.parametrize("reads", [tokens, tokens_by_head, time_major])
def test_ignored_targets_have_no_curvature_where_another_term_reads_the_same(
    reads: Callable[[Call], Iterator[Read]],
) -> None:
    """Its weight is next to zero; in another order what was read is told by gradients, with no other term."""
    model, criterion = network(3), nn.CrossEntropyLoss()
    optimizer = quadratic(model, criterion)
    generator = torch.Generator().manual_seed(3)
    ways = [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()}]
    expected = dense(model, criterion, reads, ways)
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda *call: outputs.append(call[2]))
    (read,) = reads(model)
    other = outputs[0].sum() + read[0][0].sum() if reads is not time_major else 0.0
    (loss_of(criterion, read) + 1e-12 * other).backward()
    assert optimizer._objective is not None
    at = {param: param.detach() for param in model.parameters()}
    assert_same(optimizer._objective.curvature(at, ways, optimizer._window.close()), expected, rtol=1e-11)


def residual_loss(model: nn.Module, criterion: nn.Module) -> Tensor:
    return sum(loss_of(criterion, read) for read in nested(model))


def test_a_loss_scale_leaves_the_steps_as_they_are() -> None:
    """Of two optimizers, one with a GradScaler."""
    models = [network(), network()]
    for model, scale in zip(models, (None, 2.0**10), strict=True):
        criterion = nn.MSELoss()
        optimizer = quadratic(model, criterion)
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(residual_loss(model, criterion)).backward()
            scaler.step(optimizer)
            scaler.update()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_term_that_is_observed_is_one_of_a_criterion() -> None:
    models = [network(), network()]
    for model, observes in zip(models, (False, True), strict=True):
        criterion = nn.MSELoss()
        optimizer = quadratic(model, criterion)
        ((residual, target, _), _) = (read for read in nested(model))
        if observes:
            error = residual[0] - target
            optimizer.observe(error, weight=3.0)
            (3 * error.square().mean()).backward()
        else:
            (3 * criterion(*residual, target)).backward()
        optimizer.step()
    assert_same(*(list(model.parameters()) for model in models))


def test_gradients_and_hooks_of_the_loop_see_nothing_of_it() -> None:
    models = [network(), network()]
    calls = []
    for model, sizes in zip(models, (True, False), strict=True):
        criterion = nn.MSELoss()
        seen: list[Tensor] = []
        model[0].weight.register_hook(seen.append)
        if sizes:
            optimizer = quadratic(model, criterion)
        else:
            other = KFACOptimizer(model, estimate=ExactGGN(criterion))
        residual_loss(model, criterion).backward()
        calls.append(len(seen))
    assert calls == [1, 1]
    assert len(optimizer._recorder.read) == 1
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_its_own_backward_is_no_derivative_of_the_loss() -> None:
    """An input that requires its gradient has products followed; the loss uses each weight once all the same."""
    model, criterion = network(3), nn.BCEWithLogitsLoss()
    optimizer = quadratic(model, criterion)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(inputs().requires_grad_())
        criterion((output @ torch.ones(3, 2)).sin(), targets(6, 2)).backward()
        assert len(optimizer._recorder.read) == 1
        optimizer.step()
    blocks = optimizer._binding.coverage.blocks
    assert [(block.follows_uses, block.joins_uses) for block in blocks] == [(True, False)] * 2


def test_the_graphs_are_freed_by_the_step() -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = quadratic(model, criterion)
    residual_loss(model, criterion).backward()
    held = [weakref.ref(term) for term in optimizer._recorder.read]
    gc.disable()
    try:
        optimizer.step()
        assert [term() for term in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("last", [torch.sigmoid, torch.tanh], ids=["sigmoid", "tanh"])
def test_a_function_behind_the_model_that_saves_its_result_keeps_no_graph_alive(
    last: Callable[[Tensor], Tensor],
) -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = quadratic(model, criterion)
    with SavedTensors() as saved:
        output = last(model(inputs()))
        criterion(output, torch.zeros_like(output)).backward()
    del output
    optimizer.step()
    assert saved.all_gone()


def test_parameters_outside_the_model_may_stand_behind_a_criterion() -> None:
    model, criterion = network(3), nn.MSELoss()
    head = nn.Linear(3, 1)
    groups = [{"params": list(model.parameters())}, {"params": list(head.parameters())}]
    optimizer = quadratic(groups, criterion, model=model)
    before = criterion(head(model(inputs())), targets(6, 1)).item()
    for _ in range(3):
        optimizer.zero_grad()
        criterion(head(model(inputs())), targets(6, 1)).backward()
        optimizer.step()
    assert optimizer.metrics()["predicted_change"] < 0
    assert criterion(head(model(inputs())), targets(6, 1)).item() < before / 2


def test_a_head_that_the_loss_does_not_use_stays_where_it_is() -> None:
    used, criterion = network(3), nn.MSELoss()
    model, alone = nn.ModuleList([used, nn.Linear(3, 1)]), copy.deepcopy(used)
    for trained, params in ((used, model), (alone, alone)):
        optimizer = quadratic(params, criterion)
        for _ in range(2):
            optimizer.zero_grad()
            criterion(trained(inputs()), targets(6, 3)).backward()
            optimizer.step()
    assert_same(list(used.parameters()), list(alone.parameters()))


def test_damping_is_judged_by_the_curvature_at_the_criterion() -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = quadratic(model, criterion, adapt_damping=LevenbergMarquardt(interval=1, decay=0.5, reject=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residual_loss(model, criterion)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert all(later <= earlier for earlier, later in pairwise(losses))


def test_without_the_step_size_that_knows_it_damping_is_not_adapted_by_another_curvature() -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion), adapt_damping=LevenbergMarquardt(interval=1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residual_loss(model, criterion)
        loss.backward()
        return loss

    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"Pass step_size=QuadraticModel\(\) as well"):
        optimizer.step(closure)
    assert_same(before, list(model.parameters()))


def test_what_cannot_be_differentiated_twice_is_told_of() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    model, criterion = network(), nn.MSELoss()
    optimizer = quadratic(model, criterion)
    criterion(Doubled.apply(model(inputs())), targets(6, 1)).backward()
    with pytest.raises(RuntimeError, match=r"differentiated twice, and that failed.*do without QuadraticModel"):
        optimizer.step()
