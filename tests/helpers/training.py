"""Training on ranks, and the one process that it must equal.

The one process has a twin of the model. Statistics are those of the mean over all examples, which count the same
whatever rank they were on; gradients are the twin's, whose loss is the mean over ranks of the ranks' means, as DDP
makes it. With equal shares that is the same loss.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import Background, KFACOptimizer, LossTerms
from kfac_optim.distributed import DistributedConfig, Exchange, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Auto, Strategy

TIMEOUT = timedelta(seconds=30)
EXAMPLES = 12

Batch = tuple[Tensor, Tensor]


# -- models ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Linear layers, one without a bias, a norm, and parameters of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 5, bias=False), nn.Linear(5, 2)
        self.norm = nn.LayerNorm(5)
        self.gain, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.hidden(self.first(x).tanh())) * self.gain
        out: Tensor = self.last(h.tanh()) + self.shift.mean(0)
        return out


class Pictures(nn.Module):
    """A convolution, and a linear layer over its feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.conv(x.view(-1, 1, 2, 2)).tanh().flatten(1))
        return out


class FeatureMap(nn.Module):
    """A linear layer over a map of 2 channels and 3 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.last = nn.Conv1d(1, 2, 2), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.wide(self.conv(x.unsqueeze(1)).tanh().flatten(1)).tanh())
        return out


class Tokens(nn.Module):
    """Attention over an embedding to which the output is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x * 2).round().long() % 5)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return F.linear(h, self.embedding.weight).mean(1)[:, :2]


class Tied(nn.Module):
    """One weight in two layers; the last layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        out: Tensor = self.last(self.last(h).tanh())[:, :2]
        return out


NETS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "pictures": Pictures,
    "feature map": FeatureMap,
    "tokens": Tokens,
    "tied": Tied,
}


def build(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):  # whose generator draws the same numbers everywhere
        model = net().double()
    return model.to(torch.get_default_device())


# -- examples ----------------------------------------------------------------------------------------------------


def examples(step: int, micro: int = 0, size: int = EXAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return tuple(torch.randn(size, dim, generator=generator, dtype=torch.float64) for dim in (4, 2))  # type: ignore[return-value]


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss of each example."""
    return (output - target).square().sum(1)


