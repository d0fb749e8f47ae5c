"""Training on a CUDA device goes where training on the CPU goes, in float64, and works in the precisions of a GPU."""

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import waits
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    Background,
    ExactGGN,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    LowRank,
    NewtonSchulz,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    Staggered,
    Subsample,
)
from kfac_optim.factors.second_moments import channel_moments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

STEPS = 10
# These draw numbers, by another generator on each device, or round to bfloat16.
DRAWN = ("LowRank", "sketches", "NewtonSchulz", "subsample", "MonteCarlo", "CurvaturePropagation")
# Few examples leave it free how eigenvectors span a null space, and what EKFAC measures along them.
MANY = waits.Case(waits.layers, lambda: torch.randn(64, 4), {"inverse": EKFAC()})
CRITERION = nn.CrossEntropyLoss()
WHOLE = {"momentum": 0.0, "weight_decay": 0.0}  # the loss alone is looked at
CASES = {name: case for name, case in waits.CASES.items() if name not in DRAWN} | {
    "EKFAC": MANY,
    "Newton-Schulz in float64": waits.Case(waits.convolutions, waits.images, {"inverse": NewtonSchulz()}),
    "sample space": waits.Case(
        waits.layers, waits.rows, {"inverse": SampleSpace(), "estimate": ExactGGN(CRITERION), **WHOLE}
    ),
    "exact": waits.Case(waits.Tokens, waits.tokens, {"estimate": ExactGGN(CRITERION)}),
    "quadratic model": waits.Case(
        waits.layers, waits.rows, {"estimate": ExactGGN(CRITERION), "step_size": QuadraticModel(), **WHOLE}
    ),
    "damping that adapts": waits.Case(
        waits.layers, waits.rows, {"estimate": ExactGGN(CRITERION), "adapt_damping": LevenbergMarquardt(), **WHOLE}
    ),
    "line search": waits.Case(waits.layers, waits.rows, {"step_size": LineSearch(), "lr": 1.0, **WHOLE}),
    "selected updates of convolutions": waits.Case(
        waits.convolutions, waits.images, {"step_size": SelectedUpdates(), "inverse": None}
    ),
    "staggered": waits.Case(waits.convolutions, waits.images, {"refresh": Staggered()}),
    "background": waits.Case(
        waits.convolutions, waits.images, {"refresh": Background(max_staleness=2, deterministic=True)}
    ),
    "averages": waits.Case(waits.layers, waits.rows, {"average": IterateAverage()}),
}
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "damping": 0.03,
    "factor_update_period": 2,
    "inverse_update_period": 4,
    "fused": True,
}


def problem(case: waits.Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, batch = case.model().double(), case.batch()
    return model, batch.double() if batch.is_floating_point() else batch, torch.randint(waits.CLASSES, (len(batch),))


def train(model: nn.Module, optimizer: KFACOptimizer, batch: Tensor, targets: Tensor, steps: int = STEPS) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = CRITERION(model(batch), targets)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def assert_same(found: nn.Module, expected: nn.Module, rtol: float) -> None:
    others = dict(expected.named_parameters())
    for name, param in found.named_parameters():
        other = others[name].detach()
        close = torch.testing.assert_close
        close(
            param.detach().cpu(),
            other.cpu(),
            rtol=rtol,
            atol=rtol * float(other.abs().max()),
            msg=lambda m, at=name: f"{at}: {m}",
        )


@pytest.mark.parametrize("name", CASES)
def test_training_goes_where_it_goes_on_the_cpu(name: str) -> None:
    model, batch, targets = problem(CASES[name])
    there = copy.deepcopy(model).cuda()
    options = OPTIONS | dict(CASES[name].options)
    train(model, KFACOptimizer(model, **options), batch, targets)
    train(there, KFACOptimizer(there, **options), batch.cuda(), targets.cuda())
    assert_same(there, model, 1e-7)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["convolutions", "selected", "exact", "damping that adapts", "background", "averages"])
def test_the_default_device_changes_nothing(name: str, device: str) -> None:
    model, batch, targets = problem(CASES[name])
    model, batch, targets = model.to(device), batch.to(device), targets.to(device)
    beside = copy.deepcopy(model)
    options = OPTIONS | dict(CASES[name].options)
    train(beside, KFACOptimizer(beside, **options), batch, targets)
    with torch.device("cuda"):
        train(model, KFACOptimizer(model, **options), batch, targets)
    assert_same(model, beside, 1e-7)


