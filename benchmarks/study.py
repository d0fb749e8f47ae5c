"""A study: every optimizer on one problem, tuned with equally many trials, its best trial repeated with other seeds.

One seed gives all optimizers the same initial weights and batches. The trials have seed 0, the repeats the seeds from 1
on: what was chosen on seed 0 is not judged by it. Trials and seeds are taken in turn by all optimizers, so that a
machine that slows down does so for all. Every run is kept as a file of its own, and what is there is not run again.

A run ends early, whatever the optimizer, when a loss is not finite, and where the optimizer itself gives up; a trial
also when its training measure, after a quarter of the steps or later, is twice what it was before the first step. (Not
sooner: where training begins on a plateau, a good run may be a little above its start for a long time.)
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.arguments import UsageError
from benchmarks.contestants import Contestant
from benchmarks.examples import Batch, Examples
from benchmarks.harness import describe_machine, without_subnormals
from benchmarks.problem import Aim, FixedBatch, Problem
from benchmarks.provenance import commit
from benchmarks.search import Setting, points
from benchmarks.training import History, mean_over, train

TUNING_SEED = 0
_HOPE = 0.25  # part of the steps before which no trial is given up
_HOPELESS = 2.0  # a trial is at so many times its first training measure


class Ending(Enum):
    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    """The optimizer raised a RuntimeError, as of a decomposition of a matrix that is not finite."""
    HOPELESS = "hopeless"


@dataclass(frozen=True, slots=True)
class Reading:
    """Holds both measures after ``steps`` steps and ``seconds`` of process time in them."""

    steps: int
    seconds: float
    training: float
    validation: float

    def measure(self, aim: Aim) -> float:
        return self.training if aim is Aim.TRAINING else self.validation


@dataclass(frozen=True, slots=True)
class Run:
    """Holds a run of one optimizer with one setting and one seed.

    Attributes:
        readings: finite ones; the first is before any step.
        error: what the optimizer said where it failed.
    """

    optimizer: str
    trial: int
    seed: int
    setting: Setting
    ending: Ending
    readings: tuple[Reading, ...]
    error: str | None = None

    def lowest(self, aim: Aim) -> float:
        return min((reading.measure(aim) for reading in self.readings), default=math.inf)

    def first(self, aim: Aim, target: float) -> Reading | None:
        """Return the first reading at ``target`` or below; None is a miss."""
        return next((reading for reading in self.readings if reading.measure(aim) <= target), None)

    def steps_to(self, aim: Aim, target: float) -> float:
        """Return the steps to the target, infinite if the run misses it."""
        reading = self.first(aim, target)
        return math.inf if reading is None else reading.steps

    def seconds_to(self, aim: Aim, target: float) -> float:
        """Return the seconds to the target, infinite if the run misses it."""
        reading = self.first(aim, target)
        return math.inf if reading is None else reading.seconds

    def curve(self, **names: str) -> dict[str, Any]:
        """Return the run with its readings by column, which is shorter; some columns may have other ``names``."""
        columns = [column.name for column in fields(Reading)]
        readings = {names.get(name, name): [getattr(each, name) for each in self.readings] for name in columns}
        return {"seed": self.seed, "ending": self.ending.value, "readings": readings}


Runs = dict[str, list[Run]]
"""Holds the runs of each optimizer, by its name."""

Key = tuple[str, int, int]
"""Names a run by its optimizer, its trial and its seed."""


class RunFolder:
    """Keeps files of runs: ``<problem>/<optimizer>-<trial>-<seed>.json``, written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commits: set[str] = set()  # of the code that made the runs which were found or kept
        self._commit = commit() or "unknown"  # as the process begins, whatever is committed while it runs

    def find(self, problem: str, optimizer: str, trial: int, seed: int, terms: Mapping[str, Any]) -> Run | None:
        """Return the run, where it is there.

        Raises:
            UsageError: it was made under other ``terms``.
        """
        file = self._file(problem, optimizer, trial, seed)
        if not file.exists():
            return None
        record = json.loads(file.read_text())
        differing = [name for name in terms if record["terms"].get(name) != terms[name]]
        if differing:
            name = differing[0]
            raise UsageError(
                f"argument --out: {str(file)!r} was made with {name} {record['terms'].get(name)!r}, this study has "
                f"{terms[name]!r}; pass another folder, or the arguments of the study that is there"
            )
        self.commits.add(record.get("commit") or "unknown")
        found = record["run"]
        readings = tuple(Reading(**reading) for reading in found["readings"])
        return Run(**{**found, "ending": Ending(found["ending"]), "readings": readings})

    def keep(self, problem: str, run: Run, terms: Mapping[str, Any]) -> None:
        file = self._file(problem, run.optimizer, run.trial, run.seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        self.commits.add(self._commit)
        record = {"terms": terms, "commit": self._commit, "run": {**asdict(run), "ending": run.ending.value}}
        unfinished.write_text(json.dumps(record, allow_nan=False) + "\n")
        unfinished.replace(file)

    def _file(self, problem: str, optimizer: str, trial: int, seed: int) -> Path:
        return self.path / problem / f"{optimizer}-{trial:03d}-{seed}.json"


@dataclass(frozen=True, slots=True)
class Study:
    """Compares optimizers on one problem.

    Attributes:
        name: the name of the problem; one in each folder of runs.
        contestants: those that take part in ``problem``.
        trials: how many trials each of them has.
        search_seed: the seed of the quasi-random settings.
    """

    name: str
    problem: Problem
    examples: Examples
    contestants: Mapping[str, Contestant]
    trials: int
    search_seed: int
    folder: RunFolder

    def __post_init__(self) -> None:
        batch = self.problem.batch
        if isinstance(batch, FixedBatch) and batch.size > self.examples.count:
            raise UsageError(
                f"{self.name}: expected batches of at most {self.examples.count}, all training examples, got {batch}"
            )

    def settings(self, optimizer: str) -> list[Setting]:
        contestant = self.contestants[optimizer]
        return points(contestant.box(self.problem), self.trials, self.search_seed, contestant.axes(self.problem))

    def tune(self, console: Console, names: Sequence[str] | None = None) -> Runs:
        """Run all trials of all optimizers, or of some."""
        names = list(self.contestants) if names is None else names
        wanted = [(name, trial, TUNING_SEED) for trial in range(self.trials) for name in names]
        return self._carry_out("trials", wanted, console)

    def repeat(self, trials: Mapping[str, int], seeds: int, console: Console) -> Runs:
        """Run one trial of each optimizer, with every seed from 1 to ``seeds``."""
        wanted = [(name, trial, seed) for seed in range(1, seeds + 1) for name, trial in trials.items()]
        return self._carry_out("repeats", wanted, console)

    def run(self, optimizer: str, trial: int, seed: int, advance: Callable[[float], object] = lambda _: None) -> Run:
        """Train once more; ``advance`` is called with the number of steps done."""
        setting = self.settings(optimizer)[trial]
        with without_subnormals():
            return run_once(
                self.problem, self.examples, self.contestants[optimizer], optimizer, trial, seed, setting, advance
            )

    def _terms(self, optimizer: str, trial: int) -> dict[str, Any]:
        """Return what a kept run must have been made with."""
        setting = self.settings(optimizer)[trial]
        steps, period = _length(self.problem, self.contestants[optimizer], setting)
        return {
            "problem": self.problem.title,
            "setting": setting,
            "batch size": str(self.problem.batch),
            "steps": steps,
            "period": period,
            "examples": self.examples.count,
            "choices": {name: repr(each) for name, each in self.contestants[optimizer].choices(self.problem).items()},
            "numbers of the optimizer": self._numbers(optimizer, setting),
            "machine": describe_machine(torch.device("cpu")),
        }

    def _numbers(self, optimizer: str, setting: Setting) -> dict[str, Any]:
        """Return its numbers, the same in all trials or not, as its first param group holds them, fit for JSON."""
        model = self.problem.small_model(self.examples.outputs)
        group = self.contestants[optimizer].optimizer(model, self.problem, setting).param_groups[0]
        numbers = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        return json.loads(json.dumps(numbers, default=float))  # type: ignore[no-any-return]

    def _carry_out(self, what: str, wanted: Sequence[Key], console: Console) -> Runs:
        terms = {key: self._terms(key[0], key[1]) for key in wanted}
        return carry_out(self.name, what, terms, self.run, self.problem.steps, self.folder, console)


def carry_out(
    name: str,
    what: str,
    wanted: Mapping[Key, Mapping[str, Any]],
    run: Callable[[str, int, int, Callable[[float], object]], Run],
    length: float,
    folder: RunFolder,
    console: Console,
) -> Runs:
    """Make those runs that are not in the folder, and keep each there as soon as it is done.

    Args:
        name: the name of the problem.
        what: what they are, for the progress bar.
        wanted: their terms.
        run: ``(optimizer, trial, seed, advance) → run``.
        length: the length of a run, in what ``advance`` is told.
        folder: the folder in which runs are looked for and kept.
        console: shows what is done, and what failed.
    """
    found = {key: folder.find(name, *key, terms) for key, terms in wanted.items()}
    present = sum(kept is not None for kept in found.values())
    if present:
        console.print(f"{name}: {present} of {len(wanted)} {what} are in {folder.path} and not run again")
    runs: Runs = {optimizer: [] for optimizer, _, _ in wanted}
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=present == len(wanted)) as progress:
        task = progress.add_task("", total=(len(wanted) - present) * length)
        done = 0.0
        for key, kept in found.items():
            made = kept
            if made is None:
                optimizer, trial, seed = key
                words = f"{name}, {what}: {optimizer} {trial}, seed {seed}"
                progress.update(task, description=words, completed=done)
                made = run(optimizer, trial, seed, partial(progress.advance, task))
                folder.keep(name, made, wanted[key])
                if made.error is not None:
                    console.print(f"{words} failed: {made.error}", markup=False)
                done += length
            runs[key[0]].append(made)
        progress.update(task, completed=done)
    return runs


