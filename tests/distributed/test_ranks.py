"""The harness itself: what goes wrong in a child is shown, and no child outlives it."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, Ranks


def total(rank: int, start: int) -> int:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return int(value)


def one_raises_and_one_dies(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    raise ValueError("the reason")


def one_hangs(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_every_rank_runs_and_answers_in_processes_that_stay(two_ranks: Ranks) -> None:
    assert two_ranks.run(total, 10) == [21, 21]
    pids = two_ranks.pids
    assert two_ranks.run(total, 0) == [1, 1]
    assert two_ranks.pids == pids


def test_what_goes_wrong_is_told_and_all_children_are_killed_and_replaced(two_ranks: Ranks) -> None:
    for function, told, timeout in (
        (one_raises_and_one_dies, ("rank 0: died, exit code 7", "ValueError: the reason"), 20.0),
        (one_hangs, ("rank 0: None", "rank 1: no answer after 0.5 s"), 0.5),
    ):
        assert two_ranks.run(total, 0) == [1, 1]
        pids = two_ranks.pids
        start = time.monotonic()
        with pytest.raises(RankError) as error:
            two_ranks.run(function, timeout=timeout)
        assert time.monotonic() - start < 20
        assert all(each in str(error.value) for each in told)
        assert not two_ranks.pids
        assert not any(map(is_running, pids))
