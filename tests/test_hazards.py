"""Hazards of training loops: whatever the loop does, factors and steps are those of an equivalent plain run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.hazards import HAZARDS, Hazard
from torch import Tensor


def leaves(structure: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor, number or None of nested dicts and sequences, with where it is."""
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from leaves(value, f"{at}[{key!r}]")
    elif isinstance(structure, (list, tuple)):
        for i, value in enumerate(structure):
            yield from leaves(value, f"{at}[{i}]")
    else:
        yield at, structure


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of checkpointing in evaluation
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: f"{hazard.source}-{hazard.name}")
def test_a_hazard_leaves_the_numbers_of_the_plain_run(hazard: Hazard) -> None:
    ours, plain = (dict(leaves(side)) for side in hazard.run())
    assert ours.keys() == plain.keys()
    assert any(isinstance(value, Tensor) and value.count_nonzero() for value in plain.values()), "nothing to compare"
    for at, expected in plain.items():
        actual = ours[at]
        assert type(actual) is type(expected), at
        if not isinstance(expected, Tensor):
            assert actual == expected, at
            continue
        assert actual.dtype == expected.dtype, at
        assert expected.isfinite().all(), at
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=hazard.rtol * largest, msg=lambda text, at=at: f"{at}: {text}"
        )


def test_each_hazard_has_a_name_of_its_own_and_they_are_this_many() -> None:
    assert len({hazard.name for hazard in HAZARDS}) == len(HAZARDS) == 244
