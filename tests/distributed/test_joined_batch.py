"""Where a sample is made of the rows of all ranks together: each strategy against one process on the joined batch.

It is of losses that hold derivatives of the model, of experts, and of terms of the loss that have factors of their own.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import EKFAC, Cholesky, Eigen, ExactGGN, KFACOptimizer, SumOfTerms
from kfac_optim.distributed import DistributedConfig, Placement, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.linalg.triangles import packed_diagonal

STEPS = 7
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "damping": 0.1, "inverse_update_period": 3}


class Batch(NamedTuple):
    """The examples of each rank at one step, one tensor for each term of the loss."""

    of_ranks: Sequence[Sequence[Tensor]]

    def joined(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*self.of_ranks, strict=True)]

    def weights(self, rank: int) -> list[float]:
        """What the means over a rank's examples are multiplied by, for DDP's mean of them to be that over all."""
        sizes = [[len(term) for term in parts] for parts in self.of_ranks]
        return [len(sizes) * own / sum(all_) for own, all_ in zip(sizes[rank], zip(*sizes, strict=True), strict=True)]


def points(step: int, sizes: Sequence[Sequence[int]]) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch([[torch.randn(size, 2, generator=generator, dtype=torch.float64) for size in own] for own in sizes])


# -- a loss that holds derivatives of the model --------------------------------------------------------------------


def network() -> nn.Module:
    by_groups = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Tanh())
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), by_groups, nn.Linear(4, 1))


def helmholtz(model: nn.Module, x: Tensor) -> Tensor:
    """`Δu + u`."""
    x.requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return u + sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2))


def train_derivatives(
    model: nn.Module,
    optimizer: KFACOptimizer,
    criterion: nn.Module,
    rank: int | None,
    sizes: Sequence[Sequence[int]],
    micro: int = 1,
) -> None:
    """Take steps; on ranks with `micro` backwards in each."""
    for step in range(STEPS):
        batch = points(step, sizes)
        inside, boundary = batch.joined() if rank is None else batch.of_ranks[rank]
        weights = [1.0, 1.0] if rank is None else batch.weights(rank)
        optimizer.zero_grad()
        if rank is not None:
            optimizer.set_loss_terms(sum(map(sum, sizes)) / len(sizes))
        parts = [(inside, boundary)] if rank is None else zip(inside.chunk(micro), boundary.chunk(micro), strict=True)
        for number, (some, others) in enumerate(parts):
            with nullcontext() if rank is None or number == micro - 1 else model.no_sync():  # type: ignore[operator]
                residual = helmholtz(model, some) + 1 + step
                loss = weights[0] * len(some) / len(inside) * criterion(residual, torch.zeros_like(residual))
                value = model(others)  # on all ranks, as DDP wants it
                if len(others):
                    share = len(others) / len(boundary)
                    loss = loss + 3 * weights[1] * share * criterion(value, torch.zeros_like(value))
                loss.backward()
        optimizer.step()


def train_means(model: nn.Module, optimizer: KFACOptimizer, rank: int | None) -> None:
    """Each rank's loss is the mean over its own points, however many: the parameters stay as they are."""
    for step in range(STEPS):
        batch = points(step, ((2,), (6,)))
        (x,) = batch.joined() if rank is None else batch.of_ranks[rank]
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "kfac_optim: the processes have counted different numbers of loss terms")
            (helmholtz(model, x) + 1 + step).square().mean().backward()
            optimizer.step()


def train_emptied(model: nn.Module, optimizer: KFACOptimizer, rank: int | None) -> None:
    """The second rank has no points from the third step on, and differentiates nothing then, as often as the first."""
    for step in range(STEPS):
        batch = points(step, ((3,), (5,)) if step < 2 else ((8,), (0,)))
        (x,) = batch.joined() if rank is None else batch.of_ranks[rank]
        ranks = 1 if rank is None else 2
        optimizer.zero_grad()
        optimizer.set_loss_terms(8 / ranks)
        ((helmholtz(model, x) + 1 + step).square().sum() * ranks / 8).backward()
        optimizer.step()


def train_behind(model: nn.Module, optimizer: KFACOptimizer, rank: int | None) -> None:
    """A loss without derivatives has a backward of its own before them, but for the first step of the first rank."""
    for step in range(STEPS):
        batch = points(step, ((4,), (4,)))
        (x,) = batch.joined() if rank is None else batch.of_ranks[rank]
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.zero_grad()
        if rank != 0 or step > 0:
            with nullcontext() if rank is None else model.no_sync():  # type: ignore[operator]
                model(x).square().mean().backward()
        loss = helmholtz(model, x).square().mean()
        if rank == 0 and step == 0:
            loss = loss + model(x).square().mean()
        loss.backward()
        optimizer.step()


def train_apart(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module, rank: int | None) -> None:
    """The loss of the second rank holds no derivatives; on one process nothing is."""
    for step in range(STEPS if rank is not None else 0):
        (x,) = points(step, ((3,), (4,))).of_ranks[rank or 0]
        optimizer.zero_grad()
        criterion(model(x) if rank else helmholtz(model, x), torch.ones(len(x), 1, dtype=x.dtype)).backward()
        optimizer.step()


# -- experts -------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Three experts in one parameter; the first column of an input says which is the example's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, 1:]).tanh()
        return torch.bmm(hidden.unsqueeze(1), self.experts[x[:, 0].long()]).squeeze(1)


