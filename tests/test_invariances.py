"""What must not change a step: how the same batch is written down, and in which coordinates a layer sees it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import PROBLEMS, Problem, problem_ids
from helpers.oracles import assert_same
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms, WeightSharing

pytestmark = pytest.mark.usefixtures("float64")

Batch = tuple[Tensor, Tensor]
STEPS, EXAMPLES = 3, 6


def batches(problem: Problem) -> list[Batch]:
    torch.manual_seed(5)
    return [problem.batch(EXAMPLES) for _ in range(STEPS)]


def train(problem: Problem, steps: Sequence[Sequence[Batch]], kl_clip: float | None) -> list[Tensor]:
    """Parameters after a step for each element of `steps`, which is a list of micro-batches."""
    torch.manual_seed(1)
    model = problem.build()
    optimizer = problem.optimizer(
        model, lr=0.3, momentum=0.9, damping=0.01, kl_clip=kl_clip, inverse_update_period=2, factor_decay=0.8
    )
    for micro_batches in steps:
        optimizer.zero_grad()
        for features, target in micro_batches:
            (problem.criterion(model(features), target) / len(micro_batches)).backward()
        optimizer.step()
        assert (optimizer.metrics()["trust_region_scale"] < 1) == (kl_clip is not None)
    return [param.detach() for param in model.parameters()]


def duplicated(batch: Batch) -> list[Batch]:
    return [tuple(torch.cat([part, part, part]) for part in batch)]


def interleaved(batch: Batch) -> list[Batch]:
    return [tuple(part.repeat_interleave(2, 0) for part in batch)]


def permuted(batch: Batch) -> list[Batch]:
    order = torch.randperm(EXAMPLES)
    return [tuple(part[order] for part in batch)]


def halved(batch: Batch) -> list[Batch]:
    return list(zip(*(part.chunk(2) for part in batch), strict=True))


def one_by_one(batch: Batch) -> list[Batch]:
    return list(zip(*(part.split(1) for part in batch), strict=True))


@pytest.mark.parametrize("kl_clip", [None, 1e-5], ids=["free", "clipped"])
@pytest.mark.parametrize("rewrite", [duplicated, interleaved, permuted, halved, one_by_one])
@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_steps_do_not_depend_on_how_a_batch_is_written_down(
    problem: Problem, rewrite: Callable[[Batch], list[Batch]], kl_clip: float | None
) -> None:
    data = batches(problem)
    assert_same(
        train(problem, [rewrite(batch) for batch in data], kl_clip),
        train(problem, [[batch] for batch in data], kl_clip),
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_another_batch_gives_another_step(problem: Problem) -> None:
    data = batches(problem)
    steps = [[batch] for batch in data]
    steps[0] = [(torch.cat([data[0][0], data[1][0]]), torch.cat([data[0][1], data[1][1]]))]
    pairs = zip(train(problem, steps, None), train(problem, [[batch] for batch in data], None), strict=True)
    assert any(not torch.allclose(left, right, rtol=1e-3) for left, right in pairs)


# -- coordinates -------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    """A fixed invertible map of the features, `T x + c`, along one axis."""

    def __init__(self, matrix: Tensor, offset: Tensor, axis: int) -> None:
        super().__init__()
        self.matrix, self.offset, self.axis = matrix, offset, axis

    def forward(self, features: Tensor) -> Tensor:
        return (features.movedim(self.axis, -1) @ self.matrix.mT + self.offset).movedim(-1, self.axis)


def random_map(dim: int) -> Tensor:
    """Invertible, far from orthogonal."""
    basis = torch.linalg.qr(torch.randn(dim, dim)).Q
    return basis @ torch.diag(torch.logspace(-0.5, 0.5, dim)) @ torch.linalg.qr(torch.randn(dim, dim)).Q


def undo(layer: nn.Module, matrix: Tensor, offset: Tensor) -> None:
    """Change `layer` so that after the map it computes what it computed before."""
    with torch.no_grad():
        inverse = torch.linalg.inv(matrix)
        weight = torch.einsum("oi...,ij->oj...", layer.weight, inverse)
        layer.weight.copy_(weight)
        if offset.any():
            layer.bias -= weight @ offset


def mlp() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]


def conv_net() -> list[nn.Module]:
    return [nn.Conv2d(2, 2, 2, stride=2, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 2), nn.Flatten(), nn.Linear(4, 2)]


# layers, input shape of an example, position of the layer whose input changes, axis, dimension, offset allowed
COORDINATES = {
    "input of an mlp": (mlp, (3,), 0, -1, 3, True),
    "hidden layer of an mlp": (mlp, (3,), 2, -1, 4, True),
    "input of an mlp over sequences": (mlp, (5, 3), 0, -1, 3, True),
    # zero padding admits no offset
    "channels of a padded convolution": (conv_net, (2, 4, 4), 0, 1, 2, False),
    "channels of a hidden convolution": (conv_net, (2, 4, 4), 2, 1, 2, False),
    "features after a convolution": (conv_net, (2, 4, 4), 4, -1, 4, True),
}


@pytest.mark.parametrize("kl_clip", [None, 1e-4], ids=["free", "clipped"])
@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize(
    ("build", "shape", "position", "axis", "dim", "shifted"),
    COORDINATES.values(),
    ids=[name.replace(" ", "-") for name in COORDINATES],
)
def test_without_damping_the_function_after_a_step_does_not_depend_on_the_coordinates_of_a_layers_input(
    build: Callable[[], list[nn.Module]],
    shape: tuple[int, ...],
    position: int,
    axis: int,
    dim: int,
    shifted: bool,
    sharing: WeightSharing,
    kl_clip: float | None,
) -> None:
    matrix, offset = random_map(dim), torch.randn(dim) if shifted else torch.zeros(dim)
    data = [torch.randn(40, *shape) for _ in range(STEPS)]
    held_out = torch.randn(7, *shape)

    def outcome(changed: bool, **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        layers = build()
        if changed:
            undo(layers[position], matrix, offset)
            layers.insert(position, Affine(matrix, offset, axis))
        model = nn.Sequential(*layers)
        optimizer = KFACOptimizer(
            model,
            lr=0.02,
            weight_sharing=sharing,
            loss_terms=LossTerms.ELEMENTS,
            factor_update_period=1,
            inverse_update_period=1,
            **options,
        )
        outputs = [model(held_out).detach()]
        for features in data:
            optimizer.zero_grad()
            output = model(features)
            F.mse_loss(output, torch.sin(features.flatten(output.dim() - 1)[..., :2] * 3)).backward()
            optimizer.step()
            outputs.append(model(held_out).detach())
        return outputs

    exact = {"damping": 1e-22, "kl_clip": kl_clip}
    before, *after = outcome(False, **exact)
    assert all(float((one - two).abs().max()) > 1e-3 for one, two in itertools.pairwise([before, *after]))
    assert_same(outcome(True, **exact), [before, *after], rtol=1e-6)
    # The control: with damping, which prefers the coordinates as they are, the functions part.
    damped = {"damping": 1.0, "kl_clip": kl_clip}
    assert float((outcome(True, **damped)[-1] - outcome(False, **damped)[-1]).abs().max()) > 1e-4
