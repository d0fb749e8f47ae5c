"""Calls of layers that tensor parallelism has cut: their inputs and gradients, with all columns and all rows."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.utils.sharded_params import is_sharded, whole


def whole_call(call: LayerCall, weight: Tensor) -> LayerCall:
    """Return a call as all ranks of its layer's mesh together have made it; a collective, where they have cut it.

    Args:
        call: as it is on this rank.
        weight: that forwards multiply by, `[out, in]`; a DTensor over one mesh dimension where the layer is cut.

    Raises:
        NotImplementedError: the gradient is cut along several dimensions.
    """
    if not is_sharded(weight):
        return call
    leading = None if call.input is None or not is_sharded(call.input) else call.input.shape[:-1]
    return replace(
        call,
        input=None if call.input is None else whole(call.input),
        gradient=_whole_gradient(call.gradient, weight, leading),
        earlier=None if call.earlier is None else _whole_gradient(call.earlier, weight, leading),
    )


def _whole_gradient(gradient: Tensor, weight: Any, leading: tuple[int, ...] | None) -> Tensor:
    """Return the gradient of the output: columns are the weight's rows, and other dimensions those of the input.

    Layers hand plain tensors on, which do not tell how they are cut. Shards are even, so that a rank sees by the shape
    of its own whether there are others.
    """
    if is_sharded(gradient):
        return whole(gradient)
    shape = (*(gradient.shape[:-1] if leading is None else leading), weight.shape[0])
    cut = [dim for dim, (own, all_) in enumerate(zip(gradient.shape, shape, strict=True)) if own != all_]
    if not cut:
        return gradient
    if len(cut) > 1:
        raise NotImplementedError(
            f"kfac_optim: the output of a layer with a weight {list(weight.shape)} is cut along several dimensions: "
            f"{list(gradient.shape)} of {list(shape)}. Leave the layer to SGD by skip_layers."
        )
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    layout = type(weight.placements[0])(cut[0])  # shards, as the weight has them
    found: Tensor = type(weight).from_local(
        gradient.contiguous(),
        weight.device_mesh,
        [layout],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )
    return whole(found)
