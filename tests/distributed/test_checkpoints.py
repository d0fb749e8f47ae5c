"""Checkpoints of several processes: whole or in parts, loaded on as many, fewer or more of them, by any strategy."""
# ruff: noqa: ARG001 (what ranks run is told its rank)

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.plain import assert_identical
from helpers.plans import largest_everywhere
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import (
    EKFAC,
    AdaptiveTrustRegion,
    Cholesky,
    Eigen,
    Inverse,
    KFACOptimizer,
    NewtonSchulz,
    SelectedUpdates,
)
from kfac_optim.distributed import DistributedConfig, Placement, Replicated, Sharded, Strategy
from kfac_optim.step.step_size import StepSize

EXAMPLES, SAVED, STEPS = 16, 5, 12  # the refresh of step 5 falls on the checkpoint, the next on step 8
MEM = Replicated(0.25)
HYBRID = Replicated(0.5, placement=Placement.FACTORS)
SHARDED = Sharded()
SELECTED = SelectedUpdates()
SHARDED_FACTORS = Sharded(Placement.FACTORS)
COMM = Replicated()


class Run(NamedTuple):
    """How a model is trained."""

    strategy: Strategy | None = None
    """None without a process group."""
    inverse: Inverse[Any] = Cholesky()
    period: int = 4
    period_of_statistics: int = 1
    momentum: float = 0.9
    wrapped: bool = True
    include_factors: bool = True
    everywhere: bool = False
    """Whether all ranks work on the largest layer."""
    step_size: StepSize = AdaptiveTrustRegion()
    """`SelectedUpdates` has an inverse of its own, and means in the place of dampened sums."""
    found: bool = False
    """Whether the optimizer has to find the model."""

    def name(self) -> str:
        selected = "-selected" * (self.step_size == SELECTED)
        wrapped = "wrapped" if self.wrapped else "unwrapped"
        return f"{self.strategy}-{self.inverse}-{wrapped}{'-everywhere' * self.everywhere}{selected}"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


class Training:
    """A model and its optimizer on one rank."""

    def __init__(self, run: Run) -> None:
        several = run.strategy is not None
        self.net = network()
        self.model = DistributedDataParallel(self.net) if several and run.wrapped else self.net
        if several and run.wrapped:  # which lays its buckets anew after a first backward, and they decide on rounding
            self.model(torch.zeros(1, 5, dtype=torch.float64)).sum().backward()
            self.model.zero_grad()
        self.optimizer = KFACOptimizer(
            self.model.parameters() if run.found else self.model,
            lr=0.1,
            momentum=run.momentum,
            dampening=0.0 if run.step_size == SELECTED else 0.1,
            weight_decay=0.01,
            damping=0.1,
            inverse=None if run.step_size == SELECTED else run.inverse,
            step_size=run.step_size,
            inverse_update_period=run.period,
            include_factors=run.include_factors,
            distributed=DistributedConfig(strategy=run.strategy) if run.strategy is not None else False,
            factor_update_period=run.period_of_statistics,
        )
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
            y = torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.float64)
            share = slice(self.rank * EXAMPLES // self.ranks, (self.rank + 1) * EXAMPLES // self.ranks)
            self.optimizer.zero_grad()
            (self.model(x[share]) - y[share]).square().sum(1).mean().backward()
            self.optimizer.step()

    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]

    def save(self, path: str) -> None:
        if self.rank == 0:
            torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        if self.ranks > 1:
            dist.barrier()

    def load(self, path: str) -> None:
        saved = torch.load(path, weights_only=True)
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def uninterrupted(rank: int, run: Run, path: str | None, saved: int = SAVED) -> list[Tensor]:
    training = Training(run)
    with largest_everywhere(on=run.everywhere):
        training.train(0, saved)
        if path is not None:
            training.optimizer.consolidate_state_dict()
            training.save(path)
        training.train(saved, STEPS)
    return training.params()


def resumed(rank: int, run: Run, path: str, saved: int = SAVED) -> list[Tensor]:
    training = Training(run)
    training.load(path)
    with largest_everywhere(on=run.everywhere):
        training.train(saved, STEPS)
    return training.params()


def alone(run: Run) -> Run:
    return run._replace(strategy=None)


def assert_close(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-13)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}/{key}").items()}
    return {path: value}


