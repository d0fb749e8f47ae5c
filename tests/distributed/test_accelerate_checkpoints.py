"""`save_state` and `load_state` of Accelerate on two processes, and checkpoints that are not whole."""
# ruff: noqa: ARG001 (what ranks run is told its rank)

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.accelerated import accelerate_on
from helpers.ranks import Ranks
from test_checkpoints import COMM, EXAMPLES, SAVED, SHARDED, STEPS, Run, Training, assert_close, network
from torch import Tensor

from kfac_optim import EKFAC, Cholesky, Inverse, KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Strategy

needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")


# -- what is not whole is told of --------------------------------------------------------------------------------


def told_when_saved(rank: int, run: Run) -> dict[str, list[str]]:
    """What `state_dict()` warns of at several times."""
    training = Training(run)
    optimizer = training.optimizer
    told: dict[str, list[str]] = {}

    def save(when: str) -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = optimizer.state_dict()
        told[when] = [str(each.message) for each in caught]
        assert all(each.filename == __file__ for each in caught)
        return state

    save("new")
    training.train(0, SAVED)
    save("trained")
    optimizer.consolidate_state_dict()
    save("consolidated")
    optimizer.consolidate_state_dict(None)
    save("consolidated in parts")
    training.train(SAVED, SAVED + 1)
    save("a step later")
    return told


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(COMM), ["what other ranks have measured since the last refresh:"]),
        (Run(SHARDED), ["since the last refresh and the momentum of parameters that other ranks update:"]),
        (Run(SHARDED, include_factors=False), ["lacks the momentum of parameters that other ranks update:"]),
        (Run(COMM, include_factors=False), []),
        (Run(SHARDED, include_factors=False, momentum=0), []),
    ],
    ids=["replicated", "sharded", "sharded, no factors", "replicated, no factors", "nothing but parameters"],
)
def test_state_dict_warns_where_other_ranks_know_more(run: Run, words: list[str], two_ranks: Ranks) -> None:
    for told in two_ranks.run(told_when_saved, run):
        assert told["new"] == told["consolidated"] == told["consolidated in parts"] == []
        for when in ("trained", "a step later"):
            assert len(told[when]) == len(words)
            assert all(word in text for word, text in zip(words, told[when], strict=True))
            assert all("Call optimizer.consolidate_state_dict() on all ranks" in text for text in told[when])


def each_its_own(rank: int, run: Run, folder: str) -> list[Tensor]:
    """Every rank saves and loads a file of its own, as the warning says."""
    training = Training(run)
    training.train(0, SAVED)
    training.optimizer.consolidate_state_dict(to=None)
    path = str(Path(folder, f"{rank}.pt"))
    torch.save({"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}, path)
    other = Training(run)
    other.load(path)
    if isinstance(run.inverse, EKFAC):  # samples in bases that are elsewhere still
        other.optimizer.consolidate_state_dict(to=None)
    other.train(SAVED, STEPS)
    training.train(SAVED, STEPS)
    assert_close(other.params(), training.params())
    return other.params()


@pytest.mark.parametrize("run", [Run(COMM), Run(COMM, EKFAC()), Run(SHARDED)], ids=Run.name)
def test_ranks_that_save_each_for_themselves_resume_their_run(run: Run, two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks.run(each_its_own, run, str(tmp_path))
    assert_close(one, other)


# -- Accelerate --------------------------------------------------------------------------------------------------


class Accelerated:
    """A model and an optimizer as `Accelerator.prepare` makes them."""

    def __init__(self, accelerator: Any, strategy: Strategy, inverse: Inverse[Any], *, whole: bool) -> None:
        model = network()
        optimizer = KFACOptimizer(
            model,
            lr=0.1,
            momentum=0.9,
            damping=0.1,
            inverse=inverse,
            factor_update_period=1,
            inverse_update_period=4,
            distributed=DistributedConfig(strategy=strategy),
        )
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if whole:
            accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())

    def train(self, start: int, stop: int) -> list[Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        share = slice(rank * EXAMPLES // ranks, (rank + 1) * EXAMPLES // ranks)
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
            y = torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            self.accelerator.backward((self.model(x[share]) - y[share]).square().sum(1).mean())
            self.optimizer.step()
        return [param.detach().clone() for param in self.model.parameters()]


def through_accelerate(
    rank: int, strategy: Strategy, inverse: Inverse[Any], folder: str, whole: bool
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Parameters of the run that saved, of the one that resumed it, and what was warned of."""
    from accelerate import Accelerator

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerate_on(rank):
            first = Accelerator(cpu=True)
            run = Accelerated(first, strategy, inverse, whole=whole)
            run.train(0, SAVED)
            first.save_state(folder)
            first.wait_for_everyone()
            expected = run.train(SAVED, STEPS)
        with accelerate_on(rank):
            second = Accelerator(cpu=True)
            other = Accelerated(second, strategy, inverse, whole=whole)
            second.load_state(folder)
            found = other.train(SAVED, STEPS)
    return expected, found, [str(each.message) for each in caught if "kfac_optim" in str(each.message)]


@needs_accelerate
@pytest.mark.parametrize(
    ("strategy", "inverse"), [(COMM, Cholesky()), (SHARDED, Cholesky()), (SHARDED, EKFAC())], ids=str
)
def test_accelerates_checkpoints_resume_the_run_where_a_hook_makes_them_whole(
    strategy: Strategy, inverse: Inverse[Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    for expected, found, told in two_ranks.run(through_accelerate, strategy, inverse, str(tmp_path), True):
        assert_close(found, expected)
        assert told == []


@needs_accelerate
def test_accelerates_checkpoints_that_are_not_whole_are_told_of_when_saved(two_ranks: Ranks, tmp_path: Path) -> None:
    for _, _, told in two_ranks.run(through_accelerate, COMM, Cholesky(), str(tmp_path), False):
        assert "this state_dict() lacks what other ranks have measured since the last refresh" in told[0]
