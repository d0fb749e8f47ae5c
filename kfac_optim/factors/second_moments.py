"""Layouts of modules become canonical rows `[groups, batch, shared, d]`, and these second moments."""

import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.linalg.products import symmetric_product
from kfac_optim.linalg.sketches import sketch_directions
from kfac_optim.specs import Sketched, Structure
from kfac_optim.utils.precision import at_least_float32

T = TypeVar("T", Tensor, Tensor | None)

# Elements of per-example gradients that are held at a time: 64 MiB of float32.
_CHUNK = 2**24

# Elements of rows that are sooner copied than a row and a column are put around their product, unless that is larger
# (one CPU core, torch 2.13).
_FEW = 2**14

# Elements of an input or gradient that are worked on at a time where one pass after the other goes over them: 512 KiB
# of float32, so that a second-level cache holds them and what is made of them.
_IN_CACHE = 2**17


def gram(
    rows: Tensor, structure: Structure | Sketched, active: Tensor | None = None, *, constant: int | None = None
) -> Tensor:
    """Return `Σ r rᵀ` over batch and shared axes of `[groups, batch, shared, d]`, or the diagonal or a sketch of it.

    Args:
        rows: `r`.
        structure: what of it is returned; of a sketch these are the products and the trace, as `Factor` keeps them.
        active: `[batch, shared]` bool, the rows that count, or `[groups, batch, shared]` for those of each group; None
            is all. What the others hold does not matter, even if it is not finite. Groups with rows of their own may
            all have one `r`.
        constant: 1 or 0, in a column that stands behind those of `r`, as for a bias; None: no such column. It is not
            made of many rows: that would copy all others too, and leave rows of an odd length, which are slower to
            multiply.
    """
    whole = rows.shape[-1] + (constant is not None)
    if active is None and structure is Structure.DENSE and _feature_major(rows):
        moment = rows.new_empty(len(rows), whole, whole)
        torch.sum(rows.mT @ rows, 1, out=moment[:, : rows.shape[-1], : rows.shape[-1]])  # without a copy by rows
        return moment if constant is None else _border(moment, rows.sum((1, 2)), rows[0, ..., 0].numel(), constant)
    if active is not None and active.dim() > 2 and on_host(active) and active[0].numel() * rows.shape[-1] > _IN_CACHE:
        # One by one: each group leaves out other rows, and to take them together is to copy and multiply zeros.
        each = zip(torch.split(rows.expand(len(active), *rows.shape[1:]), 1), active, strict=True)
        return torch.cat([gram(of_group, structure, mask, constant=constant) for of_group, mask in each])
    rows = rows.flatten(1, 2)
    count: int | Tensor = rows.shape[1]
    if active is not None:
        # What is left out costs nothing on the host; how much that is an accelerator would have to be asked.
        marked = active.flatten(-2)
        taken = on_host(marked) and marked.dim() == 1
        rows = rows[:, marked] if taken else torch.where(marked.unsqueeze(-1), rows, 0)
        count = number_of(active)
    if isinstance(structure, Sketched):
        directions = sketch_directions(whole, structure.columns, like=rows)
        if constant is None:
            along = rows @ directions
            return sketch_of(rows.mT @ along, _squares(rows))
        along, last = rows @ directions[:-1], directions[-1] * constant
        # Rows that do not count are zeros here, not fewer: the share of the constant is that of the others alone.
        sums = (along.sum(1, keepdim=True) + _by_group(count) * last) * constant
        products = torch.cat([rows.mT @ (along + last), sums], 1)
        return sketch_of(products, _squares(rows) + count * constant)
    if structure is Structure.DIAGONAL:
        squares = rows.square().sum(1)
        return squares if constant is None else torch.cat([squares, _filled(squares[:, :1], count * constant)], dim=-1)
    if constant is not None and isinstance(count, int) and rows.shape[2] <= rows.shape[1] and rows.numel() <= _FEW:
        rows, constant = F.pad(rows, (0, 1), value=constant), None
    moment = rows.new_empty(len(rows), whole, whole)
    symmetric_product(rows, out=moment[:, : rows.shape[-1], : rows.shape[-1]])
    return moment if constant is None else _border(moment, rows.sum(1), count, constant)


def sketch_of(products: Tensor, traces: Tensor) -> Tensor:
    """Put the products of a factor with its directions, `[groups, d, columns]`, and its trace `[groups]` side by side.

    Returns:
        `[groups, d·columns + 1]`, as `Factor` keeps it.
    """
    return torch.cat([products.flatten(1), traces.unsqueeze(1)], 1)


