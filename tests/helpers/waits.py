"""What the host waits for in training on an accelerator, step by step: run by `test_waits.py` in a process of its own.

On a pretended device here; on CUDA `test_cuda.py` runs the same training.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.accelerator import NAME, Watch
from kfac_optim import (
    EKFAC,
    BlockDiagonal,
    CurvaturePropagation,
    DoublyFactored,
    Eigen,
    KFACOptimizer,
    LowRank,
    MonteCarlo,
    NewtonSchulz,
    SelectedUpdates,
    Structure,
    Subsample,
    TrustRegion,
    WeightSharing,
)
from kfac_optim.distributed.stages import PipelineStages
from kfac_optim.specs import Sketched

CLASSES = 7
STEPS = 7


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(CLASSES, 8), nn.LayerNorm(8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        mixed = self.attention(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(x + mixed).mean(1)
        return logits


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.sequence, self.head = kind(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.sequence(x.transpose(0, 1))[0][-1])
        return logits


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Linear(5, CLASSES)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.ConvTranspose2d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def rows() -> Tensor:
    return torch.randn(8, 4)


def images() -> Tensor:
    return torch.randn(4, 2, 7, 7)


def tokens() -> Tensor:
    return torch.randint(CLASSES, (4, 6))


def sequences() -> Tensor:
    return torch.randn(4, 6, 4)


@dataclass(frozen=True)
class Case:
    """One kind of training.

    Attributes:
        model: makes it.
        batch: makes its input.
        options: of the optimizer, in place of the defaults below.
        scaled: whether a GradScaler is used.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False


RANK = 1
LAST = "6"  # of the convolutions: a linear layer over a flattened feature map of two channels
CASES = {
    "linear and norm": Case(layers, rows),
    "convolutions": Case(convolutions, images),
    "embedding and attention": Case(Tokens, tokens),
    "recurrent": Case(lambda: Recurrent(nn.RNN), sequences),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), sequences, {"factor_update_period": 1}),
    "Eigen": Case(convolutions, images, {"inverse": Eigen()}),
    "EKFAC": Case(convolutions, images, {"inverse": EKFAC()}),
    "LowRank": Case(convolutions, images, {"inverse": LowRank(RANK)}),
    "NewtonSchulz": Case(convolutions, images, {"inverse": NewtonSchulz(dtype=torch.bfloat16)}),
    "DoublyFactored": Case(convolutions, images, {"inverse": {LAST: DoublyFactored(2)}}),
    "BlockDiagonal": Case(convolutions, images, {"structure": {LAST: (BlockDiagonal(3), Structure.DENSE)}}),
    "diagonal and identity": Case(layers, rows, {"structure": (Structure.DIAGONAL, Structure.IDENTITY)}),
    "reduce": Case(convolutions, images, {"weight_sharing": WeightSharing.REDUCE}),
    "subsample": Case(convolutions, images, {"subsample": Subsample(examples=2, positions=3)}),
    "MonteCarlo": Case(Tokens, tokens, {"estimate": MonteCarlo(nn.CrossEntropyLoss())}),
    "CurvaturePropagation": Case(layers, rows, {"estimate": CurvaturePropagation(nn.CrossEntropyLoss())}),
    "fixed region": Case(layers, rows, {"step_size": TrustRegion()}),
    "sketches": Case(convolutions, images, {"inverse": LowRank(RANK, sketch=RANK)}),
    "selected": Case(layers, rows, {"step_size": SelectedUpdates(), "skip_layers": ["4"]}),
    "foreach": Case(layers, rows, {"fused": None, "foreach": True}),
    "no limit": Case(layers, rows, {"nonfinite_limit": None}),
    "GradScaler": Case(layers, rows, scaled=True),
}


