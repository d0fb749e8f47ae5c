"""A few cases of `python tests/fuzz.py` of each kind, in the quick run others than in the full one."""

import pytest
from fuzz import KINDS, attempt


@pytest.mark.parametrize(
    "kind", ["arguments", "batches", "orders"]
)  # checkpoints: tests/blocks/test_checkpoint_damage.py
def test_no_case_changes_anything_where_it_is_refused_fails_unclearly_or_leaves_what_is_not_finite(kind: str) -> None:
    for seed in range(1_000_000, 1_000_010):
        attempt(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_case_of_many_does(kind: str) -> None:
    for seed in range(2_000_000, 2_000_100):
        attempt(kind, seed)
