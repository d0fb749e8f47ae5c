"""Under FSDP2 each rank has the statistics of one process on that rank's batch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import wrapped
from helpers.ranks import Ranks
from helpers.wrapped import (
    Branches,
    Checkpointed,
    Plain,
    assert_same,
    batch,
    loss,
    mlp,
    plain_statistics,
    seeded,
    statistics,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from kfac_optim import KFACOptimizer, MonteCarlo

Shard = Callable[[nn.Module, DeviceMesh], None]
# Not attention and recurrent layers, which return views: torch warns of these. They go with the model.
ALONE = (nn.Linear, nn.Conv1d, nn.LayerNorm)


def root_only(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def nested(model: nn.Module, mesh: DeviceMesh, *, reshard: bool = True) -> None:
    """Layers for themselves, which are gathered again for their backward."""
    for child in model.children():
        if isinstance(child, ALONE):
            fully_shard(child, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def nested_and_kept(model: nn.Module, mesh: DeviceMesh) -> None:
    """Layers for themselves, gathered until their backward."""
    nested(model, mesh, reshard=False)


SHARDS: tuple[Shard, ...] = (root_only, nested, nested_and_kept)
NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "one layer": partial(nn.Linear, 3, 3), "branches": Branches}
LOOPS = (
    wrapped.once,
    wrapped.accumulated,
    wrapped.with_evaluations,
    wrapped.with_another_forward,
    wrapped.with_state_dict,
    wrapped.with_gradients_of_inputs,
)


def flat(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def of_loop(rank: int, net: str, shard: Shard, loop: wrapped.Loop) -> None:
    model = seeded(NETS[net])
    shard(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False)
    loop(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(NETS[net], loop, rank))


# Each net in each way of sharding, with half of the loops in turn.
KINDS = [
    (net, shard, loop)
    for row, net in enumerate(NETS)
    for column, shard in enumerate(SHARDS)
    for number, loop in enumerate(LOOPS)
    if (row + column + number) % 2 == 0
]


@pytest.mark.parametrize(("net", "shard", "loop"), KINDS, ids=lambda each: getattr(each, "__name__", each))
def test_of_every_kind_of_layer(two_ranks: Ranks, net: str, shard: Shard, loop: wrapped.Loop) -> None:
    two_ranks.run(of_loop, net, shard, loop)


def of_hybrid(rank: int) -> None:
    model = seeded(Branches)
    nested(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(Branches, wrapped.once, rank))


def test_of_shards_that_are_replicated(four_ranks: Ranks) -> None:
    four_ranks.run(of_hybrid)


def of_checkpointing(rank: int, shard: Shard, reentrant: bool, wrapper: bool) -> None:
    if wrapper:
        model = seeded(Plain)
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        model.hidden = checkpoint_wrapper(model.hidden, checkpoint_impl=kind)
    else:
        model = seeded(partial(Checkpointed, reentrant=reentrant))
    shard(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.with_another_forward(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(Plain, wrapped.once, rank))


@pytest.mark.parametrize("wrapper", [False, True], ids=["function", "wrapper"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.__name__)
def test_of_checkpointed_layers(two_ranks: Ranks, shard: Shard, reentrant: bool, wrapper: bool) -> None:
    two_ranks.run(of_checkpointing, shard, reentrant, wrapper)


def of_low_precision(rank: int) -> None:
    """Rows are rounded to bfloat16 on the way, nothing else is: factors have the dtype of the sharded parameter."""
    model = seeded(mlp)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model[4], model):
        fully_shard(module, mesh=flat(2), mp_policy=policy)
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    found = statistics(optimizer)
    assert_same(found, plain_statistics(mlp, wrapped.once, rank), tolerance=0.05)
    rows = batch(rank).bfloat16().double()
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(found["0"][0].squeeze(0), rows.mT @ rows / len(rows), rtol=1e-12, atol=1e-12)


def test_of_a_model_that_computes_in_low_precision(two_ranks: Ranks) -> None:
    two_ranks.run(of_low_precision)


def freezing(net: Callable[[], nn.Module]) -> nn.Module:
    model = net()
    model[2].requires_grad_(False)
    return model


def of_frozen_layer(rank: int, shard: Shard) -> None:
    net = partial(freezing, mlp)
    model = seeded(net)
    shard(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False, factor_update_period=1)
    wrapped.once(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(net, wrapped.once, rank))
    wrapped.evaluate(model, rank)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model[2].requires_grad_(True)
    optimizer.zero_grad()
    wrapped.once(model, optimizer, rank)
    assert list(statistics(optimizer)) == ["0", "2", "4"]


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.__name__)
def test_of_a_layer_that_is_frozen_and_then_not(two_ranks: Ranks, shard: Shard) -> None:
    two_ranks.run(of_frozen_layer, shard)


def of_layers_added(rank: int, shard: Shard) -> None:
    """Layers are looked for while an evaluation has left parameters gathered."""
    model = seeded(Branches)
    shard(model, flat(2))
    first, *others = model.named_parameters()
    optimizer = KFACOptimizer([first], model=model, distributed=False)
    wrapped.evaluate(model, rank)
    optimizer.add_param_group({"params": others})
    wrapped.once(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(Branches, wrapped.once, rank))


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.__name__)
def test_of_layers_that_are_added_after_an_evaluation(two_ranks: Ranks, shard: Shard) -> None:
    two_ranks.run(of_layers_added, shard)


class Borrowing(nn.Module):
    """Runs a layer as it is, and once more with weights of another layer for its own."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 1)
        self.lender = nn.Conv1d(3, 3, 1)
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.mT[None]).tanh()
        lent = {"weight": self.lender.weight.exp(), "bias": self.lender.bias.exp()}
        if self.written_out:
            return F.conv1d(h, lent["weight"], lent["bias"])
        borrowed: Tensor = torch.func.functional_call(self.layer, lent, h)
        return borrowed


