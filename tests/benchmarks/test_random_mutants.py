"""Mutants drawn at random change one place of the code, and leave alone what only words depend on."""

import ast
import textwrap
import tomllib
from collections.abc import Iterable

import pytest

from benchmarks.mutants import EXPLAINED
from benchmarks.random_mutants import Edit, as_mutant, draw, edits, lines_of_code, texts

TEXT = textwrap.dedent('''\
    """É: 1 + 1 of them."""

    from typing import TYPE_CHECKING, Protocol

    if TYPE_CHECKING:
        COUNT = 7

    __all__ = ["a" * 3, "b"]


    class Shape(Protocol):
        def area(self, scale: float = 8.0) -> "Shape": ...


    class Square(Shape):
        def __repr__(self) -> str:
            return "é" * 9

        def area(self, scale: float | None = None) -> tuple[int, "Shape"]:
            """Return 5 + 5."""
            assert scale != 6
            if scale is None:
                raise ValueError(f"{1 + 2} of {scale!r}", 4 - 3)
            é = f"{5 * 5}" + "text"
            return é
    ''')
CODE = textwrap.dedent("""\
    def f(a, b, *, flag=True):
        if not (a < b) and b is not None:
            return g(a, b, deep=flag)
        for each in a:
            if each:
                continue
            b += -each * 0
        b.update(a)
        return b
    """)


def changes(found: Iterable[Edit], text: str) -> set[tuple[str, str, str]]:
    return {(edit.kind, text[edit.start : edit.end], edit.new) for edit in found}


def test_each_kind_of_change() -> None:
    assert changes(edits(CODE), CODE) == {
        ("true-false", "True", "False"),
        ("not", "not ", ""),
        ("comparison", "<", "<="),
        ("and-or", "and", "or"),
        ("comparison", "is not", "is"),
        ("early-end", "return g(a, b, deep=flag)", "pass"),
        ("argument", "a, ", ""),
        ("argument", "b, ", ""),
        ("argument", ", deep=flag", ""),
        ("swap", "a, b", "b, a"),
        ("early-end", "continue", "pass"),
        ("statement", "b += -each * 0", "pass"),
        ("arithmetic", "+=", "-="),
        ("arithmetic", "-", "+"),
        ("arithmetic", "*", "/"),
        ("number", "0", "1"),
        ("statement", "b.update(a)", "pass"),
        ("argument", "a", ""),
    }


def test_what_only_words_depend_on_is_left_alone() -> None:
    assert changes(edits(TEXT), TEXT) == {("comparison", "is", "is not")}


@pytest.mark.parametrize("text", ["x = (a) - (b)", "x = a  # a - b\n", "é = 'é' if (a -  # *\n  b) else 0\n"])
def test_only_the_operator_changes(text: str) -> None:
    for edit in edits(text):
        assert edit.kind == "number" or edit.applied(text) == text.replace("-", "+", 1)
        assert edit.compiles(text)


def test_what_would_not_be_python_is_known() -> None:
    text = "f((a), b)\n"  # the tree knows no parentheses, and half of them would be cut out
    cuts = [edit for edit in edits(text) if edit.kind == "argument"]
    assert len(cuts) == 2
    assert not any(edit.compiles(text) for edit in cuts)


def test_lines_without_code_do_not_count() -> None:
    assert lines_of_code('"""One.\n\nTwo.\n"""\n\n# three\nx = (\n    1\n)\n') == 3


def test_a_mutant_is_made_at_its_place_where_lines_are_alike() -> None:
    text = "def f(a):\n    a += 1\n    a += 1\n    return a\n"
    places = [edit for edit in edits(text) if edit.kind == "number"]
    made = [as_mutant("linalg/any.py", text, edit) for edit in places]
    assert [mutant.applied(text) for mutant in made] == [edit.applied(text) for edit in places]
    assert [mutant.mistake.partition(":")[0] for mutant in made] == ["line 2", "line 3"]


def test_draws_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    files = texts()
    files = {name: files[name] for name in list(files)[:6]}
    drawn = draw(40, 0, files)
    assert drawn == draw(40, 0, files)
    assert draw(15, 0, files) == drawn[:15]
    assert {mutant.name for mutant in draw(40, 1, files)} != {mutant.name for mutant in drawn}
    for mutant in drawn:
        changed = mutant.applied(files[mutant.file])  # raises where its text is not there once
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(files[mutant.file]))


def test_fewer_are_drawn_where_there_are_no_more() -> None:
    assert len(draw(99, 0, {"any.py": "x = a < b\ny = not a\n", "none.py": "x = y\n"})) == 2


@pytest.mark.slow  # ten seconds
def test_what_is_explained_is_still_in_the_code() -> None:
    files = texts()
    known = {as_mutant(name, text, edit).name for name, text in files.items() for edit in edits(text)}
    assert set(tomllib.loads(EXPLAINED.read_text())) <= known
