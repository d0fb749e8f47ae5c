"""Representations that divide the gradient by one number for each pair of eigenvectors of `A` and `G`."""

from kfac_optim.inverses.eigenbasis.eigen import Eigen
from kfac_optim.inverses.eigenbasis.ekfac import EKFAC

__all__ = ["EKFAC", "Eigen"]
