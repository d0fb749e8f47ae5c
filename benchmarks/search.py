"""Settings to try: seeded quasi-random points of a log-uniform box, equally many for every optimizer, as in AlgoPerf.

The first points of a longer list are those of a shorter one, so that a search can be extended. (Dahl et al. 2023,
"Benchmarking Neural Network Training Algorithms", arXiv 2306.07179, section 4.4.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.quasirandom import SobolEngine

Setting = dict[str, float]
"""Holds a value for every name of a box."""


@dataclass(frozen=True, slots=True)
class Range:
    """Goes from ``low`` to ``high``, both above 0; its logarithm is what is uniform."""

    low: float
    high: float

    def at(self, place: float) -> float:
        """Return the value at ``place`` in [0, 1]."""
        return self.low * math.pow(self.high / self.low, place)

    def scaled(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)


Box = Mapping[str, Range]


def points(box: Box, count: int, seed: int, axes: Sequence[str] | None = None) -> list[Setting]:
    """Return ``count`` points of ``box``: a Sobol sequence, scrambled by ``seed``.

    Args:
        box: what is searched.
        count: how many.
        seed: the seed of the scrambling.
        axes: the names of the sequence's axes, all those of ``box`` among them, which it is by default. Boxes with the
            same axes have the same places along all that they share.
    """
    axes = list(box) if axes is None else axes
    engine = SobolEngine(len(axes), scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    places = engine.draw(count).tolist()  # [count, axes]
    found = (dict(zip(axes, point, strict=True)) for point in places)
    return [{name: span.at(point[name]) for name, span in box.items()} for point in found]
