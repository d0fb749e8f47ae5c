"""Finding what tensors were computed from, by walking through their graph: calls of layers, forwards of the model."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, cast

from torch import Tensor

from kfac_optim.capture.calls import ForwardCall, Ledger
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.utils.autograd import GradientEdge, Node, allow_another_backward, is_sink

# Where a node of the graph holds the calls, of layers or of the model, whose outputs it made: pairs of the call and the
# number of the output.
_CALLS = "kfac_optim.calls"

# Where it holds what was said of its own outputs, with the numbers of these.
_OUTPUTS = "kfac_optim.outputs"

# Nodes that put the elements of their only input into another order, shape or dtype, or leave some out.
_REARRANGING = frozenset(
    f"{name}Backward"
    for name in (
        *("Alias", "Clone", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose"),
        *("Unsqueeze", "UnsafeView", "View"),
    )
)


class Behind(NamedTuple):
    """Holds what some tensors were computed from."""

    calls: list[tuple[ForwardCall, GradientEdge]]
    """Calls of layers, of one ledger, and where their gradients pass."""
    forwards: list[RootCall]
    """Forwards of the model that have marked their output."""
    in_graphs: bool
    """Whether calls in compiled graphs are among what was computed from; the graphs do not tell which."""


def mark(at: GradientEdge, call: ForwardCall | RootCall) -> None:
    """Have the graph know that the gradient of a call's output passes here; the call is freed with the graph."""
    _notes(at.node).setdefault(_CALLS, []).append((call, at.output_nr))


def mark_output(output: Tensor, what: object) -> None:
    """Have the graph know something of a tensor, for `output_behind`."""
    if output.grad_fn is not None:
        _notes(output.grad_fn).setdefault(_OUTPUTS, []).append((what, output.output_nr))


def output_behind(tensor: Tensor) -> list[object]:
    """Return what was said of the tensor that this one's elements are those of, in whatever order and shape."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None:
        said = [what for what, at in _notes(node).get(_OUTPUTS, ()) if at == number]
        passed_on = is_sink(node)
        if said or not (passed_on or node.name().rstrip("0123456789") in _REARRANGING):
            return said
        node, number = node.next_functions[number if passed_on else 0]
    return []


def depend_on(tensors: Iterable[Tensor], leaves: Collection[Tensor]) -> bool:
    """Return whether some tensors are among these leaves, or were computed from any of them."""
    known, given = set(leaves), set(tensors)
    found = not known.isdisjoint(given)
    waiting = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting and not found:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        found = isinstance(leaf, Tensor) and leaf in known
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting.extend(following)
    return found


def _notes(node: Node) -> dict[str, Any]:
    """Return the dictionary that a node of the graph has for notes of others; torch's stubs take it for a method."""
    return cast(dict[str, Any], node.metadata)


def look_behind(tensors: Iterable[Tensor], ledger: Ledger, anchor: GradientEdge | None) -> Behind:
    """Return what some tensors were computed from; `anchor` is that of the ledger's compiled graphs."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    found = Behind([], [], False)
    while waiting:
        node = waiting.pop()
        use = getattr(node, "kfac_call", None)
        marked = _notes(node).get(_CALLS, ()) if use is None else ((use, 0),)
        for call, number in marked:
            if isinstance(call, RootCall):
                found.forwards.append(call)
            elif isinstance(call, ForwardCall) and call.is_of(ledger):
                found.calls.append((call, GradientEdge(node, number)))
        for following, _ in node.next_functions:
            if anchor is not None and following is anchor.node:
                allow_another_backward(node)
                found = found._replace(in_graphs=True)
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
