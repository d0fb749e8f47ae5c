"""Which adapter a module gets: that of its class, or what the module shows itself to be."""

from typing import Any

from torch import nn

from kfac_optim.layers.base import Adapters, LayerAdapter, find_adapter, own_forward
from kfac_optim.layers.norm import NormAdapter
from kfac_optim.layers.scale import scale_adapter
from kfac_optim.layers.used_weight import used_weight_adapter


def adapter_of(module: nn.Module, adapters: Adapters) -> LayerAdapter[Any] | None:
    """Return the adapter of a module's class, or what the module shows itself to be, if that says more."""
    adapter = find_adapter(module, adapters)
    of_torch = type(module).__module__.startswith("torch.")
    if adapter is None:
        return None if of_torch else scale_adapter(module)
    if isinstance(adapter, NormAdapter) and not of_torch and own_forward(module, adapter.family) is not None:
        return scale_adapter(module) or adapter
    return used_weight_adapter(module, adapter) or adapter
