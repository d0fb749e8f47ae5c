"""The plan of a model on many ranks: which rank works on what, what is sent, and what it costs."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean

from kfac_optim.distributed.planning.buckets import Payload, PlannedBucket
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.plan_options import PlanOptions
from kfac_optim.distributed.planning.plan_parts import LayerPlan, Memory, ParameterPlan, Traffic
from kfac_optim.distributed.planning.prediction import Seconds
from kfac_optim.distributed.planning.strategies import Sharded, Strategy
from kfac_optim.utils.text import describe_bytes, listed, table

AFTER_CLIPPING = " with gradients that came after clip_grad_norm_()"
"""Ends the words for a call of which a rank refuses the gradients."""

CLIP_LAST = (
    "Call clip_grad_norm_ after the last backward of a step. To go on from here call optimizer.zero_grad(), which "
    "drops these gradients."
)
"""Says what to do about gradients that came after clipping."""


@dataclass(frozen=True)
class Plan:
    """Says which rank works on what, what is sent, and what that costs.

    `make_plan` makes it, `str(plan.summary())` shows it.

    Attributes:
        ranks: how many there are.
        strategy: the layout; of `Auto` what it chose.
        options: numbers that it depends on.
        cost: rates by which seconds were predicted and collectives chosen.
        layers: the covered layers, in forward order.
        parameters: the ones that are not covered, in forward order.
        buckets: those of each payload in the order in which they are sent.
        traffic: the traffic of each payload that is sent.
        refresh_loads: operations of each rank's refreshes.
        apply_loads: operations of each rank's preconditioning in a step.
        memory: the memory of each rank.
        seconds: the predicted seconds of a step.
    """

    ranks: int
    strategy: Strategy
    options: PlanOptions
    cost: CostModel
    layers: tuple[LayerPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    buckets: tuple[PlannedBucket, ...]
    traffic: tuple[Traffic, ...]
    refresh_loads: tuple[float, ...] = field(repr=False)
    apply_loads: tuple[float, ...] = field(repr=False)
    memory: tuple[Memory, ...] = field(repr=False)
    seconds: Seconds

    def buckets_of(self, payload: Payload) -> tuple[PlannedBucket, ...]:
        """Give the buckets in the order in which they are sent."""
        return tuple(bucket for bucket in self.buckets if bucket.payload is payload)

    def by_segments(self, payload: Payload) -> bool:
        """Return whether the payload goes by segments, see [Note: the way by segments]."""
        return any(bucket.segmented for bucket in self.buckets_of(payload))

    @property
    def everywhere(self) -> frozenset[str]:
        """Return names of what all ranks update under `Sharded`, see [Note: layers without an owner]."""
        if not isinstance(self.strategy, Sharded):
            return frozenset()
        layers = (layer.name for layer in self.layers if layer.owner < 0)
        return frozenset([*layers, *(each.name for each in self.parameters if each.owner is None)])

    @property
    def bytes_per_step(self) -> Fraction:
        """Give the bytes that all ranks together send, on average over the periods."""
        return sum((each.bytes_per_step for each in self.traffic), Fraction(0))

    @property
    def memory_per_rank(self) -> int:
        """Return bytes, on the rank that needs most."""
        return max(each.total for each in self.memory)

    @property
    def refresh_imbalance(self) -> float:
        """Return operations of the busiest rank's refreshes over the mean; 1 is balanced."""
        return _imbalance(self.refresh_loads)

    @property
    def apply_imbalance(self) -> float:
        """Give the imbalance of preconditioning: the largest load of a rank over the mean."""
        return _imbalance(self.apply_loads)

    @property
    def largest_part(self) -> tuple[str, float]:
        """Return the name and the operations of the part that costs most to refresh."""
        parts = [(part.name_in(layer.name), part.part.refresh) for layer in self.layers for part in layer.parts]
        return max(parts, key=lambda named: named[1], default=("", 0.0))

    @property
    def refresh_floor(self) -> float:
        """Return the operations of the largest part over the mean of all ranks: no placement has a smaller imbalance.

        Below 1 it does not bind. A wide factor is made cheaper by `BlockDiagonal`, `DoublyFactored` or a diagonal, and
        taken out of the longest step by `Background`; more ranks and a placement by factors do not help.
        """
        return self.largest_part[1] / mean if (mean := fmean(self.refresh_loads)) else 0.0

    def agreement(self) -> dict[str, str]:
        """Return all that ranks must agree on, by name, as strings that can be sent (see `differences`)."""
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
        """Return a hash of `agreement()`, the same in every process and on every machine: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.agreement()).encode()).hexdigest()

    def summary(self) -> str:
        """Return a table of the layers, with owners and what is sent, and then the plan as a whole."""
        options = self.options
        mean = fmean(self.refresh_loads)
        rows: list[tuple[str, ...]] = [("layer", "rank", "workers", "gradient", "sums", "inverses", "refresh")]
        for layer in self.layers:
            owners = Counter(part.owner for part in layer.parts)
            named = [f"{part.part.name}:{part.owner}" for part in layer.parts]
            cost = self.cost.solving(sum(part.part.refresh for part in layer.parts))
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
        for parameter in self.parameters:
            size = describe_bytes(parameter.words * options.parameter_dtype.itemsize)
            rows.append(
                (parameter.name, "all" if parameter.owner is None else str(parameter.owner), "", size, "", "", "")
            )
        lines = [*table(rows), f"{self.strategy} on {self.ranks} ranks, fingerprint {self.fingerprint()[:16]}."]
        lines += [
            f"{each.payload.value}: {_count(len(self.buckets_of(each.payload)), 'bucket')} every "
            f"{'step' if each.period == 1 else f'{each.period} steps'}, "
            f"{describe_bytes(float(each.bytes_per_step))} a step"
            f"{', by segments' if self.by_segments(each.payload) else ''}."
            for each in self.traffic
            if not each.payload.is_control
        ]
        if control := [each for each in self.traffic if each.payload.is_control]:
            size = describe_bytes(float(sum(each.bytes_per_step for each in control)))
            lines.append(f"control ({', '.join(each.payload.value for each in control)}): {size} a step.")
        if everywhere := sorted(self.everywhere):
            lines.append(
                f"All ranks work on {listed(everywhere)}: on one owner's link they would take longer than all else."
            )
        name, largest = self.largest_part
        seconds = self.seconds
        lines += [
            f"All ranks send {describe_bytes(float(self.bytes_per_step))} a step; each holds at most "
            f"{describe_bytes(self.memory_per_rank)}.",
            f"Predicted: {_describe_seconds(seconds.mean)} a step; {_describe_seconds(seconds.longest)} where it "
            "refreshes.",
            f"Refresh: {self.refresh_imbalance:.2f} of the mean {_describe_seconds(self.cost.solving(mean))} on the "
            f"busiest rank; the largest part, {name!r}, alone {self.refresh_floor:.2f}, "
            f"{_describe_seconds(self.cost.solving(largest))}. Preconditioning: {self.apply_imbalance:.2f}.",
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
    """Say what a user may do about `differences`, in whole sentences."""
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if "call" in differing and any(each.get("call", "").endswith(AFTER_CLIPPING) for each in (mine, theirs)):
        return CLIP_LAST
    if "call" in differing:
        return (
            "Each of these is a collective: call it on every rank, at the same place of the program, and "
            "consolidate_state_dict with the same `to`: the rank that writes, or None if each rank writes what it owns."
        )
    if differing == ["checkpoints loaded"]:
        return "Call load_state_dict on every rank, with the same checkpoint or with each rank's own part of it."
    if differing and all("of param group" in name for name in differing):
        return (
            "Set the numbers of param groups alike on every rank: a scheduler that looks at the loss needs its mean "
            "over all ranks."
        )
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
