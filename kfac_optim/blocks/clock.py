"""The clock of a block: when statistics and refreshes happened, and whether a refresh is due."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral
from typing import Any

from kfac_optim.capture.loss_terms import LossCount

# The averages change fastest while they are young: an inverse is out of date once they have grown by this factor.
_GROWTH_BEFORE_REFRESH = 1.5
# An inverse is out of date, too, once λ has grown or shrunk by this factor since the refresh: each factor has a share
# of √λ.
_DAMPING_BEFORE_REFRESH = 2.0


def period_of(group: Mapping[str, Any], name: str) -> int:
    """Return a period of a param group, in steps.

    A value that is no period counts as 1: `step()` refuses it with its name, and a forward should not fail for it.
    """
    period = group[name]
    if type(period) is int and period > 0:  # to ask whether it is any other kind of integer takes longer
        return period
    return int(period) if isinstance(period, Integral) and int(period) > 0 else 1


@dataclass
class Clock:
    """Counts the optimizer steps of a block, and notes at which of them something was done; -1 is never."""

    step: int = 0
    """The current step."""
    folds: int = 0
    """Statistics steps so far."""
    folded_at: int = -1
    refreshed_at: int = -1
    folds_at_refresh: int = 0
    damping: float = 0.0
    """`λ` of the last refresh, also of one that failed."""
    outdated: bool = False
    """Whether a refresh is due whatever the periods say."""
    summed_terms: float = 1
    """`LossCount.summed` of the last statistics."""
    loss_unit: float = 1
    """What the param group's `λ` is multiplied by, as of the last statistics (`StepSize.loss_unit`)."""
    gradient_scale: float = 1.0
    """What the loop itself multiplied gradients by, as the last step without clipping has shown (`ScaleProbe`)."""
    missed: bool = False
    """Whether the loss used the layer, or may have, at a step in which statistics were overdue and none came."""

    graded: int = 0
    """Steps in which the block had a gradient."""

    def advance(self, steps: int = 1) -> None:
        """Let steps pass."""
        self.step += steps

    def note_fold(self, count: LossCount) -> None:
        """Note that this step's statistics were taken into the averages."""
        self.folded_at = self.step
        self.summed_terms = count.summed or self.summed_terms
        self.folds += 1
        self.missed = False

    def statistics_due(self, period: int) -> bool:
        """Return whether statistics are due at this step: by period, or because the layer missed its turn."""
        return self.missed or self.step % period == 0

    def is_overdue(self, period: int) -> bool:
        """Return whether statistics have been due since they were last taken, at this step or an earlier one."""
        return self.step // period > self.folded_at // period

    def note_refresh(self, damping: float) -> None:
        """Note a refresh at this step, with this `λ`."""
        self.refreshed_at = self.step
        self.folds_at_refresh = self.folds
        self.damping = damping
        self.outdated = False

    def note_adoption(self, then: "Clock") -> None:
        """Note that an inverse was taken over whose refresh was begun when the clock stood at `then`."""
        self.refreshed_at = then.step
        self.folds_at_refresh = then.folds
        self.damping = then.damping
        self.outdated &= not then.outdated  # what was called for since is still to come

    def call_for_refresh(self) -> None:
        """Make a refresh due, whatever the periods say."""
        self.outdated = True

    def use_unit(self, unit: float) -> None:
        """Count `λ` in this unit of the loss from now on."""
        self.loss_unit = unit

    def since_fold(self) -> int:
        """Return the steps since statistics were last taken, 0 if they never were."""
        return self.step - self.folded_at if self.folds else 0

    def after_fold(self) -> "Clock":
        """Return the clock as it will be once the statistics of this step are taken."""
        return replace(self, folds=self.folds + 1, folded_at=self.step)

    def has_outrun(self, damping: float) -> bool:
        """Return whether `λ` is far from that of the last refresh."""
        return not self.damping / _DAMPING_BEFORE_REFRESH < damping < self.damping * _DAMPING_BEFORE_REFRESH

    def refresh_due(self, period: int, phase: Fraction) -> bool:
        """Return whether a refresh is due: by period, or at folds 1, 2, 3, 5, … while the averages are young.

        Args:
            period: steps between two refreshes.
            phase: where in the period the refresh stands, in [0, 1).
        """
        if self.folds == 0:
            return False
        if self.outdated:
            return True
        outgrown = self.folds >= _GROWTH_BEFORE_REFRESH * self.folds_at_refresh
        fresh = self.folded_at == self.step
        # To multiply a Fraction takes as long as all else here.
        return (fresh and outgrown) or self.step % period == phase.numerator * period // phase.denominator
