"""Plans are made here: arithmetic on the specs alone, for any number of ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kfac_optim.distributed.planning.assignment import LayerLoad, Load, by_nodes, largest_first, place
from kfac_optim.distributed.planning.buckets import Item, Payload, PlannedBucket, fill, make_buckets
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.everywhere import on_all_ranks
from kfac_optim.distributed.planning.messages import all_buckets, result_name
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.plan_options import STATUS_WORDS, VOTE_WORDS, PlanOptions, vote_marks
from kfac_optim.distributed.planning.plan_parts import (
    LayerPlan,
    Memory,
    ParameterPlan,
    PartPlan,
    Traffic,
    packed_words,
    part_plans,
    with_owner,
)
from kfac_optim.distributed.planning.planned_model import Covered, Uncovered
from kfac_optim.distributed.planning.prediction import Compute, in_order_of_backward, predict
from kfac_optim.distributed.planning.strategies import (
    Auto,
    Exchange,
    FullySharded,
    Replicated,
    Sharded,
    Statistics,
    Strategy,
    check_strategy,
)
from kfac_optim.specs import Structure
from kfac_optim.utils.validation import check_integer, check_kind


def make_plan(
    model: Sequence[Covered | Uncovered],
    ranks: int,
    strategy: Strategy | Auto,
    cost: CostModel,
    options: PlanOptions | None = None,
) -> Plan:
    """Lay the work of K-FAC on ranks: the same on every rank that calls it with the same arguments.

    Args:
        model: its layers and other trained parameters, in forward order. Owners do not depend on this order, but on
            names and shapes; the order of buckets does.
        ranks: how many there are.
        strategy: the layout, or `Auto` to have one chosen.
        cost: rates of the machines, equal on all ranks.
        options: None is `PlanOptions()`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: no ranks, two of one name, or no strategy that fits into the memory budget.
    """
    check_integer("ranks of make_plan", ranks)
    check_kind("cost of make_plan", cost, CostModel)
    options = PlanOptions() if options is None else options
    check_kind("options of make_plan", options, PlanOptions)
    for each in model:
        if not isinstance(each, Covered | Uncovered):
            raise TypeError(
                f"kfac_optim: the model to plan for must be of Covered(...) and Uncovered(...), got {each!r}."
            )
    if twice := sorted(name for name, count in Counter(each.name for each in model).items() if count > 1):
        raise ValueError(f"kfac_optim: two of the layers to plan for are named {twice[0]!r}; names must be unique.")
    if not isinstance(strategy, Auto):
        check_strategy("strategy of make_plan", strategy)
        return _Planner(model, ranks, strategy, cost, options).plan()
    plans = [_Planner(model, ranks, each, cost, options).plan() for each in strategy.strategies(ranks)]
    budget = strategy.memory_budget
    fitting = [plan for plan in plans if budget is None or plan.memory_per_rank <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.memory_per_rank)
        raise ValueError(
            f"kfac_optim: no strategy fits into the memory_budget of Auto, {budget} bytes a rank; {least.strategy} "
            f"needs least, {least.memory_per_rank}. Raise the budget, use more ranks, or keep less of wide factors "
            "(BlockDiagonal, Structure.DIAGONAL)."
        )
    return min(fitting, key=lambda plan: (plan.seconds.mean, plan.memory_per_rank))


@dataclass(eq=False)
class _Planner:
    """Shares what the steps of making one plan need."""

    model: Sequence[Covered | Uncovered]
    ranks: int
    strategy: Strategy
    cost: CostModel
    options: PlanOptions

    def __post_init__(self) -> None:
        self.merges = self.ranks > 1 and self.strategy.statistics is Statistics.ALL
        self.workers = self.strategy.workers(self.ranks)
        self.largest = 0  # bytes of a bucket
        model = self.model if isinstance(self.strategy, Sharded) else ()
        self.everywhere = on_all_ranks(model, self.ranks, self.options, self.cost)
        self.layers = self._place_layers()
        self.parameters = self._place_parameters()

    def plan(self) -> Plan:
        items = {payload: self._items(payload) for payload in Payload}
        buckets: dict[Payload, tuple[PlannedBucket, ...]] = {}
        for payload in sorted(Payload, key=lambda each: each is Payload.SUMS):  # whose batches depend on the largest
            buckets[payload] = self._buckets(payload, items[payload])
            self.largest = max([self.largest, *(bucket.size for bucket in buckets[payload] if not payload.is_control)])
        refresh_loads = [0.0] * self.ranks
        for part in (part for layer in self.layers for part in layer.parts):
            refresh_loads[part.owner] += part.part.refresh
        apply_loads = self._over_ranks([layer.apply for layer in self.layers])
        plan = Plan(
            ranks=self.ranks,
            strategy=self.strategy,
            options=self.options,
            cost=self.cost,
            layers=self.layers,
            parameters=self.parameters,
            buckets=tuple(bucket for payload in Payload for bucket in buckets[payload]),
            traffic=(),
            refresh_loads=tuple(refresh_loads),
            apply_loads=tuple(apply_loads),
            memory=self._memory(),
            seconds=predict(
                [self._compute(each) for each in self.model],
                buckets,
                refresh=max(refresh_loads),
                apply=max(apply_loads),
                period=self.options.inverse_update_period,
                cost=self.cost,
            ),
        )
        return replace(
            plan, traffic=tuple(self._traffic(payload, each, plan) for payload, each in items.items() if each)
        )

    def _place_layers(self) -> tuple[LayerPlan, ...]:
        covered = {each.name: (number, each) for number, each in enumerate(self.model) if isinstance(each, Covered)}
        parts = {name: each.inverse.parts(each.spec.by_blocks()) for name, (_, each) in covered.items()}
        costs = {name: each.inverse.flops(each.spec.by_blocks()) for name, (_, each) in covered.items()}
        loads = {
            name: LayerLoad(
                {part.name: Load(part.refresh, packed_words(part)) for part in parts[name]},
                *((0.0, 0) if name in self.everywhere else (costs[name].apply + self._link(each.words), each.words)),
            )
            for name, (_, each) in covered.items()
        }
        period, per_node = self.options.inverse_update_period, self.cost.ranks_per_node
        places = place(loads, self.ranks, self.strategy, period, per_node)
        return tuple(
            LayerPlan(
                name=name,
                description=each.description,
                position=number,
                words=each.words,
                apply=costs[name].apply,
                workers=range(self.ranks) if name in self.everywhere else places[name].workers,
                parts=part_plans(parts[name], places[name], self.options.mass_words),
            )
            for name, (number, each) in covered.items()
        )

    def _link(self, words: int) -> float:
        """Return the operations that an owner could do while so many words come to it and go again (`Sharded`)."""
        size = 2 * words * self.options.parameter_dtype.itemsize
        return self.cost.flop_rate * size / self.cost.bandwidth if isinstance(self.strategy, Sharded) else 0.0

    def _place_parameters(self) -> tuple[ParameterPlan, ...]:
        uncovered = [(number, each) for number, each in enumerate(self.model) if isinstance(each, Uncovered)]
        owners: dict[str, int] = {}
        if isinstance(self.strategy, Sharded):
            owned = {each.name: Load(each.words, 0) for _, each in uncovered if each.name not in self.everywhere}
            owners = largest_first(owned, by_nodes(range(self.ranks), self.cost.ranks_per_node))
        return tuple(ParameterPlan(each.name, number, each.words, owners.get(each.name)) for number, each in uncovered)

    def _items(self, payload: Payload) -> list[Item]:
        """Return what is sent of one payload, in order."""
        if self.ranks == 1:
            return []
        if payload.is_control:
            return [Item(payload.value, words, -1, 0) for words in self._control_words(payload) if words]
        if payload in (Payload.ROWS, Payload.DIRECTIONS):
            sharded = isinstance(self.strategy, FullySharded)
            return [Item(each.name, each.words, each.workers.start, each.position) for each in self.layers if sharded]
        if payload is Payload.GRADIENTS:
            return [] if isinstance(self.strategy, FullySharded) else self._matrices()[::-1]
        if payload is Payload.PARAMETERS:
            return [item for item in self._matrices() if item.rank >= 0]
        if payload is Payload.PRECONDITIONED:
            spread = isinstance(self.strategy, Replicated) and self.workers < self.ranks
            return [Item(each.name, each.words, each.workers.start, each.position) for each in self.layers if spread]
        if payload is Payload.SUMS:
            return [
                Item(part.name_in(layer.name), part.sums, part.owner, layer.position)
                for layer in reversed(self.layers)
                for part in reversed(layer.parts)
                if self.merges
            ]
        return [item for item, _ in self._all_results()]

    def _control_words(self, payload: Payload) -> tuple[int, ...]:
        """Give the words that each all-reduce takes beside what it sums."""
        if payload is Payload.VOTES:
            buckets = fill(self._items(Payload.SUMS), self.options.bucket_words(Payload.SUMS))
            return (VOTE_WORDS + vote_marks(len(self.layers), len(buckets)),)
        if payload is Payload.SCALARS:
            return self.options.scalars if self.layers and not isinstance(self.strategy, Replicated) else ()
        if payload is Payload.STATUS:
            return (STATUS_WORDS * len(self.layers),)
        return (sum(layer.trace_words for layer in self.layers) if self.merges else 0,)

    def _matrices(self) -> list[Item]:
        """Return gradients, or parameters, in forward order."""
        sharded = isinstance(self.strategy, Sharded)
        found = [Item(p.name, p.words, -1 if p.owner is None else p.owner, p.position) for p in self.parameters]
        found += [Item(lp.name, lp.words, lp.owner if sharded else -1, lp.position) for lp in self.layers]
        return sorted(found, key=lambda item: item.position)

    def _all_results(self) -> list[tuple[Item, range]]:
        if self.ranks == 1:
            return []
        return [result for layer in self.layers for part in layer.parts for result in self._results(layer, part)]

    def _results(self, layer: LayerPlan, part: PartPlan) -> list[tuple[Item, range]]:
        """Return what the owner of a part sends of its result, and the group that it is sent in."""
        group, needed = with_owner(layer.workers, part.owner), part.part.measuring
        # Whoever takes statistics in the bases needs them.
        takers = range(self.ranks) if self.merges else group
        found = []
        for measuring, words, members in ((True, needed, takers), (False, part.part.sent - needed, group)):
            if words and len(members) > 1:
                name = result_name(layer.name, part.part.name, measuring=measuring)
                found.append((Item(name, words, part.owner, layer.position), members))
        return found

    def _buckets(self, payload: Payload, items: Sequence[Item]) -> tuple[PlannedBucket, ...]:
        if payload is Payload.PRECONDITIONED:
            # From a row of the grid of groups: all ranks that get what one worker has.
            strided = any(layer.workers.step > 1 for layer in self.layers)
            row = range(self.ranks // self.workers) if strided else range(0, self.ranks, self.workers)
            return self._filled(payload, items, row)
        if payload is Payload.GRADIENTS:  # those of no owner go in all-reduces
            kinds = [[item for item in items if (item.rank < 0) is alike] for alike in (False, True)]
            apart = [bucket for kind in kinds for bucket in self._filled(payload, kind, range(self.ranks))]
            return tuple(in_order_of_backward(apart))
        if payload is not Payload.INVERSES:
            return self._filled(payload, items, range(self.ranks))
        by_group: dict[range, list[Item]] = {}
        for item, members in self._all_results():
            by_group.setdefault(members, []).append(item)
        alone = len(by_group) == 1
        return tuple(
            b for members, group in by_group.items() for b in self._filled(payload, group, members, alone=alone)
        )

    def _filled(
        self, payload: Payload, items: Sequence[Item], members: range, *, alone: bool = True
    ) -> tuple[PlannedBucket, ...]:
        """Return the buckets of one group; `alone` says whether the payload has no other."""
        # By segments go numbers that are for all ranks; rows are cut as their owners need them.
        segments = alone and members == range(self.ranks) and payload not in (Payload.ROWS, Payload.DIRECTIONS)
        return make_buckets(
            payload,
            items,
            limit=self.options.bucket_words(payload),
            itemsize=self.options.itemsize(payload),
            members=members,
            cost=self.cost,
            exchange=self.options.exchange if segments else Exchange.DIRECT,
            largest=self.largest,
        )

    def _traffic(self, payload: Payload, items: Sequence[Item], plan: Plan) -> Traffic:
        others, total = self.ranks - 1, sum(item.words for item in items)
        rare = payload in (Payload.SUMS, Payload.INVERSES, Payload.TRACES, Payload.STATUS)
        by_all = sum(item.words for item in items if item.rank < 0)
        words = others * (total + by_all)
        if payload is Payload.ROWS:
            words = sum(item.words - self._shards(item)[item.rank] for item in items)
        elif payload is Payload.DIRECTIONS:  # to each rank that holds a copy
            words = sum(max(item.words, sum(held := self._shards(item))) - held[item.rank] for item in items)
        elif payload is Payload.PRECONDITIONED:
            words = (self.ranks - self.workers) * total
        elif payload is Payload.INVERSES:
            words = sum(item.words * (len(members) - 1) for item, members in self._all_results())
        period, itemsize = self.options.inverse_update_period if rare else 1, self.options.itemsize(payload)
        if plan.by_segments(payload):
            words = sum(bucket.moved_bytes for bucket in all_buckets(plan, payload)) // itemsize + 2 * others * by_all
        return Traffic(payload, words, itemsize, period)

    def _shards(self, item: Item) -> Sequence[int]:
        """Return the elements of a sharded layer, or parameter, that each rank holds."""
        shards = layer.shards if isinstance(layer := self.model[item.position], Covered) else ()
        return shards or [item.words // self.ranks] * self.ranks

    def _over_ranks(self, amounts: Sequence[float]) -> list[float]:
        """Sum over the layers that each rank preconditions; `amounts` has a number for each layer."""
        loads = [0.0] * self.ranks
        for layer, amount in zip(self.layers, amounts, strict=True):
            for rank in layer.workers:
                loads[rank] += amount
        return loads

    def _memory(self) -> tuple[Memory, ...]:
        options = self.options
        averages, inverses, momentum = ([0] * self.ranks for _ in range(3))
        everywhere, at_workers = 0, []
        for layer in self.layers:
            at_workers.append(0)
            for plan in layer.parts:
                part, owner = plan.part, plan.owner
                averages[owner] += packed_words(part)
                # Of what is measured in bases, the owner has the rest of the result among its averages.
                rest = part.sent - part.measuring if part.measuring else 0
                wide = part.held if part.measuring and self.merges else 0
                everywhere += wide
                at_workers[-1] += part.held - wide + rest
                inverses[owner] += -rest if owner in layer.workers else part.held - wide
        held = self._over_ranks(at_workers)
        for item in self._matrices() if options.momentum else ():
            for rank in range(self.ranks) if item.rank < 0 else (item.rank,):
                momentum[rank] += self._shards(item)[rank] if isinstance(self.strategy, FullySharded) else item.words
        parts = [part for layer in self.layers for part in layer.parts if self.merges]
        sums = sum(packed_words(part.part) for part in parts) * options.factor_dtype.itemsize
        buffers = sum(part.sums for part in parts) * options.sent_dtype.itemsize
        return tuple(
            Memory(
                sums=sums,
                averages=averages[rank] * options.factor_dtype.itemsize,
                inverses=(inverses[rank] + int(held[rank]) + everywhere) * options.inverse_dtype.itemsize,
                buffers=buffers,
                momentum=momentum[rank] * options.parameter_dtype.itemsize,
            )
            for rank in range(self.ranks)
        )

    def _compute(self, each: Covered | Uncovered) -> Compute:
        if isinstance(each, Uncovered):
            return Compute(0.0, 0.0)
        forward = 2.0 * each.rows * each.words
        statistics = each.rows * sum(
            factor.numel for factor in each.spec.by_blocks().factors() if factor.structure is not Structure.IDENTITY
        )
        share = self.ranks if self.strategy.statistics is Statistics.OWN else 1
        return Compute(forward, 2 * forward + statistics / self.options.factor_update_period / share)
