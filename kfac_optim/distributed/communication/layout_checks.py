"""What layouts of buckets refuse."""

from collections import Counter
from collections.abc import Sequence

import torch

from kfac_optim.utils.text import listed

_PAYLOADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def repeated(names: Sequence[str]) -> list[str]:
    """Return names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def check_layout(name: str, members: Sequence[str], payload: torch.dtype) -> str:
    """Refuse a layout that is not possible; return what to call the bucket in messages."""
    where = f"bucket {name!r}"
    if not members:
        raise ValueError(f"kfac_optim: {where} holds nothing; leave it out.")
    if twice := repeated(members):
        raise ValueError(f"kfac_optim: names in {where} must differ, got {listed(twice)} more than once.")
    if payload not in _PAYLOADS:
        allowed = ", ".join(map(str, _PAYLOADS))
        raise ValueError(f"kfac_optim: the payload of {where} must be one of {allowed}, got {payload}.")
    return where


def check_elements(where: str, name: str, elements: int) -> None:
    if elements < 0:
        raise ValueError(f"kfac_optim: {name!r} in {where} must have 0 elements or more, got {elements}.")


def check_rank(what: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"kfac_optim: {what} must be ranks from 0 to {world_size - 1}, got {rank}.")
