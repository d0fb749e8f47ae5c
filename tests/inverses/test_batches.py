"""Equal shapes are refreshed together, and no more of them at a time than memory is set aside for."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.operators import Operators
from helpers.plain import assert_identical
from helpers.states import CPU, add_moments, measured_state, spec

from kfac_optim import EKFAC, Cholesky, Eigen, Inverse, InverseAndRoot, LowRank, NewtonSchulz, SumOfTerms
from kfac_optim.factors.factor import Elsewhere
from kfac_optim.factors.second_moments import on_host
from kfac_optim.inverses import batching
from kfac_optim.inverses.batching import batches
from kfac_optim.inverses.damped.base import damped_factors, damped_jobs
from kfac_optim.specs import Structure

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
    jobs = damped_jobs(states, [0.1] * len(states))
    monkeypatch.setattr(batching, "_AT_ONCE", 3 * 4**2)
    found = [[job.factor for job in batch] for _, batch in batches(jobs)]
    assert [[f.groups for f in batch] for batch in found if batch[0].dim == 4] == [[2, 1], [5], [1, 1], [3]]
    # 3×3 matrices: five of them are 45 elements
    assert [[f.groups for f in batch] for batch in found if batch[0].dim == 3] == [[2, 1], [5], [1, 1, 3]]


@pytest.mark.parametrize(
    "structure",
    [(Structure.DENSE, Structure.DENSE), (Structure.DENSE, Structure.IDENTITY), (Structure.DIAGONAL, Structure.DENSE)],
    ids=["dense", "one side", "diagonal"],
)
def test_blocks_of_equal_shapes_share_lambda_each_among_its_own_factors(
    structure: tuple[Structure, Structure],
) -> None:
    inverse = Cholesky()
    states = [measured_state(inverse, 4, 3, groups, structure) for groups in (1, 2, 1, 1)]
    states[2].pair.a.elsewhere = Elsewhere(trace=torch.tensor([5.0]), mass=torch.tensor(1.0))  # solved for elsewhere
    for _ in range(2):  # one input for both groups
        shared = replace(spec(4, 3, 2, structure), shared_input=True)
        states.append(inverse.init(shared, dtype=torch.float64, device=CPU))
        add_moments(states[-1].pair)
        states[-1].fold(1, 1.0)
    dampings = [0.1, 0.1, 0.1, 0.3, 0.1, 0.1]
    together = list(damped_factors(states, dampings))
    alone = [found for each in zip(states, dampings, strict=True) for found in damped_factors(*([one] for one in each))]
    assert [found[:3] for found in together] == [found[:3] for found in alone]
    assert states[2].pair.a not in [factor for _, _, factor, _ in together]
    assert_identical([found[3] for found in together], [found[3] for found in alone])


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(1, sketch=None), NewtonSchulz(), Eigen(), InverseAndRoot()])
@pytest.mark.parametrize(("groups", "there"), [(2, False), (1, True), (2, True)])
def test_one_of_a_batch_that_fails_keeps_its_last_result(
    inverse: Inverse[Any], groups: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    states = [measured_state(inverse, 4, 3, groups=groups) for _ in range(3)]
    inverse.refresh(states, [0.1] * 3)
    before = copy.deepcopy(states)
    for state in states:
        add_moments(state.pair, 20)
        state.fold(1, 0.5)
    expected = copy.deepcopy(states)
    inverse.refresh(expected[::2], [0.1] * 2)
    states[1].pair.g.packed[-1] = torch.nan
    for failures in (1, 2):
        inverse.refresh(states, [0.1] * 3)
        assert [state.failed_in_a_row.tolist() for state in states] == [[0, 0], [0, failures], [0, 0]]
        assert [int(state.failed) for state in states] == [0, failures, 0]
        assert bool(states[1].condition.isfinite().all())
        if failures == 1:
            for ours, theirs in zip(states[::2], expected[::2], strict=True):
                assert_identical(ours.computed(), theirs.computed())
    sides = states[1].g._asdict(), before[1].g._asdict()
    assert_identical(*({name: tensor[-1] for name, tensor in side.items()} for side in sides))
    states[1].pair.g.packed[-1] = states[0].pair.g.packed[-1]
    inverse.refresh(states, [0.1] * 3)
    assert [state.failed_in_a_row.tolist() for state in states] == [[0, 0]] * 3


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(1, sketch=None), InverseAndRoot()])
@pytest.mark.parametrize("there", [False, True])
def test_one_more_equal_block_takes_few_more_operators_of_a_refresh(
    inverse: Inverse[Any], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    counts = []
    for blocks in (2, 12):
        states = [measured_state(inverse, 4, 3, groups=1) for _ in range(blocks)]
        with Operators() as operators:
            inverse.refresh(states, [0.1] * blocks)
        counts.append(operators.count)
    assert counts[1] <= counts[0] + 30  # three for each


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(1, sketch=None), NewtonSchulz(), InverseAndRoot()])
@pytest.mark.parametrize("there", [False, True])
def test_a_block_without_a_sample_keeps_what_it_has(
    inverse: Inverse[Any], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    blank = inverse.init(spec(4, 3, 1, (Structure.DENSE, Structure.DENSE)), dtype=torch.float64, device=CPU)
    before = copy.deepcopy(blank.computed())
    inverse.refresh([measured_state(inverse, 4, 3, groups=1), blank], [0.1] * 2)
    assert_identical(blank.computed(), before)
