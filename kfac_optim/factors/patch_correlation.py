"""Second moments of patches without the patches: from correlations of feature maps with themselves.

Two elements i and j of the kernel meet at the distance j - i, wherever the kernel stands. So the blocks of
`Σ_p patch_p patch_pᵀ`, one for each (i, j), are correlations `Σ_u x[u] x[u + j - i]ᵀ` of the features with themselves:
of the 81 blocks of a 3×3 kernel 13 tell all, and a weight gradient of a convolution finds them. That sums over all u;
the products of those that the kernel's element i never stands on, at the borders, are subtracted.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from kfac_optim.factors.patches import Patches, pad

T = TypeVar("T")

# Time of an unfolded element, of an element that correlations read, of one of the result, of one product at the borders
# and of what is left, in multiply-adds.
_UNFOLD, _READ, _WRITE, _PRODUCT, _START = 100, 200, 250, 4e6, 12e6

# Positions whose products one weight gradient adds up: kernels for that add one after the other, so that the error of
# float32 grows with their number.
_AT_ONCE = 2**13


def correlated_gram(patches: Patches) -> Tensor:
    """Return `Σ_p patch_p patch_pᵀ` over all examples and positions, `[groups, width, width]`.

    Equal to the product of `patches.rows()` with themselves but for rounding: in float32 to within 5e-6 of the largest
    element, where that product errs by 1e-6.

    Args:
        patches: `can_correlate` must hold.
    """
    phases = _by_phases(patches)
    blocks = _all_correlations(phases.patches)
    for axis, size in enumerate(phases.patches.kernel):
        if size > 1:
            _subtract_borders(blocks, phases.patches, axis)
    ndim, width = patches.ndim, phases.patches.width
    rows, columns = (range(start, start + ndim) for start in (1, 1 + ndim))
    matrix = blocks.permute(0, 1 + 2 * ndim, *rows, 2 + 2 * ndim, *columns).reshape(patches.groups, width, width)
    matrix = matrix.to(patches.features.dtype)
    return phases.columns(phases.columns(matrix).mT).mT


def correlation_pays(patches: Patches) -> bool:
    """Return whether `correlated_gram` is the cheaper form. Shapes alone decide.

    Both forms are counted in multiply-adds, and what else they do in as many as take its time; a fifth must be saved.
    `correlated_gram` / unfolding and multiplying, in time of one thread of a CPU with AVX-512 (float32, torch 2.13, Zen
    4) and as counted; padding keeps the size where nothing is said:

    | batch, channels, size, kernel | found | counted | | found | counted |
    |---|---|---|---|---|---|
    | 128, 16, 32², 3² | 0.11 | 0.22 | 128, 16, 32², 3², stride 2 | 1.25 | 1.36 |
    | 128, 32, 16², 3² | 0.15 | 0.23 | 128, 32, 16², 3², stride 2 | 1.79 | 1.84 |
    | 128, 64, 8², 3² | 0.25 | 0.27 | 16, 128, 28², 3², stride 2 | 2.46 | 1.79 |
    | 128, 64, 4², 3² | 0.47 | 0.42 | 16, 32, 28², 4², stride 2 | 0.83 | 0.61 |
    | 128, 64, 2², 3² | 1.09 | 0.94 | 16, 64, 28², 2², stride 2 | 0.57 | 1.38 |
    | 16, 128, 28², 3² | 0.18 | 0.22 | 8, 3, 224², 7², stride 2 | 0.29 | 0.23 |
    | 16, 256, 14², 3² | 0.27 | 0.30 | 16, 3, 224², 16², stride 16 | 1.06 | 1.19 |
    | 16, 512, 7², 3² | 0.62 | 0.56 | 128, 64, 8², 3², no padding | 0.69 | 0.67 |
    | 128, 3, 32², 3² | 0.42 | 0.28 | 32, 6, 14², 5², no padding | 1.75 | 1.76 |
    | 16, 64, 16², 3², 4 groups | 0.26 | 0.30 | 1, 16, 32², 3² | 1.13 | 1.13 |
    | 16, 64, 16², 3², 64 groups | 0.64 | 0.34 | 1, 64, 8², 3² | 3.43 | 4.69 |
    | 16, 32, 32², 3², dilation 2 | 0.24 | 0.25 | 16, 64, 256, 9 | 0.23 | 0.24 |
    | 8, 16, 16³, 3³ | 0.14 | 0.14 | 16, 16, 1000, 3 | 0.78 | 0.74 |

    In bfloat16 it gains as much. In float64, where torch's own weight gradient unfolds, it gains less (without borders
    a factor of 1.4 with 16 channels to 4 with 256) and loses with 3 channels.
    """
    if not can_correlate(patches) or math.prod(patches.kernel) == 1 or patches.features.numel() == 0:
        return False
    rows = len(patches.features) * math.prod(patches.positions)
    unfolding = patches.groups * rows * patches.width * (patches.width + _UNFOLD)
    return _operations(patches) < 0.8 * unfolding


def can_correlate(patches: Patches) -> bool:
    """Return whether `correlated_gram` can be used for these patches.

    It cannot be used where a dilated kernel stands on many phases of a stride, nor where a dilated kernel has too few
    positions to see all that lies between its elements: what no patch sees may hold anything.
    """
    axes = zip(patches.kernel, patches.stride, patches.dilation, patches.positions, strict=True)
    return all(
        kernel == 1 or dilation == 1 or (dilation % stride == 0 and dilation <= positions * stride)
        for kernel, stride, dilation, positions in axes
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Phases:
    """Holds patches at stride 1, whose columns include those of a strided convolution.

    Attributes:
        patches: their channels are `(channel, *phase)`, phases being the remainders of places divided by the stride.
        phases: how many phases there are along each dimension of space.
        kernel: the sizes of the strided convolution's kernel.
    """

    patches: Patches
    phases: tuple[int, ...]
    kernel: tuple[int, ...]

    def columns(self, matrix: Tensor) -> Tensor:
        """Return `[groups, any, columns]` with its columns as those of the strided convolution."""
        if all(count == 1 for count in self.phases):
            return matrix
        ndim = len(self.kernel)
        # column (channel, *phase, *tap) is element tap·phases + phase of the kernel
        split = matrix.reshape(*matrix.shape[:2], -1, *self.phases, *self.patches.kernel)
        order = [each for axis in range(ndim) for each in (3 + ndim + axis, 3 + axis)]
        split = split.permute(0, 1, 2, *order)
        sizes = [taps * phases for taps, phases in zip(self.patches.kernel, self.phases, strict=True)]
        split = split.reshape(*split.shape[:3], *sizes)
        return split[(slice(None),) * 3 + tuple(slice(size) for size in self.kernel)].flatten(2)


def _by_phases(patches: Patches) -> _Phases:
    ndim = patches.ndim
    if all(step == 1 for step in patches.stride):
        return _Phases(patches, (1,) * ndim, patches.kernel)
    # What no patch sees is cut away, for it may hold anything.
    axes = range(ndim)
    size, zeros, stride = patches.features.shape[2:], list(patches.zeros), patches.stride
    cropped = []
    for axis in axes:
        seen = stride[axis] * (patches.positions[axis] - 1) + patches.spans[axis]
        before, after = zeros[axis][0], seen - zeros[axis][0] - size[axis]
        cropped.append((0, 0) if stride[axis] == 1 else (before, after))
    features = pad(patches.features, cropped)
    kernel, dilation, phases, filled = list(patches.kernel), list(patches.dilation), [1] * ndim, [(0, 0)] * ndim
    for axis in axes:
        if stride[axis] == 1:
            continue
        zeros[axis] = (0, 0)
        if kernel[axis] == 1 or dilation[axis] % stride[axis] == 0:  # the kernel stands on one phase alone
            features = features[(slice(None),) * (2 + axis) + (slice(None, None, stride[axis]),)]
            dilation[axis] = 1 if kernel[axis] == 1 else dilation[axis] // stride[axis]
        else:
            phases[axis], kernel[axis] = stride[axis], -(-kernel[axis] // stride[axis])
            filled[axis] = (0, stride[axis] * kernel[axis] - patches.kernel[axis])
    features = pad(features, filled)
    # [batch, channels, *(space/phases, phases)] to [batch, channels, *phases, *(space/phases)]
    split = [each for axis in axes for each in (features.shape[2 + axis] // phases[axis], phases[axis])]
    features = features.reshape(*features.shape[:2], *split)
    features = features.permute(0, 1, *range(3, 3 + 2 * ndim, 2), *range(2, 2 + 2 * ndim, 2)).flatten(1, 1 + ndim)
    at_stride_1 = replace(
        patches,
        features=features,
        zeros=tuple(zeros),
        kernel=tuple(kernel),
        stride=(1,) * ndim,
        dilation=tuple(dilation),
    )
    return _Phases(at_stride_1, tuple(phases), patches.kernel)


def _operations(patches: Patches) -> float:
    """Return multiply-adds that take the time of `correlated_gram`."""
    kernel, dilation = list(patches.kernel), list(patches.dilation)
    zeros, size = list(patches.zeros), list(patches.features.shape[2:])
    channels, batch, groups = patches.channels, len(patches.features), patches.groups
    for axis, step in enumerate(patches.stride):
        if step > 1:  # as in `_by_phases`
            zeros[axis] = (0, 0)
            if kernel[axis] > 1 and dilation[axis] == 1:
                channels, kernel[axis] = channels * step, -(-kernel[axis] // step)
            else:
                dilation[axis] = max(1, dilation[axis] // step)
            size[axis] = patches.positions[axis] + dilation[axis] * (kernel[axis] - 1)
    distances = math.prod(2 * each - 1 for each in kernel) * max(kernel) // (2 * max(kernel) - 1)
    elements = groups * channels * batch * math.prod(size)
    width = channels * math.prod(kernel)
    operations = elements * (channels * distances + _READ) + _WRITE * groups * width**2 + _START
    for axis, each in enumerate(kernel):
        products = sum(len(_at_borders(each, dilation[axis], zeros[axis], size[axis], apart)) for apart in range(each))
        rows = batch * math.prod(size) // size[axis]
        operations += products * (groups * rows * (width // each) ** 2 + _PRODUCT)
    return operations


def _all_correlations(patches: Patches) -> Tensor:
    """Return `Σ_u x[u] x[u + dilation·(j - i)]ᵀ` over all u with both inside: `[groups, *kernel, *kernel, C, C]`.

    At stride 1; by i, then j. C are the channels of one group. At least float32.
    """
    ndim, features, kernel, groups = patches.ndim, patches.features, patches.kernel, patches.groups
    axes = range(ndim)
    # Along one dimension distances below 0 are left to the transpose; along the others they are asked for.
    halved = max(axes, key=lambda axis: kernel[axis])
    reach = [patches.spans[axis] - 1 for axis in axes]
    distances = [size if axis == halved else 2 * size - 1 for axis, size in enumerate(kernel)]
    exact = torch.promote_types(features.dtype, torch.float32)
    examples = max(1, _AT_ONCE // math.prod(features.shape[2:]))
    weight_gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[ndim - 1]
    found = features.new_zeros(features.shape[1], patches.channels, *distances, dtype=exact)
    for some in torch.split(features, examples):
        found += weight_gradient(  # type: ignore[no-untyped-call]
            pad(some, [(0, reach[axis] if axis == halved else 0) for axis in axes]),
            found.shape,
            some,
            padding=tuple(0 if axis == halved else reach[axis] for axis in axes),
            dilation=patches.dilation,
            groups=groups,
        )
    found = found.view(groups, patches.channels, patches.channels, *distances)
    if kernel[halved] > 1:
        below = found.narrow(3 + halved, 1, kernel[halved] - 1).flip([3 + axis for axis in axes]).transpose(1, 2)
        found = torch.cat([below, found], dim=3 + halved)
    return _by_elements(found, kernel)


def _by_elements(found: Tensor, kernel: Sequence[int]) -> Tensor:
    """Give, for every pair (i, j) of elements of the kernel, what was found at the distance j - i.

    Args:
        found: `[groups, C, C, *distances]`, along each dimension of space from 1 - size to size - 1.
        kernel: the sizes.

    Returns:
        `[groups, *kernel, *kernel, C, C]`, a copy.
    """
    ndim = len(kernel)
    index = torch.zeros((1,) * 2 * ndim, dtype=torch.int64, device=found.device)  # of the distance, by (*i, *j)
    for axis, size in enumerate(kernel):
        taps = torch.arange(size, device=found.device)
        i, j = (taps.view([-1 if each == at else 1 for each in range(2 * ndim)]) for at in (axis, ndim + axis))
        index = index * (2 * size - 1) + (j - i + size - 1)
    by_distance = found.permute(0, *range(3, 3 + ndim), 1, 2).flatten(1, ndim)
    blocks = by_distance.index_select(1, index.flatten())
    return blocks.view(len(found), *kernel, *kernel, *found.shape[1:3])


def _subtract_borders(blocks: Tensor, patches: Patches, axis: int) -> None:
    """Take from all correlations those that no patch makes, for where along `axis` its elements would stand; in place.

    Along the dimensions before `axis` only what patches make is in the sums by now; along those after it, all is.

    Args:
        blocks: `[groups, *kernel, *kernel, C, C]`.
        patches: the patches, at stride 1.
        axis: the dimension of space whose borders are meant.
    """
    size, kernel, dilation = patches.features.shape[2 + axis], patches.kernel[axis], patches.dilation[axis]
    firsts = [_at_borders(kernel, dilation, patches.zeros[axis], size, apart) for apart in range(kernel)]
    places = {place + each for apart, found in enumerate(firsts) for place in found for each in (0, dilation * apart)}
    columns = _columns(patches, axis, sorted(places))
    others = _without(patches.kernel, axis)
    shape = (patches.groups, *others, patches.channels, *others, patches.channels)
    first, second = range(1, 1 + len(others)), range(2 + len(others), 2 + 2 * len(others))
    upper = (0, *first, *second, 1 + len(others), 2 + 2 * len(others))
    lower = (0, *second, *first, 2 + 2 * len(others), 1 + len(others))
    for apart, found in enumerate(firsts):
        for place, elements in found.items():
            product = (columns[place] @ columns[place + dilation * apart].mT).view(shape)
            for i in elements:
                _block(blocks, axis, i, i + apart).sub_(product.permute(upper))
                if apart:
                    _block(blocks, axis, i + apart, i).sub_(product.permute(lower))


def _columns(patches: Patches, axis: int, places: Sequence[int]) -> dict[int, Tensor]:
    """Return patches over the other dimensions, of the features at each of `places` along `axis`.

    Each is `[groups, width, n]`, its width ordered `(*kernel, channel)`. Patches are columns so that neighbours in the
    features are neighbours in the copy.
    """
    if not places:
        return {}
    reach = [span - 1 for span in patches.spans]
    around = [zeros if other < axis else (reach[other],) * 2 for other, zeros in enumerate(patches.zeros)]
    features = patches.features.movedim(2 + axis, 1)
    slices = features.new_empty(len(features), len(places), *features.shape[2:])
    for at, place in enumerate(places):  # torch.stack reads tensors that are not contiguous at half the speed
        slices[:, at].copy_(features[:, place])
    others = Patches(
        slices.flatten(1, 2),
        _without(around, axis),
        _without(patches.kernel, axis),
        _without(patches.stride, axis),
        _without(patches.dilation, axis),
        len(places) * patches.groups,
    )
    columns = others.columns().view(len(places), patches.groups, others.width, -1)
    return dict(zip(places, columns.unbind(), strict=True))


def _at_borders(kernel: int, dilation: int, zeros: tuple[int, int], size: int, apart: int) -> dict[int, list[int]]:
    """Tell where in features of this size elements i of the kernel do not stand while element i + apart does.

    Along one dimension, at stride 1: place, and what elements i these are.
    """
    positions = size + sum(zeros) - dilation * (kernel - 1)
    ends = size - dilation * apart
    found: dict[int, list[int]] = {}
    for i in range(kernel - apart):
        starts = dilation * i - zeros[0]
        for place in itertools.chain(range(min(starts, ends)), range(max(starts + positions, 0), ends)):
            found.setdefault(place, []).append(i)
    return found


def _block(blocks: Tensor, axis: int, i: int, j: int) -> Tensor:
    """Return the block of one pair of elements, `[groups, *other kernel, *other kernel, C, C]`, a view."""
    ndim = (blocks.dim() - 3) // 2
    return blocks.select(1 + ndim + axis, j).select(1 + axis, i)


def _without(each: Sequence[T], axis: int) -> tuple[T, ...]:
    return (*each[:axis], *each[axis + 1 :])
