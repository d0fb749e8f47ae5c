"""How refreshes are spread over their period: the user's choices. Whether one is due is in `blocks/clock.py`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.validation import check_flag, check_integer, check_kind


class Schedule(ABC):
    """Says how the refreshes of a model's blocks are spread over `inverse_update_period`."""

    @abstractmethod
    def phases(self, costs: Sequence[float]) -> list[Fraction]:
        """Return when each block is due, as a part of its period, in [0, 1).

        A block of phase `f` is due where `step % period == int(f * period)`.

        Args:
            costs: operations of one refresh of each block.
        """


@dataclass(frozen=True)
class Together(Schedule):
    """Refreshes every block at the same steps: the fewest and largest batches, and the longest single step."""

    def phases(self, costs: Sequence[float]) -> list[Fraction]:
        return [Fraction(0)] * len(costs)


@dataclass(frozen=True)
class Staggered(Schedule):
    """Refreshes a few blocks at each step, so that no step is much longer than the others.

    By falling cost the blocks are laid end to end over the period, each taking of it the share that it has of all
    operations (`Inverse.flops`), and each is refreshed where it begins. With `c` the operations of one block, at most
    `max(max c, 2 Σ c / period)` fall on one step, of which no other order can have less than half. As it does not
    depend on the period, periods may differ and be changed; each block is refreshed once in every period.

    Refreshes that come by no period are for all blocks at once: the first, at the first statistics; those while the
    averages are young, so in the first two or three periods of a run; and those that a damping which has doubled or
    halved brings. Where a forward shows further blocks all are laid out again.
    """

    def phases(self, costs: Sequence[float]) -> list[Fraction]:
        sizes = [round(cost) + 1 for cost in costs]  # the one spreads those that cost nothing
        phases = [Fraction(0)] * len(costs)
        begin = 0
        for index in sorted(range(len(costs)), key=lambda i: (-sizes[i], i)):
            phases[index] = Fraction(begin, sum(sizes))
            begin += sizes[index]
        return phases


@dataclass(frozen=True)
class Background:
    """Refreshes beside the training, in a thread of their own; a step waits for them only where it must.

    Where blocks are due their factors are copied, and the copies are refreshed while training goes on, on an
    accelerator in a stream of their own. The result takes the old inverse's place between two steps; the running
    averages, and the second moments of `EKFAC`, go on meanwhile. (Ba, Grosse & Martens 2017, §3, refresh
    asynchronously on other machines.) A block that is due while its refresh is under way is not begun again. A step
    waits for the first refresh of a block, before which there is nothing to precondition with; for the refresh after a
    step that `LevenbergMarquardt` has taken back; and for one that is not done after `max_staleness` steps.

    It is for refreshes that make single steps much longer, where there are cores or accelerator time to spare; it costs
    the memory of a second state for every block, and the time of two copies. `metrics()["inverse_age"]` counts from the
    step whose factors were copied.

    Args:
        schedule: which blocks are due together: `Together()` or `Staggered()`, after which no step has all the copies.
        max_staleness: steps after which a refresh is waited for if it is not done; 0 waits at once.
        deterministic: whether every result is taken over after exactly `max_staleness` steps, so that a run does not
            depend on how fast the machine is; otherwise it is at the first step that finds it done. Where several
            processes train one model they agree only so.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `max_staleness` is below 0.
    """

    schedule: Schedule = Together()
    max_staleness: int = 10
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_kind("schedule of Background", self.schedule, Schedule)
        check_integer("max_staleness of Background", self.max_staleness, at_least=0)
        check_flag("deterministic of Background", self.deterministic, optional=False)


class Phases:
    """Lays the refreshes of all blocks out over their period.

    Args:
        schedule: the schedule, which says how.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._laid_out: list[tuple[KFACBlock, LayerSpec]] = []

    def lay_out(self, blocks: Sequence[KFACBlock]) -> None:
        """Give each block its phase; do so again if a forward has shown more of the layers."""
        specs = [(block, block.spec) for block in blocks]
        if specs != self._laid_out:
            phases = self._schedule.phases([block.inverse.flops(block.spec.by_blocks()).refresh for block in blocks])
            for block, phase in zip(blocks, phases, strict=True):
                block.phase = phase
            self._laid_out = specs


Refresh = Schedule | Background


def check_refresh(value: object) -> None:
    """Raise TypeError unless it is one of the choices above."""
    if not isinstance(value, Refresh):
        raise TypeError(
            f"kfac_optim: refresh must be Together(), Staggered() or Background(...), got {value!r}. "
            "Pass an instance, such as refresh=Background(Staggered())."
        )
