"""What an inverse of the damped Fisher block must provide."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kfac_optim.inverses.state import InverseState
from kfac_optim.specs import Cost, Kept, LayerSpec, Part

S = TypeVar("S", bound=InverseState)


class Inverse(ABC, Generic[S]):
    """Represents the inverse curvature of a block. `refresh` does the expensive work, `apply` the cheap one.

    The object holds choices only; what is measured is in the `InverseState` of each block. A representation of your own
    needs the five abstract methods and a state.
    """

    follows_damping = False
    """Whether `apply` damps by the λ it is given, so that a λ which moves needs no refresh."""

    takes_rows = False
    """Whether a state makes do with the rows of calls, and asks for no moments."""

    keeps_terms = False
    """Whether the terms of the loss have factors of their own."""

    @property
    def squares_examples(self) -> bool:
        """Return whether sums over the positions of an example are squared, so that none of them may be left out."""
        return False

    def factor_dims(self, spec: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the matrices whose Kronecker product stands for a dense `A`, and for a dense `G`.

        Args:
            spec: the layer as its adapter describes it, before factors that are too wide are kept in another form.
        """
        return (spec.in_dim,), (spec.out_dim,)

    def kept(self, wish: Kept, dim: int) -> Kept:
        """Return what this representation keeps of a factor, where the user and the layer wish for `wish`.

        It is asked for layers whose statistics can be sketched (`LayerAdapter.in_rows`), in float32 at least.

        Args:
            wish: a structure that the layer and the user allow.
            dim: width of the factor.
        """
        return wish

    @abstractmethod
    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> S:
        """Return a state that has seen nothing; applying it gives the gradient back.

        Args:
            spec: the layer by blocks (`LayerSpec.by_blocks`): these are groups here.
            dtype: the dtype of the factors.
            device: the device of the parameters.
        """

    @abstractmethod
    def refresh(self, states: Sequence[S], dampings: Sequence[float]) -> None:
        """Recompute the inverses of blocks that share this representation, equal shapes batched.

        A block whose computation fails keeps its last good inverse and counts the failure in its state.
        """

    @abstractmethod
    def apply(self, state: S, grad: Tensor, damping: float) -> Tensor:
        """Return the preconditioned `grad` `[groups, out, in]`; `damping` is for those that follow it.

        The result is a new tensor, in at least float32; but in `applied_dtype` where `grad` is.
        """

    def apply_to_columns(self, state: S, columns: Sequence[Tensor], damping: float) -> list[Tensor] | None:
        """Return what `apply` makes of a matrix that lies in several tensors; None where it has to be one.

        So a wide weight and its bias need not be copied into one matrix, nor the result out of it.

        Args:
            state: the state, as for `apply`.
            columns: the matrix, in parts `[groups, out, in_i]` side by side, in any dtype.
            damping: the damping, as for `apply`.
        """
        return None

    def apply_jointly(
        self,
        states: Sequence[S],
        grads: Sequence[Tensor],
        dampings: Sequence[float],
        decays: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return what `apply` does, of all blocks that share this representation; asked where `takes_rows`.

        Args:
            states: the states of the blocks.
            grads: the gradient of each block, as for `apply`.
            dampings: the damping of each block, as for `apply`.
            decays: the part of each of `grads` that is of weight decay; None where there is none.
        """
        return [self.apply(*each) for each in zip(states, grads, dampings, strict=True)]

    def acceleration(
        self, states: Sequence[S], velocities: Sequence[Tensor], change: Mapping[tuple[int, int], Tensor], length: float
    ) -> list[Tensor] | None:
        """Return how a step bends so that residuals change along a line; None where that is not known.

        It is asked where `takes_rows`, before the states' `end_step`.

        Args:
            states: all that `apply_jointly` has seen.
            velocities: a step `v` as it begins, `[groups, out, in]` for each state.
            change: how residuals change along `length · v`, `[examples]` for each term of the loss and column.
            length: the share of the step along which `change` was seen.
        """
        return None

    def applied_dtype(self, state: S) -> torch.dtype | None:
        """Return the dtype in which `apply` computes; None is that of the factors, but at least float32.

        `grad` is best made in that dtype: to cast it afterwards takes another pass over all parameters.
        """
        return None

    @abstractmethod
    def flops(self, spec: LayerSpec) -> Cost:
        """Return the floating-point operations of `refresh` and `apply` for one block; `spec` as `init` gets it."""

    @abstractmethod
    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """Return what of one block's inverse can be recomputed apart; the operations add up to those of `flops`."""


class InverseRule(ABC):
    """Chooses the representation of each block, where none is given by name.

    Choices that are equal and hash alike (as frozen dataclasses are and do) are refreshed together.
    """

    @abstractmethod
    def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
        """Return the representation of one block.

        Args:
            spec: the block; its structure is what is wished for, whatever the sizes.
            max_factor_dim: the width above which a factor cannot be kept whole and is made diagonal.
            channels: channels of the feature map that the layer reads flattened; None where that is not known.
        """
