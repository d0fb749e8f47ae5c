"""The package is laid out as its docstring says: imports go one way, and the engine knows no layer family."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kfac_optim

PACKAGE = Path(kfac_optim.__file__).parent
# "    name, name   what they are": the rows of the table in a package's docstring, lowest first.
ROW = re.compile(r"^ {4}(?P<names>[a-z_]+(?:, [a-z_]+)*) {2,}\S", re.MULTILINE)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
# All that is documented: the package, and the benchmarks beside it.
DOCUMENTED = [Path("kfac_optim") / path for path in FILES]
DOCUMENTED += sorted(path.relative_to(PACKAGE.parent) for path in (PACKAGE.parent / "benchmarks").rglob("*.py"))
TABLES = {Path(): Path("__init__.py"), Path("distributed"): Path("distributed/__init__.py")}


def tree(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def rows(folder: Path) -> dict[str, int]:
    """Give the row of each room in the table of a folder."""
    docstring = ast.get_docstring(tree(TABLES[folder]), clean=False) or ""
    return {name: row for row, match in enumerate(ROW.finditer(docstring)) for name in match["names"].split(", ")}


def room(path: Path, folder: Path) -> str:
    """Give the name in the table of a folder that a file below it belongs to."""
    return path.relative_to(folder).parts[0].removesuffix(".py")


def imported_names(node: ast.AST) -> Iterator[str]:
    """Give the absolute names of what a node imports: modules, or names in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """Give the file of this package that a name is, or is defined in."""
    parts = name.split(".")
    if parts[0] != "kfac_optim":
        return None
    prefixes = [Path(*parts[1:end]) for end in range(len(parts), 0, -1)]
    candidates = (file for prefix in prefixes for file in (prefix / "__init__.py", Path(f"{prefix}.py")))
    return next(candidate for candidate in candidates if candidate in FILES)


def own_imports(path: Path) -> set[Path]:
    """Give the files of the package that a file imports."""
    names = (name for node in ast.walk(tree(path)) for name in imported_names(node))
    return {file for name in names if (file := file_of(name)) is not None}


@pytest.mark.parametrize("folder", TABLES, ids=str)
def test_the_table_of_a_docstring_names_every_room_and_nothing_else(folder: Path) -> None:
    below = [path for path in FILES if folder in path.parents and path != TABLES[folder]]
    assert set(rows(folder)) == {room(path, folder) for path in below}


def test_the_top_of_the_package_is_what_a_user_touches() -> None:
    top = {path.stem for path in FILES if len(path.parts) == 1}
    assert top == {"__init__", "optimizer", "diagnostics", "schedulers", "specs", "watching"}


def test_the_reading_of_imports_sees_an_import() -> None:
    assert Path("factors/factor.py") in own_imports(Path("factors/kronecker_factors.py"))
    assert Path("step/engine.py") in own_imports(Path("optimizer.py"))
    assert Path("__init__.py") not in own_imports(Path("optimizer.py"))
    assert file_of("kfac_optim.KFACOptimizer") == Path("__init__.py")


@pytest.mark.parametrize("folder", TABLES, ids=str)
def test_imports_between_rooms_go_to_higher_rows_of_the_table(folder: Path) -> None:
    table = rows(folder)
    for path in (path for path in FILES if folder in path.parents and path != TABLES[folder]):
        for target in (target for target in own_imports(path) if folder in target.parents):
            assert target != TABLES[folder], f"{path} imports the names that {target} gives to users"
            ours, theirs = room(path, folder), room(target, folder)
            assert ours == theirs or table[theirs] < table[ours], f"{path} imports {target}"


def test_there_is_no_circle_of_imports() -> None:
    """Not between files, a folder's `__init__.py` included."""
    graph = {path: own_imports(path) for path in FILES}
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " → ".join(map(str, (*trail, path)))
        if path not in done:
            for target in sorted(graph[path]):
                visit(target, (*trail, path))
            done.add(path)

    for path in FILES:
        visit(path, ())


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_stand_at_the_top_of_their_file(path: Path) -> None:
    module = tree(path)
    top = {id(node) for node in module.body}
    for node in ast.walk(module):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert id(node) in top, f"line {node.lineno}: an import inside a function or block"


