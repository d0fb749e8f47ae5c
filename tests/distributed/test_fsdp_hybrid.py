"""HSDP, `fully_shard` over a mesh that replicates and shards, goes where one process goes that has all examples."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import counted_bytes
from helpers.layouts import DEFAULTS, Outcome, Uneven, adding, alone, assert_close, batch, loss, outcome, seeded, train
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from kfac_optim import EKFAC, Cholesky, Eigen, KFACOptimizer, SelectedUpdates
from kfac_optim.distributed import DistributedConfig, Placement, Replicated
from kfac_optim.utils.sharded_params import local


def hybrid(ranks: int = 4, permuted: bool = False) -> DeviceMesh:
    names = ("replicate", "shard")
    if permuted:  # ranks of one replica are not neighbours
        return DeviceMesh("cpu", torch.arange(ranks).view(2, -1).mT.contiguous(), mesh_dim_names=names)
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = seeded(Uneven)
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_rank(rank: int, options: dict[str, Any], placement: Placement, permuted: bool) -> tuple[Outcome, list[Tensor]]:
    model = sharded(hybrid(permuted=permuted))
    config = DistributedConfig(Replicated(placement=placement))
    optimizer = KFACOptimizer(model, **(DEFAULTS | options), distributed=config)
    train(model, optimizer, range(rank, rank + 1))
    return outcome(model, optimizer), [local(param.detach()) for param in model.parameters()]


SELECTED: dict[str, Any] = {"step_size": SelectedUpdates(), "momentum": 0.9}
CASES: dict[str, tuple[dict[str, Any], Placement, bool]] = {
    "Cholesky": ({"inverse": Cholesky(), "nesterov": True}, Placement.LAYERS, False),
    "Eigen": ({"inverse": Eigen(), "weight_decay": 0.01}, Placement.FACTORS, True),
    "EKFAC": ({"inverse": EKFAC(), "factor_update_period": 3, "momentum": 0.0}, Placement.LAYERS, False),
    "selected updates": (SELECTED, Placement.LAYERS, True),
    "momentum held back": ({"kl_clip": 1e-4, "lr": 0.5, "momentum": 0.95}, Placement.LAYERS, True),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(four_ranks: Ranks, case: str) -> None:
    answers = four_ranks.run(on_rank, *CASES[case])
    assert_close([each for each, _ in answers], alone(Uneven, 4, **CASES[case][0]))


def of_added(rank: int) -> Outcome:
    model = adding(sharded(hybrid()))
    optimizer = KFACOptimizer(model, **DEFAULTS)
    train(model, optimizer, range(rank, rank + 1), shares=4)
    return outcome(model, optimizer)


def test_gradients_that_are_added_are_those_of_one_loss(four_ranks: Ranks) -> None:
    assert_close(four_ranks.run(of_added), alone(Uneven, 4))


def test_copies_stay_the_same_bit_for_bit(four_ranks: Ranks) -> None:
    parts = [each for _, each in four_ranks.run(on_rank, {}, Placement.LAYERS, False)]
    for one, other in ((0, 2), (1, 3)):
        assert all(map(torch.equal, parts[one], parts[other]))


def clipping(_: int, order: float) -> None:
    model, bare = sharded(hybrid()), seeded(Uneven)
    optimizer = KFACOptimizer(model)
    loss(model, batch(0, 0)).backward()
    loss(bare, batch(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.1, order)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1, order), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_is_that_of_one_process(four_ranks: Ranks, order: float) -> None:
    four_ranks.run(clipping, order)


def bytes_of_steps(rank: int) -> tuple[list[float], Any]:
    model = sharded(hybrid())
    optimizer = KFACOptimizer(model, **DEFAULTS, distributed=DistributedConfig(bucket_bytes=300))
    train(model, optimizer, range(rank, rank + 1), range(3))
    for block in optimizer._binding.coverage.blocks:
        block.clock.folds = block.clock.folds_at_refresh = 10**6
    sent: list[float] = []
    for step in range(3, 6):
        optimizer.zero_grad()
        loss(model, batch(rank, step)).backward()
        with counted_bytes() as counted:
            optimizer.step()
        sent += counted
    return sent, optimizer.plan()


def test_bytes_are_those_of_the_plan(four_ranks: Ranks) -> None:
    answers = four_ranks.run(bytes_of_steps)
    assert sum(sum(sent) for sent, _ in answers) == 3 * answers[0][1].bytes_per_step


def resumed(rank: int, options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    """A run that goes through, and one that goes on from its checkpoint, at a step that does not refresh."""
    model, mine = sharded(hybrid()), range(rank, rank + 1)
    optimizer = KFACOptimizer(model, **(DEFAULTS | options))
    train(model, optimizer, mine, range(4))
    optimizer.consolidate_state_dict(to=None)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, mine, range(4, 8))
    other = sharded(hybrid())
    other.load_state_dict(weights)
    again = KFACOptimizer(other, **(DEFAULTS | options))
    again.load_state_dict(state)
    train(other, again, mine, range(4, 8))
    return outcome(model, optimizer), outcome(other, again)


@pytest.mark.parametrize("options", [{}, SELECTED], ids=str)
def test_resuming_goes_on_as_if_nothing_had_been(four_ranks: Ranks, options: dict[str, Any]) -> None:
    straight, again = four_ranks.run(resumed, options)[0]
    assert_close([again], straight)


def of_half_a_world(rank: int) -> tuple[str, Outcome]:
    """Each half of the ranks trains a model of its own, on a mesh that no process group has all of."""
    meshes = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("model", "replicate", "shard"))
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = sharded(meshes["replicate", "shard"])
    with pytest.raises(NotImplementedError) as caught:
        KFACOptimizer(model, **DEFAULTS)
    optimizer = KFACOptimizer(model, **DEFAULTS, distributed=DistributedConfig(group=groups[rank // 2]))
    train(model, optimizer, range(rank % 2, rank % 2 + 1))
    return str(caught.value), outcome(model, optimizer)


def test_a_mesh_without_a_group_is_told_to_be_given_one(four_ranks: Ranks) -> None:
    answers = four_ranks.run(of_half_a_world)
    for rank, (message, _) in enumerate(answers):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert re.search(
            rf"'first'.* lie in shards on ranks .*group=dist\.new_group\({re.escape(str(ranks))}\)", message
        )
    for half in (answers[:2], answers[2:]):
        assert_close([each for _, each in half], alone(Uneven, 2))
