"""Accelerate trains with the optimizer bit for bit as a plain loop does.

Checkpoints of other strategies and inverses on two ranks are in tests/distributed/test_accelerate_checkpoints.py.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.accelerated import accelerate_on
from helpers.plain import assert_same_factors, batch, factors_after, mlp, square_loss
from helpers.ranks import Ranks
from helpers.small_runs import OPTIONS, STEPS, Regression, assert_same_bits, batches, parameters_of, plain_run
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from kfac_optim import IterateAverage, KFACOptimizer, SelectedUpdates

accelerate = pytest.importorskip("accelerate")

CLIP = 1.0
SAVED = 3  # between two refreshes


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget what Accelerate keeps for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)


class Accelerated:
    """A model and an optimizer as `Accelerator.prepare` makes them, and the loop that Accelerate's guide shows."""

    def __init__(self, model_found: bool = False, accumulate: int = 1, choices: Any = None, **options: Any) -> None:
        model = Regression()
        of: Any = model.parameters() if model_found else model
        optimizer = KFACOptimizer(of, **OPTIONS, **(choices or {}))
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        self.plain_optimizer, self.accumulate = optimizer, accumulate
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, start: int = 0, stop: int = STEPS) -> list[Tensor]:
        state = self.accelerator.state
        data = batches(rank=state.process_index, ranks=state.num_processes)
        for each in islice(data, start * self.accumulate, stop * self.accumulate):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**each)["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return parameters_of(self.model)


def in_a_plain_loop(choices: Any = None, **options: Any) -> list[Tensor]:
    model = Regression()
    optimizer = KFACOptimizer(model, **OPTIONS, **(choices or {}))
    plain_run(model, optimizer, clip=CLIP, scheduler=CosineAnnealingLR(optimizer, STEPS), **options)
    return parameters_of(model)


# -- one process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_found", [False, True], ids=["of the model", "of its parameters"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_a_plain_loop(accumulate: int, model_found: bool) -> None:
    """`prepare` saves the new optimizer and loads it again, before a forward has shown it the model."""
    assert_same_bits(Accelerated(model_found, accumulate).train(), in_a_plain_loop(accumulate=accumulate))


def test_bfloat16_is_that_of_a_plain_loop() -> None:
    assert_same_bits(Accelerated(mixed_precision="bf16").train(), in_a_plain_loop(autocast=torch.bfloat16))


@pytest.mark.parametrize(
    "choices",
    [{}, {"average": IterateAverage()}, {"kl_clip": None, "step_size": SelectedUpdates()}],
    ids=["plain", "averaged", "selected updates"],
)
def test_save_state_and_load_state_resume_to_the_bit(choices: dict[str, Any], tmp_path: Path) -> None:
    run = Accelerated(choices=choices)
    run.train(0, SAVED)
    run.accelerator.save_state(str(tmp_path))
    expected = run.train(SAVED, STEPS)
    resumed = Accelerated(choices=choices)
    resumed.accelerator.load_state(str(tmp_path))
    assert_same_bits(resumed.train(SAVED, STEPS), expected)
    assert_same_bits(expected, in_a_plain_loop(choices=choices))


def test_load_state_goes_back_within_a_run(tmp_path: Path) -> None:
    """The same optimizer takes the same steps again."""
    run = Accelerated()
    run.train(0, SAVED)
    run.accelerator.save_state(str(tmp_path))
    expected = run.train(SAVED, STEPS)
    run.accelerator.load_state(str(tmp_path))
    assert_same_bits(run.train(SAVED, STEPS), expected)


def test_eval_and_train_reach_the_optimizer() -> None:
    run = Accelerated(choices={"average": IterateAverage()})
    trained = run.train()
    run.optimizer.eval()
    averaged = parameters_of(run.model)
    assert any((one != other).any() for one, other in zip(averaged, trained, strict=True))
    run.optimizer.train()
    assert_same_bits(run.model, trained)


def test_the_scaler_of_accelerate_is_found_behind_its_own_step() -> None:
    """`AcceleratedOptimizer` puts a method in the place of `step`, to see whether the scaler has called it."""
    accelerate.Accelerator(cpu=True)
    model = mlp()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    accelerated = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    scaler.scale(square_loss(model(batch()))).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    accelerated.step()
    assert not accelerated.step_was_skipped
    plain = factors_after(mlp(), lambda twin: square_loss(twin(batch())).backward())
    assert_same_factors(optimizer.factors(), plain, rtol=1e-10)
    scaler.scale(square_loss(model(batch())) * torch.inf).backward()
    accelerated.step()
    assert accelerated.step_was_skipped


# -- two processes -----------------------------------------------------------------------------------------------


def accelerated_on(rank: int, accumulate: int) -> list[Tensor]:
    with accelerate_on(rank):
        return Accelerated(accumulate=accumulate).train()


def in_a_plain_loop_on(rank: int, accumulate: int) -> list[Tensor]:
    """Accelerate takes a step of the schedule for each process."""
    model, ranks = Regression(), dist.get_world_size()
    optimizer = KFACOptimizer(model, **OPTIONS)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    plain_run(
        DistributedDataParallel(model),
        optimizer,
        batches(rank=rank, ranks=ranks),
        clip=CLIP,
        accumulate=accumulate,
        after=lambda: [scheduler.step() for _ in range(ranks)],
    )
    return parameters_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_as_a_plain_loop_does(accumulate: int, two_ranks: Ranks) -> None:
    runs = two_ranks.run(accelerated_on, accumulate), two_ranks.run(in_a_plain_loop_on, accumulate)
    for found, plain in zip(*runs, strict=True):
        assert_same_bits(found, plain)


def resumed_on(rank: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    with accelerate_on(rank):
        run = Accelerated()
        run.accelerator.register_save_state_pre_hook(lambda *_: run.plain_optimizer.consolidate_state_dict())
        run.train(0, SAVED)
        run.accelerator.save_state(folder)
        run.accelerator.wait_for_everyone()
        expected = run.train(SAVED, STEPS)
    with accelerate_on(rank):
        other = Accelerated()
        other.accelerator.load_state(folder)
        return other.train(SAVED, STEPS), expected


@pytest.mark.slow
def test_two_processes_resume_to_the_bit_where_a_hook_makes_checkpoints_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    for found, expected in two_ranks.run(resumed_on, str(tmp_path)):
        assert_same_bits(found, expected)
