"""Statistics workers: `distributed/statistics_workers.py`, `distributed/serving`."""

import io
import os
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, Ranks
from helpers.served import Served, batch, loss_by, measured, on_rank, one_process, train, trained_on
from helpers.training import NETS, Batch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import Background, IterateAverage, KFACOptimizer, LevenbergMarquardt, LineSearch, MonteCarlo
from kfac_optim.distributed import DistributedConfig, Sharded, StatisticsWorkers
from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.serving.line import Line
from kfac_optim.distributed.serving.trainers import _has_passed

EVERY_STEP = {"factor_update_period": 1, "inverse_update_period": 1}
FIXED = StatisticsWorkers(max_staleness=3, deterministic=True)


# -- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_training_equals_one_process_with_the_same_mini_batches_and_staleness(workers: int, four_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(workers, max_staleness=3, deterministic=True))
    *trainers, served = four_ranks.run(on_rank, case)
    assert served == 5  # at steps 0, 3, 6, 9 and 12
    _check(trainers[: 4 - workers], case)


def folds(rank: int, case: Served) -> tuple[int, list[int]] | None:
    """How many mini-batches a worker has served, and how many statistics each of its layers has taken of them."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        served = optimizer.serve(measured(0), loss_by(model))
        return served, [block.clock.folds for block in optimizer._binding.coverage.blocks]
    for step in range(case.steps):
        train(optimizer, model, trained_on(step, rank))
    optimizer.dismiss_workers()
    return None


def test_a_round_that_begins_between_two_periods_is_measured_all_the_same(two_ranks: Ranks) -> None:
    """After one that has taken longer than a period: rounds are at steps 0, 3, 8, 13 and 18, with a period of 3."""
    case = Served(StatisticsWorkers(max_staleness=5, deterministic=True), steps=20)
    _, (served, taken) = two_ranks.run(folds, case)
    assert served == 5
    assert set(taken) == {5}


@pytest.mark.slow
@pytest.mark.parametrize("net", ["tokens", "tied", "pictures", "feature map"])
def test_what_a_worker_sees_of_layers_is_known_to_those_that_train(net: str, four_ranks: Ranks) -> None:
    """That a weight is used from both sides, and that inputs are not shared, only those that measure find out."""
    case = Served(FIXED, net=NETS[net])
    *trainers, _ = four_ranks.run(on_rank, case)
    _check(trainers, case)


def with_a_hidden_use(rank: int, case: Served) -> dict[str, list[int]] | None:
    """When each layer got its inverses, where the worker alone can see that not all uses of a weight are captured."""
    role, model = case.workers.role(), case.model()

    def hidden(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean() + (x @ (model.first.weight * 1).mT).square().mean()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "kfac_optim: .*'first'")
        if role.serves:
            case.optimizer(model, distributed=case.distributed()).serve(measured(0), lambda one: hidden(model, one[0]))
            return None
        optimizer, refreshed = case.optimizer(model, distributed=case.distributed()), {}
        for step in range(case.steps):
            optimizer.zero_grad()
            hidden(model, trained_on(step, rank)[0]).backward()
            optimizer.step()
            for block in optimizer._binding.coverage.blocks:
                refreshed.setdefault(block.name, []).append(block.clock.refreshed_at)
        optimizer.consolidate_state_dict()
        optimizer.dismiss_workers()
    return refreshed


def test_a_layer_that_workers_cannot_measure_is_left_to_sgd_and_the_others_are_not(two_ranks: Ranks) -> None:
    refreshed, _ = two_ranks.run(with_a_hidden_use, Served(FIXED, steps=12, options=EVERY_STEP))
    assert set(refreshed.pop("first")) == {-1}
    for steps in refreshed.values():
        assert 2 in steps, "the round that told of the layer brought nothing of the others"
        assert steps[-1] >= 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "l2_in_curvature": True}], ids=["plain", "decay"])
def test_without_staleness_each_round_is_waited_for(options: dict[str, Any], two_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(max_staleness=0), options=options)
    trained, _ = two_ranks.run(on_rank, case)
    _check([trained], case)


def _check(trainers: list[list[Tensor]], case: Served) -> None:
    for other in trainers[1:]:
        assert all(map(torch.equal, trainers[0], other))
    for ours, theirs in zip(trainers[0], one_process(case, len(trainers)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


class Bare(nn.Module):
    """Multiplies by a matrix that the first forward shows to be one of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.last = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.matrix).tanh())


