"""Representations that invert each damped factor by itself, with π-balanced factored damping."""

from kfac_optim.inverses.damped.cholesky import Cholesky
from kfac_optim.inverses.damped.low_rank import LowRank
from kfac_optim.inverses.damped.newton import NewtonSchulz

__all__ = ["Cholesky", "LowRank", "NewtonSchulz"]
