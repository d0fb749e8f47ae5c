"""Steps that bend by the geodesic acceleration: LineSearch with SampleSpace; covers `acceleration` and `changes`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.oracles import assert_same
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from kfac_optim import ExactGGN, KFACOptimizer, LineSearch, SampleSpace

pytestmark = pytest.mark.usefixtures("float64")

_SEEN = 0.1  # of the first length, 1
_DAMPING = 1e-3


def network(*widths: int) -> nn.Sequential:
    torch.manual_seed(2)
    parts = [part for each in pairwise(widths) for part in (nn.Linear(*each), nn.Tanh())]
    return nn.Sequential(*parts[:-1])


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def squares(z: Tensor) -> Tensor:
    """`B`, `[examples, outputs, columns]`."""
    return torch.eye(z.shape[1]).expand(len(z), -1, -1) * 2**0.5


def classes(z: Tensor) -> Tensor:
    p = z.softmax(1)
    return torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)


Loss = Callable[[nn.Module, Callable[[Tensor], Tensor]], list[tuple[Tensor, Tensor, float]]]
TARGETS = torch.tensor([0, 2, 1, 1, 0])
LOSSES: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], Loss]] = {
    "two terms": (
        nn.MSELoss(),
        squares,
        lambda _, call: [
            (call(numbers(5, 2)).sin(), numbers(5, 3), 1 / 15),
            (call(numbers(3, 2)), numbers(3, 3), 4 / 9),
        ],
    ),
    "sum": (nn.MSELoss(reduction="sum"), squares, lambda _, call: [(call(numbers(5, 2)).exp(), numbers(5, 3), 0.1)]),
    "classes": (nn.CrossEntropyLoss(), classes, lambda _, call: [(call(numbers(5, 2)), TARGETS, 3 / 5)]),
}


def loss_of(criterion: nn.Module, terms: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    divisors = [1 if criterion.reduction == "sum" else target.numel() for _, target, _ in terms]
    parts = [w * m * criterion(z, target) for (z, target, w), m in zip(terms, divisors, strict=True)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("name", LOSSES)
def test_the_second_step_is_the_dense_one(name: str, momentum: float) -> None:
    criterion, root, terms = LOSSES[name]
    model = network(2, 4, 3)
    names = dict(model.named_parameters())
    optimizer = KFACOptimizer(
        model,
        lr=1.0,
        momentum=0,
        damping=_DAMPING,
        inverse=SampleSpace(momentum=momentum),
        step_size=LineSearch(),
        estimate=ExactGGN(criterion),
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(criterion, terms(model, model))
        loss.backward()
        return loss.detach()

    def flat(values: dict[str, Tensor]) -> Tensor:
        return torch.cat([part.detach().flatten() for part in values.values()])

    def read(at: Tensor) -> list[Tensor]:
        parts = torch.split(at, [param.numel() for param in names.values()])
        params = {name: part.view(param.shape) for (name, param), part in zip(names.items(), parts, strict=True)}
        return [z for z, _, _ in terms(model, lambda x: functional_call(model, params, (x,)))]

    weights = [w for _, _, w in terms(model, model)]
    direction, length = torch.zeros(sum(param.numel() for param in names.values())), 1.0
    for _ in range(2):
        before = flat(names)
        roots = [w**0.5 * root(z.detach()) for w, z in zip(weights, read(before), strict=True)]

        def residuals(at: Tensor, roots: list[Tensor] = roots) -> Tensor:
            return torch.cat([torch.einsum("noc,no->nc", b, z).flatten() for b, z in zip(roots, read(at), strict=True)])

        rho = jacrev(residuals)(before)
        optimizer.step(closure)
        grad = torch.cat([param.grad.flatten() for param in names.values()])
        damped = rho.T @ rho + _DAMPING * torch.eye(len(before))
        earlier = momentum * direction
        direction = earlier + torch.linalg.solve(damped, grad - rho.T @ (rho @ earlier))
        h = _SEEN * length
        second = 2 / h * ((residuals(before - h * direction) - residuals(before)) / h + rho @ direction)
        acceleration = -torch.linalg.solve(damped, rho.T @ second)
        length = optimizer.metrics()["step_length"]
        most = 0.75 * length * direction.norm()
        bend = length**2 * acceleration
        step = -length * direction + bend / 2 * min(1.0, float(most / bend.norm()))
        torch.testing.assert_close(flat(names) - before, step, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "inverse", [SampleSpace(scope="layer"), {"0": SampleSpace(), "2": SampleSpace(momentum=0.5)}], ids=["scope", "two"]
)
def test_steps_that_layers_find_by_themselves_are_straight(inverse: Any) -> None:
    """Each layer's step takes the residuals along the line that is meant for all: together they overshoot."""
    moved = []
    for geodesic in (True, False):
        criterion, model = nn.MSELoss(), network(2, 4, 3)
        optimizer = KFACOptimizer(
            model,
            lr=1.0,
            momentum=0,
            damping=_DAMPING,
            inverse=inverse,
            step_size=LineSearch(geodesic=geodesic),
            estimate=ExactGGN(criterion),
        )

        def closure(model: nn.Module = model, optimizer: KFACOptimizer = optimizer, loss: Any = criterion) -> Tensor:
            optimizer.zero_grad()
            found = loss(model(numbers(5, 2)), numbers(5, 3))
            found.backward()
            return found.detach()

        optimizer.step(closure)
        moved.append(list(model.parameters()))
    assert_same(*moved, rtol=0)