def test_a_layer_that_a_forward_shows_is_measured_by_the_worker_alone(two_ranks: Ranks) -> None:
    case = Served(FIXED, net=Bare)
    trained, served = two_ranks.run(on_rank, case)
    assert served == 5
    _check([trained], case)


def with_a_skipped_step(rank: int, case: Served) -> tuple[bool, bool, list[str]] | None:
    """Whether a step without finite gradients was skipped, and the last one was not; and what was warned of."""
    role, model = case.workers.role(), case.model()
    if role.serves:
        case.optimizer(model, distributed=case.distributed()).serve(measured(0), loss_by(model))
        return None
    optimizer, params, told = case.optimizer(model, distributed=case.distributed()), [], []
    optimizer.consolidate_state_dict()  # nothing was learned yet
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict()
        told += [str(each.message) for each in caught]
    for step in range(case.steps):
        x, y = trained_on(step, rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(optimizer, model, (x * torch.inf if step == 5 else x, y))
        params.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    optimizer.dismiss_workers()
    optimizer.consolidate_state_dict()  # there is nobody to ask any more
    return torch.equal(params[4], params[5]), torch.equal(params[5], params[6]), told


def test_a_step_without_finite_gradients_is_skipped_beside_workers(two_ranks: Ranks) -> None:
    found, _ = two_ranks.run(with_a_skipped_step, Served(FIXED, steps=8))
    assert found == (True, False, [])


def with_a_frozen_layer(rank: int, case: Served) -> list[bool]:
    """Which parameters are trained in the end, where the ranks that train freeze a layer on the way."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        optimizer.serve(measured(0), loss_by(model))
    else:
        for step in range(case.steps):
            train(optimizer, model, trained_on(step, rank))
            model.last.requires_grad_(step < 5)
        optimizer.dismiss_workers()
    return [param.requires_grad for param in model.parameters()]


def test_a_layer_that_is_frozen_is_so_on_workers(two_ranks: Ranks) -> None:
    trainer, worker = two_ranks.run(with_a_frozen_layer, Served(FIXED))
    assert trainer == worker
    assert trainer.count(False) == 2


def scaled(rank: int, case: Served) -> float | list[bool]:
    """Which layers have inverses in the end; of the worker, whose loss overflows at first, its scale."""
    role, model = case.workers.role(), case.model().float()
    if role.serves:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-90)
        optimizer = case.optimizer(model, distributed=case.distributed(), grad_scaler=scaler)
        batches = [(x.float(), y.float()) for x, y in map(batch, range(4))]
        optimizer.serve(batches, lambda one: scaler.scale(loss_by(model)(one)))
        return scaler.get_scale()
    optimizer = case.optimizer(model, distributed=case.distributed())
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "kfac_optim: .* layers have gradients but no statistics"
        )  # of the first round
        for step in range(case.steps):
            x, y = trained_on(step, rank)
            train(optimizer, model, (x.float(), y.float()))
    optimizer.dismiss_workers()
    return [block.is_ready for block in optimizer._binding.coverage.blocks]


def test_the_scaler_of_a_worker_lowers_a_scale_at_which_the_loss_overflows(two_ranks: Ranks) -> None:
    ready, scale = two_ranks.run(scaled, Served(StatisticsWorkers(max_staleness=0), steps=8, options=EVERY_STEP))
    assert scale == 2.0**37
    assert all(ready)


def called_for(rank: int, case: Served) -> list[int] | None:
    """When the first layer got the inverses that it had at each of the last steps, where one was called for before."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        optimizer.serve(measured(0), loss_by(model))
        return None
    clock, refreshed = optimizer._binding.coverage.blocks[0].clock, []
    for step in range(case.steps):
        if step == case.steps - 3:
            clock.call_for_refresh()
        train(optimizer, model, trained_on(step, rank))
        refreshed.append(clock.refreshed_at)
    optimizer.dismiss_workers()
    return refreshed[-3:]


def test_a_refresh_that_was_called_for_comes_once(two_ranks: Ranks) -> None:
    options = {"factor_update_period": 1, "inverse_update_period": 50}
    refreshed, _ = two_ranks.run(called_for, Served(StatisticsWorkers(max_staleness=0), steps=12, options=options))
    assert refreshed == [9, 9, 9]


# -- who waits for whom ------------------------------------------------------------------------------------------


GO_ON = "statistics-workers/go-on"


def ages_beside(rank: int, case: Served, stops_at: int, after: int) -> list[int] | None:
    """The age of the inverses after each step, beside a worker that stops at a round, until `after` more steps."""
    role, model = case.workers.role(), case.model()
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]

    def mini_batches() -> Iterator[Batch]:
        for number, each in enumerate(measured(0)):
            if number == stops_at:
                store.wait([GO_ON])
                time.sleep(0.2)  # the step has begun that waits
            yield each

    if role.serves:
        case.optimizer(model, distributed=case.distributed()).serve(mini_batches(), loss_by(model))
        store.delete_key(GO_ON)
        return None
    wrapped = DistributedDataParallel(model, process_group=role.group)
    optimizer, ages = case.optimizer(wrapped, distributed=case.distributed()), []
    for step in range(case.steps):
        train(optimizer, wrapped, trained_on(step, rank))
        ages.append(int(optimizer.metrics()["inverse_age"]))
        if step == stops_at + after and rank == 0:
            store.set(GO_ON, "")
    optimizer.dismiss_workers()
    return ages


