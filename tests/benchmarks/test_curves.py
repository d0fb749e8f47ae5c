"""CURVES: splines against scipy's, the pen against dots drawn one by one, the data set against its description."""

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from benchmarks import curves


def random_points(images: int) -> Tensor:
    """Uniform in [2, 26]², each x at least 2 above the last; ``[images, 3, 2]``."""
    points = torch.empty(4 * images, 3, 2, dtype=torch.float64).uniform_(2, 26)
    points[..., 0] = points[..., 0].sort().values
    return points[(points[..., 0].diff() >= 2).all(-1)][:images]


def natural(points: Tensor) -> list[CubicSpline]:
    return [CubicSpline(xy[:, 0], xy[:, 1], bc_type="natural") for xy in points.numpy()]


def test_curves_are_natural_cubic_splines() -> None:
    points = random_points(200)
    x = points[:, :1, 0] + (points[:, 2:, 0] - points[:, :1, 0]) * torch.linspace(0, 1, 101, dtype=torch.float64)
    expected = [torch.from_numpy(spline(each.numpy())) for spline, each in zip(natural(points), x, strict=True)]
    torch.testing.assert_close(curves.spline(points, x), torch.stack(expected), rtol=0, atol=1e-12)


def test_the_pen_stops_at_equal_arc_length_from_end_to_end() -> None:
    points = random_points(20)
    places = curves.pen_positions(points)
    assert places.shape == (20, 60, 2)
    torch.testing.assert_close(places[:, [0, -1]], points[:, [0, 2]])
    for spline, stops in zip(natural(points), places.numpy(), strict=True):
        np.testing.assert_allclose(spline(stops[:, 0]), stops[:, 1], atol=1e-9)
        fine = np.linspace(stops[0, 0], stops[-1, 0], 20_001)
        steps = np.hypot(np.diff(fine), np.diff(spline(fine)))
        lengths = np.interp(stops[:, 0], fine, np.concatenate([[0], steps.cumsum()]))
        np.testing.assert_allclose(np.diff(lengths), lengths[-1] / 59, rtol=5e-3)


def test_a_dot_is_a_gaussian_of_its_ink_and_dots_add_up_to_at_most_one() -> None:
    points = random_points(3)
    expected = torch.zeros(3, 1, 28, 28, dtype=torch.float64)
    for image, stops in enumerate(curves.pen_positions(points).tolist()):
        for row in range(28):
            for column in range(28):
                squares = ((column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2 for x, y in stops)
                expected[image, 0, row, column] = sum(0.33 * math.exp(-2 * square) for square in squares)
    assert expected.max() > 1
    torch.testing.assert_close(curves.draw(points), expected.clamp(max=1).float(), rtol=0, atol=1e-5)


def test_the_data_set_has_the_shape_range_and_points_of_its_description() -> None:
    split = curves.curves(5000, seed=0)
    assert split.inputs.shape == (5000, 1, 28, 28)
    assert split.inputs.dtype == torch.float32
    assert split.inputs.min() == 0
    assert split.inputs.max() == 1
    assert split.targets.shape == (5000, 3, 2)
    assert 2 <= split.targets.min() < 2.1
    assert 25.9 < split.targets.max() <= 26
    assert split.targets[..., 0].diff().min() >= 2 - 1e-5
    torch.testing.assert_close(curves.draw(split.targets[:8].double()), split.inputs[:8], rtol=0, atol=1e-4)


def test_no_curve_leaves_the_image() -> None:
    def heights(points: Tensor) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
        return np.stack([spline(np.linspace(*spline.x[[0, 2]], 301)) for spline in natural(points)])

    kept = heights(curves.curves(500, seed=0).targets.double())
    assert kept.min() >= -1e-3
    assert kept.max() <= 28 + 1e-3
    unchecked = heights(random_points(500))
    assert unchecked.min() < -1
    assert unchecked.max() > 29


def test_the_variance_of_an_image_is_that_of_the_description() -> None:
    """Squared error of the mean image: where a network stands that ignores its input. Most are near 17."""
    every_curve = curves.draw(random_points(4000)).flatten(1)
    assert every_curve.var(0).sum() == pytest.approx(17.1, abs=0.3)
    in_sight = curves.curves(4000, seed=0).inputs.flatten(1)
    assert in_sight.var(0).sum() == pytest.approx(17.8, abs=0.3)


def test_images_depend_on_the_seed_alone() -> None:
    first = curves.curves(10, seed=1)
    torch.manual_seed(123)
    again, more, other = curves.curves(10, seed=1), curves.curves(20, seed=1), curves.curves(10, seed=2)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.inputs, more.inputs[:10])
    assert not torch.equal(first.inputs, other.inputs)
