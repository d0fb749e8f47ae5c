"""Work laid on ranks, the largest first: a pure function of names, costs and the number of ranks."""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfac_optim.distributed.planning.strategies import Placement, Strategy


class Load(NamedTuple):
    """Says what one piece of work costs; pieces of no cost are spread by their size."""

    cost: float
    size: int


def largest_first(work: Mapping[str, Load], bins: Sequence[int]) -> dict[str, int]:
    """Put each piece of work, the largest first, onto the bin that has least (LPT, Graham 1969); return the bins.

    The fullest bin has at most `4/3 − 1/(3m)` times what the best assignment to m bins would give it. Pieces of one
    cost and size go by name, numbers in it by their value, so that the order of the mapping does not matter, and alike
    layers of a model that follow one another have different bins.
    """
    heap = [(0.0, 0, each) for each in sorted(bins)]
    placed = {}
    for name, load in sorted(work.items(), key=lambda item: (-item[1].cost, -item[1].size, _natural(item[0]))):
        cost, size, least = heap[0]
        heapq.heapreplace(heap, (cost + load.cost, size + load.size, least))
        placed[name] = least
    return placed


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts "layer.10" after "layer.9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)] + [(0, name)]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The load of one layer is each refreshed part (by name), one preconditioning, and the words of its gradient."""

    parts: Mapping[str, Load]
    apply: float
    words: int

    @property
    def refresh(self) -> float:
        return sum(load.cost for load in self.parts.values())

    @property
    def size(self) -> int:
        return sum(load.size for load in self.parts.values())


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A place is the rank that refreshes each part of a layer, and the ranks that precondition it."""

    owners: Mapping[str, int]
    workers: range


def place(layers: Mapping[str, LayerLoad], ranks: int, strategy: Strategy, period: int) -> dict[str, LayerPlace]:
    """Choose where each layer is worked on.

    Args:
        layers: by name.
        ranks: how many there are.
        strategy: whose layout it is.
        period: steps between refreshes, of which one refresh and as many preconditionings are the work of a layer.
    """
    workers = strategy.workers(ranks)
    apart = strategy.placement is Placement.FACTORS
    groups = largest_first(
        {name: _group_load(layer, workers, ranks, period, apart) for name, layer in layers.items()},
        range(ranks // workers),
    )
    ranges = [range(group * workers, (group + 1) * workers) for group in range(ranks // workers)]
    owners: dict[str, dict[str, int]] = {name: {} for name in layers}
    # Of a group of one, parts may go to any rank and their results come from there.
    homes = [range(ranks)] if workers == 1 and apart else ranges
    members: dict[int, list[str]] = {number: [] for number in range(len(homes))}
    for name in layers:
        members[0 if len(homes) == 1 else groups[name]].append(name)
    for number, home in enumerate(homes):
        pieces = {
            f"{name}\0{part}": (name, part, load)
            for name in members[number]
            for part, load in _pieces(layers[name], apart=apart).items()
        }
        for key, rank in largest_first({key: load for key, (_, _, load) in pieces.items()}, home).items():
            name, part, _ = pieces[key]
            owners[name].update({part: rank} if apart else dict.fromkeys(layers[name].parts, rank))
    return {name: LayerPlace(owners[name], ranges[groups[name]]) for name in layers}


def _group_load(layer: LayerLoad, workers: int, ranks: int, period: int, apart: bool) -> Load:
    """Give the load on each rank of a group: all preconditioning, and its share of the group's refreshes."""
    if workers == ranks:
        return Load(0.0, 0)
    bound = 0.0 if workers == 1 and apart else layer.refresh / period / workers
    return Load(bound + layer.apply, layer.words)


def _pieces(layer: LayerLoad, *, apart: bool) -> Mapping[str, Load]:
    return layer.parts if apart else {"": Load(layer.refresh, layer.size)}
