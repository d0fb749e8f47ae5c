"""Steps that are not taken because a gradient is not finite: how many, and whether the host or the device says so."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.utils.precision import all_finite
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.text import listed


class SkippedSteps:
    """Counts the steps that were skipped.

    Where the host waits for the answer, it counts. Where it does not (`defer`), the device does, and what it counted is
    only fetched when it is asked for (`look`).

    Attributes:
        total: skipped steps of the whole training, as of the last look.
        in_a_row: skipped steps in a row up to now, as of the last look.
        deferred: steps that the device was left with since the last look.
    """

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.deferred = 0
        self._counts: Tensor | None = None

    def restore(self, total: int, in_a_row: int) -> None:
        """Go on from the counts of another optimizer, of which this one is a copy."""
        self.total, self.in_a_row = total, in_a_row

    def skip(self) -> None:
        """Count a step that was not taken."""
        self.total += 1
        self.in_a_row += 1

    def take(self) -> None:
        """Count a step that was taken."""
        self.in_a_row = 0

    def defer(self, finite: Tensor) -> None:
        """Count a step that is taken if `finite` `[]` bool is True, which nobody waits to know."""
        if self._counts is None or self._counts.device != finite.device:
            self.look()
            self._counts = torch.zeros(2, dtype=torch.int64, device=finite.device)
        self._counts += ~finite
        self._counts[1] *= ~finite
        self.deferred += 1

    def so_far(self) -> int | Tensor:
        """Return how many there were up to now, a tensor `[]` where the device knows; nobody waits for it."""
        return self.total if self.deferred == 0 or self._counts is None else self._counts[0] + self.total

    def look(self) -> None:
        """Fetch what the device counted: one host synchronisation, if there is any."""
        if self.deferred == 0 or self._counts is None:
            return
        total, in_a_row = self._counts.tolist()
        self._counts.zero_()
        self.total += total
        self.in_a_row = in_a_row + (self.in_a_row if in_a_row == self.deferred else 0)
        self.deferred = 0

    def check_limit(
        self,
        limit: int | None,
        gradients: Mapping[nn.Parameter, Tensor],
        names: Callable[[], Mapping[nn.Parameter, str]],
        *,
        here: bool,
    ) -> None:
        """Raise RuntimeError where `limit` steps in a row were skipped, with the names of the guilty parameters.

        Args:
            limit: how many in a row are too many; None: there is no limit.
            gradients: the gradients of this process.
            names: returns the names of the parameters.
            here: whether this process has found gradients that are not finite; otherwise another one has.
        """
        if limit is None or self.in_a_row < limit:
            return
        known = names()
        guilty = [known.get(param, "(unnamed)") for param, grad in gradients.items() if not all_finite([local(grad)])]
        unknown = "parameters whose gradients were changed since the check" if here else "another process"
        whose = listed(guilty, 4) or unknown
        raise RuntimeError(
            f"kfac_optim: {self.in_a_row} steps in a row were skipped because gradients are not finite "
            f"(nonfinite_limit={limit}), now those of {whose}. Look at the loss and the data; lower lr or the loss "
            "scale, or raise damping (which has no effect with SelectedUpdates)."
        )


def fused_kernels_look(
    groups: Sequence[Mapping[str, Any]], gradients: Mapping[nn.Parameter, Tensor], state: Mapping[Any, Any]
) -> bool:
    """Return whether torch's fused kernels change all parameters and momentum, on one accelerator.

    They look for themselves: where a gradient is not finite, nothing is changed.
    """
    if not gradients or not all(group["fused"] is True for group in groups):
        return False
    (device, *others) = {gradient.device for gradient in gradients.values()}
    if others or device.type in ("cpu", "meta") or any(g.layout is not torch.strided for g in gradients.values()):
        return False
    return all(
        param.grad is None or group["momentum"] == 0 or state.get(param, {}).get("momentum_buffer") is not None
        for group in groups
        for param in group["params"]
    )
