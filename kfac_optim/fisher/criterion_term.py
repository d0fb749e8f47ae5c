"""One call of the criterion: a term of the loss, which backward tells the weight of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.capture.calls import Drawn
from kfac_optim.fisher.likelihoods import Likelihood, Outputs


@dataclass(eq=False)
class CriterionTerm:
    """Describes one call of the criterion.

    The loss is `Σ_c f_c/M_c Σ_n ℓ(r_cn)` over calls `c`, where `f_c` is the gradient that comes to the call's output:
    whatever the loss multiplies it by, accumulation and loss scale included. Its Fisher matrix, or its generalised
    Gauss-Newton matrix, is `Σ_c f_c/M_c Σ_n Jᵀ H J`. With `H = B Bᵀ` the rows `√(f_c/M_c) Bᵀ J` make it without further
    factors, and with `s = √(f_c/M_c) B⁻¹ ∂ℓ` the gradient is the sum of these rows times `s`.

    Attributes:
        likelihood: of the loss.
        number: of the call since the last step.
        examples: of what the criterion reads.
        divisor: `M_c`: terms that the criterion takes the mean of; 1 where it sums.
        factor: `f_c` `[]`, once the backward has come to the call's output.
    """

    likelihood: Likelihood
    number: int
    examples: int
    divisor: float | Tensor
    factor: Tensor | None = None

    def weighed(self, vector: Tensor) -> Tensor:
        """Multiply by `√(f_c/M_c)`; a term that the loss subtracts has no curvature here."""
        return vector * self._weight(vector).sqrt()

    def residuals(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        """Return `s`, `[columns of B, examples]`.

        Args:
            outputs: what the criterion reads.
            place: of one of them.
            gradient: of the loss with respect to that one, which is `f_c/M_c ∂ℓ`.
        """
        weight = self._weight(gradient)
        scaled = gradient / weight.clamp(min=torch.finfo(weight.dtype).tiny).sqrt()
        return self.likelihood.solved(outputs, place, scaled.reshape(outputs[place].shape)).mT

    def drawn(self, column: int, residuals: Tensor | None) -> Drawn:
        """Say where a gradient comes from."""
        return Drawn(self.number, column, self.examples, None if residuals is None else residuals[column])

    def _weight(self, like: Tensor) -> Tensor:
        assert self.factor is not None
        return (self.factor.to(like.dtype) / self.divisor).clamp(min=0)
