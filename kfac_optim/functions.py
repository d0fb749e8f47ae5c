"""Torch functions seen or replaced while a module's forward runs, for layers that module hooks cannot see into."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kfac_optim.capture import Handle, PicklableHook

Function = Callable[..., Any]


class _Substitution(TorchFunctionMode):
    def __init__(self, table: Mapping[Function, Function]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))


class _Around:
    """Enters the substitution before a module's forward and leaves it afterwards, also when the forward raises."""

    def __init__(self, table: Mapping[Function, Function], wanted: Callable[[], bool]) -> None:
        self._table = table
        self._wanted = wanted
        self._entered: list[_Substitution | None] = []  # one for each forward under way

    def before(self, module: nn.Module, args: Any) -> None:
        mode = None
        if torch.is_grad_enabled() and self._wanted():
            mode = _Substitution(self._table)
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(mode)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._entered.pop() if self._entered else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Handles:
    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def substitute(module: nn.Module, table: Mapping[Function, Function], wanted: Callable[[], bool]) -> Handle:
    """Within forwards of `module` that build a graph, call `table[f]` where torch's function `f` is called.

    What a replacement calls is not replaced again, so it may call `f` itself.

    Args:
        module: whose forward, and all inside it, is affected.
        table: torch function → replacement, called with the same arguments.
        wanted: asked before each forward; where it says no nothing is replaced.
    """
    around = _Around(table, wanted)
    return _Handles(
        [
            module.register_forward_pre_hook(PicklableHook(around.before)),
            module.register_forward_hook(PicklableHook(around.after), prepend=True, always_call=True),
        ]
    )
