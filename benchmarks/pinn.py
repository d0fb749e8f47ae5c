"""Which optimizer trains physics-informed networks to the smallest error, and in how many seconds?

A network is trained in float64 on the mean square of the residual of an equation, inside its domain, plus that of its
error at the boundary. Points are drawn once, with one seed. The error is the root of the mean square of the difference
to the known solution over fixed test points, absolute.

Every optimizer has the same number of trials: a short list of settings (--list shows them), each for a third of the
seconds, with one seed of weights. The trial with the lowest error is repeated in full, with other weights. Seconds are
those of the processor, in steps alone: the error is measured outside of that time, whenever the seconds have grown by
a twentieth. A step that is under way when the time is over is finished, and counts.

Runs are kept under --out one by one: a command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness import describe_machine, leave, pin_threads
from benchmarks.pde_problems import POINTS_SEED, PROBLEMS, PDEProblem, Points
from benchmarks.pinn_contestants import CONTESTANTS, Contestant
from benchmarks.plots import Image, plot_errors, plot_solutions
from benchmarks.problem import Aim, Decay
from benchmarks.scores import Arrival, Spread, Target, best_trials
from benchmarks.search import Setting
from benchmarks.study import TUNING_SEED, Ending, Key, Reading, Run, RunFolder, Runs, carry_out

TARGETS = (1e-3, 1e-4, 1e-5, 1e-6)
_TRIAL = 1 / 3  # of a run's seconds
_FIRST_READING = 1e-3  # of a run's seconds
_GROWTH = 1.05  # of the seconds from one reading to the next
_GRID = 101  # points of a picture in each direction

# A reading's "training" is the loss, its "validation" the error.
_AIM = Aim.VALIDATION


def run(args: argparse.Namespace) -> None:
    console = Console()
    if args.list:
        console.print(problem_table(), setting_table())
        return
    pin_threads(args.threads)
    for name in args.problems:
        problem = prepare(PROBLEMS[name], args)
        race = Race(name, problem, contestants(args), args.seeds, args.out)
        runs = len(race.contestants) * (race.trials * _TRIAL + args.seeds)
        console.print(
            f"{name}: {race.trials} trials of {problem.seconds * _TRIAL:.3g} s and {args.seeds} repeats of "
            f"{problem.seconds:g} s of each optimizer: {runs * problem.seconds / 60:.2g} minutes of the processor. "
            "Interrupt it at any time: the same command goes on where it stopped."
        )
        race.run(console)


def prepare(problem: PDEProblem, args: argparse.Namespace) -> PDEProblem:
    """Return the problem with the changes that the arguments ask for."""
    problem = problem.quick() if args.quick else problem
    return problem if args.seconds is None else replace(problem, seconds=args.seconds)


def contestants(args: argparse.Namespace) -> dict[str, Contestant]:
    """Return those that were asked for; of a quick run with two settings each."""
    chosen = {name: CONTESTANTS[name] for name in args.optimizers}
    return {name: replace(each, settings=each.settings[:2]) if args.quick else each for name, each in chosen.items()}


class Race:
    """Compares optimizers on one problem."""

    def __init__(
        self, name: str, problem: PDEProblem, contestants: Mapping[str, Contestant], seeds: int, out: Path
    ) -> None:
        self.name = name
        self.problem = problem
        self.contestants = contestants
        self.seeds = seeds
        self._points = problem.points()
        self._out = out
        self._folder = RunFolder(out / "runs")
        for contestant in contestants.values():  # what cannot be made is refused before anything is trained
            contestant.make(problem.network(), nn.MSELoss(), contestant.settings[0])

    @property
    def trials(self) -> int:
        (trials,) = {len(contestant.settings) for contestant in self.contestants.values()}
        return trials

    def run(self, console: Console) -> None:
        """Tune, repeat, and leave a table, plots and figures."""
        trials = [(name, trial, TUNING_SEED) for trial in range(self.trials) for name in self.contestants]
        tuned = self._carry_out("trials", trials, console)
        chosen = best_trials(tuned, _AIM, 0.0)  # nobody gets there: the lowest is chosen
        repeats = [(name, trial, seed) for seed in range(1, self.seeds + 1) for name, trial in chosen.items()]
        repeated = self._carry_out("repeats", repeats, console)
        report = self._report(tuned, repeated)
        console.print(best_table(report), result_table(report))
        console.print(leave(self._out, self.name, report, plot_errors))
        # What diverged or failed is no solution to look at.
        shown = {name: runs[0] for name, runs in repeated.items() if runs[0].ending is Ending.FINISHED}
        if self.problem.dimensions == 2 and shown:
            path = self._out / f"{self.name}-solution.png"
            self._picture(shown, path)
            console.print(f"Solutions: {path}")

    def _seconds(self, seed: int) -> float:
        return self.problem.seconds * (_TRIAL if seed == TUNING_SEED else 1.0)

    def _terms(self, optimizer: str, trial: int, seed: int) -> dict[str, Any]:
        """Return what a kept run must have been made with."""
        problem = self.problem
        return {
            "problem": problem.title,
            "widths": list(problem.widths),
            "points": [problem.interior, problem.boundary],
            "weight": problem.weight,
            "optimizer": self.contestants[optimizer].what,
            "setting": self.contestants[optimizer].settings[trial],
            "seconds": self._seconds(seed),
            "machine": describe_machine(torch.device("cpu")),
        }

    def _carry_out(self, what: str, wanted: list[Key], console: Console) -> Runs:
        terms = {key: self._terms(*key) for key in wanted}
        return carry_out(self.name, what, terms, self._run, self._seconds(wanted[0][2]), self._folder, console)

    def _run(self, optimizer: str, trial: int, seed: int, advance: Callable[[float], object]) -> Run:
        setting = self.contestants[optimizer].settings[trial]
        torch.manual_seed(seed)
        network = self.problem.network()
        criterion = nn.MSELoss()
        made = self.contestants[optimizer].make(network, criterion, setting)
        readings: list[Reading] = []
        ending, error = Ending.FINISHED, None
        try:
            trained = self.problem, self._points, network, criterion, made, setting
            if not train(*trained, self._seconds(seed), readings, advance):
                ending = Ending.DIVERGED
        except RuntimeError as raised:
            ending, error = Ending.FAILED, str(raised)
        if seed != TUNING_SEED:
            file = self._weights(optimizer, seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(network.state_dict(), file)
        return Run(optimizer, trial, seed, setting, ending, tuple(readings), error)

    def _weights(self, optimizer: str, seed: int) -> Path:
        """Name the file of the weights that a repeat ended with."""
        return self._folder.path / self.name / f"{optimizer}-{seed}.pt"

    def _picture(self, shown: Mapping[str, Run], path: Path) -> None:
        """Show what was learned in one run of each optimizer, on a grid."""
        axis = torch.linspace(0, 1, _GRID, dtype=torch.float64)
        first, second = torch.meshgrid(axis, axis, indexing="xy")
        grid = torch.stack([first, second], dim=2).reshape(-1, 2)

        def image(function: Callable[[Tensor], Tensor]) -> Image:
            with torch.no_grad():
                return function(grid).reshape(_GRID, _GRID).numpy()

        learned = {}
        for name, each in shown.items():
            network = self.problem.network()
            network.load_state_dict(torch.load(self._weights(name, each.seed), weights_only=True))
            learned[name] = image(network)
        labels = ("t", "x") if self.name == "heat" else ("x₁", "x₂")
        plot_solutions(learned, image(self.problem.solution), labels, title(self.problem), path)

    def _report(self, tuned: Runs, repeated: Runs) -> dict[str, Any]:
        problem = self.problem
        return {
            "benchmark": "pinn",
            "problem": self.name,
            "commits_of_runs": sorted(self._folder.commits),
            "title": problem.title,
            "network": network_name(problem),
            "parameters": sum(param.numel() for param in problem.network().parameters()),
            "points": {name: len(getattr(self._points, name)) for name in ("interior", "boundary", "test")},
            "points_seed": POINTS_SEED,
            "boundary_weight": problem.weight,
            "seconds": problem.seconds,
            "trial_seconds": self._seconds(TUNING_SEED),
            "pytorch_optimizer": version("pytorch_optimizer"),
            "targets": list(TARGETS),
            "optimizers": [
                {
                    "name": name,
                    "what": contestant.what,
                    "baseline": contestant.baseline,
                    "trials": [
                        {"setting": each.setting, "ending": each.ending.value, "lowest": each.lowest(_AIM)}
                        for each in tuned[name]
                    ],
                    "trial": repeated[name][0].trial,
                    "setting": repeated[name][0].setting,
                    "last": Spread.of([each.readings[-1].validation for each in repeated[name]]).as_json(),
                    "lowest": Spread.of([each.lowest(_AIM) for each in repeated[name]]).as_json(),
                    "steps": Spread.of([each.readings[-1].steps for each in repeated[name]]).as_json(),
                    "arrivals": [Arrival.of(repeated[name], _AIM, Target("", target)).as_json() for target in TARGETS],
                    "runs": [each.curve(training="loss", validation="error") for each in repeated[name]],
                }
                for name, contestant in self.contestants.items()
            ],
        }


def train(
    problem: PDEProblem,
    points: Points,
    network: nn.Module,
    criterion: nn.Module,
    optimizer: Optimizer,
    setting: Setting,
    seconds: float,
    readings: list[Reading],
    advance: Callable[[float], object],
) -> bool:
    """Train for so many seconds of the processor, and add to ``readings``; tell whether all losses were finite.

    Args:
        problem: the problem to train on.
        points: the points of it.
        network: the network to train.
        criterion: the criterion, which the optimizer may know of.
        optimizer: the optimizer of the network's parameters.
        setting: the setting, which may have the learning rate decay.
        seconds: the seconds that steps may take, all together.
        readings: a first one before any step, the others with finite losses.
        advance: told of seconds.
    """
    twin = problem.network()  # no optimizer watches it

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(network, points, criterion)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def read(steps: int) -> bool:
        twin.load_state_dict(network.state_dict())
        loss = problem.loss(twin, points, criterion).item()
        error = problem.error(twin, points)
        finite = math.isfinite(loss) and math.isfinite(error)
        if finite:
            readings.append(Reading(steps, spent, loss, error))
        return finite

    decay = Decay.COSINE if setting.get("cosine") else Decay.NONE
    spent, due, steps = 0.0, _FIRST_READING * seconds, 0
    if not read(0):
        return False
    while spent < seconds:
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * decay.factor(spent / seconds)
        loss = torch.as_tensor(optimizer.step(closure)).item()  # type: ignore[arg-type]
        took = time.process_time() - started
        spent += took
        steps += 1
        if not math.isfinite(loss):
            return False
        if spent >= min(due, seconds):
            due = _GROWTH * spent
            if not read(steps):
                return False
        advance(took)
    return True


def network_name(problem: PDEProblem) -> str:
    return "-".join(map(str, problem.widths))


def title(problem: PDEProblem) -> str:
    return f"{problem.title}, network {network_name(problem)}"


def setting_in_words(setting: Setting) -> str:
    numbers = [f"{name} {value:g}" for name, value in setting.items() if name != "cosine"]
    return ", ".join([*numbers, *(["decaying"] if setting.get("cosine") else [])])


def best_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="The best trial of each", box=box.SIMPLE)
    table.add_column("optimizer", no_wrap=True)
    table.add_column("setting")
    for each in report["optimizers"]:
        table.add_row(each["name"], setting_in_words(each["setting"]))
    return table


def result_table(report: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{report['title']}, network {report['network']}: error after {report['seconds']:g} s of the processor",
        caption="Medians over seeds of weights; on the right the seconds to that error, — where it is never reached.",
        box=box.SIMPLE,
    )
    table.add_column("optimizer", no_wrap=True)
    targets = (f"{target:.0e}".replace("e-0", "e-") for target in report["targets"])
    for heading in ("error", "lowest", "steps", *targets):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in report["optimizers"]:
        arrivals = (arrival["seconds"]["median"] for arrival in each["arrivals"])
        table.add_row(
            each["name"],
            f"{each['last']['median']:.1e}",
            f"{each['lowest']['median']:.1e}",
            f"{each['steps']['median']:.0f}",
            *("—" if seconds is None else f"{seconds:.3g}" for seconds in arrivals),
        )
    return table


def problem_table() -> Table:
    table = Table(title="Problems", caption="The weight is that of the boundary's part of the loss.", box=box.SIMPLE)
    table.add_column("name", no_wrap=True)
    for heading in ("what", "network", "points inside", "at the boundary", "weight", "seconds"):
        table.add_column(heading)
    for name, problem in PROBLEMS.items():
        numbers = (f"{each:g}" for each in (problem.interior, problem.boundary, problem.weight, problem.seconds))
        table.add_row(name, problem.title, network_name(problem), *numbers)
    return table


def setting_table() -> Table:
    table = Table(title="Settings that are tried, equally many of each", box=box.SIMPLE)
    for heading in ("optimizer", "what", "settings"):
        table.add_column(heading)
    for name, contestant in CONTESTANTS.items():
        table.add_row(name, contestant.what, "\n".join(map(setting_in_words, contestant.settings)))
    return table
