"""Names of modules without wrapper prefixes, and choosing layers by name glob or module class."""

from collections.abc import Iterable, Iterator, Mapping, Set
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import nn

from kfac_optim.utils.sharded_params import Shards
from kfac_optim.utils.text import listed
from kfac_optim.utils.validation import instance_remedy

Pattern = str | type[nn.Module]
"""A glob over fully qualified names (`"encoder.*"`), or a module class (subclasses match)."""

V = TypeVar("V")


# What torch.compile, FSDP and activation-checkpoint wrappers call the module they wrap; DDP's "module" is also an
# ordinary name, so there the wrapper's class decides.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS_OF_MODULE = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class ModuleNames:
    """Knows the modules of a model by their path, and by the names to show, without what wrappers put in between.

    Attributes:
        model: the model, wrapped or not.
        shown: path as in `model.named_modules()` → fully qualified name without wrapper prefixes.
        shards: parameters of the model that are kept in shards.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shards = Shards(model)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.shown: dict[str, str] = {"": ""}
        for path in self._modules:
            parent, _, last = path.rpartition(".")
            wrapper = self._modules[parent]
            if path and (last in _WRAPPED or (last == "module" and isinstance(wrapper, _WRAPPERS_OF_MODULE))):
                self.shown[path] = self.shown[parent]
            elif path:
                self.shown[path] = f"{self.shown[parent]}.{last}".lstrip(".")

    def lineage(self, path: str) -> list[tuple[str, nn.Module]]:
        """Return shown name and module at `path` and of all that contain it, nearest first, the model itself last."""
        parts = path.split(".") if path else []
        paths = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return [(self.shown[each], self._modules[each]) for each in paths]

    def all(self) -> list[tuple[str, nn.Module]]:
        """Return shown name and module of every module, by its first path where it has several."""
        return [(self.shown[path], module) for path, module in self.model.named_modules()]

    def alias(self, pattern: Pattern) -> str:
        """Say under what name a module goes that matches a pattern by another of its names alone; "" if none does."""
        own = {module: name for name, module in self.all()}
        for path, module in self._modules.items():
            if matches(pattern, self.shown[path], module):
                return f" {self.shown[path]!r} goes by its first name, {own[module]!r}."
        return ""

    def held_by(self, module: nn.Module, *, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield `module.named_parameters` as the optimizer knows them, also if the module holds stand-ins."""
        for local, param in module.named_parameters(recurse=recurse):
            yield local, self.shards.known(param)

    def parameters(self) -> dict[nn.Parameter, str]:
        """Return the name that users see of every parameter, that of the first module that has it."""
        names: dict[nn.Parameter, str] = {}
        for path, module in self._modules.items():
            for local, param in self.held_by(module):
                names.setdefault(param, f"{self.shown[path]}.{local}".lstrip("."))
        return names


def matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    """Return whether `pattern` names this very module. `"*"` matches every module, even a nameless one; `""` none."""
    if pattern == "":
        return False
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return isinstance(module, pattern)


class Choice(Generic[V]):
    """Holds one value for all layers, or a mapping from patterns to values with a default for the rest.

    A pattern that matches a container covers everything inside; of several that match, the first wins.

    Args:
        argument: name of the constructor argument, for messages.
        value: one value, or the mapping.
        kinds: classes of a value.
        default: the value for layers that no pattern of the mapping matches.
    """

    def __init__(self, argument: str, value: V | Mapping[Pattern, V], kinds: tuple[type, ...], default: V) -> None:
        self.argument = argument
        self.default = default
        self.by_pattern: Mapping[Pattern, V]
        if isinstance(value, Mapping):
            self.by_pattern = value
        else:
            self.default, self.by_pattern = value, {}
        for pattern in self.by_pattern:
            check_pattern(argument, pattern)
        for chosen in (self.default, *self.by_pattern.values()):
            if not isinstance(chosen, kinds):
                raise TypeError(
                    f"kfac_optim: {argument} must be {_articles(kinds)} or a mapping from name globs or module "
                    f"classes to such values, got {chosen!r}.{instance_remedy(chosen, *kinds)}"
                )

    def of(self, names: ModuleNames, *paths: str) -> V:
        """Return the value for a module, or for those that share a matrix, at these paths."""
        ancestry = [each for path in paths for each in names.lineage(path)]
        for pattern, value in self.by_pattern.items():
            if any(matches(pattern, ancestor, module) for ancestor, module in ancestry):
                return value
        return self.default


def holders(params: Iterable[str]) -> list[str]:
    """Return the names of the modules that hold these parameters, as `skip_layers` takes them."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in params))


def in_order(patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Return patterns in an order that is the same in all processes, which that of a set is not."""
    return tuple(sorted(patterns, key=str) if isinstance(patterns, Set) else patterns)


def check_pattern(argument: str, pattern: object) -> None:
    if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
        raise TypeError(
            f"kfac_optim: an entry of {argument} must be a name glob or a subclass of nn.Module, got {pattern!r}."
        )


def check_patterns_match(argument: str, patterns: Iterable[Pattern], names: ModuleNames) -> None:
    """Raise ValueError for a pattern that matches no module."""
    modules = names.all()
    for pattern in patterns:
        if not any(matches(pattern, name, module) for name, module in modules):
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            raise ValueError(
                f"kfac_optim: {argument} entry {shown!r} matches no module.{names.alias(pattern)} Module names are "
                f"{listed(dict.fromkeys(name for name, _ in modules if name), 12)}; a pattern is a glob over these, "
                "or a class."
            )


def _articles(kinds: tuple[type, ...]) -> str:
    return ", ".join(f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}" for kind in kinds)
