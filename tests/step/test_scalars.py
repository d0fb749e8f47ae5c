"""Step sizes are computed on the host by the formulas that accelerators compute them by."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kfac_optim.step.scalars import (
    bounded,
    chosen,
    exponential,
    finite,
    larger,
    quotient,
    root,
    scalars,
    scalars_beside,
    total,
    vector,
)
from kfac_optim.step.trust_region import follow, momentum_scale, shortened, slope_ratio, trust_region_scale

ANY = st.floats(allow_nan=True, allow_infinity=True)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0)

FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "quotient": (2, quotient),
    "root": (1, root),
    "exponential": (1, lambda x: exponential(bounded(x, -50.0, 50.0))),
    "larger": (2, larger),
    "bounded": (1, lambda x: bounded(x, -1.0, 2.0)),
    "bounded below by a number": (2, lambda x, y: bounded(x, least=y)),
    "finite": (1, finite),
    "chosen": (3, lambda x, y, z: chosen(x > 0, y, z)),
    "total": (3, lambda *numbers: total(numbers)),
    "trust_region_scale": (2, lambda x, y: trust_region_scale(x, y, 3, 1e-3)),
    "momentum_scale": (1, lambda x: momentum_scale(x, 3, 1e-3)),
    "slope_ratio": (2, slope_ratio),
    "follow": (3, lambda x, y, z: follow(bounded(finite(x), -5.0, 5.0), slope_ratio(y, 1.0), z > 0)),
    "shortened": (2, lambda x, y: shortened(bounded(finite(x), 0.0, 1.0), y > 0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(numbers=st.tuples(ANY, ANY, ANY))
def test_the_host_computes_what_the_device_does(name: str, numbers: tuple[float, ...]) -> None:
    count, function = FUNCTIONS[name]
    on_host = function(*numbers[:count])
    on_device = function(*(torch.tensor(number, dtype=torch.float64) for number in numbers[:count]))
    assert isinstance(on_host, float)
    assert on_device.shape == ()
    assert on_host == pytest.approx(float(on_device), rel=1e-14, nan_ok=True)


@pytest.mark.parametrize("over", SPECIAL)
@pytest.mark.parametrize("under", SPECIAL)
def test_numbers_are_divided_as_tensors_are(over: float, under: float) -> None:
    expected = float(torch.tensor(over, dtype=torch.float64) / torch.tensor(under, dtype=torch.float64))
    assert quotient(over, under) == pytest.approx(expected, nan_ok=True)
    assert larger(over, under) == pytest.approx(
        float(torch.maximum(torch.tensor(over), torch.tensor(under))), nan_ok=True
    )


@given(numbers=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1))
@example(numbers=[1.0])
def test_numbers_become_tensors_and_come_back(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    assert scalars(values) == scalars_beside(values, 1.0) == numbers
    beside = scalars_beside(values, torch.zeros(()))
    assert all(isinstance(number, torch.Tensor) for number in beside)
    for again in (vector(numbers, values), vector(beside, values)):
        assert torch.equal(again, values)
        assert again.dtype == values.dtype
    assert vector(list(values.double().unbind()), values).dtype == values.dtype
    assert torch.equal(vector([True, 0.5], values), torch.tensor([1.0, 0.5]))
    broken = [math.nan, math.inf, -math.inf, 2.0]
    for kind in (broken, list(torch.tensor(broken).unbind())):
        assert torch.equal(vector(kind, values), torch.tensor([0.0, 0.0, 0.0, 2.0]))
