"""Convolutions, transposed or not."""

from kfac_optim.layers.convolution.conv import ConvAdapter
from kfac_optim.layers.convolution.conv_transpose import ConvTransposeAdapter

__all__ = ["ConvAdapter", "ConvTransposeAdapter"]