@pytest.mark.parametrize("name", ["two terms", "classes"])
def test_where_residuals_are_linear_in_the_parameters_steps_are_straight(name: str) -> None:
    """A loss of one linear layer's outputs: the second derivative is zero."""
    criterion = LOSSES[name][0]
    moved = []
    for geodesic in (True, False):
        model = network(2, 3)
        optimizer = KFACOptimizer(
            model,
            lr=1.0,
            momentum=0,
            damping=_DAMPING,
            inverse=SampleSpace(),
            step_size=LineSearch(geodesic=geodesic),
            estimate=ExactGGN(criterion),
        )

        def closure(model: nn.Module = model, optimizer: KFACOptimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            target = TARGETS if name == "classes" else numbers(5, 3)
            loss = criterion(model(numbers(5, 2)), target) + 2 * criterion(model(numbers(5, 2) + 1), target)
            loss.backward()
            return loss.detach()

        for _ in range(2):
            optimizer.step(closure)
        moved.append(list(model.parameters()))
    assert_same(*moved, rtol=1e-7)


def test_parameters_of_other_inverses_go_straight_and_are_no_part_of_the_bend() -> None:
    """With SampleSpace on one layer alone, the acceleration is that of the layer alone."""
    criterion = nn.MSELoss()
    model = network(2, 4, 3)
    optimizer = KFACOptimizer(
        model,
        lr=1.0,
        momentum=0,
        damping=_DAMPING,
        skip_layers=["2"],
        inverse=SampleSpace(),
        step_size=LineSearch(),
        estimate=ExactGGN(criterion),
    )
    x, y = numbers(5, 2), numbers(5, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss.detach()

    before = [param.detach().clone() for param in model.parameters()]

    def residuals(first: Tensor) -> Tensor:
        params = {"0.weight": first[:8].view(4, 2), "0.bias": first[8:], "2.weight": before[2], "2.bias": before[3]}
        return (2 / 15) ** 0.5 * functional_call(model, params, (x,)).flatten()

    at = torch.cat([part.flatten() for part in before[:2]])
    rho = jacrev(residuals)(at)
    optimizer.step(closure)
    grads = [param.grad for param in model.parameters()]
    damped = rho.T @ rho + _DAMPING * torch.eye(len(at))
    direction = torch.linalg.solve(damped, torch.cat([grad.flatten() for grad in grads[:2]]))
    second = 2 / _SEEN * ((residuals(at - _SEEN * direction) - residuals(at)) / _SEEN + rho @ direction)
    acceleration = -torch.linalg.solve(damped, rho.T @ second)
    t = optimizer.metrics()["step_length"]
    moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
    bend = t**2 * acceleration
    bent = -t * direction + bend / 2 * min(1.0, float(0.75 * t * direction.norm() / bend.norm()))
    torch.testing.assert_close(torch.cat([part.flatten() for part in moved[:2]]), bent, rtol=1e-8, atol=1e-10)
    for part, grad in zip(moved[2:], grads[2:], strict=True):
        torch.testing.assert_close(part, -t * grad, rtol=1e-9, atol=1e-12)


def test_a_criterion_that_reads_something_else_at_the_second_evaluation_is_told_of() -> None:
    criterion, model, calls = nn.MSELoss(), network(2, 4, 3), []
    optimizer = KFACOptimizer(
        model, lr=1.0, momentum=0, inverse=SampleSpace(), step_size=LineSearch(), estimate=ExactGGN(criterion)
    )

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        n = 5 if len(calls) == 1 else 4
        loss = criterion(model(numbers(n, 2)), numbers(n, 3))
        loss.backward()
        return loss.detach()

    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"did not read there what it read at first.*LineSearch\(geodesic=False\)"):
        optimizer.step(closure)
    assert_same(before, list(model.parameters()))


def test_rows_are_freed_by_the_step() -> None:
    criterion, model = nn.MSELoss(), network(2, 4, 3)
    optimizer = KFACOptimizer(model, lr=1e-3, momentum=0, inverse=SampleSpace(), estimate=ExactGGN(criterion))
    criterion(model(numbers(5, 2)), numbers(5, 3)).backward()
    optimizer.step()
    states = [block.state for block in optimizer._binding.coverage.blocks]
    assert [(state.solved, bool(state.rows)) for state in states] == [(None, False)] * 2


def test_rows_of_a_backward_before_the_closure_are_told_of_and_the_remedy_works() -> None:
    """Gradients that `model.zero_grad(set_to_none=False)` has zeroed do not show that their rows are to go as well."""
    model, criterion = network(4, 6, 3), nn.MSELoss()
    options = {"inverse": SampleSpace(), "step_size": LineSearch(), "estimate": ExactGGN(criterion)}
    optimizer = KFACOptimizer(model, lr=1.0, damping=_DAMPING, **options)
    x, y = numbers(12, 4), numbers(12, 3)
    before = [param.detach().clone() for param in model.parameters()]

    def closure(zero: Callable[..., None]) -> Tensor:
        zero(set_to_none=False)
        loss: Tensor = criterion(model(x), y)
        loss.backward()
        return loss.detach()

    criterion(model(x + 1), y).backward()  # as of an attack on the inputs
    with pytest.raises(RuntimeError, match=r"optimizer\.zero_grad\(\) in the closure"):
        optimizer.step(lambda: closure(model.zero_grad))
    assert all(map(torch.equal, before, model.parameters()))
    criterion(model(x + 1), y).backward()
    optimizer.step(lambda: closure(optimizer.zero_grad))
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("rate", [0.0, torch.tensor([0.0]), 1e-9], ids=["0", "tensor", "1e-9"])
def test_a_group_bends_by_its_share_of_the_largest_rate(rate: Any) -> None:
    """The acceleration is no multiple of the direction, which the rate of 0 makes 0."""
    criterion, model = nn.MSELoss(), network(2, 8, 8, 1)
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2:].parameters()}]
    options = {"inverse": SampleSpace(), "step_size": LineSearch(), "estimate": ExactGGN(criterion)}
    optimizer = KFACOptimizer(groups, model=model, lr=1.0, momentum=0, damping=0.1, **options)
    x = numbers(64, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        return loss.detach()

    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(6):
        optimizer.step(closure)
    moved = [float((new - old).detach().norm()) for old, new in zip(before, model.parameters(), strict=True)]
    assert max(moved[:2]) <= 1000 * float(rate)
    assert min(moved[2:]) > 1e-2
