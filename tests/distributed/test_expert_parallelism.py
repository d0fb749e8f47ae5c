"""Experts that lie on one rank each, or on some: every step is that of one process on the joined batch."""

from typing import Any

import pytest
import torch
from helpers.mixtures import EXPERTS, Mixture, weights_of
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Experts, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

RANKS, EACH, STEPS = 4, 6, 7
OPTIONS: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.9,
    "nesterov": True,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 3,
}


def batch(step: int) -> Tensor:
    """The examples of all ranks, `[24, 3]`. In every other step two experts get no token; one gets its first late."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * EACH, 2, generator=generator, dtype=torch.float64)
    ids = torch.randint(EXPERTS, (len(x),), generator=generator)
    if step % 2:
        ids[(ids == 2) | (ids == 3)] = 5
    if step < 3:
        ids[ids == 7] = 0
    return torch.cat([ids.to(x.dtype).unsqueeze(1), x], 1)


def loss(output: Tensor) -> Tensor:
    return (output - 1).square().sum(1).mean()


def on_mesh(kind: str, copies: int, strategy: Strategy, options: dict[str, Any]) -> tuple[Mixture, Any, KFACOptimizer]:
    """Return the model of this rank, in its wrapper, and its optimizer."""
    mesh = init_device_mesh("cpu", (copies, RANKS // copies), mesh_dim_names=("copies", "experts"))
    model = Mixture(kind, mesh.get_group("experts"))
    names = [name for name, _ in model.named_parameters() if name.startswith("experts")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    for param in model.of_experts_here():
        param.register_hook(lambda gradient: gradient / RANKS)
    experts = Experts(["experts"], copies=mesh.get_group("copies") if copies > 1 else None)
    config = DistributedConfig(strategy=strategy, experts=experts)
    return model, ddp, KFACOptimizer(ddp, **{**OPTIONS, **options}, distributed=config)


def backward(model: Mixture, ddp: Any, experts: Experts, x: Tensor) -> None:
    loss(ddp(x.chunk(RANKS)[dist.get_rank()])).backward()
    if experts.copies is not None:
        for gradient in filled(model):
            dist.all_reduce(gradient, group=experts.copies)


def filled(model: Mixture) -> list[Tensor]:
    """Return the gradients of experts, zeros where there was none."""
    for param in model.of_experts_here():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in model.of_experts_here() if param.grad is not None]


def on_rank(
    _: int, kind: str, copies: int, strategy: Strategy, options: dict[str, Any], upset: int
) -> tuple[list[Tensor], Tensor, list[float]]:
    model, ddp, optimizer = on_mesh(kind, copies, strategy, options)
    experts = optimizer._distributed.experts
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, ddp, experts, batch(step))
        if step == upset and dist.get_rank() == 3 and model.of_experts_here()[0].grad is not None:
            model.of_experts_here()[0].grad.fill_(float("nan"))
        optimizer.step()
        scales.append(optimizer.metrics())
    return [param.detach() for param in model.of_others()], weights_of(model.of_experts_here()), scales


def alone(kind: str, copies: int, options: dict[str, Any], upset: int) -> tuple[list[Tensor], Tensor, list[Any]]:
    model = Mixture(kind)
    optimizer = KFACOptimizer(model, **{**OPTIONS, **options})
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(step))).backward()
        if copies > 1:
            filled(model)
        if step == upset:
            model.first.weight.grad.fill_(float("nan"))
        optimizer.step()
        scales.append(optimizer.metrics())
    return [param.detach() for param in model.of_others()], weights_of(model.of_experts_here()), scales


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "einsum"])
def test_a(four_ranks: Ranks, kind: str, copies: int, strategy: Strategy) -> None:
    shared, experts, metrics = alone(kind, copies, {}, 4)
    answers = four_ranks.run(on_rank, kind, copies, strategy, {}, 4)
    for rank, (ours, _, found) in enumerate(answers):
        for step, (m, t) in enumerate(zip(found, metrics)):
            print(rank, step, {k: (m.get(k), t.get(k)) for k in ("trust_region_scale", "inner", "direction_square", "kl_clip")})
    for rank, (ours, _, _) in enumerate(answers):
        for number, (one, other) in enumerate(zip(ours, shared, strict=True)):
            close(one, other, f"parameter {number} on rank {rank}", 1e-12)
    for first in range(0, RANKS, RANKS // copies):
        held = torch.cat([weights for _, weights, _ in answers[first : first + RANKS // copies]])
        close(held, experts, f"experts from rank {first}", 1e-12)
