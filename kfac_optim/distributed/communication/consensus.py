"""What all ranks must know of a step before they take it: one small all-reduce."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from kfac_optim.distributed.communication.collectives import Communicator

# Of a rank that has nothing to say, below all that others say.
_SILENT = -(2**63) + 1


class Ballot(NamedTuple):
    """Holds what one rank says, and what comes of it: of all numbers the largest."""

    finite: bool
    """Whether every gradient is finite."""
    model: int
    """A number below `2**62` that differs where what the ranks train differs; -1 if they do not agree on it."""
    numbers: int
    """A hash below `2**62` of the arguments and numbers of the optimizer; -1 if they do not agree on it."""
    norm: float | None
    """The norm of gradients that should be equal on all ranks, or of what was added to some; None where the rank does
    not compare them. What comes of the vote is the relative difference between those ranks that do."""
    edited: bool
    """Whether the program has changed, in place, gradients whose mean only some ranks have."""
    terms: tuple[int, int] | None
    """The least and the most that a rank has counted of terms of the loss; None where it has counted none."""
    tensors: int | None
    """A hash below `2**62` of arguments that are tensors; None where the rank has not looked; -1 if the ranks that have
    do not agree."""
    marks: tuple[int, ...]
    """Numbers whose meaning both sides know; of each the largest counts."""


def vote(communicator: Communicator, ballot: Ballot) -> Ballot:
    """Return the largest of what all ranks say, the same on all of them.

    Raises:
        CollectiveError: some rank never came.
    """
    twins = [signed for each in (ballot.model, ballot.numbers) for signed in (each, -each)]
    norm = None if ballot.norm is None else ordered(ballot.norm)
    least, most = ballot.terms or (-_SILENT, _SILENT)
    twins += [most, -least]
    twins += [signed for each in (norm, ballot.tensors) for signed in _twins(each)]
    words = [int(not ballot.finite), int(ballot.edited), *twins, *ballot.marks]
    mine = torch.tensor(words, dtype=torch.int64, device=communicator.device)
    unfinished, edited, *found = _largest(communicator, mine)
    pairs = [(found[index], -found[index + 1]) for index in range(0, len(twins), 2)]
    (most, least), norms = pairs[2:4]
    model, numbers, tensors = (most if most == least else -1 for most, least in (*pairs[:2], pairs[4]))
    return Ballot(
        finite=not unfinished,
        model=model,
        numbers=numbers,
        norm=_difference(*map(from_ordered, norms)) if norms[0] != _SILENT else None,
        edited=bool(edited),
        terms=None if most == _SILENT else (least, most),
        tensors=None if pairs[4][0] == _SILENT else tensors,
        marks=tuple(found[len(twins) :]),
    )


def _twins(number: int | None) -> tuple[int, int]:
    """Return a number and its opposite: the largest of both tell the largest and the smallest number."""
    return (_SILENT, _SILENT) if number is None else (number, -number)


def _difference(largest: float, smallest: float) -> float:
    return 1 - smallest / largest if largest > 0 else 0.0


def ordered(number: float) -> int:
    """Return the bits of a number that is not negative: they are in the order of the numbers."""
    return int.from_bytes(struct.pack(">d", number))


def from_ordered(bits: int) -> float:
    (number,) = struct.unpack(">d", bits.to_bytes(8))
    return float(number)


def largest(communicator: Communicator, numbers: Sequence[int], name: str, layers: Sequence[str]) -> list[int]:
    """Give the largest of each number on any rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=communicator.device)
    return _largest(communicator, mine, name, layers)


def _largest(
    communicator: Communicator, mine: torch.Tensor, name: str = "votes", layers: Sequence[str] = ()
) -> list[int]:
    result: list[int] = communicator.all_reduce(name, mine, dist.ReduceOp.MAX, layers).wait().tolist()
    return result
