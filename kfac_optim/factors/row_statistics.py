"""Second moments of the rows of one call."""

import math

import torch
from torch import Tensor

from kfac_optim.factors.block_diagonal import cut, level_padding
from kfac_optim.factors.call_rows import CallRows
from kfac_optim.factors.layer_statistics import FEW_THERE, FewRows
from kfac_optim.factors.second_moments import gram, number_of, on_host, product_along, weighed
from kfac_optim.specs import Sketched, Structure, WeightSharing
from kfac_optim.utils.streams import current_stream

# Elements of an input or output gradient below which launches take longer than the products, so that copies are kept
# until the step: no more memory than a small factor takes.
_FEW = 2**14


class RowStatistics(CallRows):
    """Computes the statistics of a layer with the output `W a` at each position; families say what `a` and `g` are.

    A row is active when its `g` is not exactly zero in every group. Others add nothing to the Fisher `Σ a aᵀ ⊗ g gᵀ`,
    of which `A ⊗ G` takes the mean of `a aᵀ` and the sum of `g gᵀ`: zeros would water down the mean and not the sum. So
    padding behind a mask, ignored targets and dropped rows are not counted in `A`, whatever their inputs hold, and
    REDUCE averages the inputs of an example over its active positions.

    Several backwards through one forward count as one of their sum: the rows of the gradients so far are exchanged for
    those of the new sum. That needs the input again, which is kept where some rows were not active yet. Only the host
    can ask for that without waiting: on an accelerator the input goes with the first backward, and rows that only a
    later one reaches stay uncounted. Nowhere are rows taken back whose gradients cancel, where at first all counted.

    Of a factor that `spec` keeps as blocks the moments and rows are those of the blocks, as `LayerSpec.by_blocks` has
    them: cut out of the rows, so that nothing wider is formed.

    Args:
        spec: the layer.
        call: the call, in the layout of the module.
        dtype: the dtype of the moments, and of the products that make them.
    """

    rows_suffice = False
    """Whether moments are made of `input_rows` and `gradient_rows` alone, so that `few_rows` may copy these."""

    rows_may_wait = False
    """Whether these are no larger than the tensors of the call either, so that `few_rows` may copy them on a host."""

    @property
    def keeps_input(self) -> bool:
        return not self.call.is_last and on_host(self.active) and self._number_active < self.positions

    @property
    def has_input(self) -> bool:
        if self.call.input is None or self.call.input.numel() == 0:
            return False
        if not on_host(self.active):
            return True
        before = self.active_before
        return self._number_active > 0 if before is None else not torch.equal(self.active, before)

    @property
    def count(self) -> float | Tensor:
        if not self.has_input:
            return 0
        count = number_of(self._shared_mask(self.active))
        if self.active_before is not None:
            count = count - number_of(self._shared_mask(self.active_before))
        if self._sample is None:
            return count
        weight = self._sample.weight
        return weighed(count, weight, self.dtype) if isinstance(count, Tensor) else count * weight

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        moment = self._input_moment_over(self.active, structure)
        if self.active_before is not None:
            moment -= self._input_moment_over(self.active_before, structure)
        if self._sample is not None:
            moment *= self._sample.weight
        return level_padding(moment, self.spec.in_dim) if self.spec.blocks(0) > 1 else moment

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        moment = gram(self._block_gradients(self.call.gradient), structure)
        if self.call.earlier is not None:
            moment -= gram(self._block_gradients(self.call.earlier), structure)
        if self._sample is not None:
            moment *= self._sample.weight
        return level_padding(moment, self.spec.out_dim) if self.spec.blocks(1) > 1 else moment

    def rows(self) -> tuple[Tensor, Tensor]:
        active = self._shared_mask(self.active).unsqueeze(-1)
        a = torch.where(active, self._block_inputs(self.active), 0)
        return a, self.weighed_gradients()

    def few_rows(self) -> FewRows | None:
        call = self.call
        if not call.is_last or call.earlier is not None or call.input is None:
            return None
        if not on_host(call.gradient):
            return self._few_rows_there(call.input)
        if not self.rows_may_wait or self._sample is not None:
            return None
        if self.spec.weight_sharing is WeightSharing.REDUCE and call.gradient.dim() > 2:
            return None
        if not 0 < max(call.input.numel(), call.gradient.numel()) <= _FEW:
            return None
        a, g = (rows[0].flatten(0, 1) for rows in (self.input_rows(call.input), self.gradient_rows(call.gradient)))
        return FewRows(a.to(self.dtype, copy=True), g.to(self.dtype, copy=True), self._constant)

    def _few_rows_there(self, layer_input: Tensor) -> FewRows | None:
        """Copy the rows of a call on an accelerator, in the dtype that they have."""
        rows, shared = math.prod(self._latest_rows.shape[1:3]), self._latest_rows.shape[2]
        if not self.rows_suffice or self.call.reach is not None or self.bias_in_rows:
            return None
        if Structure.IDENTITY in self.spec.structure:
            return None
        if shared > 1 and self.spec.weight_sharing is WeightSharing.REDUCE:
            return None
        if not 0 < rows * max(self.spec.in_dim, self.spec.out_dim) <= FEW_THERE:
            return None
        if self._sample is None:
            a, g = self.input_rows(layer_input).clone(), self._latest_rows.clone()
        else:
            a, g = self.sampled_input_rows(layer_input, self._sample), self._latest_rows
        stream = current_stream(g.device)
        return FewRows(a[0].flatten(0, 1), g[0].flatten(0, 1), self._constant, self.weight, stream)

    def weighed_gradients(self) -> Tensor:
        """Return the output gradients alone, as `rows` gives them."""
        g = self._block_gradients(self.call.gradient)
        return g if self._sample is None else g * self._sample.weight**0.5

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor] | None:
        assert self.call.input is not None
        layer_input = self.call.input.to(directions.dtype)
        g = self.gradient_rows(self.call.gradient.to(directions.dtype))
        if self.opposed:
            return product_along(self._homogeneous(self.input_rows(layer_input)), g @ directions)
        constant = None if self._constant is None else directions[-1] * self._constant
        a = self.input_rows_along(layer_input, directions if constant is None else directions[:-1])
        return product_along(g, a if constant is None else a + constant)

    def _input_moment_over(self, active: Tensor, structure: Structure | Sketched) -> Tensor:
        """Return `Σ a aᵀ` over the rows that `active` marks."""
        known = active is self.active and on_host(active)
        all_count = self._number_active == active.numel() if known else on_host(active) and bool(active.all())
        marked = None if all_count else active
        mask = None if marked is None else self._shared_mask(marked)
        if self.spec.blocks(0) > 1:
            return gram(self._block_inputs(marked), structure, mask)
        return gram(self._shared_inputs(marked), structure, mask, constant=self._constant)

    def _block_inputs(self, active: Tensor | None) -> Tensor:
        """Return `_shared_inputs` with the column of ones, `[blocks, batch, shared, width]` if `A` is cut."""
        return cut(self._homogeneous(self._shared_inputs(active)), -1, self.spec.blocks(0))

    def _block_gradients(self, gradient: Tensor) -> Tensor:
        """Return `_shared_gradients`, `[blocks, batch, shared, width]` where `G` is cut into blocks."""
        return cut(self._shared_gradients(gradient), -1, self.spec.blocks(1))
