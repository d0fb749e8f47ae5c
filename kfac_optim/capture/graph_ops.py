"""Layer calls inside compiled graphs: operators that `torch.compile` leaves standing where our hooks were traced.

`torch.compile` traces forward hooks together with the model, so what a hook does at every call must be in the graph. It
stands there as one of few operators, and the work behind them is Python as in eager mode: `begin` and `end` of a
forward of the model, `note` of a layer's call, and `commit`, inside backward, of its input and output gradient. Each
of those in the forward changes a token, so that the compiler neither drops them nor changes their order; `commit` hands
the gradient on, so that what needs it needs the operator. On steps without statistics none of them is traced, and
the graph is the model's own; but for a summed loss, whose terms count at every step: there `run` stands for the forward
of the model, and `commit` for a backward that has come to its output.

Where the loss is named, the estimate runs the backward of the graph several times. Such a pass must come to all
`commit`s and accumulate nothing, so it is one with respect to a leaf of our own, the anchor, of which the output of
each layer is a function (with a gradient of zero).
"""

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kfac_optim.utils.autograd import on_gradient, with_hook
from kfac_optim.utils.dynamo import keep_what_is_saved


class GraphListener(Protocol):
    """Hears of what happens in compiled graphs."""

    def begin_call(self, model: int, nested: bool) -> None:
        """Note that the forward of a model begins, within another one if it is nested."""

    def end_call(self, terms: int) -> None:
        """Note that the forward ends; `terms` are the loss terms read off it, -1 if there are none to read."""

    def run_call(self, model: int, terms: int) -> int:
        """Note a forward of a model in a graph that captures nothing; return its number for the backward."""

    def trace_call(self, watch: int) -> None:
        """Note that a layer's call is being traced."""

    def note_call(self, watch: int, training: bool, examples: int, context: tuple[int, ...]) -> int:
        """Note that a layer was called with so many examples, or with a single one without a batch dimension (-1).

        Returns:
            The number of the call, -1 where it does not count.
        """

    def commit_call(self, call: int, layer_input: Tensor, gradient: Tensor) -> None:
        """Note that a backward has come to the output of the call."""


class Tape:
    """Writes the operators of one listener into graphs.

    Attributes:
        number: the number by which operators find the listener.
        token: the tensor that the operators in forward passes change, `[]`.
        anchor: the leaf with respect to which an estimate runs passes of its own, `[]`; None where there are none.
    """

    def __init__(self, listener: GraphListener) -> None:
        self.number = next(_NUMBERS)
        self.token = torch.zeros((), dtype=torch.int64, device="cpu")
        self.anchor: Tensor | None = None
        _LISTENERS[self.number] = listener

    def begin(self, model: int, nested: bool) -> None:  # pragma: traced
        torch.ops.kfac_optim.begin(self.token, self.number, model, nested)

    def end(self, terms: int) -> None:  # pragma: traced
        torch.ops.kfac_optim.end(self.token, self.number, terms)

    def run(self, model: int, terms: int) -> Tensor:  # pragma: traced
        """Write a forward that is not captured into the graph; return its number, `[]`."""
        keep_what_is_saved(may_run_again=False)
        call: Tensor = torch.ops.kfac_optim.run(self.token, self.number, model, terms)
        return call

    def note(self, watch: int, training: bool, examples: int, context: Sequence[int]) -> Tensor:  # pragma: traced
        """Write a layer's call into the graph; return its number, `[]`."""
        keep_what_is_saved(may_run_again=self.anchor is not None)
        call: Tensor = torch.ops.kfac_optim.note(self.token, self.number, watch, training, examples, list(context))
        return call

    def watch(self, call: Tensor, layer_input: Tensor, output: Tensor) -> Tensor:  # pragma: traced
        """Give `output` again, for the graph to go on with: a backward that comes to it commits the call.

        A hook that torch.compile (2.13) sees being set will not do. It then forgets what the model writes into an
        object whose dict it had looked into before, and Hugging Face models choose their loss by what they wrote into
        their config.
        """
        watched: Tensor = _watched(output, self.number, self.anchor, call, layer_input)
        return watched

    def watch_used(self, call: Tensor, layer_input: Tensor, output: Tensor) -> None:  # pragma: traced
        """Do what `watch` does for an `output` that something was made of already.

        The recurrent map of a sequence is such an output: its input is known once all steps have been taken.
        """
        _watched_by_hook(output, self.number, call, layer_input)

    def trace(self, watch: int) -> None:  # pragma: traced
        """Note that a call is being traced; it leaves nothing in the graph."""
        _traced(self.number, watch)


