"""Reading a checkpoint: all of it is checked, and sorted into what torch loads and what belongs to blocks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kfac_optim.blocks import checkpoint, checkpoint_check, checkpoint_groups
from kfac_optim.blocks.checkpoint_groups import Origin
from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.blocks.preconditioning import says_something
from kfac_optim.blocks.state_keys import AVERAGE, AVERAGED_STEPS, ITERATE, MOMENTUM

_AVERAGED = (AVERAGE, AVERAGED_STEPS, ITERATE)


@dataclass(frozen=True, slots=True)
class Incoming:
    """Holds a checkpoint that is about to be loaded, or none.

    Attributes:
        states: what the checkpoint holds for blocks.
        marks: the marks of the layers that were left to SGD.
        warm: whether it is a checkpoint of SGD, so that blocks begin from zero.
        unread: parameters of which it has only the momentum, as saved by this package: perhaps their statistics had no
            place to be read into, because their layers were not known yet.
        averages: what the checkpoint holds of the averages of parameters, which torch would cast to their dtype.
        missed: names of the blocks whose statistics other ranks had when it was saved, filled in as it is loaded.
    """

    states: checkpoint.States = field(default_factory=dict)
    marks: checkpoint.States = field(default_factory=dict)
    warm: bool = False
    unread: Collection[nn.Parameter] = ()
    averages: dict[nn.Parameter, Mapping[str, Any]] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


def read(
    state_dict: object,
    groups: Sequence[dict[str, Any]],
    keys: Sequence[str],
    binding: ModelBinding,
    check_groups: Callable[[Sequence[dict[str, Any]]], object],
    *,
    several: bool,
) -> tuple[dict[str, Any], Incoming]:
    """Check a checkpoint, and change nothing.

    Args:
        state_dict: the checkpoint.
        groups: the optimizer's param groups.
        keys: the numbers that they have.
        binding: the binding of the optimizer's model.
        check_groups: refuses groups that do not go together.
        several: whether there are other processes.

    Returns:
        What torch is to load; torch would cast the blocks' part to the parameters' dtype, which comes apart from it.

    Raises:
        ValueError: it cannot be loaded.
    """
    checkpoint_groups.check_shape(state_dict)
    assert isinstance(state_dict, dict)
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return state_dict, Incoming()  # torch's own message is next
    whose = checkpoint_groups.origin(state_dict, keys)
    completed = checkpoint_groups.completed(saved, groups, keys, whose)
    checkpoint_groups.check_together(completed, groups, check_groups)
    ids = [i for group in saved for i in group["params"]]
    params: list[nn.Parameter] = [param for group in groups for param in group["params"]]
    checkpoint_groups.check_repeats(ids, params)
    states = checkpoint_groups.by_number(state_dict["state"], ids)
    param_of = dict(zip(ids, params, strict=True))
    names = {param: f"parameter {number}" for number, param in enumerate(params)} | binding.names()
    held = {param_of[i]: state for i, state in states.items() if i in param_of}
    covered = {param for block in binding.coverage.blocks for param in block.params}
    for param, state in held.items():
        checkpoint_groups.check_parameter_state(state, param, names[param], covered=param in covered)
    incoming = _incoming(held, binding, warm=whose is Origin.SGD, several=several)
    for param, state in held.items():
        if AVERAGE in state:
            incoming.averages[param] = {key: state[key] for key in _AVERAGED if key in state}
    rest = checkpoint.without_blocks({key: _for_torch(state) for key, state in states.items()})
    return {**state_dict, "state": rest, "param_groups": completed}, incoming


def _incoming(
    held: Mapping[nn.Parameter, Mapping[str, Any]], binding: ModelBinding, *, warm: bool, several: bool
) -> Incoming:
    """Check what a checkpoint holds for blocks."""
    of_blocks = {param: state[checkpoint.KEY] for param, state in held.items() if checkpoint.KEY in state}
    names = binding.names()
    covered = {block.params[0]: repr(block.name) for block in binding.coverage.blocks}
    known = {param: covered.get(param, repr(names.get(param, "a layer"))) for param in of_blocks}
    checkpoint_check.check_forms({known[param]: state for param, state in of_blocks.items()})
    states, marks = checkpoint.part(of_blocks)
    blocks = binding.blocks_with(states, marks)
    if warm:
        return Incoming(warm=bool(blocks))
    firsts = {block.params[0] for block in blocks}
    # Layers that are yet to be shown wait for it.
    strays = [state for param, state in states.items() if not (param in firsts or _awaits(binding, param))]
    leaving = [block for block in binding.coverage.blocks if block.params[0] in marks]
    has_stepped = any(says_something(state.get(MOMENTUM)) for state in held.values())
    if of_blocks or has_stepped or binding.given:  # otherwise it was saved before the model was found
        checkpoint_check.check_layers(
            [*blocks, *leaving],
            [of_blocks.get(block.params[0]) for block in (*blocks, *leaving)],
            [checkpoint.layer_name(state) for state in strays],
            of_found=binding.found,
            several=several,
        )
    if not several:
        for block in blocks:
            checkpoint_groups.check_momenta(block, held)
    states = {param: checkpoint.due_if_not_read(state) for param, state in states.items()}
    of_unknown = binding.model is None and not of_blocks
    awaited = set(held) if of_unknown else held.keys() & binding.coverage.candidates - of_blocks.keys()
    unread = {param for param in awaited if says_something(held[param].get(MOMENTUM))}
    return Incoming(states, marks, unread=unread)


def _awaits(binding: ModelBinding, param: nn.Parameter) -> bool:
    """Return whether there may be a block later whose first parameter this is."""
    coverage = binding.coverage
    without = (coverage.candidates, coverage.lazy, coverage.frozen, binding.pending.marks)
    return binding.model is None or any(param in each for each in without)


def _for_torch(state: Any) -> Any:
    """Give a parameter's state without averages, and without the graph that its momentum may have come from."""
    if not isinstance(state, Mapping):
        return state
    rest = {key: value for key, value in state.items() if key not in _AVERAGED}
    return rest | {MOMENTUM: rest[MOMENTUM].detach()} if isinstance(rest.get(MOMENTUM), Tensor) else rest
