"""How many steps of its environment does an actor-critic need to balance CartPole-v1, with K-FAC and with Adam?

An advantage actor-critic (benchmarks/scripts/cart_pole.py): policy and value share a trunk of two layers of 64 tanh
units. It is solved when the mean return of the last 100 finished episodes is 475, of at most 500; one hundred episodes
of that length are 47,500 steps.

Every optimizer has the same number of trials, the same network and the same batch, 8 environments by 32 steps of each.
All settings are tried with two weights of the value in the loss, on one seed; the best third of them on two more. The
setting with the lowest median is repeated with other seeds. A trial ends after half of --steps; what is not solved
counts as infinite.

Runs are kept under --out one by one: a command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn, optim
from torch.optim import Optimizer

from benchmarks.harness import describe_machine, leave, pin_threads
from benchmarks.plots import plot_returns
from benchmarks.problem import Aim
from benchmarks.scores import Arrival, Target
from benchmarks.scripts.cart_pole import ENTROPY_WEIGHT, ActorCritic, train
from benchmarks.search import Setting
from benchmarks.study import Ending, Reading, Run, RunFolder, Runs, carry_out
from kfac_optim import ExactGGN, KFACOptimizer, TrustRegion

TUNING_SEEDS = (101, 102, 103)
EPISODES, SOLVED, LONGEST = 100, 475, 500
_READING = 1000  # steps between two readings

# A reading has one measure, which stands for both: what the mean return of the last episodes lacks of the longest.
_AIM, _TARGET = Aim.VALIDATION, float(LONGEST - SOLVED)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Describes an optimizer.

    Attributes:
        what: its choices that are the same in all trials, in words.
        make: ``(model, setting) → optimizer``.
        settings: what is tried, with each weight of the value.
    """

    what: str
    make: Callable[[nn.Module, Setting], Optimizer]
    settings: tuple[Setting, ...]


def _adam(model: nn.Module, setting: Setting) -> Optimizer:
    return optim.Adam(model.parameters(), setting["lr"])


def _kfac(model: nn.Module, setting: Setting) -> Optimizer:
    return KFACOptimizer(
        model,
        setting["lr"],
        damping=setting["damping"],
        kl_clip=setting["kl_clip"],
        step_size=TrustRegion(),
        factor_update_period=1,
        inverse_update_period=1,
        estimate=ExactGGN(nn.MSELoss()),
    )


ENVIRONMENTS, HORIZON = 8, 32
VALUE_WEIGHTS = (1.0, 10.0)
CONTESTANTS = {
    "Adam": Contestant(
        "torch.optim.Adam, β = 0.9, 0.999",
        _adam,
        tuple({"lr": lr} for lr in (3e-4, 1e-3, 2e-3, 4e-3, 1e-2, 3e-2)),
    ),
    "KFAC": Contestant(
        "TrustRegion, ExactGGN, no momentum, statistics and refreshes at each step",
        _kfac,
        tuple({"lr": 0.3, "damping": damping, "kl_clip": kl} for damping in (0.01, 0.03) for kl in (0.003, 0.01, 0.03)),
    ),
}


def run(args: argparse.Namespace) -> None:
    console = Console()
    if args.list:
        console.print(setting_table())
        return
    pin_threads(args.threads)
    Race(args.optimizers, args.steps, args.seeds, args.out, quick=args.quick).run(console)