# With two ranks where DDP sums the gradients of the first step after a start otherwise than the rest: two terms have
# one sum, in whatever order.
RUNS = [
    (4, Run(COMM)),
    (4, Run(MEM, Eigen())),
    (4, Run(HYBRID, Eigen())),
    (2, Run(SHARDED)),
    (2, Run(SHARDED_FACTORS, NewtonSchulz())),
    (4, Run(SHARDED, wrapped=False)),
    (4, Run(MEM, EKFAC())),
    (2, Run(SHARDED_FACTORS, EKFAC())),
    (4, Run(SHARDED, everywhere=True)),
    (2, Run(SHARDED, step_size=SELECTED)),
    (4, Run(MEM, step_size=SELECTED)),
]


# -- whole, on one rank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "run"), RUNS, ids=lambda value: value.name() if isinstance(value, Run) else None)
def test_a_consolidated_checkpoint_resumes_the_run_bitwise_and_is_that_of_one_process(
    ranks: int, run: Run, four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint.pt")
    here, elsewhere = (four_ranks, two_ranks) if ranks == 4 else (two_ranks, four_ranks)
    expected = here.run(uninterrupted, run, path)
    assert_identical(expected[1:], expected[:-1])
    assert_identical(here.run(resumed, run, path), expected)
    # That a checkpoint was asked for changes nothing but the order of sums.
    assert_close(here.run(uninterrupted, run, None)[0], expected[0])
    for other in (HYBRID, SHARDED):
        assert_close(elsewhere.run(resumed, run._replace(strategy=other, wrapped=True), path)[0], expected[0])
    if run.everywhere:
        assert_close(elsewhere.run(resumed, run._replace(everywhere=False), path)[0], expected[0])
    # `EKFAC` samples at every step what several ranks apply from the next refresh on.
    if isinstance(run.inverse, EKFAC):
        return
    assert_close(resumed(0, alone(run), path), expected[0])
    single = Training(alone(run))
    single.train(0, SAVED)
    found, saved = flat(torch.load(path, weights_only=True)["optimizer"]), flat(single.optimizer.state_dict())
    assert found.keys() == saved.keys()
    for key, value in found.items():
        # Where A and G have different owners, `Eigen` does not tell of traces, by which condition numbers are measured.
        if not (run == Run(HYBRID, Eigen()) and key.endswith("condition")):
            torch.testing.assert_close(
                value, saved[key], rtol=1e-9, atol=1e-12, msg=lambda text, at=key: f"{at}: {text}"
            )


def test_what_ranks_apply_until_the_next_refresh_is_in_the_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    """`EKFAC` goes on to sample `S` from the refresh on, which is applied as it was then."""
    run, path, between = Run(SHARDED, EKFAC()), str(tmp_path / "checkpoint.pt"), SAVED + 1
    expected = two_ranks.run(uninterrupted, run, path, between)
    assert_identical(two_ranks.run(resumed, run, path, between), expected)


def consolidated_at_odd_times(rank: int, path: str) -> list[Tensor]:
    run = Run(SHARDED)
    first = Training(run)
    first.optimizer.consolidate_state_dict()  # before anything is known
    first.train(0, SAVED)
    for to in (1, None, 0, 0):
        first.optimizer.consolidate_state_dict(to)
    first.save(path)
    first.train(SAVED, SAVED + 1)
    second = Training(run)
    second.load(path)
    second.optimizer.consolidate_state_dict()  # before a step
    second.save(path)
    first.load(path)  # where it is consolidated, and of another time
    first.train(SAVED, STEPS)
    return first.params()


def test_consolidating_before_the_first_step_twice_and_after_a_load_loses_nothing(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    expected = two_ranks.run(uninterrupted, Run(SHARDED), None)
    found = two_ranks.run(consolidated_at_odd_times, str(tmp_path / "checkpoint.pt"))
    assert_close(found[0], expected[0])
    assert_identical(found[0], found[1])


def refused_ranks(rank: int) -> list[str]:
    told = []
    for distributed in (DistributedConfig(), False):
        optimizer = KFACOptimizer(network(), lr=0.1, distributed=distributed)
        for to in (-1, 2, True, "0"):
            with pytest.raises(ValueError, match="to must be a rank") as error:
                optimizer.consolidate_state_dict(to)  # type: ignore[arg-type]
            told.append(str(error.value))
    return told


def test_a_rank_that_is_none_is_refused(two_ranks: Ranks) -> None:
    told = two_ranks.run(refused_ranks)[1]
    assert told[1] == "kfac_optim: to must be a rank from 0 to 1, or None, got 2."
    assert told[-1] == "kfac_optim: to must be a rank from 0 to 0, or None, got '0'."


def refused_in_a_group(rank: int) -> str:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return ""
    optimizer = KFACOptimizer(network(), lr=0.1, distributed=DistributedConfig(group=group))
    with pytest.raises(ValueError, match="to must be a rank") as error:
        optimizer.consolidate_state_dict(to=3)
    return str(error.value)


def test_a_rank_is_counted_within_the_group_that_trains_together(four_ranks: Ranks) -> None:
    told = four_ranks.run(refused_in_a_group)[1]
    assert told == "kfac_optim: to must be a rank from 0 to 1, as counted among ranks [1, 3], or None, got 3."


# -- in parts ----------------------------------------------------------------------------------------------------


def saved_by_rank_0_alone(rank: int, run: Run, path: str) -> None:
    training = Training(run)
    training.train(0, SAVED)
    expected = pytest.warns(UserWarning, match="lacks what other ranks have measured")
    with expected if rank == 0 and run.include_factors else nullcontext():
        training.save(path)


def resumed_with_warnings(rank: int, run: Run, path: str) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = resumed(rank, run, path)
    return params, [str(each.message) for each in caught]


def test_what_rank_0_saves_without_a_collective_loads_everywhere_and_one_warning_tells_what_starts_anew(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint.pt")
    two_ranks.run(saved_by_rank_0_alone, Run(SHARDED), path)
    expected, alone_told = resumed_with_warnings(0, Run(), path)
    found, found_told = resumed_with_warnings(0, Run(found=True), path)
    assert_close(found, expected)
    assert sorted(found_told[0]) == sorted(alone_told[0])  # layers in the order of the file
    for ranks, strategy in ((two_ranks, SHARDED), (four_ranks, HYBRID), (two_ranks, SHARDED_FACTORS)):
        for params, told in ranks.run(resumed_with_warnings, Run(strategy), path):
            assert_close(params, expected)  # as one process goes on that lacks the same
            assert told == alone_told
    (told,) = alone_told
    assert "which start from zero" in told
    assert "call optimizer.consolidate_state_dict() on all ranks" in told
    state = torch.load(path, weights_only=True)["optimizer"]["state"]
    blocks = [held["kfac"] for held in state.values() if "kfac" in held]
    lacking = [bytes(block["name"].tolist()).decode() for block in blocks if "inverse" not in block]
    assert 0 < len(lacking) < len(blocks)
    assert all(repr(name) in told for name in lacking)


def without_factors(rank: int, path: str) -> None:
    run = Run(COMM, include_factors=False)
    saved_by_rank_0_alone(rank, run, path)
    resumed(rank, run, path)  # warnings are errors
    resumed(rank, Run(SHARDED), path)


def test_statistics_that_were_left_out_on_purpose_are_not_warned_of(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(without_factors, str(tmp_path / "checkpoint.pt"))


def saved_without_layers(rank: int) -> list[str]:
    """What is told as a run is saved that leaves all layers to SGD."""
    model = network()
    config = DistributedConfig(strategy=SHARDED)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, skip_layers=["*"], distributed=config)
    told = []
    for to in (None, 0):
        optimizer.zero_grad()
        model(torch.ones(2, 5).double()).square().mean().backward()
        optimizer.step()
        if to is not None:
            optimizer.consolidate_state_dict(to)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.state_dict()
        told.append(" ".join(str(each.message) for each in caught))
    return told


def test_momentum_of_other_ranks_is_missed_where_no_layer_is_preconditioned(two_ranks: Ranks) -> None:
    for at_first, consolidated in two_ranks.run(saved_without_layers):
        assert "this state_dict() lacks the momentum of parameters that other ranks update:" in at_first
        assert not consolidated


def of_each_its_own(rank: int, run: Run, other: Strategy, folder: str) -> list[Tensor]:
    """Every rank saves and loads a file of its own."""
    training = Training(run)
    training.train(0, SAVED)
    training.optimizer.consolidate_state_dict(None)
    return resumed(rank, run._replace(strategy=other), own_file(training, folder))


def own_file(training: Training, folder: str) -> str:
    path = str(Path(folder, f"{training.rank}.pt"))
    torch.save({"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize("other", [SHARDED_FACTORS, SHARDED, HYBRID], ids=str)
def test_what_one_rank_has_loaded_goes_to_those_that_own_it_now(
    other: Strategy, two_ranks: Ranks, tmp_path: Path
) -> None:
    run = Run(SHARDED)
    expected = two_ranks.run(uninterrupted, run, None)[0]
    for found in two_ranks.run(of_each_its_own, run, other, str(tmp_path)):
        assert_close(found, expected)


@pytest.mark.parametrize("other", [SHARDED, HYBRID], ids=str)
def test_so_does_what_waits_until_the_model_is_found(other: Strategy, two_ranks: Ranks, tmp_path: Path) -> None:
    run = Run(SHARDED, found=True)
    expected = two_ranks.run(uninterrupted, run, None)[0]
    for found in two_ranks.run(of_each_its_own, run, other, str(tmp_path)):
        assert_close(found, expected)


def consolidated_when_found(rank: int, run: Run, folder: str) -> list[Tensor]:
    first, training = Training(run), Training(run)
    first.train(0, SAVED)
    first.optimizer.consolidate_state_dict(None)
    training.load(own_file(first, folder))
    with pytest.raises(RuntimeError, match=r"shown '0', '2', '3', '4' and 1 more.*Run one forward with gradients"):
        training.optimizer.consolidate_state_dict(None)
    training.model(torch.zeros(1, 5, dtype=torch.float64))
    training.optimizer.consolidate_state_dict(None)
    training.train(SAVED, STEPS)
    return training.params()


def test_parts_are_put_together_once_a_forward_has_shown_their_layers(two_ranks: Ranks, tmp_path: Path) -> None:
    run = Run(SHARDED, EKFAC(), found=True)
    expected = two_ranks.run(uninterrupted, run, None)[0]
    for found in two_ranks.run(consolidated_when_found, run, str(tmp_path)):
        assert_close(found, expected)


class Sum(nn.Module):
    """A layer, and a matrix that a function multiplies by where it is not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.matrix = nn.Linear(5, 3), nn.Parameter(torch.eye(5, 3))
        self.drops = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if self.drops else out + x @ self.matrix


def shown_late(rank: int, to: int | None) -> tuple[list[Tensor], list[str]]:
    """Each rank loads what it has saved, and a step passes before the matrix is used."""
    state: Any = None
    for steps, dropped in ((3, 3), (2, 0)):
        torch.manual_seed(0)
        net = Sum()
        config = DistributedConfig(strategy=SHARDED)
        optimizer = KFACOptimizer(net, lr=0.1, momentum=0.9, factor_update_period=1, distributed=config)
        if state is not None:
            optimizer.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(steps):
                net.drops = step == dropped
                optimizer.zero_grad()
                net(torch.randn(8, 5)).square().mean().backward()
                optimizer.step()
        optimizer.consolidate_state_dict(to)
        state = optimizer.state_dict()
    return [param.detach() for param in net.parameters()], [str(each.message) for each in caught]


@pytest.mark.parametrize("to", [None, 0, 1])
def test_what_waits_for_longer_than_ranks_tell_each_other_of_begins_anew(two_ranks: Ranks, to: int | None) -> None:
    (params, told), (others, also_told) = two_ranks.run(shown_late, to)
    assert_identical(params, others)
    for messages in (told, also_told):
        assert any("the statistics of 'matrix', which start from zero" in each for each in messages)


def test_what_was_taken_before_others_told_what_they_had_loaded_does_not_count(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    run = Run(SHARDED, period_of_statistics=2)  # none are due in the step after the load
    expected = two_ranks.run(uninterrupted, run, None)[0]
    for found in two_ranks.run(of_each_its_own, run, SHARDED_FACTORS, str(tmp_path)):
        assert_close(found, expected)


def another_checkpoint_on_each(rank: int, folder: str) -> str:
    for stop in (2, 4):
        training = Training(Run(COMM))
        training.train(0, stop)
        training.optimizer.consolidate_state_dict()
        training.save(str(Path(folder, f"{stop}.pt")))
    training.load(str(Path(folder, f"{2 + 2 * rank}.pt")))
    with pytest.raises(RuntimeError, match="the ranks disagree") as error:
        training.train(4, 5)
    return str(error.value)


def test_checkpoints_of_other_steps_on_other_ranks_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for told in two_ranks.run(another_checkpoint_on_each, str(tmp_path)):
        clocks = "(step, last refresh, statistics, damping) [(2, 1, 2, 0.1)]"
        assert f"checkpoints loaded: 1, the last with clocks {clocks} here" in told


# -- memory ------------------------------------------------------------------------------------------------------


def kept_after_a_load(rank: int, run: Run, path: str) -> tuple[set[int], set[str], bool, bool]:
    training = Training(run)
    training.load(path)
    optimizer = training.optimizer
    training.train(SAVED, SAVED + 1)
    numbers = {number for number, param in enumerate(training.net.parameters()) if optimizer.state[param]}
    optimizer.consolidate_state_dict()
    optimizer.state_dict()
    whole = any("kfac" in held and "inverse" in held["kfac"] for held in optimizer.state.values())
    training.train(SAVED + 1, SAVED + 2)
    after = any("kfac" in held for held in optimizer.state.values())
    blocks = optimizer._binding.coverage.blocks
    memory = {block.name for block in blocks if not all(t.is_meta for t in block.state.computed().values())}
    with_momentum = {
        number for number, param in enumerate(training.net.parameters()) if "momentum_buffer" in optimizer.state[param]
    }
    assert {number for number in numbers if number in with_momentum} == with_momentum
    return with_momentum, memory, whole, after


def test_after_a_load_or_a_checkpoint_ranks_keep_what_they_own(two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    two_ranks.run(uninterrupted, Run(COMM), path)
    one, other = two_ranks.run(kept_after_a_load, Run(SHARDED), path)
    assert not one[0] & other[0]
    assert one[0] | other[0] == set(range(len(list(network().parameters()))))
    assert one[1] == {"0", "2", "3", "4", "6"} - other[1]
    assert one[1]
    assert other[1]
    assert one[2], "rank 0 had all of it"
    assert not one[3], "and let go of it"


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------


def written_by_dcp(rank: int, run: Run, folder: str) -> list[Tensor]:
    training = Training(run)
    training.train(0, SAVED)
    training.optimizer.consolidate_state_dict(None)
    write(training, folder)
    training.train(SAVED, STEPS)
    return training.params()


def write(training: Training, folder: str) -> None:
    state = {
        "model": training.net.state_dict(),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
    }
    dcp.save(state, checkpoint_id=folder)


def read_by_dcp(rank: int, run: Run, folder: str, *, trained: bool = False) -> list[Tensor]:
    training = Training(run)
    if trained:
        training.train(20, 23)
        training.optimizer.consolidate_state_dict(None)
    state = {
        "model": training.net.state_dict(),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
    }
    with warnings.catch_warnings():  # on one process
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder)
    training.net.load_state_dict(state["model"])
    # Without momentum and without a process group torch wants strict=False: parameters without state are missing.
    options = StateDictOptions(strict=dist.is_initialized() or run.momentum != 0)
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=options)
    if isinstance(run.inverse, EKFAC):  # samples in bases that are elsewhere still
        training.optimizer.consolidate_state_dict(None)
    training.train(SAVED, STEPS)
    return training.params()


@pytest.mark.parametrize(
    "run",
    [
        Run(SHARDED),
        Run(COMM, Eigen()),
        Run(SHARDED_FACTORS),
        Run(HYBRID, EKFAC()),
        Run(MEM, momentum=0),
        Run(SHARDED, step_size=SELECTED),
    ],
    ids=Run.name,
)
def test_distributed_checkpoints_load_on_other_ranks_by_other_strategies(
    run: Run, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    expected = two_ranks.run(written_by_dcp, run, folder)
    assert_identical(two_ranks.run(read_by_dcp, run, folder), expected)
    for ranks, strategy in ((two_ranks, HYBRID), (four_ranks, SHARDED), (four_ranks, SHARDED_FACTORS)):
        for found in ranks.run(read_by_dcp, run._replace(strategy=strategy), folder):
            assert_close(found, expected[0])
    assert_close(two_ranks.run(read_by_trained, run, folder)[0], expected[0])
    if not isinstance(run.inverse, EKFAC):
        assert_close(read_by_dcp(0, alone(run), folder), expected[0])


def read_by_trained(rank: int, run: Run, folder: str) -> list[Tensor]:
    return read_by_dcp(rank, run, folder, trained=True)
