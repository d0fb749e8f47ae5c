"""Do the tests notice the mistakes that a colleague could make?

Each mutant in tests/mutants is one small mistake in one file of the package: a sign, a root, a transposition, a period
that is off by one, state that is not restored. They were written from the package's code alone, without a look at the
tests. One after the other is made in a copy of the checkout, in a temporary folder, and the tests run there until one
fails: first the files that seem to be about the mutated one, then the others of its room, then the quick tests of
everything else, then the slow ones of its room. A run that takes longer than --timeout counts as killed, as does one
whose tests cannot even be imported. In the end every test that has killed a mutant runs once without any: what fails
there is no proof, and is judged again the next time.

Each verdict is written at once, and holds until the mutated file or the mutant changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from benchmarks.arguments import UsageError

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "tests" / "mutants"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
Tests = Literal["near", "near, slow", "room", "others", "slow"]
_PASSED, _FAILED_TESTS, _INTERRUPTED, _NONE_COLLECTED = 0, 1, 2, 5  # exit codes of pytest
_BROKEN = 4
_NEAR = 4  # files of tests, which come first


@dataclass(frozen=True)
class Mutant:
    """One mistake: a text of one file, and what stands there instead.

    Attributes:
        name: of the mistake, ``room/words-with-dashes``.
        file: within the package.
        old: the text, which must occur exactly once in the file.
        new: what replaces it.
        mistake: what a colleague would have got wrong.
    """

    name: str
    file: str
    old: str
    new: str
    mistake: str

    @property
    def room(self) -> str:
        """Return the folder of tests that should notice it, or the end of the name of a file of tests."""
        return self.name.partition("/")[0]

    def applied(self, text: str) -> str:
        """Make the mistake in the text of its file.

        Raises:
            ValueError: `old` does not occur there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: its old text must occur once in kfac_optim/{self.file}, and does so {count} "
                f"times. Write tests/mutants/{self.room}.toml anew after the code: {self.old!r}"
            )
        return text.replace(self.old, self.new)

    def print_of(self, root: Path = ROOT) -> str:
        """Return a fingerprint of the mutated file, by which an earlier verdict is known to hold."""
        text = self.applied((root / "kfac_optim" / self.file).read_text())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant.

    Attributes:
        killed: whether a test failed.
        by: the test, ``"time-out"``, or ``"import"`` where no test could run; None of a survivor.
        tests: of the last run: quick or slow ones of the files that seem to be about the mutated one, the quick ones
            of its room, those of everything else, or the slow ones of the room.
        seconds: of all runs.
        file_print: a fingerprint of the mutated file.
    """

    killed: bool
    by: str | None
    tests: Tests
    seconds: float
    file_print: str


def load(folder: Path = MUTANTS) -> list[Mutant]:
    """Read the mutants of all rooms, one of each room in turn: what is judged first is then spread over the package."""
    found: list[tuple[int, Mutant]] = []
    for path in sorted(folder.glob("*.toml")):
        mutants = tomllib.loads(path.read_text())
        found += ((at, Mutant(f"{path.stem}/{name}", **each)) for at, (name, each) in enumerate(mutants.items()))
    return [mutant for _, mutant in sorted(found, key=lambda each: each[0])]


class Copy:
    """A copy of the checkout, in which mutants are made and tests run."""

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
        if code < 0:  # a signal, as by a fault of memory
            return code, []
        raise RuntimeError(f"pytest was called wrongly or broke down: {' '.join(words)}\n{text[-4000:]}")

    def judge(self, mutant: Mutant, runs: Iterable[tuple[Tests, Sequence[str]]]) -> Verdict:
        """Make a mutant, and run tests until one fails."""
        begun, by = time.monotonic(), None
        last: Tests = "near"
        with self.mutated(mutant):
            for name, words in runs:
                last = name
                code, failed = self.pytest(["-x", *words])
                if code not in (_PASSED, _NONE_COLLECTED):
                    by = "time-out" if code is None else (*failed, "import")[0]
                    break
        seconds = round(time.monotonic() - begun, 1)
        return Verdict(by is not None, by, last, seconds, mutant.print_of())

    def fail_alone(self, tests: Sequence[str]) -> set[str]:
        """Return which of these tests fail without a mutant."""
        return set(self.pytest(["-m", "", *tests])[1]) if tests else set()


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


def tests_of(mutant: Mutant) -> tuple[list[str], list[str], list[str]]:
    """Return the files of tests that seem to be about a mutant's file, the others of its room, and all others.

    What they are about is guessed: by their names, by the module, functions and classes that they name, and by those
    modules that import the mutated one.
    """
    module = "kfac_optim." + mutant.file.removesuffix(".py").replace("/", ".")
    importers = {
        path.stem
        for path in (ROOT / "kfac_optim").rglob("*.py")
        if re.search(rf"(from|import) {re.escape(module)}\b", path.read_text())
    }
    named = [module, *_around(mutant)]
    words = set(re.findall("[a-z]+", f"{Path(mutant.file).stem} {mutant.name.partition('/')[2]}")) - _SMALL_WORDS

    def likeness(path: Path) -> float:
        text, own = path.read_text(), set(re.findall("[a-z]+", path.stem.removeprefix("test_")))
        by_name = 3 * len(own & words) / len(own) + 2 * any(set(each.split("_")) <= own for each in importers)
        return by_name + sum(re.search(rf"\b{re.escape(name)}\b", text) is not None for name in named)

    rooms = (f"tests/{mutant.room}/", f"tests/test_{mutant.room}.py")
    far = ("tests/benchmarks/", "tests/trainers/", "tests/distributed/")  # the slowest, and the least likely
    scores = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if path.name != "test_mutants.py":
            own = name.startswith(rooms)
            scores[name] = (not own and name.startswith(far), -likeness(path) - own, name)
    ordered = sorted(scores, key=scores.__getitem__)
    near, rest = ordered[:_NEAR], ordered[_NEAR:]
    return (
        near,
        [name for name in rest if name.startswith(rooms)],
        [name for name in rest if not name.startswith(rooms)],
    )


_SMALL_WORDS = {"of", "at", "by", "a", "the", "in", "to", "on", "and", "with", "for", "not", "base", "state"}


def _around(mutant: Mutant) -> list[str]:
    """Return the names of the public functions and classes around a mutant."""
    text = (ROOT / "kfac_optim" / mutant.file).read_text()
    line = text[: text.index(mutant.old)].count("\n") + 1
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return [node.name for node in nodes if not node.name.startswith("_")]


def runs_of(mutant: Mutant, *, room_alone: bool, beyond_room: bool) -> Iterator[tuple[Tests, Sequence[str]]]:
    """Yield what pytest is asked for, until a test fails."""
    near, room, others = tests_of(mutant)
    if not beyond_room:
        yield "near", near
        yield "near, slow", ["-m", "slow", *near]  # the quick run keeps a few cases of each test
        if room:
            yield "room", room
    if not room_alone:
        yield "others", others
        rooms = [name for name in (f"tests/{mutant.room}", f"tests/test_{mutant.room}.py") if (ROOT / name).exists()]
        yield "slow", ["-m", "slow", *rooms]


def run(args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for heavy in ("torch", "torch.distributed.fsdp", "pytest"):  # once, and not for each run of tests
        importlib.import_module(heavy)
    known = load()
    chosen = [mutant for mutant in known if not args.names or {mutant.room, mutant.name} & set(args.names)]
    if unknown := set(args.names) - {word for mutant in known for word in (mutant.room, mutant.name)}:
        raise UsageError(f"argument MUTANT: rooms or names of tests/mutants, got {', '.join(sorted(unknown))}")
    before: dict[str, Any] = json.loads(args.out.read_text())["verdicts"] if args.out.exists() else {}
    verdicts = {mutant.name: Verdict(**before[mutant.name]) for mutant in known if mutant.name in before}
    stale = [mutant.name for mutant in known if mutant.name in verdicts
             and verdicts[mutant.name].file_print != mutant.print_of()]  # fmt: skip
    for name in stale:
        del verdicts[name]
    left = [mutant for mutant in chosen if mutant.name not in verdicts or _may_go_on(verdicts[mutant.name], args)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), args.timeout)
        for number, mutant in enumerate(left, 1):
            begun = verdicts.get(mutant.name)
            verdict = copy.judge(mutant, runs_of(mutant, room_alone=args.room_alone, beyond_room=begun is not None))
            if begun is not None:
                verdict = replace(verdict, seconds=round(begun.seconds + verdict.seconds, 1))
            verdicts[mutant.name] = verdict
            _write(args.out, known, verdicts)
            said = f"killed by {verdict.by}" if verdict.killed else "SURVIVED"
            print(f"[{number}/{len(left)}] {mutant.name}: {said} ({verdict.seconds:.0f} s)", flush=True)
        killers = sorted({v.by for v in verdicts.values() if v.by is not None and "::" in v.by})
        no_proof = copy.fail_alone(killers)
    for name, verdict in list(verdicts.items()):
        if verdict.by in no_proof:
            print(f"{name}: {verdict.by} fails without a mutant too; run the command again")
            del verdicts[name]
    _write(args.out, known, verdicts)
    _tell(known, verdicts)
    print(f"Figures: {args.out}")


def _may_go_on(verdict: Verdict, args: argparse.Namespace) -> bool:
    """Say whether a survivor of its room's tests is yet to meet the others."""
    return not verdict.killed and verdict.tests in ("near, slow", "room") and not args.room_alone


