"""Training under FSDP2 goes where one process goes that has all examples: parameters, momentum and factors."""

import copy
import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import counted_bytes
from helpers.layouts import Uneven
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from kfac_optim import (
    EKFAC,
    AutoInverse,
    Background,
    Cholesky,
    Eigen,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    LossTerms,
    LowRank,
    MonteCarlo,
    NewtonSchulz,
    QuadraticModel,
    SelectedUpdates,
    Staggered,
)
from kfac_optim.blocks.checkpoint import KEY
from kfac_optim.distributed import DistributedConfig, FullySharded, Placement, Replicated, Statistics
from kfac_optim.distributed.communication.transfer import leaves
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.step import selected_updates
from kfac_optim.utils.sharded_params import local

STEPS = 12
TOLERANCE = 1e-12
LAYERS, FACTORS = Placement.LAYERS, Placement.FACTORS

Shard = Callable[[nn.Module, DeviceMesh], None]
Batches = Sequence[Tensor]
"""Of each rank its own."""


# -- models ------------------------------------------------------------------------------------------------------------


class Checkpointed(Uneven):
    """Part of its forward runs again within backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).tanh()).unsqueeze(-1)
        h = checkpoint(self.conv, h, use_reentrant=False).squeeze(-1)
        return self.last(h * self.gate(h).sigmoid()) * self.slope


class Skipping(nn.Module):
    """Runs a layer only where its first input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if x[0, 0] > 0:
            h = self.sometimes(h).tanh()
        mapped: Tensor = self.last(h)
        return mapped


def mlp() -> nn.Sequential:
    """What its last layer returns is what it returns."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


class Even(nn.Sequential):
    """All rows can be shared evenly by two ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = super().forward(x)
        return mapped[:, :3].clone()


def one_layer() -> nn.Module:
    return nn.Linear(4, 3)


def seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):  # whose generator draws the same numbers everywhere
        model = net().to(torch.float64)
    return model.to(torch.get_default_device())


# -- wraps -------------------------------------------------------------------------------------------------------------


