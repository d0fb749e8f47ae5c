"""Warnings that point at the user's line."""

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = tuple(f"{Path(file).parent}/" for file in (Path(__file__).parent, torch.__file__))


def warn(message: str) -> None:
    """Warn at the line that called this package, by way of torch or not: it is the first that is in neither."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
