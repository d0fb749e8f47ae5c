"""Arithmetic on the few numbers that make a step's length: on the host if a CPU has them, otherwise on the device.

On a CPU an operation on a tensor of one element costs fifty times as much as one on a Python number. On an accelerator
the host would have to wait for the number, so there they stay tensors. Formulas are written once for both; these
functions stand where Python and torch differ, as Python raises where it divides by zero or takes a negative root.
"""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_optim.utils.streams import brought

Scalar = float | Tensor
"""A Python number, or a tensor `[]`."""

Flag = bool | Tensor
"""A Python flag, or a tensor `[]` bool."""


def scalars(values: Tensor) -> list[Scalar]:
    """Return the elements of `[n]`: Python numbers if a CPU holds them, otherwise tensors `[]`."""
    return values.tolist() if values.device.type == "cpu" else list(values.unbind())


def scalars_beside(values: Tensor, like: Scalar) -> list[Scalar]:
    """Return the elements of `[n]` as what `like` is: Python numbers, or tensors on its device."""
    if isinstance(like, Tensor):
        return list(brought(values, like.device).unbind())
    return values.tolist()


def scalar_beside(value: float | Tensor, like: Scalar) -> Scalar:
    """Return a number that the user gave, perhaps as a tensor of one element, to be multiplied with `like`."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(()).to(like.device) if isinstance(like, Tensor) else float(value)


def vector(numbers: Sequence[Scalar | Flag], like: Tensor) -> Tensor:
    """Return numbers as one tensor `[n]` in the dtype of `like`, 0 where they are not finite.

    It is on the device of the tensors among them; where they are Python's numbers, on the CPU.
    """
    tensors = [number.to(like.dtype) for number in numbers if isinstance(number, Tensor)]
    if tensors:
        return torch.stack(tensors).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    known = [number if math.isfinite(number) else 0.0 for number in numbers if not isinstance(number, Tensor)]
    return torch.tensor(known, dtype=like.dtype, device="cpu")


def total(numbers: Sequence[Scalar]) -> Scalar:
    """Return the sum, 0 of no number."""
    return sum(numbers[1:], start=numbers[0]) if numbers else 0.0


def quotient(over: Scalar, under: Scalar) -> Scalar:
    """Return `over / under`, infinite or NaN where `under` is zero."""
    if isinstance(over, Tensor) or isinstance(under, Tensor) or under != 0:
        return over / under
    return math.nan if over == 0 or math.isnan(over) else math.copysign(math.inf, over) * math.copysign(1.0, under)


def root(x: Scalar) -> Scalar:
    """Return the square root, NaN where `x` is negative."""
    if isinstance(x, Tensor):
        return x.sqrt()
    return math.sqrt(x) if x >= 0 else math.nan


def exponential(x: Scalar) -> Scalar:
    """Return `exp(x)` of a number that was bounded."""
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


def larger(one: Scalar, other: Scalar) -> Scalar:
    """Return the larger of two numbers, NaN where either is."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other)
    return one if one > other or one != one else other


def bounded(x: Scalar, least: Scalar | None = None, most: Scalar | None = None) -> Scalar:
    """Return `x` where it is between the bounds, otherwise the nearer of them; NaN where `x` is."""
    if isinstance(x, Tensor):
        return torch.clamp(x, least, most)  # type: ignore[arg-type]  # one bound may be a tensor
    if least is not None and x < least:
        return least
    return most if most is not None and x > most else x


def finite(x: Scalar) -> Scalar:
    """Return `x`, but 0 where it is NaN, and the largest number in the place of infinity."""
    if isinstance(x, Tensor):
        return x.nan_to_num(nan=0.0)
    return 0.0 if x != x else min(max(x, -sys.float_info.max), sys.float_info.max)


def chosen(condition: Flag, if_true: Scalar, if_false: Scalar) -> Scalar:
    """Return one of two numbers."""
    if isinstance(condition, Tensor):
        return torch.where(condition, if_true, if_false)
    return if_true if condition else if_false
