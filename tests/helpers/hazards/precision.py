"""Mixed precision on the CPU: autocast wherever the user puts it, loss scaling, narrow models."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from helpers.hazards.base import STEPS, ByHand, Pair, Training, by_hand, hazard, plain_run
from helpers.plain import batch, mlp, square_loss
from kfac_optim import Eigen

F32 = torch.float32


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


# -- autocast ----------------------------------------------------------------------------------------------------


def _under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        output = model(x)
    return square_loss(output.float())


@hazard("precision", "forward", "forward and backward", "forward, backward and step", "step", rtol=1e-4)
def autocast_around(what: str) -> Pair:
    """Our products are float32 wherever autocast ends: bfloat16 ones would be off by about 1e-2."""
    run = Training(mlp(dtype=F32))
    for i in range(STEPS):
        run.optimizer.zero_grad()
        with autocast() if "forward" in what else nullcontext():
            loss = square_loss(run.model(batch(100 + i, dtype=F32)).float())
        with autocast() if "backward" in what else nullcontext():
            loss.backward()
        with autocast() if "step" in what else nullcontext():
            run.step()
    plain = ByHand(mlp(dtype=F32))
    for i in range(STEPS):
        x = batch(100 + i, dtype=F32)
        plain.backward(_under_autocast(plain.model, x) if "forward" in what else square_loss(plain.model(x)), terms=8)
        plain.step()
    return run.result(), plain.result()


@hazard("precision", "backward", "backward and step", rtol=0)
def autocast_beyond_the_forward_changes_no_bit(what: str) -> Pair:
    sides = []
    for inside in (True, False):
        run = Training(mlp(dtype=F32))
        for i in range(STEPS):
            run.optimizer.zero_grad()
            loss = _under_autocast(run.model, batch(100 + i, dtype=F32))
            with autocast() if inside else nullcontext():
                loss.backward()
            with autocast() if inside and "step" in what else nullcontext():
                run.step()
        sides.append(run.result())
    return sides[0], sides[1]


@hazard("precision", "several backwards", "accumulation", rtol=1e-4)
def autocast_around_everything_with(what: str) -> Pair:
    run, plain = Training(mlp(dtype=F32)), ByHand(mlp(dtype=F32))
    for i in range(STEPS):
        x = batch(100 + i, dtype=F32)
        run.optimizer.zero_grad()
        with autocast():
            if what == "accumulation":
                for part in x.split(4):
                    (run.model(part).float().square().sum() / 16).backward()
            else:
                loss = square_loss(run.model(x).float())
                (0.5 * loss).backward(retain_graph=True)
                (0.5 * loss).backward()
            run.step()
        for part in x.split(4 if what == "accumulation" else 8):  # weight gradients are rounded to bfloat16 in each
            plain.backward(_under_autocast(plain.model, part) * len(part) / 8, terms=len(part))
        plain.step()
    return run.result(), plain.result()


# -- loss scaling ------------------------------------------------------------------------------------------------


def _scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, **options)


def _scaled_step(run: Training, scaler: GradScaler) -> None:
    scaler.step(run.optimizer)
    scaler.update()
    run.check()


@hazard("precision", "constant", "growing", "named", "disabled", rtol=0)
def loss_scaled_by_a_power_of_two(kind: str) -> Pair:
    scaler = _scaler(growth_interval=1 if kind == "growing" else 2000, enabled=kind != "disabled")
    run = Training(mlp(), grad_scaler=scaler if kind == "named" else None)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
        _scaled_step(run, scaler)
    return run.result(), plain_run()


@hazard("precision", rtol=1e-6)
def loss_scaled_by_another_number() -> Pair:
    """Torch itself keeps the inverse of the scale in float32."""
    run, scaler = Training(mlp()), GradScaler("cpu", init_scale=1000.0)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
        _scaled_step(run, scaler)
    return run.result(), by_hand()


@hazard("precision", (4, 4), (5, 3))
def accumulation_under_a_scaler(sizes: tuple[int, ...]) -> Pair:
    run, scaler = Training(mlp()), _scaler(growth_interval=1)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        for part in batch(100 + i).split(sizes):
            scaler.scale(run.model(part).square().sum() / 16).backward()
        _scaled_step(run, scaler)
    return run.result(), by_hand()


def clip(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.05)


@hazard("precision", "unscale_", "unscale_ and accumulation", "unscale_ by a named scaler")
def clipping_under_a_scaler_after(kind: str) -> Pair:
    scaler = _scaler(growth_interval=1)
    run = Training(mlp(), grad_scaler=scaler if "named" in kind else None)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        for part in batch(100 + i).split(3 if "accumulation" in kind else 8):
            scaler.scale(run.model(part).square().sum() / 16).backward()
        scaler.unscale_(run.optimizer)
        clip(list(run.model.parameters()))
        _scaled_step(run, scaler)
    return run.result(), by_hand(edit=clip)


def in_a_gradient(run: Training, scaler: GradScaler) -> None:
    scaler.scale(square_loss(run.model(batch(7)))).backward()
    run.model[2].weight.grad[1, 2] = float("inf")


def in_the_loss(run: Training, scaler: GradScaler) -> None:
    scaler.scale(square_loss(run.model(batch(7))) * float("inf")).backward()


def in_one_micro_batch(run: Training, scaler: GradScaler) -> None:
    for part in (batch(7), batch(8) * float("nan"), batch(9)):
        scaler.scale(square_loss(run.model(part)) / 3).backward()


@hazard("precision", *[(where, at) for where in (in_a_gradient, in_the_loss, in_one_micro_batch) for at in (0, 2)])
def overflow_under_a_scaler(variant: tuple[Callable[[Training, GradScaler], None], int]) -> Pair:
    """Parameters, factors and periods are as if the step had not been; the scale that is then halved goes along."""
    overflow, at = variant
    run, scaler = Training(mlp(), factor_update_period=2), _scaler()
    for i in range(STEPS):
        if i == at:
            run.optimizer.zero_grad()
            overflow(run, scaler)
            scaler.step(run.optimizer)
            scaler.update()
        run.optimizer.zero_grad()
        scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
        _scaled_step(run, scaler)
    return (run.result(), scaler.get_scale()), (plain_run(factor_update_period=2), 2.0**9)


@hazard("precision")
def overflow_after_unscale() -> Pair:
    scaler = _scaler()
    run = Training(mlp(), grad_scaler=scaler)
    for i in range(STEPS):
        for bad in (True, False):
            run.optimizer.zero_grad()
            loss = square_loss(run.model(batch(100 + i)))
            scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
    return run.result(), by_hand()


@hazard("precision")
def one_scaler_for_two_optimizers_of_which_one_overflows() -> Pair:
    runs, scaler = [Training(mlp(seed)) for seed in (0, 1)], _scaler()
    for i in range(STEPS):
        for which, run in enumerate(runs):
            run.optimizer.zero_grad()
            scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
            if which == 1 and i == 2:
                run.model[0].bias.grad[0] = float("nan")
        for run in runs:
            scaler.step(run.optimizer)
        scaler.update()
    ours = runs[0].result(), runs[1].result()
    return ours, (by_hand(mlp(0)), by_hand(mlp(1), batches=[0, 1, 3]))


# -- dtypes of factors -------------------------------------------------------------------------------------------


@hazard("precision", torch.bfloat16, torch.float16, rtol=1e-5)
def factors_of_a_narrow_model(dtype: torch.dtype) -> Pair:
    run, plain = Training(mlp().to(dtype), lr=0.0), ByHand(mlp().to(dtype), lr=0.0)
    x = batch().to(dtype)
    square_loss(run.model(x).float()).backward()
    run.step()
    plain.backward(square_loss(plain.model(x).float()), terms=8)
    return run.optimizer.factors(), plain.fold()


@hazard("precision", "Cholesky", "Eigen", rtol=1e-9)
def float64_models_with_a_damping_below_the_rounding_of_float32(kind: str) -> Pair:
    options = {"damping": 1e-12, "lr": 1e-3, "kl_clip": None}
    if kind == "Cholesky":
        return plain_run(size_64(), **options), by_hand(size_64(), **options)
    run = Training(size_64(), inverse=Eigen(), momentum=0.0, weight_decay=0.0, **options)
    square_loss(run.model(batch())).backward()
    run.step()
    plain = ByHand(size_64())
    plain.backward(square_loss(plain.model(batch())), terms=8)
    moved = []
    plain.fold()
    for layer in plain.layers.values():
        grad = torch.cat([layer.module.weight.grad, layer.module.bias.grad[:, None]], dim=1)
        curvature = torch.kron(layer.factors[1][0], layer.factors[0][0])
        curvature += options["damping"] * torch.eye(len(curvature), dtype=curvature.dtype)
        step = -options["lr"] * torch.linalg.solve(curvature, grad.flatten()).reshape(grad.shape)
        moved += [step[:, :-1], step[:, -1]]
    return run.result()["moved"], moved


def size_64() -> nn.Sequential:
    return mlp(sizes=(4, 3, 2))
