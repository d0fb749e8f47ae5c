"""One call of a layer, with what its statistics are made of."""

from dataclasses import dataclass

from torch import Tensor

ADDS_BIAS = (1,)
"""The context of a product to which the block's bias was added; it is empty where the bias was not added."""


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
    """What the adapter that noted the call needs back."""
    in_operator: bool = False
    """Whether an operator of a compiled graph hands it over, within which autograd tells nothing of parameters."""
    reach: Tensor | None = None
    """Shaped as the gradient, and not zero in the rows that any of several gradients comes to; None for a lone one."""
    term: int = 0
    """Which term of the loss the gradient comes from. Terms are calls of the criterion, in their order since the last
    step; or forwards of the model, where no criterion was seen and the model is differentiated with respect to its
    inputs; otherwise 0.
    """
    column: int = 0
    """Which of several gradients of one term it is; forwards of the model that see other examples have others."""
    examples: int | None = None
    """Examples of the term; the rows of each lie together, in the order of the examples. None where that is unknown."""
    residual: Tensor | None = None
    """`s` `[examples]` of this term and column, with the loss's gradient `Σ s J` over examples and columns, where `J`
    is the derivative that the rows make up; None where it is unknown."""
    told_apart: bool = True
    """Whether it is known which examples the rows belong to, where other calls of the term have rows of the same."""
    rounding: float = 0.0
    """The largest relative rounding of the gradients that this one was made of, as far as it is known."""
    is_last: bool = False
    """Whether no other backward comes through the call before the step, as its graph is not retained."""
