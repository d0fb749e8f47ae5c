"""What does K-FAC send, hold and cost on several processes, beside SGD under DDP?

Three models of step-cost, in DDP on gloo, every process with a whole batch of its own. Runs under torchrun, mpirun or
SLURM (``torchrun --nproc-per-node 4 -m benchmarks distributed``), or starts ``--ranks`` processes itself.

One step of each kind is looked at, one without statistics, one with, and one that refreshes, and weighed by how often
it comes: a period of 100 steps is not run. Bytes are those handed to collectives, by all ranks; of a ring all-reduce
``2(P−1)/P`` of the tensor by each. Not in them: what DDP sends once at the start, and the buffers of norm layers that
it broadcasts, which SGD needs as well. Ratios of seconds are medians over rounds in which all layouts take turns.
"""

import argparse
import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks import processes
from benchmarks.arguments import Periods, UsageError
from benchmarks.harness import Contender, pin_threads, ratio_spread, time_interleaved, write_json
from benchmarks.variants import LR, MOMENTUM, NEVER
from benchmarks.workloads import WORKLOADS, Workload
from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Message, Placement, Replicated, Sharded, Strategy

_CPU = torch.device("cpu")
# Periods of each kind of step. A few that refresh come first: from then on no average is young enough to ask for it.
_KINDS = {"plain": Periods(NEVER, NEVER), "statistics": Periods(1, NEVER), "refresh": Periods(1, 1)}
_YOUTH = 6


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """Holds what one layout costs at one pair of periods.

    Attributes:
        layout: its name.
        periods: statistics and refresh.
        bytes: counted, that all ranks send in a step, averaged over the periods.
        planned_bytes: likewise, as the plan predicts.
        bytes_ratio: ``bytes`` over those of SGD under DDP.
        held_bytes: the bytes of inverses, averages and momentum, on the rank that holds most, between two steps.
        planned_memory: what the plan predicts of these for that rank, with what is under way within a step.
        seconds: the seconds of a step, averaged over the periods.
        seconds_ratio: ``seconds`` over SGD's.
        seconds_ratios: its median, lowest and highest over the rounds.
    """

    layout: str
    periods: str
    bytes: float
    planned_bytes: float
    bytes_ratio: float
    held_bytes: int
    planned_memory: int
    seconds: float
    seconds_ratio: float
    seconds_ratios: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Holds what one workload costs on all layouts; ``examples`` are those of each rank."""

    model: str
    examples: int
    parameter_bytes: int
    sgd_bytes: float
    sgd_held_bytes: int
    sgd_seconds: float
    layouts: list[LayoutCost]


@dataclass(frozen=True, slots=True)
class Choices:
    """Holds the arguments, as processes are given them."""

    models: tuple[str, ...]
    periods: tuple[Periods, ...]
    threads: int
    repeats: int
    quick: bool
    out: Path


def run(args: argparse.Namespace) -> None:
    for pair in args.periods:
        if pair.inverse % pair.factor:
            raise UsageError(f"argument --periods: expected INVERSE to be a multiple of FACTOR, got {str(pair)!r}")
    repeats = 1 if args.quick else args.repeats
    choices = Choices(tuple(args.models), tuple(args.periods), args.threads, repeats, args.quick, args.out)
    with processes.launched() as place:
        launched = dist.is_initialized()
        if launched and args.ranks not in (None, place.world_size):
            raise UsageError(
                f"argument --ranks: {place.launcher.value} started {place.world_size} processes, got {args.ranks}; "
                "leave it out"
            )
        ranks = place.world_size if launched else args.ranks or 2
        if ranks == 1:
            raise UsageError("argument --ranks: expected at least 2, for one process sends nothing; got 1")
        if launched:
            compare(choices)
        else:
            processes.start(compare, ranks, choices)


def compare(choices: Choices) -> None:
    """Run the whole benchmark, on all ranks alike; the first of them shows it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank > 0)
    pin_threads(choices.threads)
    costs = [measure(name, choices, console) for name in choices.models]
    if rank > 0:
        return
    for cost in costs:
        console.print(cost_table(cost, ranks))
    report = {
        "benchmark": "distributed",
        "quick": choices.quick,
        "repeats": choices.repeats,
        "ranks": ranks,
        "models": [asdict(cost) for cost in costs],
    }
    write_json(choices.out, report, _CPU)
    console.print(f"{ranks} ranks, {torch.get_num_threads()} threads each. Figures: {choices.out}")


