"""Layer calls inside compiled graphs: operators that `torch.compile` leaves standing where our hooks were traced.

`torch.compile` traces forward hooks together with the model, so what a hook does at every call must be in the graph. It
stands there as one of four operators, and the work behind them is Python as in eager mode: `begin` and `end` of a
forward of the model, `note` of a layer's call, and `commit`, inside backward, of its input and output gradient. Each
changes a token, so that the compiler neither drops them nor changes their order. On steps without statistics none of
them is traced: the graph is the model's own.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Who is told of what happens in a graph: a capture window."""

    def begin_call(self, model: int) -> None:
        """The forward of a model begins."""

    def end_call(self, terms: int) -> None:
        """It ends; the loss terms read off it, -1 where there are none to read."""

    def note_call(self, watch: int, training: bool, unbatched: bool, context: tuple[int, ...]) -> int:
        """A layer was called; the number of the call, -1 where it does not count."""

    def commit_call(self, call: int, layer_input: Tensor, gradient: Tensor) -> None:
        """A backward has come to the output of the call."""


class Tape:
    """What graphs hold of one recorder: its number, and the tokens.

    Attributes:
        number: by which operators find the recorder.
        forward: token of the operators of forward passes, `[]`.
        backward: token of those of backward passes, `[]`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.number = id(recorder)
        self.forward = torch.zeros((), dtype=torch.int64, device="cpu")
        self.backward = torch.zeros((), dtype=torch.int64, device="cpu")
        _RECORDERS[self.number] = recorder

    def begin(self, model: int) -> None:
        torch.ops.kfac_optim.begin(self.forward, self.number, model)

    def end(self, terms: int) -> None:
        torch.ops.kfac_optim.end(self.forward, self.number, terms)

    def note(
        self,
        watch: int,
        layer_input: Tensor,
        output: Tensor,
        training: bool,
        unbatched: bool,
        context: Sequence[int],
    ) -> None:
        call = torch.ops.kfac_optim.note(self.forward, self.number, watch, training, unbatched, list(context))
        kept = layer_input.detach()
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: torch.ops.kfac_optim.commit(self.backward, self.number, call, kept, gradient)
        )


# Operators take numbers and tensors alone, so they find the recorder here; it is not kept alive.
_RECORDERS: "weakref.WeakValueDictionary[int, Recorder]" = weakref.WeakValueDictionary()


@torch.library.custom_op("kfac_optim::begin", mutates_args=("token",))
def _begin(token: Tensor, recorder: int, model: int) -> None:
    token += 1
    if (found := _RECORDERS.get(recorder)) is not None:
        found.begin_call(model)


@torch.library.custom_op("kfac_optim::end", mutates_args=("token",))
def _end(token: Tensor, recorder: int, terms: int) -> None:
    token += 1
    if (found := _RECORDERS.get(recorder)) is not None:
        found.end_call(terms)


@torch.library.custom_op("kfac_optim::note", mutates_args=("token",))
def _note(token: Tensor, recorder: int, watch: int, training: bool, unbatched: bool, context: Sequence[int]) -> Tensor:
    token += 1
    found = _RECORDERS.get(recorder)
    call = -1 if found is None else found.note_call(watch, training, unbatched, tuple(context))
    return torch.tensor(call, dtype=torch.int64, device="cpu")


@torch.library.custom_op("kfac_optim::commit", mutates_args=("token",))
def _commit(token: Tensor, recorder: int, call: Tensor, layer_input: Tensor, gradient: Tensor) -> None:
    token += 1
    if (found := _RECORDERS.get(recorder)) is not None:
        found.commit_call(int(call), layer_input, gradient)


def _nothing(*_: Any) -> None:
    pass


for _operator in (_begin, _end, _commit):
    _operator.register_fake(_nothing)
_note.register_fake(lambda *_: torch.empty((), dtype=torch.int64, device="cpu"))
