"""Bytes, messages and buffers of one rank of many, counted, and the seconds that these messages are predicted to take.

The rank is the one that sends or receives most, by the plan; what it is counted to send equals what the plan says, or
this ends in an error. Its messages go one after another over its link, and those between segments and owners of one
batch together; backward hides what it can of the reduce-scatters, and nothing of anything else. ``slowed`` is the same
on a machine whose links have half the bandwidth, as where ranks of a node contend for one, and whose ranks differ: of
P ranks with a standard deviation of 5% the slowest takes ``1 + 0.05 √(2 ln P)`` times as long to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    Launch,
    Plan,
    PlanOptions,
    Sharded,
    make_plan,
    predict_sgd,
)
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import all_buckets, gradient_row

_SPREAD = 0.05
_RARE = ("sums", "results")


@dataclass(frozen=True, slots=True)
class CountedPoint:
    """One model on some ranks, by segments.

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
        parts: of these, by what they are spent on.
        sgd_seconds: predicted.
        slowed: as ``seconds``, on the slower machine.
        sgd_slowed: likewise, of SGD.
        floor: of ``seconds`` over ``sgd_seconds``: what the largest layer takes over its one owner's link alone.
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
    largest = max(each.words for each in model) * options.parameter_dtype.itemsize
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
        floor=1 + 2 * largest * (ranks - 1) / ranks / cost.bandwidth / plain.mean,
    )


def _rows(counted: Counted) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(row) for row in counted.rows]


def _moved(counted: Counted) -> list[tuple[float, float]]:
    """Bytes that each rank sends and receives in a step, averaged over the periods, by the plan."""
    plan, dtype = counted.plan, counted.plan.options.parameter_dtype
    rare, everyone = plan.options.inverse_update_period, range(plan.ranks)
    sent, received = [0.0] * plan.ranks, [0.0] * plan.ranks
    for number, pieces in enumerate(_rows(counted)):
        row = gradient_row(plan, number, pieces, dtype)
        segments = row.segments
        for rank in everyone:
            length, home = segments.lengths[rank], segments.at_home[rank]
            sent[rank] += (segments.elements - home) * dtype.itemsize
            received[rank] += ((plan.ranks - 1) * length + row.owned[rank] - home) * dtype.itemsize
    for payload, period in ((Payload.PARAMETERS, 1), (Payload.SUMS, rare), (Payload.INVERSES, rare)):
        for bucket in all_buckets(plan, payload):
            for rank in everyone:
                sent[rank] += bucket.sent_bytes(rank) / period
                received[rank] += bucket.received_bytes(rank) / period
    for each in plan.traffic:
        if each.payload.is_control:
            share = float(each.bytes_per_step) / plan.ranks
            sent, received = [size + share for size in sent], [size + share for size in received]
    return list(zip(sent, received, strict=True))


def _check(counted: Counted) -> None:
    """Raise where the rank was not counted to send and receive what the plan says."""
    plan, rank, dtype = counted.plan, counted.rank, counted.plan.options.parameter_dtype
    rows = [gradient_row(plan, number, pieces, dtype) for number, pieces in enumerate(_rows(counted))]
    for phase, layouts in (
        ("gradients", rows),
        ("parameters", all_buckets(plan, Payload.PARAMETERS)),
        ("sums", all_buckets(plan, Payload.SUMS)),
    ):
        messages = [message for layout in layouts for message in layout.messages(rank)]
        said = [sum(each.sent_bytes for each in messages), sum(each.received_bytes for each in messages)]
        found = counted.phases[phase]
        if said != [found.sent, found.received] or len(messages) != len(found.launches):
            raise AssertionError(f"{phase} of rank {rank} of {plan.ranks}: the plan says {said}, counted {found}")


def _parts(counted: Counted, model: Model, paper: Plan, cost: CostModel) -> dict[str, float]:
    """Seconds of a step; ``paper`` is the plan of the same model with its rows, for what is computed."""
    phases, seconds, period = counted.phases, paper.seconds, paper.options.inverse_update_period
    scattering = [each for each in phases["gradients"].launches if each.collective is Collective.REDUCE_SCATTER]
    others = [each for each in phases["gradients"].launches if each.collective is not Collective.REDUCE_SCATTER]

    def sending(launches: Iterable[Launch]) -> float:
        return sum(_seconds(launch, paper.ranks, cost) for launch in launches)

    return {
        "forward": seconds.forward,
        "backward": seconds.backward,
        "reduce-scatter beyond backward": _exposed(scattering, counted, model, paper, cost),
        "segments to owners": sending(others),
        "preconditioning": seconds.apply,
        "control": sending([*phases["agreement"].launches, *phases["scalars"].launches]),
        "parameters": sending(phases["parameters"].launches),
        "sums and results, of a period": sending(each for name in _RARE for each in phases[name].launches) / period,
        "refresh, of a period": seconds.refresh / period,
    }


def _seconds(launch: Launch, ranks: int, cost: CostModel) -> float:
    """Seconds of one message over the rank's link, by the model of ``CostModel``."""
    rounds, link = math.ceil(math.log2(ranks)), max(launch.sent_bytes, launch.received_bytes) / cost.bandwidth
    if launch.collective is Collective.ALL_REDUCE:
        return 2 * rounds * cost.latency + link
    if launch.collective is not Collective.ALL_TO_ALL:
        return rounds * cost.latency + link
    relayed = min(launch.sent_bytes, launch.received_bytes) * max(rounds / 2 - 1, 0) / cost.bandwidth
    return link + min((ranks - 1) * cost.latency, rounds * cost.latency + relayed)


def _exposed(launches: Sequence[Launch], counted: Counted, model: Model, paper: Plan, cost: CostModel) -> float:
    """Seconds of the reduce-scatters that backward does not hide; each begins when its last gradient is there."""
    flops = [each.rows * each.words if isinstance(each, Covered) else 0 for each in model]
    done, clock = [0.0] * len(model), 0.0
    for position in reversed(range(len(model))):
        clock += paper.seconds.backward * flops[position] / sum(flops)
        done[position] = clock
    positions = [p for p, each in enumerate(model) if isinstance(each, Covered) for _ in each.spec.params][::-1]
    finished, taken = 0.0, 0
    for launch, row in zip(launches, counted.rows, strict=True):
        taken += len(row)
        finished = max(finished, done[positions[taken - 1]]) + _seconds(launch, paper.ranks, cost)
    return max(0.0, finished - clock)


def counted_table(points: Sequence[CountedPoint]) -> Table:
    """Of one or more models; each column says how it was come by."""
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
