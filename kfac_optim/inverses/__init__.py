"""Representations of a block's inverse curvature, one file each."""

from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.cholesky import Cholesky
from kfac_optim.inverses.eigen import Eigen

__all__ = ["Cholesky", "Eigen", "Inverse"]