def test_a_slow_worker_is_waited_for_at_the_bound_and_not_before(four_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(max_staleness=6, deterministic=False), steps=12, options=EVERY_STEP)
    *trainers, _ = four_ranks.run(ages_beside, case, 1, 5)
    ages = trainers[0]
    assert all(ages == others for others in trainers)  # they take over at the same steps
    assert ages[:8] == [0, 1, 2, 3, 4, 5, 6, 6]  # the round of step 1 is awaited at step 7
    assert all(age <= 6 for age, before in zip(ages[1:], ages, strict=False) if age <= before)


def losses_beside(rank: int, case: Served) -> list[float] | int:
    role, model = case.workers.role(), case.model()
    if role.serves:
        return case.optimizer(model, distributed=case.distributed()).serve(measured(0), loss_by(model))
    wrapped = DistributedDataParallel(model, process_group=role.group)
    optimizer = case.optimizer(wrapped, distributed=case.distributed())
    losses = [train(optimizer, wrapped, trained_on(0, rank)) for _ in range(case.steps)]
    # No statistics are taken here.
    states = [block.state for block in optimizer._binding.coverage.blocks]
    assert not any(state.has_statistics() or state.has_pending() for state in states)
    assert not optimizer.factors()
    optimizer.dismiss_workers()
    losses += [train(optimizer, wrapped, trained_on(0, rank)) for _ in range(2)]  # goes on with what there is
    return losses


def test_training_goes_on_beside_a_worker_as_fast_as_it_is(four_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(max_staleness=100), steps=40, options=EVERY_STEP)
    *trainers, served = four_ranks.run(losses_beside, case)
    assert 2 <= served <= 40
    for losses in trainers:
        assert losses[-1] < 0.7 * losses[0]