@pytest.mark.parametrize("options", [{}, {"step_size": SelectedUpdates(), "inverse": None}])
def test_a_model_may_leave_the_device_while_a_refresh_is_under_way(options: dict[str, Any]) -> None:
    model, batch, targets = problem(waits.CASES["convolutions"])
    model, batch, targets = model.cuda(), batch.cuda(), targets.cuda()
    optimizer = KFACOptimizer(model, **OPTIONS, refresh=Background(), average=IterateAverage(), **options)
    first = CRITERION(model(batch), targets).item()
    train(model, optimizer, batch, targets, 5)  # the last step begins a refresh
    train(model.cpu(), optimizer, batch.cpu(), targets.cpu(), 10)
    train(model.cuda(), optimizer, batch, targets, 5)
    assert CRITERION(model(batch), targets).item() < first
    optimizer.eval()
    assert CRITERION(model(batch), targets).item() < first
    assert all(param.is_cuda for param in model.parameters())


@pytest.mark.parametrize("name", ["convolutions", "selected", "Eigen", "EKFAC"])
def test_a_run_that_moves_to_the_other_device_by_its_checkpoint_goes_on_as_it_would(name: str) -> None:
    model, batch, targets = problem(CASES[name])
    there = copy.deepcopy(model).cuda()
    ours, theirs = (KFACOptimizer(each, **(OPTIONS | dict(CASES[name].options))) for each in (model, there))
    train(there, theirs, batch.cuda(), targets.cuda(), 5)
    saved = io.BytesIO()
    torch.save((there.state_dict(), theirs.state_dict()), saved)
    saved.seek(0)
    weights, state = torch.load(saved, map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    ours.load_state_dict(state)
    train(there, theirs, batch.cuda(), targets.cuda(), 5)
    train(model, ours, batch, targets, 5)
    assert_same(there, model, 1e-7)


@pytest.mark.filterwarnings("ignore")  # what compilers import warns
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["linear and norm", "convolutions", "selected"])
def test_compiled_models_train_as_others(name: str, mode: str) -> None:
    model, batch, targets = problem(CASES[name])
    model, batch, targets = model.cuda(), batch.cuda(), targets.cuda()
    compiled = copy.deepcopy(model)
    options = OPTIONS | dict(CASES[name].options)
    train(model, KFACOptimizer(model, **options), batch, targets)
    optimizer = KFACOptimizer(compiled, **options)
    compiled.compile(mode=mode)
    train(compiled, optimizer, batch, targets)
    assert_same(compiled, model, 1e-7)


PRECISIONS: dict[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "bfloat16": (torch.bfloat16, {}),
    "float16, scaled": (torch.float16, {}),
    "bfloat16, selected": (torch.bfloat16, {"step_size": SelectedUpdates(), "inverse": None}),
    "float16, exact": (torch.float16, {"estimate": ExactGGN(CRITERION)}),
    "bfloat16, inverses in bfloat16": (torch.bfloat16, {"inverse": NewtonSchulz(dtype=torch.bfloat16)}),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_autocast_trains_channels_last(name: str) -> None:
    torch.manual_seed(0)
    dtype, options = PRECISIONS[name]
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)),
    ).cuda()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(64, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    targets = images.mean(dim=(2, 3)).argmax(1)
    optimizer = KFACOptimizer(model, lr=0.05, momentum=0.9, fused=True, inverse_update_period=5, **options)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = CRITERION(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.metrics()["failed_refreshes"] == 0


@pytest.mark.parametrize("options", [{}, {"inverse": LowRank(1, sketch=2)}, {"subsample": Subsample(5)}])
def test_statistics_of_layers_with_padding_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    batch, real = torch.randn(8, 2, 6).double(), (torch.rand(8, 4) < 0.6).unsqueeze(-1)
    held = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(layers).to(device)
        optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            (model(batch.to(device)) * real.to(device)).square().mean().backward()
            optimizer.step()
        held.append([[tensor.cpu() for tensor in pair if tensor is not None] for pair in optimizer.factors().values()])
    torch.testing.assert_close(held[1], held[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_of_channels_are_those_of_the_cpu(dtype: torch.dtype, layout: torch.memory_format) -> None:
    maps = (3 + torch.randn(6, 5, 4, 7)).to(dtype).to(memory_format=layout)
    found = channel_moments(maps.cuda(), torch.float32)
    for ours, theirs in zip(found, channel_moments(maps.double(), torch.float64), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-6)
