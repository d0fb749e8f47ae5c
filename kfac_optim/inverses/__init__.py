"""Representations of a block's inverse curvature, one file each."""

from kfac_optim.inverses.base import FactorPair, Inverse
from kfac_optim.inverses.cholesky import Cholesky

__all__ = ["Cholesky", "FactorPair", "Inverse"]
