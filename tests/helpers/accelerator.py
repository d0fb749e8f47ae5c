"""A pretended accelerator: tensors of a device of its own, whose numbers the CPU holds, and a note of each wait.

On an accelerator the host only queues work. It waits where it asks for a number (`.item()`, `bool(...)`), where the
shape of a result depends on numbers (`nonzero`, a mask as an index), where torch looks at what a solver reported, and
where it copies from host to device or back without `non_blocking`. `torch.cuda.set_sync_debug_mode` shows that on CUDA;
here it is seen without: torch lets a device be added from Python, every operator that runs on it is looked at before it
runs, and everything else (hooks, autograd, what code asks of `tensor.device`) is as on any accelerator.

A process that has such a device has it for good, and torch takes it for its accelerator: use it in one of its own.
Operators that change the shape of a tensor in place are not supported.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import kfac_optim

NAME = "pretended"
_PACKAGE = Path(kfac_optim.__file__).parent

_aten = torch.ops.aten
# Read in torch's CUDA code. `_linalg_*` check what the solver reported before they return.
_WAITING = {
    _aten._local_scalar_dense,
    _aten._linalg_check_errors,
    _aten._linalg_eigh,
    _aten._linalg_svd,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.multinomial,
    _aten.nonzero,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
}
# These leave the report to the caller, unless `check_errors` says otherwise.
_UNCHECKED = {_aten.linalg_cholesky_ex, _aten.linalg_inv_ex, _aten._linalg_solve_ex, _aten.linalg_lu_factor_ex}
_SOLVERS = {_aten.cholesky_inverse, _aten.linalg_qr, _aten.linalg_solve_triangular, _aten.linalg_vector_norm}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_READS = {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero}
_COPIES = {_aten._to_copy, _aten.copy_}


class PretendedTensor(Tensor):
    """A tensor on the pretended device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "PretendedTensor":
        made: PretendedTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    def tolist(self) -> Any:  # torch copies without asking an operator
        Watch.running().note("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} outside of a Watch")


class Watch(TorchDispatchMode):
    """While it is entered, the pretended device works, and `waits` grows.

    Attributes:
        waits: what the host waited for: the innermost function of the package under way, and the operator.
    """

    _current: "Watch | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._threads: AbstractContextManager[Any] = torch.autograd.set_multithreading_enabled(False)
        self._patch = pytest.MonkeyPatch()

    @classmethod
    def running(cls) -> "Watch":
        assert cls._current is not None
        return cls._current

    def __enter__(self) -> "Watch":
        if torch._C._get_privateuse1_backend_name() != NAME:
            _setup_privateuseone_for_python_backend(NAME)
        self._threads.__enter__()  # a backward then runs here, where this mode is, not on a thread of the device
        # These ask the device itself, past all modes.
        generator = torch.Generator
        self._patch.setattr(torch, "Generator", lambda _="cpu": generator("cpu"))
        for make in (torch.tensor, torch.as_tensor):
            self._patch.setattr(torch, make.__name__, functools.partial(self._tensor, make))
        Watch._current = self
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        Watch._current = None
        self._patch.undo()
        self._threads.__exit__(kind, error, trace)

    def _tensor(self, make: Callable[..., Tensor], data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """`torch.tensor`, or `torch.as_tensor` of numbers, which builds on the host and copies from there."""
        if device is None or torch.device(device).type != NAME or isinstance(data, Tensor):
            return make(data, device=device, **options)
        self.note("torch.tensor")
        return PretendedTensor(make(data, **options))

    def note(self, operator: str) -> None:
        self.waits.append(f"{site(sys._getframe(1))}: {operator}")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return self._run(func, args, dict(kwargs or {}))
        except Exception:
            traceback.print_exc()  # in a backward torch would end the process before it is told
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for each in (*args, *kwargs.values()) for leaf in _leaves(each) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in tensors if isinstance(leaf, PretendedTensor)]
        here = bool(ours)
        device = kwargs.get("device")
        if device is not None:
            here = torch.device(device).type == NAME
            if here:
                kwargs["device"] = torch.device("cpu")
        if ours or here:
            others = [leaf for leaf in tensors if not isinstance(leaf, PretendedTensor) and not leaf.is_meta]
            self._look(func, args, kwargs, ours, others, to=here)
        result = func(*_held(args), **{key: _held(value) for key, value in kwargs.items()})
        if not here or func.overloadpacket in _READS:
            return result
        known = {id(each.held): each for each in ours}
        return _map(result, Tensor, lambda each: known[id(each)] if id(each) in known else PretendedTensor(each))

    def _look(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ours: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        to: bool,
    ) -> None:
        """Note whether the host waits; refuse what CUDA refuses, and what nobody has looked up."""
        operator = func.overloadpacket
        name = operator.__name__
        if operator in _COPIES:
            blocking = not kwargs.get("non_blocking", args[2] if operator is _aten.copy_ and len(args) > 2 else False)
            back = operator is _aten._to_copy and bool(ours) and not to  # waits, unless the memory there is pinned
            away = back and torch.device(kwargs["device"]).type != "meta"
            if away or (others and blocking):
                self.note("copy")
            return
        if operator in _INDEXING:
            given = args[1]
            indices = [index for index in given if isinstance(index, Tensor)]
            masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            if masks or any(not isinstance(index, PretendedTensor) for index in indices):
                self.note(name)
            return
        if others and (any(other.dim() > 0 for other in others) or torch.Tag.pointwise not in func.tags):
            raise RuntimeError(f"{func}: tensors are on {NAME} and on the host")
        if others and operator is _aten.where:
            self.note(name)
        if operator is _aten.repeat_interleave and kwargs.get("output_size") is None:
            self.note(name)
        if operator in _WAITING or (operator in _UNCHECKED and kwargs.get("check_errors", False)):
            self.note(name)
        elif "linalg" in name and operator not in _UNCHECKED | _SOLVERS:
            raise RuntimeError(f"{func}: look up whether the host waits for it on CUDA, and say so here")


def _leaves(value: Any) -> Iterator[Any]:
    """What operators are handed is at most lists of values."""
    if isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def _map(value: Any, kind: type[Tensor], change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(each, kind, change) for each in value)
    return value


def _held(value: Any) -> Any:
    return _map(value, PretendedTensor, lambda each: each.held)


def site(frame: FrameType | None) -> str:
    """`module.function` of the innermost frame of the package; empty where there is none."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{'.'.join(path.relative_to(_PACKAGE).with_suffix('').parts)}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
