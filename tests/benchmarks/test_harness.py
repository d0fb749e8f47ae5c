"""Timing: contenders take turns within a block, and every block is run whole."""

from functools import partial
from itertools import groupby

import pytest
import torch

from benchmarks.harness import Contender, time_interleaved

CPU = torch.device("cpu")


@pytest.mark.parametrize(("blocks", "rounds"), [((1,), 2), ((3, 8), 1), ((40, 7), 3), ((100, 1, 16), 2)])
def test_every_round_runs_every_block_whole(blocks: tuple[int, ...], rounds: int) -> None:
    steps: list[int] = []
    told: list[int] = []
    contenders = [Contender(str(number), partial(steps.append, number), block) for number, block in enumerate(blocks)]
    seconds = time_interleaved(contenders, rounds, CPU, told.append)
    assert [steps.count(number) for number in range(len(blocks))] == [block * rounds for block in blocks]
    assert sum(told) == len(steps)
    assert {name: len(each) for name, each in seconds.items()} == {str(n): rounds for n in range(len(blocks))}


def test_contenders_take_turns_within_a_block() -> None:
    steps: list[str] = []
    contenders = [Contender(name, partial(steps.append, name), block) for name, block in (("a", 80), ("b", 16))]
    time_interleaved(contenders, 1, CPU, lambda _: None)
    runs = [(name, len(list(run))) for name, run in groupby(steps)]
    # Where the order turns round, one contender has two slices in a row.
    assert runs == [("a", 10), *[("b", 4), ("a", 20)] * 3, ("b", 4), ("a", 10)]


def test_seconds_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: clock[0])

    def take(seconds: float) -> None:
        clock[0] += seconds

    contenders = [Contender("slow", partial(take, 0.5), 20), Contender("fast", partial(take, 0.125), 3)]
    assert time_interleaved(contenders, 2, CPU, lambda _: None) == {"slow": [0.5, 0.5], "fast": [0.125, 0.125]}
