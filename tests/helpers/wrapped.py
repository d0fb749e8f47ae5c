"""Models and loops that leave the same statistics wrapped by DDP or FSDP2 as bare on one process."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFACOptimizer

Statistics = dict[str, tuple[Tensor, Tensor]]


class Branches(nn.Module):
    """Attention, a recurrent layer, a convolution, an embedding with its tied output layer, a bare matrix.

    Few of its dimensions can be divided by 2, so that shards are uneven; some have one row, or fewer than ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.recurrent = nn.LSTM(3, 3, batch_first=True)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.LayerNorm(3)
        self.mix = nn.Parameter(torch.randn(3, 3))
        self.gate = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x > 0).long() + 2 * (x > 1).long()) * x.unsqueeze(-1)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = self.recurrent(h)[0]
        h = self.norm(self.conv(h.mT).mT) @ self.mix
        return F.linear(h * self.gate(h), self.embedding.weight).mean(1)


class Checkpointed(nn.Module):
    """Part of its forward runs again within backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        again: Tensor = checkpoint(self.hidden, h, use_reentrant=self.reentrant)
        return self.last(again.tanh())


class Plain(Checkpointed):
    """The same without."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(x).tanh()).tanh())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net().to(torch.float64)


def batch(rank: int, number: int = 0) -> Tensor:
    """Of other examples, and of another number of them, on each rank."""
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(3 + rank + number, 3, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = (model(x) - 1).square().mean()
    return mean


Loop = Callable[[nn.Module, KFACOptimizer, int], None]
"""What comes before a step."""


def once(model: nn.Module, _: KFACOptimizer, rank: int) -> None:
    loss(model, batch(rank)).backward()


def accumulated(model: nn.Module, _: KFACOptimizer, rank: int) -> None:
    """Two micro-batches, of which the first is not synchronised."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        (loss(model, batch(rank)) / 2).backward()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(True)
    (loss(model, batch(rank, 1)) / 2).backward()


def with_evaluations(model: nn.Module, _: KFACOptimizer, rank: int) -> None:
    """Forwards without gradients before the forward, before the backward, and before the step."""
    evaluate(model, rank)
    value = loss(model, batch(rank))
    evaluate(model, rank)
    value.backward()
    evaluate(model, rank)


def with_another_forward(model: nn.Module, _: KFACOptimizer, rank: int) -> None:
    """A forward that is never followed by a backward."""
    loss(model, batch(rank)).backward()
    loss(model, batch(rank, 1))


def with_state_dict(model: nn.Module, optimizer: KFACOptimizer, rank: int) -> None:
    loss(model, batch(rank)).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"kfac_optim. this state_dict\(\) lacks")
        optimizer.state_dict()


def with_gradients_of_inputs(model: nn.Module, _: KFACOptimizer, rank: int) -> None:
    """A backward that does not reach the weights."""
    x = batch(rank, 1).requires_grad_()
    torch.autograd.grad(loss(model, x), x)
    loss(model, batch(rank)).backward()


def evaluate(model: nn.Module, rank: int) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(rank, 2))
    model.train()


def statistics(optimizer: KFACOptimizer) -> Statistics:
    """What the backwards since the last step have left, folded into the factors."""
    kept = [(param, param.grad) for group in optimizer.param_groups for param in group["params"]]
    for param, _ in kept:
        param.grad = None  # how far the step goes is not looked at here
    optimizer.step()
    for param, grad in kept:
        param.grad = grad
    return factors(optimizer)


def factors(optimizer: KFACOptimizer) -> Statistics:
    """Of layers that have both."""
    return {name: (a, g) for name, (a, g) in optimizer.factors().items() if a is not None and g is not None}


def plain_statistics(net: Callable[[], nn.Module], loop: Loop, rank: int, **options: Any) -> Statistics:
    """Of this rank's batches on one process."""
    model = seeded(net)
    optimizer = KFACOptimizer(model, distributed=False, **options)
    loop(model, optimizer, rank)
    return statistics(optimizer)


def assert_same(found: Statistics, expected: Statistics, tolerance: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, pair in expected.items():
        for side, ours, theirs in zip("AG", found[name], pair, strict=True):
            assert float(theirs.abs().max()) > 0, f"{side} of {name!r} is zero: nothing was compared"
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, of=f"{side} of {name!r}": f"{of}: {m}"
            )
