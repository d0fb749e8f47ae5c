"""Copies of one model under different optimizers, to be trained side by side on the same batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.arguments import Periods
from benchmarks.harness import Contender, time_interleaved
from benchmarks.memory import tensor_bytes

NEVER = 10**9  # a period that no run reaches
LR = 1e-6  # the same batch is seen in every step; a model that learns it would time vanishing gradients
MOMENTUM = 0.9
SHORTEST_BLOCK = 6.0  # seconds; a block much shorter than the machine's own hiccups tells nothing


class Variant:
    """Trains a copy of ``model`` under one optimizer.

    Args:
        model: the model as every variant begins.
        loss: ``(model, inputs, targets) → []``.
        make: the optimizer of the copy.
        periods: the periods of K-FAC; None for others.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
        make: Callable[[nn.Module], Optimizer],
        periods: Periods | None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.loss = loss
        self.optimizer = make(self.model)
        self.whole = periods.common if periods is not None and periods.common < NEVER else 1

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def warm_up(self, step: Callable[[], None], device: torch.device, shortest: float) -> int:
        """Leave the first steps behind, which allocate, take statistics and refresh whatever the periods.

        Returns:
            Steps of a block: whole periods, and at least ``shortest`` seconds.
        """
        for _ in range(2):
            step()
        self.age()
        timed = time_interleaved([Contender("", step, self.whole)], 1, device, lambda _: None)
        return self.whole * max(1, math.ceil(shortest / (self.whole * timed[""][0])))

    def age(self) -> None:
        """Make the averages old, so that refreshes come by the period alone, as in all but the first steps of a run.

        The next step is the first of a period: it takes statistics and refreshes.
        """
        state_dict = self.optimizer.state_dict()
        for state in state_dict["state"].values():
            if "kfac" in state:
                clock = state["kfac"]["clock"]
                clock |= {"step": NEVER * self.whole, "folds": NEVER, "folds_at_refresh": NEVER}
        self.optimizer.load_state_dict(state_dict)

    def check_finite(self, name: str) -> None:
        if not all(bool(param.isfinite().all()) for param in self.model.parameters()):
            raise RuntimeError(f"{name}: parameters are no longer finite, so the timing means nothing")

    def state_bytes(self) -> int:
        """Return the bytes that the optimizer holds between steps."""
        return tensor_bytes(self.optimizer.state_dict()["state"])
