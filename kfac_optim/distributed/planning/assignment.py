"""Work laid on ranks, the largest first: a pure function of names, costs, and the numbers of ranks and of nodes.

[Note: groups and nodes] Where w of P ranks precondition a layer, its inverse goes to w ranks once in a period, and what
they precondition to all others in every step, from the worker that is nearest. Groups of neighbours keep inverses in a
node, and then send the results of every step between nodes. Groups by a stride of P/w have equally many workers in each
node, if P/w divides the ranks of a node: then only inverses go between nodes. The groups are those that send less
between nodes in a step, on average.
"""

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

    Of bins that have equally much it is the first. The fullest bin has at most `4/3 − 1/(3m)` times what the best
    assignment to m bins would give it. Pieces of one cost and size go by name, numbers in it by their value, so that
    the order of the mapping does not matter, and alike layers of a model that follow one another have different bins.
    """
    heap = [(0.0, 0, number) for number in range(len(bins))]
    placed = {}
    for name, load in sorted(work.items(), key=lambda item: (-item[1].cost, -item[1].size, _natural(item[0]))):
        cost, size, least = heap[0]
        heapq.heapreplace(heap, (cost + load.cost, size + load.size, least))
        placed[name] = bins[least]
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


def nearest(rank: int, workers: range) -> int:
    """Return the place among the workers of a layer of the one whose results `rank` gets: on its node, if any is."""
    return rank % len(workers) if workers.step == 1 else rank // workers.step


def groups_of(
    layers: Mapping[str, LayerLoad], ranks: int, workers: int, period: int, per_node: int | None
) -> list[range]:
    """Return the groups of so many ranks that precondition a layer; see [Note: groups and nodes]."""
    count = ranks // workers
    neighbours = [range(group * workers, (group + 1) * workers) for group in range(count)]
    if per_node is None or not 1 < count < ranks or ranks % per_node or per_node % count:
        return neighbours
    inverses = sum(layer.size for layer in layers.values()) / period
    results = sum(layer.words for layer in layers.values())
    between = max(0, workers - per_node) * inverses + (ranks - max(workers, per_node)) * results
    if (workers - workers * per_node // ranks) * inverses >= between:
        return neighbours
    return [range(group, ranks, count) for group in range(count)]


def by_nodes(ranks: Sequence[int], per_node: int | None) -> list[int]:
    """Sort ranks such that those of one node do not follow each other, and the first few are on many nodes."""
    return sorted(ranks, key=lambda rank: (rank % per_node if per_node else 0, rank))


def place(
    layers: Mapping[str, LayerLoad], ranks: int, strategy: Strategy, period: int, per_node: int | None = None
) -> dict[str, LayerPlace]:
    """Choose where each layer is worked on.

    Args:
        layers: the load of each layer, by its name.
        ranks: how many there are.
        strategy: the strategy whose layout it is.
        period: steps between refreshes, of which one refresh and as many preconditionings are the work of a layer.
        per_node: ranks of each node, neighbours; None means that it is not known.
    """
    workers = strategy.workers(ranks)
    apart = strategy.placement is Placement.FACTORS
    ranges = groups_of(layers, ranks, workers, period, per_node)
    starts = [group.start for group in ranges]
    groups = largest_first(
        {name: _group_load(layer, workers, ranks, period, apart) for name, layer in layers.items()},
        [starts.index(start) for start in by_nodes(starts, per_node)],
    )
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
        costs = {key: load for key, (_, _, load) in pieces.items()}
        for key, rank in largest_first(costs, by_nodes(home, per_node)).items():
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
