"""Do the tests notice the mistakes that a colleague could make?

Each mutant in tests/mutants is one small mistake in one file of the package: a sign, a root, a transposition, a period
that is off by one, state that is not restored. They were written from the package's code alone, without a look at the
tests. One after the other is made in a copy of the checkout, in a temporary folder, and the tests run there until one
fails: first the files that seem to be about the mutated one, then the others of its room, then the quick tests of
everything else, then the slow ones of its room. A run that takes longer than --timeout counts as killed, as does one
whose tests cannot even be imported. In the end every test that has just killed a mutant runs once without any: what
fails there is no proof, and is judged again the next time.

With --covering, the quick tests of those files and of the room that execute the mutated line come first, from the
quickest on, a minute of them. Which these are is found by a run of each file under coverage.py (`covering.py`), which
is kept in the folder of temporary files. With --room-alone too, other tests run only where no test executes the line.

With --random, mutants are drawn from the code instead (`random_mutants.py`). Where one changes nothing that a user
could see, tests/mutants/random/explained.toml says why, and it is not judged again.

Each verdict is written at once. A kill holds until the mutated file or the mutant changes, and then the test that
killed goes first; survivors are judged again whenever the command runs, as there may be new tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch

from benchmarks.arguments import UsageError
from benchmarks.covering import Covering
from benchmarks.harness import write_json
from benchmarks.mutation import MUTANTS, ROOT, Mutant, files_about, load
from benchmarks.random_mutants import draw, texts

EXPLAINED = MUTANTS / "random" / "explained.toml"
"""Says why mutants that were drawn, and survived, hurt nobody: a sentence for each name."""

_MOST = 60.0
"""Limits the seconds of tests that execute a mutated line, before all others run."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_GONE = re.compile(r"^ERROR: (?:file or directory )?not found: ", re.MULTILINE)
Tests = Literal["killer", "given", "covering", "near", "near, slow", "room", "others", "slow"]
_PASSED, _FAILED_TESTS, _INTERRUPTED, _NONE_COLLECTED = 0, 1, 2, 5  # exit codes of pytest
_USAGE, _BROKEN = 4, 6  # pytest's, and one that is none of its own


@dataclass(frozen=True)
class Verdict:
    """Holds what the tests said of a mutant.

    Attributes:
        killed: whether a test failed.
        by: the test, ``"time-out"``, or ``"import"`` where no test could run; None of a survivor.
        tests: the tests of the last run: the one that killed before, those given, those that execute the mutated line,
            quick or slow ones of the files that seem to be about the mutated one, the quick ones of its room, those of
            everything else, or the slow ones of the room.
        seconds: the seconds of all runs, those under coverage.py included.
        file_print: a fingerprint of the mutated file.
    """

    killed: bool
    by: str | None
    tests: Tests
    seconds: float
    file_print: str


class GoneError(RuntimeError):
    """Says that some of the named tests are not there."""