def test_of_a_layer_that_a_forward_shows_no_statistics_are_kept_where_it_is_trained(two_ranks: Ranks) -> None:
    _, served = two_ranks.run(losses_beside, Served(FIXED, net=Bare, steps=6))
    assert served == 2


# -- ends --------------------------------------------------------------------------------------------------------


def failing(rank: int, case: Served, how: str) -> str | None:
    """Returns the error of each rank, where the worker ends at its third mini-batch."""
    role, model = case.workers.role(), case.model()

    def mini_batches() -> Iterator[Batch]:
        for number, each in enumerate(measured(0)):
            if number == 2 and how == "dies":
                os._exit(3)
            if number == 2 and how == "hangs":
                time.sleep(4.0)
            if number == 2:
                raise OSError("no more data")
            yield each

    try:
        if role.serves:
            case.optimizer(model, distributed=case.distributed()).serve(mini_batches(), loss_by(model))
            return None
        wrapped = DistributedDataParallel(model, process_group=role.group)
        optimizer = case.optimizer(wrapped, distributed=case.distributed())
        for step in range(case.steps):
            train(optimizer, wrapped, trained_on(step, rank))
            time.sleep(0.01)
    except (CollectiveError, OSError) as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
def test_the_ranks_that_train_are_told_of_a_worker_that_is_gone(how: str, four_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(max_staleness=50), steps=2000, options=EVERY_STEP, timeout=2.0)
    try:
        if how == "dies":
            with pytest.raises(RankError, match="-- rank 3: died, exit code 3") as caught:
                four_ranks.run(failing, case, how, timeout=25.0)
            told = [str(caught.value).split(f"-- rank {rank}: ")[1].split("\n--")[0] for rank in range(3)]
        else:
            told = four_ranks.run(failing, case, how, timeout=25.0)[:3]
    finally:
        four_ranks.stop()  # their lines are of no more use
    for each in told:
        assert "ranks 3" in each
        assert "start all ranks again from the last checkpoint" in each
        if how == "raises":
            assert "rank 3 raised OSError: no more data" in each
        else:
            assert "(time-out 2 s)" in each


def with_loss(rank: int, case: Served, loss: float | Tensor) -> str:
    """Returns how each rank is told that the worker has no loss."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    try:
        if role.serves:
            optimizer.serve(measured(0), lambda _: loss)  # type: ignore[arg-type, return-value]
        for step in range(case.steps):
            train(optimizer, model, trained_on(step, rank))
    except (TypeError, CollectiveError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("loss", [1.0, torch.ones(())], ids=["a number", "without a gradient"])
def test_a_worker_without_a_loss_is_refused_and_the_ranks_that_train_are_told(
    loss: float | Tensor, two_ranks: Ranks
) -> None:
    try:
        trainer, worker = two_ranks.run(with_loss, Served(StatisticsWorkers(max_staleness=1)), loss)
    finally:
        two_ranks.stop()
    message = "loss_of(batch) must return the loss of the mini-batch, a tensor that depends on the parameters, got"
    assert f"{message} {loss!r}" in worker
    assert f"rank 1 raised TypeError: kfac_optim: {message}" in trainer


def dismissed_twice(rank: int, case: Served) -> str | int:
    """Returns how the rank that trains is told that nobody takes its dismissal."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        return optimizer.serve(measured(0), loss_by(model))
    train(optimizer, model, trained_on(0, rank))
    optimizer.dismiss_workers()
    try:
        case.optimizer(model, distributed=case.distributed()).dismiss_workers()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_dismissal_that_no_worker_takes_is_told(two_ranks: Ranks) -> None:
    try:
        told, _ = two_ranks.run(dismissed_twice, Served(StatisticsWorkers(), timeout=3.0))
    finally:
        two_ranks.stop()
    assert "the statistics workers (ranks 1) were gone when they were dismissed" in told


