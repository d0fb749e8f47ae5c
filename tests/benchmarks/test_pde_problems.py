"""Problems of physics-informed networks: their solutions solve them, and points lie where they belong."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.pde_problems import PROBLEMS, PDEProblem


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> PDEProblem:
    return PROBLEMS[request.param]


def test_the_solution_solves_the_equation(problem: PDEProblem) -> None:
    points = problem.points()
    residual = problem.residual(problem.solution, points.interior)
    assert residual.shape == (problem.interior, 1)
    assert residual.abs().max() < 1e-10
    assert problem.loss(problem.solution, points, nn.MSELoss()) < 1e-20
    assert problem.error(problem.solution, points) == 0


def test_another_function_does_not_solve_it(problem: PDEProblem) -> None:
    points = problem.points()

    def other(points: Tensor) -> Tensor:
        return problem.solution(points) + 0.25 * points.square().sum(1, keepdim=True)

    # Of the sum of squares Δ is twice the dimensions; the heat equation has 2t − ¼ · 2 of it.
    expected = 2 * points.interior[:, :1] - 0.5 if "heat" in problem.title else torch.tensor(2.0 * problem.dimensions)
    residual = problem.residual(other, points.interior)
    torch.testing.assert_close(residual, (0.25 * expected).double().expand_as(residual), rtol=0, atol=1e-10)


def test_the_loss_is_that_of_the_interior_and_the_weighted_boundary(problem: PDEProblem) -> None:
    points = problem.points()

    def raised(points: Tensor) -> Tensor:  # which is no fault in the interior
        return problem.solution(points) + 0.5

    for weight in (1.0, 3.0):
        loss = replace(problem, weight=weight).loss(raised, points, nn.MSELoss())
        assert loss.item() == pytest.approx(0.25 * weight)


def test_the_error_is_the_absolute_root_mean_square(problem: PDEProblem) -> None:
    points = problem.points()
    difference = torch.linspace(-1, 1, len(points.test), dtype=torch.float64).unsqueeze(1)
    error = problem.error(lambda points: problem.solution(points) + difference, points)
    assert error == pytest.approx(1 / math.sqrt(3), rel=1e-3)


def test_points_are_drawn_once_and_lie_in_the_domain(problem: PDEProblem) -> None:
    torch.manual_seed(1)
    points = problem.points()
    state = torch.get_rng_state()
    again = problem.points()
    assert torch.equal(torch.get_rng_state(), state), "weights are drawn from the same generator"
    for each, other in (
        (points.interior, again.interior),
        (points.boundary, again.boundary),
        (points.test, again.test),
    ):
        assert torch.equal(each, other)
        assert each.dtype == torch.float64
        assert each.shape[1] == problem.dimensions
        assert 0 <= each.min() < each.max() <= 1
    assert (len(points.interior), len(points.boundary)) == (problem.interior, problem.boundary)
    assert not torch.equal(points.interior, points.test[: problem.interior])


@pytest.mark.parametrize("name", ["poisson-2d", "poisson-5d"])
def test_points_at_the_boundary_are_on_all_sides(name: str) -> None:
    boundary = PROBLEMS[name].points().boundary
    for value in (0, 1):
        assert ((boundary == value).sum(0) > 0.5 * len(boundary) / (2 * boundary.shape[1])).all()
    assert ((boundary == 0) | (boundary == 1)).any(1).all()


def test_heat_is_given_at_the_ends_and_at_the_start_but_not_at_the_end_of_time() -> None:
    time, place = PROBLEMS["heat"].points().boundary.unbind(1)
    at_start = time == 0
    assert at_start.sum() == 60
    assert ((place[~at_start] == 0) | (place[~at_start] == 1)).all()
    assert (time < 1).all()


def test_networks_have_the_parameters_that_were_published() -> None:
    parameters = {
        name: sum(param.numel() for param in problem.network().parameters()) for name, problem in PROBLEMS.items()
    }
    assert parameters == {"poisson-2d": 257, "poisson-2d-deep": 9873, "heat": 257, "poisson-5d": 449}
    assert all(param.dtype == torch.float64 for param in PROBLEMS["heat"].network().parameters())
