"""Which output gradients make `G`."""

from abc import ABC, abstractmethod

from kfac_optim.capture import CaptureWindow


class Estimate(ABC):
    """Decides which backward passes the capture window listens to."""

    @abstractmethod
    def arm(self, window: CaptureWindow) -> None:
        """Prepare `window` for the coming steps. Called once, when the optimizer is built."""


class Empirical(Estimate):
    """The training loss's own gradients: no extra pass, no knowledge of the loss.

    The resulting `A ⊗ G` approximates the empirical Fisher, which is not the Fisher: it vanishes with the
    residuals, so near a perfect fit steps are bounded by the damping and the trust region (Kunstner et al. 2019).
    """

    def __repr__(self) -> str:
        return "Empirical()"

    def arm(self, window: CaptureWindow) -> None:
        window.listening = True
