"""The plan of a model on many ranks: who works on what, what is sent, and what it costs."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean

import torch

from kfac_optim.distributed.planning.buckets import Bucket, Payload
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.prediction import Seconds, in_order_of_backward
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.specs import Part
from kfac_optim.utils.text import describe_bytes, table
from kfac_optim.utils.validation import check_dtype, check_flag, check_integer, check_kind

# Words of a vote: whether a gradient is not finite, and whether one was edited, loss terms, and, each twice,
# fingerprints of what this rank trains, of its arguments and of its gradients, terms that it has counted, and a
# fingerprint of arguments that are tensors.
VOTE_WORDS = 13

# Marks of a vote are filled up to a multiple of this. Where ranks step several optimizers in different orders, votes
# about different models meet: of one size they tell what differs, while gloo ends the process over two sizes.
_MARKS = 128

# Of `Inverse.counters` those that ranks tell one another at refreshes, for metrics: those with a side are known to the
# owner of that part alone.
TOLD_COUNTERS = (
    "condition_A",
    "condition_G",
    "cutoff_A",
    "cutoff_G",
    "failed_refreshes",
    "fallback_inverses",
    "refused_statistics",
    "retried_refreshes",
    "substituted_statistics",
)

# Words of the status of one layer.
STATUS_WORDS = 3 + len(TOLD_COUNTERS)


def vote_marks(layers: int, buckets: int) -> int:
    """Words of a vote that are about the plan, besides `VOTE_WORDS`.

    One for each layer says whether it has a gradient, and statistics; one for each bucket of factor sums, whether it
    goes again; the rest is zeros.

    Args:
        layers: how many; 0 where there is no plan yet.
        buckets: of factor sums.
    """
    return _MARKS * max(1, math.ceil((layers + buckets) / _MARKS))


@dataclass(frozen=True)
class PlanOptions:
    """Numbers that a plan depends on, and that all ranks must share.

    Args:
        factor_update_period: steps between statistics.
        inverse_update_period: steps between refreshes, once the averages are no longer young, with a constant damping.
        bucket_bytes: the most that is sent together, except that a tensor is never cut; DDP's default.
        parameter_dtype: of parameters and gradients, in which they are sent.
        factor_dtype: of the running averages; inverses are kept and sent in it, and in float32 at least.
        sums_dtype: in which factor sums are sent; None is `factor_dtype`.
        momentum: whether there is a momentum buffer for each parameter.
        scalars: how many numbers each sum over parameters has that every step takes, over ranks too but under
            `Replicated`: three for the trust region with one param group, and one for its momentum.
        totals: likewise, over ranks under every strategy.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number below 1, or a dtype that is no floating one with the range of float32.
    """

    factor_update_period: int = 10
    inverse_update_period: int = 100
    bucket_bytes: int = 25 * 2**20
    parameter_dtype: torch.dtype = torch.float32
    factor_dtype: torch.dtype = torch.float32
    sums_dtype: torch.dtype | None = None
    momentum: bool = True
    scalars: tuple[int, ...] = (3, 1)
    totals: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("factor_update_period", "inverse_update_period", "bucket_bytes"):
            check_integer(f"{name} of PlanOptions", getattr(self, name))
        check_kind("parameter_dtype of PlanOptions", self.parameter_dtype, torch.dtype)
        check_kind("factor_dtype of PlanOptions", self.factor_dtype, torch.dtype)
        for name in ("factor_dtype", "sums_dtype"):
            check_dtype(f"{name} of PlanOptions", getattr(self, name))
        check_flag("momentum of PlanOptions", self.momentum, optional=False)
        for name in ("scalars", "totals"):
            check_kind(f"{name} of PlanOptions", getattr(self, name), tuple)
            for number in getattr(self, name):
                check_integer(f"each of the {name} of PlanOptions", number)

    @property
    def sent_dtype(self) -> torch.dtype:
        """Give the dtype of factor sums as they are sent."""
        return self.sums_dtype or self.factor_dtype

    @property
    def mass_words(self) -> int:
        """Words of `sent_dtype` that the mass of a factor sum takes: it is not rounded to less than float32."""
        return torch.promote_types(self.sent_dtype, torch.float32).itemsize // self.sent_dtype.itemsize

    @property
    def inverse_dtype(self) -> torch.dtype:
        """Give the dtype of inverses."""
        return torch.promote_types(self.factor_dtype, torch.float32)

    def itemsize(self, payload: Payload) -> int:
        """Bytes of a word of each kind of bucket."""
        if payload.is_control:
            return torch.int64.itemsize  # and float64's
        if payload is Payload.SUMS:
            return self.sent_dtype.itemsize
        return (self.inverse_dtype if payload is Payload.INVERSES else self.parameter_dtype).itemsize

    def bucket_words(self, payload: Payload) -> int:
        """The most words of a bucket that holds more than one item; of control each item is sent by itself."""
        if payload.is_control:
            return 0
        return self.bucket_bytes // self.itemsize(payload)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part of a layer's inverse.

    Attributes:
        part: what it costs and holds.
        owner: the rank that refreshes it.
        sums: words that each other rank sends to the owner before a refresh: packed moments and their masses.
    """

    part: Part
    owner: int
    sums: int

    def name_in(self, layer: str) -> str:
        """Its name among those of all layers."""
        return f"{layer} {self.part.name}".strip()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One covered layer.

    Attributes:
        name: of the layer.
        description: shapes and choices that ranks must agree on.
        position: in forward order, uncovered parameters counted too.
        words: of its gradient.
        apply: operations of one preconditioning.
        workers: ranks that precondition it.
        parts: in the order of `Inverse.parts`.
    """

    name: str
    description: str
    position: int
    words: int
    apply: float
    workers: range
    parts: tuple[PartPlan, ...]

    @property
    def trace_words(self) -> int:
        """Count what its owners tell one another before a refresh: traces of both factors, each with its mass.

        0 where the parts have one owner, or need no traces of each other (`Part.traces`).
        """
        if len({part.owner for part in self.parts}) == 1 or not any(part.part.traces for part in self.parts):
            return 0
        return sum(part.part.traces + 1 for part in self.parts)


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One uncovered parameter, and the rank that updates it; None where all do."""

    name: str
    position: int
    words: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What all ranks together send of one payload, each time it is sent."""

    payload: Payload
    words: int
    itemsize: int
    period: int
    """Steps from one time to the next."""

    @property
    def words_per_step(self) -> Fraction:
        return Fraction(self.words, self.period)

    @property
    def bytes_per_step(self) -> Fraction:
        return self.words_per_step * self.itemsize


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, besides the model and its gradients.

    Attributes:
        sums: averages of its own since the last refresh, packed.
        averages: running averages of the parts that it refreshes, packed.
        inverses: of the layers that it preconditions or refreshes.
        buffers: packed factor sums on their way.
        momentum: of the parameters that it updates.
    """

    sums: int
    averages: int
    inverses: int
    buffers: int
    momentum: int

    @property
    def total(self) -> int:
        return self.sums + self.averages + self.inverses + self.buffers + self.momentum


