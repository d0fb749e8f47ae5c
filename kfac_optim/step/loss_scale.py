"""What `torch.amp.GradScaler` multiplied the loss by before backward."""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp import GradScaler

_SCALER_STEP = GradScaler.step.__code__


class LossScale(NamedTuple):
    """Holds the scale of one step's loss.

    Attributes:
        factor: what the loss was multiplied by, and with it the output gradients behind `G`.
        overflowed: whether the scaler found a gradient that is not finite.
        in_gradients: whether `.grad` is multiplied by it still.
    """

    factor: float = 1.0
    overflowed: bool = False
    in_gradients: bool = False


class ScalerSource:
    """Finds the `GradScaler` of the loss: the scaler that calls the step, or else the one that the user has named.

    Args:
        named: the argument `grad_scaler` of the optimizer.

    Attributes:
        was_named: whether a scaler was named, which a copy of the optimizer may have lost.
    """

    def __init__(self, named: GradScaler | None) -> None:
        self.was_named = named is not None
        self._named: Callable[[], GradScaler | None] = lambda: named

    @property
    def named(self) -> GradScaler | None:
        """Return the scaler that was named, if it still exists."""
        return self._named()

    def hold_weakly(self, *, was_named: bool) -> None:
        """Keep the scaler only while others do: in a copy, nobody else would update its scale."""
        self.was_named = was_named
        if (scaler := self._named()) is not None and scaler.is_enabled():
            self._named = weakref.ref(scaler)

    def find(self) -> GradScaler | None:
        """Return the scaler of the running step; None if there is none that is enabled.

        Raises:
            RuntimeError: the optimizer is a copy that was made without the scaler that the user had named.
        """
        scaler = _calling_scaler() or self._named()
        if scaler is None and self.was_named:
            raise RuntimeError(
                "kfac_optim: this optimizer was copied without the GradScaler that it was built with, and does not "
                "know the scale of the loss. Copy it as well: "
                "model, optimizer, scaler = copy.deepcopy((model, optimizer, scaler)); or build one with "
                "grad_scaler=scaler and load this one's state_dict(); or step by scaler.step(optimizer)."
            )
        return scaler if scaler is not None and scaler.is_enabled() else None


def _calling_scaler() -> GradScaler | None:
    """Find the `GradScaler` whose `step` has called the running step; return None if no scaler did.

    The scaler is looked for on the call stack: one that unscales gradients itself tells the optimizer nothing, trainers
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
        None if no scaler tells the scale, or no statistics need it.
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
