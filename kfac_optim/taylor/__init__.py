"""Derivatives of a model by its inputs, carried through its forward: for losses of differential equations."""

from kfac_optim.taylor.laplacian import Derivatives, laplacian

__all__ = ["Derivatives", "laplacian"]