@dataclass(frozen=True)
class Plan:
    """Who works on what, what is sent, and what that costs. Made by `make_plan`; `str(plan.summary())` shows it.

    Attributes:
        ranks: how many there are.
        strategy: the layout; of `Auto` what it chose.
        options: numbers that it depends on.
        cost: rates by which seconds were predicted and collectives chosen.
        layers: in forward order.
        parameters: that are not covered, likewise.
        buckets: those of each payload in the order in which they are sent.
        traffic: of each payload that is sent.
        refresh_loads: operations of each rank's refreshes.
        apply_loads: operations of each rank's preconditioning in a step.
        memory: of each rank.
        seconds: predicted, of a step.
    """

    ranks: int
    strategy: Strategy
    options: PlanOptions
    cost: CostModel
    layers: tuple[LayerPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    buckets: tuple[Bucket, ...]
    traffic: tuple[Traffic, ...]
    refresh_loads: tuple[float, ...] = field(repr=False)
    apply_loads: tuple[float, ...] = field(repr=False)
    memory: tuple[Memory, ...] = field(repr=False)
    seconds: Seconds

    def buckets_of(self, payload: Payload) -> tuple[Bucket, ...]:
        """Give the buckets in the order in which they are sent."""
        return tuple(bucket for bucket in self.buckets if bucket.payload is payload)

    def launches(self, *, refresh: bool) -> list[Bucket]:
        """What is sent during backward, in the order in which all ranks start it.

        Buckets come as they are full, by the layer that backward reaches last among theirs; gradients before the sums
        of the same layers.

        Args:
            refresh: whether the step refreshes, for which factor sums go along.
        """
        sums = self.buckets_of(Payload.SUMS) if refresh else ()
        return in_order_of_backward([*self.buckets_of(Payload.GRADIENTS), *sums])

    @property
    def words_per_step(self) -> Fraction:
        """Give the words that all ranks together send, on average over the periods."""
        return sum((each.words_per_step for each in self.traffic), Fraction(0))

    @property
    def bytes_per_step(self) -> Fraction:
        """Give the bytes that all ranks together send, on average over the periods."""
        return sum((each.bytes_per_step for each in self.traffic), Fraction(0))

    @property
    def memory_per_rank(self) -> int:
        """Bytes, on the rank that needs most."""
        return max(each.total for each in self.memory)

    @property
    def refresh_imbalance(self) -> float:
        """Operations of the busiest rank's refreshes over the mean; 1 is balanced."""
        return _imbalance(self.refresh_loads)

    @property
    def apply_imbalance(self) -> float:
        """Give the imbalance of preconditioning: the largest load of a rank over the mean."""
        return _imbalance(self.apply_loads)

    @property
    def largest_part(self) -> tuple[str, float]:
        """Name and operations of the part that is dearest to refresh."""
        parts = [(part.name_in(layer.name), part.part.refresh) for layer in self.layers for part in layer.parts]
        return max(parts, key=lambda named: named[1], default=("", 0.0))

    @property
    def refresh_floor(self) -> float:
        """Operations of the dearest part over the mean of all ranks: no placement has a smaller imbalance.

        Below 1 it does not bind. A wide factor is made cheaper by `BlockDiagonal`, `DoublyFactored` or a diagonal, and
        taken out of the longest step by `Background`; more ranks and a placement by factors do not help.
        """
        return self.largest_part[1] / mean if (mean := fmean(self.refresh_loads)) else 0.0

    def agreement(self) -> dict[str, str]:
        """All that ranks must agree on, by name; plain strings, to be sent to other ranks (see `differences`)."""
        options = self.options
        found = {"ranks": str(self.ranks), "strategy": repr(self.strategy)}
        found |= {name: str(getattr(options, name)) for name in vars(options)}
        for layer in self.layers:
            found[f"layer {layer.name!r}"] = f"{layer.description}, number {layer.position}"
            found[f"workers of layer {layer.name!r}"] = _describe_range(layer.workers)
            for part in layer.parts:
                found[f"owner of {part.name_in(layer.name)!r}"] = str(part.owner)
        for parameter in self.parameters:
            where = f"{parameter.words} words, number {parameter.position}"
            found[f"parameter {parameter.name!r}"] = where
            found[f"owner of parameter {parameter.name!r}"] = str(parameter.owner)
        for payload in Payload:
            for number, bucket in enumerate(self.buckets_of(payload)):
                items = "; ".join(f"{item.name}[{item.words}] {item.rank}" for item in bucket.items)
                group = f"{bucket.collective.value} of {_describe_range(bucket.members)}"
                found[f"bucket {number} of {payload.value}"] = f"{group}, {bucket.itemsize} bytes a word: {items}"
        return found

    def fingerprint(self) -> str:
        """A hash of `agreement()`, the same in every process and on every machine: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.agreement()).encode()).hexdigest()

    def summary(self) -> "PlanSummary":
        """The plan as a table."""
        return PlanSummary(self)


@dataclass(frozen=True)
class PlanSummary:
    """`str()` is the table: each layer with its owners and what is sent for it, then the plan as a whole."""

    plan: Plan

    def __str__(self) -> str:
        plan, options = self.plan, self.plan.options
        mean = fmean(plan.refresh_loads)
        rows: list[tuple[str, ...]] = [("layer", "rank", "workers", "gradient", "sums", "inverses", "refresh")]
        for layer in plan.layers:
            owners = Counter(part.owner for part in layer.parts)
            named = [f"{part.part.name}:{part.owner}" for part in layer.parts]
            cost = plan.cost.solving(sum(part.part.refresh for part in layer.parts))
            rows.append(
                (
                    layer.name or "(model)",
                    str(next(iter(owners))) if len(owners) == 1 else " ".join(named),
                    _describe_range(layer.workers),
                    describe_bytes(layer.words * options.parameter_dtype.itemsize),
                    describe_bytes(sum(part.sums for part in layer.parts) * options.sent_dtype.itemsize),
                    describe_bytes(sum(part.part.sent for part in layer.parts) * options.inverse_dtype.itemsize),
                    _describe_seconds(cost),
                )
            )
        for parameter in plan.parameters:
            size = describe_bytes(parameter.words * options.parameter_dtype.itemsize)
            rows.append(
                (parameter.name, "all" if parameter.owner is None else str(parameter.owner), "", size, "", "", "")
            )
        lines = [*table(rows), f"{plan.strategy} on {plan.ranks} ranks, fingerprint {plan.fingerprint()[:16]}."]
        lines += [
            f"{each.payload.value}: {_count(len(plan.buckets_of(each.payload)), 'bucket')} every "
            f"{'step' if each.period == 1 else f'{each.period} steps'}, "
            f"{describe_bytes(float(each.bytes_per_step))} a step."
            for each in plan.traffic
            if not each.payload.is_control
        ]
        if control := [each for each in plan.traffic if each.payload.is_control]:
            size = describe_bytes(float(sum(each.bytes_per_step for each in control)))
            lines.append(f"control ({', '.join(each.payload.value for each in control)}): {size} a step.")
        name, largest = plan.largest_part
        seconds = plan.seconds
        lines += [
            f"All ranks send {describe_bytes(float(plan.bytes_per_step))} a step; each holds at most "
            f"{describe_bytes(plan.memory_per_rank)}.",
            f"Predicted: {_describe_seconds(seconds.mean)} a step; {_describe_seconds(seconds.longest)} where it "
            "refreshes.",
            f"Refresh: {plan.refresh_imbalance:.2f} of the mean {_describe_seconds(plan.cost.solving(mean))} on the "
            f"busiest rank; the largest part, {name!r}, alone {plan.refresh_floor:.2f}, "
            f"{_describe_seconds(plan.cost.solving(largest))}. Preconditioning: {plan.apply_imbalance:.2f}.",
        ]
        return "\n".join(lines)


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Tell in what two plans differ, by name, from what `Plan.agreement` gave for each; empty where they agree.

    What comes first is nearest to a cause: options and layers before owners, and owners before buckets.
    """
    effects = ("workers ", "owner ", "bucket ")

    def nearness(name: str) -> int:
        return max(number * name.startswith(word) for number, word in enumerate(effects, 1))

    names = sorted({**mine, **theirs}, key=nearness)
    return tuple(
        f"{name}: {mine.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in names
        if mine.get(name) != theirs.get(name)
    )


def remedy(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What a user may do about `differences`, in whole sentences."""
    same = "Build the same model, with the same arguments of KFACOptimizer, on every rank."
    if all(mine.get(n) == theirs.get(n) for n in {**mine, **theirs} if n.startswith(("layer ", "parameter "))):
        return same
    return (
        "Where ranks train different models or hold different parts of one, as the stages of a pipeline are, pass "
        "distributed=False, or the group of those ranks that train the same: "
        "distributed=DistributedConfig(group=...). ZeroRedundancyOptimizer deals parameters out to ranks: in its place "
        "take KFACOptimizer(model, distributed=DistributedConfig(strategy=Sharded())), which does so itself. Where all "
        "ranks are to train one model, hand over the same parameters, with the same arguments, on every rank."
    )


def _describe_range(ranks: range) -> str:
    if len(ranks) == 1:
        return str(ranks.start)
    ends = f"{ranks.start}-{ranks[-1]}"
    return ends if ranks.step == 1 else f"{ends} by {ranks.step}"


def _describe_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _imbalance(loads: Sequence[float]) -> float:
    mean = fmean(loads)
    return max(loads) / mean if mean else 1.0