def _write(path: Path, known: Sequence[Mutant], verdicts: dict[str, Verdict]) -> None:
    of_known = {mutant.name: verdicts[mutant.name] for mutant in known if mutant.name in verdicts}
    report = {
        "command": "python -m benchmarks mutants",
        "mutants": len(known),
        "judged": len(of_known),
        "killed": sum(verdict.killed for verdict in of_known.values()),
        "survivors": [name for name, verdict in of_known.items() if not verdict.killed],
        "seconds": round(sum(verdict.seconds for verdict in of_known.values())),
        "verdicts": {name: asdict(verdict) for name, verdict in sorted(of_known.items())},
    }
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(report, indent=2) + "\n")
    whole.replace(path)


def _tell(known: Sequence[Mutant], verdicts: dict[str, Verdict]) -> None:
    """Show the score of each room, and every survivor."""
    rooms = Counter(mutant.room for mutant in known if mutant.name in verdicts)
    killed = Counter(mutant.room for mutant in known if mutant.name in verdicts and verdicts[mutant.name].killed)
    for room, number in sorted(rooms.items()):
        print(f"{room:>12}: {killed[room]} of {number}")
    total, dead = rooms.total(), killed.total()
    print(f"{dead} of {total} killed" + (f" ({100 * dead / total:.1f}%)" if total else "")
          + (f"; {len(known) - total} not judged yet" if total < len(known) else ""))  # fmt: skip
    for mutant in known:
        if mutant.name in verdicts and not verdicts[mutant.name].killed:
            print(f"survived: {mutant.name} (kfac_optim/{mutant.file}): {mutant.mistake}")
