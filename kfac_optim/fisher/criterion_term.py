"""One call of the criterion: a term of the loss, which backward tells the weight of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.capture.calls import Drawn, ForwardCall
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.factors.example_rows import rows_of_examples
from kfac_optim.fisher.likelihoods import Likelihood, Outputs
from kfac_optim.utils.precision import at_least_float32, largest_rounding
from kfac_optim.utils.sharded_params import whole

# Rounding errors that are allowed for where few bits are kept, in units of the coarsest dtype that took part.
_ROUNDINGS = 16


class Chunk(NamedTuple):
    """Says which examples of a term a forward of the model has, where each has a part of the batch."""

    number: int
    """Forwards of other numbers have other examples."""
    examples: int
    """How many these are."""
    told_apart: bool = True
    """Whether it is known which other forwards have the same."""


@dataclass(eq=False)
class CriterionTerm:
    """Describes one call of the criterion.

    The loss is `Σ_c f_c/M_c Σ_n ℓ(r_cn)` over calls `c`, where `f_c` is the gradient that comes to the call's output:
    whatever the loss multiplies it by, accumulation and loss scale included. Its Fisher matrix, or its generalised
    Gauss-Newton matrix, is `Σ_c f_c/M_c Σ_n Jᵀ H J`. With `H = B Bᵀ` the rows `√(f_c/M_c) Bᵀ J` make it without further
    factors, and with `s = √(f_c/M_c) B⁻¹ ∂ℓ` the gradient is the sum of these rows times `s`.

    Attributes:
        likelihood: the likelihood of the loss.
        number: the number of the call, counted since the last step.
        examples: how many examples the criterion reads.
        outputs: what the criterion reads, detached, the examples along the first dimension; empty where `change` is not
            going to be asked for.
        divisor: `M_c`: terms that the criterion takes the mean of; 1 where it sums.
        factor: `f_c` `[]`, once the backward has come to the call's output; its negative where all layers
            ascend, its size where some do.
        counts: which terms count by their targets, shaped as `Likelihood.used` has it; None where all do.
    """

    likelihood: Likelihood
    number: int
    examples: int
    outputs: Outputs
    divisor: float | Tensor
    factor: Tensor | None = None
    counts: Tensor | None = None

    def used(self, gradient: Tensor) -> Tensor:
        """Return which terms the loss used, by its gradient at what the criterion reads, which others may read too."""
        used = self.likelihood.used(gradient)
        return used if self.counts is None else used & self.counts

    def regroup(self, outputs: Outputs, examples: int) -> Outputs:
        """Take the rows of what the criterion reads for so many examples, several for each; return `outputs` so."""
        self.examples = examples
        self.outputs, regrouped = (
            tuple(output.reshape(examples, -1, *output.shape[1:]) for output in each)
            for each in (self.outputs, outputs)
        )
        return regrouped

    def weighed(self, vector: Tensor) -> Tensor:
        """Multiply by `√(f_c/M_c)`, and by 0 where `factor` is negative: such a term has no curvature here."""
        return (vector * self.weight(vector).sqrt()).to(vector.dtype)

    def residuals(self, outputs: Outputs, place: int, gradient: Tensor) -> Tensor:
        """Return `s`, `[columns of B, examples]`.

        Args:
            outputs: what the criterion reads.
            place: which of them the gradient belongs to.
            gradient: the gradient of the loss with respect to that one, which is `f_c/M_c ∂ℓ`.
        """
        weight = self.weight(gradient)
        scaled = torch.where(weight > 0, gradient / torch.where(weight > 0, weight, 1).sqrt(), 0).to(gradient.dtype)
        return self.likelihood.solved(outputs, place, scaled.reshape(outputs[place].shape)).mT

    def combined(self, vectors: Sequence[Tensor | None], residuals: Tensor) -> Tensor | None:
        """Return the sum of the columns of `B`, as they are backpropagated, times `s`; None where there are none."""
        total: Tensor | None = None
        for vector, s in zip(vectors, residuals, strict=True):
            if vector is not None and vector.numel() > 0:
                part = vector.reshape(self.examples, -1) * s.to(vector.dtype).unsqueeze(1)
                total = part.view(vector.shape) if total is None else total + part.view(vector.shape)
        return total

    def accounts_for(
        self, gradients: Sequence[Tensor | None], columns: Sequence[Sequence[Tensor | None]], residuals: Tensor
    ) -> bool:
        """Return whether the rows times `s` make up what `combined` brings to the layers.

        They do not where examples interact, or where what the criterion reads holds the examples in another order than
        the layers do.

        Args:
            gradients: the gradients of `combined` at the output of each call; DTensors where tensor parallelism has cut
                that.
            columns: the gradients there of each column of `B`.
            residuals: `s`, `[columns, examples]`.
        """
        # What is narrow after a layer, as under autocast, rounds the gradients of those before it as well.
        rounding = _ROUNDINGS * largest_rounding(gradients)
        for place, part in enumerate(gradients):
            if part is None:
                continue
            gradient = whole(part)
            made = torch.zeros_like(gradient)
            size = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
            for of_layers, s in zip(columns, residuals, strict=True):
                if (in_parts := of_layers[place]) is None:
                    continue
                rows = whole(in_parts)
                weights = self._by_row(rows, s)
                if weights is None:
                    return False
                weighed = rows * weights.to(rows.dtype)
                made += weighed
                size += weighed.square().sum()
            allowed = max(1e-3 if gradient.dtype is not torch.float64 else 1e-8, rounding)
            if not bool((made - gradient).square().sum() <= allowed**2 * size + torch.finfo(size.dtype).tiny):
                return False
        return True

    def _by_row(self, rows: Tensor, s: Tensor) -> Tensor | None:
        """Return what each row of a layer is to be multiplied by, `[batch, 1, …]`; None where that is not known."""
        index = rows_of_examples(rows, self.examples)
        if index is None:
            return None
        weights = torch.zeros(rows.shape[0], dtype=s.dtype, device=s.device)
        weights[index.flatten()] = s.repeat_interleave(index.shape[1])
        return weights.view(-1, *(1 for _ in rows.shape[1:]))

    def change(self, outputs: Outputs) -> list[Tensor]:
        """Return by how much residuals have changed, `[examples]` for each column of `B`: `√(f_c/M_c) Bᵀ(z - z₀)`.

        Args:
            outputs: `z`, what the criterion has read at other parameters.
        """
        moved = [new.reshape(old.shape) - old for new, old in zip(outputs, self.outputs, strict=True)]
        changes = []
        for column in self.likelihood.columns(self.outputs):
            parts = [
                (vector * by).reshape(self.examples, -1 if self.examples else 1).sum(1)
                for vector, by in zip(column, moved, strict=True)
                if vector is not None
            ]
            changes.append(self.weighed(torch.stack(parts).sum(0)))
        return changes

    def chunks(self, calls: Sequence[ForwardCall]) -> dict[RootCall | None, Chunk]:
        """Return the forwards of the model that have some of the examples each, as where a loop goes over chunks.

        There are none where no forwards have examples of their own. Examples of several forwards are not told apart
        where each chunk has several, or where others have the whole batch.

        Args:
            calls: the calls of layers that the term comes to.
        """
        batches: dict[RootCall | None, int] = {}
        for call in calls:
            if batch := call.batch():
                batches[call.root] = min(batch, batches.get(call.root, batch))
        has = {root: self._examples_of(root, fewest) for root, fewest in batches.items()}
        some = [examples for examples in has.values() if examples < self.examples]
        rounds, left = divmod(sum(some), self.examples) if self.examples else (0, 0)
        if rounds == 0 or left:
            return {}
        if rounds == 1 and len(some) == len(has):
            return {root: Chunk(number, examples) for number, (root, examples) in enumerate(has.items())}
        return {root: Chunk(0, self.examples, examples >= self.examples) for root, examples in has.items()}

    def _examples_of(self, root: RootCall | None, fewest: int) -> int:
        """Return how many examples a forward has: those that the model was handed, or the fewest rows of its calls.

        Args:
            root: the forward.
            fewest: the fewest rows that any call in it has; several may be of one example.
        """
        handed = () if root is None or root.is_mapped else root.handed
        if self.examples in handed:
            return self.examples
        return max((size for size in handed if fewest % size == 0), default=fewest)

    def drawn(self, column: int, residuals: Tensor | None, chunk: Chunk | None, columns: int) -> Drawn:
        """Say where a gradient comes from; if its rows are not told apart by examples, whoever needs that refuses.

        Args:
            column: the column of `B`.
            residuals: `s`, `[columns, examples]`; None where it is unknown.
            chunk: which examples the forward has; None where these are no part of the batch, or it is not known.
            columns: how many columns `B` has.
        """
        if residuals is not None:
            return Drawn(self.number, column, self.examples, residuals[column])
        if chunk is None:
            return Drawn(self.number, column)
        # Examples of other forwards are others: their gradients are columns of their own.
        return Drawn(self.number, column + chunk.number * columns, chunk.examples, None, chunk.told_apart)

    def weight(self, like: Tensor) -> Tensor:
        """Return `f_c/M_c`, 0 where `factor` is negative; on the device of another tensor.

        It has that tensor's dtype, but is at least float32: a loss scale of 65,536 is infinite in float16.
        """
        assert self.factor is not None
        return (self.factor.to(at_least_float32(like.dtype)) / self.divisor).clamp(min=0).to(like.device)
