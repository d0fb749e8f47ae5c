"""Passes of an estimate through compiled models whose parameters are shared between processes."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import batch, mlp
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import ExactGGN, KFACOptimizer

SIZES = (4, 6, 4, 3)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_layers(model: nn.Module) -> nn.Module:
    for layer in sharded(model).children():
        layer.compile(backend="aot_eager")
    return model


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "sharded": lambda model: compiled(sharded(model)),
    "sharded layers": sharded_layers,
}


def trained(rank: int, way: str) -> list[Tensor]:
    torch.compiler.reset()
    criterion = nn.CrossEntropyLoss()
    model = WAYS[way](mlp(sizes=SIZES)) if way else DistributedDataParallel(mlp(sizes=SIZES))
    optimizer = KFACOptimizer(
        model, lr=0.1, factor_update_period=2, inverse_update_period=2, estimate=ExactGGN(criterion)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for step in range(4):
            optimizer.zero_grad()
            target = torch.randint(3, (8,), generator=torch.Generator().manual_seed(step + rank))
            criterion(model(batch(10 * step + rank)), target).backward()
            optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    params = (param.detach() for param in model.parameters())
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_the_eager_model(two_ranks: Ranks, way: str) -> None:
    expected = two_ranks.run(trained, "")
    for found, theirs in zip(two_ranks.run(trained, way, timeout=90), expected, strict=True):
        for left, right in zip(found, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
