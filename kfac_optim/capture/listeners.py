"""What the capture window tells of forwards of the model, and of terms of its loss, and whom."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_optim.capture.loss_terms import RootCall


class ForwardKeeper(Protocol):
    """Keeps forwards of the model, so that they can be run again."""

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that the outermost forward begins; `kwargs` is None where they are not known before it ends."""

    def end(self, root: RootCall, kwargs: Any, out: Any) -> None:
        """Note that the forward has ended; `out` is None if it failed."""

    def note_term(self, term: Any, outputs: tuple[Tensor, ...]) -> None:
        """Note that a criterion has read `outputs`."""

    def drop(self) -> None:
        """Let go of the forwards: their gradients were thrown away, or used."""


class TermObserver(Protocol):
    """Takes note of terms of the loss that the training loop states."""

    remembers: bool

    def observe_residual(self, residual: Any, weight: float) -> None:
        """Note a term, before its backward."""

    def changes(self, calls: Sequence[object | None], evaluate: Callable[[], object]) -> dict[tuple[int, int], Tensor]:
        """Return how residuals change where `evaluate` evaluates the loss."""


class ForwardListener:
    """Hears of the model's forwards while they run. This one needs to hear nothing; subclasses say what they need.

    Attributes:
        mode: the mode that forwards of the model run in when `begin_forward` says so, and in graphs that capture.
    """

    mode: TorchFunctionMode | None = None

    def begin_forward(self) -> bool:
        """Note that a forward of the model begins outside of graphs; return whether it is to run in the mode.

        If not, no layer that is watched needs its calls in this forward to be captured.
        """
        return False

    def begin_alone(self) -> bool:
        """Note that the forward of a module begins; return whether it is to run in the mode, outside of the model's.

        That is where it runs by itself, or again within backward.
        """
        return False

    def look(self) -> None:
        """Note that a forward of the model runs in the mode, perhaps in a graph."""

    def expect_derivatives(self) -> None:
        """Note that the forward that has begun will be differentiated with respect to its input."""

    def module_ran(self, weight: nn.Parameter) -> bool:
        """Note, within the mode, that a module whose forward is a product with this weight has run.

        Returns:
            Whether the mode has noted the product.
        """
        return False

    def layer_ran(self, weight: nn.Parameter) -> bool:
        """Note, within the mode, that any other module with this weight has run.

        Returns:
            Whether the mode has noted what it did.
        """
        return False