class Race:
    """Compares Adam and K-FAC on CartPole-v1.

    Args:
        names: the names of the optimizers.
        limit: steps of the environment after which a repeat ends; trials end after half of them.
        seeds: how many repeats there are, with seeds from 1 on.
        out: folder for runs, JSON and PNG.
        quick: whether one tuning seed, one weight of the value and two settings are all.
    """

    def __init__(self, names: Sequence[str], limit: int, seeds: int, out: Path, *, quick: bool) -> None:
        self._limit, self._seeds, self._out = limit, seeds, out
        self._tuning_seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
        few = slice(2 if quick else None)
        weights = VALUE_WEIGHTS[:1] if quick else VALUE_WEIGHTS
        self._settings: dict[str, list[Setting]] = {
            name: [
                {**setting, "value_weight": weight} for weight in weights for setting in CONTESTANTS[name].settings[few]
            ]
            for name in names
        }
        self._folder = RunFolder(out / "runs")

    def run(self, console: Console) -> None:
        """Tune, repeat, and leave a table, a plot and figures."""
        every = {name: range(len(settings)) for name, settings in self._settings.items()}
        tuned = self._carry_out("trials", every, self._tuning_seeds[:1], console)
        best = {name: ranked(runs)[: math.ceil(len(runs) / 3)] for name, runs in tuned.items()}
        for name, runs in self._carry_out("best third", best, self._tuning_seeds[1:], console).items():
            tuned[name] += runs
        chosen = {name: ranked([run for run in tuned[name] if run.trial in best[name]])[:1] for name in tuned}
        repeated = self._carry_out("repeats", chosen, range(1, self._seeds + 1), console)
        report = self._report(tuned, repeated)
        console.print(result_table(report))
        console.print(leave(self._out, "cart-pole", report, plot_returns))

    def _carry_out(
        self, what: str, trials: Mapping[str, Sequence[int]], seeds: Sequence[int], console: Console
    ) -> Runs:
        """Run trials of each optimizer with all seeds."""
        places = range(max(map(len, trials.values())))
        keys = [(n, some[k], seed) for seed in seeds for k in places for n, some in trials.items() if k < len(some)]
        if not keys:
            return {}
        terms = {key: self._terms(*key) for key in keys}
        length = self._steps(seeds[0])
        return carry_out("cart-pole", what, terms, self._one, length, self._folder, console)

    def _steps(self, seed: int) -> int:
        """Return after how many steps of the environment a run with this seed ends."""
        return self._limit // 2 if seed in TUNING_SEEDS else self._limit

    def _terms(self, optimizer: str, trial: int, seed: int) -> dict[str, Any]:
        """Return what a kept run must have been made with."""
        return {
            "optimizer": CONTESTANTS[optimizer].what,
            "setting": self._settings[optimizer][trial],
            "batch": [ENVIRONMENTS, HORIZON],
            "entropy_weight": ENTROPY_WEIGHT,
            "steps": self._steps(seed),
            "machine": describe_machine(torch.device("cpu")),
        }

    def _one(self, optimizer: str, trial: int, seed: int, advance: Callable[[float], object]) -> Run:
        setting = self._settings[optimizer][trial]
        torch.manual_seed(seed)
        model = ActorCritic()
        readings: list[Reading] = []
        ending, error = Ending.FINISHED, None
        made = CONTESTANTS[optimizer].make(model, setting)
        try:
            updates = train(model, made, setting["value_weight"], ENVIRONMENTS, HORIZON, seed)
            balance(updates, self._steps(seed), readings, advance)
        except (RuntimeError, ValueError) as raised:  # of probabilities that are not finite
            ending, error = Ending.FAILED, str(raised)
        return Run(optimizer, trial, seed, setting, ending, tuple(readings), error)

    def _report(self, tuned: Runs, repeated: Runs) -> dict[str, Any]:
        return {
            "benchmark": "cart-pole",
            "commits_of_runs": sorted(self._folder.commits),
            "solved": SOLVED,
            "limit": self._limit,
            "trial_limit": self._steps(TUNING_SEEDS[0]),
            "tuning_seeds": list(self._tuning_seeds),
            "environments": ENVIRONMENTS,
            "horizon": HORIZON,
            "entropy_weight": ENTROPY_WEIGHT,
            "optimizers": [
                {
                    "name": name,
                    "what": CONTESTANTS[name].what,
                    "trials": [
                        {"setting": setting, "runs": [outcome(run) for run in tuned[name] if run.trial == trial]}
                        for trial, setting in enumerate(self._settings[name])
                    ],
                    "setting": runs[0].setting,
                    "arrival": Arrival.of(runs, _AIM, Target("", _TARGET)).as_json(),
                    "runs": [curve(each) for each in runs],
                }
                for name, runs in repeated.items()
            ],
        }


