"""Checkpoints that something has happened to: every kind of damage at every place, and what must come of it."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from helpers.fuzz import CHANGED, NOT_FINITE, UNCLEAR, Finding
from helpers.fuzz.runs import INVERSES, OTHERS, PAIRS, advance, another, build
from helpers.plain import assert_identical, copy_of
from kfac_optim import Inverse
from kfac_optim.blocks.state_keys import AVERAGE, AVERAGED_STEPS, ITERATE

Path = tuple[Any, ...]

# -- what there is to load ---------------------------------------------------------------------------------------


class Case:
    """A run to save, one to load into, and what that held before."""

    def __init__(self, first: Inverse[Any], second: Inverse[Any]) -> None:
        model, optimizer = build(first, second)
        advance(model, optimizer, 3)
        self._saved = copy_of(optimizer.state_dict())
        self.model, self.optimizer = build(first, second)
        advance(self.model, self.optimizer, 5, start=20)
        self.before = copy_of(self.held())
        self.paths = list(paths(self._saved))

    def saved(self) -> Any:
        """Return the checkpoint, a copy to be damaged."""
        return copy_of(self._saved)

    def held(self) -> list[Any]:
        return [self.optimizer.state_dict(), [param.detach() for param in self.model.parameters()]]

    def restore(self) -> None:
        state, params = self.before
        self.optimizer.load_state_dict(copy_of(state))
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), params, strict=True):
                param.copy_(value)
        self.optimizer.zero_grad()


_CASES: dict[tuple[int, int], Case] = {}


def case_of(pair: tuple[int, int]) -> Case:
    if pair not in _CASES:
        _CASES[pair] = Case(*(INVERSES[index] for index in pair))
    return _CASES[pair]


# -- what happens to it ------------------------------------------------------------------------------------------


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """All places of a nested dict, the dicts and lists themselves included."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*at, index))


def get(root: Any, path: Path) -> Any:
    for key in path:
        root = root[key]
    return root


def put(root: Any, path: Path, value: Any) -> None:
    get(root, path[:-1])[path[-1]] = value


def drop(root: Any, path: Path) -> None:
    del get(root, path[:-1])[path[-1]]


def rename(root: Any, path: Path) -> None:
    holder = get(root, path[:-1])
    if isinstance(holder, dict):
        holder[f"{path[-1]}_"] = holder.pop(path[-1])
    else:
        holder.reverse()


def numbers(change: Callable[[Any], Any]) -> Callable[[Any, Path], None]:
    """Change what is a number or a tensor; a dict or list has its first tensor or number changed."""

    def mutate(root: Any, path: Path) -> None:
        value = get(root, path)
        if isinstance(value, dict | list):
            inner = next((p for p in paths(value, path) if isinstance(get(root, p), Tensor | int | float)), None)
            if inner is None:
                return
            path, value = inner, get(root, inner)
        put(root, path, change(value))

    return mutate