def run_once(
    problem: Problem,
    examples: Examples,
    contestant: Contestant,
    optimizer_name: str,
    trial: int,
    seed: int,
    setting: Setting,
    advance: Callable[[float], object],
) -> Run:
    """Train from the weights and with the batches of ``seed``."""
    torch.manual_seed(seed)
    model = problem.model(examples.outputs)
    optimizer = contestant.optimizer(model, problem, setting)
    length, period = _length(problem, contestant, setting)
    readings: list[Reading] = []

    def read(steps: int, seconds: float) -> Ending | None:
        """Return why to end, if there is a reason."""
        measures = (
            *mean_over(model, examples.training, problem.loss),
            *mean_over(model, examples.validation, problem.score),
        )
        if not all(map(math.isfinite, measures)):
            return Ending.DIVERGED
        readings.append(Reading(steps, seconds, *measures))
        worse = readings[-1].training >= _HOPELESS * readings[0].training
        hopeless = seed == TUNING_SEED and steps >= _HOPE * length and worse
        return Ending.HOPELESS if hopeless else None

    ending = read(0, 0.0)

    def observe(history: History) -> None:
        nonlocal ending
        ending = read(history.steps, history.seconds)
        history.stopped = ending is not None
        advance(period)

    batches = _batches(problem, examples, contestant, seed)
    schedule = LambdaLR(optimizer, lambda step: problem.decay.factor(min(step / length, 1)))
    error = None
    try:
        history = train(
            model,
            optimizer,
            scheduled(itertools.islice(batches, length), schedule),
            problem.loss,
            period=period,
            observe=observe,
            clock=time.process_time,
        )
    except RuntimeError as raised:
        ending, error = Ending.FAILED, str(raised)
    else:
        if history.diverged:
            ending = Ending.DIVERGED
    return Run(optimizer_name, trial, seed, setting, ending or Ending.FINISHED, tuple(readings), error)


def _length(problem: Problem, contestant: Contestant, setting: Setting) -> tuple[int, int]:
    """Return the steps of a run, and between two readings: a divisor of them."""
    if contestant.full_batch:
        steps = problem.full_batch_steps
        assert steps is not None, "it takes part"
        period = max(1, problem.period * steps // problem.steps)
    else:
        steps, period = round(problem.steps * setting.get("horizon", 1.0)), problem.period
    return max(1, round(steps / period)) * period, period


def _batches(problem: Problem, examples: Examples, contestant: Contestant, seed: int) -> Iterator[Batch]:
    if contestant.full_batch:
        whole = examples.whole
        assert whole is not None, "it takes part"
        return itertools.repeat((whole.inputs, whole.targets))
    return examples.draw(problem.batch.sizes(examples.count), seed)


def scheduled(batches: Iterator[Batch], schedule: LambdaLR) -> Iterator[Batch]:
    """Move the schedule on when the next batch is asked for, hence after each step."""
    for batch in batches:
        yield batch
        schedule.step()