def product_along(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the outer products of two sets of rows, and tell how large a sum to expect of rows that are unrelated.

    Args:
        left: `[groups, batch, shared, out]`, of one group where all have the same.
        right: rows `[groups, batch, shared, k]`, to multiply by.

    Returns:
        The sum `[groups, out, k]`; and `√(Σ ‖left‖² ‖right‖² / rows)`, the sum over groups, `[]`, by which rounding
        errors are judged.
    """
    left, right = left.flatten(1, 2), right.flatten(1, 2)
    # In float64: of small gradients in float32 the squares are zero.
    sizes = [torch.linalg.vector_norm(side, dim=(1, 2), dtype=torch.float64) for side in (left, right)]
    return left.mT @ right, torch.linalg.vector_norm(sizes[0] * sizes[1]) / max(1, left.shape[1]) ** 0.5


def bordered(moment: Tensor, sums: Tensor, count: int | Tensor, constant: int) -> Tensor:
    """Return second moments of rows with a constant column behind them, `[groups, d + 1, d + 1]`.

    Args:
        moment: the second moments of the rows, `[groups, d, d]`.
        sums: the sums of the rows, `[groups, d]`.
        count: how many rows there are.
        constant: what stands in that column, 1 or 0.
    """
    return _border(F.pad(moment, (0, 1, 0, 1)), sums, count, constant)


def _border(moment: Tensor, sums: Tensor, count: int | Tensor, constant: int) -> Tensor:
    """Fill in the last row and column, in place."""
    moment[:, -1, :-1] = moment[:, :-1, -1] = sums * constant
    moment[:, -1, -1] = count * constant
    return moment


def _squares(rows: Tensor) -> Tensor:
    """Return `Σ r²` of `[groups, rows, d]`, `[groups]`."""
    if on_host(rows):
        return rows.square().sum((1, 2))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=(1, 2))  # without a copy of the rows
    return norms.square()


def _by_group(count: int | Tensor) -> int | Tensor:
    """Return the count of all rows, or those of each group, to multiply `[groups, 1, columns]` by."""
    return count.view(-1, 1, 1) if isinstance(count, Tensor) else count


def _filled(like: Tensor, number: float | Tensor) -> Tensor:
    return number.to(like).expand_as(like) if isinstance(number, Tensor) else torch.full_like(like, number)


def _feature_major(rows: Tensor) -> bool:
    """Return whether the rows of each example lie side by side as columns, and are worth a product each."""
    shared, width = rows.shape[2:]
    return shared > 1 and rows.stride(2) == 1 and rows.stride(3) >= shared and width <= shared


def examples_at_once(tensor: Tensor) -> int:
    """Return how many examples of `[batch, ...]` to work on at a time, for a host's cache to hold them; at least 1."""
    if not on_host(tensor) or tensor.numel() == 0:
        return max(1, len(tensor))
    return max(1, _IN_CACHE * len(tensor) // tensor.numel())


def channel_moments(features: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return means and variances of the channels of `[batch, channels, *space]`: `[channels]`, at least in `dtype`.

    On a host as sums over one example and channel at a time, which torch makes several times as fast as its own moments
    of channels. The mean is taken off before the square: however far from zero, no digits are lost.
    """
    dtype = torch.promote_types(features.dtype, dtype)
    if features.is_cuda and dtype is torch.float32:  # in one pass, of a narrow dtype as it is  # pragma: cuda
        mean, inverse = torch.batch_norm_stats(features, 0.0)
        return mean, inverse.square().reciprocal()
    if not on_host(features):
        variance, mean = torch.var_mean(features.to(dtype), (0, *range(2, features.dim())), correction=0)
        return mean, variance
    if features.dim() == 2:
        features = features.unsqueeze(-1)
    space = tuple(range(2, features.dim()))
    count = features.numel() // features.shape[1]
    mean = features.sum(space, dtype=dtype).sum(0) / count
    shift, squares = mean.view(-1, *[1] * len(space)), torch.zeros_like(mean)
    for some in torch.split(features, examples_at_once(features)):
        squares += torch.linalg.vector_norm(some - shift, dim=space).square_().sum(0)
    return mean, squares / count


def active_rows(gradients: Tensor, *, by_group: bool = False) -> Tensor:
    """Return which rows of `[groups, batch, shared, d]` are not exactly zero in every group, `[batch, shared]` bool.

    Args:
        gradients: the rows.
        by_group: tells it of each group apart, `[groups, batch, shared]`.
    """
    if on_host(gradients) and gradients.shape[-1] > 1 and gradients.numel() > 0:
        # In most layers one feature shows already that all are.
        active = (gradients if by_group else gradients[0])[..., 0] != 0
        if bool(active.all()):
            return active
    if not on_host(gradients):  # the fewest operators; a NaN is not zero
        active = gradients.any(-1)
        return active if by_group else active.any(0)
    # By far the fastest way to ask a host.
    largest = gradients.abs().amax(-1)
    return (largest if by_group else largest.amax(0)) != 0


def mean_over_shared(rows: Tensor, active: Tensor | None) -> Tensor:
    """Return the means of the rows that `active` marks, `[groups, batch, 1, d]`; of none it is 0.

    Args:
        rows: `[groups, batch, shared, d]`.
        active: the mask of the rows that count, as for `gram`.
    """
    if active is None:
        return rows.mean(2, keepdim=True)
    marked = active.unsqueeze(-1)
    return torch.where(marked, rows, 0).sum(2, keepdim=True) / marked.sum(-2, keepdim=True).clamp(min=1)


def without_ragged(tensor: T) -> T:
    """Return a dense tensor: of a nested one `[batch, longest, ...]`, whose padding by zeros counts nothing."""
    if tensor is None or not (tensor.is_nested or tensor.layout is not torch.strided):
        return tensor
    dense: T = torch.nested.to_padded_tensor(tensor, 0) if tensor.is_nested else tensor.to_dense()
    return dense


def on_host(tensor: Tensor) -> bool:
    """Return whether reading `tensor` waits for no accelerator."""
    return tensor.device.type == "cpu"


def total(numbers: Tensor) -> int | Tensor:
    """Return `Σ numbers`: at once on the host, otherwise as a device scalar `[]`."""
    summed = numbers.sum()
    return int(summed) if on_host(summed) else summed


def number_of(active: Tensor) -> int | Tensor:
    """Count the rows that `active` marks: of `[batch, shared]` as `total` does, otherwise of each group, `[groups]`."""
    return active.sum((1, 2)) if active.dim() > 2 else total(active)


def weighed(count: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """Return `count * weight` of a count that the device has, at least as exact as moments of `dtype` are."""
    return count.to(at_least_float32(dtype)) * weight


def batched(tensor: Tensor, unbatched_ndim: int) -> Tensor:
    """Return `tensor` with a batch dimension, which it lacks if it has `unbatched_ndim` dimensions."""
    return tensor.unsqueeze(0) if tensor.dim() == unbatched_ndim else tensor


def linear_rows(tensor: Tensor) -> Tensor:
    """Return `[d]`, `[batch, d]` or `[batch, *shared, d]` as `[1, batch, shared, d]`."""
    if tensor.dim() == 1:
        return tensor.view(1, 1, 1, -1)
    return tensor.reshape(1, tensor.shape[0], math.prod(tensor.shape[1:-1]), tensor.shape[-1])


def channel_rows(tensor: Tensor, groups: int) -> Tensor:
    """Return `[batch, channels, *space]` as `[groups, batch, shared, channels/groups]`."""
    batch, channels = tensor.shape[:2]
    shared = math.prod(tensor.shape[2:])
    return tensor.reshape(batch, groups, channels // groups, shared).permute(1, 0, 3, 2)


def sum_of_squares(a: Tensor, g: Tensor, a_basis: Tensor | None, g_basis: Tensor | None) -> Tensor:
    """Return `Σ_n (U_Gᵀ (Σ_r g_nr a_nrᵀ) U_A)²`, element by element, `[groups, out, in]`.

    With one position this is a product of the squares. With R the square could be written out as `R(R + 1)/2` such
    products, which is never fewer operations than to make the matrix of each example, a part of the batch at a time:
    of rows that are in the eigenbasis or, where that is fewer operations, of rows as they are, to turn the matrix.

    Args:
        a: `[groups, batch, shared, in]`, of one group where all read the same.
        g: `[groups, batch, shared, out]`.
        a_basis: eigenvectors as columns, `[groups, in, in]` or of one group; None for the standard basis.
        g_basis: eigenvectors over `out`, in the same form.
    """
    groups, batch, shared = max(len(a), len(g)), a.shape[1], a.shape[2]
    in_dim, out_dim = a.shape[-1], g.shape[-1]
    if shared == 1:
        squares = (turned(rows, basis).squeeze(2).square() for rows, basis in ((g, g_basis), (a, a_basis)))
        turned_g, turned_a = squares
        return (turned_g.mT @ turned_a).expand(groups, out_dim, in_dim)
    # Per example: rows of a, which may be those of all groups, and of g; or the matrix of each group.
    by_rows = by_matrix = 0
    for rows, basis in ((a, a_basis), (g, g_basis)):
        if basis is not None:
            by_rows += max(len(rows), len(basis)) * shared * rows.shape[-1] ** 2
            by_matrix += groups * out_dim * in_dim * rows.shape[-1]
    rows_first = by_rows <= by_matrix
    total = a.new_zeros(groups, out_dim, in_dim)
    step = max(1, _CHUNK // max(1, groups * out_dim * in_dim))
    for start in range(0, batch, step):
        some_a, some_g = (rows[:, start : start + step] for rows in (a, g))
        if rows_first:
            some_a, some_g = turned(some_a, a_basis), turned(some_g, g_basis)
        matrices = some_g.mT @ some_a  # [groups, examples, out, in]
        if not rows_first:
            matrices = turned(turned(matrices.mT, g_basis).mT, a_basis)
        total += matrices.square().sum(1)
    return total


def turned(rows: Tensor, basis: Tensor | None) -> Tensor:
    """Return `[groups, n, rows, d]` in the basis `[groups, d, d]`."""
    if basis is None:
        return rows
    # As one product for each group: a fourth dimension would have the basis copied for every example.
    product = rows.flatten(1, 2) @ basis
    return product.view(len(product), *rows.shape[1:3], product.shape[-1])
