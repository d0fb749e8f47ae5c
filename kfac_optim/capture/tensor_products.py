"""Torch's functions, each read as the products with parameters that it makes, and the sums with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.capture.contractions import Label, TensorProduct, added, contract, source_of

Products = Iterator[TensorProduct | None]


# Readers have torch's own names for what may be given by keyword. Where a number stands before a tensor, which torch
# still allows though it is deprecated, there are more positional arguments than those.


def _of_matmul(input: Tensor, other: Any = None, *, mat2: Any = None, **_: Any) -> Products:  # noqa: A002
    yield from _of_product(input, mat2 if other is None else other)


def _of_product(left: Tensor, right: Tensor) -> Products:
    of_right = source_of(right)
    source = of_right or source_of(left)
    if source is None:
        return
    weight, rows = (right, left) if of_right is not None else (left, right)
    if source_of(rows) is not None:
        return
    leading = [("batch", place) for place in range(max(left.dim(), right.dim()) - 2, 0, -1)]
    left_own = ["summed"] if left.dim() == 1 else ["of left", "summed"]
    right_own = ["summed"] if right.dim() == 1 else ["summed", "of right"]
    out = [*leading, *(label for label in (*left_own, *right_own) if label != "summed")]

    def labelled(tensor: Tensor, own: list[str]) -> list[Label]:
        before = leading[len(leading) - (tensor.dim() - len(own)) :] if tensor.dim() > len(own) else []
        return [*before, *own]

    labels = labelled(weight, right_own if weight is right else left_own)
    row_labels = labelled(rows, left_own if weight is right else right_own)
    groups = frozenset(label for label, size in zip(labels, weight.shape, strict=True) if label in leading and size > 1)
    # Rows that all groups have are the same for each.
    row_labels = [
        ("one", label) if label in groups and size == 1 else label
        for label, size in zip(row_labels, rows.shape, strict=True)
    ]
    yield contract(rows, row_labels, source, labels, out, groups)


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Products:  # noqa: A002
    source = source_of(weight)
    if source is None or weight.dim() != 2:
        return
    leading: list[Label] = list(range(input.dim() - 1))
    yield contract(input, [*leading, "in"], source, ["out", "in"], [*leading, "out"])
    if bias is not None:
        yield added(bias, (*input.shape[:-1], len(weight)))


def _of_addmm(input: Any, mat1: Any, mat2: Any, *deprecated: Any, **factors: Any) -> Products:  # noqa: A002
    return iter(()) if deprecated else _of_sum_and_product(input, mat1, mat2, **factors)


def _of_baddbmm(input: Any, batch1: Any, batch2: Any, *deprecated: Any, **factors: Any) -> Products:  # noqa: A002
    return iter(()) if deprecated else _of_sum_and_product(input, batch1, batch2, **factors)


def _of_sum_and_product(
    summand: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any
) -> Products:
    if alpha == 1:
        yield from _of_product(left, right)
    if beta == 1:
        yield added(summand, (*left.shape[:-1], right.shape[-1]))


def _of_grouped(
    input: Tensor,  # noqa: A002
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    **_: Any,
) -> Products:
    source = source_of(mat2)
    if source is None or source.partial or source.dims[0] != 0 or mat2.dim() != 3:
        return
    if input.dim() != 2 or offs is None or bias is not None:
        return
    ids = torch.searchsorted(offs, torch.arange(len(input), device=offs.device, dtype=offs.dtype), right=True)
    gathered = source._replace(partial=True, ids=ids)
    yield contract(input, ["row", "in"], gathered, ["row", "in", "out"], ["row", "out"])


def _of_einsum(equation: str, *operands: Any) -> Products:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) != 2:
        return
    sources = [source_of(operand) for operand in operands]
    if (sources[0] is None) == (sources[1] is None):
        return
    given, arrow, output = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    most = max(
        operand.dim() - len(term.replace("...", "")) if "..." in term else 0
        for term, operand in zip(terms, operands, strict=True)
    )
    if not arrow:
        once = sorted(letter for letter in set(given) - set(",.") if given.count(letter) == 1)
        output = ("..." if "..." in given else "") + "".join(once)

    def labelled(term: str, ndim: int | None) -> list[Label]:
        before, dots, after = term.partition("...")
        hidden = most if ndim is None else ndim - len(before) - len(after)
        return [*before, *(("...", place) for place in range(hidden - 1, -1, -1) if dots), *after]

    at = 0 if sources[0] is not None else 1
    source, rows = sources[at], operands[1 - at]
    assert source is not None
    labels = labelled(terms[at], operands[at].dim())
    yield contract(rows, labelled(terms[1 - at], rows.dim()), source, labels, labelled(output, None))


def _of_add(input: Any, other: Any, *deprecated: Any, alpha: float = 1, **_: Any) -> Products:  # noqa: A002
    if alpha == 1 and not deprecated and isinstance(input, Tensor) and isinstance(other, Tensor):
        bias = other if source_of(other) is not None else input
        rows = input if bias is other else other
        if source_of(rows) is None:
            yield added(bias, _broadcast(input.shape, other.shape))


def _broadcast(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    longest = max(len(left), len(right))
    padded = ((1,) * (longest - len(shape)) + tuple(shape) for shape in (left, right))
    return tuple(other if size == 1 else size for size, other in zip(*padded, strict=True))


_READERS: Mapping[Callable[..., Any], Callable[..., Products]] = {
    F.linear: _of_linear,
    torch.einsum: _of_einsum,
    torch._grouped_mm: _of_grouped,
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _of_addmm),
    **dict.fromkeys((torch.baddbmm, torch.Tensor.baddbmm), _of_baddbmm),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _of_matmul),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__), _of_matmul),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.add_), _of_add),
}

IN_PLACE = frozenset({torch.Tensor.add_})
"""Functions whose output is one of their arguments."""


def reads(function: Callable[..., Any]) -> bool:
    """Return whether a function may multiply by parameters in a way that `products_of` knows."""
    return function in _READERS


def products_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[TensorProduct]:
    """Return the products with parameters, and sums with them, that a call of a function makes."""
    reader = _READERS.get(function)
    return [] if reader is None else [each for each in reader(*args, **kwargs) if each is not None]
