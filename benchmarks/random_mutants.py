"""Mutants drawn at random from the code of the package, to stand beside those that are written by hand.

Each changes one place of one file: an operator, a number, an argument, a small statement. Left alone are docstrings,
annotations, errors, `__repr__`, `__all__`, what type checkers read, assertions, decorators, f-strings and protocols.

A file is drawn in proportion to its lines of code, then a kind of change that it has a place for, then the place. Each
draw has a generator of its own, so that a change to the code moves few of them, and the first 100 of 300 are those of
100. A name is made from the file, the kind and the text, and stays while these do.
"""

from __future__ import annotations

import ast
import hashlib
import io
import random
import tokenize
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.mutation import ROOT, Mutant

NEIGHBOURS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "//", "**": "*", "@": "*",
    "and": "or", "or": "and",
}  # fmt: skip
"""Says what stands in the place of an operator. `|` and `&` join types and flags, mostly, and stay."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Edit:
    """Describes one change of a text: what stands from `start` to `end`, in characters, is replaced."""

    kind: str
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        """Return the changed text."""
        return text[: self.start] + self.new + text[self.end :]

    def compiles(self, text: str) -> bool:
        """Return whether the changed text is Python."""
        try:
            compile(self.applied(text), "mutant", "exec")
        except SyntaxError:
            return False
        return True


class _Edits(ast.NodeVisitor):
    """Collects every change that can be made in a text."""

    def __init__(self, text: str) -> None:
        self.found: list[Edit] = []
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line))
        self._tokens = [
            (self._begins[token.start[0] - 1] + token.start[1], self._begins[token.end[0] - 1] + token.end[1], token)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in _NO_CODE
        ]
        self._starts = [start for start, _, _ in self._tokens]
        self.visit(ast.parse(text))

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return where a node begins and ends; the tree counts bytes."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, row: int | None, byte: int | None) -> int:
        at = (row or 1) - 1
        return self._begins[at] + len(self._lines[at].encode()[:byte].decode())

    def _tokens_of(self, begin: int, end: int) -> list[tuple[int, int, tokenize.TokenInfo]]:
        return self._tokens[bisect_left(self._starts, begin) : bisect_left(self._starts, end)]

    def _add(self, kind: str, span: tuple[int, int], new: str) -> None:
        self.found.append(Edit(kind, *span, new))

    def _operator(self, kind: str, begin: int, end: int) -> None:
        """Replace the operator between two places, beside which there are only parentheses."""
        between = [each for each in self._tokens_of(begin, end) if each[2].string not in ("(", ")")]
        new = NEIGHBOURS.get(" ".join(token.string for _, _, token in between))
        if new is not None:
            self._add(kind, (between[0][0], between[-1][1]), new)

    def _between(self, kind: str, nodes: Sequence[ast.expr]) -> None:
        for left, right in pairwise(nodes):
            self._operator(kind, self._span(left)[1], self._span(right)[0])

    def visit(self, node: ast.AST) -> None:
        """Collect the changes of a node and of what it holds."""
        if not isinstance(node, ast.arg | ast.Assert | ast.Raise | ast.JoinedStr):
            super().visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between("comparison", [node.left, *node.comparators])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between("and-or", node.values)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_is_text(each) for each in (node.left, node.right)):
            self._between("arithmetic", [node.left, node.right])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        begin, end = self._span(node)[0], self._span(node.operand)[0]
        if isinstance(node.op, ast.Not):  # up to a parenthesis, or the operand
            self._add("not", (begin, self._tokens_of(begin + 1, end + 1)[0][0]), "")
        elif isinstance(node.op, ast.USub):
            self._operator("arithmetic", begin, end)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", self._span(node), "pass")
        begin, end = self._span(node.target)[1], self._span(node.value)[0]
        for at, until, token in self._tokens_of(begin, end):
            if (new := NEIGHBOURS.get(token.string.removesuffix("="))) is not None:
                self._add("arithmetic", (at, until), f"{new}=")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("true-false", self._span(node), str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("number", self._span(node), repr(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        for each in (*node.body, *node.orelse):
            if isinstance(each, ast.Return | ast.Continue):
                self._add("early-end", self._span(each), "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("statement", self._span(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("warn", "cast", "TypeVar") or called.endswith(("Error", "Warning")):
            return  # words, or for type checkers
        given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        spans = sorted(map(self._span, given))
        for (begin, _), (following, _) in pairwise(spans):
            self._add("argument", (begin, following), "")
        if spans:
            self._add("argument", (spans[-2][1] if len(spans) > 1 else spans[-1][0], spans[-1][1]), "")
        for left, right in pairwise(node.args):
            if isinstance(left, ast.Name) and isinstance(right, ast.Name) and left.id != right.id:
                (begin, comma), (after, end) = self._span(left), self._span(right)
                self._add("swap", (begin, end), f"{right.id}{self._text[comma:after]}{left.id}")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__"):
            for part in (node.args, *node.body):
                self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any("Protocol" in ast.dump(base) for base in node.bases):
            for part in node.body:
                self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        if "__all__" not in (getattr(target, "id", None) for target in node.targets):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def edits(text: str) -> list[Edit]:
    """Return every change that can be made in the text of a file; a few do not compile."""
    return _Edits(text).found


def lines_of_code(text: str) -> int:
    """Count the lines that hold code, not only comments, strings of their own, or nothing."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    rows = {token.start[0] for token in tokens if token.type not in _NO_CODE}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            rows -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(rows)


