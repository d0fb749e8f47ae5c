"""What gradients were multiplied by between backward and the step, measured where nobody says it.

`G` is made of output gradients as backward has them. Where a schedule of micro-batches divides `.grad` afterwards by
their number, or a loop of somebody's own takes a constant loss scale off it, the same number belongs to the output
gradients. Where a loop clips, it does not: clipping says nothing of the loss. So one small gradient is kept as backward
left it, and compared with itself at the step.
"""

import math
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.utils.autograd import on_accumulated
from kfac_optim.utils.hooks import weakly

# Elements that a gradient needs for a common factor of theirs to be no chance.
_ENOUGH = 8

# Relative error of one multiplication, in units of the dtype's, and a little room.
_ROUNDINGS = 4

# Clipping to less than that of a gradient is less likely than a loss scale that nobody has named.
_SMALL = 2.0**-10


class ScaleChange(NamedTuple):
    """Says what gradients were multiplied by.

    Attributes:
        scale: by a change of the loss's scale, which the output gradients behind `G` share.
        is_doubtful: whether more was done to them than clipping is likely to do, and nothing shows what.
    """

    scale: float = 1.0
    is_doubtful: bool = False


class ScaleProbe:
    """Keeps the gradient of one parameter as backward leaves it, on steps with statistics."""

    def __init__(self) -> None:
        self._param: weakref.ref[nn.Parameter] | None = None
        self._handle: RemovableHandle | None = None
        self._kept: Tensor | None = None
        self._backwards = 0
        self._known = 1.0  # the scale that a step without clipping has shown

    def choose(self, params: Iterable[nn.Parameter]) -> None:
        """Take the smallest of these parameters that has enough elements; none where there is no such one."""
        self.end()
        fit = [param for param in params if param.numel() >= _ENOUGH]
        self._param = weakref.ref(min(fit, key=lambda param: param.numel())) if fit else None

    def listen(self) -> None:
        """Keep what the coming backwards leave."""
        param = None if self._param is None else self._param()
        if self._handle is None and param is not None and param.requires_grad:
            self._handle = on_accumulated(param, weakly(self.keep))

    def keep(self, param: Tensor) -> None:
        """Note the gradient of the parameter after a backward."""
        self._backwards += 1
        gradient = param.grad
        dense = gradient is not None and gradient.layout is torch.strided
        self._kept = gradient.detach().clone() if gradient is not None and dense else None

    def end(self) -> None:
        """Forget this step."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._kept, self._backwards = None, None, 0

    def measure(self) -> ScaleChange:
        """Tell what has become of the gradient since. Waits for the device."""
        param = None if self._param is None else self._param()
        if param is None or self._kept is None or param.grad is None or param.grad.shape != self._kept.shape:
            return ScaleChange()
        if param.grad.layout is not torch.strided:  # which the step refuses where it preconditions
            return ScaleChange()
        before, after = self._kept, param.grad.detach()
        ratio, spread = _common_factor(before, after)
        if ratio == 1 and spread == 0:
            self._known = 1.0
            return ScaleChange()
        tolerance = _ROUNDINGS * torch.finfo(param.dtype).eps
        if not (math.isfinite(ratio) and ratio > 0) or spread > tolerance * ratio:
            return ScaleChange()
        power = 2.0 ** round(math.log2(ratio))
        # To the bit, since clipping may come near to either.
        if torch.equal(after, before * power):
            self._known = min(power, 1.0)
            return ScaleChange(power)
        count = self._backwards
        if torch.equal(after, before / count) or torch.equal(after, before * (1 / count)):
            self._known = 1 / count
            return ScaleChange(self._known)
        if ratio > 1 + tolerance:
            return ScaleChange(ratio)
        if ratio <= self._known < 1:
            return ScaleChange(self._known)  # and the rest is clipping
        return ScaleChange(is_doubtful=ratio < _SMALL)


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
