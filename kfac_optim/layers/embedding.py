"""`nn.Embedding`: a linear layer over one-hot rows, which are never built for the factors.

The gradient matrix is the transposed weight, `[1, embedding_dim, num_embeddings]`, and `A` counts tokens: it is
diagonal, exactly so for weight sharing `expand` (as in kfac-jax and tensorflow/kfac).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture.batches import examples_of
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import product_along, turned
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.base import StatisticsSink, WeightBiasAdapter, own_forward
from kfac_optim.layers.noted_function import Noted, note_function
from kfac_optim.specs import LayerSpec, Sketched, Structure, WeightSharing
from kfac_optim.utils.hooks import Handle

Table = TypeVar("Table", bound=nn.Embedding | nn.EmbeddingBag)


class EmbeddingStatistics(RowStatistics):
    """Counts tokens and takes output gradients, without positions that hold `padding_idx` and train nothing.

    With `reduce` an example's input is the frequency of each token among its active positions.

    Args:
        module: the embedding.
        spec: the layer.
        call: integer input `[batch, *shared]` or `[]`, at every backward, and gradient `[*input, embedding_dim]`.
        dtype: the dtype of the moments.
    """

    keeps_input = True  # for the ids of padding

    def __init__(self, module: nn.Embedding, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(spec, call, dtype)
        assert call.input is not None
        ids = call.input if call.input.dim() > 0 else call.input.unsqueeze(0)
        self.padding_idx = module.padding_idx
        self.ids = self.taken_ids = ids.reshape(ids.shape[0], math.prod(ids.shape[1:]))
        # Counting in bfloat16 ends at 256.
        self.exact = torch.promote_types(dtype, torch.float32)

    def input_rows(self, layer_input: Tensor) -> Tensor:
        tokens = torch.arange(self.spec.in_dim, device=layer_input.device)
        return (self.ids.unsqueeze(-1) == tokens).to(self.dtype).unsqueeze(0)

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        g = self.gradient_rows(self.call.gradient.to(directions.dtype))
        if not self.opposed:
            return product_along(g, directions[self.ids].unsqueeze(0))
        turned_g = (g @ directions).flatten(1, 2)
        summed = turned_g.new_zeros(1, self.spec.in_dim, directions.shape[1])
        return summed.index_add_(1, self.ids.flatten(), turned_g), torch.linalg.vector_norm(turned_g)

    def subsample(self, draw: Draw) -> None:
        super().subsample(draw)
        if self._sample is not None:
            self.taken_ids = self._sample.of(self.ids[None, :, :, None])[0, :, :, 0]

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        rows = gradient.reshape(1, *self.ids.shape, self.spec.out_dim)
        if self.padding_idx is None:
            return rows
        return torch.where((self.ids != self.padding_idx).unsqueeze(-1), rows, 0)

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        weights = active.to(self.exact)
        if self.spec.weight_sharing is WeightSharing.EXPAND:
            counts = self._counts(weights)
            return torch.diag_embed(counts) if structure is Structure.DENSE else counts
        if structure is Structure.DENSE:
            return super()._input_moment_over(active, structure)
        return self._counts(self._squared_frequencies(active))

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        if a_basis is not None:
            return super().squared_gradients(a_basis, g_basis, dtype=dtype, per_example=per_example)
        # In the standard basis a row touches the column of its token alone: no one-hot row is needed.
        g, ids = self.weighed_gradients().to(dtype), self.taken_ids
        if self.spec.weight_sharing is WeightSharing.REDUCE:
            frequencies = self._squared_frequencies(self.active).to(dtype)
            squares = turned(g, g_basis).square() * frequencies.unsqueeze(-1)
        elif per_example:
            # Positions of one token add up before the square, at the first of their places once tokens are ordered;
            # what is left in the other places is zero.
            ordered = ids.sort(dim=1).values
            places = torch.searchsorted(ordered, ids.contiguous())[None, :, :, None].expand_as(g)
            squares = turned(torch.zeros_like(g).scatter_add_(2, places, g), g_basis).square()
            ids = ordered
        else:
            squares = turned(g, g_basis).square()
        summed = g.new_zeros(len(g), self.spec.in_dim, g.shape[-1])  # [groups, in, out]
        return summed.index_add_(1, ids.flatten(), squares.flatten(1, 2)).mT

    def _squared_frequencies(self, active: Tensor) -> Tensor:
        """Return what each active position adds to the square of its token's frequency, `[batch, shared]`.

        A token that stands in c of an example's R active positions has (c/R)²: c/R² from each of these positions.
        """
        ids = torch.where(active, self.taken_ids, -1)
        ordered = ids.sort(dim=1).values
        repeats = torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
        weights = active.to(self.exact)
        return weights * repeats / weights.sum(1, keepdim=True).clamp(min=1).square()

    def _counts(self, weights: Tensor) -> Tensor:
        """Sum `weights` `[batch, shared]` over the positions of each token: `[1, in]`."""
        counts = weights.new_zeros(self.spec.in_dim).index_add_(0, self.taken_ids.flatten(), weights.flatten())
        return counts.unsqueeze(0).to(self.dtype)


def _lookup(
    module: nn.Embedding,
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,  # noqa: ARG001 (torch's names)
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Noted | None:
    """Read a call of `F.embedding`; None where it is not that of the module, as far as gradients see it."""
    if padding_idx != module.padding_idx or scale_grad_by_freq or sparse:
        return None
    return Noted(weight, input, examples_of(input, 0), is_lookup=True)


class TableAdapter(WeightBiasAdapter[Table]):
    """Handles a module whose weight `[in, out]` has a row for each token."""

    in_rows = True

    def refusal(self, module: Table) -> str | None:
        if module.sparse:
            return f"the gradient is sparse: {type(module).__name__}(sparse=True)"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides the gradient by token counts: it is no longer the loss's"
        return super().refusal(module)

    def unbatched_ndim(self, module: Table) -> int:
        return 0

    def spec(self, module: Table, name: str, params: tuple[str, ...]) -> LayerSpec:
        kept = (Structure.DIAGONAL, Structure.DENSE)
        in_dim, out_dim = module.get_parameter("weight").shape
        return LayerSpec(name, params, in_dim, out_dim, structure=kept)

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        return weight.mT.unsqueeze(0)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.squeeze(0).mT,)


class EmbeddingAdapter(TableAdapter[nn.Embedding]):
    transposes = True

    def capture(
        self, module: nn.Embedding, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        if own_forward(module, nn.Embedding) is None:
            return super().capture(module, specs, window, sink)
        # It may scale what it looks up, or look up other ids than it is handed.
        watch = self._watch(module, specs, sink)
        return note_function(window, module, watch, F.embedding, partial(_lookup, module))

    def statistics(self, module: nn.Embedding, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return EmbeddingStatistics(module, spec, call, dtype)
