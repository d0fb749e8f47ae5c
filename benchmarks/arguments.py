"""Types of command-line arguments: each turns a word into a value or says what was expected instead."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass


class UsageError(ValueError):
    """Says that arguments are right one by one and wrong together; the command line reports it and exits with 2."""


@dataclass(frozen=True, slots=True)
class Periods:
    """Holds the optimizer steps between statistics, and between refreshes of the inverses."""

    factor: int
    inverse: int

    def __str__(self) -> str:
        return f"{self.factor},{self.inverse}"

    @property
    def common(self) -> int:
        """Return the steps after which both periods begin again."""
        return math.lcm(self.factor, self.inverse)


def positive_int(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {word!r}")
    return number


def seed(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:
        raise ArgumentTypeError(f"expected a whole number from 0 to 2⁶³ - 1, got {word!r}")
    return number


def positive_float(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf):
        raise ArgumentTypeError(f"expected a number above 0, got {word!r}")
    return number


def periods(word: str) -> Periods:
    try:
        factor, inverse = map(int, word.split(","))
    except ValueError:
        factor = inverse = 0
    if min(factor, inverse) < 1:
        raise ArgumentTypeError(
            f"expected FACTOR,INVERSE, two whole numbers of at least 1 such as 10,100, got {word!r}"
        )
    return Periods(factor, inverse)


def device(word: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", word):
        raise ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {word!r}")
    return word
