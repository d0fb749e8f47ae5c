"""Which tests execute a line of the package, so that those of a mutated line run first.

Each file of tests that is asked about runs once under coverage.py, its quick tests alone, and each test leaves its
seconds and the lines that it has executed. Ranks are processes that outlive a test: what they execute counts for the
test that called them. Not seen are lines of other processes, of threads that torch starts and of compiled graphs.

What was seen is kept in the folder of temporary files, under a name that is made from the code of the package; a file
of tests that has changed runs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.mutation import Mutant, lines_of

PACKAGE = Path(__file__).parents[1] / "kfac_optim"

_PASSED, _SOME_FAILED, _NONE_COLLECTED = 0, 1, 5  # exit codes of pytest
Lines = dict[str, set[int]]  # of each file of the package


class Covering:
    """Knows the quick tests of a checkout, and which lines of the package each executes.

    Args:
        root: the folder of the checkout.
        trace: runs pytest with words, and returns its exit code first.
        folder: the folder in which what was seen is kept.
    """

    def __init__(self, root: Path, trace: Callable[[Sequence[str]], Any], folder: Path | None = None) -> None:
        self._root, self._trace = root, trace
        code = _print_of(sorted((root / "kfac_optim").rglob("*.py")))
        self._path = Path(folder or tempfile.gettempdir()) / f"lines-of-tests-{code}.jsonl"
        self._prints: dict[str, str] = {}  # of the files of tests that have run
        self._tests: dict[str, dict[str, tuple[float, Lines]]] = {}  # of each of these files
        if self._path.exists():
            self._read()

    def of(self, mutant: Mutant, files: Sequence[str]) -> dict[str, float]:
        """Return the quick tests that execute a mutant's lines and how many seconds each takes.

        Those of the given files come first, then those of other files that have run before; the quickest lead.
        """
        if wanted := [name for name in files if not self._is_known(name)]:
            code, _ = self._trace(["-p", "benchmarks.covering", "--lines-of-tests", str(self._path), *wanted])
            if code not in (_PASSED, _SOME_FAILED, _NONE_COLLECTED):
                raise RuntimeError(f"pytest broke down (exit code {code}) on {' '.join(wanted)}")
            with self._path.open("a") as file:
                for name in wanted:
                    file.write(json.dumps({"file": name, "print": _print_of([self._root / name])}) + "\n")
            self._read()
        lines = lines_of(mutant, (self._root / "kfac_optim" / mutant.file).read_text())
        found = [
            (name not in files, seconds, test)
            for name in filter(self._is_known, self._tests)
            for test, (seconds, executed) in self._tests[name].items()
            if lines & executed.get(mutant.file, set())
        ]
        return {test: seconds for _, seconds, test in sorted(found)}

    def deselected(self, tests: Iterable[str]) -> list[str]:
        """Return words by which pytest leaves these tests out, and no other whose name begins like one of them."""
        known = sorted(test for each in self._tests.values() for test in each)
        alike = {one for one, following in pairwise(known) if following.startswith(one)}
        return [f"--deselect={test}" for test in tests if test not in alike]

    def _is_known(self, name: str) -> bool:
        path = self._root / name
        return path.exists() and self._prints.get(name) == _print_of([path])

    def _read(self) -> None:
        tests: defaultdict[str, dict[str, tuple[float, Lines]]] = defaultdict(dict)
        for line in self._path.read_text().splitlines():
            found = json.loads(line)
            if "file" in found:
                self._prints[found["file"]] = found["print"]
                self._tests[found["file"]] = tests.pop(found["file"], {})
            else:
                lines = {name: set(each) for name, each in found["lines"].items()}
                tests[found["test"].partition("::")[0]][found["test"]] = found["seconds"], lines


def _print_of(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


@contextmanager
def _executed(lines: Lines) -> Iterator[None]:
    """Add which lines of the package this process executes."""
    from coverage import Coverage  # in the extra `dev`

    measured = Coverage(data_file=None, config_file=False, include=[f"{PACKAGE}/*"], messages=False)
    measured.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    measured.start()
    try:
        yield
    finally:
        measured.stop()
        data = measured.get_data()
        for path in data.measured_files():
            lines[str(Path(path).relative_to(PACKAGE))].update(data.lines(path) or ())


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--lines-of-tests", type=Path, help="append the lines that each test executes to this file")


def pytest_collection_finish(session: Any) -> None:
    session.config.pluginmanager.register(_Recorder(session.config.getoption("lines_of_tests")))


class _Recorder:
    """Appends a line for each test that passes, as a plugin of pytest."""

    def __init__(self, path: Path) -> None:
        from helpers.ranks import Ranks  # type: ignore[import-not-found]

        self._path, self._folder = path, tempfile.TemporaryDirectory(prefix="lines-")
        run, folder = Ranks.run, self._folder.name

        def traced(ranks: Any, function: Callable[..., Any], *args: object, timeout: float = 60.0) -> Any:
            return run(ranks, _on_rank, function, folder, *args, timeout=timeout)

        Ranks.run = traced

    def pytest_sessionfinish(self) -> None:
        self._folder.cleanup()  # processes that are forked for tests end without

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines: Lines = defaultdict(set)
        self._seconds, self._passed = 0.0, True
        self._measuring = _executed(self._lines)
        self._measuring.__enter__()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        self._passed &= not report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._measuring.__exit__(None, None, None)
        for path in Path(self._folder.name).iterdir():
            for name, lines in json.loads(path.read_text()).items():
                self._lines[name].update(lines)
            path.unlink()
        if self._passed:
            lines = {name: sorted(each) for name, each in self._lines.items()}
            with self._path.open("a") as file:
                file.write(json.dumps({"test": nodeid, "seconds": round(self._seconds, 3), "lines": lines}) + "\n")


def _on_rank(rank: int, function: Callable[..., Any], folder: str, *args: object) -> Any:
    """Call a function on a rank, and leave the lines that it executes in a file of the folder."""
    lines: Lines = defaultdict(set)
    try:
        with _executed(lines):
            return function(rank, *args)
    finally:
        found = {name: sorted(each) for name, each in lines.items()}
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))
