"""Schedules for any number of a param group. For lr, use `torch.optim.lr_scheduler`: it works unchanged."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from kfac_optim.utils.text import listed
from kfac_optim.utils.validation import check_integer, check_number, plain_number

_PERIODS = ("factor_update_period", "inverse_update_period")
_ABOVE_ZERO = ("damping", "preconditioner_damping", "kl_clip", "factor_decay")


@dataclass(frozen=True)
class ExponentialDecay:
    """Returns `gamma ** (step // every)`, clipped below: a factor for `HyperparameterScheduler`.

    Ba, Grosse & Martens 2017 (§5) decay the trust region by 0.96 every half epoch, starting from 0.01.

    Args:
        gamma: multiplier per interval, in (0, 1].
        every: scheduler steps per interval.
        minimum: smallest factor.
    """

    gamma: float
    every: int = 1
    minimum: float = 0.0

    def __post_init__(self) -> None:
        check_number("gamma of ExponentialDecay", self.gamma, above=0, at_most=1)
        check_integer("every of ExponentialDecay", self.every)
        check_number("minimum of ExponentialDecay", self.minimum, at_least=0)

    def __call__(self, step: int) -> float:
        return max(float(self.gamma ** (step // self.every)), self.minimum)


class HyperparameterScheduler:
    """Sets one number of every param group to its base value times `factor(step)`.

    The semantics are those of `torch.optim.lr_scheduler.LambdaLR`: call `step()` once per epoch (or batch); the
    value is always computed from the base value, never from the last one; `state_dict()` resumes it. A period is
    rounded and never falls below 1. Where a number must be above 0, such as `damping`, the value 0, in which a long
    decay ends, becomes 2.2e-308.

    Groups that are added later keep their own values, except for `kl_clip`, which must be the same in all groups: add a
    group with the present `kl_clip`, and it takes the first group's value from the next `step()` of the scheduler on. A
    scheduler that is built anew takes the first group's base value for it.

    Args:
        optimizer: the optimizer whose groups have the number.
        key: `"damping"`, `"kl_clip"`, `"factor_decay"`, `"factor_update_period"`, `"inverse_update_period"`, or
            any other number of the groups.
        factor: multiplier of the base value at a step (an int from 0), or a list or tuple with one per group.
        last_epoch: index of the last step taken; -1 starts afresh.

    Raises:
        KeyError: a group has no such number, or, when resuming, no base value of it (`initial_{key}`).
        TypeError: the value is not a number, as when `kl_clip` is None.
        ValueError: the number of factors is not that of the groups, or a factor makes the number infinite.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: str,
        factor: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"kfac_optim: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if not isinstance(key, str):
            raise TypeError(f"kfac_optim: key must be the name of a number of the param groups, got {key!r}.")
        check_integer("last_epoch", last_epoch, at_least=-1)
        groups = optimizer.param_groups
        for i, group in enumerate(groups):
            if key not in group:
                numbers = sorted(k for k, v in group.items() if isinstance(v, (int, float)) and not isinstance(v, bool))
                raise KeyError(f"kfac_optim: param group {i} has no {key!r} to schedule; it has {numbers}.")
            if isinstance(group[key], bool) or not isinstance(group[key], (int, float)):
                raise TypeError(
                    f"kfac_optim: {key!r} of param group {i} is {group[key]!r}, which is no number to schedule."
                )
        self.factors = list(factor) if isinstance(factor, Sequence) else [factor] * len(groups)
        for each in self.factors:
            if not callable(each):
                raise TypeError(f"kfac_optim: factor must be a function of the step, or a list of them, got {each!r}.")
        if len(self.factors) != len(groups):
            raise ValueError(
                f"kfac_optim: {len(groups)} param groups need one factor or {len(groups)}, got {len(self.factors)}."
            )
        self.optimizer = optimizer
        self.key = key
        self.last_epoch = last_epoch
        initial = f"initial_{key}"
        # The trust region is one for the whole model: a group that was added after the first schedule has its base.
        shared = next((group for group in groups if key == "kl_clip" and initial in group), {})
        for i, group in enumerate(groups):
            if last_epoch != -1 and initial not in group and initial not in shared:
                raise KeyError(
                    f"kfac_optim: resuming from last_epoch={last_epoch} needs {initial!r} in param group {i}; load the "
                    "optimizer's checkpoint first, or start afresh with last_epoch=-1."
                )
        # As with torch's initial_lr, the base is what the first schedule found, never a scheduled value.
        self.base_values: list[float] = [group.get(initial, shared.get(initial, group[key])) for group in groups]
        self.step()
        for group, base in zip(groups, self.base_values, strict=True):  # nothing is left where a factor raises
            group.setdefault(initial, base)

    def step(self) -> None:
        """Move on by one epoch (or batch) and set the values."""
        self._set_values(self.last_epoch + 1, self.base_values)

    def _set_values(self, epoch: int, base_values: list[float]) -> None:
        """Set the values of an epoch, or raise before anything is changed."""
        pairs = zip(self.factors, base_values, strict=True)
        values = [self._value(factor(epoch), base, epoch) for factor, base in pairs]
        self.last_epoch, self.base_values = epoch, base_values
        groups = self.optimizer.param_groups
        if self.key == "kl_clip":
            values += values[:1] * (len(groups) - len(values))
        for group, value in zip(groups, values, strict=False):  # groups added since keep their own values
            group[self.key] = value

    def _value(self, factor: object, base: float, epoch: int) -> float:
        """Return the base value times what the factor of an epoch is, as a group is to have it."""
        try:
            by = float(factor) if isinstance(factor, Real) else math.nan
        except OverflowError:  # of an integer above the largest float
            by = math.inf
        if not math.isfinite(by):
            got = by if isinstance(factor, Real) else factor
            raise TypeError(
                f"kfac_optim: a factor of {self.key!r} must return a finite number, and returned {got!r} at {epoch}."
            )
        value: float = plain_number(base * by)
        if not math.isfinite(value):
            raise ValueError(
                f"kfac_optim: {self.key!r} must be finite, and at {epoch} it is {base!r} times a factor of {by:g}. "
                "Have the factor end at a largest value, as by min(..., 100)."
            )
        if self.key in _PERIODS:
            return max(1, round(value))
        return sys.float_info.min if value == 0 and base != 0 and self.key in _ABOVE_ZERO else value

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers alone; the factors are code and are given again when the scheduler is rebuilt."""
        return {"key": self.key, "last_epoch": self.last_epoch, "base_values": list(self.base_values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()` and set the values, whether the optimizer was loaded before or comes after.

        Raises:
            TypeError: what the state holds are no numbers.
            ValueError: the state is that of another number, or of another number of groups, or no state at all.
        """
        if missing := [name for name in ("key", "last_epoch", "base_values") if name not in state_dict]:
            raise ValueError(
                f"kfac_optim: the state of a HyperparameterScheduler has no {listed(missing)}. Load what its own "
                "state_dict() gave."
            )
        key, epoch, base_values = state_dict["key"], state_dict["last_epoch"], list(state_dict["base_values"])
        if key != self.key:
            raise ValueError(
                f"kfac_optim: this scheduler drives {self.key!r}, the checkpoint {key!r}; load each scheduler's own "
                "state."
            )
        if len(base_values) != len(self.base_values):
            raise ValueError(
                f"kfac_optim: this scheduler drives {len(self.base_values)} param groups, the checkpoint "
                f"{len(base_values)}. Build it at the same place of the script: groups that are added after it are "
                "not among those that it drives."
            )
        check_integer("last_epoch of the state", epoch, at_least=0)
        for value in base_values:
            check_number(f"a base value of {self.key!r}", value)
        self._set_values(epoch, base_values)