def ranked(runs: Sequence[Run]) -> list[int]:
    """Return the trials, best first: by medians over seeds of the steps, then of what the best mean return lacks."""
    trials: dict[int, list[Run]] = {}
    for run in runs:
        trials.setdefault(run.trial, []).append(run)

    def medians(trial: int) -> tuple[float, float]:
        some = trials[trial]
        steps = statistics.median(run.steps_to(_AIM, _TARGET) for run in some)
        return steps, statistics.median(min(run.lowest(_AIM), LONGEST) for run in some)

    return sorted(trials, key=medians)


def balance(
    updates: Iterator[tuple[int, list[int]]], limit: int, readings: list[Reading], advance: Callable[[float], object]
) -> None:
    """Train until it is solved, or for ``limit`` steps of the environment, and add to ``readings``.

    Args:
        updates: updates the parameters: yields numbers of steps, and the lengths of episodes that ended in them.
        limit: how many steps there are at most.
        readings: what readings are added to, a last one where it is solved.
        advance: called with the number of steps after each update.
    """
    steps, due = 0, _READING
    recent: deque[int] = deque(maxlen=EPISODES)
    started = time.process_time()
    for count, ended in updates:
        steps += count
        recent.extend(ended)
        advance(count)
        lacks = LONGEST - statistics.fmean(recent) if recent else float(LONGEST)
        solved = len(recent) == EPISODES and lacks <= _TARGET
        if solved or steps >= min(due, limit):
            due = steps + _READING
            readings.append(Reading(steps, time.process_time() - started, lacks, lacks))
        if solved or steps >= limit:
            return


def outcome(run: Run) -> dict[str, Any]:
    """Describe a run in short; ``solved`` is how many steps it took, None where it did not get there."""
    steps = run.steps_to(_AIM, _TARGET)
    highest = LONGEST - min(run.lowest(_AIM), LONGEST)
    solved = steps if math.isfinite(steps) else None
    return {"seed": run.seed, "ending": run.ending.value, "solved": solved, "highest": highest}


def curve(run: Run) -> dict[str, Any]:
    """Describe a run with its readings by column, which is shorter."""
    return {
        **outcome(run),
        "readings": {
            "steps": [reading.steps for reading in run.readings],
            "seconds": [round(reading.seconds, 3) for reading in run.readings],
            "return": [round(LONGEST - reading.validation, 3) for reading in run.readings],
        },
    }


def in_words(setting: Setting) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def result_table(report: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"Steps of the environment to a mean return of {report['solved']}",
        caption="The best setting of each, on other seeds: median (lowest to highest). Seconds of the processor, in "
        f"all. — is more than {report['limit']:,}.",
        box=box.SIMPLE,
    )
    for heading in ("optimizer", "best setting"):
        table.add_column(heading)
    for heading in ("steps", "seconds", "solved"):
        table.add_column(heading, justify="right")
    for each in report["optimizers"]:
        steps, seconds = each["arrival"]["steps"], each["arrival"]["seconds"]
        cells = ["—" if steps[key] is None else f"{steps[key]:,.0f}" for key in ("median", "low", "high")]
        table.add_row(
            each["name"],
            in_words(each["setting"]),
            f"{cells[0]} ({cells[1]} to {cells[2]})",
            "—" if seconds["median"] is None else f"{seconds['median']:.3g}",
            f"{each['arrival']['reached']} of {len(each['runs'])}",
        )
    return table


def setting_table() -> Table:
    weights = " and ".join(f"{weight:g}" for weight in VALUE_WEIGHTS)
    table = Table(title=f"Settings that are tried, each with value_weight {weights}", box=box.SIMPLE)
    for heading in ("optimizer", "what", "settings"):
        table.add_column(heading)
    for name, contestant in CONTESTANTS.items():
        table.add_row(name, contestant.what, "\n".join(map(in_words, contestant.settings)))
    return table