def layouts(ranks: int) -> dict[str, Strategy]:
    """Return layouts between communication and memory, and the layout of SGD's traffic."""
    found: dict[str, Strategy] = {"Replicated(1)": Replicated()}
    if ranks % 2 == 0 and ranks > 2:
        found["Replicated(1/2)"] = Replicated(0.5)
    found[f"Replicated(1/{ranks})"] = Replicated(1 / ranks)
    return found | {"Sharded()": Sharded(), "Sharded(FACTORS)": Sharded(Placement.FACTORS)}


def measure(name: str, choices: Choices, console: Console) -> ModelCost:
    """Measure one workload: every layout is counted at all periods, and timed."""
    workload = WORKLOADS[name]
    if choices.quick:
        workload = replace(workload, examples=max(workload.examples // 8, 1))
    torch.manual_seed(0)
    model = workload.model()
    torch.manual_seed(1 + dist.get_rank())
    batch = workload.batch(workload.examples)
    strategies = layouts(dist.get_world_size())
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        counting = progress.add_task(f"{name}, bytes", total=1 + len(strategies) * len(choices.periods))
        sgd = _Trainer(model, workload, batch, None, None, count=True)
        sgd_bytes = sgd.bytes_of("plain")
        progress.advance(counting)
        counted = {}
        for layout, strategy in strategies.items():
            for periods in choices.periods:
                counted[layout, periods] = _count(_Trainer(model, workload, batch, strategy, periods, count=True))
                progress.advance(counting)
        timing = progress.add_task(f"{name}, seconds", total=choices.repeats * (1 + len(_KINDS) * len(strategies)))
        seconds = _time(
            {
                layout: _Trainer(model, workload, batch, strategy, choices.periods[0])
                for layout, strategy in {"DDP-SGD": None, **strategies}.items()
            },
            choices.repeats,
            functools.partial(progress.advance, timing),
        )
    found = []
    for (layout, periods), (sent, planned, held, memory) in counted.items():
        kinds = {kind: seconds[layout, kind] for kind in _KINDS}
        means = [_mean(dict(zip(kinds, each, strict=True)), periods) for each in zip(*kinds.values(), strict=True)]
        found.append(
            LayoutCost(
                layout=layout,
                periods=str(periods),
                bytes=(mean := _mean(sent, periods)),
                planned_bytes=planned,
                bytes_ratio=mean / sgd_bytes,
                held_bytes=held,
                planned_memory=memory,
                seconds=statistics.median(means),
                seconds_ratio=(ratios := ratio_spread(means, seconds["DDP-SGD", "plain"]))["median"],
                seconds_ratios=ratios,
            )
        )
    return ModelCost(
        model=name,
        examples=workload.examples,
        parameter_bytes=sum(param.nbytes for param in model.parameters()),
        sgd_bytes=sgd_bytes,
        sgd_held_bytes=sgd.held_bytes(),
        sgd_seconds=statistics.median(seconds["DDP-SGD", "plain"]),
        layouts=found,
    )


class _Trainer:
    """Trains a copy of the model in DDP under one optimizer: SGD where there is no strategy.

    Args:
        count: whether what is sent is counted, DDP's own by a hook; where steps are timed it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        batch: tuple[Tensor, Tensor],
        strategy: Strategy | None,
        periods: Periods | None,
        *,
        count: bool = False,
    ) -> None:
        self.model = DistributedDataParallel(copy.deepcopy(model))
        self.loss, self.batch = workload.loss, batch
        self.sent = 0.0
        if count and not isinstance(strategy, Sharded):
            self.model.register_comm_hook(self, _count_gradients)
        self.optimizer: Optimizer
        if strategy is None or periods is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        else:
            self.optimizer = KFACOptimizer(
                self.model,
                lr=LR,
                momentum=MOMENTUM,
                factor_update_period=periods.factor,
                inverse_update_period=periods.inverse,
                loss_terms=workload.loss_terms,
                distributed=DistributedConfig(strategy, observe=self._note if count else None),
            )
        self._step()  # by the periods that it is planned for
        for _ in range(_YOUTH):
            self.step("refresh")

    def step(self, kind: str) -> None:
        """Take one step of that kind; SGD has only one kind."""
        if isinstance(self.optimizer, KFACOptimizer):
            for group in self.optimizer.param_groups:
                group["factor_update_period"] = _KINDS[kind].factor
                group["inverse_update_period"] = _KINDS[kind].inverse
        self._step()

    def bytes_of(self, kind: str) -> float:
        """Return the bytes that all ranks send in one step."""
        self.sent = 0.0
        self.step(kind)
        total = torch.tensor(self.sent, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def held_bytes(self) -> int:
        """Return the bytes of the optimizer's state, on the rank that has most."""
        states = [state for state in self.optimizer.state.values() if isinstance(state, Mapping)]
        held = sum(state["momentum_buffer"].nbytes for state in states if state.get("momentum_buffer") is not None)
        if isinstance(self.optimizer, KFACOptimizer):
            held += sum(block.state_bytes for block in self.optimizer.summary().blocks)
        return _most(held)

    def _step(self) -> None:
        inputs, targets = self.batch
        self.optimizer.zero_grad()
        self.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _note(self, message: Message) -> None:
        self.sent += message.sent_bytes


# torch refuses other annotations than its own.
def _count_gradients(trainer: _Trainer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    ranks = dist.get_world_size()
    trainer.sent += 2 * (ranks - 1) * bucket.buffer().nbytes / ranks
    group: dist.ProcessGroup = trainer.model.process_group
    mean: torch.futures.Future[torch.Tensor] = allreduce_hook(group, bucket)
    return mean


def _count(trainer: _Trainer) -> tuple[dict[str, float], float, int, int]:
    """Return the bytes of each kind of step, of a step by the plan, and of the fullest rank, held and planned."""
    sent = {kind: trainer.bytes_of(kind) for kind in _KINDS}
    assert isinstance(trainer.optimizer, KFACOptimizer)
    plan = trainer.optimizer.plan()
    assert plan is not None, "there are several ranks"
    return sent, float(plan.bytes_per_step), trainer.held_bytes(), plan.memory_per_rank


def _time(
    trainers: Mapping[str, _Trainer], rounds: int, advance: Callable[[int], object]
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of one step of each kind in each round, as this rank waits for them."""
    names = {f"{layout} {kind}": (layout, kind) for layout, kind in _kinds(trainers)}
    contenders = [
        Contender(name, functools.partial(trainers[layout].step, kind), 1) for name, (layout, kind) in names.items()
    ]

    def together(steps: int) -> None:
        advance(steps)
        dist.barrier()  # so that no rank's clock starts before the others are there

    dist.barrier()
    timed = time_interleaved(contenders, rounds, _CPU, together)
    return {names[name]: seconds for name, seconds in timed.items()}


def _kinds(trainers: Mapping[str, _Trainer]) -> Iterator[tuple[str, str]]:
    for layout, trainer in trainers.items():
        several = isinstance(trainer.optimizer, KFACOptimizer)
        yield from ((layout, kind) for kind in (_KINDS if several else ("plain",)))


def _mean(of_kinds: Mapping[str, float], periods: Periods) -> float:
    """Average a step's figure over the periods."""
    refresh, measure = Fraction(1, periods.inverse), Fraction(1, periods.factor)
    shares = {"plain": 1 - measure, "statistics": measure - refresh, "refresh": refresh}
    return sum(of_kinds[kind] * float(share) for kind, share in shares.items())


def _most(number: int) -> int:
    """Return the largest value that any rank has."""
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def cost_table(cost: ModelCost, ranks: int) -> Table:
    rows: dict[str, list[LayoutCost]] = {}
    for each in cost.layouts:
        rows.setdefault(each.layout, []).append(each)
    pairs = [each.periods for each in next(iter(rows.values()))]
    table = Table(
        title=f"{cost.model}, {ranks} ranks, {cost.examples} examples on each",
        caption=f"a step over one of SGD under DDP, which sends {cost.sgd_bytes / 2**20:.1f} MiB in "
        f"{1e3 * cost.sgd_seconds:.0f} ms\nMiB: held by the fullest rank; plan: with what is under way within a step",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layout", no_wrap=True)
    for heading in (*(f"bytes\n{pair}" for pair in pairs), "MiB", "plan", *(f"time\n{pair}" for pair in pairs)):
        table.add_column(heading, justify="right", no_wrap=True)
    ones = ["1"] * len(pairs)
    table.add_row("SGD", *ones, _mebibytes(cost.sgd_held_bytes), _mebibytes(cost.sgd_held_bytes), *ones)
    for layout, found in rows.items():
        table.add_row(
            layout,
            *(f"{each.bytes_ratio:.3f}" for each in found),
            *map(_mebibytes, (found[0].held_bytes, found[0].planned_memory)),
            *(f"{each.seconds_ratio:.2f}" for each in found),
        )
    return table


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f}"