# Experts of the examples of each rank: in turn the third has none, some on one rank, some on the other.
ROUTES = (([0, 0, 1], [0, 1, 0]), ([0, 1, 2], [1, 1, 0]), ([1, 1, 1], [0, 2, 2]), ([0, 0, 0], [0, 0, 0]))


def tokens(step: int) -> Batch:
    batch = points(step, ((3,), (3,)))
    routes = ROUTES[step % len(ROUTES)]
    told = [torch.tensor(ids, dtype=torch.float64).unsqueeze(1) for ids in routes]
    return Batch([[torch.cat([ids, x], 1)] for ids, (x,) in zip(told, batch.of_ranks, strict=True)])


def train_experts(model: nn.Module, optimizer: KFACOptimizer, rank: int | None) -> None:
    for step in range(STEPS):
        (x,) = tokens(step).joined() if rank is None else tokens(step).of_ranks[rank]
        optimizer.zero_grad()
        (model(x) - 1).square().sum(1).mean().backward()
        optimizer.step()


# -- one against many ----------------------------------------------------------------------------------------------

UNEVEN = ((3, 2), (5, 2))
NO_BOUNDARY = ((3, 2), (5, 0))

CASES: dict[str, tuple[Any, ...]] = {
    "derivatives": (train_derivatives, Cholesky(), UNEVEN),
    "derivatives, accumulated": (train_derivatives, Cholesky(), UNEVEN, 2),
    "derivatives, means": (train_means, Cholesky()),
    "derivatives, emptied": (train_emptied, Cholesky()),
    "derivatives behind": (train_behind, Cholesky()),
    "derivatives on one rank": (train_apart, Cholesky()),
    "a term on one rank": (train_derivatives, SumOfTerms(), NO_BOUNDARY),
    "experts": (train_experts, Cholesky()),
    "experts, Eigen": (train_experts, Eigen()),
    "experts, EKFAC": (train_experts, EKFAC()),
}


def trained(name: str, rank: int | None, strategy: Strategy | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The parameters, and the running averages of all layers; of ranks on the first."""
    train: Callable[..., None]
    train, inverse, *others = CASES[name]
    named = train in (train_derivatives, train_apart)
    torch.manual_seed(0)
    bare = (Experts() if train is train_experts else network()).double()
    criterion = nn.MSELoss()
    # Between refreshes EKFAC applies the second moments of the last one.
    options = {**OPTIONS, "inverse": inverse, "factor_update_period": 3 if isinstance(inverse, EKFAC) else 1}
    if named:
        options["estimate"] = ExactGGN(criterion)
    if strategy is None:
        model, distributed = bare, False
    else:
        model, distributed = DistributedDataParallel(bare), DistributedConfig(strategy=strategy)
    optimizer = KFACOptimizer(model, **options, distributed=distributed)
    train(model, optimizer, *([criterion] if named else []), rank, *others)
    if strategy is not None:
        optimizer.consolidate_state_dict(to=0)
    return [param.detach().clone() for param in bare.parameters()], {} if rank else averages(optimizer.state_dict())


def averages(held: Any, at: str = "") -> dict[str, Tensor]:
    if isinstance(held, Tensor):
        return {at: held.clone()} if at.endswith(" average") else {}
    found: dict[str, Tensor] = {}
    for key, value in held.items() if isinstance(held, dict) else ():
        found |= averages(value, f"{at} {key}")
    return found


def on_rank(rank: int, name: str, strategy: Strategy) -> tuple[list[Tensor], dict[str, Tensor]]:
    return trained(name, rank, strategy)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("derivatives", Replicated(1)),
        ("derivatives", Sharded()),
        ("a term on one rank", Replicated(1)),
        ("a term on one rank", Sharded()),
        ("experts", Replicated(1)),
        ("experts", Sharded()),
        ("experts", Sharded(Placement.FACTORS)),
        ("experts, Eigen", Sharded(Placement.FACTORS)),
        ("experts, EKFAC", Replicated(1)),
        ("derivatives, accumulated", Sharded()),
        ("derivatives, means", Sharded()),
        ("derivatives behind", Replicated(1)),
        ("derivatives, emptied", Replicated(1)),
    ],
    ids=str,
)
def test_ranks_are_one_process_on_the_joined_batch(two_ranks: Ranks, name: str, strategy: Strategy) -> None:
    expected, kept = trained(name, None, None)
    answers = two_ranks.run(on_rank, name, strategy)
    for params, _ in answers:
        for number, (ours, theirs) in enumerate(zip(params, expected, strict=True)):
            close(ours, theirs, f"parameter {number}", 1e-12)
    assert answers[0][1].keys() == kept.keys()
    for at, average in kept.items():
        assert average.any(), at
        close(answers[0][1][at], average, at, 1e-12)


def test_a_rank_whose_loss_holds_no_derivatives_measures_as_those_whose_loss_does(two_ranks: Ranks) -> None:
    """Each sample of `A` then has the trace 1 in each group, and so has the average."""
    (_, kept), _ = two_ranks.run(on_rank, "derivatives on one rank", Replicated(1))
    of_inputs = [average for at, average in kept.items() if at.endswith(" A average")]
    for average, dim in zip(of_inputs, (3, 5, 3, 5), strict=True):
        traces = torch.cat(packed_diagonal(average, dim), -1).sum(-1)
        torch.testing.assert_close(traces, torch.ones_like(traces), rtol=1e-12, atol=0)
