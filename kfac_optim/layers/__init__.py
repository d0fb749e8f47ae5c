"""Layer families that can be preconditioned, one file each."""

from types import MappingProxyType

from torch import nn

from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.layers.attention import MultiheadAttentionAdapter
from kfac_optim.layers.base import Adapters, LayerAdapter, WeightBiasAdapter
from kfac_optim.layers.bilinear import BilinearAdapter
from kfac_optim.layers.convolution import ConvAdapter, ConvTransposeAdapter
from kfac_optim.layers.embedding import EmbeddingAdapter
from kfac_optim.layers.embedding_bag import EmbeddingBagAdapter
from kfac_optim.layers.linear import LinearAdapter
from kfac_optim.layers.norm import (
    BatchNormAdapter,
    GroupNormAdapter,
    InstanceNormAdapter,
    LayerNormAdapter,
    RMSNormAdapter,
)
from kfac_optim.layers.recurrent import RecurrentAdapter

DEFAULT_ADAPTERS: Adapters = MappingProxyType(
    {
        nn.Linear: LinearAdapter(),
        nn.Conv1d: ConvAdapter(),
        nn.Conv2d: ConvAdapter(),
        nn.Conv3d: ConvAdapter(),
        nn.ConvTranspose1d: ConvTransposeAdapter(),
        nn.ConvTranspose2d: ConvTransposeAdapter(),
        nn.ConvTranspose3d: ConvTransposeAdapter(),
        nn.Bilinear: BilinearAdapter(),
        nn.Embedding: EmbeddingAdapter(),
        nn.EmbeddingBag: EmbeddingBagAdapter(),
        nn.MultiheadAttention: MultiheadAttentionAdapter(),
        **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell), RecurrentAdapter()),
        nn.LayerNorm: LayerNormAdapter(),
        nn.RMSNorm: RMSNormAdapter(),
        nn.GroupNorm: GroupNormAdapter(),
        nn.BatchNorm1d: BatchNormAdapter(),
        nn.BatchNorm2d: BatchNormAdapter(),
        nn.BatchNorm3d: BatchNormAdapter(),
        nn.InstanceNorm1d: InstanceNormAdapter(),
        nn.InstanceNorm2d: InstanceNormAdapter(),
        nn.InstanceNorm3d: InstanceNormAdapter(),
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
]
