"""What compiled graphs ask of the uses of weights by functions, while they are traced.

`torch.compile` calls these functions at once when it comes to them, and takes what they return for a constant of the
graph. Such functions must be handed numbers, and a graph may outlive the object that a number stands for.
"""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kfac_optim.utils.sharded_params import ShardedParameter, Shards


class GraphUses(ABC):
    """Knows how functions use weights, and the numbers by which graphs know the weights.

    Attributes:
        number: the number by which graphs ask for it.
    """

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        _KNOWN[self.number] = self
        self._in_graphs: list[nn.Parameter] = []
        self._in_shards: list[ShardedParameter | None] = []

    def know_in_graphs(self, params: Iterable[nn.Parameter], shards: Shards) -> None:
        """Take these for the parameters that graphs may ask for from now on."""
        self._in_graphs = list(params)
        self._in_shards = [shards.of(param) for param in self._in_graphs]

    def parameter(self, index: int) -> nn.Parameter:
        """Return the parameter that graphs know by this number."""
        return self._in_graphs[index]

    def index_of(self, address: int) -> int:
        """Return the number by which graphs know the parameter of this `id`, -1 where they do not."""
        for index, known in enumerate(self._in_graphs):
            sharded = self._in_shards[index]
            gathered = None if sharded is None else sharded.gathered
            if address in (id(known), id(gathered)):
                return index
        return -1

    def _index(self, param: Tensor | None) -> int:  # pragma: traced
        """Give the number by which graphs know a parameter, -1 where they do not.

        It is looked up by its `id`, so that the graph being traced is for this very parameter, and each of several
        equal blocks that are compiled one by one has a graph of its own. If the search itself were traced, the graph
        would take the parameters that it passes from our list: one block's parameters for all blocks (torch 2.13).
        """
        return -1 if param is None else index_in_graph(self.number, id(param))

    @abstractmethod
    def notes(self, weight: nn.Parameter) -> bool:
        """Return whether products with this weight are noted."""

    @abstractmethod
    def count_in(self, param: nn.Parameter, function: str) -> None:
        """Note that a function has used `param`."""

    @abstractmethod
    def count_out(self, weight: nn.Parameter) -> None:
        """Note that the last use of `weight` by a function was that of its own module."""

    @abstractmethod
    def watch_in_graph(self, index: int, bias: int, has_bias: bool, transposed: bool) -> tuple[int, bool]:
        """Return the number of a product's watch, -1 if it has none, and whether the block's bias is added to it."""


_NUMBERS = itertools.count()
_KNOWN: "weakref.WeakValueDictionary[int, GraphUses]" = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def index_in_graph(uses: int, address: int) -> int:
    """Do what `GraphUses.index_of` does."""
    return _KNOWN[uses].index_of(address)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count_out_in_graph(uses: int, index: int) -> int:
    """Do what `GraphUses.count_out` does."""
    found = _KNOWN[uses]
    found.count_out(found.parameter(index))
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count_in_in_graph(uses: int, index: int, function: str) -> int:
    """Do what `GraphUses.count_in` does."""
    found = _KNOWN[uses]
    found.count_in(found.parameter(index), function)
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_noted_in_graph(uses: int, index: int) -> bool:
    """Do what `GraphUses.notes` does."""
    found = _KNOWN[uses]
    return found.notes(found.parameter(index))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def watch_in_graph(uses: int, index: int, bias: int, has_bias: bool, transposed: bool) -> tuple[int, bool]:
    """Do what `GraphUses.watch_in_graph` does."""
    return _KNOWN[uses].watch_in_graph(index, bias, has_bias, transposed)
