"""CURVES: images of smooth random curves, made from their published description (Hinton & Salakhutdinov 2006).

A curve is the natural cubic spline ``y(x)`` through three points, drawn by a soft pen. The whole data set has six
degrees of freedom, so an autoencoder with a code of six numbers could be perfect. It is not the file of the paper:
compare optimizers on it with each other, not with errors from the literature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.data import Split

SIDE = 28  # pixels; pixel i covers [i, i + 1]
_LOWEST, _HIGHEST = 2.0, 26.0  # coordinates of the three points
_GAP = 2.0  # from the x of one point to that of the next, at least
_DOTS = 60  # of the pen, at equal arc length
_PEN = 0.5  # standard deviation of a dot, pixels
_INK = 0.33  # at the centre of a dot
_TABLE = 512  # places along x at which the arc length of a curve is tabulated
_CHUNK = 4096  # images drawn at a time, to bound memory


def curves(images: int, seed: int) -> Split:
    """Draw curves, ``[images, 1, 28, 28]`` in [0, 1], with their points ``(x, y)`` as targets, ``[images, 3, 2]``.

    One seed always gives the same images.
    """
    generator = torch.Generator().manual_seed(seed)
    points = _draw_points(images, generator)
    pixels = torch.cat([draw(chunk) for chunk in torch.split(points, _CHUNK)])
    return Split(pixels, points.float())


def draw(points: Tensor) -> Tensor:
    """Draw the curves through ``[images, 3, 2]``, in float64, as pixels ``[images, 1, 28, 28]``, in float32."""
    x, y = pen_positions(points).float().unbind(-1)  # [images, dots] each
    centres = torch.arange(SIDE) + 0.5
    # A Gaussian dot is the product of its profile down the rows and its profile along the columns.
    rows, columns = (
        torch.exp(-0.5 * ((centres.view(-1, 1) - position.unsqueeze(1)) / _PEN).square()) for position in (y, x)
    )
    return (_INK * rows @ columns.mT).clamp(max=1).unsqueeze(1)


def pen_positions(points: Tensor) -> Tensor:
    """Return places ``(x, y)`` at equal arc length along the curves through ``[images, 3, 2]``, ends included.

    Returns:
        ``[images, 60, 2]``.
    """
    x = _table_of_x(points)
    y = spline(points, x)
    lengths = torch.hypot(x.diff(), y.diff()).cumsum(-1)
    lengths = torch.cat([torch.zeros_like(lengths[:, :1]), lengths], -1)  # [images, table]
    wanted = lengths[:, -1:] * torch.linspace(0, 1, _DOTS, dtype=points.dtype)
    after = torch.searchsorted(lengths, wanted).clamp(1, _TABLE - 1)
    before_length, after_length = lengths.gather(1, after - 1), lengths.gather(1, after)
    before_x, after_x = x.gather(1, after - 1), x.gather(1, after)
    part = (wanted - before_length) / (after_length - before_length)
    places = before_x + part * (after_x - before_x)
    return torch.stack([places, spline(points, places)], -1)


def spline(points: Tensor, x: Tensor) -> Tensor:
    """Return the natural cubic splines through ``[images, 3, 2]`` at ``x [images, places]``.

    With three points only the second derivative at the middle one is unknown: at the ends of a natural spline it is 0.
    """
    (x0, x1, x2), (y0, y1, y2) = (torch.split(axis, 1, dim=1) for axis in points.unbind(-1))  # [images, 1] each
    bend = 3 * ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / (x2 - x0)
    left = x <= x1
    width = torch.where(left, x1 - x0, x2 - x1)
    outer_y = torch.where(left, y0, y2)
    inner = torch.where(left, x - x0, x2 - x) / width  # 0 at the outer end of the piece, 1 at the middle point
    return outer_y + (y1 - outer_y) * inner + bend * width.square() * (inner**3 - inner) / 6


def _draw_points(images: int, generator: torch.Generator) -> Tensor:
    """Draw float64 points ``[images, 3, 2]``, uniform among those that keep their distance and their curve in sight."""
    kept = torch.empty(0, 3, 2, dtype=torch.float64)
    while len(kept) < images:
        points = torch.empty(_CHUNK, 3, 2, dtype=torch.float64).uniform_(_LOWEST, _HIGHEST, generator=generator)
        points[..., 0] = points[..., 0].sort().values
        y = spline(points, _table_of_x(points))
        apart = (points[..., 0].diff() >= _GAP).all(-1)
        in_sight = ((y >= 0) & (y <= SIDE)).all(-1)
        kept = torch.cat([kept, points[apart & in_sight]])
    return kept[:images]


def _table_of_x(points: Tensor) -> Tensor:
    """Return equally spaced places from the first to the last point, ``[images, table]``."""
    first, last = points[:, :1, 0], points[:, 2:, 0]
    return first + (last - first) * torch.linspace(0, 1, _TABLE, dtype=points.dtype)
