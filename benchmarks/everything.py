"""Makes every figure anew, by the very commands that made those of benchmarks/results, one after the other.

A stage that has finished with the same code, arguments and output is not run again: its result has the fingerprint of
code and arguments. Stop the command at any time: called again it goes on, and so do those commands that keep each of
their runs, in the folder `unfinished` under --out. Results are put in their place once their stage has ended well. If a
stage fails, the others run all the same. Times are those that the last run has recorded, or else estimates.

--data-dir is the folder that has mnist, cifar10 and tinyshakespeare as `compare` needs them. With --out elsewhere the
range test is still held against the tuned runs of benchmarks/results. Where results go to benchmarks/results, the table
of benchmarks/README.md is written as well; --table does that alone.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import UsageError
from benchmarks.figures_table import update_page
from benchmarks.options import ADD, RESUMING
from benchmarks.provenance import DIRTY, RESULTS, ROOT, commit, essence
from benchmarks.stages import Stage, chosen

_PATIENCE = 30.0  # seconds that a command has to end in
_INPUTS = {  # files that a benchmark reads, beside its data and what it imports
    "mutants": ("tests/**/*.py", "tests/mutants/**/*.toml"),
    "range-test": ("benchmarks/results/compare/*.json",),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a stage that leaves its results in a folder.

    Attributes:
        fingerprint: the hash of code and arguments when the jobs were made, as in `fingerprint_of`.
    """

    stage: Stage
    out: Path
    data_dir: Path | None
    fingerprint: str

    @property
    def name(self) -> str:
        return self.stage.name

    def done(self) -> bool:
        """Return whether all of its results are there, by the same code and arguments."""
        found = (_read(self.out / f"{each}.json").get("fingerprint") for each in self.stage.results)
        return all(each == self.fingerprint for each in found)

    def work(self) -> Path:
        """Return the folder of what is unfinished; other code has another one."""
        return self.out / "unfinished" / self.fingerprint / self.name.replace("/", "-")

    def spent(self) -> float:
        """Return the seconds of earlier calls that were stopped, of a command that goes on."""
        file = self.work() / "seconds"
        return float(file.read_text()) if self.stage.benchmark in RESUMING and file.exists() else 0.0

    def expected(self) -> float:
        """Return the seconds that are left of what the command took last, or else of the estimate."""
        last = [_seconds_of_all_runs(_read(folder / f"{self.name}.json")) for folder in (self.out, RESULTS)]
        whole: float = next(filter(None, last), 60.0 * self.stage.minutes)
        return max(0.0, whole - self.spent())

    def words(self) -> list[str]:
        """Give the whole command, after ``python -m benchmarks``."""
        out = self.work()
        if _wants_file(self.stage):
            out /= f"{Path(self.name).name}.json"
        return [*self.stage.words(self.data_dir), "--out", str(out)]

    def run(self) -> str | None:
        """Run the command and put its results in their place; return what went wrong."""
        if self._changed():
            return "the code has changed; call again"
        work, before, begun = self.work(), self.spent(), time.monotonic()
        work.mkdir(parents=True, exist_ok=True)
        try:
            code = start(self.words())
        finally:
            seconds = before + time.monotonic() - begun
            (work / "seconds").write_text(f"{seconds:.1f}\n")
        if code:
            return f"it ended with {code}"
        if self._changed():
            return "the code changed while it ran; call again"
        missing = [name for name in self._files() if not (work / name).exists()]
        if missing:
            return f"it left no {', '.join(missing)}"
        self._keep(work, seconds)
        shutil.rmtree(work)
        with suppress(OSError):  # others are unfinished
            work.parent.rmdir()
            work.parent.parent.rmdir()
        return None

    def _changed(self) -> bool:
        return fingerprint_of(self.stage) != self.fingerprint

    def _files(self) -> dict[str, str]:
        """Return, by the names that the command gives to its JSON, those of the results."""
        if self.stage.leaves is not None:
            return {f"{self.stage.leaves}.json": f"{self.name}.json"}
        return {f"{Path(result).name}.json": f"{result}.json" for result in self.stage.results}

    def _keep(self, work: Path, seconds: float) -> None:
        """Move results from ``work`` to their place, the JSON last: where it is, all is."""
        folder = (self.out / self.name).parent
        folder.mkdir(parents=True, exist_ok=True)
        leaves = self.stage.leaves
        for picture in work.glob(f"{leaves or ''}*.png"):
            name = picture.name if leaves is None else Path(self.name).name + picture.name.removeprefix(leaves)
            picture.replace(folder / name)
        for name, result in self._files().items():
            report = json.loads((work / name).read_text())
            made = {"fingerprint": self.fingerprint, **report, "wall_seconds": round(seconds, 1)}
            (work / name).write_text(json.dumps(made, indent=2, allow_nan=False) + "\n")
            (work / name).replace(self.out / result)


