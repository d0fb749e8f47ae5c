"""Which optimizer trains a problem to the same quality in the fewest steps and seconds?

Every optimizer has the same number of trials, at seeded quasi-random points of a stated log-uniform space (--list shows
problems and spaces). The trial that gets first to the lowest measure of any baseline, or lowest, is repeated with other
seeds. A target is what a baseline's repeats reach in the median over seeds, but not below the problem's floor: one that
of SGD, one that of the baseline which gets lowest. Steps and seconds to a target are medians over seeds with the lowest
and highest; a miss counts as infinite. Seconds are process time of training alone (of all threads together); nothing is
counted of evaluation.

Runs are kept under --out one by one: a study that was interrupted goes on where it stopped, and more --trials or
--seeds are added to those that are there. Trials are chosen by steps, so that they may run beside other work, several
commands with other --optimizers and one --out at a time; the seconds of repeats need an idle machine. With --trials-of
the trials are those of an earlier result, but for optimizers that have tried other settings there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import arguments, tuning
from benchmarks.contestants import CONTESTANTS
from benchmarks.data import DataError
from benchmarks.examples import Examples
from benchmarks.harness import leave, pin_threads
from benchmarks.plots import plot_comparison
from benchmarks.problem import Aim, Problem
from benchmarks.problems import PROBLEMS
from benchmarks.scores import Arrival, Spread, Target, best_target, target_of
from benchmarks.study import RunFolder, Runs, Study
from benchmarks.tuning import Tuning


def run(args: argparse.Namespace) -> None:
    console = Console()
    if args.list:
        console.print(problem_table(), space_table())
        return
    pin_threads(args.threads)
    contestants = {name: CONTESTANTS[name] for name in args.optimizers or CONTESTANTS}
    for name in args.problems:
        problem = prepare(PROBLEMS[name], args)
        taking_part = {each: found for each, found in contestants.items() if found.takes_part(problem)}
        if not any(contestant.baseline for contestant in taking_part.values()):
            raise arguments.UsageError(
                f"argument --optimizers: {name} has no baseline among {', '.join(taking_part) or 'them'} to set a "
                f"target; add SGD or another one"
            )
        study = Study(
            name,
            problem,
            load(problem, args),
            taking_part,
            trials(args),
            args.search_seed,
            RunFolder(args.out / "runs"),
        )
        runs = len(taking_part) * (trials(args) + seeds(args))
        console.print(
            f"{name}: {len(taking_part)} optimizers, {trials(args)} trials and {seeds(args)} repeats each: {runs} runs "
            f"of {problem.steps} steps, minutes on small problems and hours on others, less what is there already. "
            "Interrupt it at any time: the same command goes on where it stopped."
        )
        compare(study, args.trials_of, seeds(args), args.out, console)


def trials(args: argparse.Namespace) -> int:
    return min(args.trials, 2) if args.quick else int(args.trials)


def seeds(args: argparse.Namespace) -> int:
    return min(args.seeds, 2) if args.quick else int(args.seeds)


def prepare(problem: Problem, args: argparse.Namespace) -> Problem:
    """Return the problem with the changes that the arguments ask for."""
    problem = problem.quick() if args.quick else problem
    return problem if args.steps is None else problem.lasting(args.steps)


def load(problem: Problem, args: argparse.Namespace) -> Examples:
    folder = None if args.data_dir is None or problem.folder is None else args.data_dir / problem.folder
    try:
        examples = problem.load(folder)
    except DataError as error:  # it knows of one folder, that of the problem
        raise DataError(f"{error}. Here --data-dir is the folder that has it as {problem.folder!r}") from error
    return examples.quick() if args.quick else examples


def compare(study: Study, earlier: Path | None, seeds: int, out: Path, console: Console) -> None:
    """Tune, as far as an earlier result has not done so; repeat, and leave a table, a plot and figures."""
    aim = study.problem.aim
    baselines = [name for name, contestant in study.contestants.items() if contestant.baseline]
    if earlier is None:
        tuned = tuning.by_trials(study, baselines, console)
    else:
        tuned = tuning.with_earlier(study, baselines, earlier, console)
    repeated = study.repeat(tuned.best, seeds, console)
    targets = set_targets(repeated, baselines, aim, study.problem.floor)
    console.print(setting_table(repeated), result_table(study, repeated, targets))
    report = make_report(study, tuned, repeated, targets)
    console.print(leave(out, study.name, report, plot_comparison))


def set_targets(repeated: Runs, baselines: Sequence[str], aim: Aim, floor: float) -> list[Target]:
    """Return SGD's target if SGD takes part, and the best baseline's if it differs."""
    sgd = [target_of(name, repeated[name], aim, floor) for name in baselines if name == "SGD"]
    best = best_target(repeated, baselines, aim, floor)
    return sgd if best in sgd else [*sgd, best]


def make_report(study: Study, tuned: Tuning, repeated: Runs, targets: Sequence[Target]) -> dict[str, Any]:
    problem = study.problem
    return {
        "benchmark": "compare",
        "problem": study.name,
        "title": problem.title,
        "batch_size": str(problem.batch),
        "steps": problem.steps,
        "aim": problem.aim.value,
        "measure": measure_name(problem),
        "floor": problem.floor,
        "trials": study.trials,
        "search_seed": study.search_seed,
        "tuning_target": tuned.target,
        "trials_of": list(tuned.origins),
        "commits_of_runs": sorted(study.folder.commits),
        "targets": [asdict(target) for target in targets],
        "optimizers": [
            {
                "name": name,
                "baseline": contestant.baseline,
                "space": {each: [span.low, span.high] for each, span in contestant.box(problem).items()},
                "trials": tuned.trials[name],
                "trial": repeated[name][0].trial,
                "setting": repeated[name][0].setting,
                "lowest": Spread.of([run.lowest(problem.aim) for run in repeated[name]]).as_json(),
                "arrivals": [Arrival.of(repeated[name], problem.aim, target).as_json() for target in targets],
                "runs": [run.curve() for run in repeated[name]],
            }
            for name, contestant in study.contestants.items()
        ],
    }


def measure_name(problem: Problem) -> str:
    return f"{problem.aim.value}, {problem.units[0] if problem.aim is Aim.TRAINING else problem.units[1]}"


def setting_table(repeated: Runs) -> Table:
    table = Table(title="The best trial of each", box=box.SIMPLE)
    table.add_column("optimizer", no_wrap=True)
    table.add_column("setting")
    for name, runs in repeated.items():
        table.add_row(name, ", ".join(f"{each} {value:.2g}" for each, value in runs[0].setting.items()))
    return table


def result_table(study: Study, repeated: Runs, targets: Sequence[Target]) -> Table:
    """Show medians over seeds, with lowest and highest; of steps and seconds also as part of the target's setter's."""
    aim = study.problem.aim
    table = Table(
        title=f"{study.problem.title}: {measure_name(study.problem)}",
        caption="Medians over seeds, from the lowest to the highest; as a multiple (×) of what the target's setter "
        "needs; of those that miss a target in the median, how many seeds reach it.",
        box=box.SIMPLE,
    )
    table.add_column("optimizer", no_wrap=True)
    table.add_column("lowest", justify="right")
    for target in targets:
        table.add_column(f"steps to {target.value:.4g} ({target.setter})", justify="right")
        table.add_column("seconds", justify="right")
    setters = [Arrival.of(repeated[target.setter], aim, target) for target in targets]
    for name, runs in repeated.items():
        cells = [spread_in_words(Spread.of([run.lowest(aim) for run in runs]))]
        for target, setter in zip(targets, setters, strict=True):
            cells += arrival_in_words(Arrival.of(runs, aim, target), len(runs), setter)
        table.add_row(name, *cells)
    return table


def spread_in_words(spread: Spread) -> str:
    return f"{spread.median:.4g}\n{spread.low:.4g} - {spread.high:.4g}"


def arrival_in_words(arrival: Arrival, runs: int, setter: Arrival) -> tuple[str, str]:
    """Return steps and seconds in words."""
    if math.isinf(arrival.steps.median):
        return f"{arrival.reached} of {runs}", "—"
    steps, seconds = (
        f"{of_setter(spread, setter_spread)}{spread_in_words(spread)}"
        for spread, setter_spread in ((arrival.steps, setter.steps), (arrival.seconds, setter.seconds))
    )
    return steps, seconds


def of_setter(spread: Spread, setter: Spread) -> str:
    # It may have reached the target before the first step, or at another batch size only: there is nothing to compare.
    return f"×{spread.median / setter.median:.2f}  " if 0 < setter.median < math.inf else ""


def problem_table() -> Table:
    table = Table(title="Problems", box=box.SIMPLE)
    for heading in ("name", "what", "batch", "steps", "target"):
        table.add_column(heading)
    for name, problem in PROBLEMS.items():
        table.add_row(name, problem.title, str(problem.batch), str(problem.steps), measure_name(problem))
    return table


def space_table() -> Table:
    table = Table(
        title="Search spaces, log-uniform",
        caption="For losses of one term an example; weight decay is searched on CIFAR-10 alone, horizon where the "
        "learning rate decays.",
        box=box.SIMPLE,
    )
    table.add_column("optimizer")
    table.add_column("ranges")
    spaces = PROBLEMS["resnet20"]
    for name, contestant in CONTESTANTS.items():
        ranges = (f"{each} {span.low:g} - {span.high:g}" for each, span in contestant.box(spaces).items())
        table.add_row(name, ", ".join(ranges))
    return table
