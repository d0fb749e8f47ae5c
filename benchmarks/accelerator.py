"""What does K-FAC cost on an accelerator, and where is the gap to SGD?

A GPT-2-small-sized transformer (12 layers, width 768, 16 × 1024 tokens of 50257, output layer tied to the embedding)
and a ResNet-50 (256 images of 224 × 224, channels last), in autocast to bfloat16 with float32 weights, on synthetic
data. K-FAC has its defaults but for `loss_terms`, `fused=True` where a row says nothing else, and what a row says: so
the tied matrix keeps a dense factor on its narrow side and a diagonal one on that of the vocabulary (max_factor_dim),
and norm layers are preconditioned too.

All variants of a model run interleaved, in blocks of whole inverse periods, each with weights of its own. The ratio is
to SGD with fused kernels in the same round, that of compiled rows to SGD compiled. Peaks and waits are those of the
steps from a refresh to the second statistics after it; the steps that follow are timed one by one. Then, of a model
each: what a refresh takes by each representation on the widths that are met; and a profile of one step with statistics
and a refresh.

On a CPU nothing of this is of interest; --quick --device cpu shows that it runs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.profiler import ProfilerActivity, profile

from benchmarks import arguments
from benchmarks.arguments import Periods
from benchmarks.harness import Contender, chosen_device, ratio_spread, synchronize, time_interleaved, write_json
from benchmarks.memory import peak_growth
from benchmarks.models import ResNet50, Transformer
from benchmarks.variants import LR, MOMENTUM, NEVER, Variant
from kfac_optim import (
    EKFAC,
    Background,
    Cholesky,
    Eigen,
    Inverse,
    KFACOptimizer,
    LossTerms,
    LowRank,
    NewtonSchulz,
    SelectedUpdates,
)
from kfac_optim.step.roles import Statistics

_BASELINE = "SGD, fused"
REPRESENTATIONS: dict[str, Inverse[Any]] = {
    "Cholesky": Cholesky(),
    "LowRank": LowRank(),
    "Eigen": Eigen(),
    "EKFAC": EKFAC(),
    "NewtonSchulz": NewtonSchulz(dtype=torch.bfloat16),
}
_REFRESHES = 3
_BASELINE_BLOCK = 20  # steps without a period; the clock is read when the device has done all of a block
_TOP = 8  # kernels listed of a profile
_KINDS = ("plain", "statistics", "refresh")  # of steps: without statistics, with them, and with a refresh as well


@dataclass(frozen=True, slots=True)
class Training:
    """Holds a model, a batch and a loss; the loss is a mean over ``loss_terms``."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_terms: LossTerms

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _tokens(examples: int, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocabulary, (examples, context + 1))
    return text[:, :-1], text[:, 1:]


