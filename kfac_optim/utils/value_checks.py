"""What the numbers in a checkpoint may be: each rule tells what is wrong with a tensor, or None."""

from collections.abc import Callable

from torch import Tensor

Rule = Callable[[Tensor], str | None]
"""What is wrong with a tensor of the right shape and kind, as in "negative"; None where nothing is."""

# How far off, against the largest element, rounding may leave differences, and an iteration its inverses.
_ROUNDING = 1e-2


def finite(tensor: Tensor) -> str | None:
    """Accept any number."""
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        return "not finite"
    return None


def not_negative(tensor: Tensor) -> str | None:
    """Refuse negative masses, counts and eigenvalues."""
    return finite(tensor) or measured(tensor)


def second_moments(tensor: Tensor) -> str | None:
    """Refuse negative means of squares, but for rounding."""
    if (wrong := finite(tensor)) is not None or tensor.numel() == 0:
        return wrong
    return "negative" if bool(tensor.min() < -_ROUNDING * tensor.abs().max()) else None


def measured(tensor: Tensor) -> str | None:
    """Refuse negative numbers only: what is shown to the user alone may have overflowed."""
    return "negative" if bool((tensor < 0).any()) else None


def squares(tensor: Tensor) -> str | None:
    """Refuse negative numbers and NaN: of averages of squares an element may have overflowed, as in torch's Adam."""
    return "not a number" if bool(tensor.isnan().any()) else measured(tensor)


def share(tensor: Tensor) -> str | None:
    """Refuse shares beyond 0 and 1."""
    return not_negative(tensor) or ("above 1" if bool((tensor > 1).any()) else None)


def unit_vectors(tensor: Tensor) -> str | None:
    """Refuse vectors with an element above 1, which no vector of length 1 has."""
    return finite(tensor) or ("longer than 1" if bool((tensor.abs() > 1 + _ROUNDING).any()) else None)


def positive(diagonal: Callable[[Tensor], Tensor]) -> Rule:
    """Give the rule for matrices without negative eigenvalues, as far as their diagonals tell."""

    def rule(tensor: Tensor) -> str | None:
        if (wrong := finite(tensor)) is not None:
            return wrong
        return second_moments(diagonal(tensor)) and "negative on its diagonal"

    return rule


positive_matrix = positive(lambda tensor: tensor.diagonal(dim1=-2, dim2=-1) if tensor.dim() == 3 else tensor)
"""The rule for such matrices `[groups, d, d]`, or diagonals `[groups, d]`."""
