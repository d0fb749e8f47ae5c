"""`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells: one matrix for each weight, all its gates together.

Torch computes these by one fused call that nothing can see into. On statistics steps the adapter runs the same
recurrence from linear maps, equal in value and in the dropout it draws (but for cuDNN, which has random numbers of its
own), and notes each map once per call: the input map of all time steps as it is, the recurrent one by its offset.
Time steps count as independent uses (Martens, Ba & Johnson 2018, the first of their approximations): time is the axis
over which the weight is shared.

Inside, sequences are one matrix of rows `[rows, features]`, time step by time step, as in a `PackedSequence`: time step
`t` has the first `sizes[t]` sequences. Unless they are packed every size is the batch size.
"""

import functools
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from kfac_optim.capture.function_modes import substitute
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.layers.base import COMPUTED_WEIGHT, LayerAdapter, StatisticsSink, watch_of
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.autograd import without_function_modes
from kfac_optim.utils.hooks import Handle, Handles
from kfac_optim.utils.precision import as_autocast

_Module = nn.RNNBase | nn.RNNCellBase

State = tuple[Tensor, ...]
"""`(h,)`, or `(h, c)` of an LSTM, each `[batch, size]`."""
Step = Callable[[Tensor, Tensor, State], State]
"""Makes the next state of what the input and `h` give the gates, `[batch, gates · hidden]` each."""
Note = Callable[[Tensor, Sequence[Tensor], Tensor], None]
"""Receives a weight, its input rows in one or several parts, and its output rows."""

# The names that torch's functions give their arguments.
_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_OF_SEQUENCE = ("input", "hx", *_OPTIONS, "batch_first")
_OF_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)
_OF_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")

_WEIGHT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")


