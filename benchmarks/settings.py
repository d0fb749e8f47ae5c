"""Settings of KFACOptimizer that benchmarks have names for."""

from __future__ import annotations

from typing import Any

from kfac_optim import Cholesky, LowRank, Subsample


def fast(batch: int) -> dict[str, Any]:
    """Thin inverses, and statistics of a quarter of ``batch`` examples, of early convolutions fewer."""
    return {"inverse": LowRank(), "subsample": Subsample(examples=max(1, batch // 4), rows=8192)}


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"inverse": Cholesky(), "subsample": Subsample()},
}
