"""Representations of a block's inverse curvature, one file each."""

from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.cholesky import Cholesky
from kfac_optim.inverses.doubly_factored import DoublyFactored
from kfac_optim.inverses.eigen import Eigen
from kfac_optim.inverses.ekfac import EKFAC
from kfac_optim.inverses.newton import NewtonSchulz
from kfac_optim.inverses.online import OnlineEigen

__all__ = ["EKFAC", "Cholesky", "DoublyFactored", "Eigen", "Inverse", "NewtonSchulz", "OnlineEigen"]
