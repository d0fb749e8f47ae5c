"""Settings to try lie in the box, spread over its logarithm, depend on the seed alone, and can be extended."""

import math

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search import Range, points

spans = st.tuples(st.floats(1e-6, 1e3), st.floats(1.0, 1e6)).map(lambda ends: Range(ends[0], ends[0] * ends[1]))
boxes = st.dictionaries(st.sampled_from(["lr", "damping", "kl_clip", "horizon"]), spans, min_size=1)


@given(box=boxes, count=st.integers(1, 40), seed=st.integers(0, 100))
def test_points_lie_in_the_box_and_the_first_of_many_are_those_of_few(
    box: dict[str, Range], count: int, seed: int
) -> None:
    found = points(box, count, seed)
    assert len(found) == count
    for point in found:
        assert list(point) == list(box)
        for name, value in point.items():
            assert box[name].low * (1 - 1e-12) <= value <= box[name].high * (1 + 1e-12)
    assert found == points(box, count + 7, seed)[:count]


def test_another_seed_gives_other_points() -> None:
    box = {"lr": Range(1e-4, 1.0)}
    assert points(box, 4, 0) != points(box, 4, 1)


def test_points_fill_the_box_evenly_in_the_logarithm() -> None:
    box = {"lr": Range(1e-4, 1.0), "damping": Range(1e-2, 1e2)}
    cells = {tuple(math.floor(math.log10(value)) for value in point.values()) for point in points(box, 64, seed=3)}
    assert cells == {(lr, damping) for lr in range(-4, 0) for damping in range(-2, 2)}, "4 in each on average"
