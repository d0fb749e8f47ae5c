"""A quadratic model along one or two directions: its minimum against brute force, and the ratio that judges it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.step.quadratic import change, minimum, reduction_ratio

pytestmark = pytest.mark.usefixtures("float64")

numbers = st.floats(-10, 10)


def model(entries: list[float], ridge: float) -> Tensor:
    """Positive definite, `[2, 2]`."""
    root = torch.tensor(entries).view(2, 2)
    return root @ root.T + ridge * torch.eye(2)


def brute_force(curvature: Tensor, slope: Tensor) -> Tensor:
    """The best of a grid of 41 × 41 points, refined around the best ten times as finely, again and again."""
    center, width = torch.zeros(2), torch.tensor(64.0)
    for _ in range(24):
        ticks = torch.linspace(-1, 1, 41) * width
        grid = torch.cartesian_prod(ticks, ticks) + center
        values = grid @ slope + ((grid @ curvature) * grid).sum(-1) / 2
        best = grid[values.argmin()]
        # A minimum at the rim lies further out.
        width = width * 2 if ((best - center).abs() >= width * 0.99).any() else width / 3
        center = best
    return center


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), numbers, numbers)
def test_two_directions_are_minimised_along_as_brute_force_finds(entries: list[float], one: float, two: float) -> None:
    curvature, slope = model(entries, 0.5), torch.tensor([one, two])
    weights = minimum(curvature, slope)
    torch.testing.assert_close(weights, -torch.linalg.solve(curvature, slope), rtol=1e-9, atol=1e-12)
    found = brute_force(curvature, slope)
    assert float(change(curvature, slope, weights)) <= float(change(curvature, slope, found)) + 1e-9
    torch.testing.assert_close(weights, found, rtol=1e-4, atol=1e-3)


@given(st.floats(1e-6, 1e6), numbers)
def test_one_direction_is_minimised_along_by_division(curvature: float, slope: float) -> None:
    weights = minimum(torch.tensor([[curvature]]), torch.tensor([slope]))
    assert float(weights) == pytest.approx(-slope / curvature, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(
    ("curvature", "slope", "expected"),
    [
        ([[2.0, 0.0], [0.0, 0.0]], [-4.0, 0.0], [2.0, 0.0]),  # no step before
        ([[2.0, 0.0], [0.0, 0.0]], [-4.0, -1.0], [2.0, 0.0]),  # not curved along the second
        ([[2.0, 4.0], [4.0, 8.0]], [-4.0, -8.0], [2.0, 0.0]),  # the same direction twice
        ([[0.0, 0.0], [0.0, 0.0]], [-4.0, -8.0], [0.0, 0.0]),
        ([[math.nan, 0.0], [0.0, 1.0]], [-4.0, -8.0], [0.0, 0.0]),
        ([[math.inf, 0.0], [0.0, 1.0]], [-4.0, -8.0], [0.0, 0.0]),
        ([[2.0, math.nan], [math.nan, 1.0]], [-4.0, -8.0], [2.0, 0.0]),
        ([[2.0, 0.0], [0.0, 1.0]], [math.nan, -8.0], [0.0, 0.0]),
        ([[-1.0, 0.0], [0.0, 1.0]], [-4.0, -8.0], [0.0, 0.0]),  # negative by rounding only: not trusted
    ],
)
def test_where_a_direction_says_nothing_it_gets_nothing(
    curvature: list[list[float]], slope: list[float], expected: list[float]
) -> None:
    assert minimum(torch.tensor(curvature), torch.tensor(slope)).tolist() == pytest.approx(expected)


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), numbers, numbers, st.floats(1e-8, 1e8))
def test_the_units_of_a_direction_do_not_matter(entries: list[float], one: float, two: float, unit: float) -> None:
    curvature, slope, scale = model(entries, 0.5), torch.tensor([one, two]), torch.tensor([1.0, unit])
    scaled = minimum(curvature * torch.outer(scale, scale), slope * scale)
    torch.testing.assert_close(scaled * scale, minimum(curvature, slope), rtol=1e-6, atol=1e-9)


def test_in_single_precision_nearly_equal_directions_are_one() -> None:
    step = 1e-6
    curvature = torch.tensor([[1.0, 1.0], [1.0, 1.0 + step]], dtype=torch.float32)
    weights = minimum(curvature, torch.tensor([-1.0, -1.0], dtype=torch.float32))
    assert weights.tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize(
    ("before", "after", "predicted", "ratio"),
    [
        (10.0, 8.0, -4.0, 0.5),
        (10.0, 12.0, -4.0, -0.5),
        (10.0, 12.0, 4.0, 0.5),  # predicted to rise, and it did
        (10.0, 8.0, 4.0, None),  # it fell all the same
        (10.0, math.nan, -4.0, -math.inf),
        (10.0, math.inf, -4.0, -math.inf),
        (10.0, 8.0, math.nan, -math.inf),
        (10.0, 10.0 - 1e-9, -1e-7, None),  # lost in the rounding of the loss
    ],
)
def test_the_reduction_ratio(before: float, after: float, predicted: float, ratio: float | None) -> None:
    assert reduction_ratio(before, after, predicted) == ratio
