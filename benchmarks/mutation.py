"""The mutants of tests/mutants, and which tests are likely to notice each."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "tests" / "mutants"
_NEAR = 4  # files of tests, which come first


@dataclass(frozen=True)
class Mutant:
    """Describes one mistake: a text of one file, and what stands there instead.

    Attributes:
        name: the name of the mistake, ``room/words-with-dashes``.
        file: the path of the file within the package.
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


def load(folder: Path = MUTANTS) -> list[Mutant]:
    """Read the mutants of all rooms, one of each room in turn: what is judged first is then spread over the package."""
    found: list[tuple[int, Mutant]] = []
    for path in sorted(folder.glob("*.toml")):
        mutants = tomllib.loads(path.read_text())
        found += ((at, Mutant(f"{path.stem}/{name}", **each)) for at, (name, each) in enumerate(mutants.items()))
    return [mutant for _, mutant in sorted(found, key=lambda each: each[0])]


def lines_of(mutant: Mutant, text: str) -> set[int]:
    """Return the lines of the statements that a mutant changes.

    What runs when the module is imported stands for the function, the class or the file that it belongs to.
    """
    at, old, new = text.index(mutant.old), mutant.old, mutant.new
    begin = _alike(old, new)
    end = len(old) - _alike(old[begin:][::-1], new[begin:][::-1])
    first = text.count("\n", 0, at + begin) + 1
    changed = range(first, max(first, text.count("\n", 0, at + end) + 1) + 1)
    lines = set(changed)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for line in changed:
        around = sorted((node for node in nodes if line in _rows(node)), key=lambda node: len(_rows(node)))
        if any(isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno for node in around):
            body: list[ast.stmt] = getattr(around[0], "body", [])
            lines.update(range(around[0].lineno, body[0].lineno) if body else _rows(around[0]))
        else:
            scopes = [_rows(node) for node in around if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            lines.update([*scopes, range(1, text.count("\n") + 2)][0])
    return lines


def _rows(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _alike(one: str, other: str) -> int:
    """Count the characters at the beginning that two texts have in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def files_about(mutant: Mutant) -> tuple[list[str], list[str], list[str]]:
    """Return the files of tests that seem to be about a mutant's file, the others of its room, and all others.

    What they are about is guessed: by their names, by the module, functions and classes that they name, and by those
    modules that import the mutated one, or import one that does.
    """
    module = "kfac_optim." + mutant.file.removesuffix(".py").replace("/", ".")
    direct = _importers([module])
    importers = {name.rpartition(".")[2] for name in direct | _importers(direct)}
    named = [module, *_around(mutant), *dict.fromkeys(re.findall("[a-z]+_[a-z_]+[a-z]", mutant.old))]
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


def _importers(modules: Iterable[str]) -> set[str]:
    """Return the modules of the package that import one of these."""
    wanted = re.compile(rf"(?:from|import) (?:{'|'.join(map(re.escape, modules)) or '$'})\b")
    paths = (ROOT / "kfac_optim").rglob("*.py")
    found = (path.relative_to(ROOT).with_suffix("") for path in paths if wanted.search(path.read_text()))
    return {".".join(path.parts) for path in found}


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