# torch.compile does not look into it: tracing an autograd function, it makes an instance, which torch itself warns of.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _watched(  # pragma: traced
    output: Tensor, listener: int, anchor: Tensor | None, call: Tensor, layer_input: Tensor
) -> Tensor:
    return with_hook(output, partial(torch.ops.kfac_optim.commit, listener), anchor, call, layer_input)


# Backends that remove dead code would drop it, as nothing is made of what it gives back.
@torch.fx.has_side_effect
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _watched_by_hook(output: Tensor, listener: int, call: Tensor, layer_input: Tensor) -> Tensor:  # pragma: traced
    on_gradient(output, partial(torch.ops.kfac_optim.commit, listener, call, layer_input))
    return output


# Operators take numbers and tensors alone, so they find the listener here; it is not kept alive. As a graph may outlive
# it, its number is never another's, as an address would be.
_NUMBERS = itertools.count()
_LISTENERS: "weakref.WeakValueDictionary[int, GraphListener]" = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced(listener: int, watch: int) -> int:
    if (found := _LISTENERS.get(listener)) is not None:
        found.trace_call(watch)
    return 0


@torch.library.custom_op("kfac_optim::begin", mutates_args=("token",))
def _begin(token: Tensor, listener: int, model: int, nested: bool) -> None:
    token += 1
    if (found := _LISTENERS.get(listener)) is not None:
        found.begin_call(model, nested)


@torch.library.custom_op("kfac_optim::end", mutates_args=("token",))
def _end(token: Tensor, listener: int, terms: int) -> None:
    token += 1
    if (found := _LISTENERS.get(listener)) is not None:
        found.end_call(terms)


@torch.library.custom_op("kfac_optim::run", mutates_args=("token",))
def _run(token: Tensor, listener: int, model: int, terms: int) -> Tensor:
    token += 1
    found = _LISTENERS.get(listener)
    return torch.tensor(-1 if found is None else found.run_call(model, terms), dtype=torch.int64, device="cpu")


@torch.library.custom_op("kfac_optim::note", mutates_args=("token",))
def _note(token: Tensor, listener: int, watch: int, training: bool, examples: int, context: Sequence[int]) -> Tensor:
    token += 1
    found = _LISTENERS.get(listener)
    call = -1 if found is None else found.note_call(watch, training, examples, tuple(context))
    return torch.tensor(call, dtype=torch.int64, device="cpu")


@torch.library.custom_op("kfac_optim::commit", mutates_args=())
def _commit(listener: int, call: Tensor, layer_input: Tensor, gradient: Tensor) -> Tensor:
    if (found := _LISTENERS.get(listener)) is not None:
        found.commit_call(int(call), layer_input, gradient)
    return gradient.clone()


def _nothing(*_: Any) -> None:
    pass


_begin.register_fake(_nothing)
_end.register_fake(_nothing)
_run.register_fake(lambda *_: torch.empty((), dtype=torch.int64, device="cpu"))
_note.register_fake(lambda *_: torch.empty((), dtype=torch.int64, device="cpu"))
_commit.register_fake(lambda *args: torch.empty_like(args[-1]))
_commit.register_autograd(lambda _, gradient: (None, None, None, gradient))
