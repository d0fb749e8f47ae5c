"""Experts that lie on one rank each, or on some: every step is that of one process on the joined batch."""

from typing import Any

import pytest
import torch
from helpers.mixtures import EXPERTS, Mixture, weights_of
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import EKFAC, Background, ExactGGN, KFACOptimizer, LossTerms, SelectedUpdates, TrustRegion
from kfac_optim.distributed import DistributedConfig, Experts, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

RANKS, EACH, STEPS, UPSET = 4, 6, 7, 4
UNEVEN = (3, 9, 5, 7)
CRITERION = nn.MSELoss()
OPTIONS: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.9,
    "nesterov": True,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 3,
}
CHOICES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fixed trust region": {"step_size": TrustRegion(), "kl_clip": 1e-3},
    "selected updates": {"step_size": SelectedUpdates(), "lr": 0.02, "nesterov": False},
    "EKFAC": {"inverse": EKFAC(), "factor_update_period": 3},
    "the named loss": {"estimate": ExactGGN(CRITERION)},
    "in the background": {"refresh": Background(max_staleness=2, deterministic=True)},
    "uneven": {},
    "clipped": {},
}


def batch(step: int) -> Tensor:
    """The examples of all ranks, `[24, 3]`; in every other step two experts get no token, and one gets its first late."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * EACH, 2, generator=generator, dtype=torch.float64)
    ids = torch.randint(EXPERTS, (len(x),), generator=generator)
    if step % 2:
        ids[(ids == 2) | (ids == 3)] = 5
    if step < 3:
        ids[ids == 7] = 0
    return torch.cat([ids.to(x.dtype).unsqueeze(1), x], 1)


def loss(output: Tensor) -> Tensor:
    found: Tensor = CRITERION(output, torch.ones_like(output))
    return found


def in_wrapper(model: Mixture, *, divided: bool = True) -> DistributedDataParallel:
    names = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for param in model.of_experts_here() if divided else ():
        param.register_hook(lambda gradient: gradient / RANKS)
    return DistributedDataParallel(model)


def filled(model: Mixture) -> list[Tensor]:
    """Return the gradients of experts, zeros where there was none."""
    for param in model.of_experts_here():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in model.of_experts_here() if param.grad is not None]


class Run:
    """Trains a mixture on this rank.

    Args:
        kind: of the mixture.
        copies: of each expert.
        strategy: of the shared layers.
        choice: of `CHOICES`.
    """

    def __init__(self, kind: str, copies: int, strategy: Strategy, choice: str) -> None:
        mesh = init_device_mesh("cpu", (copies, RANKS // copies), mesh_dim_names=("copies", "experts"))
        self.model, self.choice = Mixture(kind, mesh.get_group("experts")), choice
        self.ddp = in_wrapper(self.model)
        self.copies = mesh.get_group("copies") if copies > 1 else None
        config = DistributedConfig(strategy=strategy, experts=Experts(["experts"], copies=self.copies))
        self.optimizer = KFACOptimizer(self.ddp, **OPTIONS | CHOICES[choice], distributed=config)

    def train(self, first: int = 0, last: int = STEPS) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, rank = batch(step), dist.get_rank()
            if self.choice == "uneven":
                mine = x.split(UNEVEN)[rank]
                self.optimizer.set_loss_terms(len(x) / RANKS * 2)  # the mean is over elements, two an example
                (loss(self.ddp(mine)) * len(mine) * RANKS / len(x)).backward()
            else:
                loss(self.ddp(x.chunk(RANKS)[rank])).backward()
            for gradient in filled(self.model) if self.copies is not None else ():
                dist.all_reduce(gradient, group=self.copies)
            if self.choice == "clipped":
                self.optimizer.clip_grad_norm_(0.5)
            if step == UPSET and rank == 3:
                filled(self.model)[0].fill_(float("nan"))
            self.optimizer.step()

    def params(self) -> tuple[list[Tensor], Tensor]:
        return [param.detach() for param in self.model.of_others()], weights_of(self.model.of_experts_here())


def on_rank(_: int, *chosen: Any) -> tuple[list[Tensor], Tensor]:
    run = Run(*chosen)
    run.train()
    return run.params()


def alone(kind: str, copies: int, choice: str) -> tuple[list[Tensor], Tensor]:
    model = Mixture(kind)
    options = OPTIONS | CHOICES[choice]
    if choice == "uneven":
        options["loss_terms"] = LossTerms.ELEMENTS
    optimizer = KFACOptimizer(model, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(step))).backward()
        if copies > 1:  # whose sums are never None
            filled(model)
        if choice == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step == UPSET:
            filled(model)[0].fill_(float("nan"))
        optimizer.step()
    return [param.detach() for param in model.of_others()], weights_of(model.of_experts_here())


def compare(answers: list[tuple[list[Tensor], Tensor]], copies: int, expected: tuple[list[Tensor], Tensor]) -> None:
    shared, experts = expected
    for rank, (ours, _) in enumerate(answers):
        for number, (one, other) in enumerate(zip(ours, shared, strict=True)):
            close(one, other, f"parameter {number} on rank {rank}", 1e-12)
    for first in range(0, RANKS, RANKS // copies):
        held = torch.cat([weights for _, weights in answers[first : first + RANKS // copies]])
        close(held, experts, f"experts from rank {first}", 1e-12)


@pytest.mark.parametrize("strategy", [Replicated(), Replicated(0.5), Sharded()], ids=["replicated", "half", "sharded"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "einsum"])
def test_ranks_with_experts_are_one_process(four_ranks: Ranks, kind: str, copies: int, strategy: Strategy) -> None:
    answers = four_ranks.run(on_rank, kind, copies, strategy, "defaults")
    compare(answers, copies, alone(kind, copies, "defaults"))


@pytest.mark.parametrize("choice", list(CHOICES)[1:])
@pytest.mark.parametrize(("kind", "copies"), [("linear", 1), ("einsum", 2)])
def test_so_they_are_whatever_is_chosen(four_ranks: Ranks, kind: str, copies: int, choice: str) -> None:
    answers = four_ranks.run(on_rank, kind, copies, Sharded() if copies == 1 else Replicated(), choice)
    compare(answers, copies, alone(kind, copies, choice))
