"""Representations that invert each damped factor by itself, or take its inverse root."""

from kfac_optim.inverses.damped.cholesky import Cholesky
from kfac_optim.inverses.damped.low_rank import LowRank
from kfac_optim.inverses.damped.newton import NewtonSchulz
from kfac_optim.inverses.damped.powers import InverseAndRoot
from kfac_optim.inverses.damped.root import InverseRoot

__all__ = ["Cholesky", "InverseAndRoot", "InverseRoot", "LowRank", "NewtonSchulz"]
