"""Bytes, messages and buffers of one rank of many, counted, and the seconds that these messages are predicted to take.

The rank is the one that sends or receives most, by the plan; what it is counted to send equals what the plan says, or
this ends in an error. Each message takes what ``CostModel`` says of the bytes of the rank that has most of it, by the
plan, and messages go one after another over a link; backward hides what it can of all gradients' messages, each of
which begins when its last gradient is there, and nothing of anything else. ``slowed`` is the same on a machine whose
links have half the bandwidth, as where ranks of a node contend for one, and whose ranks differ: of P ranks with a
standard deviation of 5% the slowest takes ``1 + 0.05 √(2 ln P)`` times as long to compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from benchmarks.counted_group import Counted, count
from benchmarks.shapes import Model
from kfac_optim.distributed import (
    Collective,
    CostModel,
    Covered,
    Exchange,
    Plan,
    PlanOptions,
    Sharded,
    make_plan,
    predict_sgd,
)
from kfac_optim.distributed.communication.layouts import ReduceBucket
from kfac_optim.distributed.communication.message import Message, together
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.communication.segments import batches, shares
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import all_buckets, delivery_limit, gradient_row, sum_limit

_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class CountedPoint:
    """Holds the figures of one model on some ranks, by segments.

    Attributes:
        model: its name.
        ranks: P.
        rank: the busiest, which was counted.
        messages: counted, of a step that refreshes.
        bytes_over_sgd: planned, of all ranks, averaged over the periods; the counted rank's part of it was seen.
        rank_over_sgd: counted, sent or received, whichever is more, over what SGD sends and receives on a rank.
        largest_over_mean: planned, of the busiest rank, which was counted, over the mean of all.
        buffers: counted, bytes at the peak, by phase.
        largest_bucket: bytes.
        seconds: predicted from the counted messages, of a step, averaged over the periods.
        parts: the parts of these seconds, by what they are spent on.
        sgd_seconds: predicted.
        slowed: what ``seconds`` are on the slower machine.
        sgd_slowed: likewise, of SGD.
        everywhere: names of layers that all ranks work on.
        floor: the floor of ``seconds`` over ``sgd_seconds``: what an owner's equal share, or the largest layer with one
            owner, takes over a link, to the owner and back.
    """

    model: str
    ranks: int
    rank: int
    messages: int
    bytes_over_sgd: float
    rank_over_sgd: float
    largest_over_mean: float
    buffers: dict[str, int]
    largest_bucket: int
    seconds: float
    parts: dict[str, float]
    sgd_seconds: float
    slowed: float
    sgd_slowed: float
    everywhere: list[str]
    floor: float


def counted_point(name: str, model: Model, ranks: int, cost: CostModel, options: PlanOptions) -> CountedPoint:
    periods = (options.factor_update_period, options.inverse_update_period)

    def run(rank: int) -> Counted:
        return count(model, ranks, rank, Sharded(), cost, exchange=Exchange.SEGMENTS, periods=periods)

    counted = run(0)
    moved = _moved(counted)
    busiest = max(range(ranks), key=lambda rank: max(moved[rank]))
    if busiest != 0:
        counted = run(busiest)
    _check(counted)
    paper = make_plan(model, ranks, Sharded(), cost, replace(options, exchange=Exchange.SEGMENTS))
    parts = _parts(counted, model, paper, cost)
    slow = replace(cost, bandwidth=cost.bandwidth / 2)
    delay = _SPREAD * math.sqrt(2 * math.log(ranks))
    computing = paper.seconds.forward + paper.seconds.backward
    plain, plain_slow = predict_sgd(model, ranks, cost, options), predict_sgd(model, ranks, slow, options)
    words = sum(each.words for each in model) * options.parameter_dtype.itemsize
    of_sgd = 2 * (ranks - 1) / ranks * words
    owned = [each.words for each in model if each.name not in paper.everywhere]
    busiest_link = 2 * max(max(owned), sum(owned) / ranks) * options.parameter_dtype.itemsize * (ranks - 1) / ranks
    return CountedPoint(
        model=name,
        ranks=ranks,
        rank=busiest,
        messages=sum(len(phase.launches) for phase in counted.phases.values()),
        bytes_over_sgd=sum(sent for sent, _ in moved) / (ranks * of_sgd),
        rank_over_sgd=max(moved[busiest]) / of_sgd,
        largest_over_mean=max(moved[busiest]) / (sum(map(sum, moved)) / 2 / ranks),
        buffers={phase: found.buffers for phase, found in counted.phases.items()},
        largest_bucket=counted.largest_bucket,
        seconds=sum(parts.values()),
        parts=parts,
        sgd_seconds=plain.mean,
        slowed=sum(_parts(counted, model, paper, slow).values()) + delay * computing,
        sgd_slowed=plain_slow.mean + delay * (plain_slow.forward + plain_slow.backward),
        everywhere=sorted(paper.everywhere),
        floor=1 + busiest_link / cost.bandwidth / plain.mean,
    )


def _rows(counted: Counted) -> list[OwnedRow]:
    plan = counted.plan
    return [
        gradient_row(plan, number, row, plan.options.parameter_dtype)
        for number, row in enumerate(map(tuple, counted.rows))
    ]


def _moved(counted: Counted) -> list[tuple[float, float]]:
    """Return the bytes that each rank sends and receives in a step, averaged over the periods, by the plan."""
    plan, size = counted.plan, counted.plan.options.parameter_dtype.itemsize
    rare, everyone, others = plan.options.inverse_update_period, range(plan.ranks), plan.ranks - 1
    to_all = sum(2 * others / plan.ranks * row.elements * size for row in _rows(counted) if row.to_all)
    to_all += sum(float(each.bytes_per_step) / plan.ranks for each in plan.traffic if each.payload.is_control)
    sent, received = [to_all] * plan.ranks, [to_all] * plan.ranks
    for row in _rows(counted):
        if not row.to_all:
            segments = row.segments
            for rank in everyone:
                length, home = segments.lengths[rank], segments.at_home[rank]
                sent[rank] += (segments.elements - home) * size
                received[rank] += (others * length + row.owned_elements[rank] - home) * size
    for payload, period in ((Payload.PARAMETERS, 1), (Payload.SUMS, rare), (Payload.INVERSES, rare)):
        for bucket in all_buckets(plan, payload):
            for rank in everyone:
                messages = bucket.messages(rank)
                sent[rank] += sum(message.sent_bytes for message in messages) / period
                received[rank] += sum(message.received_bytes for message in messages) / period
    return list(zip(sent, received, strict=True))


_PAYLOADS = {"sums": Payload.SUMS, "results": Payload.INVERSES, "parameters": Payload.PARAMETERS}


def on_paper(
    layouts: Sequence[ReduceBucket | ShareBucket | OwnedRow],
    rank: int,
    limit: float | None = None,
    ranks: int | None = None,
) -> list[Message]:
    """Return the messages by which layouts of one payload are carried out, in their order, as a rank sees them.

    The last two arguments are those of ``batches``.
    """
    segmented = [each for each in layouts if each.segmented]
    found = [message for each in layouts if not each.segmented for message in each.messages(rank)]
    for batch in batches([shares(each.owned_elements) for each in segmented], limit, ranks):
        firsts, seconds = zip(*(each.messages(rank) for each in segmented[batch]), strict=True)
        to_owners = firsts[0].collective is Collective.REDUCE_SCATTER
        found += [*firsts, together(seconds)] if to_owners else [together(firsts), *seconds]
    return found


def _bounds(plan: Plan, payload: Payload) -> tuple[float | None, int | None]:
    """Return the last two arguments of ``on_paper`` and of ``batches``."""
    if payload is Payload.SUMS:
        return sum_limit(plan, payload), plan.ranks
    return (delivery_limit(plan) if payload is Payload.PARAMETERS else None), None


def _check(counted: Counted) -> None:
    """Raise where the rank was not counted to send and receive what the plan says."""
    plan, rank = counted.plan, counted.rank
    said = {
        phase: on_paper(all_buckets(plan, payload), rank, *_bounds(plan, payload))
        for phase, payload in _PAYLOADS.items()
    }
    said["gradients"] = on_paper(_rows(counted), rank, delivery_limit(plan))
    for phase, messages in said.items():
        found = counted.phases[phase].launches
        if phase == "results":  # and how refreshes went
            found = [each for each in found if each.name != Payload.STATUS.value]
        expected = sorted((each.name, each.sent_bytes, each.received_bytes) for each in messages)
        if expected != sorted((each.name, each.sent_bytes, each.received_bytes) for each in found):
            raise AssertionError(f"{phase} of rank {rank} of {plan.ranks}: the plan says {expected}, counted {found}")
    for phase, each in counted.phases.items():
        told = [
            sum(launch.sent_bytes for launch in each.launches),
            sum(launch.received_bytes for launch in each.launches),
        ]
        if told != [each.sent, each.received]:
            raise AssertionError(f"{phase} of rank {rank} of {plan.ranks}: {told} was told of, {each} handed over")


def _parts(counted: Counted, model: Model, paper: Plan, cost: CostModel) -> dict[str, float]:
    """Return seconds of a step; ``paper`` is the plan of the same model with its rows, for what is computed."""
    phases, seconds, period = counted.phases, paper.seconds, paper.options.inverse_update_period

    def reducing(*names: str) -> float:
        return sum(_all_reducing(each, paper.ranks, cost) for name in names for each in phases[name].launches)

    def going(payload: Payload) -> float:
        return sum(_carrying_out(all_buckets(counted.plan, payload), cost, *_bounds(counted.plan, payload)))

    rare = going(Payload.SUMS) + going(Payload.INVERSES)
    return {
        "forward": seconds.forward,
        "backward": seconds.backward,
        "gradients beyond backward": _exposed(counted, model, paper, cost),
        "preconditioning": seconds.apply,
        "control": reducing("agreement", "scalars"),
        "parameters": going(Payload.PARAMETERS),
        "sums and results, of a period": (rare + reducing("results")) / period,
        "refresh, of a period": seconds.refresh / period,
    }


def _all_reducing(message: Message, ranks: int, cost: CostModel) -> float:
    """Return the seconds of a small all-reduce; others are not looked at."""
    if message.collective is not Collective.ALL_REDUCE:
        return 0.0
    size = message.sent_bytes * ranks / (ranks - 1) / 2
    return cost.communicating(Collective.ALL_REDUCE, size, ranks)


def _carrying_out(
    layouts: Sequence[ReduceBucket | ShareBucket | OwnedRow],
    cost: CostModel,
    limit: float | None = None,
    summing: int | None = None,
) -> list[float]:
    """Return seconds of each layout's messages; those of a batch between segments and owners are its last one's."""
    found = [0.0] * len(layouts)
    segmented = [number for number, each in enumerate(layouts) if each.segmented]
    for number, each in enumerate(layouts):
        ranks, size = each.world_size, sum(each.owned_elements) * each.payload.itemsize
        if number in segmented:
            found[number] = cost.communicating(Collective.ALL_GATHER, size, ranks)
        elif isinstance(each, OwnedRow):
            found[number] = cost.communicating(Collective.ALL_REDUCE, each.elements * each.payload.itemsize, ranks)
        else:
            raise AssertionError("what has owners goes by segments here")
    for batch in batches([shares(layouts[number].owned_elements) for number in segmented], limit, summing):
        together = [layouts[number] for number in segmented[batch]]
        owned = [sum(of_rank) for of_rank in zip(*(each.owned_elements for each in together), strict=True)]
        size, mean, itemsize = max(owned), sum(owned) / len(owned), together[0].payload.itemsize
        found[segmented[batch][-1]] += cost.communicating(
            Collective.ALL_TO_ALL, max(size, mean) * itemsize, len(owned), mean=mean * itemsize
        )
    return found


def _exposed(counted: Counted, model: Model, paper: Plan, cost: CostModel) -> float:
    """Return seconds of gradient messages that backward does not hide; each begins when its last gradient is there."""
    flops = [each.rows * each.words if isinstance(each, Covered) else 0 for each in model]
    done, clock = [0.0] * len(model), 0.0
    for position in reversed(range(len(model))):
        clock += paper.seconds.backward * flops[position] / sum(flops)
        done[position] = clock
    positions = [p for p, each in enumerate(model) if isinstance(each, Covered) for _ in each.spec.params][::-1]
    rows = _rows(counted)
    finished, taken = 0.0, 0
    for row, seconds in zip(rows, _carrying_out(rows, cost, delivery_limit(counted.plan)), strict=True):
        taken += len(row.pieces)
        finished = max(finished, done[positions[taken - 1]]) + seconds
    return max(0.0, finished - clock)


def counted_table(points: Sequence[CountedPoint]) -> Table:
    """Show one or more models; each column says how it was come by."""
    table = Table(
        *("model", "P", "bytes", "peak", "buffers", "ms", "/SGD", "floor", "eff.", "slow"),
        title="Sharded() by segments, one rank's real code on a faked group",
        caption="Counted: bytes (busiest rank, over SGD's), buffers (at the peak, over the\n"
        "largest bucket: gradients, sums, parameters). Planned: peak (busiest rank over\n"
        "the mean). Predicted from counted messages: ms, /SGD, eff. (SGD's in brackets),\n"
        "slow (/SGD at half the bandwidth and with ranks that differ).",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for point in points:
        first = next(each for each in points if each.model == point.model)
        table.add_row(
            point.model,
            str(point.ranks),
            f"{point.rank_over_sgd:.3f}",
            f"{point.largest_over_mean:.3f}",
            " ".join(f"{point.buffers[p] / point.largest_bucket:.1f}" for p in ("gradients", "sums", "parameters")),
            f"{1e3 * point.seconds:.0f}",
            f"{point.seconds / point.sgd_seconds:.2f}",
            f"{point.floor:.2f}",
            f"{first.seconds / point.seconds:.2f} ({first.sgd_seconds / point.sgd_seconds:.2f})",
            f"{point.slowed / point.sgd_slowed:.2f}",
        )
    return table
