"""Finding the calls of layers that a tensor was computed from, by walking through its graph."""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from kfac_optim.capture.calls import ForwardCall, Ledger
from kfac_optim.utils.autograd import GradientEdge, Node

# Where a node of the graph holds the calls whose outputs it made: pairs of the call and the number of the output.
_CALLS = "kfac_optim.calls"


def mark(at: GradientEdge, call: ForwardCall) -> None:
    """Have the graph know that the gradient of a call's output passes here; the call is freed with the graph."""
    _notes(at.node).setdefault(_CALLS, []).append((call, at.output_nr))


def _notes(node: Node) -> dict[str, Any]:
    """Return the dictionary that a node of the graph has for notes of others; torch's stubs take it for a method."""
    return cast(dict[str, Any], node.metadata)


def calls_behind(tensors: Iterable[Tensor], ledger: Ledger) -> list[tuple[ForwardCall, GradientEdge]]:
    """Return the calls that some tensors were computed from, those of one ledger, and where their gradients pass."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    found: list[tuple[ForwardCall, GradientEdge]] = []
    while waiting:
        node = waiting.pop()
        use = getattr(node, "kfac_call", None)
        marked = _notes(node).get(_CALLS, ()) if use is None else ((use, 0),)
        found.extend(
            (call, GradientEdge(node, number))
            for call, number in marked
            if isinstance(call, ForwardCall) and call.is_of(ledger)
        )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
