"""Representations that invert each damped factor by itself, or take its inverse root as well."""

from kfac_optim.inverses.damped.cholesky import Cholesky
from kfac_optim.inverses.damped.low_rank import LowRank
from kfac_optim.inverses.damped.newton import NewtonSchulz
from kfac_optim.inverses.damped.powers import InverseAndRoot

__all__ = ["Cholesky", "InverseAndRoot", "LowRank", "NewtonSchulz"]
