"""The gradients of a block's parameters become one matrix, go through the inverse, and back to the parameters.

The matrix is `[groups, out, in]`, as inverses see it: for a factor that is cut into diagonal blocks, each of these
counts as a group (`LayerSpec.by_blocks`).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.factors.block_diagonal import matrix_by_blocks, matrix_of_layer
from kfac_optim.inverses.state import InverseState
from kfac_optim.layers.base import LayerAdapter

# Elements of a weight below which a launch takes longer than its products, and a copy of the inverses less (128 × 128;
# one CPU core, torch 2.13).
_SMALL = 2**14


def regularised(param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Return `∇h`: the gradient, plus that of `½ η ‖θ‖²` if weight decay is part of the curvature.

    `.grad` itself is returned if nothing is added, so the result must not be changed.
    """
    assert param.grad is not None
    eta = l2(group)
    return param.grad.add(param.detach(), alpha=-eta if group["maximize"] else eta) if eta else param.grad


def has_gradient(block: KFACBlock) -> bool:
    """Return whether any parameter of the block has a gradient."""
    return any(param.grad is not None for param in block.params)


def gradients(block: KFACBlock) -> list[Tensor]:
    """Return `∇h` of each parameter, not to be changed; zeros for a parameter without a gradient."""
    return [
        torch.zeros_like(param) if param.grad is None else regularised(param, group)
        for param, group in zip(block.params, block.groups, strict=True)
    ]


def to_matrix(block: KFACBlock, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return tensors shaped like the parameters as one matrix; it may share memory with a lone tensor.

    Args:
        block: the block.
        tensors: one for each parameter.
        dtype: the dtype of the matrix; None is `block.wide_dtype`.
    """
    dtype = dtype or block.wide_dtype
    packed = block.adapter.pack(block.spec, [tensor.to(dtype) for tensor in tensors])
    return matrix_by_blocks(packed, block.spec)


def precondition(block: KFACBlock, grads: Sequence[Tensor]) -> Tensor:
    """Return the preconditioned `gradients(block)` as a matrix, in the dtype in which the inverse is applied."""
    matrix = to_matrix(block, grads, block.inverse.applied_dtype(block.state))
    return block.inverse.apply(block.state, matrix, block.damping)


def precondition_all(blocks: Sequence[KFACBlock], grads: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return the preconditioned gradients of all blocks, in the shapes and memory layouts of `grads`.

    Small blocks of equal shapes go through one batch of products, since to launch them takes longer than to compute
    them. The others come one after the other, so that the matrices of one are gone before those of the next are made.
    """
    found: list[Sequence[Tensor]] = [()] * len(blocks)
    equal: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, (block, of_block) in enumerate(zip(blocks, grads, strict=True)):
        equal[_shape(block, of_block) or index].append(index)
    for members in equal.values():
        state = None
        if len(members) > 1:
            first, *others = (blocks[index].state for index in members)
            state = first.stacked(others)
        if state is None:
            for index in members:
                found[index] = to_params(blocks[index], precondition(blocks[index], grads[index]), grads[index])
        else:
            together = _precondition_stack(blocks[members[0]], state, [grads[index] for index in members])
            for index, parts in zip(members, together, strict=True):
                found[index] = parts
    return found


def _shape(block: KFACBlock, grads: Sequence[Tensor]) -> Hashable | None:
    """Return what blocks share whose gradients may be stacked; None for a block that goes alone."""
    spec = block.spec
    small = spec.groups == 1 and spec.in_dim * spec.out_dim <= _SMALL
    whole = spec.blocks(0) == spec.blocks(1) == 1 and _packs_columns(type(block.adapter))
    if not (small and whole and all(grad.is_contiguous() for grad in grads)):
        return None
    return block.inverse, block.damping, spec.structure, *((grad.shape, grad.dtype, grad.device) for grad in grads)


@cache
def _packs_columns(adapter: type[LayerAdapter[Any]]) -> bool:
    """Return whether the matrix is the columns of the first parameter, then those of the next."""
    return adapter.pack is LayerAdapter.pack and adapter.unpack is LayerAdapter.unpack


def _precondition_stack(
    block: KFACBlock, state: InverseState, grads: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, ...]]:
    """Precondition the gradients of equal blocks as those of one with so many groups.

    Args:
        block: the first of the blocks.
        state: of all of them, stacked.
        grads: of each block, one for each parameter.

    Returns:
        The parts of each block, views of one tensor for each parameter.
    """
    count, out_dim = len(grads), block.spec.out_dim
    dtype = block.inverse.applied_dtype(block.state) or block.wide_dtype
    stacks = [torch.stack(of_param) for of_param in zip(*grads, strict=True)]
    columns = [stack.to(dtype).view(count, out_dim, -1) for stack in stacks]
    matrix = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
    matrix = block.inverse.apply(state, matrix, block.damping).to(block.wide_dtype)
    parts = torch.split(matrix, [each.shape[-1] for each in columns], -1)
    return zip(
        *(part.contiguous().view(stack.shape).unbind() for part, stack in zip(parts, stacks, strict=True)), strict=True
    )


def to_params(block: KFACBlock, matrix: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a matrix that belong to each parameter, in `block.wide_dtype`.

    Args:
        block: the block.
        matrix: what `precondition` returned. A part may share its memory, so nobody else may use it afterwards.
        like: the shape and memory layout of each part; what is to be multiplied element by element should be alike.
    """
    parts = block.adapter.unpack(block.spec, matrix_of_layer(matrix, block.spec))
    dtype = block.wide_dtype
    return [laid_out(part.reshape(each.shape), each, dtype) for part, each in zip(parts, like, strict=True)]


def laid_out(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in the memory layout of `like`, of the same shape, and in `dtype`; itself if it is so already."""
    if tensor.dtype == dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=dtype).copy_(tensor)