class SequenceStatistics(RowStatistics):
    """Inputs and gradients are rows of sequences; the context is the number of sequences at each time step.

    What is left of the time axis after the end of a sequence is zero, and so no row either.
    """

    rows_suffice = True

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return self._by_sequence(layer_input)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return self._by_sequence(gradient)

    @property
    def positions(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        sizes: tuple[int, ...] = self.call.context
        return sizes

    def _by_sequence(self, rows: Tensor) -> Tensor:
        """Return `[rows, d]` as `[1, batch, time, d]`."""
        sizes = self._sizes
        if sizes[0] == sizes[-1]:
            return rows.reshape(1, len(sizes), sizes[0], rows.shape[-1]).transpose(1, 2)
        padded, _ = pad_packed_sequence(PackedSequence(rows, torch.tensor(sizes, device="cpu")), batch_first=True)
        return padded.unsqueeze(0)


class RecurrentAdapter(LayerAdapter[_Module]):
    """Takes a matrix for every `weight_ih_…` and `weight_hh_…`, with its bias, and for every `weight_hr_…`."""

    in_rows = True

    def refusal(self, module: _Module) -> str | None:
        names = module._flat_weights_names if isinstance(module, nn.RNNBase) else ["weight_ih", "weight_hh"]
        weights = [module._parameters.get(name) for name in names]
        if any(weight is None for weight in weights):
            return COMPUTED_WEIGHT
        if len({id(weight) for weight in weights}) < len(weights):
            return "two of the layer's weights are one and the same parameter"
        return None

    def specs(self, module: _Module, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        specs = []
        for local, weight in module._parameters.items():
            if weight is not None and local in trained and _WEIGHT.fullmatch(local):
                bias = local.replace("weight", "bias")
                params = (local, bias) if bias in trained else (local,)
                out_dim, in_dim = weight.shape
                specs.append(LayerSpec(f"{name}.{local}".lstrip("."), params, in_dim + len(params) - 1, out_dim))
        return tuple(specs)

    def capture(
        self, module: _Module, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        def watch(index: int, spec: LayerSpec) -> LayerWatch:
            weight = module.get_parameter(spec.params[0])
            return watch_of(weight, sink, index, lambda call: SequenceStatistics(spec, call, sink.dtype))

        watches = [watch(index, spec) for index, spec in enumerate(specs)]
        forwards = _Forwards(window, watches, unbatched_ndim=2 if isinstance(module, nn.RNNBase) else 1)
        return Handles(
            window.hook(module, before=forwards.enter, after=forwards.leave),
            substitute(window, module, forwards.table(), forwards.wanted),
            *map(window.watch_calls, watches),
        )


class _Forwards:
    """Follows the forwards of one module. Hooks hold it, so it holds the window and its watches weakly."""

    def __init__(self, window: CaptureWindow, watches: Sequence[LayerWatch], unbatched_ndim: int) -> None:
        self._window = weakref.ref(window)
        self._watches = [weakref.ref(watch) for watch in watches]
        self._unbatched_ndim = unbatched_ndim
        self._unbatched = False

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        # The module adds the batch dimension before it calls the function that is replaced.
        given = args[0] if args else kwargs.get("input")
        self._unbatched = isinstance(given, Tensor) and given.dim() == self._unbatched_ndim

    def leave(self, *_: Any) -> None:
        self._unbatched = False

    def wanted(self) -> bool:
        return any(watch is not None and watch.wanted() for watch in (ref() for ref in self._watches))

    def table(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        table: dict[Callable[..., Any], Callable[..., Any]] = {}
        for name, step in STEPS.items():
            table[getattr(torch, name)] = functools.partial(_out_of_sight, self._sequence, step)
            table[getattr(torch, f"{name}_cell")] = functools.partial(_out_of_sight, self._cell, step)
        return table

    def _sequence(self, step: Step, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Compute what `torch.lstm` and its like do: `(output, h)` or `(output, h, c)`."""
        second = args[1] if len(args) > 1 else None
        if "batch_sizes" in kwargs or (isinstance(second, Tensor) and not second.is_floating_point()):
            data, batch_sizes, hx, *options = _in_order(_OF_PACKED, args, kwargs)
            sizes = tuple(batch_sizes.tolist())  # always on the CPU: nothing is waited for
            rows, state = run_stack(step, data, sizes, _as_state(hx), options, functools.partial(self._note, sizes))
            return rows, *state
        layer_input, hx, *options, batch_first = _in_order(_OF_SEQUENCE, args, kwargs)
        by_time = layer_input.transpose(0, 1) if batch_first else layer_input
        time, batch, _ = by_time.shape
        sizes, data = (batch,) * time, by_time.flatten(0, 1)
        rows, state = run_stack(step, data, sizes, _as_state(hx), options, functools.partial(self._note, sizes))
        output = rows.view(time, batch, rows.shape[-1])
        results = output.transpose(0, 1) if batch_first else output, *state
        return tuple(map(as_autocast, results)) if _is_onednn(step, layer_input, state) else results

    def _cell(self, step: Step, *args: Any, **kwargs: Any) -> Tensor | State:
        """Compute what `torch.lstm_cell` and its like do: a sequence of one step."""
        rows, hx, *weights = _in_order(_OF_CELL, args, kwargs)
        sizes, note = (len(rows),), functools.partial(self._note, (len(rows),))
        _, state = run_direction(step, rows, sizes, _as_state(hx), Weights(*weights), False, note)
        return state if len(state) > 1 else state[0]

    def _note(self, sizes: tuple[int, ...], weight: Tensor, parts: Sequence[Tensor], output: Tensor) -> None:
        window = self._window()
        for watch in (ref() for ref in self._watches):
            if window is not None and watch is not None and watch.used is weight:
                layer_input = parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])
                examples = None if self._unbatched and sizes[0] == 1 else sizes[0]
                window.note(watch, layer_input, output, examples=examples, context=sizes)


def _out_of_sight(recurrence: Callable[..., Any], step: Step, *args: Any, **kwargs: Any) -> Any:
    """Run a recurrence unseen by function modes: it makes hundreds of calls, none of which a listener would note."""
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    if any(type(each) not in (Tensor, nn.Parameter) for each in tensors):  # functions of a subclass are its own
        return recurrence(step, *args, **kwargs)
    with without_function_modes():
        return recurrence(step, *args, **kwargs)


def _in_order(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments in the order of `names`; one that was not given, as a bias of a cell, is None."""
    return (*args, *(kwargs.get(name) for name in names[len(args) :]))


def _is_onednn(step: Step, layer_input: Tensor, state: State) -> bool:
    """Return whether the fused call is oneDNN's, which gives all its results in autocast's dtype, if that is on."""
    if step is not lstm_step or layer_input.dtype not in (torch.float32, torch.bfloat16) or not layer_input.numel():
        return False
    if layer_input.device.type != "cpu" or state[0].shape[-1] != state[1].shape[-1]:  # the states of a projection
        return False
    onednn = torch.backends.mkldnn
    return bool(onednn.is_available()) and bool(onednn.enabled)  # type: ignore[no-untyped-call]


def _as_state(hx: Tensor | State) -> State:
    return (hx,) if isinstance(hx, Tensor) else hx


# -- the recurrence, as ATen/native/RNN.cpp has it ---------------------------------------------------------------


class Weights(NamedTuple):
    """These are the weights of one layer in one direction; `hr` projects the `h` of an LSTM."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None


def lstm_step(gi: Tensor, gh: Tensor, state: State) -> State:
    i, f, g, o = (gi + gh).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(gi: Tensor, gh: Tensor, state: State) -> State:
    (r_i, z_i, n_i), (r_h, z_h, n_h) = gi.chunk(3, 1), gh.chunk(3, 1)
    n = (n_i + (r_i + r_h).sigmoid() * n_h).tanh()
    return ((state[0] - n) * (z_i + z_h).sigmoid() + n,)


def plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda gi, gh, _: (activation(gi + gh),)


STEPS = {"lstm": lstm_step, "gru": gru_step, "rnn_tanh": plain_step(torch.tanh), "rnn_relu": plain_step(torch.relu)}
"""The step of each fused function, by its name."""


def run_stack(
    step: Step, rows: Tensor, sizes: tuple[int, ...], initial: State, options: Sequence[Any], note: Note
) -> tuple[Tensor, State]:
    """Run all layers; return rows `[rows, directions · size]`, and final states `[layers · directions, batch, size]`.

    `initial` is shaped like the final states; `options` are those of the fused functions, from the weights on.
    """
    params, has_biases, num_layers, dropout, train, bidirectional = options
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    finals = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            ih, hh, *others = params[at * each : (at + 1) * each]
            biases, projection = (others[:2], others[2:]) if has_biases else ([None, None], others)
            weights = Weights(ih, hh, *biases, *projection)
            state = tuple(part[at] for part in initial)
            output, final = run_direction(step, rows, sizes, state, weights, direction == 1, note)
            outputs.append(output)
            finals.append(final)
        rows = torch.cat(outputs, dim=-1)
        if dropout and train and layer < num_layers - 1:
            rows = torch.dropout(rows, dropout, train)
    return rows, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def run_direction(
    step: Step, rows: Tensor, sizes: tuple[int, ...], initial: State, weights: Weights, reverse: bool, note: Note
) -> tuple[Tensor, State]:
    """Run one layer in one direction: return rows `[rows, size]`, and the state after the end of each sequence."""
    gi = F.linear(rows, weights.ih, weights.b_ih)
    note(weights.ih, [rows], gi)
    if gi.device.type != "cpu":  # under autocast the fused calls of accelerators keep low precision throughout
        initial = tuple(part.to(gi.dtype) for part in initial)
    # One tensor holds the gradients of all time steps: the bias, to which h Wᵀ is added step by step.
    offset = _offset(weights.hh, weights.b_hh, gi)
    projection = None if weights.hr is None else _offset(weights.hr, None, gi)
    of_input, of_hidden = torch.split(gi, [*sizes]), torch.split(offset, [*sizes])
    projected = () if projection is None else torch.split(projection, [*sizes])
    before, raw, after = ([rows] * len(sizes) for _ in range(3))
    order = range(len(sizes))[:: -1 if reverse else 1]
    state, ended = tuple(part[: sizes[order[0]]] for part in initial), []
    for t in order:
        held, size = len(state[0]), sizes[t]
        if size < held:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        elif size > held:
            state = tuple(torch.cat([part, first[held:size]]) for part, first in zip(state, initial, strict=True))
        before[t] = state[0]
        state = step(of_input[t], torch.addmm(of_hidden[t], state[0], weights.hh.mT), state)
        if weights.hr is not None:
            raw[t] = state[0]
            state = (torch.addmm(projected[t], state[0], weights.hr.mT), *state[1:])
        after[t] = state[0]
    note(weights.hh, before, offset)
    if weights.hr is not None and projection is not None:
        note(weights.hr, raw, projection)
    final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(after), final


def _offset(weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """Return the bias, or zeros, `[rows, out]`, made so that a backward to `weight` alone passes through it."""
    zeros = weight[:, :0].sum(1)
    row = zeros if bias is None else zeros + bias
    return row.to(like.dtype).expand(len(like), -1)
