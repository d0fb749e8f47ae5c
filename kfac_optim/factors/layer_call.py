"""One call of a layer, with what its statistics are made of."""

from dataclasses import dataclass

from torch import Tensor

ADDS_BIAS = (1,)
"""The context of a product to which the block's bias was added; without it there is none."""


def adds_bias_to_first(positions: int) -> tuple[int, ...]:
    """Return the context of a product to which the block's bias was added at the first positions of an example alone.

    Args:
        positions: how many, of the shared positions in their order.
    """
    return (*ADDS_BIAS, positions)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Holds one forward call of a layer, as a backward through it leaves it."""

    input: Tensor | None
    """The layer's input. None from the second backward on, unless statistics of an earlier one kept it."""
    gradient: Tensor
    """Gradient with respect to the layer's output, summed over the backwards so far; or one of several gradients whose
    statistics add up."""
    earlier: Tensor | None = None
    """The same sum before this backward, to be taken back; None at the first backward."""
    training: bool = True
    """Whether the layer was in training mode in its forward."""
    context: tuple[int, ...] = ()
    """What the adapter that noted the call wants back."""
    in_operator: bool = False
    """Whether an operator of a compiled graph hands it over, within which autograd tells nothing of parameters."""
    reach: Tensor | None = None
    """Shaped as the gradient, and not zero in the rows that any of several gradients comes to; None for a lone one."""
    term: int = 0
    """Which call of the criterion the gradient comes from: the first since the last step is 0, the next 1, …; always 0
    where no criterion was seen to be called."""
