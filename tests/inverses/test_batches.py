"""Equal shapes are refreshed together, and no more of them at a time than memory is set aside for."""

import copy
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical
from helpers.states import measured_state

from kfac_optim import EKFAC, Cholesky, Eigen, Inverse, InverseAndRoot, LowRank, NewtonSchulz, SumOfTerms
from kfac_optim.inverses import batching
from kfac_optim.inverses.batching import batches
from kfac_optim.inverses.damped.base import damped_jobs

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    "inverse", [Cholesky(), LowRank(1), NewtonSchulz(), Eigen(), InverseAndRoot(), EKFAC(), SumOfTerms()]
)
@pytest.mark.parametrize("limit", [1, 40, 75])
def test_pieces_give_what_one_batch_gives(inverse: Inverse[Any], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = [measured_state(inverse, 4, 3, groups=1 + number % 3) for number in range(7)]
    in_pieces = copy.deepcopy(together)
    inverse.refresh(together, [0.1] * 7)
    monkeypatch.setattr(batching, "_AT_ONCE", limit)
    inverse.refresh(in_pieces, [0.1] * 7)
    for ours, theirs in zip(in_pieces, together, strict=True):
        assert ours.counted().keys() == theirs.counted().keys()
        assert_identical(ours.pair.tensors(), theirs.pair.tensors())
        for left, right in zip(ours.computed().values(), theirs.computed().values(), strict=True):
            torch.testing.assert_close(left, right)


def test_batches_hold_all_jobs_once_and_in_order_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    inverse = Cholesky()
    states = [measured_state(inverse, 4, 3, groups=groups) for groups in (2, 1, 5, 1, 1, 3)]
    jobs = [job for state in states for job in damped_jobs(state, 0.1)]
    monkeypatch.setattr(batching, "_AT_ONCE", 3 * 4**2)
    found = [[job.factor for job in batch] for _, batch in batches(jobs)]
    assert [[f.groups for f in batch] for batch in found if batch[0].dim == 4] == [[2, 1], [5], [1, 1], [3]]
    # 3×3 matrices: five of them are 45 elements
    assert [[f.groups for f in batch] for batch in found if batch[0].dim == 3] == [[2, 1], [5], [1, 1, 3]]
