"""The gradients of a block's parameters become one matrix, go through the inverse, and back to the parameters.

The matrix is `[groups, out, in]`, as inverses see it: for a factor that is cut into diagonal blocks, each of these
counts as a group (`LayerSpec.by_blocks`).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, l2
from kfac_optim.factors.block_diagonal import matrix_by_blocks, matrix_of_layer
from kfac_optim.inverses.state import InverseState
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.utils.autograd import version
from kfac_optim.utils.sharded_params import local

# Elements of a weight below which a launch takes longer than its products (128 × 128; one CPU core, torch 2.13), and of
# its inverses, which stacks hold a second time.
_SMALL = 2**14
_SMALL_INVERSE = 2**16

# The same on accelerators: with the thin products of `LowRank` for each layer of GPT-2 the host took 42 ms for a step
# that had work of 7 ms for the device (an H200, torch 2.11).
_SMALL_THERE = 2**24
_SMALL_INVERSE_THERE = 2**20

# Elements of the weights that are put into one stack at most: 256 MiB of float32.
_TOGETHER = 2**26


def regularised(param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Return `∇h`: the gradient, plus that of `½ η ‖θ‖²` if weight decay is part of the curvature.

    `.grad` itself is returned if nothing is added, so the result must not be changed.
    """
    assert param.grad is not None
    eta = l2(group)
    return param.grad.add(param.detach(), alpha=-eta if group["maximize"] else eta) if eta else param.grad


def has_gradient(block: KFACBlock) -> bool:
    """Return whether any parameter of the block has a gradient."""
    return any([param.grad is not None for param in block.params])  # noqa: C419 (a generator takes twice as long)


def is_used(block: KFACBlock) -> bool:
    """Return whether any parameter of the block has a gradient that is not zero here; looking synchronises."""
    return any(says_something(param.grad) for param in block.params)


def says_something(gradient: Tensor | None) -> bool:
    """Return whether there is a gradient that is not zero throughout. Looking synchronises."""
    return gradient is not None and (gradient.is_meta or bool(local(gradient).any()))


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


