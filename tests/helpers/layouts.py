"""Training on ranks that keep a model in parts, and what came of it, whole."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from helpers.training import close
from kfac_optim import KFACOptimizer
from kfac_optim.blocks.checkpoint import KEY
from kfac_optim.distributed.communication.transfer import leaves

STEPS, EXAMPLES = 6, 8
DEFAULTS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 3,
    "kl_clip": 1e-2,
}

Model = Callable[[], nn.Module]


class Uneven(nn.Module):
    """Has first dimensions of 7, 5, 3 and 1, which ranks cannot share evenly; one parameter is left to SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.conv = nn.Linear(4, 7), nn.LayerNorm(7), nn.Conv1d(7, 5, 1, bias=False)
        self.slope = nn.Parameter(torch.full((3,), 0.25))
        self.gate, self.last = nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.norm(self.first(x).tanh()).unsqueeze(-1)).squeeze(-1)
        mapped: Tensor = self.last(h * self.gate(h).sigmoid()) * self.slope
        return mapped


def seeded(net: Model) -> nn.Module:
    torch.manual_seed(0)
    return net().to(torch.float64)


def batch(number: int, step: int) -> Tensor:
    """Examples that some ranks train on."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = (model(x) - x[:, :3].square() + x[:, 1:]).square().sum(1).mean()
    return mean


def adding(model: nn.Module) -> nn.Module:
    """Have `fully_shard` add gradients of ranks, and not take their mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def train(
    model: nn.Module, optimizer: KFACOptimizer, numbers: range, steps: range = range(STEPS), *, shares: int = 1
) -> None:
    """Train on the examples of these numbers, joined; the loss is one of so many shares of their mean."""
    for step in steps:
        optimizer.zero_grad()
        (loss(model, torch.cat([batch(number, step) for number in numbers])) / shares).backward()
        optimizer.step()


@dataclass
class Outcome:
    """Whole tensors by name; averages are whole on rank 0 alone."""

    params: dict[str, Tensor]
    momentum: dict[str, Tensor]
    averages: dict[str, Tensor]
    metrics: dict[str, float]


METRICS = ("cosine", "gradient_norm", "direction_norm", "trust_region_scale", "momentum_scale", "natural_updates")


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def outcome(model: nn.Module, optimizer: KFACOptimizer) -> Outcome:
    buffers = {name: optimizer.state[param].get("momentum_buffer") for name, param in model.named_parameters()}
    momentum = {name: whole(buffer) for name, buffer in buffers.items() if buffer is not None}
    params = {name: whole(param) for name, param in model.named_parameters()}
    optimizer.consolidate_state_dict(to=0)
    metrics = optimizer.metrics()
    return Outcome(
        params, momentum, averages(model, optimizer), {name: metrics[name] for name in METRICS if name in metrics}
    )


def averages(model: nn.Module, optimizer: KFACOptimizer) -> dict[str, Tensor]:
    """Return running averages and their masses by layer and place, as a checkpoint holds them."""
    with warnings.catch_warnings():  # of this rank alone
        warnings.filterwarnings("ignore", r"kfac_optim. this state_dict\(\) lacks")
        saved = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return {
        " ".join((names[number], *path)): tensor.clone()
        for number, state in saved.items()
        if KEY in state
        for path, tensor in leaves({key: value for key, value in state[KEY].items() if key == "inverse"})
        if path[-1] in ("average", "mass")
    }


def alone(net: Model, examples: int, **options: Any) -> Outcome:
    """One process, which trains on the examples of the first numbers."""
    model = seeded(net)
    optimizer = KFACOptimizer(model, **(DEFAULTS | options))
    train(model, optimizer, range(examples))
    return outcome(model, optimizer)


def assert_close(found: list[Outcome], expected: Outcome, tolerance: float = 1e-12) -> None:
    """Compare what all ranks have with that of one process."""
    for rank, each in enumerate(found):
        for kind in ("params", "momentum", "averages") if rank == 0 else ("params", "momentum"):
            ours, theirs = getattr(each, kind), getattr(expected, kind)
            assert list(ours) == list(theirs)
            assert theirs
            for name, tensor in theirs.items():
                close(ours[name], tensor, f"{kind} of {name}", tolerance)
        for name, value in expected.metrics.items():
            assert abs(each.metrics[name] - value) <= tolerance * abs(value), (name, each.metrics[name], value)