class Copy:
    """Has a copy of the checkout, in which mutants are made and tests run."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder = folder
        self._timeout = timeout
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have the mistake in the copy for the time being."""
        path = self.folder / "kfac_optim" / mutant.file
        path.write_text(mutant.applied(path.read_text()))
        try:
            yield
        finally:
            shutil.copy2(ROOT / "kfac_optim" / mutant.file, path)

    def pytest(self, words: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run tests and return pytest's exit code, None after a time-out, and the tests that failed.

        They run in a fork of this process, which has torch imported already, and nothing of the package.
        """
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _run_tests(self.folder, words, output.fileno())
            code = _wait(child, self._timeout)
            output.seek(0)
            text = output.read()
        if code is None or code in (_PASSED, _FAILED_TESTS, _INTERRUPTED, _NONE_COLLECTED):
            return code, _FAILED.findall(text)
        if code == _USAGE and (failed := _FAILED.findall(text)):  # a file with a test that is named cannot be imported
            return code, failed
        if code < 0:  # a signal, as by a fault of memory
            return code, []
        kind = GoneError if _GONE.search(text) else RuntimeError
        raise kind(f"pytest was called wrongly or broke down: {' '.join(words)[:1000]}\n{text[-4000:]}")

    def judge(self, mutant: Mutant, runs: Iterable[tuple[Tests, Sequence[str]]]) -> Verdict:
        """Make a mutant, and run tests until one fails."""
        begun, by = time.monotonic(), None
        last: Tests = "near"
        with self.mutated(mutant):
            for name, words in runs:
                try:
                    code, failed = self.pytest(["-x", *words])
                except GoneError:
                    if name == "killer":  # a test that has another name by now
                        continue
                    raise
                last = name
                if code not in (_PASSED, _NONE_COLLECTED):
                    by = "time-out" if code is None else (*failed, "import")[0]
                    break
        seconds = round(time.monotonic() - begun, 1)
        return Verdict(by is not None, by, last, seconds, mutant.print_of())

    def fail_alone(self, tests: Sequence[str]) -> set[str]:
        """Return which of these tests fail without a mutant, or take too long."""
        found: set[str] = set()
        for few in (tests[at : at + 10] for at in range(0, len(tests), 10)):
            code, failed = self.pytest(["-m", "", *few])
            found.update(few if code is None else failed)
        return found


def _run_tests(folder: Path, words: Sequence[str], output: int) -> NoReturn:
    """Run pytest on the copy, in a new process that was forked for it, and end that."""
    code = _BROKEN
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT), str(folder)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "kfac_optim")]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # which processes that tests start would import
        usual = ["-q", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(importlib.import_module("pytest").main([*usual, *words]))
        package = sys.modules.get("kfac_optim")
        if package is not None and not str(package.__file__).startswith(str(folder)):
            print(f"kfac_optim was imported from {package.__file__}")
            code = _BROKEN
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, timeout: float) -> int | None:
    """Return the exit code of a forked process, negative of a signal, or None after a time-out; end what it began."""
    code, until = None, time.monotonic() + timeout
    while code is None and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code


def runs_of(
    mutant: Mutant,
    given: Sequence[str],
    *,
    room_alone: bool,
    killer: str | None = None,
    covering: Covering | None = None,
) -> Iterator[tuple[Tests, Sequence[str]]]:
    """Yield what pytest is asked for, until a test fails."""
    if killer is not None:
        yield "killer", ["-m", "", killer]
    if given:
        yield "given", ["-m", "", *given]
        return
    near, room, others = files_about(mutant)
    without: list[str] = []
    if covering is not None:
        seconds = covering.of(mutant, [*near, *room])
        in_all = accumulate(seconds.values())
        first = [test for test, until in zip(seconds, in_all, strict=True) if until < _MOST] or list(seconds)[:1]
        if first:
            yield "covering", ["-m", "", *first]
            if room_alone:
                return
        without = covering.deselected(first)
    yield "near", [*near[:1], *without]
    yield "near", [*near[1:], *without]
    if room:
        yield "room", [*room, *without]
    if not room_alone:
        yield "near, slow", ["-m", "slow", *near]  # the quick run keeps a few cases of each test
        yield "others", others
        rooms = [name for name in (f"tests/{mutant.room}", f"tests/test_{mutant.room}.py") if (ROOT / name).exists()]
        if rooms:
            yield "slow", ["-m", "slow", *rooms]


def run(args: argparse.Namespace) -> None:
    if args.covering and importlib.util.find_spec("coverage") is None:
        raise UsageError('argument --covering: coverage.py is not installed. Run: pip install -e ".[dev]"')
    if lacking := [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]:
        raise UsageError(f'mutants are judged by the tests, which need {lacking[0]}. Run: pip install -e ".[dev]"')
    os.environ["OMP_NUM_THREADS"] = "1"
    for heavy in ("torch", "torch.distributed.fsdp", "pytest", "hypothesis"):  # once, and not for each run of tests
        importlib.import_module(heavy)
    known = draw(args.random, args.seed, texts()) if args.random else load()
    explained: dict[str, str] = tomllib.loads(EXPLAINED.read_text()) if args.random else {}
    chosen = [mutant for mutant in known if not args.names or {mutant.room, mutant.name} & set(args.names)]
    if unknown := set(args.names) - {word for mutant in known for word in (mutant.room, mutant.name)}:
        raise UsageError(f"argument MUTANT: rooms or names of mutants, got {', '.join(sorted(unknown))}")
    out = Path("random.json") if args.random and args.out == Path("mutants.json") else args.out
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    before = report.get("verdicts", {}) | report.get("of_other_code", {})
    of_before = {mutant: Verdict(**before[mutant.name]) for mutant in known if mutant.name in before}
    verdicts = {mutant.name: each for mutant, each in of_before.items() if each.file_print == mutant.print_of()}
    stale = {mutant.name: each for mutant, each in of_before.items() if mutant.name not in verdicts}
    left = [mutant for mutant in chosen if mutant.name not in verdicts
            or not (verdicts[mutant.name].killed or mutant.name in explained)]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy, new = Copy(Path(folder, "mutated"), args.timeout), set[str]()
        same = Copy(Path(folder, "same"), math.inf)
        covering = Covering(same.folder, same.pytest) if args.covering else None
        for number, mutant in enumerate(left, 1):
            by = stale[mutant.name].by if mutant.name in stale else None
            killer = by if by is not None and "::" in by else None
            runs = runs_of(mutant, args.tests, room_alone=args.room_alone, killer=killer, covering=covering)
            verdict = verdicts[mutant.name] = copy.judge(mutant, runs)
            if verdict.by is not None and "::" in verdict.by:
                new.add(verdict.by)
            _write(out, known, verdicts, stale, explained)
            said = f"killed by {verdict.by}" if verdict.killed else "SURVIVED"
            print(f"[{number}/{len(left)}] {mutant.name}: {said} ({verdict.seconds:.0f} s)", flush=True)
        no_proof = copy.fail_alone(sorted(new))
    for name, verdict in list(verdicts.items()):
        if verdict.by in no_proof:
            print(f"{name}: {verdict.by} fails without a mutant too; run the command again")
            del verdicts[name]
    _write(out, known, verdicts, stale, explained)
    _tell(known, verdicts, explained)
    print(f"Figures: {out}")


def _write(
    path: Path,
    known: Sequence[Mutant],
    verdicts: dict[str, Verdict],
    stale: dict[str, Verdict],
    explained: Container[str],
) -> None:
    """Write the verdicts, and those of other code until they are made anew: their tests go first then."""
    of_known = {mutant.name: verdicts[mutant.name] for mutant in known if mutant.name in verdicts}
    of_other_code = {name: verdict for name, verdict in stale.items() if name not in of_known}
    survivors = [name for name, verdict in of_known.items() if not verdict.killed]
    report = {
        "benchmark": "mutants",
        "mutants": len(known),
        "judged": len(of_known),
        "killed": sum(verdict.killed for verdict in of_known.values()),
        "survivors": survivors,
        "explained": [name for name in survivors if name in explained],
        "seconds": round(sum(verdict.seconds for verdict in of_known.values())),
        "verdicts": {name: asdict(verdict) for name, verdict in sorted(of_known.items())},
        "of_other_code": {name: asdict(verdict) for name, verdict in sorted(of_other_code.items())},
    }
    write_json(path, report, torch.device("cpu"))


def _tell(known: Sequence[Mutant], verdicts: dict[str, Verdict], explained: dict[str, str]) -> None:
    """Show the score of each room, and every survivor."""
    rooms = Counter(mutant.room for mutant in known if mutant.name in verdicts)
    killed = Counter(mutant.room for mutant in known if mutant.name in verdicts and verdicts[mutant.name].killed)
    for room, number in sorted(rooms.items()):
        print(f"{room:>12}: {killed[room]} of {number}")
    total, dead = rooms.total(), killed.total()
    print(f"{dead} of {total} killed" + (f" ({100 * dead / total:.1f}%)" if total else "")
          + (f"; {len(known) - total} not judged yet" if total < len(known) else ""))  # fmt: skip
    survivors = [mutant for mutant in known if mutant.name in verdicts and not verdicts[mutant.name].killed]
    harmless = sum(mutant.name in explained for mutant in survivors)
    if 0 < harmless < total:
        print(f"{dead} of {total - harmless} without those that are explained ({100 * dead / (total - harmless):.1f}%)")
    for mutant in survivors:
        why = f" Explained: {explained[mutant.name]}" if mutant.name in explained else ""
        print(f"survived: {mutant.name} (kfac_optim/{mutant.file}): {mutant.mistake}{why}")
