"""Derivatives of a model with respect to its inputs, carried through its forward.

They are for losses of differential equations.
"""

from kfac_optim.taylor.laplacian import Derivatives, laplacian

__all__ = ["Derivatives", "laplacian"]
