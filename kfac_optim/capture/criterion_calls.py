"""The calls of the criterion are numbered between two steps, and the terms of the loss that they make kept in order."""


class CriterionCalls:
    """Counts the calls of the criterion since the last step or dropped gradient.

    Attributes:
        terms: the terms of the loss, one for each call in order, or None where none was made of it; empty where no
            choice asks.
    """

    def __init__(self) -> None:
        self.terms: list[object | None] = []
        self._count, self._are_over = 0, False

    def restart(self) -> None:
        """Count from the beginning, as after a step."""
        self._count, self.terms, self._are_over = 0, [], False

    def drop(self) -> None:
        """Count from the beginning, as gradients were dropped."""
        self._count = 0
        self.end()

    def end(self) -> None:
        """Have the next call forget those before it: until then, their backward may still come."""
        self._are_over = True

    def begin(self) -> None:
        """Note that a criterion is called."""
        if self._are_over:
            self.terms, self._are_over = [], False

    def next_number(self) -> int:
        """Return the number of a call of which a term is made."""
        self._count += 1
        return self._count - 1
