"""`nn.Linear`, with any leading dimensions: the first is the batch, the others are shared."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kfac_optim.capture.function_modes import run_in
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import linear_rows
from kfac_optim.layers.base import StatisticsSink, WeightBiasAdapter
from kfac_optim.layers.product import ProductStatistics
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.hooks import Handle, Handles, weakly


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

    def capture(
        self, module: nn.Linear, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        listener = window.listener
        mode = listener.mode
        if mode is None or not self.adds_bias_itself(module):
            return super().capture(module, specs, window, sink)
        # What a forward of its own takes and returns may be no rows of the product, which is to be seen wherever it
        # runs. The hook that is put on last is called first after the forward, and finds the mode on.
        alone = run_in(window, module, mode, weakly(listener.begin_alone))
        return Handles(alone, super().capture(module, specs, window, sink))

    def unbatched_ndim(self, module: nn.Linear) -> int:
        return 1

    def statistics(self, module: nn.Linear, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        if call.context:  # the bias was not added everywhere
            return ProductStatistics(spec, call, dtype)
        return LinearStatistics(spec, call, dtype)
