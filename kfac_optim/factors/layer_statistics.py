"""Second moments of one call of a layer.

Canonical layout, used everywhere below: inputs are `[groups, batch, shared, in]`, output gradients
`[groups, batch, shared, out]`, gradient matrices `[groups, out, in]`, with the bias as the last input column.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kfac_optim.factors.second_moments import sum_of_squares
from kfac_optim.factors.subsampling import Draw
from kfac_optim.specs import Sketched, Structure

# Rows wait for those of other layers if an input or gradient on an accelerator has at most so many elements: 8,192 rows
# of a width of 4,096.
FEW_THERE = 2**25


class FewRows(NamedTuple):
    """Holds copies of the rows of one call, after weight sharing and `subsample`."""

    a: Tensor
    """Inputs `[rows, in]`, without the last column where `constant` says what stands there."""
    g: Tensor
    """Output gradients `[rows, out]`; rows that are exactly zero do not count."""
    constant: int | None
    weight: float = 1.0
    """How many rows of the call each stands for, as `LayerStatistics.weight` has it; `g` is as it was."""
    stream: Hashable = None
    """The stream that the copies are made in, as `streams.current_stream` names it."""

    @property
    def size(self) -> int:
        """Return how many bytes are held."""
        return self.a.nbytes + self.g.nbytes


class UnitRows(ABC):
    """Holds copies of what makes the moments of one call, on an accelerator, of a layer whose `A` is the identity.

    Attributes:
        count: how many rows the call had; they count if any of them has a gradient that is not exactly zero.
        weight: how many rows of the call each stands for, as in `FewRows`.
        stream: the stream that the copies are made in, as in `FewRows`.
    """

    count: int
    weight: float
    stream: Hashable

    @property
    @abstractmethod
    def size(self) -> int:
        """Return how many bytes are held."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """Return how many elements the largest tensor has that is made of them."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Return what calls share whose moments can be computed together."""

    @abstractmethod
    def output_moments(self, calls: Sequence[Self], structure: Structure | Sketched) -> tuple[Tensor, Tensor]:
        """Compute the moments of calls that are alike.

        Returns:
            `LayerStatistics.output_moment` of each, one after the other, without the weight; and whether its rows
            count, `[calls]` bool.
        """


class LayerStatistics(ABC):
    """Computes second moments of one call of a layer, when asked for them."""

    opposed = False
    """Whether the call multiplied by the transpose of the block's matrix, so that the sides change places."""

    @property
    def term(self) -> int:
        """Return which term of the loss the gradient belongs to, as `LayerCall.term` says."""
        return 0

    @property
    def of_call(self) -> "LayerStatistics":
        """Return the statistics that know the call; those that hand on what others compute return these others."""
        return self

    @property
    def keeps_input(self) -> bool:
        """Return whether further backwards through the call need its input, which lives until the window closes."""
        return False

    @property
    @abstractmethod
    def count(self) -> float | Tensor:
        """Return rows behind the input moment, each as often as it is weighed; 0 without one.

        A tensor where only the device can count them, `[]`, and where the groups have rows of their own
        (`LayerSpec.own_rows`), `[groups]`.
        """

    @property
    def has_input(self) -> bool:
        """Return whether there is an input moment to add."""
        return True

    @property
    def groups(self) -> slice | None:
        """Return which groups of the block the moments are of, as a slice of them; None is all."""
        return None

    @abstractmethod
    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        """Return `Σ a aᵀ`, `[groups, in, in]`, less what earlier backwards counted; or its diagonal `[groups, in]`.

        Statistics of adapters that say `in_rows` are asked for sketches as well, as `second_moments.gram` gives them.
        """

    @property
    def trace(self) -> Tensor | None:
        """Return what the input moment of a row was divided by, if that depends on the rows of the step.

        It is one number `[]`, or one for each group, and None for a plain sum. Ranks, which see different rows, tell it
        to each other.
        """
        return None

    @abstractmethod
    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        """Return `Σ g gᵀ`, `[groups, out, out]`, or its diagonal `[groups, out]`, or a sketch as for the input."""

    @abstractmethod
    def rows(self) -> tuple[Tensor, Tensor]:
        """Return `a` `[groups, batch, shared, in]` and `g` `[groups, batch, shared, out]`, after weight sharing."""

    def few_rows(self) -> FewRows | UnitRows | None:
        """Copy the rows, where their moments had better be computed with those of other layers.

        None has the moments computed now. The copies hold what may change in place until the step.
        """
        return None

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the gradient that the call adds to the block's matrix, along some directions, for the gradient check.

        It is asked of all rows, before weight sharing and before `subsample`.

        Args:
            directions: `V` `[in, k]`, of the block's matrix `[groups, out, in]`.

        Returns:
            `Σ g aᵀ V` over all rows, `[groups, out, k]` (`Σ a gᵀ V` where `opposed`), and its size as
            `second_moments.product_along` returns it; None where it is not known, so that nothing can be checked.
        """
        return None

    @property
    def weight(self) -> float:
        """Return how many rows of the call each row stands for, which weighs `g` (by its root), moments and `count`."""
        return 1.0

    def subsample(self, draw: Draw) -> None:
        """Make do with some of the rows; asked before anything else, where the adapter says `in_rows`."""
        raise NotImplementedError(
            f"kfac_optim: {type(self).__name__} cannot take some of its rows. Set in_rows = False on the adapter that "
            f"makes it, or override subsample() in {type(self).__name__}."
        )

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        """Return `Σ_n (U_Gᵀ ∇W_n U_A)²`, element by element, `[groups, out, in]`.

        Args:
            a_basis: eigenvectors as columns, `[groups, in, in]` or of one group; None for the standard basis.
            g_basis: eigenvectors over `out`, in the same form.
            dtype: the dtype of the bases, the computation and the result.
            per_example: whether n runs over examples, or else over their positions too.
        """
        a, g = (rows.to(dtype) for rows in self.rows())
        if not per_example:
            a, g = (rows.flatten(1, 2).unsqueeze(2) for rows in (a, g))
        return sum_of_squares(a, g, a_basis, g_basis)
