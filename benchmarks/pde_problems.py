"""What physics-informed networks are trained on: equations with a known solution, their points and their networks.

The points, the networks and the solutions are those of Dangel, Müller & Zeinhofer 2024, "Kronecker-Factored Approximate
Curvature for Physics-Informed Neural Networks" (arXiv 2405.15603), where points are drawn once. Their losses are halves
of those here. All is in float64, and of a point in time and space the time comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.models import mlp

POINTS_SEED = 0
_DIFFUSIVITY = 1 / 4

Function = Callable[[Tensor], Tensor]
"""Maps ``[points, dimensions] → [points, 1]``: a network, or a solution."""


@dataclass(frozen=True, slots=True)
class Points:
    """Says where a network is trained and judged, ``[points, dimensions]`` each.

    Attributes:
        interior: the points where the equation is to hold.
        boundary: those where the solution is given: on the sides of the domain, and at the start where there is a time.
        test: those where the error is measured, inside the domain.
    """

    interior: Tensor
    boundary: Tensor
    test: Tensor


@dataclass(frozen=True, slots=True)
class PDEProblem:
    """Describes an equation on the unit cube, and how a network is trained on it.

    Attributes:
        title: the equation and its solution, in words.
        widths: the widths of a tanh network, from the dimensions to 1.
        residual: ``(function, points) → [points, 1]``: zero for the solution.
        draw_boundary: ``(points, dimensions) → [points, dimensions]``.
        interior: how many points there are inside.
        boundary: how many points there are on the boundary.
        seconds: the seconds of the processor that a run has.
        weight: the weight of the boundary's part of the loss.
    """

    title: str
    widths: tuple[int, ...]
    solution: Function
    residual: Callable[[Function, Tensor], Tensor]
    draw_boundary: Callable[[int, int], Tensor]
    interior: int
    boundary: int
    seconds: float
    weight: float = 1.0

    @property
    def dimensions(self) -> int:
        return self.widths[0]

    def quick(self) -> PDEProblem:
        return replace(self, interior=self.interior // 30, boundary=self.boundary // 10, seconds=0.03)

    def network(self) -> nn.Module:
        """Return a new one, with random weights."""
        return mlp(self.widths, nn.Tanh)[1:].double()  # points are flat already

    def points(self) -> Points:
        """Return the same ones at every call; ten test points for each inside."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(POINTS_SEED)
            interior = _uniform(self.interior, self.dimensions)
            boundary = self.draw_boundary(self.boundary, self.dimensions)
            return Points(interior, boundary, _uniform(10 * self.interior, self.dimensions))

    def loss(self, function: Function, points: Points, criterion: nn.Module) -> Tensor:
        """Return what is trained, ``[]``: the mean square of the residual, and that of the error at the boundary."""
        residual = self.residual(function, points.interior)
        inside: Tensor = criterion(residual, torch.zeros_like(residual))
        boundary: Tensor = criterion(function(points.boundary), self.solution(points.boundary))
        return inside + self.weight * boundary

    @torch.no_grad()
    def error(self, function: Function, points: Points) -> float:
        """Return how far ``function`` is from the solution, absolutely: the root mean square over the test points."""
        return (function(points.test) - self.solution(points.test)).square().mean().sqrt().item()


def _gradient(values: Tensor, points: Tensor) -> Tensor:
    """Differentiate the value at each point, ``[points, dimensions]``; it can be differentiated again."""
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def _second(gradient: Tensor, points: Tensor, dimension: int) -> Tensor:
    """Differentiate twice with respect to one dimension, ``[points, 1]``."""
    return _gradient(gradient[:, dimension], points)[:, dimension : dimension + 1]


def poisson(source: Function) -> Callable[[Function, Tensor], Tensor]:
    """Return the residual of −Δu = ``source``."""

    def residual(function: Function, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        gradient = _gradient(function(points), points)
        laplacian = sum(_second(gradient, points, dimension) for dimension in range(points.shape[1]))
        return laplacian + source(points.detach())

    return residual


def heat(function: Function, points: Tensor) -> Tensor:
    """Return the residual of u_t = ¼ u_xx."""
    points = points.detach().requires_grad_()
    gradient = _gradient(function(points), points)
    return gradient[:, :1] - _DIFFUSIVITY * _second(gradient, points, 1)


def _sine_product(points: Tensor) -> Tensor:
    return torch.sin(math.pi * points).prod(1, keepdim=True)


def _cosine_sum(points: Tensor) -> Tensor:
    return torch.cos(math.pi * points).sum(1, keepdim=True)


def _decaying_sine(points: Tensor) -> Tensor:
    time, place = points[:, :1], points[:, 1:]
    return torch.exp(-_DIFFUSIVITY * math.pi**2 * time) * torch.sin(math.pi * place)


def _uniform(count: int, dimensions: int) -> Tensor:
    return torch.rand(count, dimensions, dtype=torch.float64)


def sides(count: int, dimensions: int) -> Tensor:
    """Draw points on the surface of the unit cube, each on a side drawn for it."""
    points = _uniform(count, dimensions)
    points[torch.arange(count), torch.randint(dimensions, (count,))] = torch.randint(2, (count,)).double()
    return points


def sides_and_start(count: int, dimensions: int) -> Tensor:
    """Draw one half of the points on the sides of the cube, at times of their own, and the other half at time 0."""
    half = count // 2
    at_sides = torch.cat([_uniform(half, 1), sides(half, dimensions - 1)], dim=1)
    at_start = torch.cat([torch.zeros(count - half, 1).double(), _uniform(count - half, dimensions - 1)], dim=1)
    return torch.cat([at_sides, at_start])


_POISSON_2D = PDEProblem(
    title="Poisson in 2 dimensions, u = sin(πx₁) sin(πx₂)",
    widths=(2, 64, 1),
    solution=_sine_product,
    residual=poisson(lambda points: 2 * math.pi**2 * _sine_product(points)),
    draw_boundary=sides,
    interior=900,
    boundary=120,
    seconds=30,
)

PROBLEMS = {
    "poisson-2d": _POISSON_2D,
    "poisson-2d-deep": replace(_POISSON_2D, widths=(2, 64, 64, 48, 48, 1), seconds=90),
    "heat": PDEProblem(
        title="heat in 1 + 1 dimensions, u = exp(−π²t/4) sin(πx)",
        widths=(2, 64, 1),
        solution=_decaying_sine,
        residual=heat,
        draw_boundary=sides_and_start,
        interior=900,
        boundary=120,
        seconds=60,
    ),
    "poisson-5d": PDEProblem(
        title="Poisson in 5 dimensions, u = cos(πx₁) + … + cos(πx₅)",
        widths=(5, 64, 1),
        solution=_cosine_sum,
        residual=poisson(lambda points: math.pi**2 * _cosine_sum(points)),
        draw_boundary=sides,
        interior=3000,
        boundary=500,
        seconds=300,
    ),
}
