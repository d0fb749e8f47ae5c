"""Settings of KFACOptimizer that benchmarks have names for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kfac_optim import LowRank, Subsample


def fast(batch: int) -> dict[str, Any]:
    """Thin inverses, and statistics of a quarter of ``batch`` examples, of early convolutions fewer."""
    return {"inverse": LowRank(), "subsample": Subsample(examples=max(1, batch // 4), rows=8192)}


# By name, ``(examples of a batch) → options``.
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {"exact": lambda _: {}, "fast": fast}