def precondition_jointly(blocks: Sequence[KFACBlock], grads: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return the preconditioned gradients of blocks whose inverse looks at all of them at once, in their shapes."""
    matrices = [to_matrix(block, of_block) for block, of_block in zip(blocks, grads, strict=True)]
    states, dampings = [block.state for block in blocks], [block.damping for block in blocks]
    decays = None
    if any(l2(group) for block in blocks for group in block.groups):
        decays = [
            to_matrix(block, [_decay(*each) for each in zip(block.params, block.groups, strict=True)])
            for block in blocks
        ]
    found = blocks[0].inverse.apply_jointly(states, matrices, dampings, decays)
    return [to_params(*each) for each in zip(blocks, found, grads, strict=True)]


def _decay(param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Return what `regularised` adds to a gradient; zeros where there is none."""
    if param.grad is None:
        return torch.zeros_like(param)
    return param.detach() * (-l2(group) if group["maximize"] else l2(group))


def acceleration(
    blocks: Sequence[KFACBlock],
    velocities: Sequence[Sequence[Tensor]],
    change: Mapping[tuple[int, int], Tensor],
    length: float,
) -> list[Sequence[Tensor]] | None:
    """Return how a step of `precondition_jointly` bends, in the shapes of the parameters (`Inverse.acceleration`)."""
    matrices = [to_matrix(block, of_block) for block, of_block in zip(blocks, velocities, strict=True)]
    found = blocks[0].inverse.acceleration([block.state for block in blocks], matrices, change, length)
    return None if found is None else [to_params(*each) for each in zip(blocks, found, velocities, strict=True)]


class Stacks:
    """Preconditions small blocks of equal shapes in one batch of products, since their launches take longer.

    What their inverses are stacked into is kept from step to step, until one of them has changed. It is made of what
    the states hold, and so in no checkpoint, pickle or copy.

    Attributes:
        goes_alone: tells by its first parameter that several ranks make the update of a block, each with other blocks
            beside it: it goes alone, as the bits of a product depend on the batch that it is in.
    """

    def __init__(self) -> None:
        self.goes_alone: Callable[[nn.Parameter], bool] = lambda _: False
        # Blocks may be replaced by others, and their states go with them.
        self._kinds = WeakKeyDictionary[KFACBlock, tuple[InverseState, int | None]]()
        self._numbers: dict[Hashable, int] = {}  # of kinds, which take long to hash
        self._stacks = WeakKeyDictionary[KFACBlock, _Stack]()  # by the first of the blocks

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Return the preconditioned gradients of all blocks, in the shapes and memory layouts of `grads`.

        Blocks that are stacked with no other come one after the other, so that the matrices of one are gone before
        those of the next are made.
        """
        found: list[Sequence[Tensor]] = [()] * len(blocks)
        equal: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, (block, of_block) in enumerate(zip(blocks, grads, strict=True)):
            if (number := self._number(block)) is not None:
                equal[number, block.damping].append(index)
            else:
                found[index] = _precondition_alone(block, of_block)
        before, self._stacks = self._stacks, WeakKeyDictionary()
        for members in _portions(equal.values(), blocks):
            first = blocks[members[0]]
            state: InverseState | None = first.state
            if len(members) > 1:
                stack = self._stacks[first] = _renewed(before.get(first), [blocks[index].state for index in members])
                state = stack.state
            if state is None:
                for index in members:
                    found[index] = _precondition_alone(blocks[index], grads[index])
            else:
                by_param = list(zip(*(grads[index] for index in members), strict=True))
                columns = [
                    _all_laid_out(parts, alike, first.wide_dtype)
                    for parts, alike in zip(_precondition_stack(first, state, by_param), by_param, strict=True)
                ]
                for index, parts in zip(members, zip(*columns, strict=True), strict=True):
                    found[index] = parts
        return found

    def alike(
        self, blocks: Sequence[KFACBlock], tensors: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[list[int], InverseState, Tensor]]:
        """Put together what goes through an inverse in one batch, for inverses that need no `λ`.

        Args:
            blocks: the same at every step, or stacks are made anew.
            tensors: the tensors of each block, one for each parameter.

        Yields:
            The numbers of some blocks, a state for all of them, and their matrices, `[groups, out, in]` of a single one
            and `[blocks, out, in]` of several, which `apart` takes apart again.
        """
        equal: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, (block, parts) in enumerate(zip(blocks, tensors, strict=True)):
            number = self._number(block) if _is_one_matrix(block) else None
            equal[index if number is None else (number, parts[0].dtype)].append(index)
        for members in _portions(equal.values(), blocks):
            first, stack = blocks[members[0]], None
            if len(members) > 1:
                stack = _renewed(self._stacks.get(first), [blocks[index].state for index in members])
                self._stacks[first] = stack
            if stack is None or stack.state is None:
                for index in members:
                    yield [index], blocks[index].state, to_matrix(blocks[index], tensors[index])
            else:
                by_param = list(zip(*(tensors[index] for index in members), strict=True))
                yield members, stack.state, _together(first, by_param, first.wide_dtype)

    def _number(self, block: KFACBlock) -> int | None:
        """Return the number of a block's kind, which others may share; None for a block that goes alone."""
        if self.goes_alone(block.params[0]):
            return None
        known = self._kinds.get(block)
        if known is None or known[0] is not block.state:  # a new layout, dtype or device has a new state
            kind = _kind(block)
            number = None if kind is None else self._numbers.setdefault(kind, len(self._numbers) + 1)
            known = self._kinds[block] = block.state, number
        return known[1]


class _Stack(NamedTuple):
    """Holds a stacked state, and of what it was made."""

    state: InverseState | None
    tensors: list[Tensor]
    versions: list[int]


def _renewed(stack: _Stack | None, states: Sequence[InverseState]) -> _Stack:
    """Return the stack of some states: the one that was made before, if nothing in it has changed since."""
    tensors = [tensor for state in states for tensor in state.to_stack()]
    versions = [version(tensor) for tensor in tensors]
    if stack is not None and versions and stack.versions == versions and all(map(is_, stack.tensors, tensors)):
        return stack
    return _Stack(states[0].stacked(states[1:]), tensors, versions)


def _kind(block: KFACBlock) -> Hashable | None:
    """Return what of a block itself decides on the blocks that it may be stacked with; None if it goes alone."""
    if not (_is_small(block) and (_is_one_matrix(block) or block.adapter.packs_several)):
        return None
    return block.inverse, block.spec.structure, block.home, *(param.shape for param in block.params)


def _is_small(block: KFACBlock) -> bool:
    """Return whether the products of a block take no longer than their launches."""
    spec, (_, device) = block.spec, block.home
    weight = spec.groups * spec.in_dim * spec.out_dim
    if device.type == "cpu":
        return weight <= _SMALL and sum(factor.numel for factor in spec.factors()) <= _SMALL_INVERSE
    return weight <= _SMALL_THERE and sum(map(Tensor.numel, block.state.to_stack())) <= _SMALL_INVERSE_THERE


def _portions(equal: Iterable[list[int]], blocks: Sequence[KFACBlock]) -> Iterator[list[int]]:
    """Divide the numbers of equal blocks, so that their matrices are not too large to be copied into one tensor."""
    for members in equal:
        spec = blocks[members[0]].spec
        most = max(1, _TOGETHER // (spec.groups * spec.in_dim * spec.out_dim))
        for start in range(0, len(members), most):
            yield members[start : start + most]


def _is_one_matrix(block: KFACBlock) -> bool:
    """Return whether a block's matrix is that of one group, the columns of its parameters side by side."""
    spec = block.spec
    return spec.groups == spec.blocks(0) == spec.blocks(1) == 1 and _packs_columns(type(block.adapter))


@cache
def _packs_columns(adapter: type[LayerAdapter[Any]]) -> bool:
    """Return whether the matrix is the columns of the first parameter, then those of the next."""
    return adapter.pack is LayerAdapter.pack and adapter.unpack is LayerAdapter.unpack


def _precondition_alone(block: KFACBlock, grads: Sequence[Tensor]) -> list[Tensor]:
    """Precondition the gradients of one block."""
    if len(grads) > 1 and _is_one_matrix(block):
        columns = [grad.reshape(1, block.spec.out_dim, -1) for grad in grads]
        found = block.inverse.apply_to_columns(block.state, columns, block.damping)
        if found is not None:
            dtype = block.wide_dtype
            return [laid_out(part.view(each.shape), each, dtype) for part, each in zip(found, grads, strict=True)]
    return to_params(block, precondition(block, grads), grads)


def _precondition_stack(
    block: KFACBlock, state: InverseState, grads: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Precondition the gradients of equal blocks as those of one with so many groups.

    Args:
        block: the first of the blocks.
        state: the state of all of them, stacked.
        grads: the gradients of each parameter, one for each block.

    Returns:
        The parts of each parameter, as `apart` gives them.
    """
    matrix = _together(block, grads, block.inverse.applied_dtype(block.state) or block.wide_dtype)
    found = block.inverse.apply(state, matrix, block.damping).to(block.wide_dtype)
    like = [of_param[0] for of_param in grads]
    if _is_one_matrix(block):
        return apart(found, like)
    parts = zip(block.adapter.unpack(block.spec, found), like, strict=True)
    return [part.reshape(-1, *each.shape).contiguous().unbind() for part, each in parts]


def _together(block: KFACBlock, tensors: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> Tensor:
    """Return the matrices of equal blocks as one tensor, `[blocks · groups, out, in]`.

    Args:
        block: the first of the blocks.
        tensors: the tensors of each parameter, one for each block.
        dtype: the dtype of the result.
    """
    stacks = [torch.stack(of_param).to(dtype) for of_param in tensors]
    if not _is_one_matrix(block):
        return block.adapter.pack(block.spec, stacks)
    columns = [stack.reshape(len(stack), block.spec.out_dim, -1) for stack in stacks]
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def apart(matrix: Tensor, like: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return, of each parameter, the parts of several blocks whose matrices lie in one tensor; they are views of one.

    Args:
        matrix: `[blocks, out, in]`.
        like: the shapes of the parts.
    """
    widths = [each.numel() // matrix.shape[1] for each in like]
    parts = zip(matrix.split_with_sizes(widths, -1), like, strict=True)
    return [part.contiguous().view(-1, *each.shape).unbind() for part, each in parts]


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


def _all_laid_out(tensors: Sequence[Tensor], like: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Do what `laid_out` does to views of one tensor, which are alike: most often there is nothing to do."""
    if tensors[0].dtype == dtype and list(map(Tensor.stride, like)).count(tensors[0].stride()) == len(like):
        return tensors
    return [laid_out(tensor, each, dtype) for tensor, each in zip(tensors, like, strict=True)]


def laid_out(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in the memory layout of `like`, of the same shape, and in `dtype`; itself if it is so already."""
    if tensor.dtype == dtype:
        if tensor.stride() == like.stride():
            return tensor
        along = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
        if all(size == 1 or ours == theirs for size, ours, theirs in along):  # a kernel of 1 × 1, channels last
            return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like, dtype=dtype).copy_(tensor)
