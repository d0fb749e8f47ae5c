"""Layouts of a plan, as a communicator takes them, for all of its layers or for those whose turn it is.

Each launch carries what a bucket of the plan holds, so that what is counted on the way is what the plan predicts.
Buckets of different groups, which the plan sends side by side, go in one launch. With one rank there are none.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from kfac_optim.distributed.communication.layouts import ReduceBucket, Slot
from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.planning.assignment import nearest
from kfac_optim.distributed.planning.buckets import Item, Payload, fill
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.strategies import Sharded


class _Sent(NamedTuple):
    """Holds an item, and the group that it is sent in."""

    item: Item
    members: range


# -- names -------------------------------------------------------------------------------------------------------


def slot_name(layer: str, part: str, number: int) -> str:
    """Name a running average in `sum_buckets`; `number` is its place in `Part.sums`."""
    return _joined(layer, part, str(number))


def result_name(layer: str, part: str, *, measuring: bool) -> str:
    """Name a parcel in `result_buckets`: what statistics are taken in, or all else of a part's result."""
    return _joined(layer, part, "(bases)" if measuring else "")


def preconditioned_name(layer: str, place: int) -> str:
    """Name a parcel in `preconditioned_buckets`, from the worker of this place among them (`assignment.nearest`)."""
    return _joined(layer, str(place))


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


# -- sums to their owners ----------------------------------------------------------------------------------------


def sum_buckets(plan: Plan, layers: Collection[str]) -> tuple[ReduceBucket, ...]:
    """Return running averages to the owners of parts, a slot for each of `Part.sums`, in the order of backward.

    Args:
        plan: the plan.
        layers: names of those that are merged.
    """
    slots = {
        part.name_in(layer.name): [
            Slot(slot_name(layer.name, part.part.name, number), factor.packed, part.owner, factor.masses)
            for number, factor in enumerate(part.part.sums)
        ]
        for layer in plan.layers
        for part in layer.parts
    }
    dtype, segmented = plan.options.sent_dtype, plan.by_segments(Payload.SUMS)
    return tuple(
        ReduceBucket(name, tuple(slot for item, _ in sent for slot in slots[item.name]), plan.ranks, dtype, segmented)
        for name, sent in _launches(plan, Payload.SUMS, layers)
    )


def gradient_buckets(plan: Plan, names: Collection[str]) -> tuple[ReduceBucket, ...]:
    """Return gradients to the ranks that update, plain sums, in the order of backward; under `Sharded` alone.

    Args:
        plan: the plan.
        names: the names of layers, and of parameters that are not covered; so are the slots named. Those that all ranks
            update are left to `gradient_means`.
    """
    options, segmented = plan.options, plan.by_segments(Payload.GRADIENTS)
    dtype = options.gradient_dtype or options.parameter_dtype
    return tuple(
        ReduceBucket(
            name, tuple(Slot(i.name, i.words, i.rank, masses=0) for i, _ in sent), plan.ranks, dtype, segmented
        )
        for name, sent in _launches(plan, Payload.GRADIENTS, set(names) - plan.everywhere)
    )


def gradient_means(plan: Plan, names: Collection[str]) -> dict[OwnedRow, tuple[str, ...]]:
    """Return the gradients of `names` that all ranks update, in the order of backward, and whose each row holds."""
    items = [item for bucket in plan.buckets_of(Payload.GRADIENTS) for item in bucket.items]
    ours = [item for item in items if item.name in plan.everywhere and item.name in names]
    dtype, payload = plan.options.parameter_dtype, Payload.GRADIENTS
    return {
        OwnedRow(
            f"{payload.value} of all {number}", tuple((-1, each.words) for each in held), plan.ranks, dtype
        ): tuple(each.name for each in held)
        for number, held in enumerate(fill(ours, plan.options.bucket_words(payload)))
    }


# -- parcels from their sources ----------------------------------------------------------------------------------


def result_buckets(plan: Plan, layers: Collection[str]) -> tuple[ShareBucket, ...]:
    """Return the buckets of what refreshes gave, from the owners of parts, in forward order; see `result_name`.

    What statistics are taken in (`Part.measuring`) goes to all ranks that take them, the rest to those that
    precondition the layer. The owner gets its own back; what no other rank needs is left out.

    Args:
        plan: the plan.
        layers: names of those that were refreshed.
    """

    def parcel(sent: _Sent) -> Iterator[Parcel]:
        item, members = sent
        yield Parcel(item.name, item.words, item.rank, tuple(members))

    return _shared(plan, Payload.INVERSES, layers, parcel, plan.options.inverse_dtype)


def preconditioned_buckets(plan: Plan, layers: Collection[str]) -> tuple[ShareBucket, ...]:
    """Return preconditioned gradients from ranks that have them to others, in forward order; see `preconditioned_name`.

    Of the ranks that precondition a layer, each sends to those that are nearest to it (`assignment.nearest`). It gets
    its own back, so that all ranks have the same bits whatever the payload.

    Args:
        plan: the plan.
        layers: names of those that were preconditioned.
    """
    workers_of = {layer.name: layer.workers for layer in plan.layers}

    def parcels(sent: _Sent) -> Iterator[Parcel]:
        item, workers = sent.item, workers_of[sent.item.name]
        for place, source in enumerate(workers):
            targets = (rank for rank in range(plan.ranks) if nearest(rank, workers) == place)
            yield Parcel(preconditioned_name(item.name, place), item.words, source, tuple(targets))

    return _shared(plan, Payload.PRECONDITIONED, layers, parcels, plan.options.parameter_dtype)


