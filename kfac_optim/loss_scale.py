"""What `torch.amp.GradScaler` multiplied the loss by before backward."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler


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


def read_loss_scale(handed: Mapping[str, Any], scaler: GradScaler | None) -> LossScale:
    """The scale of the step that is beginning. Synchronises with the device, where there is a scaler.

    Args:
        handed: attributes of the optimizer, where `GradScaler.step` leaves `found_inf` and `grad_scale`: the scale, or
            None after `GradScaler.unscale_`.
        scaler: the user's, where it was named.

    Raises:
        RuntimeError: after `unscale_`, the scale is not to be known.
    """
    found_inf, scale = handed.get("found_inf"), handed.get("grad_scale")
    if found_inf is None:  # step() was called directly
        return LossScale(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else LossScale()
    if isinstance(scale, Tensor):
        found = torch.as_tensor(found_inf).to(scale.device)
        found, factor = torch.stack([found.reshape(()), scale.reshape(())]).tolist()
        return LossScale(factor, found > 0, in_gradients=True)
    if scaler is None:
        raise RuntimeError(
            "kfac_optim: GradScaler.unscale_ was called before GradScaler.step, which then does not hand over the "
            "scale that the output gradients behind G carry. Name the scaler: KFACOptimizer(..., grad_scaler=scaler)."
        )
    return LossScale(scaler.get_scale(), float(found_inf) > 0)


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
