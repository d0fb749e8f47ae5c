"""Second moments of one call of a layer.

Canonical layout, used everywhere below: inputs are `[groups, batch, shared, in]`, output gradients
`[groups, batch, shared, out]`, gradient matrices `[groups, out, in]`, with the bias as the last input column.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.block_diagonal import cut, level_padding
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.second_moments import (
    active_rows,
    gram,
    mean_over_shared,
    on_host,
    product_along,
    sum_of_squares,
    total,
)
from kfac_optim.factors.subsampling import Draw, RowSample
from kfac_optim.specs import LayerSpec, Structure, WeightSharing


class LayerStatistics(ABC):
    """Second moments of one call of a layer, computed when asked for."""

    opposed = False
    """Whether the call multiplied by the transpose of the block's matrix, so that the sides change places."""

    @property
    def keeps_input(self) -> bool:
        """Whether further backwards through the call need its input again; it then lives until the window closes."""
        return False

    @property
    @abstractmethod
    def count(self) -> float | Tensor:
        """Rows behind the input moment, each as often as it is weighed; 0 without one.

        A tensor where only the device can count them, `[]`, and where the groups have rows of their own, `[groups]`.
        """

    @property
    def has_input(self) -> bool:
        """Whether there is an input moment to add."""
        return True

    @abstractmethod
    def input_moment(self, structure: Structure) -> Tensor:
        """`Σ a aᵀ`, `[groups, in, in]`, or its diagonal `[groups, in]`, less what earlier backwards counted."""

    @abstractmethod
    def output_moment(self, structure: Structure) -> Tensor:
        """`Σ g gᵀ`, `[groups, out, out]`, or its diagonal `[groups, out]`."""

    @abstractmethod
    def rows(self) -> tuple[Tensor, Tensor]:
        """`a` `[groups, batch, shared, in]` and `g` `[groups, batch, shared, out]`, after weight sharing."""

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the gradient that the call adds to the block's matrix, along some directions, for the gradient check.

        It is asked of all rows, before weight sharing and before `subsample`.

        Args:
            directions: `V` `[in, k]`, of the block's matrix `[groups, out, in]`.

        Returns:
            `Σ g aᵀ V` over all rows, `[groups, out, k]` (`Σ a gᵀ V` where `opposed`), and its size as
            `rows.product_along` has it; None where it is not known, so that nothing can be checked.
        """
        return None

    @property
    def weight(self) -> float:
        """How many rows of the call each row stands for; `g` is multiplied by its root, moments and `count` by it."""
        return 1.0

    def subsample(self, draw: Draw) -> None:
        """Make do with some of the rows; asked before anything else, where the adapter says `in_rows`."""
        raise NotImplementedError(
            f"kfac_optim: {type(self).__name__} cannot take some of its rows; the adapter it comes from must not say "
            "in_rows, or override subsample()."
        )

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        """`Σ_n (U_Gᵀ ∇W_n U_A)²`, element by element, `[groups, out, in]`.

        Args:
            a_basis: eigenvectors as columns, `[groups, in, in]` or of one group; None for the standard basis.
            g_basis: likewise over `out`.
            dtype: of the bases, the computation and the result.
            per_example: whether n runs over examples, or else over their positions too.
        """
        a, g = (rows.to(dtype) for rows in self.rows())
        if not per_example:
            a, g = (rows.flatten(1, 2).unsqueeze(2) for rows in (a, g))
        return sum_of_squares(a, g, a_basis, g_basis)


class RowStatistics(LayerStatistics):
    """Statistics of a layer whose output is `W a` at each position; families say what `a` and `g` are.

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
        dtype: of the moments, and of the products that make them.
    """

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        self.spec = spec
        self.call = call
        self.dtype = dtype
        self._sample: RowSample | None = None

    @abstractmethod
    def input_rows(self, layer_input: Tensor) -> Tensor:
        """Canonical `a` without the bias column, `[groups, batch, shared, in]`."""

    @abstractmethod
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Canonical `g`, `[groups, batch, shared, out]`; zero where a shorter example has no position."""

    def sampled_input_rows(self, layer_input: Tensor, sample: RowSample) -> Tensor:
        """Give the rows of `input_rows` that `sample` names. A family whose rows are copies makes no others."""
        return sample.of(self.input_rows(layer_input))

    def mean_input_rows(self, layer_input: Tensor, active: Tensor | None) -> Tensor:
        """`mean_over_shared` of `input_rows`. A family whose rows are copies makes none."""
        return mean_over_shared(self.input_rows(layer_input), active)

    def input_rows_along(self, layer_input: Tensor, directions: Tensor) -> Tensor:
        """Multiply `input_rows` by `directions` `[in, k]`. A family whose rows are copies makes none."""
        return self.input_rows(layer_input) @ directions

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor] | None:
        assert self.call.input is not None
        layer_input = self.call.input.to(directions.dtype)
        g = self.gradient_rows(self.call.gradient.to(directions.dtype))
        if self.opposed:
            return product_along(self._homogeneous(self.input_rows(layer_input)), g @ directions)
        constant = directions[-1] * self.bias_input if self.spec.has_bias else None
        a = self.input_rows_along(layer_input, directions if constant is None else directions[:-1])
        return product_along(g, a if constant is None else a + constant)

    def subsample(self, draw: Draw) -> None:
        rows = self.gradient_rows(self.call.gradient)
        self._sample = draw.rows(rows.shape[1], rows.shape[2], rows.device)

    @property
    def weight(self) -> float:
        return 1.0 if self._sample is None else self._sample.weight

    @property
    def positions(self) -> int:
        """Positions of all examples: the most rows that can be active."""
        return self._active.numel()

    @property
    def keeps_input(self) -> bool:
        return on_host(self._active) and int(self._active.sum()) < self.positions

    @property
    def has_input(self) -> bool:
        if self.call.input is None or self.call.input.numel() == 0:
            return False
        if not on_host(self._active):
            return True
        before = self.active_before
        return bool(self._active.any()) if before is None else not torch.equal(self._active, before)

    @property
    def count(self) -> float | Tensor:
        if not self.has_input:
            return 0
        count = total(self._shared_mask(self._active))
        if self.active_before is not None:
            count = count - total(self._shared_mask(self.active_before))
        return count if self._sample is None else count * self._sample.weight

    def input_moment(self, structure: Structure) -> Tensor:
        moment = self._moment_over(self._active, structure)
        if self.active_before is not None:
            moment -= self._moment_over(self.active_before, structure)
        if self._sample is not None:
            moment *= self._sample.weight
        return level_padding(moment, self.spec.in_dim) if self.spec.blocks(0) > 1 else moment

    def output_moment(self, structure: Structure) -> Tensor:
        moment = gram(self._block_gradients(self.call.gradient), structure)
        if self.call.earlier is not None:
            moment -= gram(self._block_gradients(self.call.earlier), structure)
        if self._sample is not None:
            moment *= self._sample.weight
        return level_padding(moment, self.spec.out_dim) if self.spec.blocks(1) > 1 else moment

    def rows(self) -> tuple[Tensor, Tensor]:
        active = self._shared_mask(self._active).unsqueeze(-1)
        a = torch.where(active, self._block_inputs(self._active), 0)
        return a, self.weighed_gradients()

    def weighed_gradients(self) -> Tensor:
        """The output gradients alone, as `rows` gives them."""
        g = self._block_gradients(self.call.gradient)
        return g if self._sample is None else g * self._sample.weight**0.5

    @cached_property
    def _active(self) -> Tensor:
        """`[batch, shared]` bool: the rows that count."""
        reach = self.call.gradient if self.call.reach is None else self.call.reach
        return active_rows(self._sampled_gradient_rows(reach))

    @cached_property
    def active_before(self) -> Tensor | None:
        """`[batch, shared]` bool: the rows that counted before this backward; None at the first."""
        return None if self.call.earlier is None else active_rows(self._sampled_gradient_rows(self.call.earlier))

    def _moment_over(self, active: Tensor, structure: Structure) -> Tensor:
        """`Σ a aᵀ` over the rows that `active` marks."""
        marked = None if on_host(active) and bool(active.all()) else active
        mask = None if marked is None else self._shared_mask(marked)
        if self.spec.blocks(0) > 1:
            return gram(self._block_inputs(marked), structure, mask)
        return gram(self._shared_inputs(marked), structure, mask, constant=self._constant)

    def _block_inputs(self, active: Tensor | None) -> Tensor:
        """`_shared_inputs` with the column of ones, `[blocks, batch, shared, width]` where `A` is cut into blocks."""
        return cut(self._homogeneous(self._shared_inputs(active)), -1, self.spec.blocks(0))

    def _block_gradients(self, gradient: Tensor) -> Tensor:
        """`_shared_gradients`, likewise."""
        return cut(self._shared_gradients(gradient), -1, self.spec.blocks(1))

    def _shared_mask(self, active: Tensor) -> Tensor:
        """The rows that `active` marks, after weight sharing: `[batch, shared]` or `[batch, 1]`."""
        return active.any(1, keepdim=True) if self.spec.weight_sharing is WeightSharing.REDUCE else active

    def _shared_inputs(self, active: Tensor | None) -> Tensor:
        """`a` after weight sharing, without the column of ones that a bias adds.

        Of the positions that `active` marks or of all; the other rows hold anything.
        """
        assert self.call.input is not None, "the input was released after the first backward"
        reduce = self.spec.weight_sharing is WeightSharing.REDUCE
        if self._sample is not None:
            a = self.sampled_input_rows(self.call.input, self._sample).to(self.dtype)
            return mean_over_shared(a, active) if reduce else a
        if reduce:
            return self.mean_input_rows(self.call.input.to(self.dtype), active)
        return self.input_rows(self.call.input.to(self.dtype))

    @property
    def bias_input(self) -> int:
        """What the bias is multiplied by: 1, or 0 where this call did not add it."""
        return 1

    @property
    def _constant(self) -> int | None:
        """The last column of `a`; None without a bias."""
        return self.bias_input if self.spec.has_bias else None

    def _homogeneous(self, a: Tensor) -> Tensor:
        """`a` `[..., in]` with its last column, where there is a bias."""
        return F.pad(a, (0, 1), value=self.bias_input) if self.spec.has_bias else a

    def _shared_gradients(self, gradient: Tensor) -> Tensor:
        g = self._sampled_gradient_rows(gradient).to(self.dtype)
        return g.sum(2, keepdim=True) if self.spec.weight_sharing is WeightSharing.REDUCE else g

    def _sampled_gradient_rows(self, gradient: Tensor) -> Tensor:
        return self._latest_rows if gradient is self.call.gradient else self._sampled(self.gradient_rows(gradient))

    @cached_property
    def _latest_rows(self) -> Tensor:
        """Give the rows of the latest sum of gradients: asked for twice, and a copy where only some are taken."""
        return self._sampled(self.gradient_rows(self.call.gradient))

    def _sampled(self, rows: Tensor) -> Tensor:
        return rows if self._sample is None else self._sample.of(rows)
