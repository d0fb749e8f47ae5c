"""What gradients were multiplied by between backward and the step, measured where nobody says it.

`G` is made of output gradients as backward has them. Where a schedule of micro-batches divides `.grad` afterwards by
their number, or a loop of somebody's own takes a constant loss scale off it, the same number belongs to the output
gradients. Where a loop clips, it does not: clipping says nothing of the loss. So parts of two gradients are kept as
backward left them, and compared with themselves at the step: of two layers, as some loops change the gradients of one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.utils.autograd import on_accumulated
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.sharded_params import is_sharded

# The fewest elements whose common factor cannot be chance, and the most that are looked at.
_ENOUGH, _MOST = 8, 4096

# Relative error of one multiplication, in units of the dtype's, and a little room.
_ROUNDINGS = 4

# Clipping by a factor below this is less likely than a loss scale that the optimizer was not told of.
_SMALL = 2.0**-10


class ScaleChange(NamedTuple):
    """Says what gradients were multiplied by.

    Attributes:
        scale: the factor by which the loss's scale has changed, which the output gradients behind `G` share.
        is_doubtful: whether more was done to them than clipping is likely to do, and nothing shows what.
        known: the scale that the last step without clipping has shown, at most 1.
    """

    scale: float = 1.0
    is_doubtful: bool = False
    known: float = 1.0


class ScaleProbe:
    """Keeps gradients of two parameters as backward leaves them, on steps with statistics."""

    def __init__(self) -> None:
        self._params: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._backwards: Counter[nn.Parameter] = Counter()

    def choose(self, layers: Iterable[Sequence[nn.Parameter]]) -> None:
        """Take the smallest parameter that has enough elements, and the smallest matrix of another layer.

        What is done to some parameters alone, as to the biases or to the first layer, then shows in one of the two at
        most. Where no other layer has a matrix, any other parameter is taken. A sharded one stands alone, as its
        gradient cannot be joined with another.
        """
        self.end()
        fit = [(param, layer) for layer in layers for param in layer if param.numel() >= _ENOUGH]
        self._params = []
        if fit:
            first, layer = min(fit, key=lambda each: each[0].numel())
            alone = is_sharded(first)
            others = [] if alone else [each for each in fit if each[0] is not first and not is_sharded(each[0])]
            apart = [(param, its) for param, its in others if its is not layer and param.dim() > 1] or others
            self._params = [first, min(apart, key=lambda each: each[0].numel())[0]] if apart else [first]

    def listen(self) -> None:
        """Keep what the coming backwards leave."""
        if not self._handles:
            params = [param for param in self._params if param.requires_grad]
            self._handles = [on_accumulated(param, weakly(self.keep)) for param in params]

    def keep(self, param: nn.Parameter) -> None:
        """Note the gradient of a parameter after a backward."""
        self._backwards[param] += 1
        if param.grad is not None and param.grad.layout is torch.strided:
            self._kept[param] = _part_of(param.grad).clone()
        else:
            self._kept.pop(param, None)

    def end(self) -> None:
        """Forget this step."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def forget(self) -> None:
        """Forget the backwards so far, as their gradients were thrown away; those to come are kept."""
        self._kept.clear()
        self._backwards.clear()

    def measure(self, known: float = 1.0) -> ScaleChange:
        """Tell what has become of the gradients since. Waits for the device.

        Args:
            known: the scale that the last step without clipping had shown until now.
        """
        found = [
            (before, _part_of(param.grad))
            for param, before in self._kept.items()
            if param.grad is not None and param.grad.layout is torch.strided
        ]
        if not found or any(before.shape != after.shape for before, after in found):
            return ScaleChange(known=known)
        before, after = (_joined(parts) for parts in zip(*found, strict=True))
        ratio, spread = _common_factor(before, after)
        if ratio == 1 and spread == 0:
            return ScaleChange()
        tolerance = _ROUNDINGS * max(torch.finfo(part.dtype).eps for part, _ in found)
        if not (math.isfinite(ratio) and ratio > 0) or spread > tolerance * ratio:
            return ScaleChange(known=known)
        power = 2.0 ** round(math.log2(ratio))
        # To the bit, since clipping may come near to either.
        if torch.equal(after, before * power):
            return ScaleChange(power, known=min(power, 1.0))
        count = max(self._backwards.values())
        if _is_mean(found, count):
            return ScaleChange(1 / count, known=1 / count)
        if ratio > 1 + tolerance:
            return ScaleChange(ratio, known=known)
        if known < 1 and ratio <= known * (1 + tolerance):
            return ScaleChange(known, known=known)  # and the rest is clipping
        return ScaleChange(is_doubtful=ratio < _SMALL, known=known)


def _part_of(gradient: Tensor) -> Tensor:
    """Return as many elements as it takes to see a common factor, `[n]`; all of a sharded gradient, in its shape."""
    if is_sharded(gradient):
        return gradient.detach()
    # From everywhere, as most rows of an embedding's gradient may be zero, and the first ones all of them.
    return gradient.detach().reshape(-1)[:: math.ceil(gradient.numel() / _MOST)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])


def _is_mean(found: Sequence[tuple[Tensor, Tensor]], count: int) -> bool:
    """Return whether all gradients were divided by the number of backwards, in the dtype that they are in."""
    return all(
        torch.equal(after, before / count) or torch.equal(after, before * (1 / count)) for before, after in found
    )


def _common_factor(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Give the mean of what elements were multiplied by, and the largest distance from it; NaN where they are few."""
    dtype = torch.promote_types(before.dtype, torch.float32)
    counts = before != 0
    ratios = torch.where(counts, after.to(dtype) / before.to(dtype), 0)
    number = counts.sum()
    mean = ratios.sum() / number
    spread = torch.where(counts, (ratios - mean).abs(), 0).amax()
    common, distance, found = torch.stack([mean.double(), spread.double(), number.double()]).tolist()
    return (common, distance) if found >= _ENOUGH else (math.nan, math.nan)
