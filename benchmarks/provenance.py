"""The origin of figures: the command and the commit that made a result, found without torch."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIRTY = "-dirty"
_PROGRAM = ("python", "-m", "benchmarks")
_CODE = ("kfac_optim/*.py", "benchmarks/*.py", "tests/*.py")  # git's * goes through folders


def command_line(words: Sequence[str]) -> str:
    """Return the command as one may copy it; of paths that mean nothing elsewhere only the last part."""
    shortened = [Path(word).name if os.path.isabs(word) or word.startswith("..") else word for word in words]
    return shlex.join([*_PROGRAM, *shortened])


def essence(command: str) -> list[str]:
    """Return the words of a command that decide what it measures: all but the program, and what names files of ours.

    These are --out, --data-dir, and --trials-of, whose trials are those that the command would run otherwise.
    """
    words = iter(shlex.split(command.removeprefix(shlex.join(_PROGRAM))))
    kept = []
    for word in words:
        if word in ("--out", "--data-dir", "--trials-of"):
            next(words)
        else:
            kept.append(word)
    return kept


def commit() -> str | None:
    """Return the commit that is checked out, with `DIRTY` after it where code differs from it; None without git."""
    head = _git("rev-parse", "--short=7", "HEAD")
    if not head:
        return None
    return head + (DIRTY if _git("status", "--porcelain", "--untracked-files=all", "--", *_CODE) else "")


def _git(*words: str) -> str | None:
    """Return what git says, and None where it cannot."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
