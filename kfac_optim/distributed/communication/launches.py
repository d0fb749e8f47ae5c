"""What a collective leaves when it is launched: an event that waits for the result."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """Says which collective failed or took too long, with its layers and the ranks. The process group is lost."""


def listed_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, for messages."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Event:
    """Waits for the end of one collective on this rank.

    Args:
        wait: waits for the collective, and takes what came; launches nothing.
        is_over: whether the collective has ended already, so that `wait` would return at once.
    """

    def __init__(self, wait: Callable[[], None], is_over: Callable[[], bool] = lambda: False) -> None:
        self._wait: Callable[[], None] | None = wait
        self._is_over = is_over

    def wait(self, *, only_if_over: bool = False) -> None:
        """Return when the result is valid; on an accelerator, for what is queued in the present stream from now on.

        Waiting again does nothing. Afterwards nothing holds the buffers of the collective.

        Args:
            only_if_over: does nothing where it would have to wait.

        Raises:
            CollectiveError: it failed, or took longer than the communicator's time-out. (With NCCL, which runs beside
                the program, its own watchdog ends the process instead.)
        """
        if self._wait is not None and not (only_if_over and not self._is_over()):
            self._wait()
            self._wait, self._is_over = None, lambda: True  # both hold buffers


class InFlight(NamedTuple, Generic[T]):
    """Stands for a collective under way."""

    result: T
    """The result; valid once `event` was waited for."""
    event: Event

    def wait(self) -> T:
        """Return the result when it is valid; see `Event.wait`."""
        self.event.wait()
        return self.result
