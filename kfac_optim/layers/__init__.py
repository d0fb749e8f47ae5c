"""Layer families that can be preconditioned, one file each."""

from types import MappingProxyType

from torch import nn

from kfac_optim.layers.base import (
    Adapters,
    LayerAdapter,
    LayerStatistics,
    RowStatistics,
    WeightBiasAdapter,
    find_adapter,
)
from kfac_optim.layers.conv import ConvAdapter
from kfac_optim.layers.linear import LinearAdapter

DEFAULT_ADAPTERS: Adapters = MappingProxyType(
    {
        nn.Linear: LinearAdapter(),
        nn.Conv1d: ConvAdapter(),
        nn.Conv2d: ConvAdapter(),
        nn.Conv3d: ConvAdapter(),
    }
)
"""Module class → adapter, used along the method resolution order."""

__all__ = [
    "DEFAULT_ADAPTERS",
    "Adapters",
    "LayerAdapter",
    "LayerStatistics",
    "RowStatistics",
    "WeightBiasAdapter",
    "find_adapter",
]
