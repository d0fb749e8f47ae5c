"""What compiled graphs ask of the uses of weights by functions, while they are traced.

`torch.compile` calls these functions at once when it comes to them, and takes what they return for a constant of the
graph. They are handed numbers, as a constant's function must be; of which graphs may outlive the object.
"""

import itertools
import weakref
from typing import Protocol

import torch
from torch import nn


class Uses(Protocol):
    """Knows how functions use weights."""

    def index_of(self, address: int) -> int:
        """Return the number by which graphs know the parameter of this `id`, -1 where they do not."""

    def parameter(self, index: int) -> nn.Parameter:
        """Return the parameter that graphs know by this number."""

    def notes(self, weight: nn.Parameter) -> bool:
        """Return whether products with this weight are noted."""

    def count_in(self, param: nn.Parameter, function: str) -> None:
        """Note that a function has used `param`."""

    def count_out(self, weight: nn.Parameter) -> None:
        """Note that the last use of `weight` by a function was that of its own module."""

    def watch_in_graph(self, index: int, bias: int, has_bias: bool, transposed: bool) -> tuple[int, bool]:
        """Return the number of a product's watch, -1 if it has none, and whether the block's bias is added to it."""


_NUMBERS = itertools.count()
_KNOWN: "weakref.WeakValueDictionary[int, Uses]" = weakref.WeakValueDictionary()


def number_of(uses: Uses) -> int:
    """Return a number by which graphs may ask for `uses` from now on."""
    number = next(_NUMBERS)
    _KNOWN[number] = uses
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def index_in_graph(uses: int, address: int) -> int:
    """Do what `Uses.index_of` does."""
    return _KNOWN[uses].index_of(address)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count_out_in_graph(uses: int, index: int) -> int:
    """Do what `Uses.count_out` does."""
    found = _KNOWN[uses]
    found.count_out(found.parameter(index))
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count_in_in_graph(uses: int, index: int, function: str) -> int:
    """Do what `Uses.count_in` does."""
    found = _KNOWN[uses]
    found.count_in(found.parameter(index), function)
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_noted_in_graph(uses: int, index: int) -> bool:
    """Do what `Uses.notes` does."""
    found = _KNOWN[uses]
    return found.notes(found.parameter(index))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def watch_in_graph(uses: int, index: int, bias: int, has_bias: bool, transposed: bool) -> tuple[int, bool]:
    """Do what `Uses.watch_in_graph` does."""
    return _KNOWN[uses].watch_in_graph(index, bias, has_bias, transposed)