def with_one(value: float) -> Callable[[Any], Any]:
    """One element of a tensor, or a number, becomes `value`, or the nearest that its type can hold."""

    def change(old: Any) -> Any:
        if not isinstance(old, Tensor) or old.numel() == 0:
            return value
        new = old.clone()
        if old.is_floating_point():
            new.view(-1)[old.numel() // 2] = value
        elif old.dtype != torch.bool and value == value:
            limits = torch.iinfo(old.dtype)
            new.view(-1)[old.numel() // 2] = int(max(limits.min, min(limits.max // 2, value)))
        return new

    return change


def retyped(old: Any) -> Any:
    if isinstance(old, Tensor):
        return old.round().to(torch.int64) if old.is_floating_point() else old.double()
    if isinstance(old, bool):
        return "yes"
    return str(old) if isinstance(old, int | float) else 3


def negative(old: Any) -> Any:
    if isinstance(old, Tensor):
        return ~old if old.dtype == torch.bool else -old
    return -abs(old) - 1 if isinstance(old, int | float) else old


MUTATIONS: dict[str, Callable[[Any, Path], None]] = {
    "drop": drop,
    "rename": rename,
    "nan": numbers(with_one(float("nan"))),
    "infinite": numbers(with_one(float("inf"))),
    "huge": numbers(with_one(1e30)),
    "minus one": numbers(with_one(-1)),
    "negative": numbers(negative),
    "retyped": numbers(retyped),
    "meta": numbers(lambda old: old.to("meta") if isinstance(old, Tensor) else torch.empty((), device="meta")),
    "reshaped": numbers(lambda old: old.reshape(-1, 1) if isinstance(old, Tensor) else [old]),
    "shorter": numbers(lambda old: old.flatten()[:-1] if isinstance(old, Tensor) else None),
    "half": numbers(lambda old: old.half() if isinstance(old, Tensor) else old),
    "complex": numbers(lambda old: old + 0j if isinstance(old, Tensor) else 1j),
    "sparse": numbers(lambda old: old.to_sparse() if isinstance(old, Tensor) and old.dim() else old),
    "trained": numbers(lambda old: nn.Parameter(old) if isinstance(old, Tensor) and old.is_floating_point() else old),
    "none": lambda root, path: put(root, path, None),
    "a word": lambda root, path: put(root, path, "word"),
    "an empty dict": lambda root, path: put(root, path, {}),
    "later version": lambda root, _: get(root, ("state", 0, "kfac")).update(version=2, invented=torch.ones(2)),
    "unknown field": lambda root, path: (
        get(root, path).update(invented=1) if isinstance(get(root, path), dict) else put(root, path, (1, 2))
    ),
}


Example = tuple[tuple[int, int], str, list[tuple[str, Path, Path]]]
"""The inverses, whose checkpoint it is (\"\" is one of such an optimizer), and what is done to it."""


def mutated(rng: random.Random) -> Example:
    """A pair of inverses, and what is done at which places; a second place is for swaps."""
    pair = rng.choice(PAIRS)
    whose = rng.choice(list(OTHERS)) if rng.random() < 0.2 else ""
    found = list(paths(another(whose, pair))) if whose else case_of(pair).paths
    kinds = [*MUTATIONS, "swap"]
    number = rng.randint(0, 1) if whose else rng.randint(1, 2)
    return pair, whose, [(rng.choice(kinds), rng.choice(found), rng.choice(found)) for _ in range(number)]


def apply(root: Any, kind: str, path: Path, other: Path) -> None:
    try:
        if kind == "swap":
            if path == other[: len(path)] or other == path[: len(other)]:
                return  # one would hold itself
            one, two = get(root, path), get(root, other)
            put(root, path, two)
            put(root, other, one)
        else:
            MUTATIONS[kind](root, path)
    except (KeyError, TypeError, IndexError, AttributeError, NotImplementedError, RuntimeError, ValueError):
        pass  # an earlier mutation took the place away, or the kind has nothing to do there


# -- what must come of it ----------------------------------------------------------------------------------------


def outcome(case: Case, damaged: Any) -> str:
    """Load what was damaged; how that ended, after a look at whether it ended well."""
    expected = copy_of(damaged)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            case.optimizer.load_state_dict(damaged)
    except ValueError as error:
        message = str(error)
        assert message.startswith("kfac_optim: ") or "loaded state dict" in message, message
        assert len(message) < 4000, message
        assert_identical(case.held(), case.before)
        return "refused"
    loaded = case.optimizer.state_dict()
    assert_says(loaded, expected)
    advance(case.model, case.optimizer, 2, start=40)
    ok = all(bool(param.isfinite().all()) for param in case.model.parameters())
    assert ok or _is_huge(expected), "parameters are spoiled"
    case.restore()
    assert_identical(case.held(), case.before)
    return "warm start" if told else "loaded"


def assert_says(loaded: Any, expected: Any, at: str = "") -> None:
    """What is held now is what the checkpoint said, but for what an optimizer finds out by itself."""
    if isinstance(expected, dict):
        if at.endswith("['kfac']") and "inverse" not in expected:  # statistics start anew, and nothing is under way
            loaded, expected = ({**each, "clock": each["clock"]["step"]} for each in (loaded, expected))
            expected.pop("under_way", None)
        elif at.endswith("['kfac']") and expected["refreshing"] and "under_way" not in expected:
            expected["clock"]["outdated"] = True
        for key, value in expected.items():
            if key == "S_applied" and not expected.get("S_applied_apart", True):
                continue  # a copy of S, which is not read
            known = int(key) if isinstance(key, str) and key.isdigit() else key
            if key in ("factors", "refreshing", "spread", "momenta", "step_size", AVERAGE, AVERAGED_STEPS, ITERATE) or (
                value is None and known not in loaded
            ):
                continue  # averages are left out, with a warning
            if not at and key not in loaded:
                continue  # beside state and param groups
            assert known in loaded, f"{at}[{key!r}] is gone"
            assert_says(loaded[known], value, f"{at}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if not at.endswith("['params']"):
            for index, value in enumerate(expected):
                assert_says(loaded[index], value, f"{at}[{index}]")
    elif isinstance(expected, Tensor):
        found = expected.detach().to_dense() if expected.is_sparse else expected.detach()
        torch.testing.assert_close(loaded, found.to(loaded.dtype), rtol=0, atol=0, equal_nan=True, msg=at)
    else:
        assert loaded == expected or (loaded != loaded and expected != expected), f"{at}: {loaded} for {expected}"


def _is_huge(value: Any) -> bool:
    """Whether there is a number that could be right, and with which no training is."""
    leaves = [get(value, path) for path in paths(value)]
    return any(
        bool((leaf.double().abs() > 1e15).any())
        if isinstance(leaf, Tensor) and not leaf.is_complex()
        else isinstance(leaf, int | float) and abs(leaf) > 1e15
        for leaf in leaves
    )


def attempt(example: Example) -> str:
    pair, whose, changes = example
    case = case_of(pair)
    damaged = copy_of(another(whose, pair)) if whose else case.saved()
    for change in changes:
        apply(damaged, *change)
    return outcome(case, damaged)


def case(rng: random.Random) -> str:
    example = mutated(rng)
    pair, whose, changes = example
    what = f"{[INVERSES[index] for index in pair]} {whose} {changes}"
    try:
        return attempt(example)
    except AssertionError as error:
        _CASES.pop(pair)
        text = str(error)[:300]
        raise Finding(NOT_FINITE if "spoiled" in text else CHANGED, f"{what}: {text}") from error
    except Exception as error:
        _CASES.pop(pair)
        raise Finding(UNCLEAR, f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
