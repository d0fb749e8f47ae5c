"""Damping that follows from how well the quadratic model of the loss predicts what a step does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfac_optim.step.step_size import refuse_complex, refuse_sparse
from kfac_optim.utils.validation import check_flag, check_integer, check_number

# Martens & Grosse 2015, §6.5, after Nocedal & Wright: trust the model more above, less below.
_TRUSTED = 3 / 4
_DISTRUSTED = 1 / 4


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Raises and lowers `damping` by the reduction ratio `ρ` of the loss (Martens & Grosse 2015, §6.5).

    Every `interval` steps the closure is evaluated once more after the step, on the same examples, with the random
    numbers of the first evaluation, and without a trace in gradients, statistics or buffers. With `q` the quadratic
    model of the loss by its exact Gauss-Newton matrix, without `λ`,

        ρ = (h(θ + δ) - h(θ)) / (q(δ) - q(0)),

    `λ` is divided by `decay ** interval` where `ρ < 1/4` or is not finite, and multiplied by it where `ρ > 3/4`. It
    stays where `ρ` says nothing: the loss fell though a rise was predicted, or the prediction is lost in rounding. The
    inverses take the new `λ` with their next refresh, which comes whatever the period once `λ` has doubled or halved
    since the last (`Eigen` and its kin with the next step).

    When to use: on large batches and deterministic objectives, above all for deep autoencoders, where no fixed damping
    is right from start to end. On small batches `ρ` tells how far the step overfits its batch, and `λ` grows. Networks
    with batch normalisation and transformers do well with a fixed `λ`. It writes `damping` into the param groups: do
    not schedule `damping` as well.

    It needs `step(closure)`, with a closure that sees the same examples each time and returns the loss whose gradient
    it leaves, and an `estimate=` that names the loss.

    Args:
        interval: steps between two adaptations.
        decay: the decay of `λ` for each of these steps, in (0, 1]; 1 leaves `λ` as it is.
        minimum: the bound below which `λ` does not fall.
        maximum: the bound above which it does not rise.
        reject: whether every step is tried, and taken back if the loss rose: parameters are then as before, momentum
            starts from zero, `λ` rises as after a failure, whatever the interval, and the inverses are refreshed with
            it at the next step. `metrics()` counts `rejected_steps`.
    """

    interval: int = 5
    decay: float = 0.95
    minimum: float = 1e-8
    maximum: float = 1e8
    reject: bool = False

    def __post_init__(self) -> None:
        check_integer("interval of LevenbergMarquardt", self.interval)
        check_number("decay of LevenbergMarquardt", self.decay, above=0, at_most=1)
        check_number("decay ** interval of LevenbergMarquardt", self.decay**self.interval, above=0)
        check_number("minimum of LevenbergMarquardt", self.minimum, above=0)
        check_number("maximum of LevenbergMarquardt", self.maximum, at_least=self.minimum)
        check_flag("reject of LevenbergMarquardt", self.reject, optional=False)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError where a param group does not go with it."""
        for i, group in enumerate(groups):
            if group["maximize"]:
                raise ValueError(
                    "kfac_optim: LevenbergMarquardt judges steps by how far they lower the loss: maximize of param "
                    f"group {i} must be False, got {group['maximize']!r}. Negate the loss in the closure."
                )

    def check_gradients(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError where a gradient does not go with it."""
        for i, group in enumerate(groups):
            refuse_sparse(group, i, "LevenbergMarquardt")
            refuse_complex(group, i, "LevenbergMarquardt")

    def adapts_at(self, step: int) -> bool:
        """Return whether `λ` is adapted after step number `step`, the first being 0."""
        return (step + 1) % self.interval == 0

    def tries(self, step: int) -> bool:
        """Return whether step number `step` is judged at all."""
        return self.reject or self.adapts_at(step)

    def adapted(self, damping: float, ratio: float | None) -> float:
        """Return the new `λ` by the reduction ratio: -∞ for a failure, None if there is nothing to learn."""
        factor = self.decay**self.interval
        if ratio is None:
            return damping
        if not ratio >= _DISTRUSTED:  # NaN is a failure
            damping = damping / factor
        elif ratio > _TRUSTED:
            damping = damping * factor
        return min(max(damping, self.minimum), self.maximum)
