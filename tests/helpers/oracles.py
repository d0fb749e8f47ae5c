"""Definitions and dense mathematics to compare with, written without the library.

Rows are `[groups, batch, positions, columns]`; a bias is the last column. A gradient matrix `[out, in]` is
vectorised row by row, so that the curvature of one group is `kron(G, A)`.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from kfac_optim import Structure, WeightSharing

MaybeFactor = Tensor | None


def assert_same(
    actual: Tensor | Sequence[MaybeFactor] | None,
    expected: Tensor | Sequence[MaybeFactor] | None,
    *,
    rtol: float = 1e-9,
) -> None:
    """Equal shapes and dtypes, and an error below `rtol` of the largest element."""
    if isinstance(actual, (tuple, list)):
        assert isinstance(expected, (tuple, list))
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_same(left, right, rtol=rtol)
    elif expected is None:
        assert actual is None
    else:
        assert isinstance(actual, Tensor)
        assert isinstance(expected, Tensor)
        actual, expected = actual.detach(), expected.detach()
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(actual, expected, rtol=0, atol=rtol * largest + 1e-300)


# -- rows of a layer ---------------------------------------------------------------------------------------------


def with_ones(rows: Tensor, bias: bool) -> Tensor:
    return F.pad(rows, (0, 1), value=1.0) if bias else rows


def linear_rows(tensor: Tensor) -> Tensor:
    """First dimension the batch, last the columns, all between positions; a lone vector is one row."""
    if tensor.dim() == 1:
        tensor = tensor[None]
    examples = [example.reshape(-1, tensor.shape[-1]) for example in tensor]
    return torch.stack(examples)[None]


def conv_rows(module: nn.Module, layer_input: Tensor) -> Tensor:
    """The patch that each output position sees, gathered position by position; no bias column."""
    ndim = len(module.kernel_size)
    batched = layer_input if layer_input.dim() == ndim + 2 else layer_input[None]
    axes = [_taps(module, axis, batched.shape[2 + axis]) for axis in range(ndim)]
    patches = []
    for position in itertools.product(*(range(len(index)) for index, _ in axes)):
        patch = batched
        for axis, at in enumerate(position):
            index, inside = axes[axis][0][at], axes[axis][1][at]
            shape = [len(inside) if dim == 2 + axis else 1 for dim in range(patch.dim())]
            patch = patch.index_select(2 + axis, index) * inside.to(patch).reshape(shape)
        patches.append(patch.reshape(len(batched), module.groups, -1))
    return torch.stack(patches, dim=2).transpose(0, 1)


def conv_gradient_rows(module: nn.Module, gradient: Tensor) -> Tensor:
    ndim = len(module.kernel_size)
    batched = gradient if gradient.dim() == ndim + 2 else gradient[None]
    by_group = torch.stack(batched.chunk(module.groups, dim=1))
    return by_group.flatten(3).transpose(2, 3)


def _taps(module: nn.Module, axis: int, size: int) -> tuple[Tensor, Tensor]:
    """Input index that each (position, kernel offset) reads along one axis, and whether it is not a padded zero."""
    kernel, stride, dilation = module.kernel_size[axis], module.stride[axis], module.dilation[axis]
    reach = dilation * (kernel - 1)
    if module.padding == "same":
        before, after = reach // 2, reach - reach // 2
    elif module.padding == "valid":
        before, after = 0, 0
    else:
        before = after = module.padding[axis]
    starts = range(0, size + before + after - reach, stride)
    read = torch.tensor([[start + dilation * offset - before for offset in range(kernel)] for start in starts])
    inside = torch.ones_like(read, dtype=torch.bool)
    if module.padding_mode == "zeros":
        inside = (read >= 0) & (read < size)
        read = read.clamp(0, size - 1)
    elif module.padding_mode == "replicate":
        read = read.clamp(0, size - 1)
    elif module.padding_mode == "circular":
        read = read % size
    else:
        read = read.abs()
        read = torch.where(read >= size, 2 * (size - 1) - read, read)
    return read, inside


# -- factors -----------------------------------------------------------------------------------------------------


def factors(
    a: Tensor,
    g: Tensor,
    *,
    terms: float,
    bias: bool,
    sharing: WeightSharing = WeightSharing.EXPAND,
    structure: tuple[Structure, Structure] = (Structure.DENSE, Structure.DENSE),
) -> tuple[MaybeFactor, MaybeFactor]:
    """`A` and `G` of input rows without the bias column and gradient rows, by their definitions."""
    groups, batch, positions, _ = a.shape
    a = with_ones(a, bias)
    sums = []
    for group in range(groups):
        if sharing is WeightSharing.EXPAND:
            vectors = [(a[group, n, r], g[group, n, r]) for n in range(batch) for r in range(positions)]
        else:
            vectors = [(a[group, n].sum(0) / positions, g[group, n].sum(0)) for n in range(batch)]
        rows = len(vectors)
        big_a = sum(torch.outer(left, left) for left, _ in vectors) / rows
        big_g = sum(torch.outer(right, right) for _, right in vectors) * terms
        sums.append((big_a, big_g))
    dense = (torch.stack([pair[0] for pair in sums]), torch.stack([pair[1] for pair in sums]))
    kept = [_keep(factor, kind) for factor, kind in zip(dense, structure, strict=True)]
    return kept[0], kept[1]


def _keep(factor: Tensor, structure: Structure) -> MaybeFactor:
    if structure is Structure.IDENTITY:
        return None
    return factor if structure is Structure.DENSE else factor.diagonal(dim1=1, dim2=2)


def gradient_matrix(module: nn.Module, tensors: dict[str, Tensor] | None = None) -> Tensor:
    """The gradient of a layer as `[groups, out, in]`, the bias last; or `tensors` in its place, by parameter name."""
    if tensors is None:
        tensors = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    groups = getattr(module, "groups", 1)
    matrix = torch.stack(tensors["weight"].flatten(1).chunk(groups))
    if "bias" in tensors:
        matrix = torch.cat([matrix, torch.stack(tensors["bias"].chunk(groups)).unsqueeze(-1)], dim=-1)
    return matrix


# -- curvature ---------------------------------------------------------------------------------------------------


def dense(factor: MaybeFactor, groups: int, dim: int) -> Tensor:
    """A factor of any structure as `[groups, dim, dim]`."""
    if factor is None:
        return torch.eye(dim).expand(groups, dim, dim)
    return factor if factor.dim() == 3 else torch.diag_embed(factor)


def kronecker(a: Tensor, g: Tensor) -> Tensor:
    """`[groups, out·in, out·in]`."""
    return torch.stack([torch.kron(right, left) for left, right in zip(a, g, strict=True)])


def damped_kronecker(a: MaybeFactor, g: MaybeFactor, grad: Tensor, damping: float, *, balanced: bool = True) -> Tensor:
    """Damped curvature of one block, `[groups, out·in, out·in]`.

    Two matrices of equal mean eigenvalue after scaling get `√λ` each; a scalar (1×1 or an identity) only
    multiplies, and `λ` is added to the product. An `A` that serves all groups is balanced with all of them at once.
    Where nothing is balanced they get `√λ` each as they are.
    """
    groups, rows, columns = grad.shape
    blocks = []
    shared = a is not None and len(a) < groups
    a = a.expand(groups, *a.shape[1:]) if shared else a
    mean_of_all = dense(g, groups, rows).diagonal(dim1=1, dim2=2).mean()
    for left, right in zip(dense(a, groups, columns), dense(g, groups, rows), strict=True):
        if a is None or g is None or columns == 1 or rows == 1:
            blocks.append(torch.kron(right, left) + damping * torch.eye(rows * columns))
            continue
        mean_left, mean_right = left.trace() / columns, mean_of_all if shared else right.trace() / rows
        scaled = balanced and mean_left > 0 and mean_right > 0
        pi = (mean_left / mean_right).sqrt() if scaled else torch.ones(())
        root = damping**0.5
        blocks.append(torch.kron(right + root / pi * torch.eye(rows), left + root * pi * torch.eye(columns)))
    return torch.stack(blocks)


def solve(curvature: Tensor, grad: Tensor) -> Tensor:
    """`curvature⁻¹ vec(grad)`, shaped like `grad` `[groups, out, in]`."""
    return torch.linalg.solve(curvature, grad.flatten(1)).reshape(grad.shape)


def ggn(model: nn.Module, layer: str, model_input: Tensor, to_terms: Callable[[Tensor], Tensor]) -> Tensor:
    """Generalised Gauss-Newton matrix of `mean over terms of ½‖term‖²` in one ungrouped layer's matrix.

    Args:
        model: in which `layer` is.
        layer: its name.
        model_input: of the model.
        to_terms: the model's output as `[terms, outputs]`.
    """
    module = model.get_submodule(layer)
    prefix = f"{layer}." if layer else ""
    params = {prefix + name: param.detach() for name, param in module.named_parameters()}

    def outputs(params: dict[str, Tensor]) -> Tensor:
        return to_terms(functional_call(model, params, (model_input,)))

    jacobians = jacrev(outputs)(params)
    terms, count = outputs(params).shape
    parts = [jacobians[prefix + "weight"].reshape(terms * count, module.weight.shape[0], -1)]
    if prefix + "bias" in jacobians:
        parts.append(jacobians[prefix + "bias"].reshape(terms * count, -1, 1))
    rows = torch.cat(parts, dim=-1).flatten(1)
    return rows.mT @ rows / terms