def reachable(path: Path) -> set[Path]:
    """What importing the file imports in turn, of this package."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        for target in own_imports(todo.pop()) - found:
            found.add(target)
            todo.append(target)
    return found


LAYER_FAMILIES = {path for path in FILES if path.parts[0] == "layers"} - {Path("layers/base.py")}


def test_the_engine_imports_no_layer_family_and_no_communication() -> None:
    engine = Path("step/engine.py")
    assert not own_imports(engine) & LAYER_FAMILIES
    assert not any(target.parts[0] == "distributed" for target in reachable(engine))
    # Nor through those whom it tells what to do. (`layers/__init__` runs with `layers/base`, but is not used.)
    assert not reachable(engine) & LAYER_FAMILIES
    for path in {engine, *reachable(engine)}:
        for node in ast.walk(tree(path)):
            assert not any(name.startswith("torch.distributed") for name in imported_names(node)), path
            mentioned = isinstance(node, ast.Attribute) and node.attr == "distributed"
            assert not mentioned, f"{path}, line {getattr(node, 'lineno', 0)}"


def test_no_kind_of_layer_is_named_outside_the_layer_families() -> None:
    """A ladder of isinstance would need one rung in each place per family."""
    kinds = {"Linear", "Conv1d", "Conv2d", "Conv3d", "_ConvNd", "Embedding", "LayerNorm"}
    for path in set(FILES) - LAYER_FAMILIES:
        named = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)} & kinds
        assert not named, f"{path} names {named}"


def test_one_file_alone_touches_autograds_inside() -> None:
    for path in FILES:
        text = (PACKAGE / path).read_text()
        if path != Path("utils/autograd.py"):
            assert "torch._C" not in text or path == Path("utils/dynamo.py"), path
            assert "torch.autograd" not in text, path
            assert "register_hook" not in text, path


# -- public names ------------------------------------------------------------------------------------------------


def public_members() -> Iterator[tuple[str, object]]:
    """Every public name, and of the classes among them every public method and property of their own."""
    for name in kfac_optim.__all__:
        value = getattr(kfac_optim, name)
        yield name, value
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{name}.{attribute}", member


def test_the_public_names_exist_and_are_sorted() -> None:
    assert len(set(kfac_optim.__all__)) == len(kfac_optim.__all__)
    assert all(hasattr(kfac_optim, name) for name in kfac_optim.__all__)
    assert sorted(kfac_optim.__all__, key=lambda name: (not name.isupper(), name)) == kfac_optim.__all__


# An override whose docstring is the base class's, a constant (documented beside its value), or a name that says it all.
OWN_WORDS = {name: member for name, member in public_members() if not isinstance(member, (dict, property))}


@pytest.mark.parametrize("name", sorted(OWN_WORDS))
def test_every_public_name_has_a_docstring(name: str) -> None:
    member = OWN_WORDS[name]
    if name.isupper() and not inspect.isclass(member):
        source = (PACKAGE / "layers" / "__init__.py").read_text()
        assert re.search(rf'^{name}\b.*?^"""', source, re.MULTILINE | re.DOTALL), "no docstring below the constant"
        return
    words = inspect.getdoc(member) or ""
    assert len(words.split()) >= 4, f"{name}: {words!r}"
    generated = inspect.isclass(member) and words.startswith(f"{name}(")
    assert not generated, f"{name} has only the signature that dataclass writes"


# A docstring that begins so has no verb in its first sentence.
FRAGMENTS = re.compile(
    r"(?:After|Again|Among|And|As|At|Because|Before|Behind|Beside|But|By|For|From|If|In|Like|Likewise|None|Of|On|Or|So|That|"
    r"Those|To|Until|Where|With|Within|Without)\b"
)
# A function does something, and its docstring says what by a verb.
NO_VERBS = re.compile(
    r"(?:A|All|An|Also|Both|Each|Every|Here|How|It|Its|No|Not|Nothing|Now|One|Only|The|Then|There|These|This|Two|What|When|"
    r"Whether|Which|Who|Whose)\b"
)


# An entry of `Args` or `Attributes` says what the value is, and does not lean on its name: "seed: of the numbers".
LEANING = re.compile(
    r"^ +\w+: (?:as|at|behind|between|by|for|from|of|on|that|to|under|who|with|without) (?!how )", re.M
)


@pytest.mark.parametrize("path", DOCUMENTED, ids=str)
def test_docstrings_begin_with_a_whole_sentence(path: Path) -> None:
    for node in ast.walk(tree(Path("..") / path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            docstring = ast.get_docstring(node) or "Return"
            assert not FRAGMENTS.match(docstring), f"{node.name}, line {node.lineno}"
            if isinstance(node, ast.FunctionDef):
                assert re.match(r"[A-Z][a-z]+\b", docstring), f"{node.name}, line {node.lineno}"
                assert not NO_VERBS.match(docstring), f"{node.name}, line {node.lineno}"
            leaning = LEANING.search(docstring)
            assert leaning is None, f"{node.name}, line {node.lineno}: {leaning}"


@pytest.mark.parametrize("path", DOCUMENTED, ids=str)
def test_what_is_said_of_modules_and_attributes_begins_as_a_sentence(path: Path) -> None:
    for node in ast.walk(tree(Path("..") / path)):
        for said in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ():
            if (
                isinstance(said, ast.Expr)
                and isinstance(said.value, ast.Constant)
                and isinstance(said.value.value, str)
            ):
                assert not FRAGMENTS.match(said.value.value), f"line {said.lineno}"


def test_every_argument_of_the_optimizer_is_described() -> None:
    described = set(re.findall(r"^ {4}(\w+): ", inspect.cleandoc(kfac_optim.KFACOptimizer.__doc__ or ""), re.MULTILINE))
    arguments = set(inspect.signature(kfac_optim.KFACOptimizer).parameters)
    assert arguments <= described, arguments - described


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", kfac_optim.__version__)