def trainer_that_ends(rank: int, case: Served) -> str | None:
    role, model = case.workers.role(), case.model()
    if role.serves:
        try:
            case.optimizer(model, distributed=case.distributed()).serve(measured(0), loss_by(model))
        except CollectiveError as error:
            return str(error)
    optimizer = case.optimizer(model, distributed=case.distributed())
    train(optimizer, model, trained_on(0, rank))
    time.sleep(4.0)  # without a word
    return None


@pytest.mark.slow
def test_a_worker_is_told_of_those_that_train_no_more(two_ranks: Ranks) -> None:
    try:
        _, told = two_ranks.run(trainer_that_ends, Served(StatisticsWorkers(), timeout=1.5))
    finally:
        two_ranks.stop()
    assert "no order of rank 0 came to the statistics worker on rank 1 (time-out 1.5 s)" in told
    assert "dismiss_workers()" in told


def ending(rank: int, case: Served, how: str) -> tuple[str, str]:
    """Returns the error of each rank, where the worker ends at its second mini-batch, and that of the next try."""
    role, model = case.workers.role(), case.model()
    told = []
    for _ in range(2):
        try:
            if role.serves:
                if how == "model":
                    model.float()
                batches = [batch(number) for number in range(2)]
                loss_of = (lambda _: 1.0) if how == "loss" else loss_by(model)
                serving = case.optimizer(model, distributed=case.distributed())
                serving.serve(iter(batches) if how == "batches" else batches, loss_of)
            else:
                trained: Any = model
                if how == "groups":
                    first, *others = model.children()
                    trained = [{"params": [*first.parameters()], "damping": 1.0}]
                    trained += [{"params": [*module.parameters()]} for module in others]
                given = {} if trained is model else {"model": model}
                optimizer = case.optimizer(trained, **given, distributed=case.distributed())
                for step in range(case.steps):
                    train(optimizer, model, trained_on(step, rank))
        except (RuntimeError, TypeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


ENDINGS = {
    "loss": "TypeError: kfac_optim: loss_of(batch) must return the loss of the mini-batch, a tensor that depends",
    "batches": "RuntimeError: kfac_optim: the mini-batches of a statistics worker have ended, and begin no second time",
    "model": "RuntimeError: kfac_optim: an order of the ranks that train holds ",
    "groups": "RuntimeError: kfac_optim: 'first' and 'hidden' are in one param group of the statistics worker",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_what_a_worker_cannot_do_is_told_on_all_ranks_and_ends_the_service(how: str, two_ranks: Ranks) -> None:
    # Lines are kept by their time-out: those that are lost are of no other test.
    seconds = 20.0 + list(ENDINGS).index(how)
    case = Served(StatisticsWorkers(max_staleness=2), steps=100, options=EVERY_STEP, timeout=seconds)
    (trainer, again), (worker, served_again) = two_ranks.run(ending, case, how)
    assert worker.startswith(ENDINGS[how])
    assert trainer.startswith("CollectiveError: kfac_optim: the statistics workers (ranks 1) gave up at the order of")
    assert f"rank 1 raised {ENDINGS[how]}" in trainer
    for each in (again, served_again):
        assert "have lost each other, as an earlier error said. Start all ranks again from the last checkpoint" in each


def second_failing(rank: int, case: Served, after: int) -> str:
    """Returns the error of each rank, where the second of two workers ends after so many mini-batches."""
    role, model = case.workers.role(), case.model()

    def mini_batches() -> Iterator[Batch]:
        for number in range(2):
            if rank == role.workers[1] and number == after:
                raise OSError("no more data")
            yield batch(number)

    try:
        if role.serves:
            case.optimizer(model, distributed=case.distributed()).serve(mini_batches(), loss_by(model))
        wrapped = DistributedDataParallel(model, process_group=role.group)
        optimizer = case.optimizer(wrapped, distributed=case.distributed())
        for step in range(case.steps):
            train(optimizer, wrapped, trained_on(step, rank))
    except (CollectiveError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
def test_a_worker_that_fails_beside_another_ends_all_of_them(after: int, four_ranks: Ranks) -> None:
    case = Served(StatisticsWorkers(2, max_staleness=2), steps=100, options=EVERY_STEP, timeout=20.0 + after)
    try:
        *trainers, leading, second = four_ranks.run(second_failing, case, after, timeout=40.0)
    finally:
        four_ranks.stop()  # their lines are of no more use
    assert second == "OSError: no more data"
    assert leading.startswith("CollectiveError: kfac_optim: on rank 2 (of ranks 2, 3) the collective of")
    for told in trainers:
        assert "gave up at the order of" in told
        assert "rank 2 raised CollectiveError" in told
    for told in (leading, *trainers):
        assert "Before that rank 3 raised OSError: no more data. Look for the first error" in told


def unserved(rank: int, case: Served) -> str | None:
    role, model = case.workers.role(), case.model()
    if role.serves:
        return None
    try:
        train(case.optimizer(model, distributed=case.distributed()), model, trained_on(0, rank))
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_ranks_that_train_are_told_of_workers_that_never_serve(two_ranks: Ranks) -> None:
    told, _ = two_ranks.run(unserved, Served(StatisticsWorkers(), timeout=1.25))
    assert "not all of the ranks [0, 1] came within 1.25 s" in told
    assert "see that workers call optimizer.serve(...)" in told


def test_a_refresh_is_due_at_the_phase_of_its_block() -> None:
    block: Any = SimpleNamespace(group={"inverse_update_period": 10}, phase=Fraction(1, 2))
    assert [step for step in range(1, 30) if _has_passed(block, step - 1, step)] == [5, 15, 25]
    assert _has_passed(block, 3, 8)
    assert not _has_passed(block, 5, 14)


class Stuck:
    """A message that does not come."""

    def __init__(self) -> None:
        self.waited = 0.0

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        self.waited += timeout.total_seconds()
        assert self.waited < 1.0, "nobody waits so long"
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_a_message_is_waited_for_as_long_as_the_time_out_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_optim.distributed.serving.line._LOOKOUT", timedelta(seconds=0.05))
    line, work = object.__new__(Line), Stuck()
    line.timeout = timedelta(seconds=0.2)
    with pytest.raises(RuntimeError, match="timed out"):
        line.wait(work)  # type: ignore[arg-type]
    assert 0.15 <= work.waited <= 0.25


def one_beside_another(rank: int, case: Served) -> str | None:
    role, model = case.workers.role(), case.model()
    if role.serves:
        case.optimizer(model, distributed=case.distributed()).serve(measured(0), loss_by(model))
        return None
    first = case.optimizer(model, distributed=case.distributed())
    train(first, model, trained_on(0, rank))
    try:
        train(case.optimizer(model, distributed=case.distributed()), model, trained_on(1, rank))
    except RuntimeError as error:
        return str(error)
    finally:
        first.dismiss_workers()
    return "no error"


def test_workers_serve_one_optimizer_at_a_time(two_ranks: Ranks) -> None:
    told, _ = two_ranks.run(one_beside_another, Served(StatisticsWorkers()))
    assert "another optimizer still is served by the statistics workers" in told
    assert "Call dismiss_workers() on it first" in told


# -- checkpoints -------------------------------------------------------------------------------------------------


def resumed(
    rank: int, case: Served, at: int, by_torch: bool, evaluated: bool = False
) -> tuple[list[Tensor], list[Tensor]] | int:
    """Parameters of a run, and of one that begins again from its checkpoint, which was perhaps saved after `eval()`."""
    role = case.workers.role()
    files: list[Any] = [None]

    def run(start: int, stop: int, saved: bytes | None) -> tuple[list[Tensor], bytes] | int:
        model = case.model()
        wrapped = model if role.serves else DistributedDataParallel(model, process_group=role.group)
        optimizer = case.optimizer(wrapped, distributed=case.distributed())
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            model.load_state_dict(state["model"])
            if by_torch:
                set_optimizer_state_dict(wrapped, optimizer, state["optimizer"])
            else:
                optimizer.load_state_dict(state["optimizer"])
        if role.serves:
            return optimizer.serve(measured(0, first=0 if saved is None else 2), loss_by(model))
        file = io.BytesIO()
        optimizer.train()
        for step in range(start, stop):
            train(optimizer, wrapped, trained_on(step, rank))
            if step == at - 1:
                if evaluated:
                    optimizer.eval()
                optimizer.consolidate_state_dict()
                if rank == 0:
                    held = get_optimizer_state_dict(wrapped, optimizer) if by_torch else optimizer.state_dict()
                    torch.save({"model": model.state_dict(), "optimizer": held}, file)
                optimizer.train()
        optimizer.dismiss_workers()
        return [param.detach().clone() for param in model.parameters()], file.getvalue()

    whole = run(0, case.steps, None)
    if rank == 0:
        assert isinstance(whole, tuple)
        files = [whole[1]]
    dist.broadcast_object_list(files)
    again = run(at, case.steps, files[0])
    if isinstance(whole, int) or isinstance(again, int):
        assert isinstance(again, int)
        return again
    return whole[0], again[0]


@pytest.mark.parametrize(("at", "by_torch"), [(6, False), (8, False), (8, True)])  # with a round under way, and without
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(at: int, by_torch: bool, two_ranks: Ranks) -> None:
    case = Served(FIXED, options={"factor_update_period": 4, "inverse_update_period": 4})
    (whole, again), served = two_ranks.run(resumed, case, at, by_torch)
    assert all(map(torch.equal, whole, again))
    assert served == 2  # at steps 8 and 12


def test_a_run_goes_on_from_a_checkpoint_that_was_saved_while_the_model_held_averages(two_ranks: Ranks) -> None:
    case = Served(FIXED, options={"factor_update_period": 4, "inverse_update_period": 4, "average": IterateAverage()})
    (whole, again), served = two_ranks.run(resumed, case, 8, False, True)
    assert all(map(torch.equal, whole, again))
    assert served == 2


def saved_too_late(rank: int, case: Served) -> None:
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        optimizer.serve(measured(0), loss_by(model))
        return
    train(optimizer, model, trained_on(0, rank))
    optimizer.dismiss_workers()
    optimizer.consolidate_state_dict()
    with pytest.warns(UserWarning, match=r"lacks the statistics.* before dismiss_workers\(\)\.$") as caught:
        optimizer.state_dict()
    assert not any("Call optimizer.consolidate_state_dict()" in str(each.message) for each in caught)


def test_statistics_that_went_with_dismissed_workers_are_told_of(two_ranks: Ranks) -> None:
    two_ranks.run(saved_too_late, Served(StatisticsWorkers()))


def saved_alone(rank: int, case: Served) -> str | None:
    """Returns how a worker is told that it has not loaded what the others have."""
    role, model = case.workers.role(), case.model()
    optimizer = case.optimizer(model, distributed=case.distributed())
    if role.serves:
        optimizer.serve(measured(0), loss_by(model))
        try:
            case.optimizer(model, distributed=case.distributed()).serve(measured(0), loss_by(model))
        except RuntimeError as error:
            return str(error)
        return None
    train(optimizer, model, trained_on(0, rank))
    with pytest.warns(UserWarning, match="the statistics, which the statistics workers keep"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    optimizer.dismiss_workers()
    again = case.optimizer(model, distributed=case.distributed())
    again.load_state_dict(state)
    try:
        for step in range(1, 20):
            train(again, model, trained_on(step, rank))
    except CollectiveError as error:
        return str(error)
    return None


def test_a_worker_that_has_not_loaded_the_checkpoint_is_refused(two_ranks: Ranks) -> None:
    try:
        found = two_ranks.run(saved_alone, Served(StatisticsWorkers()))
    finally:
        two_ranks.stop()
    for told in found:
        assert "with 1 statistics behind them, and the statistics worker on rank 1 had 0" in told
        assert "Load the same checkpoint on all ranks" in told


# -- refusals ----------------------------------------------------------------------------------------------------


def test_choices_of_the_config_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hold all inverses, which is strategy=Replicated\(\); got Sharded"):
        DistributedConfig(strategy=Sharded(), workers=StatisticsWorkers())
    with pytest.raises(TypeError, match="workers of DistributedConfig"):
        DistributedConfig(workers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks of StatisticsWorkers"):
        StatisticsWorkers(0)
    with pytest.raises(ValueError, match="max_staleness of StatisticsWorkers"):
        StatisticsWorkers(max_staleness=-1)
    with pytest.raises(RuntimeError, match="there is no process group"):
        StatisticsWorkers().role()


def refused(rank: int) -> list[str]:
    found = []
    workers = StatisticsWorkers()
    role, config = workers.role(), DistributedConfig(workers=workers)
    assert role.serves is (rank == 1)
    criterion = nn.MSELoss()
    attempts: list[tuple[type[Exception], dict[str, Any]]] = [
        (ValueError, {"refresh": Background(deterministic=True)}),
        (ValueError, {"adapt_damping": LevenbergMarquardt(), "estimate": MonteCarlo(criterion)}),
        (ValueError, {"step_size": LineSearch()}),
        (ValueError, {"distributed": DistributedConfig(workers=StatisticsWorkers(2))}),
    ]
    for kind, options in attempts:
        try:
            KFACOptimizer(nn.Linear(2, 1), **{"distributed": config, **options})
        except kind as error:
            found.append(str(error))
    try:
        DistributedConfig(workers=workers, group=role.group)
    except ValueError as error:
        found.append(str(error))
    model = nn.Linear(2, 1)
    optimizer = KFACOptimizer(model, distributed=config)
    try:
        if role.serves:
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        else:
            optimizer.serve([], lambda _: torch.zeros(()))
    except RuntimeError as error:
        found.append(str(error))
    try:
        if role.serves:
            optimizer.dismiss_workers()
    except RuntimeError as error:
        found.append(str(error))
    try:
        if role.serves:
            unknown = KFACOptimizer(list(nn.Linear(2, 1).parameters()), distributed=config)
            unknown.serve([], lambda _: torch.zeros(()))
    except RuntimeError as error:
        found.append(str(error))
    mesh = init_device_mesh("cpu", (2,))
    try:
        KFACOptimizer(fully_shard(nn.Linear(2, 4), mesh=mesh), distributed=config)
    except NotImplementedError as error:
        found.append(str(error))
    return found


def test_choices_of_the_optimizer_that_do_not_go_together_are_refused(two_ranks: Ranks) -> None:
    found = two_ranks.run(refused)
    assert [len(told) for told in found] == [7, 8 + 1]
    for told in found:
        assert "refreshes beside the training already, and so does refresh=Background" in told[0]
        assert "asks for inverses at once" in told[1]
        assert "LineSearch" in told[2]
        assert "evaluates the closure of a step at other parameters" in told[2]
        assert "leaves none of 2 ranks to train" in told[3]
        assert "divides all ranks" in told[4]
    assert "serve() is for statistics workers, and this rank is none" in found[0][5]
    assert "rank 1 is a statistics worker" in found[1][5]
    assert "optimizer.serve(batches, loss_of)" in found[1][5]
    assert "needs whole parameters on the ranks that train, and some are sharded" in found[0][6]
    assert "rank 1 is a statistics worker; dismiss_workers() is for the ranks that train" in found[1][6]
    assert "receives the parameters of the model, which is not known" in found[1][7]
    KFACOptimizer(nn.Linear(2, 1)).dismiss_workers()  # where there are none it does nothing
