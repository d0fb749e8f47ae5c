"""Which settings a range test tries, and which of them it recommends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

TRIALS = 7
"""How many trials there are at most."""

_APART = 10.0  # of the first rates, and of dampings
_TIED = 0.1  # of the best gain, or of the loss that is left: differences that small turn round within a run
_ERRORS = 2.0  # standard errors
_LESS_DAMPING = 1.25  # times the gain: little damping looks good in few steps, and settles at a higher loss
_MORE_DAMPING = 1.1


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds what came of one setting, trained for a few steps from where the user's model stands.

    Attributes:
        lr: the learning rate of the first param group.
        damping: the damping of the first param group.
        losses: the loss of each batch before its step, in the loss's own unit.
        gains: by how much the losses of the last batches are lower than those of the untrained model on the same
            batches. It is empty where the trial ended early, because a loss was not finite or had doubled: it exceeded
            the largest loss of the untrained model on the first batch and the last ones by more than its size.
    """

    lr: float
    damping: float
    losses: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Return the mean of the gains; minus infinity where the trial ended early."""
        return fmean(self.gains) if self.gains else -math.inf

    @property
    def last_loss(self) -> float:
        """Return the mean loss of the batches that the gains are of, the last one where there are none."""
        return fmean(self.losses[-max(1, len(self.gains)) :])

    def error(self, other: "Trial | None" = None) -> float:
        """Return the standard error of the gain, or of its difference from another's on the same batches."""
        theirs = (0.0,) * len(self.gains) if other is None else other.gains
        differences = [ours - their for ours, their in zip(self.gains, theirs, strict=True)]
        return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0

    def is_better(self, other: "Trial", factor: float) -> bool:
        """Return whether the gain is so many times that of the other, and more than by chance."""
        if not self.gains or not other.gains:
            return bool(self.gains)
        return self.gain > factor * max(other.gain, 0.0) and self.gain - other.gain > _ERRORS * self.error(other)

    def is_tied(self, best: "Trial") -> bool:
        """Return whether the trial does about as well as the best one."""
        if self is best or not self.gains:
            return self is best
        small = _TIED * min(best.gain, abs(best.last_loss))
        return best.gain - self.gain <= max(small, _ERRORS * self.error(best))

    @property
    def learns(self) -> bool:
        """Return whether the loss has fallen, by more than chance."""
        return bool(self.gains) and self.gain > _ERRORS * self.error()


@dataclass(frozen=True, slots=True)
class Start:
    """Holds what a search begins with.

    Attributes:
        lr: the learning rate of the first param group.
        damping: the damping of the first param group.
        rates: the first rates to try; empty where the optimizer finds its own.
        has_damping: whether damping has an effect.
        bounded: whether something else bounds the length of a step.
    """

    lr: float
    damping: float
    rates: tuple[float, ...]
    has_damping: bool
    bounded: bool


@dataclass(frozen=True, slots=True)
class Found:
    """Holds what a search recommends.

    Attributes:
        lr: the rate.
        damping: the damping.
        rates: the lowest and the highest rate that do about as well as the best.
        trials: all of them, in their order.
        learnt: whether any lowered the loss.
    """

    lr: float
    damping: float
    rates: tuple[float, float]
    trials: tuple[Trial, ...]
    learnt: bool


def search(run: Callable[[float, float], Trial], start: Start) -> Found:
    """Try rates first, then dampings at the rate that was found.

    Rates are tried a factor of 10 apart; then the ends of the range that does as well as the best are looked for
    between those. If something bounds the steps, the middle of that range is recommended, on a logarithmic scale: it is
    farthest from rates that fail. If nothing does, the lowest: what trains for a few steps at a high rate may fail
    later. Another damping is recommended only if it does much better.
    """
    trials = [run(rate, start.damping) for rate in start.rates or (start.lr,)]
    if start.rates:
        for _ in range(2):
            if not any(trial.gains for trial in trials):
                trials.append(run(min(trial.lr for trial in trials) / _APART, start.damping))
        if len(trials) == len(start.rates):
            trials += [run(rate, start.damping) for rate in _between(trials)]
    best = max(trials, key=lambda trial: trial.gain)
    if not any(trial.learns for trial in trials):
        return Found(start.lr, start.damping, (start.lr, start.lr), tuple(trials), learnt=False)
    low, high = _tied_rates(trials)
    lr = round_to_two(math.sqrt(low * high) if start.bounded else low) if start.rates else start.lr
    damping = start.damping
    if start.has_damping:
        more, less = (run(lr, round_to_two(start.damping * factor)) for factor in (_APART, 1 / _APART))
        trials += [more, less]
        if more.is_better(best, _MORE_DAMPING):
            best, damping = more, more.damping
        if less.is_better(best, _LESS_DAMPING):
            damping = less.damping
    return Found(lr, damping, (low, high), tuple(trials), learnt=True)


def round_to_two(number: float) -> float:
    """Return the number with two significant digits."""
    return float(f"{number:.2g}")


def _tied_rates(trials: Sequence[Trial]) -> tuple[float, float]:
    """Return the ends of the range of rates around the best that do as well."""
    rising = sorted(trials, key=lambda trial: trial.lr)
    best = max(rising, key=lambda trial: trial.gain)
    low = high = rising.index(best)
    while low > 0 and rising[low - 1].is_tied(best):
        low -= 1
    while high < len(rising) - 1 and rising[high + 1].is_tied(best):
        high += 1
    return rising[low].lr, rising[high].lr


def _between(trials: Sequence[Trial]) -> list[float]:
    """Return rates at which the range may end: between its ends and the next rates, or beyond a lonely best."""
    rates = sorted(trial.lr for trial in trials)
    low, high = _tied_rates(trials)
    part = math.sqrt(_APART)
    return [
        *([round_to_two(low / part)] if low > rates[0] or high == rates[0] else []),
        *([round_to_two(high * part)] if high < rates[-1] or low == rates[-1] else []),
    ]
