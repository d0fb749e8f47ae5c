"""Small models, losses and options that cases are drawn of."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    Background,
    BlockDiagonal,
    Cholesky,
    CurvaturePropagation,
    Eigen,
    ExactGGN,
    InverseAndRoot,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    LossTerms,
    LowRank,
    MonteCarlo,
    NewtonSchulz,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    Staggered,
    Structure,
    Subsample,
    SumOfTerms,
    TrustRegion,
    WeightSharing,
)

CRITERION = nn.MSELoss()
BASE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "factor_update_period": 1, "inverse_update_period": 2}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"inverse": Cholesky(), "nesterov": True},
    {"inverse": Eigen(), "weight_decay": 0.1},
    {"inverse": EKFAC(), "factor_update_period": 2},
    {"inverse": LowRank(rank=1, sketch=2)},
    {"inverse": NewtonSchulz(), "foreach": True},
    {"estimate": MonteCarlo(CRITERION)},
    {"estimate": CurvaturePropagation(CRITERION), "step_size": TrustRegion()},
    {"estimate": ExactGGN(CRITERION), "l2_in_curvature": True, "weight_decay": 0.1},
    {"estimate": ExactGGN(CRITERION), "inverse": SampleSpace(), "momentum": 0.0},
    {"estimate": MonteCarlo(CRITERION), "step_size": QuadraticModel()},
    {"estimate": ExactGGN(CRITERION), "step_size": LineSearch(), "lr": 1.0, "momentum": 0.0},
    {"estimate": MonteCarlo(CRITERION), "adapt_damping": LevenbergMarquardt(interval=2, reject=True)},
    {"step_size": SelectedUpdates()},
    {"step_size": SelectedUpdates(), "skip_layers": [nn.Linear]},
    {"average": IterateAverage(eta=2)},
    {"refresh": Staggered(), "fused": True},
    {"refresh": Background(max_staleness=1, deterministic=True)},
    {"structure": (Structure.DENSE, Structure.DIAGONAL), "kl_clip": None, "damping": 0.1},
    {"structure": (Structure.DENSE, Structure.IDENTITY), "subsample": Subsample(examples=2)},
    {"weight_sharing": WeightSharing.REDUCE, "loss_terms": LossTerms.ELEMENTS},
    {"skip_layers": ["*"]},
    {"inverse": InverseAndRoot(), "factor_dtype": torch.float64},
    {"inverse": SumOfTerms(), "nonfinite_limit": 2},
    {"structure": {nn.Linear: (BlockDiagonal(2), Structure.DENSE)}, "include_factors": False},
    {"max_factor_dim": 3, "maximize": True, "dampening": 0.1},
    {"average": IterateAverage(), "step_size": SelectedUpdates(), "nonfinite_limit": 1},
]


class Tied(nn.Module):
    """Calls one layer twice, and a part of it by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.layer(x).tanh()) @ self.layer.weight))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x[:, None])).relu().flatten(1))


class Recurrent(nn.Module):
    """Reads the numbers of an example one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(1, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.unsqueeze(-1))[0][:, -1])


class Attentive(nn.Module):
    """Takes the signs of an example for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.tokens((x > 0).long())
        return self.attention(rows, rows, rows, need_weights=False)[0].mean(1) @ self.scale.t()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))


MODELS = [plain, plain, Tied, Mapped, Recurrent, Attentive]


@dataclass
class Drawn:
    """A model and an optimizer of it, what it was made with, and whether its steps need a closure."""

    model: nn.Module
    optimizer: KFACOptimizer
    what: str
    by_closure: bool


def build(rng: random.Random) -> Drawn:
    model, options = rng.choice(MODELS)(), rng.choice(OPTIONS)
    return build_with(model, options)


def build_with(model: nn.Module, options: dict[str, Any]) -> Drawn:
    if isinstance(model, Mapped | Recurrent | Attentive) and isinstance(options.get("inverse"), SampleSpace):
        options = {}  # which refuses examples that interact, as by BatchNorm, and rows that are not those of examples
    optimizer = KFACOptimizer(model, **{**BASE, **options})
    by_closure = "adapt_damping" in options or isinstance(options.get("step_size"), LineSearch)
    return Drawn(model, optimizer, f"{type(model).__name__}, {options}", by_closure)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randn(size, 2)
