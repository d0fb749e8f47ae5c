"""Settings of KFACOptimizer that benchmarks have names for."""

from __future__ import annotations

from typing import Any

from kfac_optim import Cholesky, Subsample

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"inverse": Cholesky(), "subsample": Subsample()},
}
