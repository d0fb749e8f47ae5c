"""Under DDP each rank has the statistics of one process on that rank's batch, under the names of the bare model."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import wrapped
from helpers.ranks import Ranks
from helpers.wrapped import (
    Branches,
    Checkpointed,
    Plain,
    assert_same,
    batch,
    factors,
    loss,
    mlp,
    plain_statistics,
    seeded,
    statistics,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer

NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "one layer": partial(nn.Linear, 3, 3), "branches": Branches}
LOOPS = (
    wrapped.once,
    wrapped.accumulated,
    wrapped.with_evaluations,
    wrapped.with_another_forward,
    wrapped.with_state_dict,
    wrapped.with_gradients_of_inputs,
)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


def of_loop(rank: int, net: str, flags: dict[str, Any], loop: wrapped.Loop) -> None:
    model = DistributedDataParallel(seeded(NETS[net]), **flags)
    optimizer = KFACOptimizer(model, distributed=False)
    loop(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(NETS[net], loop, rank))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("net", NETS)
def test_of_every_kind_of_layer(two_ranks: Ranks, net: str, flags: str, loop: wrapped.Loop) -> None:
    if flags == "static_graph" and loop is wrapped.accumulated:
        pytest.skip("torch fails where the first backward of a static graph is in no_sync")
    two_ranks.run(of_loop, net, FLAGS[flags], loop)


class Parting(nn.Module):
    """Its ranks take different layers; the last layer runs twice."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__()
        self.takes = takes
        self.first, self.other, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first if self.takes else self.other)(x)
        again: Tensor = self.last(self.last(h).tanh())
        return again


def of_parting(rank: int) -> list[str]:
    net = partial(Parting, takes=rank == 0)
    model = DistributedDataParallel(seeded(net), find_unused_parameters=True)
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    found = {name: pair for name, pair in statistics(optimizer).items() if pair[0].any()}
    expected = plain_statistics(net, wrapped.once, rank)
    assert_same(found, {name: pair for name, pair in expected.items() if pair[0].any()})
    return list(found)


def test_of_layers_that_only_some_ranks_run(two_ranks: Ranks) -> None:
    assert two_ranks.run(of_parting) == [["first", "last"], ["other", "last"]]


def of_steps(rank: int, net: str, flags: dict[str, Any]) -> None:
    """DDP rebuilds its buckets after the first backward, and keeps a static graph from then on."""
    model, plain = DistributedDataParallel(seeded(NETS[net]), **flags), seeded(NETS[net])
    ours, theirs = (
        KFACOptimizer(model, distributed=False, factor_update_period=1),
        KFACOptimizer(plain, distributed=False, factor_update_period=1),
    )
    for number in range(4):
        found = []
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            loss(each, batch(rank, number)).backward()
            found.append(statistics(optimizer))
        assert_same(*found)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("net", NETS)
def test_of_several_steps(two_ranks: Ranks, net: str, flags: str) -> None:
    two_ranks.run(of_steps, net, FLAGS[flags])


def of_checkpointing(rank: int, reentrant: bool, flags: dict[str, Any]) -> None:
    model = DistributedDataParallel(seeded(partial(Checkpointed, reentrant=reentrant)), **flags)
    optimizer = KFACOptimizer(model, distributed=False)
    wrapped.once(model, optimizer, rank)
    assert_same(statistics(optimizer), plain_statistics(Plain, wrapped.once, rank))


@pytest.mark.parametrize("flags", ["plain", "static_graph", "gradient_as_bucket_view"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_of_checkpointed_layers(two_ranks: Ranks, reentrant: bool, flags: str) -> None:
    two_ranks.run(of_checkpointing, reentrant, FLAGS[flags])


# -- names ---------------------------------------------------------------------------------------------------------


def within_checkpoint(model: nn.Module) -> nn.Module:
    """One layer of it is checkpointed, whatever it is."""
    for name, child in list(model.named_children())[:1]:
        setattr(model, name, checkpoint_wrapper(child))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "checkpointed": within_checkpoint,
    "ddp of checkpointed": lambda model: DistributedDataParallel(within_checkpoint(model)),
}
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda wrapper: wrapper,
    "module": lambda wrapper: wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper,
    "parameters": lambda wrapper: wrapper.parameters(),
    "named parameters": lambda wrapper: list(wrapper.named_parameters()),
}


def net_for(wrapper: str) -> Callable[[], nn.Module]:
    """Torch warns of itself where it traces the other."""
    return mlp if "compiled" in wrapper else Branches


def names_of(optimizer: KFACOptimizer) -> list[Any]:
    blocks = optimizer._binding.coverage.blocks
    parameters = sorted(optimizer._binding.names().values())
    return [parameters, *((block.name, block.param_names) for block in blocks)]


def of_names(rank: int, wrapper: str, given: str) -> None:
    torch.compiler.reset()
    with warnings.catch_warnings():
        # Torch's own, where it traces.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        check_names(rank, wrapper, given)


def check_names(rank: int, wrapper: str, given: str) -> None:
    net = net_for(wrapper)
    bare, model = seeded(net), WRAPPERS[wrapper](seeded(net))
    theirs = KFACOptimizer(bare, distributed=False)
    ours = KFACOptimizer(GIVEN[given](model), distributed=False)
    for each, optimizer in ((bare, theirs), (model, ours)):
        wrapped.once(each, optimizer, rank)
        statistics(optimizer)
    assert names_of(ours) == names_of(theirs)
    # A checkpoint moves between the wrapped and the bare model; some layers only a forward shows.
    for of, into in ((ours, seeded(net)), (theirs, WRAPPERS[wrapper](seeded(net)))):
        fresh = KFACOptimizer(into, distributed=False)
        fresh.load_state_dict(of.state_dict())
        into(batch(rank))
        assert_same(factors(fresh), factors(of))


@pytest.mark.parametrize(
    ("wrapper", "given"),
    # Torch warns of hooks on all modules, by which a model is found, where one is compiled.
    [(wrapper, given) for wrapper in WRAPPERS for given in GIVEN if "compiled" not in wrapper or "param" not in given],
)
def test_names_are_those_of_the_bare_model(two_ranks: Ranks, wrapper: str, given: str) -> None:
    two_ranks.run(of_names, wrapper, given)


def of_patterns(_: int, wrapper: str) -> None:
    model = WRAPPERS[wrapper](seeded(Branches))
    found, bare = (
        KFACOptimizer(each, distributed=False, skip_layers=("attention*", "conv")) for each in (model, seeded(Branches))
    )
    assert names_of(found) == names_of(bare)
    assert not any(block.name.startswith(("attention", "conv")) for block in found._binding.coverage.blocks)
    with pytest.raises(ValueError, match=r"'module\.\*' matches no module"):
        KFACOptimizer(model, distributed=False, skip_layers=("module.*",))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_patterns_are_of_the_names_of_the_bare_model(two_ranks: Ranks, wrapper: str) -> None:
    two_ranks.run(of_patterns, wrapper)
