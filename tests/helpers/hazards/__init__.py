"""Hazards of training loops, each beside the plain run that it must equal. `base.py` says how; `HAZARDS` lists all."""

from helpers.hazards import loops, models, non_finite, passes, peers, precision, scale
from helpers.hazards.base import HAZARDS, Hazard

__all__ = ["HAZARDS", "Hazard", "loops", "models", "non_finite", "passes", "peers", "precision", "scale"]