def as_mutant(file: str, text: str, edit: Edit) -> Mutant:
    """Write a change as a text that occurs once, whole lines of it, and what replaces them."""
    begin, end = text.rfind("\n", 0, edit.start) + 1, (text.find("\n", edit.end) + 1 or len(text)) - 1
    while text.count(text[begin:end]) != 1:
        begin, end = text.rfind("\n", 0, max(begin - 1, 0)) + 1, (text.find("\n", end + 1) + 1 or len(text)) - 1
    old = text[begin:end]
    new = Edit(edit.kind, edit.start - begin, edit.end - begin, edit.new).applied(old)
    path = Path(file).with_suffix("")
    stem = path.parent.name if path.name == "__init__" else path.name
    digest = hashlib.sha256(f"{file}\0{old}\0{new}".encode()).hexdigest()[:6]
    was = " ".join(text[edit.start : edit.end].split())
    mistake = f"line {text.count(chr(10), 0, edit.start) + 1}: {edit.kind}: {was!r} became {edit.new!r}"
    return Mutant(f"{path.parts[0]}/{stem.replace('_', '-')}-{edit.kind}-{digest}", file, old, new, mistake)


def texts(package: Path = ROOT / "kfac_optim") -> dict[str, str]:
    """Read the files of the package, by their paths within it."""
    return {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}


def draw(number: int, seed: int, files: dict[str, str]) -> list[Mutant]:
    """Draw so many different mutants, fewer where there are not as many."""
    left: dict[str, dict[str, list[Edit]]] = {}
    for file, text in files.items():
        for edit in edits(text):
            left.setdefault(file, {}).setdefault(edit.kind, []).append(edit)
    names = list(left)
    weights = [lines_of_code(files[file]) for file in names]
    found, turn = dict[str, Mutant](), 0
    while len(found) < number and any(left.values()):
        chance, turn = random.Random(f"{seed} {turn}"), turn + 1
        (file,) = chance.choices(names, weights)
        kinds = left[file]
        if kinds:
            kind = chance.choice(sorted(kinds))
            edit = kinds[kind].pop(chance.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]
            if edit.compiles(files[file]):
                mutant = as_mutant(file, files[file], edit)
                found[mutant.name] = mutant
    return list(found.values())
