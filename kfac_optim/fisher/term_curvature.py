"""The curvature of what a criterion reads, along directions of the parameters, whatever it was computed from.

With the residual `r(θ)` in the graph, `Jᵀu` is computed when backward comes to `r`, as a function of `u`; the graph of
that function outlives the backward. After it, `J v` is the derivative of `⟨Jᵀu, v⟩` with respect to `u`. So nothing is
run again, and `r` may hold derivatives of the model, or be what a head outside of the model returns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from kfac_optim.fisher.criterion_term import CriterionTerm
from kfac_optim.fisher.likelihoods import Outputs
from kfac_optim.utils.autograd import pull_back_differentiably, push_forward, running_edge
from kfac_optim.utils.random_state import normal_like

# Relative difference of two sums of the same products that counts as rounding.
_TOLERANCE = 1e-3

OF_COMPILED = (
    "If the criterion reads the output of a compiled model, give the optimizer what torch.compile(model) returns, or "
    "compile by model.compile(): a forward cannot be seen where the whole call of the model, hooks included, is traced "
    "into a graph, as with an nn.Sequential, or with a model that is called in a compiled function."
)
"""Says what to do where the model may have been called in a graph, for messages."""

Direction = Mapping[nn.Parameter, Tensor]


@dataclass(frozen=True, slots=True)
class _PulledBack:
    """Holds `Jᵀu` of one tensor that a criterion reads.

    Attributes:
        vector: `u`, random numbers.
        gradients: `Jᵀu` at the parameters that the tensor depends on.
    """

    vector: Tensor
    gradients: Direction

    def push_forward(self, direction: Direction) -> Tensor:
        """Return `J v`.

        Raises:
            RuntimeError: `⟨Jᵀu, v⟩` is not `⟨u, J v⟩`.
        """
        moved = [param for param in self.gradients if param in direction]
        if not moved:
            return torch.zeros_like(self.vector)
        gradients, vectors = [self.gradients[param] for param in moved], [direction[param] for param in moved]
        pushed = push_forward(gradients, self.vector, vectors)
        parts = [(grad.detach() * vector).flatten() for grad, vector in zip(gradients, vectors, strict=True)]
        other = (self.vector.detach() * pushed).flatten()
        difference = sum(part.sum().to(other.device) for part in parts) - other.sum()
        size = sum(part.norm().to(other.device) for part in (*parts, other))
        if not bool(difference.abs() <= _TOLERANCE * size):
            raise RuntimeError("a derivative of a derivative is missing or wrong.")
        return pushed


@dataclass(eq=False)
class TermCurvature:
    """Keeps what the curvature of one call of a criterion is computed from.

    Attributes:
        term: the call.
        outputs: what it reads, detached.
    """

    term: CriterionTerm
    outputs: Outputs
    _used: dict[int, Tensor] = field(default_factory=dict)
    _pulled: dict[int, _PulledBack] = field(default_factory=dict)

    def arrive(self, place: int, output_nr: int, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """Differentiate one output, as a hook on it in the training loop's backward.

        Args:
            place: which of the outputs it is.
            output_nr: its number at its node of the graph.
            gradient: the gradient of the loss with respect to it.
            params: the parameters with respect to which it is differentiated.
        """
        used, before = self.term.used(gradient), self._used.get(place)
        self._used[place] = used if before is None else used | before
        if place not in self._pulled:
            generator = torch.Generator(gradient.device).manual_seed(0)
            vector = normal_like(self.outputs[place], generator).requires_grad_()
            gradients = _explained(pull_back_differentiably, running_edge(output_nr), vector, params)
            known = {param: grad for param, grad in zip(params, gradients, strict=True) if _varies(grad)}
            self._pulled[place] = _PulledBack(vector, known)

    def release(self) -> None:
        """Let go of the graphs of derivatives, whose nodes may hold the hook on what the criterion reads."""
        self._pulled.clear()

    def forms(self, directions: Sequence[Direction], like: Tensor) -> Tensor:
        """Return `f_c/M_c vᵢᵀ Jᵀ H J vⱼ`, `[k, k]`, in the dtype and on the device of `like`."""
        places = range(len(self.outputs))
        pushed = [tuple(self._push_forward(place, direction) for place in places) for direction in directions]
        forms = like.new_zeros(len(directions), len(directions))
        for i, left in enumerate(pushed):
            curved = self.term.likelihood.curved(self.outputs, left)
            for j, right in enumerate(pushed):
                for place, used in self._used.items():
                    product = right[place] * curved[place] * used.to(left[place].dtype)
                    forms[i, j] += product.sum(dtype=like.dtype).to(like.device)
        return forms * self.term.weight(forms)

    def _push_forward(self, place: int, direction: Direction) -> Tensor:
        if place not in self._pulled:
            return torch.zeros_like(self.outputs[place])
        pushed: Tensor = _explained(self._pulled[place].push_forward, direction)
        return pushed


def _varies(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.requires_grad


def _explained(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except RuntimeError as error:
        raise RuntimeError(
            "kfac_optim: the curvature at the criterion is asked for along a step, for which what the criterion reads "
            f"is differentiated twice, and that failed: {error} Functions without a second derivative (fused "
            "attention, autograd.Functions that are once_differentiable) have to be written out (attention by "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), or do without QuadraticModel. Graphs of torch.compile "
            f"have none either. {OF_COMPILED}"
        ) from error
