"""The house stands as its docstring draws it: imports go down, the engine knows no layer and no communication."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kfac_optim

PACKAGE = Path(kfac_optim.__file__).parent
# "    name(/), name, name   L3  what it is": the table of storeys in the package's docstring
ROW = re.compile(r"^ {4}(?P<names>[a-z_]+/?(?:, [a-z_]+/?)*) +L(?P<storey>\d+)  \S", re.MULTILINE)


def storeys(docstring: str) -> dict[str, int]:
    """What the table in a docstring says; empty where there is none."""
    return {
        name: int(row["storey"])
        for row in ROW.finditer(docstring)
        for name in (part.rstrip("/") for part in row["names"].split(", "))
    }


STOREYS = storeys(kfac_optim.__doc__ or "")
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The name in the table that `path` belongs to: a file, or the folder it lies in."""
    return path.parts[0].removesuffix(".py")


def tree(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


# A folder may have a table of its own, in the docstring of its __init__.py: then its files obey that.
FOLDERS = {
    unit(path): found
    for path in FILES
    if path.name == "__init__.py" and len(path.parts) == 2
    if (found := storeys(ast.get_docstring(tree(path), clean=False) or ""))
}


def imported_names(node: ast.AST) -> Iterator[str]:
    """Absolute names of what `node` imports: modules, or names in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """The file of this package that `name` is, or is defined in."""
    parts = name.split(".")
    if parts[0] != "kfac_optim":
        return None
    prefixes = [Path(*parts[1:end]) for end in range(len(parts), 0, -1)]
    candidates = (file for prefix in prefixes for file in (prefix / "__init__.py", Path(f"{prefix}.py")))
    return next(candidate for candidate in candidates if candidate in FILES)


def own_imports(path: Path) -> set[Path]:
    """Files of the package that the file imports."""
    names = (name for node in ast.walk(tree(path)) for name in imported_names(node))
    return {file for name in names if (file := file_of(name)) is not None}


def test_the_table_of_the_docstring_names_every_file_and_folder_and_nothing_else() -> None:
    assert set(STOREYS) == {unit(path) for path in FILES} - {"__init__"}
    assert min(STOREYS.values()) == 0


def test_the_table_of_a_folder_names_every_file_in_it() -> None:
    assert set(FOLDERS) == {"distributed"}
    for folder, table in FOLDERS.items():
        files = {path.stem for path in FILES if path.parts[0] == folder}
        assert set(table) == files - {"__init__"}


def test_the_reading_of_imports_sees_an_import() -> None:
    assert Path("factors.py") in own_imports(Path("inverses/base.py"))
    assert Path("engine.py") in own_imports(Path("optimizer.py"))
    assert Path("__init__.py") not in own_imports(Path("optimizer.py"))
    assert file_of("kfac_optim.KFACOptimizer") == Path("__init__.py")


@pytest.mark.parametrize("path", [path for path in FILES if unit(path) != "__init__"], ids=str)
def test_a_file_imports_lower_storeys_only_and_within_a_folder_the_bases_around_them(path: Path) -> None:
    for target in own_imports(path):
        assert target != Path("__init__.py"), "the package's own public names are for users"
        if unit(target) != unit(path):
            assert STOREYS[unit(target)] < STOREYS[unit(path)], f"{path} imports {target}"
        elif unit(path) in FOLDERS and path.name != "__init__.py":
            table = FOLDERS[unit(path)]
            assert table[target.stem] < table[path.stem], f"{path} imports {target}"
        elif path.name != "__init__.py":
            assert target.name == "base.py", f"{path} imports {target} beside it"
            assert target.parent in path.parents, f"{path} imports {target} of a folder that it is not in"


def test_there_is_no_circle_of_imports() -> None:
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


LAYER_FAMILIES = {path for path in FILES if unit(path) == "layers"} - {Path("layers/base.py")}


def test_the_engine_imports_no_layer_family_and_no_communication() -> None:
    engine = Path("engine.py")
    assert not own_imports(engine) & LAYER_FAMILIES
    assert not any(unit(target) == "distributed" for target in reachable(engine))
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
        if path != Path("autograd.py"):
            assert "torch._C" not in text or path == Path("dynamo.py"), path
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


def test_every_argument_of_the_optimizer_is_described() -> None:
    described = set(re.findall(r"^ {4}(\w+): ", inspect.cleandoc(kfac_optim.KFACOptimizer.__doc__ or ""), re.MULTILINE))
    arguments = set(inspect.signature(kfac_optim.KFACOptimizer).parameters)
    assert arguments <= described, arguments - described


def test_every_metric_that_the_docstring_promises_is_one() -> None:
    """And the other way round, see test_diagnostics."""
    promised = set(re.findall(r"`(\w+)`", kfac_optim.KFACOptimizer.metrics.__doc__ or ""))
    assert {"cosine", "trust_region_scale", "damping", "failed_refreshes", "inverse_age"} <= promised


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", kfac_optim.__version__)