def _images(examples: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(examples, 3, side, side).to(memory_format=torch.channels_last)
    return images, torch.randint(classes, (examples,))


def _gpt2(**sizes: int) -> nn.Module:
    return Transformer(**sizes, tied=True)


def _channels_last(**sizes: Any) -> nn.Module:
    return ResNet50(**sizes).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


_GPT2 = {"vocabulary": 50257, "context": 1024, "width": 768, "hidden": 3072, "heads": 12, "layers": 12}
_TINY_GPT2 = {"vocabulary": 65, "context": 16, "width": 16, "hidden": 32, "heads": 2, "layers": 1}
MODELS = {
    "gpt2-small": Training(
        functools.partial(_gpt2, **_GPT2), functools.partial(_tokens, 16, 1024, 50257), LossTerms.POSITIONS
    ),
    "resnet50": Training(_channels_last, functools.partial(_images, 256, 224, 1000), LossTerms.EXAMPLES),
}
QUICK = {
    "gpt2-small": Training(
        functools.partial(_gpt2, **_TINY_GPT2), functools.partial(_tokens, 2, 16, 65), LossTerms.POSITIONS
    ),
    "resnet50": Training(
        functools.partial(_channels_last, classes=10, width=4, blocks=(1, 1, 1, 1)),
        functools.partial(_images, 2, 32, 10),
        LossTerms.EXAMPLES,
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes one variant.

    Attributes:
        name: its name in the table.
        periods: the periods of K-FAC; None is SGD.
        options: the arguments of the optimizer.
        tf32: whether float32 products are rounded to TF32.
        compiled: whether the model is compiled.
    """

    name: str
    periods: Periods | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tf32: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class StepCost:
    """Holds what one variant costs.

    Attributes:
        seconds: the seconds of a step, median over the rounds.
        ratio: the ratio to fused SGD, or where the model is compiled to that with a compiled model.
        ratios: its median, lowest and highest over the rounds.
        peak_bytes: the most that any step takes beyond what is held between steps.
        state_bytes: the bytes that the optimizer holds between steps.
        waits: how often the host waits for the device, in the median and the worst step; None where that is not to be
            known.
        kinds: seconds of one step of each kind that was met, with the device idle before and after it, the median over
            some steps.
    """

    name: str
    periods: str | None
    seconds: float
    ratio: float
    ratios: dict[str, float]
    peak_bytes: int
    state_bytes: int
    waits: tuple[float, int] | None
    kinds: dict[str, float]


@dataclass(frozen=True, slots=True)
class RefreshCost:
    """Holds seconds of refreshing all blocks by a representation, and matrices that failed or fell back to Cholesky."""

    representation: str
    seconds: float
    failed: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class Share:
    """Holds a range of ours, or a kernel, in a profile of one step: milliseconds on host and device, and calls."""

    name: str
    host_ms: float
    device_ms: float
    calls: int


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Holds all figures of one model; ``widths`` counts the dense factors by size."""

    model: str
    parameters: int
    widths: dict[int, int]
    steps: list[StepCost]
    refreshes: list[RefreshCost]
    profile: list[Share]


def run(args: argparse.Namespace) -> None:
    if args.device is None and not torch.cuda.is_available():
        raise arguments.UsageError("--device: this torch sees no CUDA device; pass --device cpu --quick to see it run")
    device = chosen_device(args.device or "cuda")
    periods = args.periods or ([Periods(2, 4), Periods(1, 2)] if args.quick else [Periods(10, 100), Periods(1, 10)])
    console = Console()
    torch.manual_seed(0)
    costs: list[ModelCost] = []
    report = {"benchmark": "accelerator", "quick": args.quick, "repeats": 1 if args.quick else args.repeats}
    for name in args.models:
        training = (QUICK if args.quick else MODELS)[name]
        costs.append(measure(name, training, periods, device, args, console))
        console.print(step_table(costs[-1]), refresh_table(costs[-1]), profile_table(costs[-1]))
        # After each, since time on an accelerator may run out.
        write_json(args.out, {**report, "models": [asdict(cost) for cost in costs]}, device)
    console.print(f"Figures: {args.out}")


def settings(periods: Sequence[Periods], names: Collection[str]) -> list[Setting]:
    """Return SGD, K-FAC at each of ``periods``, and K-FAC with one thing changed, where ``names`` has it."""
    first = periods[0]
    every = [
        Setting(_BASELINE, options={"fused": True}),
        Setting("SGD, foreach", options={"foreach": True}),
        Setting("SGD, compiled", options={"fused": True}, compiled=True),
        *(Setting("K-FAC", pair, {"fused": True}) for pair in periods),
        *(Setting("bf16 inverses", pair, {"fused": True, "inverse": Cholesky(torch.bfloat16)}) for pair in periods),
        *(Setting("low rank", pair, {"fused": True, "inverse": LowRank()}) for pair in periods),
        Setting("TF32", first, {"fused": True}, tf32=True),
        Setting("foreach", first, {"foreach": True}),
        Setting("background refresh", first, {"fused": True, "refresh": Background()}),
        Setting("selected updates", first, {"fused": True, "step_size": SelectedUpdates(), "inverse": None}),
        Setting("compiled", first, {"fused": True}, compiled=True),
    ]
    baselines = {_BASELINE} | ({"SGD, compiled"} if "compiled" in names else set())
    return [each for each in every if each.name in baselines or each.name in names]


def measure(
    name: str,
    training: Training,
    periods: Sequence[Periods],
    device: torch.device,
    args: argparse.Namespace,
    console: Console,
) -> ModelCost:
    """Train one model in all variants, then look at the parts of the default one."""
    quick, rounds = args.quick, 1 if args.quick else args.repeats
    model = training.model().to(device)
    batch = [tensor.to(device) for tensor in training.batch()]
    chosen = settings(periods, args.variants)
    variants = [_variant(model, training, setting, quick) for setting in chosen]
    steps = [
        functools.partial(_step, variant, setting, batch) for variant, setting in zip(variants, chosen, strict=True)
    ]
    contenders = []
    for number, (setting, variant, step) in enumerate(zip(chosen, variants, steps, strict=True)):
        for _ in range(2):
            step()
        variant.age()
        contenders.append(Contender(str(number), step, variant.whole if setting.periods else _BASELINE_BLOCK))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(name, total=rounds * sum(contender.block for contender in contenders))
        seconds = time_interleaved(contenders, rounds, device, lambda done: progress.advance(task, done))
    costs = []
    for number, (setting, variant, step) in enumerate(zip(chosen, variants, steps, strict=True)):
        variant.check_finite(f"accelerator: {name}, {setting.name}")
        base = next(i for i, each in enumerate(chosen) if each.periods is None and each.compiled == setting.compiled)
        waits: list[int] = []
        peak = peak_growth(functools.partial(_count_waits, step, _watched(setting), device, waits), device)
        costs.append(
            StepCost(
                name=setting.name,
                periods=None if setting.periods is None else str(setting.periods),
                seconds=statistics.median(seconds[str(number)]),
                ratio=(ratios := ratio_spread(seconds[str(number)], seconds[str(base)]))["median"],
                ratios=ratios,
                peak_bytes=peak,
                state_bytes=variant.state_bytes(),
                waits=(statistics.median(waits), max(waits)) if device.type == "cuda" else None,
                kinds=_kinds(step, setting, device),
            )
        )
    del variants, variant, steps, step, contenders  # the loop's last as well: they would stay on the device
    everything = Setting("K-FAC", Periods(1, 1), {"fused": True})
    whole = _variant(model, training, everything, quick)
    step = functools.partial(_step, whole, everything, batch)
    for _ in range(2):
        step()
    whole.age()
    shares = shares_of(step, device)
    return ModelCost(
        model=name,
        parameters=sum(param.numel() for param in model.parameters()),
        widths=_widths(whole.optimizer),
        steps=costs,
        refreshes=refresh_costs(model, training, batch, device, args.representations, quick),
        profile=shares,
    )


def _watched(setting: Setting) -> int:
    """Return how many steps are looked at one by one: from a refresh to the second statistics after it."""
    return 1 if setting.periods is None else min(setting.periods.common, 2 * setting.periods.factor + 1)


def _kinds(step: Callable[[], None], setting: Setting, device: torch.device) -> dict[str, float]:
    """Time two periods of statistics step by step; those that were looked at before are the first of a whole period."""
    seconds: dict[str, list[float]] = {}
    first = _watched(setting)
    for number in range(first, first + (5 if setting.periods is None else 2 * setting.periods.factor)):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        kind = "plain"
        if setting.periods is not None and number % setting.periods.factor == 0:
            kind = "statistics" if number % setting.periods.inverse else "refresh"
        seconds.setdefault(kind, []).append(time.perf_counter() - start)
    return {kind: statistics.median(each) for kind, each in seconds.items()}


def _variant(model: nn.Module, training: Training, setting: Setting, quick: bool) -> Variant:
    def make(copied: nn.Module) -> Optimizer:
        if setting.periods is None:
            optimizer: Optimizer = SGD(copied.parameters(), lr=LR, momentum=MOMENTUM, **setting.options)
        else:
            optimizer = KFACOptimizer(
                copied,
                lr=LR,
                momentum=MOMENTUM,
                factor_update_period=setting.periods.factor,
                inverse_update_period=setting.periods.inverse,
                loss_terms=training.loss_terms,
                **setting.options,
            )
        if setting.compiled:
            copied.compile(backend="aot_eager" if quick else "inductor")
        return optimizer

    return Variant(model, training.loss, make, setting.periods)


def _step(variant: Variant, setting: Setting, batch: Sequence[Tensor]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    try:
        variant.step(*batch)
    finally:
        torch.set_float32_matmul_precision(before)


def _count_waits(step: Callable[[], None], steps: int, device: torch.device, counts: list[int]) -> None:
    """Add to ``counts`` how often the host waits for the device in each of ``steps``.

    Those that torch reports: not ``Event.synchronize`` or ``torch.cuda.synchronize``, of which we have none. On a CPU
    there are none.
    """
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        for _ in range(steps):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            counts.append(sum("called a synchronizing CUDA operation" in str(each.message) for each in caught))
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)


def shares_of(step: Callable[[], None], device: torch.device) -> list[Share]:
    """Return our own ranges in one step, then the kernels that take most of the device, or on a CPU the operators."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    synchronize(device)
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    events = profiler.key_averages()
    # On a device each range has a second event, of the time that its kernels spread over.
    on_host = {id(event): str(event.device_type).endswith("CPU") for event in events}
    ranges = [
        Share(event.key, event.cpu_time_total / 1e3, event.device_time_total / 1e3, event.count)
        for event in events
        if event.key.startswith("kfac.") and on_host[id(event)]
    ]
    kernels = [
        Share(event.key, event.self_cpu_time_total / 1e3, event.self_device_time_total / 1e3, event.count)
        for event in events
        if not event.is_user_annotation and on_host[id(event)] == (device.type == "cpu")
    ]
    kernels.sort(key=lambda share: share.host_ms + share.device_ms, reverse=True)
    return ranges + kernels[:_TOP]


def refresh_costs(
    model: nn.Module,
    training: Training,
    batch: Sequence[Tensor],
    device: torch.device,
    representations: Sequence[str],
    quick: bool,
) -> list[RefreshCost]:
    """Time a refresh of all blocks by each representation, by itself."""
    costs = []
    for inverse in map(REPRESENTATIONS.__getitem__, representations):
        setting = Setting("", Periods(1, NEVER), {"inverse": inverse})
        variant = _variant(model, training, setting, quick)
        for _ in range(2):
            _step(variant, setting, batch)
        refresh = functools.partial(_refresh, variant.optimizer)
        refresh()
        timed = time_interleaved([Contender("", refresh, 1)], 1 if quick else _REFRESHES, device, lambda _: None)
        assert isinstance(variant.optimizer, KFACOptimizer)
        metrics = variant.optimizer.metrics()
        costs.append(
            RefreshCost(
                repr(inverse),
                statistics.median(timed[""]),
                int(metrics["failed_refreshes"]),
                int(metrics.get("fallback_inverses", 0)),
            )
        )
    return costs


@torch.no_grad()
def _refresh(optimizer: Optimizer) -> None:
    assert isinstance(optimizer, KFACOptimizer)
    Statistics().solve(optimizer._binding.coverage.blocks)  # what a step does, and nothing else of a step


def _widths(optimizer: Optimizer) -> dict[int, int]:
    """Return how many dense matrices of each width there are, by falling width."""
    assert isinstance(optimizer, KFACOptimizer)
    dense = [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]
    found = Counter(width for factor in dense if factor.dim() == 3 for width in [factor.shape[-1]] * len(factor))
    return dict(sorted(found.items(), reverse=True))


def step_table(cost: ModelCost) -> Table:
    table = Table(
        title=f"{cost.model}: a training step",
        caption="ratio: to fused SGD, compiled where the row is; peak: beyond what is held between steps; waits: of "
        "the host for the device, in the median and the worst step; the rest: ms of a step by itself",
        box=box.SIMPLE,
    )
    table.add_column("variant", no_wrap=True)
    for heading in ("periods", "ms", "ratio", "peak MB", "state MB", "waits", *_KINDS):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in cost.steps:
        table.add_row(
            row.name,
            row.periods or "",
            f"{1e3 * row.seconds:.1f}",
            f"{row.ratio:.3f}",
            f"{row.peak_bytes / 1e6:.0f}",
            f"{row.state_bytes / 1e6:.0f}",
            "" if row.waits is None else f"{row.waits[0]:g}, {row.waits[1]}",
            *(f"{1e3 * row.kinds[kind]:.1f}" if kind in row.kinds else "" for kind in _KINDS),
        )
    return table


def refresh_table(cost: ModelCost) -> Table:
    widths = ", ".join(f"{count} × {width}" for width, count in cost.widths.items())
    table = Table(title=f"{cost.model}: a refresh of all layers", caption=f"dense factors: {widths}", box=box.SIMPLE)
    table.add_column("representation")
    for heading in ("ms", "failed", "fell back"):
        table.add_column(heading, justify="right")
    for row in cost.refreshes:
        table.add_row(row.representation, f"{1e3 * row.seconds:.1f}", str(row.failed), str(row.fallbacks))
    return table


def profile_table(cost: ModelCost) -> Table:
    table = Table(title=f"{cost.model}: one step with statistics and a refresh, milliseconds", box=box.SIMPLE)
    table.add_column("range or kernel", max_width=60)
    for heading in ("host", "device", "calls"):
        table.add_column(heading, justify="right")
    for row in cost.profile:
        table.add_row(row.name, f"{row.host_ms:.2f}", f"{row.device_ms:.2f}", str(row.calls))
    return table
