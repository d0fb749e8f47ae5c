"""The published cases in which K-FAC is the Gauss-Newton matrix of each layer, held to torch.func in float64.

The oracle differentiates model and loss as they stand: `Jᵀ H J` with `J` of the model's outputs and `H` of the very
loss, whose mean or sum is thereby part of what is tested. Sources of the cases: Martens & Grosse 2015 (one example; one
layer), Bernacchia et al. 2018 (deep linear networks under squares), Eschenhagen et al. 2023, arXiv 2311.00636 (weight
sharing: expand with a term of the loss per position, reduce with a mean or sum over positions), and the test cases of
"KFAC from scratch", arXiv 2507.05127. Convolutions under reduce wrap around: at a border that is padded by zeros a
position acts on the mean otherwise than in the middle, and the case is not exact.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.oracles import assert_same
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from kfac_optim import Empirical, ExactGGN, KFACOptimizer, LossTerms, WeightSharing
from kfac_optim.fisher.extra_backward import _Passes

pytestmark = pytest.mark.usefixtures("float64")

EXPAND, REDUCE = WeightSharing.EXPAND, WeightSharing.REDUCE


class OverPositions(nn.Module):
    """Takes the mean or the sum over all dimensions between the first and the channels."""

    def __init__(self, channels: int, mean: bool = True) -> None:
        super().__init__()
        self.channels, self.mean = channels, mean

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.channels, -1).flatten(1, -2)
        return rows.mean(1) if self.mean else rows.sum(1)


def conv(inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
    if kernel == 1:
        return nn.Conv2d(inputs, outputs, 1)
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, padding_mode="circular")


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input."""
    criterion: nn.Module
    sharing: WeightSharing = EXPAND

    def target(self, output: Tensor) -> Tensor:
        if isinstance(self.criterion, nn.CrossEntropyLoss):
            return output.detach().argmin(1)
        return (output.detach() > 0).to(output.dtype)


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 3))


SQUARES, SQUARES_SUM = nn.MSELoss(), nn.MSELoss(reduction="sum")
CASES = {
    "one example, cross entropy": Case(tanh_net, (1, 3), nn.CrossEntropyLoss()),
    "one example, cross entropy summed": Case(tanh_net, (1, 3), nn.CrossEntropyLoss(reduction="sum")),
    "one example, squares": Case(tanh_net, (1, 3), SQUARES),
    "one example, bits": Case(tanh_net, (1, 3), nn.BCEWithLogitsLoss()),
    "one layer, squares": Case(lambda: nn.Sequential(nn.Linear(3, 4)), (6, 3), SQUARES),
    "deep linear, squares": Case(linear_net, (6, 3), SQUARES),
    "deep linear, squares summed": Case(linear_net, (6, 3), SQUARES_SUM),
    "deep linear, a term per position": Case(linear_net, (4, 5, 3), SQUARES),
    "deep linear, a term per position, summed": Case(linear_net, (4, 5, 3), SQUARES_SUM),
    "deep linear, mean over positions": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), OverPositions(-1)), (4, 5, 3), SQUARES, REDUCE
    ),
    "deep linear, sum over positions": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), OverPositions(-1, mean=False), nn.Linear(2, 2)),
        (4, 5, 3),
        SQUARES_SUM,
        REDUCE,
    ),
    "convolutions of one pixel, a term per pixel": Case(
        lambda: nn.Sequential(conv(2, 3, 1), conv(3, 2, 1)), (3, 2, 4, 3), SQUARES
    ),
    "one convolution, a term per pixel": Case(lambda: nn.Sequential(nn.Conv2d(2, 3, 2)), (3, 2, 4, 3), SQUARES),
    "convolutions, mean over the map": Case(
        lambda: nn.Sequential(conv(2, 3, 3), conv(3, 2, 3), OverPositions(1), nn.Linear(2, 2)),
        (4, 2, 3, 4),
        SQUARES,
        REDUCE,
    ),
    "convolutions, sum over the map": Case(
        lambda: nn.Sequential(conv(2, 3, 3), conv(3, 2, 1), OverPositions(1, mean=False)),
        (4, 2, 3, 4),
        SQUARES_SUM,
        REDUCE,
    ),
    "convolutions, mean over the map, one example, cross entropy": Case(
        lambda: nn.Sequential(conv(2, 3, 3), conv(3, 2, 3), OverPositions(1), nn.Tanh(), nn.Linear(2, 3)),
        (1, 2, 3, 4),
        nn.CrossEntropyLoss(),
        REDUCE,
    ),
    "convolutions as wide as their maps": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 4)), nn.Conv2d(3, 2, 1), nn.Flatten()), (5, 2, 3, 4), SQUARES
    ),
}


