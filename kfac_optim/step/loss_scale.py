"""What `torch.amp.GradScaler` multiplied the loss by before backward."""

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp import GradScaler

_SCALER_STEP = GradScaler.step.__code__


class LossScale(NamedTuple):
    """The scale of one step.

    Attributes:
        factor: what the loss was multiplied by, and with it the output gradients behind `G`.
        overflowed: whether the scaler found a gradient that is not finite.
        in_gradients: whether `.grad` is multiplied by it still.
    """

    factor: float = 1.0
    overflowed: bool = False
    in_gradients: bool = False


def calling_scaler() -> GradScaler | None:
    """Find the `GradScaler` whose `step` has called the step that is running; None where no scaler did.

    It is looked for on the call stack: a scaler that unscales gradients itself tells the optimizer nothing, trainers
    make it after the optimizer, and clipping in between leaves its trace in the gradients.
    """
    frame = cast(FrameType | None, sys._getframe())
    while frame is not None:
        if frame.f_code is _SCALER_STEP:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        frame = frame.f_back
    return None


def read_loss_scale(
    handed: Mapping[str, Any], find_scaler: Callable[[], GradScaler | None], *, measured: bool
) -> LossScale | None:
    """Tell the scale of the step that is beginning. Synchronises with the device, where there is a scaler.

    Args:
        handed: attributes of the optimizer, where `GradScaler.step` leaves `found_inf` and `grad_scale`: the scale, or
            None after `GradScaler.unscale_`.
        find_scaler: finds the scaler of the loss, if there is one that is enabled.
        measured: whether there are statistics whose scale is to be known.

    Returns:
        None where nobody tells.
    """
    found_inf, scale = handed.get("found_inf"), handed.get("grad_scale")
    if found_inf is None:  # gradients are unscaled already, if they were scaled
        scaler = find_scaler() if measured else None
        return LossScale(scaler.get_scale()) if scaler is not None else None
    if isinstance(scale, Tensor):
        found = torch.as_tensor(found_inf).to(scale.device)
        found, factor = torch.stack([found.reshape(()), scale.reshape(())]).tolist()
        return LossScale(factor, found > 0, in_gradients=True)
    scaler = find_scaler()
    return LossScale(1.0 if scaler is None else scaler.get_scale(), float(found_inf) > 0)


def spread_overflow(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Have `GradScaler.update` lower the scale after a step in which another process alone has found an overflow."""
    # Private: the scaler asks its own findings alone, and each process has its scaler.
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)


def unscale(gradients: Iterable[Tensor], factor: float) -> None:
    """Divide `gradients` in place, to the very bit as `GradScaler.unscale_` does."""
    inverse = float(torch.tensor(factor, dtype=torch.float64).reciprocal().float())
    for gradient in gradients:
        gradient.mul_(inverse)
