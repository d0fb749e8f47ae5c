"""Measured rates: the same on all ranks, and those of what was measured."""

import time
from unittest import mock

import pytest
import torch
from helpers.ranks import Ranks

from kfac_optim.distributed import CostModel
from kfac_optim.distributed.planning import calibration
from kfac_optim.distributed.planning.calibration import measure_costs

# Seconds of a product, an inverse, a short and a long all-reduce, on each rank.
SECONDS = ((1e-3, 4e-3, 2e-4, 1e-2), (2e-3, 1e-3, 4e-4, 2e-3))


def measured(rank: int, told: bool) -> CostModel:
    if not told:
        return measure_costs()
    with mock.patch.object(calibration, "_seconds", side_effect=SECONDS[rank]):
        return measure_costs()


def test_the_slowest_rank_counts(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(measured, True)
    assert first == second
    assert first.flop_rate == pytest.approx(2 * 1024**3 / 2e-3)
    assert first.solver_rate == pytest.approx(1024**3 / 4e-3)
    assert first.latency == pytest.approx(4e-4 / 2)
    assert first.bandwidth == pytest.approx(2**24 / (1e-2 - 4e-4))


def test_ranks_agree_on_what_they_measure(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(measured, False)
    assert first == second
    assert first.flop_rate > 1e6
    assert first.bandwidth > 1e4


def refused(_: int) -> str:
    with pytest.raises(ValueError, match="several ranks") as error:
        measure_costs()
    return str(error.value)


def test_a_single_rank_has_nothing_to_measure(one_rank: Ranks) -> None:
    assert "got one of a single rank" in one_rank.run(refused)[0]


def test_the_seconds_are_those_of_one_call() -> None:
    assert 0.01 <= calibration._seconds(lambda: time.sleep(0.01), torch.device("cpu")) < 0.1
