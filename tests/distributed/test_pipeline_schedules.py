"""The schedules of `torch.distributed.pipelining` divide gradients after backward; statistics stay as they are."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import TIMEOUT
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from kfac_optim import AdaptiveTrustRegion, KFACOptimizer, LineSearch, LossTerms, MonteCarlo, TrustRegion
from kfac_optim.distributed import DistributedConfig
from kfac_optim.step.step_size import StepSize

EXAMPLES, STEPS = 8, 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1, "kl_clip": None}
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(EXAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def of_stages(step_size: StepSize, distributed: Any) -> dict[str, Any]:
    return {**OPTIONS, "kl_clip": 1e-3, "nesterov": True, "step_size": step_size, "distributed": distributed}


def stages_on_rank(_: int, replicas: int, step_size: StepSize, upset: int) -> list[Tensor]:
    """Train one stage of a pipeline, beside `replicas` of them, under one trust region; return its parameters."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("data", "stages"))
    number, replica = mesh.get_local_rank("stages"), mesh.get_local_rank("data")
    part = net()[:2] if number == 0 else net()[2:]
    groups = {"group": mesh.get_group("data"), "pipeline": mesh.get_group("stages")}
    optimizer = KFACOptimizer(part, **of_stages(step_size, DistributedConfig(**groups)))
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    # Several replicas cannot tell a division after backward from the mean over them.
    pipeline = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: loss(output, target) / 2, scale_grads=False)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        x, y = (each.chunk(replicas)[replica] for each in batch(step))
        if number == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)
        for param in part.parameters():
            dist.all_reduce(param.grad, group=mesh.get_group("data"))
            param.grad /= replicas
        if step == upset and number == 0:
            part[0].bias.grad[0] = float("nan")
        optimizer.step()
    return [param.detach() for param in part.parameters()]


