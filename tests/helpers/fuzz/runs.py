"""Runs whose checkpoints are mutated, and checkpoints of the same model by other optimizers."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.plain import batch, copy_of, square_loss
from kfac_optim import (
    EKFAC,
    Background,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseAndRoot,
    IterateAverage,
    KFACOptimizer,
    LowRank,
    NewtonSchulz,
    SelectedUpdates,
    Structure,
    SumOfTerms,
)

INVERSES: list[Inverse[Any]] = [
    Cholesky(),
    Eigen(),
    InverseAndRoot(),
    EKFAC(),
    LowRank(rank=1),
    NewtonSchulz(),
    DoublyFactored(2),
    SumOfTerms(),
]
PAIRS = list(itertools.combinations(range(len(INVERSES)), 2))


def build(first: Inverse[Any], second: Inverse[Any], **options: Any) -> tuple[nn.Module, KFACOptimizer]:
    """Two layers of one size, each with its inverse, and one that has a diagonal factor; a refresh is under way."""
    torch.manual_seed(0)
    model = network()
    standard: dict[str, Any] = {
        "lr": 0.1,
        "momentum": 0.9,
        "damping": 0.1,
        "inverse": {"0": first, "2": second},
        "structure": {"4": (Structure.DENSE, Structure.DIAGONAL)},
        "factor_update_period": 1,
        "inverse_update_period": 2,
        "refresh": Background(max_staleness=2),
        "nonfinite_limit": None,
    }
    return model, KFACOptimizer(groups_of(model), model=model, **{**standard, **options})


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": [p for layer in model[2:] for p in layer.parameters()]}]


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        square_loss(model(batch(step, dtype=next(model.parameters()).dtype))).backward()
        optimizer.step()


def _of_torch(kind: type[torch.optim.Optimizer], steps: int, **options: Any) -> Any:
    model = network()
    optimizer = kind(groups_of(model), lr=0.1, **options)  # type: ignore[call-arg]
    advance(model, optimizer, steps)
    return optimizer.state_dict()


def _of_ours(pair: tuple[int, int], steps: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model, optimizer = build(*(INVERSES[index] for index in pair), **options)
    model.to(dtype)
    advance(model, optimizer, steps)
    return optimizer.state_dict()


def _showing_averages(pair: tuple[int, int]) -> Any:
    model, optimizer = build(*(INVERSES[index] for index in pair), average=IterateAverage())
    advance(model, optimizer, 2)
    optimizer.eval()
    return optimizer.state_dict()


OTHERS: dict[str, Callable[[tuple[int, int]], Any]] = {
    "SGD": lambda _: _of_torch(torch.optim.SGD, 0),
    "SGD with momentum": lambda _: _of_torch(torch.optim.SGD, 2, momentum=0.9),
    "AdamW": lambda _: _of_torch(torch.optim.AdamW, 1),
    "a new one": lambda pair: _of_ours(pair, 0),
    "one in float32": lambda pair: _of_ours(pair, 3, dtype=torch.float32),
    "one in bfloat16": lambda pair: _of_ours(pair, 3, dtype=torch.bfloat16),
    "one without factors": lambda pair: _of_ours(pair, 3, include_factors=False),
    "one with averages": lambda pair: _of_ours(pair, 3, average=IterateAverage()),
    "one that shows averages": _showing_averages,
    "one with other structures": lambda pair: _of_ours(pair, 3, structure=None),
    "one with skipped layers": lambda pair: _of_ours(pair, 3, skip_layers=["4"]),
    "one with another step size": lambda pair: _of_ours(pair, 3, step_size=SelectedUpdates(), inverse=None),
    "one of other inverses": lambda pair: _of_ours((pair[1], pair[0]), 3),
}
"""Checkpoints of the same model by other optimizers."""


@functools.cache
def another(name: str, pair: tuple[int, int]) -> Any:
    return copy_of(OTHERS[name](pair))
