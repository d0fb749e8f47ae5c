"""Choosing layers by name glob or module class."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import nn

Pattern = str | type[nn.Module]
"""A glob over fully qualified names (`"encoder.*"`), or a module class (subclasses match)."""

V = TypeVar("V")


def lineage(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The module called `name` and all that contain it, nearest first, the model itself (`""`) last."""
    parts = name.split(".") if name else []
    names = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
    return [(ancestor, model.get_submodule(ancestor)) for ancestor in names]


def matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    """Whether `pattern` names this very module. `"*"` matches all, the nameless model too; `""` matches nothing."""
    if pattern == "":
        return False
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return isinstance(module, pattern)


class Choice(Generic[V]):
    """One value for all layers, or a mapping from patterns to values with a default for the rest.

    A pattern that matches a container covers everything inside; of several that match, the first wins.

    Args:
        argument: name of the constructor argument, for messages.
        value: one value, or the mapping.
        kind: class of a value.
        default: for layers that no pattern of the mapping matches.
    """

    def __init__(self, argument: str, value: V | Mapping[Pattern, V], kind: type, default: V) -> None:
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
            if not isinstance(chosen, kind):
                raise TypeError(
                    f"kfac_optim: {argument} must be {_article(kind)} or a mapping from name globs or module "
                    f"classes to such values, got {chosen!r}."
                )

    def of(self, model: nn.Module, name: str) -> V:
        """The value for the module called `name`."""
        ancestry = lineage(model, name)
        for pattern, value in self.by_pattern.items():
            if any(matches(pattern, ancestor, module) for ancestor, module in ancestry):
                return value
        return self.default


def check_pattern(argument: str, pattern: object) -> None:
    if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
        raise TypeError(
            f"kfac_optim: an entry of {argument} must be a name glob or a subclass of nn.Module, got {pattern!r}."
        )


def check_patterns_match(argument: str, patterns: Iterable[Pattern], modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a pattern that matches none of `modules` (by name)."""
    for pattern in patterns:
        if not any(matches(pattern, name, module) for name, module in modules.items()):
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            raise ValueError(
                f"kfac_optim: {argument} entry {shown!r} matches no module. Module names are "
                f"{_listed(name for name in modules if name)}; a pattern is a glob over these, or a class."
            )


def _listed(names: Iterable[str], most: int = 12) -> str:
    all_names = list(names)
    shown = ", ".join(all_names[:most])
    return shown + (f", … ({len(all_names)} in all)" if len(all_names) > most else "")


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
