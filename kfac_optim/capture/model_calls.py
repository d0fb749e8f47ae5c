"""The forward of the model that a layer runs in: the one under way, or the one that a backward computes again.

[Note: recomputed layers]
Reentrant checkpointing runs layers without gradients inside the model's forward and again inside backward, when the
forward they belong to has ended. Such a forward leaves a hook on the model's output, which says whose backward it is.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kfac_optim.capture.calls import ForwardCall, Ledger
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.utils.autograd import GradientEdge, in_backward, on_gradient
from kfac_optim.utils.hooks import weakly

_MODULE_CALL = nn.Module._call_impl.__code__


class Roots:
    """Forwards of the model between two steps."""

    def __init__(self) -> None:
        self._under_way: list[RootCall] = []
        self._last: RootCall | None = None
        self._recomputed: RootCall | None = None
        self._stand_in: RootCall | None = None
        self._expected: list[tuple[ForwardCall, GradientEdge]] = []
        self.entered = 0  # since the last step

    def is_under_way(self) -> bool:
        """Return whether a forward of the model is running."""
        return bool(self._under_way)

    def enter(self, model: int, *, is_mapped: bool = False, handed: tuple[int, ...] = ()) -> None:
        """Note that a forward of the model with this identity begins; if it calls itself only the outermost counts."""
        self._stand_in = None
        if self._under_way:
            self._under_way.append(self._under_way[-1])
        else:
            self._under_way.append(RootCall(model, self.entered))
            self._under_way[-1].is_mapped = is_mapped
            self._under_way[-1].handed = handed
            self.entered += 1

    def leave(self) -> RootCall | None:
        """End the forward that was entered last, and return it; None if none was."""
        if not self._under_way:
            return None
        self._last = self._under_way.pop()
        return self._last

    def leave_interrupted(self, model: nn.Module) -> None:
        """Note, as a forward of `model` begins, that one which never ended (KeyboardInterrupt) is not around it."""
        if self._under_way and self._under_way[0].model == id(model) and not _is_nested(model):
            self.leave_all()

    def leave_all(self) -> None:
        """Note that no forward of the model is running."""
        self._under_way.clear()
        self._expected.clear()

    def end(self) -> None:
        """Note that a step was taken: no backward goes on from an earlier forward."""
        self.leave_all()
        self._last = self._recomputed = self._stand_in = None
        self.entered = 0

    def begin_late(self, part: nn.Module, terms: int | None) -> None:
        """Note a forward that counts as one of the model, of which hooks learn neither the beginning nor the end."""
        self._stand_in = RootCall(id(part), self.entered)
        self._stand_in.terms = terms
        self.entered += 1

    def layer_without_graph(self) -> None:
        """Note that, in a forward without gradients, a layer ran that may run again. See [Note: recomputed layers]."""
        if self._under_way:
            self._under_way[-1].recomputes = True

    def expect(self, call: ForwardCall, at: GradientEdge) -> None:
        """Note a layer's call in the forward under way, and the place of the graph that its gradient passes."""
        if self._under_way:
            self._expected.append((call, at))

    def take_expected(self) -> list[tuple[ForwardCall, GradientEdge]]:
        """Return what was expected in the forward that has ended, and forget it."""
        expected, self._expected = self._expected, []
        return expected

    def await_backward(self, root: RootCall, output: Any) -> None:
        """Have the layers that the backward from `output` runs again belong to `root`."""
        on_output_gradients(output, weakly(self._enter_backward, root))

    def _enter_backward(self, root: RootCall, _gradient: Tensor) -> None:
        self._recomputed = root

    def of_layer(self, examples: int | None) -> RootCall | None:
        """Return the forward of the model in which a layer is called, with a batch or (None) with a single example."""
        root = self.current()
        if root is not None:
            root.note_examples(examples)
        return root

    def of_graph_within_backward(self) -> RootCall | None:
        """Return the last forward, for a graph within backward, which computes again what a checkpoint dropped."""
        return self._last if in_backward() else None

    def current(self) -> RootCall | None:
        """Return the forward of the model that is running, or that a backward computes again; None if there is none."""
        if self._under_way:
            return self._under_way[-1]
        return self._recomputed if self._recomputed is not None and in_backward() else self._stand_in


class OutputPass:
    """Is called as a hook on an output of the model, and tells the ledger of every backward through it.

    It counts the terms on the steps without statistics, when no layer tells; see `LossTally.counts_always`.

    Args:
        ledger: the ledger; held weakly.
        root: the forward.
    """

    __slots__ = ("_ledger", "_root")

    def __init__(self, ledger: Ledger, root: RootCall) -> None:
        self._ledger = weakref.ref(ledger)
        self._root = root

    def __call__(self, _gradient: Tensor, call: Tensor | None = None) -> None:
        if (ledger := self._ledger()) is not None:
            ledger.pass_through(self._root, in_graph=call is not None)


def on_output_gradients(output: Any, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call `hook` in every backward that comes to a tensor of the model's `output`."""
    for tensor in outputs_with_gradient(output):
        on_gradient(tensor, hook)


def outputs_with_gradient(output: Any) -> list[Tensor]:
    """List the tensors of the model's `output` that a backward can come to."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def outermost_call(parts: Collection[nn.Module]) -> tuple[nn.Module, Any] | None:
    """Return which of these modules is being called, the outermost one, with its arguments; None if none is."""
    calls = [(module, arguments) for module, arguments in _running_calls() if module in parts]
    return calls[-1] if calls else None


def _is_nested(model: nn.Module) -> bool:
    """Return whether the call of `model` that is beginning is inside another one."""
    return sum(module is model for module, _ in _running_calls()) > 1


def _running_calls() -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules that are being called, from the innermost call on, each with its arguments."""
    frame = cast(FrameType | None, sys._getframe())
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            yield frame.f_locals["self"], (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))
        frame = frame.f_back