def steps(case: Case, waits: list[str], device: str) -> list[dict[str, Any]]:
    """Of each step its kind, what was waited for in forward, backward and step, what by metrics, and its refreshes.

    Args:
        case: the training.
        waits: grows with each wait.
        device: where.
    """
    model, batch = case.model().to(device), case.batch().to(device)
    targets = torch.randint(CLASSES, (len(batch),)).to(device)
    numbers: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "fused": True}
    # A bound that does not hold: the unit of the loss stays 1, and with it the damping, that refreshes would follow.
    numbers |= {"factor_update_period": 2, "inverse_update_period": 4, "kl_clip": 1e9}
    optimizer = KFACOptimizer(model, **{**numbers, **case.options})
    scaler = torch.amp.GradScaler(device, enabled=case.scaled)
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        waits.clear()
        loss = F.cross_entropy(model(batch), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        seen = Counter(waits)
        scaler.update()
        waits.clear()
        metrics = optimizer.metrics()
        asked = list(waits)
        dict(metrics)
        read = sorted({*waits})
        blocks = optimizer._binding.coverage.blocks
        refreshed = any(block.clock.refreshed_at == number for block in blocks)
        sampled = any(block.clock.folded_at == number for block in blocks)
        kind = "refresh" if refreshed else "statistics" if sampled else "plain"
        stacks = {(block.inverse, dim) for block in blocks for dim in dense_dims(block)}
        found.append(
            {
                "kind": "first" if number == 0 else kind,
                "before": found[-1]["kind"] if found else None,
                "waits": seen,
                "asked": asked,
                "read": read,
                "blocks": len(blocks),
                "stacks": len(stacks),
                "matrices": sum(dim > 1 for _, dim in stacks),
                "wide": sum(dim >= 4 * RANK for _, dim in stacks),
                "sketched": len({(block.inverse, dim) for block in blocks for dim in sketched_dims(block)}),
            }
        )
    return found


def sketched_dims(block: Any) -> list[int]:
    """The widths of the factors that are kept as sketches."""
    return [each.dim for each in block.spec.by_blocks().factors() if isinstance(each.structure, Sketched)]


def dense_dims(block: Any) -> list[int]:
    """Sizes of the dense matrices that its inverse is made of."""
    if isinstance(block.inverse, DoublyFactored):
        return [inverse.shape[-1] for inverse in block.state.inverses.values()]
    return [each.dim for each in block.spec.by_blocks().factors() if each.structure is Structure.DENSE]


# -- what waits, and what does not ---------------------------------------------------------------------------------

PROBES: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "bool": (lambda x: bool(x.any()), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "a mask": (lambda x: x[x > 0], "index"),
    "values at a mask": (lambda x: x.__setitem__(x[0] > 0, x.clone()), "index_put_"),
    "an index of the host": (lambda x: x[torch.arange(2)], "index"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "copy to the host": (lambda x: x.cpu(), "copy"),
    "copy to the device": (lambda _: torch.ones(2).to(NAME), "copy"),
    "copy into": (lambda x: x.copy_(torch.ones(3, 3)), "copy"),
    "torch.tensor": (lambda _: torch.tensor([1.0], device=NAME), "torch.tensor"),
    "torch.as_tensor": (lambda _: torch.as_tensor(1.0, device=NAME), "torch.tensor"),
    "where on the host": (lambda x: torch.where(torch.tensor(True), x, x), "where"),
    "eigh": (lambda x: torch.linalg.eigh(x), "_linalg_eigh"),
    "cholesky": (lambda x: torch.linalg.cholesky(x + 9 * torch.eye(3, device=NAME)), "_linalg_check_errors"),
    "multinomial": (lambda x: torch.multinomial(x, 1), "multinomial"),
    "repeat": (lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=NAME), 0), "repeat_interleave"),
    "cholesky_ex": (lambda x: torch.linalg.cholesky_ex(x), None),
    "arithmetic": (lambda x: ((x @ x).mul_(2) + torch.tensor(1.0)).double().sum(0), None),
    "where": (lambda x: torch.where(x > 0, x, 0.0), None),
    "assignment": (lambda x: x.__setitem__((0, slice(1, None)), 5), None),
    "new tensors": (lambda x: (torch.zeros(2, device=NAME), x.new_ones(2), torch.randn_like(x)), None),
    "queued copy": (lambda x: x.copy_(torch.ones(3, 3).to(NAME, non_blocking=True)), None),
    "backward": (lambda x: x.clone().requires_grad_().square().sum().backward(), None),
}
"""What is done with a `[3, 3]` tensor of ones on the pretended device, and what the host then waits for."""


