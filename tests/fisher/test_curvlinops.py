"""The factors of curvlinops, the K-FAC library of the authors of "KFAC from scratch", and ours are equal to 1e-10.

Its conventions (read in version 3.0.1) and ours, of a batch of N examples with R terms of the loss each:
    A         it and we: the mean over the N S rows, S the positions of a layer; with reduce over N means of positions.
    G         it: `Σ g gᵀ · N R` for a mean, `Σ g gᵀ` for a sum, g of the loss of its own; ours: times the number M of
              terms that the mean runs over, N R. Of `MSELoss` and `BCEWithLogitsLoss` with C outputs M is N R C, as
              torch's mean runs over elements; it multiplies the loss by √C, which comes to the same.
    bias      with `separate_weight_and_bias=False` one column of ones after the weight's, as ours is always; of reduce
              the mean of ones, 1.
    batches   of a mean it divides by the examples of all, so that a batch weighs its size; ours does with a decay of 1.
              Of a sum it sums over all batches, ours averages over steps: not compared.
    type-2    the Hessian's square root by columns, all examples and positions in one pass: `ExactGGN`, which takes
              positions one by one as well. With a term per position the two agree where no position's output reads
              another's input, and no layer sums over positions: not compared under reduce.
    mc        one draw of targets from the model's predictions, `MonteCarlo`. Random generators differ, so that here it
              draws what ours drew. Variance 1/2 for squares, in both.
    empirical gradients at the targets, `Empirical`, and `loss_terms` says M.
    EKFAC     the mean of `(U_Gᵀ ∇W_n U_A)²` over examples; with reduce it keeps the whole gradient of an example where
              ours takes mean input times summed gradient, so that positions are compared under expand alone.
    unused    a position whose gradient is exactly zero is no row of A here, and one there: the models have none.
    groups    of a convolution are averaged into one by it, and are blocks of their own here: not compared.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.oracles import assert_same
from torch import Tensor, nn

from kfac_optim import EKFAC, Empirical, ExactGGN, KFACOptimizer, LossTerms, MonteCarlo, WeightSharing
from kfac_optim.fisher.named_losses import likelihood_of

with warnings.catch_warnings(action="ignore"):  # its imports call what torch deprecates
    curvlinops = pytest.importorskip("curvlinops")

pytestmark = pytest.mark.usefixtures("float64")

ESTIMATES = {"type-2": ExactGGN, "mc": MonteCarlo, "empirical": Empirical}
TOLERANCE = 1e-10
Batch = tuple[Tensor, Tensor]


class Mixer(nn.Module):
    """Shares weights over positions, and then over channels; the output is a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.positions, self.head = nn.Linear(4, 3), nn.Linear(5, 2, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.positions(self.channels(x).tanh().mT).tanh().mT
        return self.head(mixed).mean(1)


class ClassesSecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 3))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 2, bias=False)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input of one example."""
    criterion: nn.Module

    def batch(self, model: nn.Module, examples: int) -> Batch:
        x = torch.randn(examples, *self.shape)
        output = model(x).detach()
        if isinstance(self.criterion, nn.CrossEntropyLoss):
            return x, output.argmin(1)
        return x, (output > 0).to(output.dtype)

    @property
    def class_dim(self) -> int | None:
        return 1 if isinstance(self.criterion, nn.CrossEntropyLoss) else None


CRITERIA = [nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")]
MODELS = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 5, 5)), "mixer": (Mixer, (5, 4))}
PROBLEMS = {
    f"{name}, {criterion}, {criterion.reduction}": Problem(build, shape, criterion)
    for name, (build, shape) in MODELS.items()
    for criterion in CRITERIA
}
MEANS = {name: problem for name, problem in PROBLEMS.items() if problem.criterion.reduction == "mean"}
POSITIONS = {
    "positions, squares": Problem(mlp, (5, 4), nn.MSELoss()),
    "positions, cross entropy": Problem(lambda: nn.Sequential(mlp(), ClassesSecond()), (5, 4), nn.CrossEntropyLoss()),
}


def ours(
    problem: Problem, model: nn.Module, batches: list[Batch], kind: str, steps: int = 1, **options: Any
) -> KFACOptimizer:
    """An optimizer that has seen each of the batches in a step of its own, and has moved nothing."""
    criterion = problem.criterion
    if kind == "empirical":
        elements = not isinstance(criterion, nn.CrossEntropyLoss)
        mean = LossTerms.ELEMENTS if elements else LossTerms.EXAMPLES
        options = {"loss_terms": LossTerms.SUM if criterion.reduction == "sum" else mean, **options}
    else:
        options = {"estimate": ESTIMATES[kind](criterion, class_dim=problem.class_dim), **options}
    optimizer = KFACOptimizer(model, lr=0.0, factor_decay=1.0, factor_update_period=1, **options)
    for _ in range(steps):
        for x, target in batches:
            optimizer.zero_grad()
            if kind == "empirical" and isinstance(criterion, nn.CrossEntropyLoss):
                optimizer.set_loss_terms(target.numel())
            criterion(model(x), target).backward()
            optimizer.step()
    optimizer.remove_hooks()
    return optimizer


def theirs(
    problem: Problem,
    model: nn.Module,
    batches: list[Batch],
    kind: str,
    sharing: WeightSharing,
    draws: list[Tensor],
    operator: Any = None,
) -> Any:
    """Their operator; targets of a Monte Carlo estimate are those of `draws` `[N R, …]`, in this order."""

    class SameDraws(operator or curvlinops.KFACLinearOperator):  # type: ignore[misc]
        def draw_label(self, output: Tensor) -> Tensor:
            return draws.pop(0)

    return SameDraws(
        model,
        problem.criterion,
        list(model.parameters()),
        batches,
        check_deterministic=False,
        fisher_type=kind,
        kfac_approx=sharing.value,
        separate_weight_and_bias=False,
    )


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Targets that our Monte Carlo estimates draw, the same at each step, read off the gradients made of them."""
    drawn: list[Tensor] = []
    for criterion in CRITERIA[:3]:
        kind = type(likelihood_of(criterion, None))

        def sample(self: Any, outputs: Any, generator: Any, original: Any = kind.sample) -> Any:
            (gradient,) = original(self, outputs, generator.manual_seed(0))
            (output,) = (o.detach() for o in outputs)
            drawn.append(target_of(type(self).__name__, output, gradient))
            return (gradient,)

        monkeypatch.setattr(kind, "sample", sample)
    return drawn


