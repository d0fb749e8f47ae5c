"""Forward hooks and torch function modes: put on, taken off, and left in order."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.overrides import TorchFunctionMode, _get_function_stack_at, _len_torch_function_stack, _pop_mode, _push_mode  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from kfac_optim.utils.dynamo import call_as_it_is, inline_only

T = TypeVar("T")


class Handle(Protocol):
    """Takes hooks off a module."""

    def remove(self) -> None:
        """Remove the hook; to do so again does nothing."""


class Handles:
    """Removes several handles as one."""

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(slots=True)
class Idle:
    """Says whether the forward that is under way is one in which layers have nothing to tell."""

    on: bool = False


_NEVER_IDLE = Idle()


class PicklableHook:
    """Hooks a module, and neither pickles nor copies what it calls.

    Args:
        function: the function to call with what the hook is given.
        idle: while it is on, `function` is not called outside of graphs. Each layer asks at each call, so that this
            must take no longer than it has to.
    """

    __slots__ = ("_function", "_idle")

    def __init__(self, function: Callable[..., Any], idle: Idle = _NEVER_IDLE) -> None:
        self._function, self._idle = function, idle

    @inline_only
    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling() and self._idle.on:
            return None
        # A trace is compared with a second one, and like an exported model it is to hold nothing but the model.
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or torch.compiler.is_exporting() or is_fx_symbolic_tracing():
            return None
        return call_as_it_is(self._function, *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # What does nothing is of the standard library, so that a pickled model does not need this package.
        return getattr, (nullcontext(), nullcontext.__exit__.__name__)


def drop_inert(module: nn.Module) -> None:
    """Take off the module what stands for hooks of ours in copies and pickles; otherwise it would pile up in them."""
    before: tuple[dict[int, Any], ...] = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    after = module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    for hooks, *marks in (before, after):
        for number in [key for key, hook in hooks.items() if getattr(hook, "__func__", None) is nullcontext.__exit__]:
            for each in (hooks, *marks):
                each.pop(number, None)


def weakly(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method, with `args` first, and gives None once its object is gone."""
    return partial(call_if_there, weakref.WeakMethod(method), *args)


@inline_only
def call_if_there(method: weakref.WeakMethod[Callable[..., Any]], *args: Any) -> Any:
    """Call the method if its object still exists; return None if not."""
    found = method()
    return None if found is None else call_as_it_is(found, *args)


@dataclass(eq=False)
class LayerHooks:
    """Holds forward hooks of one layer, which can be taken off and put on again."""

    hooks: "list[LayerHooks]"
    module: nn.Module
    before: Callable[..., None] | None
    after: Callable[..., Any]
    idle: Idle
    _handles: list[RemovableHandle] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)  # the keys under which the module holds them, the same each time
    _is_on: bool = False  # what the handles tell too, but `torch.compile` cannot look at them

    def on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        # One that has something to do before the forward asks there what it has to do after it.
        after = PicklableHook(self._call_after, self.idle if self.before is None else _NEVER_IDLE)
        if self.before is not None:
            before = PicklableHook(self._call_before)
            self._handles.append(self.module.register_forward_pre_hook(before, with_kwargs=True))
        # First among the module's hooks: the output is then the layer's own, and the root call still open when the
        # model is this very layer.
        self._handles.append(
            self.module.register_forward_hook(
                after, prepend=True, with_kwargs=True, always_call=self.before is not None
            )
        )
        self._numbers = self._numbers or [handle.id for handle in self._handles]
        for handle, number in zip(self._handles, self._numbers, strict=True):
            _renumber(handle, number)

    def _call_before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # When the model is this very layer, its own hook may just have taken this one off; torch calls it all the same,
        # without the keyword arguments. And torch.ao.quantization gives the hooks of a layer to what takes its place.
        if self.before is not None and self._is_on and module is self.module:
            self.before(module, args, kwargs)

    def _call_after(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if module is not self.module or len(rest) < 2:
            return None
        return self.after(module, args, *rest)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Catch up with a forward of `module` that has begun."""
        self._call_before(module, args, {})

    def off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_on = False

    def remove(self) -> None:
        self.off()
        if self in self.hooks:
            self.hooks.remove(self)


def _renumber(handle: RemovableHandle, number: int) -> None:
    """Put a forward hook under the number that it had before: where numbers change, `torch.compile` recompiles."""
    if handle.id == number:
        return
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            is_first = next(iter(hooks)) == handle.id
            hooks[number] = hooks.pop(handle.id)
            hooks.move_to_end(number, last=not is_first)
    handle.id = number


def is_on(mode: TorchFunctionMode | None) -> bool:
    """Return whether torch functions are now called in this very mode; traced by `torch.compile` too."""
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))


def is_any_on(kind: type[TorchFunctionMode]) -> bool:
    """Return whether torch functions are now called in a mode of this kind; traced by `torch.compile` too."""
    return any(isinstance(_get_function_stack_at(i), kind) for i in range(_len_torch_function_stack()))


def outside(mode: TorchFunctionMode | None, function: Callable[..., T], *args: Any) -> T:
    """Call `function` outside of a mode, where that is the innermost one, to which every torch function would go."""
    depth = _len_torch_function_stack()
    if depth == 0 or _get_function_stack_at(depth - 1) is not mode:
        return function(*args)
    _pop_mode()  # type: ignore[no-untyped-call]
    try:
        return function(*args)
    finally:
        _push_mode(mode)  # type: ignore[no-untyped-call]


class ModeStack:
    """Holds the torch function modes that forwards under way run in.

    An interrupted forward (KeyboardInterrupt) is left without a hook being called; its modes go with the next forward
    of the model, the next `step()` or `zero_grad()`, or the optimizer itself.
    """

    def __init__(self) -> None:
        self._modes: list[TorchFunctionMode] = []

    def __bool__(self) -> bool:
        return bool(self._modes)

    def enter(self, mode: TorchFunctionMode) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def leave(self, mode: TorchFunctionMode | None = None) -> None:
        """Leave all modes entered since `mode`, and it as well; all of them where it is None."""
        while self._modes:
            last = self._modes.pop()
            if is_on(last):
                _take_out(last)
            if last is mode:
                return


def _take_out(mode: TorchFunctionMode) -> None:
    """Leave a mode that is on; others that lie above it, as another optimizer's or the user's own, stay on."""
    above: list[TorchFunctionMode] = []
    while (top := _pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        above.append(top)
    for each in reversed(above):
        _push_mode(each)  # type: ignore[no-untyped-call]
