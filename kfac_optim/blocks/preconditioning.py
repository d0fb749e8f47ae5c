"""The gradients of a block's parameters become one matrix, go through the inverse, and back to the parameters.

The matrix is `[groups, out, in]`, as inverses see it: for a factor that is cut into diagonal blocks, each of these
counts as a group (`LayerSpec.by_blocks`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.factors.block_diagonal import matrix_by_blocks, matrix_of_layer


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