def parameter_buckets(plan: Plan, names: Collection[str]) -> tuple[ShareBucket, ...]:
    """Return parameters from the ranks that update them to the others, in forward order; under `Sharded` alone.

    Args:
        plan: the plan.
        names: the names of layers, and of parameters that are not covered; so are the parcels named. Those that all
            ranks update are left out.
    """

    def parcel(sent: _Sent) -> Iterator[Parcel]:
        item, members = sent
        yield Parcel(item.name, item.words, item.rank, tuple(rank for rank in members if rank != item.rank))

    names = set(names) - plan.everywhere
    return _shared(plan, Payload.PARAMETERS, names, parcel, plan.options.parameter_dtype)


# -- all of them -------------------------------------------------------------------------------------------------


def all_buckets(plan: Plan, payload: Payload) -> tuple[ReduceBucket | ShareBucket, ...]:
    """Return all that is sent of one payload where no layer is left out, but for all-reduces.

    Args:
        plan: the plan.
        payload: the payload; rows and directions are laid out by their shards (`gradients.fsdp`), and are not here.
    """
    layouts: dict[Payload, Callable[[Plan, Collection[str]], tuple[ReduceBucket | ShareBucket, ...]]] = {
        Payload.SUMS: sum_buckets,
        Payload.INVERSES: result_buckets,
        Payload.PRECONDITIONED: preconditioned_buckets,
    }
    if isinstance(plan.strategy, Sharded):
        layouts |= {Payload.GRADIENTS: gradient_buckets, Payload.PARAMETERS: parameter_buckets}
    names = [layer.name for layer in plan.layers]
    if payload in (Payload.GRADIENTS, Payload.PARAMETERS):
        names += [parameter.name for parameter in plan.parameters]
    return layouts[payload](plan, names) if payload in layouts else ()


def gradient_row(plan: Plan, number: int, pieces: Sequence[tuple[int, int]], dtype: torch.dtype) -> OwnedRow:
    """Return how gradients go to their owners that a wrapper has in one of its buckets.

    Args:
        plan: the plan.
        number: the number of the bucket.
        pieces: owner and number of elements of each gradient, in the order of the bucket.
        dtype: the dtype of the bucket, in which it is sent where the plan has no `gradient_dtype`.
    """
    if all(owner >= 0 for owner, _ in pieces):  # an all-reduce would sum in that dtype
        dtype = plan.options.gradient_dtype or dtype
    name = f"{Payload.GRADIENTS.value} of DDP {number}"
    return OwnedRow(name, tuple(pieces), plan.ranks, dtype, plan.by_segments(Payload.GRADIENTS))


def delivery_limit(plan: Plan) -> float:
    """Return elements of gradients that one rank may own of what goes to owners in one message, see `Batching`."""
    return float(max((bucket.words for bucket in plan.buckets_of(Payload.GRADIENTS)), default=0))


def sum_limit(plan: Plan, payload: Payload) -> float:
    """Return elements of sums that the largest bucket of the plan would hold, see [Note: what sums hold]."""
    largest = max((bucket.size for bucket in plan.buckets if not bucket.payload.is_control), default=0)
    return largest / max(plan.options.itemsize(payload), torch.float32.itemsize)


# -- what they share ---------------------------------------------------------------------------------------------


def _shared(
    plan: Plan,
    payload: Payload,
    names: Collection[str],
    parcels: Callable[[_Sent], Iterator[Parcel]],
    dtype: torch.dtype,
) -> tuple[ShareBucket, ...]:
    segmented = plan.by_segments(payload)
    return tuple(
        ShareBucket(name, tuple(parcel for each in sent for parcel in parcels(each)), plan.ranks, dtype, segmented)
        for name, sent in _launches(plan, payload, names)
    )


def _launches(plan: Plan, payload: Payload, names: Collection[str]) -> Iterator[tuple[str, list[_Sent]]]:
    """Give the name of each launch and what it carries: the plan's items, in its order, that belong to `names`."""
    positions = {layer.name: layer.position for layer in plan.layers}
    positions |= {parameter.name: parameter.position for parameter in plan.parameters}
    due = {positions[name] for name in names}
    groups: dict[range, list[Item]] = {}
    for bucket in plan.buckets_of(payload):
        groups.setdefault(bucket.members, []).extend(item for item in bucket.items if item.position in due)
    limit = plan.options.bucket_words(payload)
    filled = [[(members, items) for items in fill(group, limit)] for members, group in groups.items()]
    for number, side_by_side in enumerate(itertools.zip_longest(*filled)):
        together = [bucket for bucket in side_by_side if bucket is not None]
        yield f"{payload.value} {number}", [_Sent(item, members) for members, items in together for item in items]