def of_functional_call(rank: int) -> None:
    model = seeded(partial(Borrowing, written_out=False))
    root_only(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    expected = plain_statistics(partial(Borrowing, written_out=True), wrapped.once, rank)
    found = statistics(optimizer)
    assert_same({"layer": found["layer"]}, {"layer": expected["layer"]})


def test_of_a_layer_that_runs_with_other_weights_too(two_ranks: Ranks) -> None:
    two_ranks.run(of_functional_call)


class Reaching(nn.Module):
    """Uses a layer's weight in a function too, which is not measured."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 1)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.mT[None])
        mapped: Tensor = self.last(F.conv1d(h, self.conv.weight)[0].mT)
        return mapped


def of_unmeasured_use(rank: int) -> None:
    model = seeded(Reaching)
    root_only(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    with pytest.warns(UserWarning, match="'conv.weight' is used by conv1d in a way that is not measured"):
        assert list(statistics(optimizer)) == ["last"]


def test_of_a_weight_that_is_used_out_of_sight(two_ranks: Ranks) -> None:
    two_ranks.run(of_unmeasured_use)


def of_estimate(rank: int) -> None:
    """Gradients of our own, through the graph of the training loop."""
    found = []
    for sharded in (True, False):
        model = seeded(mlp)
        if sharded:
            root_only(model, flat(2))
        optimizer = KFACOptimizer(model, distributed=False, estimate=MonteCarlo(nn.MSELoss()))
        torch.manual_seed(rank)
        loss(model, batch(rank)).backward()
        found.append(statistics(optimizer))
    assert_same(*found)


def test_of_gradients_that_an_estimate_draws(two_ranks: Ranks) -> None:
    two_ranks.run(of_estimate)


def of_gathered_parameters(rank: int) -> str:
    model = seeded(mlp)
    root_only(model, flat(2))
    optimizer = KFACOptimizer(model, distributed=False)
    names = list(optimizer._binding.names().values())
    summary = str(optimizer.summary())
    wrapped.evaluate(model, rank)
    assert isinstance(model, FSDPModule)
    assert type(model[0].weight) is nn.Parameter, "the root is gathered now"
    assert list(optimizer._binding.names().values()) == names
    assert str(optimizer.summary()) == summary
    with pytest.raises(RuntimeError, match=r"'0\.weight' is kept in shards.*reshard\(\)"):
        KFACOptimizer(model, distributed=False)
    found = KFACOptimizer(list(model.parameters()), distributed=False)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is kept in shards.*reshard\(\)"):
        model(batch(rank))
    del found
    model.reshard()
    KFACOptimizer(model, distributed=False)
    return summary


def test_parameters_that_are_gathered_keep_their_names_and_are_refused(two_ranks: Ranks) -> None:
    (summary, _) = two_ranks.run(of_gathered_parameters)
    assert all(name in summary for name in ("0.weight", "2.weight", "4.weight"))