# -- steps that the device does not take ---------------------------------------------------------------------------

SPOILT = {"nan": float("nan"), "inf": float("inf"), "minus inf": -float("inf"), "huge": 3e38}
"""What is put into a gradient. Huge ones are finite, though their sum is not."""


def spoilt_step(value: float, device: str, waits: list[str], **options: Any) -> dict[str, bool]:
    """What a step between refreshes does with a gradient that has one such element, or two that are huge."""
    model, batch = layers().to(device), rows().to(device)
    targets = torch.randint(CLASSES, (len(batch),)).to(device)
    numbers = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 5, "inverse_update_period": 5, "kl_clip": 1e-6}
    optimizer = KFACOptimizer(model, **numbers, fused=True, **options)

    def train(spoil: bool) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), targets).backward()
        if spoil:
            gradient = model.get_parameter("0.weight").grad
            assert gradient is not None
            gradient[0, : 2 if abs(value) < float("inf") else 1] = value
        waits.clear()
        optimizer.step()

    def held() -> list[Tensor]:
        tensors = [param.detach() for param in model.parameters()]
        return [t.clone() for t in tensors + [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]]

    train(spoil=False)
    before = held()
    train(spoil=True)
    waited = bool(waits)
    same = all(torch.equal(one, other) for one, other in zip(before, held(), strict=True))
    skipped = optimizer.metrics()["skipped_steps"]
    train(spoil=False)
    moved = all(bool(tensor.isfinite().all()) for tensor in held()) and not torch.equal(before[0], held()[0])
    counted_once = optimizer.metrics()["skipped_steps"] == skipped
    return {"waited": waited, "same": same, "skipped": skipped == 1, "moved": moved, "once": counted_once}


def spoilt_without_end(device: str, limit: int) -> str:
    """The error of so many spoilt steps in a row, and after how many."""
    model = layers().to(device)
    optimizer = KFACOptimizer(model, fused=True, momentum=0.9, factor_update_period=100, nonfinite_limit=limit)
    batch = rows().to(device)
    for number in range(20):
        optimizer.zero_grad()
        (model(batch).sum() * (1 if number == 0 else float("nan"))).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"{number}: {error}"
    return "none"


# -- stages of a pipeline ------------------------------------------------------------------------------------------


class _Alone:
    """Takes the place of what sends sums between stages."""

    def all_reduce(self, _: str, sums: Tensor) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: sums)


def sums_of_stages(device: str) -> None:
    """Add up numbers of the device and of the host over stages, as an adaptive trust region does."""
    stages = PipelineStages.__new__(PipelineStages)
    stages._communicator = lambda _: _Alone()  # type: ignore[assignment, method-assign, return-value]
    ones = torch.ones(2, device=device)
    stages.sums([ones[0], 0.5, 3], ones)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[str, Any] = {"cases": {}, "spoilt": {}, "probes": {}}
    for name, (probe, _) in PROBES.items():
        with Watch() as watch:
            ones = torch.ones(3, 3, device=NAME)
            probe(ones)
            found["probes"][name] = watch.waits
    for name, case in CASES.items():
        torch.manual_seed(0)
        with Watch() as watch:
            found["cases"][name] = steps(case, watch.waits, NAME)
    for name, value in SPOILT.items():
        torch.manual_seed(0)
        with Watch() as watch:
            found["spoilt"][name] = spoilt_step(value, NAME, watch.waits, step_size=TrustRegion())
    with Watch():
        found["without end"] = spoilt_without_end(NAME, limit=3)
    with Watch() as watch:
        sums_of_stages(NAME)
        found["stages"] = watch.waits
    json.dump(found, sys.stdout)
