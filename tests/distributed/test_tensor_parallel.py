"""Tensor parallelism, alone and with `fully_shard`, goes where one process goes that has all examples."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layouts import DEFAULTS, Outcome, adding, alone, assert_close, batch, loss, outcome, seeded, train, whole
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from kfac_optim import EKFAC, Cholesky, Eigen, ExactGGN, KFACOptimizer, LossTerms, MonteCarlo, SelectedUpdates
from kfac_optim.distributed.gradients.sharding import ranks_alike
from kfac_optim.fisher.estimates import Estimate


class Net(nn.Module):
    """Columns and rows that four ranks share evenly, around layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 8), nn.Linear(8, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)
        self.slope = nn.Parameter(torch.full((3,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.down(self.up(self.first(x).tanh()).tanh()))
        mapped: Tensor = self.last(h) * self.slope
        return mapped


STYLES: dict[str, dict[str, ParallelStyle]] = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "columns that are gathered": {"up": ColwiseParallel(output_layouts=Replicate())},
    "rows of what is whole": {"down": RowwiseParallel(input_layouts=Replicate())},
    "outputs that stay DTensors": {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=True),
    },
    "examples in shards between": {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "last": PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    },
}


def parallel(style: str, sharded: bool) -> nn.Module:
    model = seeded(Net)
    if not sharded:
        return parallelize_module(model, init_device_mesh("cpu", (4,)), STYLES[style])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], STYLES[style])
    for child in (model.first, model.last):  # of those that are cut torch warns that they return views
        fully_shard(child, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def on_rank(rank: int, style: str, sharded: bool, options: dict[str, Any]) -> Outcome:
    model = parallel(style, sharded)
    optimizer = KFACOptimizer(model, **(DEFAULTS | options))
    number = rank // 2 if sharded else 0
    train(model, optimizer, range(number, number + 1))
    return outcome(model, optimizer)


CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "alone": ("columns and rows", False, {"inverse": Cholesky(), "nesterov": True}),
    "gathered": ("columns that are gathered", False, {"inverse": Eigen(), "weight_decay": 0.01}),
    "whole inputs": ("rows of what is whole", False, {"kl_clip": 1e-4, "lr": 0.5, "momentum": 0.95}),
    "DTensors": ("outputs that stay DTensors", False, {"momentum": 0.0}),
    "selected updates": ("columns and rows", True, {"step_size": SelectedUpdates(), "momentum": 0.9}),
    "selected updates, norms between": (
        "examples in shards between",
        False,
        {"step_size": SelectedUpdates(), "momentum": 0.9, "skip_layers": ["norm"]},
    ),
    "sequence parallel": ("examples in shards between", False, {"skip_layers": ["norm"]}),
    "fully_shard": ("columns and rows", True, {"inverse": Cholesky(), "nesterov": True}),
    "fully_shard, EKFAC": ("columns and rows", True, {"inverse": EKFAC(), "factor_update_period": 3, "foreach": True}),
    "fully_shard, momentum": (
        "columns that are gathered",
        True,
        {"kl_clip": 1e-4, "lr": 0.5, "momentum": 0.95},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(four_ranks: Ranks, case: str) -> None:
    style, sharded, options = CASES[case]
    assert_close(four_ranks.run(on_rank, style, sharded, options), alone(Net, 2 if sharded else 1, **options))


def of_added(rank: int) -> Outcome:
    model = adding(parallel("columns and rows", True))
    optimizer = KFACOptimizer(model, **DEFAULTS)
    train(model, optimizer, range(rank // 2, rank // 2 + 1), shares=2)
    return outcome(model, optimizer)


def test_gradients_that_are_added_over_ranks_with_other_examples_are_those_of_one_loss(four_ranks: Ranks) -> None:
    assert_close(four_ranks.run(of_added), alone(Net, 2))


def found_on_rank(rank: int, cut: bool) -> Outcome:
    model = parallel("columns and rows", True) if cut else seeded(Net)
    if not cut:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = KFACOptimizer(model.parameters(), **DEFAULTS)
    number = rank // 2 if cut else rank
    train(model, optimizer, range(number, number + 1))
    return outcome(model, optimizer)


@pytest.mark.parametrize("cut", [True, False])
def test_a_model_that_is_found_at_its_first_forward_is_measured_as_by_one_process(four_ranks: Ranks, cut: bool) -> None:
    """Shards of fully_shard are no cut layers, whose ranks would see the same examples."""
    assert_close(four_ranks.run(found_on_rank, cut), alone(Net, 2 if cut else 4))


class WithExperts(nn.Module):
    """Has the experts of four ranks in one parameter, which lies in parts on ranks with other examples."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 4, 4), mesh, [Shard(0)]))
        self.bias = nn.Parameter(DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)]))


def alike(_: int) -> dict[str, list[int]]:
    def cut(mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(seeded(Net), mesh, STYLES["columns and rows"])

    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cut"))
    both, gathered, hybrid = cut(square["cut"]), cut(square["cut"]), seeded(Net)
    for model in (both, gathered):
        fully_shard(model, mesh=square["data"])
    fully_shard(hybrid, mesh=square)
    gathered.unshard()
    sharded = fully_shard(seeded(Net), mesh=flat)
    models = {"cut": cut(flat), "cut and sharded": both, "gathered": gathered, "hybrid": hybrid, "sharded": sharded}
    return {name: ranks_alike(model) for name, model in (models | {"experts": WithExperts(flat)}).items()}


def test_ranks_see_the_same_examples_where_tensor_parallelism_has_cut_a_layer(four_ranks: Ranks) -> None:
    for rank, found in enumerate(four_ranks.run(alike)):
        pair = [0, 1] if rank < 2 else [2, 3]
        cut = {"cut": [0, 1, 2, 3], "cut and sharded": pair, "gathered": pair}
        assert found == cut | {"hybrid": [], "sharded": [], "experts": []}


NAMED: dict[str, Callable[[nn.Module], Estimate]] = {"drawn": MonteCarlo, "exact": ExactGGN, "ignored": ExactGGN}
"""Of which the last has examples that its criterion ignores."""


def trained_with_the_loss_named(model: nn.Module, name: str, numbers: range) -> Outcome:
    criterion = nn.CrossEntropyLoss() if name == "ignored" else nn.MSELoss()
    options = DEFAULTS | {"estimate": NAMED[name](criterion), "loss_terms": LossTerms.ELEMENTS}
    optimizer = KFACOptimizer(model, **options)
    for step in range(4):
        x = torch.cat([batch(number, step) for number in numbers])
        optimizer.zero_grad()
        target = torch.where(x[:, 0] > 0, 1, -100) if name == "ignored" else x[:, :3].square()
        criterion(model(x), target).backward()
        optimizer.step()
    return outcome(model, optimizer)


def named_on_rank(rank: int, name: str, sharded: bool) -> Outcome:
    number = rank // 2 if sharded else 0
    return trained_with_the_loss_named(parallel("columns and rows", sharded), name, range(number, number + 1))


@pytest.mark.parametrize(("name", "sharded"), [("drawn", False), ("exact", True), ("ignored", False)])
def test_a_named_loss_is_measured_as_by_one_process(four_ranks: Ranks, name: str, sharded: bool) -> None:
    """Ranks that see the same examples draw the same targets, and gather what each has of a gradient."""
    alone = trained_with_the_loss_named(seeded(Net), name, range(2 if sharded else 1))
    assert_close(four_ranks.run(named_on_rank, name, sharded), alone)


def source_of(_: int, sharded: bool) -> int:
    model = parallel("columns and rows", sharded)
    optimizer = KFACOptimizer(model, **DEFAULTS)
    model(batch(0, 0))
    return optimizer._window.source


def test_ranks_with_other_examples_draw_other_targets(four_ranks: Ranks) -> None:
    assert four_ranks.run(source_of, False) == [0, 0, 0, 0]
    assert four_ranks.run(source_of, True) == [0, 0, 2, 2]


def resumed(rank: int, sharded: bool) -> tuple[Outcome, Outcome]:
    """A run that goes through, and one that goes on from its checkpoint, at a step that does not refresh."""
    model, mine = parallel("columns and rows", sharded), range(rank // 2, rank // 2 + 1) if sharded else range(1)
    optimizer = KFACOptimizer(model, **DEFAULTS)
    train(model, optimizer, mine, range(4))
    optimizer.consolidate_state_dict(to=None)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, mine, range(4, 8))
    other = parallel("columns and rows", sharded)
    other.load_state_dict(weights)
    again = KFACOptimizer(other, **DEFAULTS)
    again.load_state_dict(state)
    train(other, again, mine, range(4, 8))
    return outcome(model, optimizer), outcome(other, again)


@pytest.mark.parametrize("sharded", [False, True])
def test_resuming_goes_on_as_if_nothing_had_been(four_ranks: Ranks, sharded: bool) -> None:
    straight, again = four_ranks.run(resumed, sharded)[0]
    assert_close([again], straight)


def clipping(_: int, style: str, sharded: bool, order: float) -> None:
    model, bare = parallel(style, sharded), seeded(Net)
    optimizer = KFACOptimizer(model, skip_layers=["norm"] if style == "examples in shards between" else [])
    loss(model, batch(0, 0)).backward()
    loss(bare, batch(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.1, order)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1, order), expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("style", "sharded", "order"),
    [("columns and rows", False, 2.0), ("columns and rows", True, 2.0), ("examples in shards between", False, 1.0)],
)
def test_clipping_is_that_of_one_process(four_ranks: Ranks, style: str, sharded: bool, order: float) -> None:
    four_ranks.run(clipping, style, sharded, order)


def of_cut_examples(_: int) -> str:
    """Of a norm whose parameters are no shards, ranks see examples of their own."""
    with pytest.raises(NotImplementedError) as caught:
        KFACOptimizer(parallel("examples in shards between", False), **DEFAULTS)
    return str(caught.value)


def test_other_layers_in_parts_are_refused_by_name(four_ranks: Ranks) -> None:
    for message in four_ranks.run(of_cut_examples):
        assert re.match(r"kfac_optim: the parameters of 'norm' are .*skip_layers=\['norm'\]\.$", message), message
