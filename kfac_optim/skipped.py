"""Steps that are not taken because a gradient is not finite: how many, and whether the host or the device says so."""

import torch
from torch import Tensor


class SkippedSteps:
    """Counts of them.

    Where the host waits for the answer, it counts. Where it does not (`defer`), the device does, and what it counted is
    only fetched when it is asked for (`look`).

    Attributes:
        total: ever, as of the last look.
        in_a_row: up to now, likewise.
        deferred: steps that the device was left with since the last look.
    """

    def __init__(self, total: int = 0, in_a_row: int = 0) -> None:
        self.total = total
        self.in_a_row = in_a_row
        self.deferred = 0
        self._counts: Tensor | None = None

    def skip(self) -> None:
        """A step was not taken."""
        self.total += 1
        self.in_a_row += 1

    def take(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def defer(self, finite: Tensor) -> None:
        """A step is taken where `finite` `[]` bool is True, and nobody waits to know."""
        if self._counts is None or self._counts.device != finite.device:
            self.look()
            self._counts = torch.zeros(2, dtype=torch.int64, device=finite.device)
        self._counts += ~finite
        self._counts[1] *= ~finite
        self.deferred += 1

    def look(self) -> None:
        """Fetch what the device counted: one host synchronisation, if there is any."""
        if self.deferred == 0 or self._counts is None:
            return
        total, in_a_row = self._counts.tolist()
        self._counts.zero_()
        self.total += total
        self.in_a_row = in_a_row + (self.in_a_row if in_a_row == self.deferred else 0)
        self.deferred = 0
