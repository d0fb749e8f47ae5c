"""`nn.Embedding`: a linear layer over one-hot rows, which are never built for the factors.

The gradient matrix is the transposed weight, `[1, embedding_dim, num_embeddings]`, and `A` counts tokens: it is
diagonal, exactly so for weight sharing `expand` (as in kfac-jax and tensorflow/kfac).
"""

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture import LayerCall
from kfac_optim.layers.base import LayerStatistics, WeightBiasAdapter, own_forward
from kfac_optim.rows import gram
from kfac_optim.specs import LayerSpec, Structure, WeightSharing


class EmbeddingStatistics(LayerStatistics):
    """Token counts, and output gradients, without the positions that hold `padding_idx` and train nothing.

    With `reduce` an example's input is the frequency of each token among its other positions.

    Args:
        module: the embedding.
        spec: the layer.
        call: integer input `[batch, *shared]` or `[]`, at every backward, and gradient `[*input, embedding_dim]`.
        dtype: of the moments.
    """

    keeps_input = True  # for the mask of padding positions

    def __init__(self, module: nn.Embedding, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        assert call.input is not None
        ids = call.input if call.input.dim() > 0 else call.input.unsqueeze(0)
        self.spec = spec
        self.call = call
        self.dtype = dtype
        self.padding_idx = module.padding_idx
        self.ids = ids.reshape(ids.shape[0], math.prod(ids.shape[1:]))
        # Counting in bfloat16 ends at 256.
        self.exact = torch.promote_types(dtype, torch.float32)
        self.reduced = spec.weight_sharing is WeightSharing.REDUCE
        # [batch, shared] with 1 for a position that counts
        self.mask = torch.ones_like(self.ids, dtype=self.exact)
        if self.padding_idx is not None:
            self.mask = (self.ids != self.padding_idx).to(self.exact)

    @property
    def has_input(self) -> bool:
        return self.call.earlier is None and self.ids.numel() > 0

    @property
    def count(self) -> int | Tensor:
        if not self.has_input:
            return 0
        if self.padding_idx is None:
            return self.ids.shape[0] if self.reduced else self.ids.numel()
        return self.mask.amax(1).sum() if self.reduced else self.mask.sum()

    def input_moment(self, structure: Structure) -> Tensor:
        if structure is Structure.DENSE:
            return gram(self._inputs(), structure) if self.reduced else torch.diag_embed(self._counts(self.mask))
        if not self.reduced:
            return self._counts(self.mask)
        # A token that stands in c of R positions adds (c/R)²: c/R² from each of these positions.
        ordered = self.ids.sort(dim=1).values
        repeats = torch.searchsorted(ordered, self.ids, right=True) - torch.searchsorted(ordered, self.ids)
        return self._counts(self.mask * repeats / self._lengths().square())

    def output_moment(self, structure: Structure) -> Tensor:
        moment = gram(self._gradients(self.call.gradient), structure)
        if self.call.earlier is not None:
            moment -= gram(self._gradients(self.call.earlier), structure)
        return moment

    def rows(self) -> tuple[Tensor, Tensor]:
        return self._inputs(), self._gradients(self.call.gradient)

    def _counts(self, weights: Tensor) -> Tensor:
        """`[1, in]`: the sum of `weights` `[batch, shared]` over the positions of each token."""
        counts = weights.new_zeros(self.spec.in_dim).index_add_(0, self.ids.flatten(), weights.flatten())
        return counts.unsqueeze(0).to(self.dtype)

    def _lengths(self) -> Tensor:
        """`[batch, 1]`: the positions that count in each example, at least 1."""
        return self.mask.sum(1, keepdim=True).clamp(min=1)

    def _inputs(self) -> Tensor:
        """`[1, batch, shared, in]`, zero where nothing counts."""
        one_hots = F.one_hot(self.ids.long(), self.spec.in_dim) * self.mask.unsqueeze(-1)
        if self.reduced:
            one_hots = one_hots.sum(1, keepdim=True) / self._lengths().unsqueeze(-1)
        return one_hots.unsqueeze(0).to(self.dtype)

    def _gradients(self, gradient: Tensor) -> Tensor:
        """`[1, batch, shared, out]`."""
        rows = gradient.to(self.dtype).reshape(1, *self.ids.shape, self.spec.out_dim)
        if self.padding_idx is not None:
            rows = rows * self.mask.to(self.dtype).unsqueeze(-1)
        return rows.sum(2, keepdim=True) if self.reduced else rows


class EmbeddingAdapter(WeightBiasAdapter[nn.Embedding]):
    """Its weight is `[in, out]`."""

    transposes = True

    def refusal(self, module: nn.Embedding) -> str | None:
        if module.sparse:
            return "the gradient is sparse: Embedding(sparse=True)"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides the gradient by token counts: it is no longer the loss's"
        return own_forward(module, nn.Embedding) or super().refusal(module)

    def unbatched_ndim(self, module: nn.Embedding) -> int:
        return 0

    def specs(self, module: nn.Embedding, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        if "weight" not in trained:
            return ()
        return (
            LayerSpec(
                name=name,
                params=("weight",),
                in_dim=module.num_embeddings,
                out_dim=module.embedding_dim,
                structure=(Structure.DIAGONAL, Structure.DENSE),
            ),
        )

    def statistics(self, module: nn.Embedding, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        return EmbeddingStatistics(module, spec, call, dtype)

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        return weight.mT.unsqueeze(0)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.squeeze(0).mT,)