def target_of(likelihood: str, output: Tensor, gradient: Tensor) -> Tensor:
    """The target at which the gradient of one term of the loss is this: `p - y`, or `2 (f - y)` of squares."""
    if likelihood == "Categorical":
        return gradient.argmin(1).flatten()
    target = output - gradient / 2 if likelihood == "Gaussian" else (output.sigmoid() - gradient).round()
    return target.flatten(0, -2)


def assert_factors_agree(optimizer: KFACOptimizer, operator: Any) -> None:
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    inputs, gradients = state["input_covariances"], state["gradient_covariances"]
    assert optimizer.factors().keys() == inputs.keys() == gradients.keys()
    for name, (a, g) in optimizer.factors().items():
        assert_same(a, inputs[name][None], rtol=TOLERANCE)
        assert_same(g, gradients[name][None], rtol=TOLERANCE)


each_kind = pytest.mark.parametrize("kind", ESTIMATES)


SINGLE = [
    pytest.param(problem, sharing, kind, id=f"{name}, {sharing.value}, {kind}")
    for name, problem in {**PROBLEMS, **POSITIONS}.items()
    for sharing in WeightSharing
    for kind in ESTIMATES
    if not (name in POSITIONS and sharing is WeightSharing.REDUCE and kind == "type-2")
]


@pytest.mark.parametrize(("problem", "sharing", "kind"), SINGLE)
def test_the_factors_of_a_batch_agree(problem: Problem, sharing: WeightSharing, kind: str, draws: list[Tensor]) -> None:
    model = problem.build()
    batches = [problem.batch(model, 6)]
    optimizer = ours(problem, model, batches, kind, weight_sharing=sharing)
    assert_factors_agree(optimizer, theirs(problem, model, batches, kind, sharing, draws))


@each_kind
@pytest.mark.parametrize("problem", MEANS.values(), ids=MEANS)
def test_batches_of_several_sizes_weigh_alike(problem: Problem, kind: str, draws: list[Tensor]) -> None:
    model = problem.build()
    batches = [problem.batch(model, size) for size in (2, 7, 4)]
    optimizer = ours(problem, model, batches, kind)
    assert_factors_agree(optimizer, theirs(problem, model, batches, kind, WeightSharing.EXPAND, draws))


@each_kind
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_corrected_eigenvalues_agree(problem: Problem, kind: str, draws: list[Tensor]) -> None:
    """As the matrices `U diag(S) Uᵀ`, in which the order and the signs of eigenvectors do not matter."""
    model = problem.build()
    batches = [problem.batch(model, 6)]
    optimizer = ours(problem, model, batches, kind, steps=2, inverse=EKFAC())
    operator = theirs(
        problem, model, batches, kind, WeightSharing.EXPAND, draws, operator=curvlinops.EKFACLinearOperator
    )
    dense = operator @ torch.eye(sum(param.numel() for param in model.parameters()))
    start = 0
    for block in optimizer._binding.coverage.blocks:
        state = block.state
        basis = oracles.kronecker(state.a.basis, state.g.basis)[0]
        mine = basis @ torch.diag(state.second_moments.flatten()) @ basis.mT
        layer = model.get_submodule(block.name)
        order, size = places(layer), mine.shape[0]
        assert_same(mine[order][:, order], dense[start : start + size, start : start + size], rtol=TOLERANCE)
        start += size
    assert start == len(dense)


def places(layer: nn.Module) -> Tensor:
    """Where the elements of weight and bias, in this order, stand in the rows of a matrix with the bias as a column."""
    outputs = layer.weight.shape[0]
    columns = layer.weight[0].numel() + (layer.bias is not None)
    index = torch.arange(outputs * columns).view(outputs, columns)
    if layer.bias is None:
        return index.flatten()
    return torch.cat([index[:, :-1].flatten(), index[:, -1]])
