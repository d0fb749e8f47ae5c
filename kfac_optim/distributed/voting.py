"""What all ranks must know of a step before they take it: one small all-reduce."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from kfac_optim.distributed.comm import Communicator

# In the place of an infinite number of terms.
_UNBOUNDED = 2**62


class Ballot(NamedTuple):
    """What one rank says, and what comes of it: of all numbers the largest."""

    finite: bool
    """Whether every gradient is."""
    summed: float
    """`LossCount.summed`."""
    model: int
    """A number below `2**62` that differs where what the ranks train differs; -1 if they do not agree on it."""
    marks: tuple[int, ...]
    """Of what both sides know the meaning of."""


def vote(communicator: Communicator, ballot: Ballot) -> Ballot:
    """The same on all ranks.

    Raises:
        CollectiveError: some rank never came.
    """
    summed = _UNBOUNDED if math.isinf(ballot.summed) else int(ballot.summed)
    words = [int(not ballot.finite), summed, ballot.model, -ballot.model, *ballot.marks]
    mine = torch.tensor(words, dtype=torch.int64, device=communicator.device)
    unfinished, summed, most, least, *marks = _largest(communicator, mine)
    return Ballot(
        finite=not unfinished,
        summed=math.inf if summed == _UNBOUNDED else summed,
        model=most if most == -least else -1,
        marks=tuple(marks),
    )


def largest(communicator: Communicator, numbers: Sequence[int], name: str, layers: Sequence[str]) -> list[int]:
    """Of each number, the largest on any rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=communicator.device)
    return _largest(communicator, mine, name, layers)


def _largest(
    communicator: Communicator, mine: torch.Tensor, name: str = "votes", layers: Sequence[str] = ()
) -> list[int]:
    result: list[int] = communicator.all_reduce(name, mine, dist.ReduceOp.MAX, layers).wait().tolist()
    return result