def run(args: argparse.Namespace) -> None:
    if args.table:
        update_page()
        return
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise UsageError(f"argument --data-dir: no folder {str(args.data_dir)!r}")
    data_dir = None if args.data_dir is None else args.data_dir.resolve()
    stages = chosen(args.stages, args.skip)
    jobs = [Job(stage, args.out.resolve(), data_dir, fingerprint_of(stage)) for stage in stages]
    left = [job for job in jobs if not job.done()]
    print(listing(jobs, left))
    if args.dry_run:
        return
    for job in left:
        if job.stage.needs_data and data_dir is None:
            raise UsageError(
                f"argument --data-dir: without it {job.name} measures something else; pass the folder, or --skip "
                f"{job.stage.benchmark}"
            )
    if (commit() or "").endswith(DIRTY):
        print("The code differs from what is committed: results will be marked as of a dirty tree.")
    failed = carry_out(left)
    if args.out.resolve() == RESULTS:
        update_page()
    if failed:
        sys.exit("\n".join(f"{name} failed: {what}" for name, what in failed.items()))


def carry_out(left: Sequence[Job]) -> dict[str, str]:
    """Run the jobs in turn; return what went wrong, by the name of the stage."""
    failed = {}
    for number, job in enumerate(left):
        in_all = sum(each.expected() for each in left[number:])
        print(f"[{number + 1}/{len(left)}] {job.name}: about {_span(job.expected())}, {_span(in_all)} left in all")
        print(f"    python -m benchmarks {shlex.join(job.words())}", flush=True)
        if (wrong := job.run()) is not None:
            failed[job.name] = wrong
            print(f"{job.name} failed: {wrong}", flush=True)
        else:
            print(f"{job.name}: {', '.join(str(job.out / f'{each}.json') for each in job.stage.results)}", flush=True)
    return failed


def listing(jobs: Sequence[Job], left: Sequence[Job]) -> str:
    """Show what is run, in its order, with the time that it is expected to take."""
    lines = []
    for job in jobs:
        state = f"{_span(job.expected())} left" if job in left and job.spent() else _span(job.expected())
        lines.append(f"{job.name:<40} {state if job in left else 'up to date':>15}   {job.stage.command}")
    total = _span(sum(job.expected() for job in left))
    return "\n".join([*lines, f"{len(left)} of {len(jobs)} stages to run: about {total}"])


def start(words: Sequence[str]) -> int:
    """Run a command of ours to its end, and stop it and its processes where this one is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Of a session of its own: all that it starts is in its group, and is stopped by one signal.
    command = subprocess.Popen([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, start_new_session=True)
    try:
        return command.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                command.wait(_PATIENCE)
            os.killpg(command.pid, signal.SIGKILL)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def fingerprint_of(stage: Stage) -> str:
    """Return a hash of the package, of a benchmark with what it imports and reads, and of its arguments."""
    mixed = hashlib.sha256(repr(_arguments(stage)).encode())
    for file, text in sorted(_code_of(stage.benchmark).items()):
        mixed.update(f"{file.relative_to(ROOT)}\n{text}".encode())
    return mixed.hexdigest()[:12]


def _arguments(stage: Stage) -> dict[str, Any]:
    """Return all arguments of its command, defaults too, but for paths: what lies there counts."""
    found = vars(_parser(stage).parse_args(essence(stage.command)[1:]))
    return {name: value for name, value in sorted(found.items()) if not isinstance(value, Path)}


def _wants_file(stage: Stage) -> bool:
    return bool(_parser(stage).get_default("out").suffix)


def _parser(stage: Stage) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ADD[stage.benchmark](parser)
    return parser


def _code_of(benchmark: str) -> dict[Path, str]:
    """Return the files that the figures of a benchmark depend on, with their text."""
    globs = ("kfac_optim/**/*.py", *_INPUTS.get(benchmark, ()))
    found = {file: file.read_text() for each in globs for file in ROOT.glob(each)}
    todo = [ROOT / "benchmarks" / f"{benchmark.replace('-', '_')}.py"]
    while todo:
        file = todo.pop()
        if file not in found:
            found[file] = file.read_text()
            todo += _imports(found[file])
    return found


@functools.cache
def _imports(text: str) -> list[Path]:
    """Return the files of benchmarks that one with this text imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "benchmarks":
            folder = ROOT.joinpath(*node.module.split("."))
            modules = (folder, *(folder / alias.name for alias in node.names))
            found += [file for module in modules if (file := module.with_suffix(".py")).is_file()]
    return found


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _seconds_of_all_runs(report: dict[str, Any]) -> float | None:
    """Return the seconds that a result would take, at its own pace, if it took no trial from an earlier one."""
    seconds: float | None = report.get("wall_seconds")
    taken: int = report.get("trials", 0) * sum(len(each["optimizers"]) for each in report.get("trials_of", ()))
    if seconds is None or not taken:
        return seconds
    runs: int = sum(report["trials"] + len(each["runs"]) for each in report["optimizers"])
    return seconds * runs / (runs - taken)


def _span(seconds: float) -> str:
    """Say a time in words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
