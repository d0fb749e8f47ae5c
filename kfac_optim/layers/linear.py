"""`nn.Linear`, with any leading dimensions: the first is the batch, the others are shared."""

import torch
from torch import Tensor, nn

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import linear_rows
from kfac_optim.layers.base import WeightBiasAdapter
from kfac_optim.layers.product import ProductStatistics
from kfac_optim.specs import LayerSpec


class LinearStatistics(RowStatistics):
    rows_suffice = rows_may_wait = True

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return linear_rows(layer_input)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return linear_rows(gradient)


class LinearAdapter(WeightBiasAdapter[nn.Linear]):
    in_rows = may_be_cut = True
    transposes = False
    is_product = True

    def adds_bias_itself(self, module: nn.Linear) -> bool:
        return type(module).forward is not nn.Linear.forward

    def unbatched_ndim(self, module: nn.Linear) -> int:
        return 1

    def statistics(self, module: nn.Linear, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        if call.context:  # the bias was not added everywhere
            return ProductStatistics(spec, call, dtype)
        return LinearStatistics(spec, call, dtype)