@dataclass(frozen=True)
class Split:
    """How many examples each rank has: `weights` in turn, another rank first at each step."""

    weights: tuple[int, ...] = (1,)

    def sizes(self, step: int, ranks: int) -> list[int]:
        weights = [self.weights[(rank + step) % len(self.weights)] for rank in range(ranks)]
        if sum(weights) == 0:
            weights[step % ranks] = 1
        sizes = [EXAMPLES * weight // sum(weights) for weight in weights]
        sizes[weights.index(max(weights))] += EXAMPLES - sum(sizes)
        return sizes


EVEN, UNEVEN, EMPTY = Split(), Split((3, 1, 2)), Split((1, 0, 2))


# -- what is compared --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        net: of `NETS`.
        strategy: of the ranks.
        options: of the optimizer.
        by_layer: param groups: parameters whose name begins so have these numbers.
        split: examples to ranks.
        wrapped: whether by DDP; its flags.
        micro: backwards in a step.
        scaler: how a GradScaler is used: not, handed over, or named and asked to unscale first.
        stated: whether the terms of the loss are stated.
        dampings: λ of the steps, in turn, known only when backward is over; none leaves it alone.
        steps: of the training.
        exchange: the way between all ranks and owners.
    """

    net: str = "mixed"
    strategy: Strategy | Auto = field(default_factory=Replicated)
    options: Mapping[str, Any] = field(default_factory=dict)
    by_layer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split: Split = EVEN
    wrapped: Mapping[str, Any] | None = field(default_factory=dict)
    micro: int = 1
    scaler: str | None = None
    stated: bool = False
    dampings: tuple[float, ...] = ()
    steps: int = 13
    exchange: Exchange | None = None

    @property
    def summed(self) -> bool:
        return self.options.get("loss_terms") is LossTerms.SUM

    def optimizer(self, model: nn.Module, **others: Any) -> KFACOptimizer:
        defaults = {"lr": 0.05, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 3}
        options = {**defaults, **self.options, **others}
        if not self.by_layer:
            return KFACOptimizer(model, **options)
        groups = [
            {
                "params": [(name, param) for name, param in model.named_parameters() if self._prefix(name) == prefix],
                **numbers,
            }
            for prefix, numbers in {"": {}, **self.by_layer}.items()
        ]
        return KFACOptimizer(groups, model=model, **options)

    def set_damping(self, optimizer: KFACOptimizer, step: int) -> None:
        """That of step number `step`."""
        for group in optimizer.param_groups if self.dampings else ():
            group["damping"] = self.dampings[step % len(self.dampings)]

    def distributed(self) -> dict[str, Any]:
        return {"distributed": DistributedConfig(self.strategy, timeout=TIMEOUT, exchange=self.exchange)}

    def _prefix(self, name: str) -> str:
        return next((prefix for prefix in self.by_layer if prefix in name), "")


def share(batch: Batch, sizes: Sequence[int], rank: int) -> Batch:
    x, y = (torch.split(each, list(sizes))[rank] for each in batch)
    return x, y


def one_process(case: Case, ranks: int) -> Iterator[tuple[nn.Module, KFACOptimizer]]:
    """Model and optimizer after each step."""
    model, twin = build(NETS[case.net]), build(NETS[case.net])
    optimizer = case.optimizer(model)
    for step in range(case.steps + 3):
        sizes = case.split.sizes(step, ranks)
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        twin.zero_grad()
        for micro in range(case.micro):
            x, y = examples(step, micro)
            statistics = squares(model(x), y)
            statistics = statistics.sum() / ranks**0.5 if case.summed else statistics.mean() / case.micro
            if case.stated:
                optimizer.set_loss_terms(len(x))
            statistics.backward()
            weights = (
                torch.cat([torch.full((size,), 1 / max(size, 1), dtype=torch.float64) for size in sizes]) / case.micro
            )
            if case.summed:
                weights = torch.ones(len(x)).double()
            ((squares(twin(x), y) * weights).sum() / ranks).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            if param.grad is not None:
                assert other.grad is not None
                # A rank without examples halves the mean; to the bit that would be taken for a scale of the loss.
                param.grad.copy_(other.grad * (1 + 2**-48))
        case.set_damping(optimizer, step)
        optimizer.step()
        yield model, optimizer


def wrap(model: nn.Module, flags: Mapping[str, Any] | None) -> nn.Module:
    return model if flags is None else DistributedDataParallel(model, **flags)


def average_gradients(model: nn.Module) -> None:
    """By hand, as without a wrapper."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()


def on_rank(rank: int, case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters, and on rank 0 the whole state, after all steps."""
    with warnings.catch_warnings():
        # Each rank's loss is the mean over its own examples, however many: as the optimizer takes it to be.
        warnings.filterwarnings("ignore", "kfac_optim: the processes have counted different numbers of loss terms")
        return _trained(rank, case)


def _trained(rank: int, case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    ranks = dist.get_world_size()
    bare = build(NETS[case.net])
    model = wrap(bare, case.wrapped)
    scaler = (
        None
        if case.scaler is None
        else torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**8, growth_interval=4)
    )
    others = {"grad_scaler": scaler} if case.scaler == "named" else {}
    optimizer = case.optimizer(model, **case.distributed(), **others)
    chosen = case.strategy.candidates if isinstance(case.strategy, Auto) else (case.strategy,)
    by_hand = case.wrapped is None and not any(isinstance(each, Sharded) for each in chosen)
    for step in range(case.steps):
        sizes = case.split.sizes(step, ranks)
        optimizer.zero_grad()
        for micro in range(case.micro):
            x, y = share(examples(step, micro), sizes, rank)
            last = micro == case.micro - 1
            with nullcontext() if last or case.wrapped is None else model.no_sync():  # type: ignore[operator]
                losses = squares(model(x), y)
                loss = losses.sum() if case.summed else losses.sum() / max(len(x), 1) / case.micro
                if case.stated and len(x):
                    optimizer.set_loss_terms(len(x))
                (loss if scaler is None else scaler.scale(loss)).backward()
        if by_hand:
            average_gradients(bare)
        case.set_damping(optimizer, step)
        if scaler is None:
            optimizer.step()
        else:
            if case.scaler == "named":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    optimizer.consolidate_state_dict(to=0)
    return [param.detach().clone() for param in bare.parameters()], optimizer.state_dict() if rank == 0 else {}


def check(case: Case, answers: Sequence[tuple[list[Tensor], dict[str, Any]]], *, rtol: float = 1e-12) -> None:
    """That ranks have ended where one process does, all of them at the same bits."""
    ranks = len(answers)
    params, state = answers[0]
    for rank, (others, _) in enumerate(answers[1:], 1):
        for number, (one, other) in enumerate(zip(params, others, strict=True)):
            assert torch.equal(one, other), f"parameter {number} of rank {rank} is not that of rank 0"
    reference = one_process(case, ranks)
    for _ in range(case.steps):
        model, optimizer = next(reference)
    for (name, param), ours in zip(model.named_parameters(), params, strict=True):
        close(ours, param.detach(), name, rtol)
    _compare_states(state, optimizer.state_dict(), ranks, rtol, summed=case.summed)
    if case.summed or isinstance(case.options.get("refresh"), Background):
        return  # masses are others on one process; what is under way is in no checkpoint of several
    # What was gathered trains on as the one process does.
    resumed = build(NETS[case.net])
    with torch.no_grad():
        for param, ours in zip(resumed.parameters(), params, strict=True):
            param.copy_(ours)
    taken = case.optimizer(resumed)
    taken.load_state_dict(state)
    for (model, _), step in zip(reference, range(case.steps, case.steps + 3), strict=True):
        taken.zero_grad()
        x, y = examples(step)
        loss = squares(resumed(x), y)
        (loss.sum() / ranks**0.5 if case.summed else loss.mean()).backward()
        for param, other in zip(resumed.parameters(), model.parameters(), strict=True):
            if other.grad is not None:
                param.grad = other.grad.clone()
        if case.micro == 1:
            case.set_damping(taken, step)
            taken.step()
            for (name, param), ours in zip(model.named_parameters(), resumed.parameters(), strict=True):
                close(ours.detach(), param.detach(), f"{name} after resuming at step {step}", rtol)


# What each owner counts for a layer as a whole; and what is in an order and with signs of its own, which the
# steps that are taken with it tell of.
_OF_OWNERS = ("failed", "retried")
_OF_A_BASIS = ("S", "S_applied", "S_applied_apart")


def _compare_states(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], ranks: int, rtol: float, *, summed: bool
) -> None:
    # Parameters without state are listed too, for `torch.distributed.checkpoint`.
    ours_held, theirs_held = ({number for number, held in each["state"].items() if held} for each in (ours, theirs))
    assert ours_held == theirs_held
    for number, held in theirs["state"].items():
        mine = ours["state"][number]
        assert mine.keys() == held.keys(), number
        for name in ("momentum_buffer", "exp_avg_sq", "step", "preference"):
            if held.get(name) is not None:
                close(mine[name], held[name], f"{name} {number}", rtol)
        if "kfac" in held:
            for key, value in held["kfac"]["clock"].items():
                if key in ("damping", "loss_unit"):  # by slopes that are summed in another order
                    value = pytest.approx(value, rel=rtol)
                assert key == "summed_terms" or mine["kfac"]["clock"][key] == value, (number, key)
            left, right = (dict(_flat(each["kfac"]["inverse"])) for each in (mine, held))
            assert left.keys() == right.keys()
            for key, tensor in right.items():
                if key.endswith("G.mass") and summed:
                    tensor = tensor * ranks  # each rank's loss is one term
                if key in _OF_OWNERS or key in _OF_A_BASIS or key.endswith("_basis"):
                    continue
                if key == "condition" and "solved" in right:
                    continue  # where A and G have different owners it is measured without the other's trace
                close(left[key].double(), tensor.double(), f"{key} of {number}", rtol)


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            yield prefix + key, value
        else:
            yield from _flat(value, f"{prefix}{key}.")


def close(ours: Tensor, theirs: Tensor, at: str, rtol: float) -> None:
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * scale + 1e-12, msg=lambda text: f"{at}: {text}")