def root_only(model: nn.Module, mesh: DeviceMesh, reshard: bool | None = None) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def nested(model: nn.Module, mesh: DeviceMesh, reshard: bool = True) -> None:
    """Layers for themselves, which are gathered again for their backward."""
    for child in model.children():
        fully_shard(child, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


root_resharded = partial(root_only, reshard=True)
nested_and_kept = partial(nested, reshard=False)


def divided_by(factor: float, model: nn.Module, mesh: DeviceMesh) -> None:
    nested(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


# -- loops -------------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, x: Tensor) -> Tensor:
    target = x[:, :3].square() - x[:, 1:]
    mean: Tensor = (model(x) - target).square().sum(1).mean()
    return mean


def shares(model: nn.Module, micro: Batches) -> None:
    """One backward of such a share of the mean over two ranks that FSDP2 leaves the gradient of the mean."""
    mean = loss(model, torch.cat(list(micro)))
    (mean * 3 / 2 if isinstance(model, FSDPModule) else mean).backward()


def sums(model: nn.Module, micro: Batches) -> None:
    """One backward of a sum over examples."""
    x = torch.cat(list(micro))
    (loss(model, x) * len(x)).backward()


def once(model: nn.Module, micro: Batches) -> None:
    """One backward of all micro-batches."""
    loss(model, torch.cat(list(micro))).backward()


def accumulated(model: nn.Module, micro: Batches) -> None:
    """Gradients are brought to the others with the last micro-batch alone."""
    for number, x in enumerate(micro, 1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(micro))
        (loss(model, x) / len(micro)).backward()


Loop = Callable[[nn.Module, Batches], None]


# -- a run, on ranks and on one process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        sizes: of each rank's batch, in turn; of each micro-batch.
        steeper: from where on `SelectedUpdates` takes the natural gradient.
    """

    options: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = Uneven
    shard: Shard = nested
    loop: Loop = once
    placement: Placement = LAYERS
    sizes: tuple[int, ...] = (4,)
    micro: int = 1
    steeper: float = 2.0

    def build(self, model: nn.Module, **more: Any) -> KFACOptimizer:
        defaults = {
            "lr": 0.05,
            "momentum": 0.9,
            "damping": 0.1,
            "factor_update_period": 1,
            "inverse_update_period": 3,
            "kl_clip": 1e-2,
        }
        return KFACOptimizer(model, **(defaults | self.options | more))

    def as_steep(self) -> AbstractContextManager[object]:
        return mock.patch.object(selected_updates, "_STEEPER", self.steeper)

    def batches(self, rank: int, step: int) -> Batches:
        """The micro-batches of one rank."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        size = self.sizes[rank % len(self.sizes)]
        return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for _ in range(self.micro)]


@dataclass
class Outcome:
    """Whole tensors by name; averages are whole on rank 0 alone."""

    params: dict[str, Tensor]
    momentum: dict[str, Tensor]
    averages: dict[str, Tensor]
    metrics: dict[str, float]


METRICS = ("cosine", "gradient_norm", "direction_norm", "trust_region_scale", "momentum_scale", "natural_updates")


def averages(optimizer: KFACOptimizer) -> dict[str, Tensor]:
    """Running averages and their masses, by layer and place, as a checkpoint holds them."""
    with warnings.catch_warnings():  # of this rank alone
        warnings.filterwarnings("ignore", r"kfac_optim. this state_dict\(\) lacks")
        saved = optimizer.state_dict()["state"]
    names = [name for name, _ in optimizer._binding.model.named_parameters()]
    return {
        " ".join((names[number], *path)): tensor.clone()
        for number, state in saved.items()
        if KEY in state
        for path, tensor in leaves({key: value for key, value in state[KEY].items() if key == "inverse"})
        if path[-1] in ("average", "mass")
    }


def outcome(model: nn.Module, optimizer: KFACOptimizer) -> Outcome:
    buffers = {name: optimizer.state[param].get("momentum_buffer") for name, param in model.named_parameters()}
    momentum = {name: whole(buffer) for name, buffer in buffers.items() if buffer is not None}
    params = {name: whole(param.detach()) for name, param in model.named_parameters()}
    optimizer.consolidate_state_dict(to=0)
    metrics = optimizer.metrics()
    return Outcome(params, momentum, averages(optimizer), {name: metrics[name] for name in METRICS if name in metrics})


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


def on_rank(rank: int, ranks: int, case: Case) -> Outcome:
    model = seeded(case.net)
    case.shard(model, init_device_mesh(torch.get_default_device().type, (ranks,)))
    optimizer = case.build(model, distributed=DistributedConfig(Replicated(placement=case.placement)))
    for step in range(STEPS):
        optimizer.zero_grad()
        case.loop(model, case.batches(rank, step))
        with warnings.catch_warnings(), case.as_steep():
            # Each rank's loss is the mean over its own examples, as the optimizer takes it to be.
            warnings.filterwarnings("ignore", "kfac_optim: the processes have counted different numbers of loss terms")
            optimizer.step()
    return outcome(model, optimizer)


def on_one_process(ranks: int, case: Case) -> Outcome:
    """Statistics are those of all examples alike; the gradient is the mean of the ranks' means."""
    model = seeded(case.net)
    optimizer = case.build(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        of_ranks = [case.batches(rank, step) for rank in range(ranks)]
        case.loop(model, [torch.cat(list(micro)) for micro in zip(*of_ranks, strict=True)])
        if len(case.sizes) > 1:
            params = [param for param in model.parameters() if param.grad is not None]
            mean = torch.stack([loss(model, torch.cat(list(micro))) for micro in of_ranks]).mean()
            for param, grad in zip(params, torch.autograd.grad(mean, params), strict=True):
                param.grad = grad
        with case.as_steep():
            optimizer.step()
    return outcome(model, optimizer)


def assert_close(found: Outcome, expected: Outcome, tolerance: float, *, whole: bool) -> None:
    compare = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for kind in ("params", "momentum", "averages") if whole else ("params", "momentum"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            compare(ours[name], tensor, msg=lambda m, of=f"{kind} of {name!r}": f"{of}: {m}")
    assert found.metrics == pytest.approx(expected.metrics, rel=tolerance)


def check(ranks: Ranks, case: Case, tolerance: float = TOLERANCE) -> None:
    expected = on_one_process(ranks.world_size, case)
    for rank, found in enumerate(ranks.run(on_rank, ranks.world_size, case)):
        assert_close(found, expected, tolerance, whole=rank == 0)


SELECTED = {"step_size": SelectedUpdates(), "weight_decay": 0.01, "inverse_update_period": 2, "lr": 0.01}

# Of EKFAC the second moments are those of all ranks at refreshes alone.
INVERSES: dict[str, dict[str, Any]] = {
    "Cholesky": {"inverse": Cholesky()},
    "Eigen": {"inverse": Eigen()},
    "EKFAC": {"inverse": EKFAC(), "factor_update_period": 3},
    "NewtonSchulz": {"inverse": NewtonSchulz()},
    "AutoInverse": {"inverse": AutoInverse()},
    "sketches": {"inverse": LowRank(1, sketch=1)},
    "SelectedUpdates": SELECTED,
}


SHARDS: dict[str, Shard] = {
    "root_only": root_only,
    "root_resharded": root_resharded,
    "nested": nested,
    "nested_and_kept": nested_and_kept,
}
UPHILL = {"kl_clip": 1e-4, "lr": 0.5, "momentum": 0.95}  # momentum is held back
L2 = {"weight_decay": 0.01, "l2_in_curvature": True}

# Every inverse with both placements, every wrap and both kinds of batches; and each other choice with one of them.
COVERING: list[tuple[str, Placement, str, tuple[int, ...], dict[str, Any]]] = [
    ("Cholesky", LAYERS, "nested", (4,), {"momentum": 0.0}),
    ("Cholesky", FACTORS, "root_only", (3, 5), {"nesterov": True}),
    ("Eigen", LAYERS, "root_resharded", (3, 5), {"nesterov": True, "foreach": False}),
    ("Eigen", FACTORS, "nested_and_kept", (4,), {"nesterov": True, "foreach": True}),
    ("EKFAC", LAYERS, "nested", (3, 5), {"weight_decay": 0.01}),
    ("EKFAC", FACTORS, "root_only", (4,), L2),
    ("NewtonSchulz", LAYERS, "nested_and_kept", (3, 5), L2 | {"kl_clip": None}),
    ("NewtonSchulz", FACTORS, "root_resharded", (4,), UPHILL | {"foreach": False}),
    ("AutoInverse", LAYERS, "nested", (3, 5), {"dampening": 0.5, "foreach": True}),
    ("AutoInverse", FACTORS, "nested", (4,), {"maximize": True, "lr": 1e-4}),
    ("sketches", LAYERS, "nested", (3, 5), {}),
    ("sketches", FACTORS, "root_only", (4,), {"nesterov": True}),
    ("SelectedUpdates", LAYERS, "nested", (3, 5), {"nesterov": True, "skip_layers": ("gate",)}),
    ("SelectedUpdates", FACTORS, "root_only", (4,), {}),
    ("Cholesky", LAYERS, "nested", (3, 5), {"skip_layers": ("first", "gate")}),
    ("Eigen", FACTORS, "nested", (3, 5), {"refresh": Staggered()}),
    ("Cholesky", FACTORS, "root_only", (3, 5), {"refresh": Background(max_staleness=2, deterministic=True)}),
]


@pytest.mark.parametrize(("inverse", "placement", "shard", "sizes", "choice"), COVERING, ids=str)
def test_on_two_ranks(
    two_ranks: Ranks, inverse: str, placement: Placement, shard: str, sizes: tuple[int, ...], choice: dict[str, Any]
) -> None:
    case = Case(INVERSES[inverse] | choice, shard=SHARDS[shard], placement=placement, sizes=sizes, steeper=0.6)
    check(two_ranks, case)


@pytest.mark.parametrize(
    ("inverse", "placement", "shard"),
    [
        ("Cholesky", LAYERS, "nested"),
        ("Eigen", FACTORS, "root_only"),
        ("EKFAC", LAYERS, "nested_and_kept"),
        ("NewtonSchulz", FACTORS, "root_resharded"),
    ],
)
def test_on_four_ranks(four_ranks: Ranks, inverse: str, placement: Placement, shard: str) -> None:
    check(four_ranks, Case(INVERSES[inverse], shard=SHARDS[shard], placement=placement, sizes=(4, 3, 5, 2)))


def test_on_more_ranks_than_rows_or_layers(four_ranks: Ranks) -> None:
    check(four_ranks, Case(net=one_layer, sizes=(3, 5)))


@pytest.mark.parametrize("shard", ["root_only", "nested"])
def test_accumulated_gradients(two_ranks: Ranks, shard: str) -> None:
    check(two_ranks, Case(loop=accumulated, micro=3, shard=SHARDS[shard]))


@pytest.mark.parametrize(
    ("loop", "shard", "options"),
    [(shares, partial(divided_by, 3.0), {}), (sums, partial(divided_by, 1.0), {"loss_terms": LossTerms.SUM})],
    ids=["mean", "sum"],
)
def test_gradients_that_are_not_divided_by_the_number_of_ranks(
    two_ranks: Ranks, loop: Loop, shard: Shard, options: dict[str, Any]
) -> None:
    check(two_ranks, Case(options, loop=loop, shard=shard))


@pytest.mark.parametrize("shard", ["root_resharded", "nested"])
def test_checkpointed_layers(two_ranks: Ranks, shard: str) -> None:
    check(two_ranks, Case(net=Checkpointed, sizes=(3, 5), shard=SHARDS[shard]))


# In `mlp` what the model returns is what a layer returns that FSDP2 gathers, and shards again after its backward.
@pytest.mark.parametrize(
    ("net", "loop", "shard"),
    [
        (mlp, once, "nested"),
        (mlp, accumulated, "nested"),
        (mlp, once, "root_resharded"),
        (Uneven, once, "root_only"),
        (Checkpointed, accumulated, "nested_and_kept"),
    ],
)
def test_estimates_with_passes_of_their_own(
    two_ranks: Ranks, net: Callable[[], nn.Module], loop: Loop, shard: str
) -> None:
    estimate = ExactGGN(nn.MSELoss(), loss_terms=LossTerms.EXAMPLES)
    check(two_ranks, Case({"estimate": estimate}, net=net, shard=SHARDS[shard], loop=loop, micro=2))


def reductions(rank: int, estimate: bool) -> list[int]:
    """How often FSDP2 reduces gradients in each of two micro-batches."""
    model = seeded(mlp)
    nested(model, init_device_mesh("cpu", (2,)))
    choice = {"estimate": ExactGGN(nn.MSELoss())} if estimate else {}
    optimizer = KFACOptimizer(model, **choice)
    counts = []
    for sync, x in zip((False, True), Case(micro=2).batches(rank, 0), strict=True):
        model.set_requires_gradient_sync(sync)
        with mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduce:
            loss(model, x).backward()
        counts.append(reduce.call_count)
    optimizer.step()
    return counts


def test_passes_of_an_estimate_reduce_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(reductions, True)[0] == two_ranks.run(reductions, False)[0] == [0, 3]


def in_low_precision(rank: int) -> dict[str, Tensor]:
    model, mesh = seeded(mlp), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model[4], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    case = Case({"lr": 0.01})
    optimizer = case.build(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        once(model, case.batches(rank, step))
        optimizer.step()
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def test_forwards_in_low_precision(two_ranks: Ranks) -> None:
    start = {name: param.detach() for name, param in seeded(mlp).named_parameters()}
    expected = on_one_process(2, Case({"lr": 0.01}, net=mlp)).params
    far = max(float((tensor - start[name]).abs().max()) for name, tensor in expected.items())
    for found in two_ranks.run(in_low_precision):
        off = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
        assert 0 < off < 0.1 * far, (off, far)


def compiled(rank: int, how: str, shard: str, net: Callable[[], nn.Module]) -> list[Tensor]:
    torch.compiler.reset()
    case = Case(net=net)
    model = seeded(net)
    SHARDS[shard](model, init_device_mesh("cpu", (2,)))
    called: Any = model
    if how == "model":
        called = torch.compile(model, backend="aot_eager")
    elif how == "layers":
        for child in model.children():
            child.compile(backend="aot_eager")
    optimizer = case.build(called)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for step in range(5):
            optimizer.zero_grad()
            once(called, case.batches(rank, step))
            optimizer.step()
    assert optimizer.metrics()["blocks_without_statistics"] == 0
    return [whole(param.detach()) for param in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "shard", "net"), [("model", "root_only", Uneven), ("layers", "root_only", Uneven), ("model", "nested", mlp)]
)
def test_compiled_models(two_ranks: Ranks, how: str, shard: str, net: Callable[[], nn.Module]) -> None:
    expected = two_ranks.run(compiled, "", shard, net)
    for found, theirs in zip(two_ranks.run(compiled, how, shard, net, timeout=90), expected, strict=True):
        for left, right in zip(found, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=TOLERANCE, atol=TOLERANCE)


# -- gradients that are clipped, steps that are not taken, layers that are not used ---------------------------------


def clipping(_: int, ranks: int, order: float, mixed: bool) -> None:
    """One parameter is left whole on each rank, with the same gradient."""
    model, bare = seeded(Uneven), seeded(Uneven)
    mesh = init_device_mesh(torch.get_default_device().type, (ranks,))
    if mixed:
        fully_shard(model.first, mesh=mesh)
    else:
        nested(model, mesh)
    skipped = ("norm", "conv", "gate", "last") if mixed else ()
    optimizer = KFACOptimizer(model, skip_layers=skipped)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss(model, x).backward()
    loss(bare, x).backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.1, order)
    assert float(expected) > 0.1
    found = optimizer.clip_grad_norm_(0.1, order)
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-12, atol=1e-15)
    for param in model.parameters():
        param.grad.mul_(10)
    if not mixed and order < float("inf"):  # torch fails where a rank holds no rows
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1, order).full_tensor()
        torch.testing.assert_close(found, torch.full_like(found, 1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("order", "mixed"), [(2.0, False), (float("inf"), False), (1.0, True), (float("inf"), True)])
def test_clipping_is_that_of_one_process(four_ranks: Ranks, order: float, mixed: bool) -> None:
    four_ranks.run(clipping, 4, order, mixed)


def sgd_parity(rank: int, choice: dict[str, Any]) -> None:
    models = [seeded(Uneven) for _ in range(2)]
    for model in models:
        nested(model, init_device_mesh("cpu", (2,)))
    numbers = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | choice
    ours = KFACOptimizer(models[0], **numbers, skip_layers=("*",))
    theirs = torch.optim.SGD(models[1].parameters(), **numbers)
    case = Case()
    for step in range(STEPS):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            once(model, case.batches(rank, step))
            optimizer.step()
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(local(left), local(right))
        buffers = ours.state[left]["momentum_buffer"], theirs.state[right]["momentum_buffer"]
        assert torch.equal(*map(local, buffers))


@pytest.mark.parametrize("choice", [{}, {"nesterov": True, "foreach": True}], ids=str)
def test_with_all_layers_skipped_it_is_torch_sgd(two_ranks: Ranks, choice: dict[str, Any]) -> None:
    two_ranks.run(sgd_parity, choice)


def of_own(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    model = seeded(case.net)
    case.shard(model, init_device_mesh(torch.get_default_device().type, (ranks,)))
    optimizer = case.build(model, distributed=DistributedConfig(Replicated(statistics=Statistics.OWN)))
    for step in range(STEPS):
        optimizer.zero_grad()
        once(model, case.batches(rank, step))
        optimizer.step()
    owners = {layer.name: layer.workers.start for layer in optimizer.plan().layers}
    return {name: whole(param.detach()) for name, param in model.named_parameters()}, owners


def test_statistics_of_ones_own(two_ranks: Ranks) -> None:
    """Each layer goes as on one process that takes its factors from the owner's examples."""
    case = Case({"kl_clip": None, "lr": 0.005})
    found, owners = two_ranks.run(of_own, 2, case)[0]
    assert set(owners.values()) == {0, 1}
    models = [seeded(case.net) for _ in range(2)]
    optimizers = [case.build(model) for model in models]
    for step in range(STEPS):
        of_ranks = [torch.cat(list(case.batches(rank, step))) for rank in range(2)]
        for model, optimizer, x in zip(models, optimizers, of_ranks, strict=True):
            optimizer.zero_grad()
            loss(model, x).backward()
        for grads in zip(*([p.grad for p in model.parameters()] for model in models), strict=True):
            mean = torch.stack(grads).mean(0)
            for grad in grads:
                grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for (name, left), right in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                source = (left, right)[owners.get(name.rpartition(".")[0], 0)]
                kept = source.clone()
                left.copy_(kept)
                right.copy_(kept)
    for name, param in models[0].named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def of_skipped_step(rank: int, ranks: int, where: str, choice: dict[str, Any]) -> dict[str, Tensor]:
    case = Case(choice)
    model = seeded(case.net)
    nested(model, init_device_mesh(torch.get_default_device().type, (ranks,)))
    optimizer = case.build(model)
    for step in range(6):
        optimizer.zero_grad()
        micro = case.batches(rank, step)
        if step == 3 and where == "example" and rank == 1:
            micro[0][0] = torch.nan
        once(model, micro)
        if step == 3 and where == "row" and rank == 1:
            local(model.first.weight.grad)[0] = torch.inf
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


@pytest.mark.parametrize(("where", "choice"), [("example", {}), ("row", {}), ("row", SELECTED)], ids=str)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    two_ranks: Ranks, where: str, choice: dict[str, Any]
) -> None:
    case = Case(choice)
    model = seeded(case.net)
    optimizer = case.build(model)
    for step in range(6):
        if step != 3:
            optimizer.zero_grad()
            once(model, [torch.cat([*case.batches(0, step), *case.batches(1, step)])])
        else:
            for param in model.parameters():
                param.grad.fill_(torch.nan)
        optimizer.step()
    for found in two_ranks.run(of_skipped_step, 2, where, choice):
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def of_unused(rank: int, shard: str, used: Sequence[Sequence[int]], choice: dict[str, Any]) -> dict[str, Tensor]:
    """In each step `Skipping` runs its layer on these ranks."""
    case = Case(choice, net=Skipping)
    model = seeded(case.net)
    SHARDS[shard](model, init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(all(used))  # else torch has no gradients to bring together
    optimizer = case.build(model)
    for step, ranks in enumerate(used):
        optimizer.zero_grad()
        loss(model, marked(case.batches(rank, step)[0], rank in ranks)).backward()
        optimizer.step()
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def marked(x: Tensor, uses: bool) -> Tensor:
    x[0, 0] = 1 if uses else -1
    return x


UNUSED = {
    "on one rank": [(0,)] * 4,
    "on another": [(0, 1), (0, 1), (1,), (1,), (0,), (0, 1)],
    "on all": [(), (), (0, 1), (), (0, 1)],
}


# Modules that are gathered for themselves have to run on all ranks, says torch.
@pytest.mark.parametrize(
    ("used", "shard", "choice"),
    [
        *((used, "root_only", {}) for used in UNUSED),
        ("on all", "nested", {}),
        ("on another", "root_only", SELECTED),
        ("on all", "nested", SELECTED),
    ],
    ids=str,
)
def test_a_layer_that_is_not_used(two_ranks: Ranks, used: str, shard: str, choice: dict[str, Any]) -> None:
    case = Case(choice, net=Skipping)
    model = seeded(case.net)
    optimizer = case.build(model)
    for step, ranks in enumerate(UNUSED[used]):
        optimizer.zero_grad()
        for rank in range(2):
            (loss(model, marked(case.batches(rank, step)[0], rank in ranks)) / 2).backward()
        optimizer.step()
    for found in two_ranks.run(of_unused, shard, UNUSED[used], choice, timeout=20):
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=TOLERANCE, atol=TOLERANCE)


# -- bytes, and what is refused ----------------------------------------------------------------------------------------


def bytes_of_steps(rank: int, ranks: int, case: Case) -> tuple[list[float], Any]:
    """What is handed to `torch.distributed` within the steps of one period, once the averages are old; and the plan."""
    model = seeded(case.net)
    case.shard(model, init_device_mesh(torch.get_default_device().type, (ranks,)))
    config = DistributedConfig(Replicated(placement=case.placement), bucket_bytes=300)
    optimizer = case.build(model, distributed=config)
    sent: list[float] = []
    for step in range(6):
        if step == 3:
            for block in optimizer._binding.coverage.blocks:
                block.clock.folds = block.clock.folds_at_refresh = 10**6
        optimizer.zero_grad()
        once(model, case.batches(rank, step))
        with counted_bytes() as counted:
            optimizer.step()
        sent += counted if step >= 3 else []
    return sent, optimizer.plan()


@pytest.mark.parametrize(("net", "placement"), [(Uneven, LAYERS), (Uneven, FACTORS), (Even, LAYERS)])
def test_bytes_are_those_of_the_plan(two_ranks: Ranks, net: Callable[[], nn.Module], placement: Placement) -> None:
    answers = two_ranks.run(bytes_of_steps, 2, Case(net=net, placement=placement))
    plan = answers[0][1]
    assert plan.options.inverse_update_period == 3
    assert sum(sum(sent) for sent, _ in answers) == 3 * plan.bytes_per_step
    rows = {each.payload: each.words for each in plan.traffic if each.payload in (Payload.ROWS, Payload.DIRECTIONS)}
    if net is Even:  # n (P - 1) / P words each way
        assert set(rows.values()) == {(8 * 5 + 4 * 9) // 2}


def refused(rank: int, ranks: int, what: str) -> str:
    """What is raised, and by when; parameters are looked at in between."""
    model, mesh = seeded(Uneven), init_device_mesh(torch.get_default_device().type, (ranks,))
    build: Callable[..., KFACOptimizer] = partial(KFACOptimizer, model, lr=0.1)
    loss_named = {"estimate": MonteCarlo(nn.MSELoss())}
    late = what.startswith("before")
    if what == "partly":
        fully_shard(model.first, mesh=mesh)
    elif not late and what != "not sharded":
        nested(model, mesh)
    choices: dict[str, dict[str, Any]] = {
        "quadratic": {"step_size": QuadraticModel(), **loss_named},
        "levenberg": {"adapt_damping": LevenbergMarquardt(), **loss_named},
        "fused": {"fused": True},
        "alone": {"distributed": False},
        "not sharded": {"distributed": DistributedConfig(FullySharded())},
    }
    if what == "names":
        build = partial(KFACOptimizer, list(model.named_parameters()), model=model, fused=True)
    try:
        optimizer = build(**choices.get(what, {}))
    except (NotImplementedError, RuntimeError) as error:
        return f"built: {error}"
    if late:
        (nested if what == "before" else root_of_first)(model, mesh)
    if what == "factors":
        model.first.set_gradient_divide_factor(1.0)
    if what == "fused later":
        optimizer.param_groups[0]["fused"] = True
    before = [whole(param.detach()) for param in model.parameters()]
    once(model, Case().batches(rank, 0))
    grads = [None if param.grad is None else whole(param.grad) for param in model.parameters()]
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        optimizer.step()
    for param, value, grad in zip(model.parameters(), before, grads, strict=True):
        assert torch.equal(whole(param.detach()), value)
        assert grad is None or torch.equal(whole(param.grad), grad)
    assert optimizer.metrics()["blocks_without_statistics"] == optimizer.metrics()["blocks"]
    return f"step: {caught.value}"


def root_of_first(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model.first, mesh=mesh)


REFUSED = {
    "quadratic": r"built: kfac_optim: QuadraticModel\(\) needs whole parameters.* of param group 0.*TrustRegion\(\)",
    "levenberg": r"built: kfac_optim: LevenbergMarquardt\(.*\) needs whole parameters.*TrustRegion\(\)",
    "fused": r"built: kfac_optim: torch's fused SGD needs whole parameters.*Leave fused at None",
    "names": r"built: kfac_optim: torch's fused SGD needs whole parameters, and 'slope' of param group 0",
    "fused later": r"step: kfac_optim: torch's fused SGD needs whole parameters",
    "partly": r"built: kfac_optim: the parameters of 'norm'.* are not sharded.*skip_layers",
    "alone": r"step: kfac_optim: the parameters of 'first' are sharded, and no process alone.*DistributedConfig",
    "not sharded": r"built: kfac_optim: FullySharded\(\) is for parameters that fully_shard has sharded",
    "factors": r"step: kfac_optim: fully_shard divides the gradients of 'first' by 1 and those of 'norm' by 2, .* Call "
    "set_gradient_divide_factor with one number on all",
    "before": r"step: kfac_optim: the optimizer was built before fully_shard .*'first.weight'.*Build the optimizer",
    "before a part": r"step: kfac_optim: the optimizer was built before fully_shard .*'first.weight'",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_had_is_refused(two_ranks: Ranks, what: str) -> None:
    for told in two_ranks.run(refused, 2, what, timeout=20):
        assert re.match(REFUSED[what], told), told


def of_list(rank: int) -> None:
    """The optimizer does not know the model, and cannot know that it has other parameters now."""
    model = seeded(Uneven)
    optimizer = KFACOptimizer(list(model.parameters()))
    nested(model, init_device_mesh("cpu", (2,)))
    once(model, Case().batches(rank, 0))
    with pytest.warns(UserWarning, match="no parameter has a gradient.*fully_shard"):
        optimizer.step()


def test_parameters_that_were_replaced_out_of_sight_are_warned_of(two_ranks: Ranks) -> None:
    two_ranks.run(of_list)


def beside_shards(rank: int) -> str:
    """Nobody averages the gradients of what fully_shard has not wrapped."""
    model = seeded(Uneven)
    root_of_first(model, init_device_mesh("cpu", (2,)))
    names = [name for name, _ in model.named_children() if name != "first"]
    optimizer = KFACOptimizer(model, lr=0.1, skip_layers=names)
    once(model, Case().batches(rank, 0))
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_whole_parameters_beside_shards_do_not_drift_apart_unsaid(two_ranks: Ranks) -> None:
    for message in two_ranks.run(beside_shards):
        assert re.match(r"kfac_optim: the gradients of .*'norm\.weight'.* differ from rank to rank", message), message
        assert "Sharded()" not in message


def test_on_one_rank_alone(one_rank: Ranks) -> None:
    check(one_rank, Case())


class LateValue(nn.Module):
    """A head of one row, which a rank of two does not hold, is used from the sixth step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.main, self.value = (nn.Linear(4, n, dtype=torch.float64) for n in (4, 2, 1))

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.main(h)
        return out + self.value(h) if step >= 5 else out


def with_a_late_value(rank: int | None, choice: dict[str, Any]) -> list[Tensor]:
    model = LateValue()
    if rank is not None:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
    numbers = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "factor_update_period": 10, "inverse_update_period": 10}
    optimizer = KFACOptimizer(model, **numbers, **choice)
    for step in range(9):
        whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        (model(whole if rank is None else whole.chunk(2)[rank], step) - 1).square().sum(1).mean().backward()
        optimizer.step()
    return [
        (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone() for param in model.parameters()
    ]


@pytest.mark.parametrize("choice", [{}, {"step_size": SelectedUpdates()}], ids=str)
def test_a_layer_of_fewer_rows_than_ranks_may_begin_late(two_ranks: Ranks, choice: dict[str, Any]) -> None:
    expected = with_a_late_value(None, choice)
    for found in two_ranks.run(with_a_late_value, choice):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=1e-14)


def rows_of_another(rank: int, path: str) -> str:
    model = seeded(Even)
    nested(model, init_device_mesh("cpu", (2,)))
    optimizers = [Case(net=Even).build(model) for _ in range(2)]
    once(model, Case().batches(rank, 0))
    optimizers[0].step()
    optimizers[0].consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(optimizers[0].state_dict(), path)
    dist.barrier()
    optimizers[0].remove_hooks()
    optimizers[1].load_state_dict(torch.load(path, weights_only=False))
    once(model, Case().batches(rank, 1))
    with pytest.raises(RuntimeError) as caught:
        optimizers[1].step()
    return str(caught.value)


def test_momentum_that_one_rank_has_saved_alone_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for told in two_ranks.run(rows_of_another, str(tmp_path / "optimizer.pt")):
        assert re.match(r"kfac_optim: all ranks have loaded the same rows .*full_state_dict=True", told), told


def copied_and_saved(_: int, momentum: float) -> list[bool]:
    """Whether what the optimizer keeps of each parameter is the same in a copy and in a file, and holds no more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = KFACOptimizer(model, lr=0.1, momentum=momentum)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum(1).mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    kept = [each["momentum_buffer"] for each in state["state"].values() if "momentum_buffer" in each]
    again = [
        [each["momentum_buffer"] for each in other["state"].values() if "momentum_buffer" in each]
        for other in (copy.deepcopy(state), torch.load(file, weights_only=False))
    ]
    assert len(kept) == 4
    return [
        local(one).untyped_storage().nbytes() == local(one).nbytes and torch.equal(local(one), local(other))
        for others in again
        for one, other in zip(kept, others, strict=True)
    ]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_can_be_copied_and_saved(two_ranks: Ranks, momentum: float) -> None:
    assert all(all(each) for each in two_ranks.run(copied_and_saved, momentum))
