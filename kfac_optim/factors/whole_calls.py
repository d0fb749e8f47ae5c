"""Calls of layers that tensor parallelism has cut: their inputs and gradients, with all columns and all rows."""

from dataclasses import replace

from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.utils.sharded_params import is_sharded, whole


def whole_call(call: LayerCall, weight: Tensor) -> LayerCall:
    """Return a call as all ranks of its layer's mesh together have made it; a collective, where they have cut it.

    Args:
        call: the call as it is on this rank; of a layer that is cut, its input and gradients are DTensors where they
            are cut.
        weight: the weight that forwards multiply by, `[out, in]`; a DTensor over one mesh dimension where the layer is
            cut.
    """
    if not is_sharded(weight):
        return call
    return replace(
        call,
        input=None if call.input is None else whole(call.input),
        gradient=whole(call.gradient),
        earlier=None if call.earlier is None else whole(call.earlier),
        reach=None if call.reach is None else whole(call.reach),
    )