def whole(step_size: StepSize, upset: int) -> list[Tensor]:
    model = net()
    optimizer = KFACOptimizer(model, **of_stages(step_size, None))
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss(model(x), y).backward()
        if step == upset:
            model[0].bias.grad[0] = float("nan")
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def on_rank(rank: int, schedule: str, micro_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train one stage, as long as the whole model is trained by `alone`, and give its parameters and its factors."""
    part = net()[:2] if rank == 0 else net()[2:]
    optimizer = KFACOptimizer(part, **OPTIONS, distributed=False)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, micro_batches, loss_fn=loss)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)
        optimizer.step()
    factors = [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]
    return [param.detach() for param in part.parameters()], factors


def alone() -> tuple[list[Tensor], list[Tensor]]:
    model = net()
    optimizer = KFACOptimizer(model, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss(model(x), y).backward()
        optimizer.step()
    factors = [factor for pair in optimizer.factors().values() for factor in pair if factor is not None]
    return [param.detach() for param in model.parameters()], factors


@pytest.mark.parametrize(("schedule", "micro_batches"), [("GPipe", 4), ("1F1B", 2)])
def test_scaled_gradients_leave_statistics_as_they_are(two_ranks: Ranks, schedule: str, micro_batches: int) -> None:
    answers = two_ranks.run(on_rank, schedule, micro_batches)
    for ours, theirs in zip(
        ([each for answer in answers for each in answer[0]], [each for answer in answers for each in answer[1]]),
        alone(),
        strict=True,
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("step_size", [AdaptiveTrustRegion(), TrustRegion()], ids=["adaptive", "fixed"])
def test_one_trust_region_bounds_all_stages(two_ranks: Ranks, step_size: StepSize) -> None:
    ours = [param for answer in two_ranks.run(stages_on_rank, 1, step_size, 3) for param in answer]
    for one, other in zip(ours, whole(step_size, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_two_replicas_of_two_stages_equal_one_process(four_ranks: Ranks) -> None:
    answers = four_ranks.run(stages_on_rank, 2, AdaptiveTrustRegion(), 3)
    for first in (0, 2):
        ours = [param for answer in answers[first : first + 2] for param in answer]
        for one, other in zip(ours, whole(AdaptiveTrustRegion(), 3), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def trained(
    number: int | None,
    options: dict[str, Any],
    decays: Sequence[float] = (1.0, 1.0),
    stated: int | None = None,
    unfrozen: int = 0,
    frozen: Sequence[int] = (),
    max_norm: float | None = None,
) -> list[Tensor]:
    """Train one of two stages, each with a rate that falls in its own way; None trains both, in one process.

    Args:
        number: the number of the stage.
        options: of the optimizer, beside OPTIONS.
        decays: what multiplies the rate of each stage at each step.
        stated: the terms of the loss, which the first stage is not told.
        unfrozen: the step from which on a further layer at the front is trained; 0 is without one.
        frozen: the steps at which the first layer is not trained, without a further one all of the first stage; all
            steps then have the same examples.
        max_norm: what gradients are clipped to from the second step on: the first one shows what the schedule has
            divided them by.
    """
    model = net()
    if unfrozen:
        model.insert(0, nn.Linear(4, 4).double())
    parts = [model[:-1], model[-1:]] if number is None else [(model[:-1], model[-1:])[number]]
    config = None
    if number is not None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
        config = DistributedConfig(group=mesh.get_group("data"), pipeline=mesh.get_group("stages"))
        stage = PipelineStage(parts[0], number, 2, torch.device("cpu"), group=mesh.get_group("stages"))
        pipeline = ScheduleGPipe(stage, 2, loss_fn=loss)
    groups = [{"params": list(part.parameters())} for part in parts]
    whole_model = model if number is None else parts[0]
    optimizer = KFACOptimizer(groups, model=whole_model, **{**OPTIONS, "distributed": config, **options})
    falls = decays if number is None else [decays[number]]
    rates = LambdaLR(optimizer, [lambda step, fall=fall: fall**step for fall in falls])
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        x, y = batch(0 if frozen else step)
        if number != 1:
            parts[0][0].requires_grad_(step >= unfrozen and step not in frozen)
        if stated is not None and number != 0:
            optimizer.set_loss_terms(stated)
        if number is None:
            loss(model(x), y).backward()
        elif number == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)
        if max_norm is not None and step > 0:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        rates.step()
    return [param.detach() for part in parts for param in part.parameters()]


def assert_like_one_process(answers: list[list[Tensor]], *how: Any) -> None:
    ours = [param for answer in answers for param in answer]
    for one, other in zip(ours, trained(None, *how), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_rates_that_fall_differently_leave_one_trust_region_to_all_stages(two_ranks: Ranks) -> None:
    how = {"kl_clip": 1e-3}, (0.8, 1.0)
    assert_like_one_process(two_ranks.run(trained, *how), *how)


@pytest.mark.parametrize(("rule", "stated"), [(LossTerms.ELEMENTS, None), (LossTerms.EXAMPLES, 5)])
def test_the_last_stage_tells_the_others_how_many_terms_the_loss_has(
    two_ranks: Ranks, rule: LossTerms, stated: int | None
) -> None:
    """Its output has three elements an example, the hidden one six; and what masks leave is stated by the targets."""
    how = {"loss_terms": rule}, (1.0, 1.0), stated
    assert_like_one_process(two_ranks.run(trained, *how), *how)


def test_the_last_stage_tells_them_also_at_steps_without_statistics_of_its_own(two_ranks: Ranks) -> None:
    """A layer that is unfrozen gives its first statistics at once."""
    periods = {"factor_update_period": 2 * STEPS, "inverse_update_period": 2 * STEPS}
    how = {"loss_terms": LossTerms.ELEMENTS, **periods}, (1.0, 1.0), None, STEPS
    assert_like_one_process(two_ranks.run(trained, *how), *how)


def test_a_stage_that_is_frozen_meanwhile_keeps_to_the_unit_of_the_loss(two_ranks: Ranks) -> None:
    """The region is small, and the loss falls: so it grows at each step, and with it what multiplies the damping."""
    how = {"kl_clip": 1e-9, "factor_update_period": 2}, (1.0, 1.0), None, 0, (2, 3, 4)
    assert_like_one_process(two_ranks.run(trained, *how), *how)


@pytest.mark.parametrize("max_norm", [0.01, 0.5])
def test_gradients_are_clipped_to_the_norm_over_all_stages(two_ranks: Ranks, max_norm: float) -> None:
    how = {"kl_clip": 1e-3}, (1.0, 1.0), None, 0, (), max_norm
    assert_like_one_process(two_ranks.run(trained, *how), *how)


def sums_of_a_replica(_: int, rule: LossTerms, stated: int | None) -> list[str]:
    """Train one of two stages, beside another replica; return the sums of statistics that the last step has sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    number, trace = mesh.get_local_rank("stages"), list[str]()
    part = DistributedDataParallel(net()[:2] if number == 0 else net()[2:], process_group=mesh.get_group("data"))
    config = DistributedConfig(
        group=mesh.get_group("data"), pipeline=mesh.get_group("stages"), observe=lambda sent: trace.append(sent.name)
    )
    numbers = {**OPTIONS, "inverse_update_period": 1, "loss_terms": rule}
    optimizer = KFACOptimizer(part, **numbers, distributed=config)
    for _ in range(2 * STEPS):
        trace.clear()
        optimizer.zero_grad()
        if stated is not None and number == 1:
            optimizer.set_loss_terms(stated)
        part(torch.randn(EXAMPLES, (4, 6)[number], dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [name for name in trace if "sums" in name]


@pytest.mark.parametrize(("rule", "stated"), [(LossTerms.ELEMENTS, None), (LossTerms.EXAMPLES, 5)])
def test_a_stage_that_is_told_other_terms_than_its_own_sends_its_sums_once(
    four_ranks: Ranks, rule: LossTerms, stated: int | None
) -> None:
    for sums in four_ranks.run(sums_of_a_replica, rule, stated):
        assert sums == ["factor sums 0"]


def below_a_frozen_stage(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
    config = DistributedConfig(group=mesh.get_group("data"), pipeline=mesh.get_group("stages"))
    options = {**OPTIONS, "loss_terms": LossTerms.ELEMENTS, "distributed": config}
    if rank == 1:
        with pytest.warns(UserWarning, match="nothing is preconditioned"):
            KFACOptimizer(net()[2:].requires_grad_(False), **options).step()
        return
    part = net()[:1]
    optimizer = KFACOptimizer(part, **options)
    part(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"has told no number.* taken to be 48, .*Call optimizer.set_loss_terms\(n\)"):
        optimizer.step()


def test_a_last_stage_that_counts_no_terms_is_told_of(two_ranks: Ranks) -> None:
    two_ranks.run(below_a_frozen_stage)


def refused(rank: int) -> list[str]:
    """Return the errors of what one trust region over stages cannot be, and of stages that differ."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
    groups = {"group": mesh.get_group("data"), "pipeline": mesh.get_group("stages")}
    part, found = net()[:1], []
    with pytest.raises(ValueError, match="must name in group") as missing:
        DistributedConfig(pipeline=mesh.get_group("stages"))
    found.append(str(missing.value))
    with pytest.raises(ValueError, match="evaluates the whole model") as whole_model:
        KFACOptimizer(part, distributed=DistributedConfig(**groups), step_size=LineSearch())
    found.append(str(whole_model.value))
    with pytest.raises(ValueError, match="take their hidden outputs for predictions") as named:
        KFACOptimizer(part, distributed=DistributedConfig(**groups), estimate=MonteCarlo(nn.MSELoss()))
    found.append(str(named.value))
    optimizer = KFACOptimizer(part, distributed=DistributedConfig(**groups), kl_clip=1e-3 * (1 + rank))
    part(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match="kl_clip differ") as clips:
        optimizer.step()
    other = KFACOptimizer(
        part,
        distributed=DistributedConfig(**groups, timeout=TIMEOUT),
        step_size=(AdaptiveTrustRegion(), TrustRegion())[rank],
    )
    part(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match="take steps of another kind") as kinds:
        other.step()
    return [*found, str(kinds.value), str(clips.value)]


def test_what_stages_cannot_agree_on_is_refused_by_name(two_ranks: Ranks) -> None:
    for answer in two_ranks.run(refused):
        assert all("this stage has" in each for each in answer[-2:])


def overflow_of_the_first_stage(number: int) -> list[float]:
    """Of the gradient of its first weight alone, under a scaler on each stage; return the scale after each step."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stages"))
    part = (net()[:2] if number == 0 else net()[2:]).float()
    groups = {"group": mesh.get_group("data"), "pipeline": mesh.get_group("stages")}
    optimizer = KFACOptimizer(part, **{**OPTIONS, "distributed": DistributedConfig(**groups, timeout=TIMEOUT)})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(()))  # the first stage has no loss
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("stages"))

    def scaled(output: Tensor, target: Tensor) -> Any:
        return scaler.scale(loss(output, target) / 2)

    pipeline, found = ScheduleGPipe(stage, 2, loss_fn=scaled, scale_grads=False), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (each.float() for each in batch(step))
        if step == 1:
            x[:, 0] = 1e38
            if number == 0:
                part[0].weight.data[:, 0].zero_()
        _ = pipeline.step(x) if number == 0 else pipeline.step(target=y)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_an_overflow_in_one_stage_skips_the_step_in_all(two_ranks: Ranks) -> None:
    for scales in two_ranks.run(overflow_of_the_first_stage):
        assert scales == [64.0, 32.0, 32.0]
