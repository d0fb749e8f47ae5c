"""`nn.EmbeddingBag`: a linear layer over the counts of tokens in each bag, which are never built for the factors.

The row of a bag has at each token the sum of the weights of its places: 1 each for "sum", one over the size of the bag
for "mean", or `per_sample_weights`. As for an embedding the gradient matrix is the transposed weight, and `A` is
diagonal: it holds the mean square of each token's number. That leaves out which tokens come together.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import linear_rows, product_along
from kfac_optim.layers.base import StatisticsSink, own_forward
from kfac_optim.layers.embedding import TableAdapter
from kfac_optim.layers.noted_function import Noted, note_function
from kfac_optim.specs import LayerSpec, Sketched, Structure
from kfac_optim.utils.hooks import Handle


class EmbeddingBagStatistics(RowStatistics):
    """Sums squares of the numbers of tokens in bags, and takes output gradients `[bags, out]`.

    The call's input is `[3, places]` int64: token, bag and, as bits of a float64, weight of each place.
    """

    keeps_input = True

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        super().__init__(spec, call, dtype)
        assert call.input is not None
        self.ids, self.bags, bits = call.input
        # Counting in bfloat16 ends at 256.
        self.weights = bits.view(torch.float64).to(torch.promote_types(dtype, torch.float32))

    def input_rows(self, layer_input: Tensor) -> Tensor:
        bags = self.call.gradient.shape[0]
        counts = self.weights.new_zeros(bags * self.spec.in_dim)
        rows: Tensor = counts.index_add_(0, self.bags * self.spec.in_dim + self.ids, self.weights)
        return rows.view(1, bags, 1, self.spec.in_dim).to(self.dtype)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return linear_rows(gradient)

    def input_rows_along(self, layer_input: Tensor, directions: Tensor) -> Tensor:
        bags = self.call.gradient.shape[0]
        along = directions.new_zeros(bags, directions.shape[1])
        along.index_add_(0, self.bags, directions[self.ids] * self.weights.to(directions.dtype).unsqueeze(1))
        return along.view(1, bags, 1, directions.shape[1])

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        g = self.gradient_rows(self.call.gradient.to(directions.dtype))
        return product_along(g, self.input_rows_along(self.ids, directions))

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        if structure is not Structure.DIAGONAL:
            return super()._input_moment_over(active, structure)
        chosen = active.flatten()
        if self._sample is not None:
            chosen = chosen.new_zeros(len(self.call.gradient)).index_put_((self._sample.examples,), chosen)
        # The places of one token in one bag add up before the square: ordered, each run of equal keys has a number.
        keys, order = (self.bags * self.spec.in_dim + self.ids).sort()
        begins = torch.ones_like(keys, dtype=torch.bool)
        begins[1:] = keys[1:] != keys[:-1]
        runs = begins.cumsum(0) - 1
        sums = torch.zeros_like(self.weights).index_add_(0, runs, self.weights[order] * chosen[self.bags[order]])
        tokens = torch.zeros_like(keys).index_copy_(0, runs, self.ids[order])
        counts = sums.new_zeros(self.spec.in_dim).index_add_(0, tokens, sums.square())
        return counts.unsqueeze(0).to(self.dtype)


class EmbeddingBagAdapter(TableAdapter[nn.EmbeddingBag]):
    def refusal(self, module: nn.EmbeddingBag) -> str | None:
        if module.mode == "max":
            return "EmbeddingBag(mode='max') is not linear in its weight"
        return own_forward(module, nn.EmbeddingBag) or super().refusal(module)

    def statistics(
        self, module: nn.EmbeddingBag, spec: LayerSpec, call: LayerCall, dtype: torch.dtype
    ) -> LayerStatistics:
        return EmbeddingBagStatistics(spec, call, dtype)

    def capture(
        self, module: nn.EmbeddingBag, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        watch = self._watch(module, specs, sink)
        return note_function(window, module, watch, F.embedding_bag, _places)


def _places(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,  # noqa: ARG001 (torch's names)
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,  # noqa: ARG001
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Noted:
    """Read a call of `F.embedding_bag`, as the input of `EmbeddingBagStatistics`."""
    if input.is_nested:  # bags of unequal length
        offsets, include_last_offset = input.offsets(), True  # type: ignore[attr-defined]
        input = input.values()  # noqa: A001
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.values()
    ids = input.flatten().long()
    if input.dim() == 2:
        bags = torch.arange(ids.numel(), device=ids.device) // max(1, input.shape[1])
        number = len(input)
    else:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        number = len(starts)
        places = torch.arange(ids.numel(), device=ids.device)
        bags = torch.searchsorted(starts.contiguous().long(), places, right=True) - 1
    weights = torch.ones_like(ids, dtype=torch.float64)
    if per_sample_weights is not None:
        weights = per_sample_weights.detach().flatten().double()
    if padding_idx is not None:
        weights = torch.where(ids == padding_idx % len(weight), 0.0, weights)
    if mode == "mean":
        sizes = weights.new_zeros(number).index_add_(0, bags, weights)
        weights = weights / sizes[bags].clamp(min=1)
    return Noted(weight, torch.stack([ids, bags, weights.view(torch.int64)]), number)