def dense(model: nn.Module, name: str, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """`Jᵀ H J` of one layer's matrix `[out, in]`, bias last, flattened row by row."""
    layer = model.get_submodule(name)
    params = {f"{name}.{key}": param.detach() for key, param in layer.named_parameters()}
    output = model(x).detach()
    jacobians = jacrev(lambda some: functional_call(model, some, (x,)).flatten())(params)
    parts = [jacobians[f"{name}.weight"].reshape(output.numel(), layer.weight.shape[0], -1)]
    if f"{name}.bias" in jacobians:
        parts.append(jacobians[f"{name}.bias"].unsqueeze(-1))
    rows = torch.cat(parts, dim=-1).flatten(1)
    curvature = jacrev(jacrev(lambda flat: loss(flat.view_as(output))))(output.flatten())
    return rows.mT @ curvature @ rows


@pytest.mark.parametrize("named", ["the object that is called", "an equal one"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_exact_estimate_is_the_gauss_newton_matrix_of_each_layer(case: Case, named: str) -> None:
    """Where the estimate names the very criterion, its call says what it reads; else the model's output does."""
    criterion = case.criterion if named == "the object that is called" else copy.deepcopy(case.criterion)
    model, x = case.build(), torch.randn(case.shape)
    target = case.target(model(x))
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion), weight_sharing=case.sharing)
    case.criterion(model(x), target).backward()
    optimizer.step()
    assert len(optimizer.factors()) == sum(isinstance(module, (nn.Linear, nn.Conv2d)) for module in model)
    for name, (a, g) in optimizer.factors().items():
        expected = dense(model, name, x, lambda output: case.criterion(output, target))
        assert_same(oracles.kronecker(a, g)[0], expected, rtol=1e-11)


@pytest.mark.parametrize(("criterion", "examples"), [(nn.MSELoss(), 1), (nn.MSELoss(), 4), (nn.CrossEntropyLoss(), 1)])
def test_positions_that_interact_are_measured_as_those_of_an_example_where_they_are_flattened(
    criterion: nn.Module, examples: int
) -> None:
    """They are outputs of one row here. Under cross entropy one example is exact, under squares all are."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6)), torch.randn(examples, 3)

    def loss(output: Tensor) -> Tensor:
        rows = output.view(-1, 2)
        target = torch.arange(len(rows)) % 2
        return criterion(rows, target if isinstance(criterion, nn.CrossEntropyLoss) else torch.ones_like(rows))

    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion))
    loss(model(x)).backward()
    optimizer.step()
    for name, (a, g) in optimizer.factors().items():
        assert_same(oracles.kronecker(a, g)[0], dense(model, name, x, loss), rtol=1e-11)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.values, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.shape[1]))
        mixed = (x @ x.mT).softmax(-1) @ self.values(x)
        return self.head((x + mixed).tanh())


def each_position() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("build", "positions", "flattens_input", "expected"),
    # A pass for each class and two more in the first step. To tell positions apart takes two; a third where they
    # interact, and a fourth as places that divide them may be examples.
    [
        (each_position, 5, True, 3 + 2),
        (each_position, 5, False, 3 + 2 + 2),
        (Attending, 5, False, 5 * 3 + 2 + 4),
        (Attending, 4, False, 4 * 3 + 2 + 4),
    ],
)
def test_flattened_logits_cost_a_pass_for_each_position_where_these_interact_alone(
    build: Callable[[], nn.Module], positions: int, flattens_input: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[Any] = []
    run = _Passes.run

    def counted(self: _Passes, vector: Tensor | None) -> list[Tensor | None]:
        passes.append(vector)
        return run(self, vector)

    monkeypatch.setattr(_Passes, "run", counted)
    torch.manual_seed(0)
    model, x, criterion = build(), torch.randn(2, positions, 4), nn.CrossEntropyLoss()
    classes = torch.arange(2 * positions) % 3
    twin, theirs = copy.deepcopy(model), copy.deepcopy(criterion)
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion, class_dim=-1))
    criterion(model(x.flatten(0, 1) if flattens_input else x).view(-1, 3), classes).backward()
    optimizer.step()
    assert len(passes) == expected
    reference = KFACOptimizer(twin, lr=0.0, estimate=ExactGGN(theirs, class_dim=-1))
    theirs(twin(x).mT, classes.view(2, positions)).backward()
    reference.step()
    for name, (_, g) in reference.factors().items():
        assert_same(optimizer.factors()[name][1], g, rtol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_one_example_the_empirical_factors_are_its_gradient_times_itself(reduction: str) -> None:
    """Of any loss: here one that no estimate knows."""
    model, x = tanh_net(), torch.randn(1, 3)
    terms = LossTerms.EXAMPLES if reduction == "mean" else LossTerms.SUM
    optimizer = KFACOptimizer(model, lr=0.0, estimate=Empirical(), loss_terms=terms)
    model(x).pow(4).sum().backward()
    gradients = {
        name: torch.cat([model.get_submodule(name).weight.grad, model.get_submodule(name).bias.grad[:, None]], 1)
        for name in ("0", "2", "4")
    }
    optimizer.step()
    for name, (a, g) in optimizer.factors().items():
        flat = gradients[name].flatten()
        assert_same(oracles.kronecker(a, g)[0], torch.outer(flat, flat), rtol=1e-11)
