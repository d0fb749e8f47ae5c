"""What does a training step cost with KFACOptimizer, as a multiple of the same step with torch.optim.SGD?

A training step is zero_grad, forward, backward and optimizer step, on synthetic data. All variants run interleaved,
in blocks of whole inverse periods, so that statistics and refreshes count with their true frequency; ratios are
medians over rounds. The floor is the arithmetic of K-FAC's plain formulas at the rate of a large matrix product
timed in the same run; the gap is measured overhead over floor overhead.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import arguments, floor
from benchmarks.arguments import Periods
from benchmarks.harness import Contender, matmul_rate, median_ratio, pin_threads, time_interleaved, write_json
from benchmarks.workloads import WORKLOADS, Workload
from kfac_optim import KFACOptimizer

HELP = "what does a step cost, and how far is that from the arithmetic floor?"

_NEVER = 10**9  # a period that no run reaches
# Each adds one part of K-FAC to the one before: application, statistics, refresh.
_STAGES = (Periods(_NEVER, _NEVER), Periods(1, _NEVER), Periods(1, 1))
_LR = 1e-6  # the same batch is seen in every step; a model that learns it would time vanishing gradients
_MOMENTUM = 0.9
_SHORTEST_BLOCK = 2.0  # seconds; a block much shorter than the machine's own hiccups tells nothing
_PEER = "kfac_pytorch on 2 cores"


@dataclass(frozen=True, slots=True)
class PeriodCost:
    """Cost of training with one pair of periods.

    Attributes:
        ratio: seconds of a step over those of SGD.
        floor_ratio: the ratio that the floor's arithmetic alone would give.
        gap: measured overhead over the floor's overhead; 1 is the floor.
        peer_ratio: kfac_pytorch's ratio, measured elsewhere.
    """

    periods: str
    seconds: float
    ratio: float
    floor_ratio: float
    gap: float
    peer_ratio: float | None


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of K-FAC, each time it runs: seconds measured, and by the floor's arithmetic."""

    seconds: float
    floor_seconds: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of one workload.

    Attributes:
        matmul_rate: floating-point operations per second of a large matrix product.
        state_multiple: bytes of optimizer state beyond SGD's, over the parameters' bytes.
        parts: statistics, refresh, application, and update (what is left of the step beyond SGD's).
    """

    model: str
    examples: int
    sgd_seconds: float
    matmul_rate: float
    state_multiple: float
    parts: dict[str, PartCost]
    periods: list[PeriodCost]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    parser.add_argument("--device", type=arguments.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--periods",
        nargs="+",
        type=arguments.periods,
        default=[Periods(1, 1), Periods(1, 10), Periods(10, 100)],
        metavar="FACTOR,INVERSE",
        help="steps between statistics and between refreshes (default: 1,1 1,10 10,100)",
    )
    parser.add_argument("--repeats", type=arguments.positive_int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("step-cost.json"), help="JSON file (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one round, an eighth of the batch: shows that it runs, not what it costs"
    )


def run(args: argparse.Namespace) -> None:
    console = Console()
    pin_threads(args.threads)
    torch.manual_seed(0)
    costs = []
    for name in args.models:
        workload = WORKLOADS[name]
        if args.quick:
            workload = replace(workload, examples=workload.examples // 8)
        costs.append(measure(name, workload, args.periods, 1 if args.quick else args.repeats, args.device, console))
    console.print(ratio_table(costs), parts_table(costs))
    report = {"benchmark": "step-cost", "quick": args.quick, "models": [asdict(cost) for cost in costs]}
    write_json(args.out, report, args.device)
    console.print(f"{torch.get_num_threads()} threads on {args.device}. Figures: {args.out}")


def measure(
    name: str, workload: Workload, periods: Sequence[Periods], rounds: int, device: torch.device, console: Console
) -> ModelCost:
    """Time one workload with SGD, with K-FAC at each of ``periods``, and with K-FAC less one part after the other."""
    model = workload.model().to(device)
    inputs, targets = (tensor.to(device) for tensor in workload.batch(workload.examples))
    variants = {
        "sgd": _Variant(model, workload, None),
        "no layer": _Variant(model, workload, Periods(_NEVER, _NEVER), skip_layers=("*",)),
        **{str(pair): _Variant(model, workload, pair) for pair in (*_STAGES, *periods)},
    }
    contenders = []
    for key, variant in variants.items():
        step = functools.partial(variant.step, inputs, targets)
        contenders.append(Contender(key, step, variant.warm_up(step, device)))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(name, total=rounds * sum(contender.block for contender in contenders))
        seconds = time_interleaved(contenders, rounds, device, lambda steps: progress.advance(task, steps))
    for key, variant in variants.items():
        variant.check_finite(f"{name}, {key}")

    layers = floor.observe(model, inputs)
    rate = matmul_rate(device)
    sgd_seconds = statistics.median(seconds["sgd"])
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    held = variants[str(periods[0])].state_bytes() - variants["sgd"].state_bytes()
    return ModelCost(
        model=name,
        examples=workload.examples,
        sgd_seconds=sgd_seconds,
        matmul_rate=rate,
        state_multiple=held / parameter_bytes,
        parts=_part_costs(seconds, layers, rate),
        periods=[
            _period_cost(pair, seconds, floor.overhead(layers, pair) / rate / sgd_seconds, workload) for pair in periods
        ],
    )


class _Variant:
    """A copy of the model under one optimizer: SGD where there are no periods."""

    def __init__(
        self, model: nn.Module, workload: Workload, periods: Periods | None, skip_layers: Sequence[str] = ()
    ) -> None:
        self.model = copy.deepcopy(model)
        self.loss = workload.loss
        self.optimizer: Optimizer
        if periods is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR, momentum=_MOMENTUM)
        else:
            self.optimizer = KFACOptimizer(
                self.model,
                lr=_LR,
                momentum=_MOMENTUM,
                factor_update_period=periods.factor,
                inverse_update_period=periods.inverse,
                loss_terms=workload.loss_terms,
                skip_layers=skip_layers,
            )
        self.whole = periods.common if periods is not None and periods.common < _NEVER else 1

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def warm_up(self, step: Callable[[], None], device: torch.device) -> int:
        """Leave the first steps behind, which allocate, take statistics and refresh whatever the periods.

        Returns:
            Steps of a block: whole periods, and long enough to time.
        """
        for _ in range(2):
            step()
        self._age()
        timed = time_interleaved([Contender("", step, self.whole)], 1, device, lambda _: None)
        return self.whole * math.ceil(_SHORTEST_BLOCK / (self.whole * timed[""][0]))

    def _age(self) -> None:
        """Make the averages old, so that refreshes come by the period alone, as in all but the first steps of a run."""
        state_dict = self.optimizer.state_dict()
        for state in state_dict["state"].values():
            if "kfac" in state:
                state["kfac"]["clock"] |= {"folds": _NEVER, "folds_at_refresh": _NEVER}
        self.optimizer.load_state_dict(state_dict)

    def check_finite(self, name: str) -> None:
        if not all(bool(param.isfinite().all()) for param in self.model.parameters()):
            raise RuntimeError(f"step-cost: {name}: parameters are no longer finite, so the timing means nothing")

    def state_bytes(self) -> int:
        return _tensor_bytes(self.optimizer.state_dict()["state"])


def _period_cost(
    periods: Periods, seconds: Mapping[str, Sequence[float]], floor_overhead: float, workload: Workload
) -> PeriodCost:
    """``floor_overhead`` is a multiple of an SGD step."""
    ratio = median_ratio(seconds[str(periods)], seconds["sgd"])
    return PeriodCost(
        periods=str(periods),
        seconds=statistics.median(seconds[str(periods)]),
        ratio=ratio,
        floor_ratio=1 + floor_overhead,
        gap=(ratio - 1) / floor_overhead,
        peer_ratio=workload.peer.get((periods.factor, periods.inverse)),
    )


def _part_costs(
    seconds: Mapping[str, Sequence[float]], layers: Sequence[floor.LayerWork], rate: float
) -> dict[str, PartCost]:
    """Each part is the difference between a variant with it and one without, in the same round."""
    never, gather, everything = map(str, _STAGES)
    stages = {
        "update": ("no layer", "sgd", 0),
        "application": (never, "no layer", sum(layer.application for layer in layers)),
        "statistics": (gather, never, sum(layer.statistics for layer in layers)),
        "refresh": (everything, gather, sum(layer.refresh for layer in layers)),
    }
    return {
        part: PartCost(
            statistics.median(a - b for a, b in zip(seconds[more], seconds[less], strict=True)), operations / rate
        )
        for part, (more, less, operations) in stages.items()
    }


def _tensor_bytes(state: object) -> int:
    """Bytes of all tensors in nested mappings and sequences."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        state = list(state.values())
    return sum(map(_tensor_bytes, state)) if isinstance(state, (list, tuple)) else 0


def ratio_table(costs: Sequence[ModelCost]) -> Table:
    table = Table(
        title="A training step as a multiple of the same step with SGD",
        caption=f"state: multiple of the parameters' bytes; peer: ratio of {_PEER}",
        box=box.SIMPLE,
    )
    table.add_column("model", no_wrap=True)
    for heading in ("periods", "SGD ms", "K-FAC ms", "ratio", "floor", "gap", "state", "peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in costs:
        for row in cost.periods:
            table.add_row(
                cost.model,
                row.periods,
                f"{1e3 * cost.sgd_seconds:.1f}",
                f"{1e3 * row.seconds:.1f}",
                f"{row.ratio:.2f}",
                f"{row.floor_ratio:.2f}",
                f"{row.gap:.1f}",
                f"{cost.state_multiple:.1f}",
                "" if row.peer_ratio is None else f"{row.peer_ratio:.2f}",
            )
        table.add_section()
    return table


def parts_table(costs: Sequence[ModelCost]) -> Table:
    table = Table(title="Milliseconds of each part, each time it runs (floor)", box=box.SIMPLE)
    table.add_column("model")
    for part in costs[0].parts:
        table.add_column(part, justify="right")
    for cost in costs:
        cells = (f"{1e3 * part.seconds:.1f} ({1e3 * part.floor_seconds:.1f})" for part in cost.parts.values())
        table.add_row(cost.model, *cells)
    return table
