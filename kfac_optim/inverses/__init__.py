"""Representations of a block's inverse curvature, one file each."""

from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.cholesky import Cholesky
from kfac_optim.inverses.doubly_factored import DoublyFactored
from kfac_optim.inverses.eigenbasis import EKFAC, Eigen, OnlineEigen
from kfac_optim.inverses.newton import NewtonSchulz

__all__ = ["EKFAC", "Cholesky", "DoublyFactored", "Eigen", "Inverse", "InverseRule", "NewtonSchulz", "OnlineEigen"]
