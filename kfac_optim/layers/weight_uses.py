"""Statistics of one use of a weight: of the forward, or of a pass that is differentiated itself."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

import torch.nn.functional as F
from torch import Tensor

from kfac_optim.factors.call_rows import CallRows
from kfac_optim.factors.layer_call import ADDS_BIAS, LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.second_moments import product_along
from kfac_optim.specs import LayerSpec, Sketched, Structure, WeightSharing


def use_context(swapped: bool, adds_bias: bool, *of_function: int) -> tuple[int, ...]:
    """Return the context of a use's call.

    Args:
        swapped: whether it multiplies by the transpose of the block's matrix.
        adds_bias: whether the block's bias is added to the product.
        of_function: what the adapter needs to know of the call.
    """
    return (int(swapped), int(adds_bias), *of_function)


def of_forward(
    spec: LayerSpec, call: LayerCall, rows_of: Callable[[LayerSpec, LayerCall], CallRows]
) -> LayerStatistics:
    """Return the statistics of the forward of a layer, as if it were no use among others.

    Args:
        spec: the layer.
        call: the call, with a context of `use_context`.
        rows_of: makes the statistics of a call.
    """
    _, adds_bias, *of_function = call.context
    return rows_of(spec, replace(call, context=tuple(of_function) or (ADDS_BIAS if adds_bias else ())))


class UseStatistics(LayerStatistics):
    """Gives the rows of one use, and no moments: only the rows of all uses together make an example's derivative.

    A product with the transpose, `u = Wᵀ v`, has `v` for the row of output gradients, and the gradient of `u` for the
    row that the matrix is multiplied by.

    Args:
        spec: the layer.
        call: the call, with a context of `use_context`.
        rows_of: makes the statistics of a call of a layer with this spec but no bias.
    """

    def __init__(self, spec: LayerSpec, call: LayerCall, rows_of: Callable[[LayerSpec, LayerCall], CallRows]) -> None:
        self.spec = spec
        self.call = call
        self._rows_of = rows_of

    @property
    def keeps_input(self) -> bool:
        return True

    def _refuse(self, structure: Structure | Sketched | None = None) -> NoReturn:
        raise AssertionError("moments are made of the rows of all uses together")

    count = property(_refuse)
    input_moment = output_moment = _refuse

    def rows(self) -> tuple[Tensor, Tensor]:
        z, g = self._statistics.rows()
        return (F.pad(z, (0, 1), value=self._adds_bias) if self.spec.has_bias else z), g

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        z, g = self.rows()
        return product_along(g.to(directions.dtype), z.to(directions.dtype) @ directions)

    @cached_property
    def _statistics(self) -> CallRows:
        swapped, _, *of_function = self.call.context
        assert self.call.input is not None, "the input of a use is kept"
        z, g = (self.call.gradient, self.call.input) if swapped else (self.call.input, self.call.gradient)
        call = LayerCall(z, g, None, self.call.training, tuple(of_function))
        spec = replace(
            self.spec,
            params=self.spec.params[:1],
            in_dim=self.spec.in_dim - self.spec.has_bias,
            structure=(Structure.DENSE, Structure.DENSE),
            weight_sharing=WeightSharing.EXPAND,
            opposed=False,
        )
        return self._rows_of(spec, call)

    @property
    def _adds_bias(self) -> int:
        return self.call.context[1]
