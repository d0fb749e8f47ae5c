"""What an executor sees of its optimizer: choices, numbers of the param groups, terms of the loss, and the state."""

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.distributed.choice import plain
from kfac_optim.distributed.statistics.overlap import Terms
from kfac_optim.fisher.estimates import Estimate, NamedLoss
from kfac_optim.step.step_size import StepSize


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """Shows an executor what it needs of its optimizer, which it holds weakly, as the optimizer holds the executor.

    Args:
        optimizer: its groups and state are asked for at each step.
        step_size: the user's choice.
        choices: all choices of the user by name, in words.
        window: counts the terms of the loss; None where they are not to be known.
        estimate: says what output gradients are multiplied by.
    """

    optimizer: weakref.ref[Optimizer]
    step_size: StepSize
    choices: Mapping[str, str]
    window: CaptureWindow | None
    estimate: Estimate

    @property
    def names_loss(self) -> bool:
        """Return whether the estimate runs passes of its own through the model."""
        return isinstance(self.estimate, NamedLoss)

    @property
    def sums_loss(self) -> bool:
        """Return whether the loss is a sum over its terms."""
        return self.window is not None and self.window.tally.is_sum

    def without_terms(self) -> "OptimizerView":
        """Return the view of an executor that shall not know the terms of the loss."""
        return replace(self, window=None)

    def terms(self) -> Terms | None:
        """Return the terms of the loss as they would be if the step came now; None where they are not known."""
        if self.window is None or self.window.scaled or (count := self.window.so_far()) is None:
            return None
        return count, self.estimate.scale(count, 1.0)

    def arguments(self) -> Mapping[str, str]:
        """Return the optimizer's arguments by name, as they are now; they must be the same on all ranks."""
        numbers = {name: repr(plain(value)) for name, value in self._numbers() if not isinstance(value, Tensor)}
        return {**self.choices, **numbers}

    def tensors(self) -> Mapping[str, str]:
        """Return those arguments that are tensors, which synchronises with the device."""
        return {name: repr(value.tolist()) for name, value in self._numbers() if isinstance(value, Tensor)}

    def state(self) -> MutableMapping[Any, Any]:
        """Return the optimizer's state, for momentum buffers."""
        return {} if (optimizer := self.optimizer()) is None else optimizer.state

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Yield the numbers of param groups, each with its name."""
        optimizer = self.optimizer()
        for number, group in enumerate(() if optimizer is None else optimizer.param_groups):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    yield f"{name} of param group {number}", value
