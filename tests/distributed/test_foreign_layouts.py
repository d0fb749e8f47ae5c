"""Parameters that torch lays out over ranks in other ways: refused by name, once, and the advice works."""

import re
import warnings
from ast import literal_eval
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Sharded
from kfac_optim.utils.sharded_params import is_sharded

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def batch(number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """On the examples of this number."""
    for step in range(3):
        optimizer.zero_grad()
        model(batch(number, step)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    params = [param.detach() for param in model.parameters()]
    return [param.full_tensor() if is_sharded(param) else param.clone() for param in params]


def alone(examples: int = 1, **options: Any) -> list[Tensor]:
    """One process, which trains on the examples of the first numbers."""
    model = net()
    optimizer = KFACOptimizer(model, **OPTIONS, **options)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.cat([batch(number, step) for number in range(examples)])).square().mean().backward()
        optimizer.step()
    return whole(model)


def compare(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for params in found:
        for number, (ours, theirs) in enumerate(zip(params, expected, strict=True)):
            close(ours, theirs, f"parameter {number}", 1e-12)


def told(build: Callable[[], KFACOptimizer], forward: Callable[[], Any] | None = None) -> str:
    """What is raised as the optimizer is built, or else by `forward`."""
    try:
        build()
        if forward is not None:
            forward()
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return "nothing"


# -- FSDP1 -------------------------------------------------------------------------------------------------------------


def flat(*, views: bool, sharding: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net(), use_orig_params=views, device_id=torch.device("cpu"), sharding_strategy=sharding
    )


def of_flat(_: int, views: bool) -> list[str]:
    config = DistributedConfig(strategy=Sharded())
    model = flat(views=views)
    copied = flat(views=views, sharding=ShardingStrategy.NO_SHARD)
    return [
        told(lambda: KFACOptimizer(model, lr=0.1)),
        told(lambda: KFACOptimizer(model, lr=0.1, distributed=config)),
        told(lambda: KFACOptimizer(model, lr=0.1, distributed=False)),
        told(lambda: KFACOptimizer(list(model.parameters()), lr=0.1, distributed=config)),
        told(lambda: KFACOptimizer(copied, lr=0.1)),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("views", [False, True], ids=["flat", "views"])
def test_flat_parameters_are_refused_by_name(two_ranks: Ranks, views: bool) -> None:
    for rank in two_ranks.run(quietly, of_flat, views):
        for number, message in enumerate(rank):
            assert re.match(r"kfac_optim: .*FullyShardedDataParallel.*fully_shard", message), (number, message)
            assert "Sharded()" not in message
            assert not views or number == 3 or "'0.weight'" in message


def quietly(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Where torch itself warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(rank, *args)


def of_later_flat(rank: int) -> str:
    model = net()
    optimizer = KFACOptimizer(model, lr=0.1)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    wrapped(batch(rank, 0)).square().mean().backward()
    return told(lambda: optimizer, optimizer.step)


def test_a_model_that_is_flattened_after_the_optimizer_was_built_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(quietly, of_later_flat):
        assert re.match(r"kfac_optim: .*FullyShardedDataParallel.*fully_shard", message), message


# -- ranks that hold different parameters ----------------------------------------------------------------------------


def of_zero(rank: int) -> tuple[str, list[Tensor]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=KFACOptimizer, lr=0.1)
    message = told(lambda: optimizer, lambda: train(model, optimizer, rank))
    instead = DistributedDataParallel(net())
    train(instead, KFACOptimizer(instead, **OPTIONS, distributed=DistributedConfig(strategy=Sharded())), rank)
    return message, whole(instead)


def test_zero_redundancy_optimizer_is_refused_by_name_and_sharded_takes_its_place(two_ranks: Ranks) -> None:
    answers = two_ranks.run(quietly, of_zero)
    for message, _ in answers:
        assert re.match(r"kfac_optim: .*ZeroRedundancyOptimizer.*Sharded\(\)", message), message
        assert "Build the same model" not in message
    compare([params for _, params in answers], alone(2))


def of_rank_without_parameters(rank: int) -> str:
    optimizer = KFACOptimizer([{"params": list(net().parameters()) if rank == 0 else []}], lr=0.1)
    return told(lambda: optimizer, optimizer.step)


def test_a_rank_without_any_parameter_is_told_of(two_ranks: Ranks) -> None:
    for message in two_ranks.run(quietly, of_rank_without_parameters, timeout=20):
        assert re.match(r"kfac_optim: .*'parameter 0'.*ZeroRedundancyOptimizer", message), message


def stage(number: int) -> nn.Sequential:
    """A half of `net`."""
    return net()[:2] if number == 0 else net()[2:]


def through(part: nn.Module, number: int, ranks: tuple[int, int], x: Tensor) -> None:
    """Forward and backward of this half of a pipeline."""
    if number == 0:
        h = part(x)
        dist.send(h.detach(), ranks[1])
        gradient = torch.empty_like(h)
        dist.recv(gradient, ranks[1])
        h.backward(gradient)
    else:
        h = torch.empty(len(x), 6, dtype=torch.float64)
        dist.recv(h, ranks[0])
        h.requires_grad_()
        part(h).square().mean().backward()
        assert h.grad is not None
        dist.send(h.grad, ranks[0])


def of_stages(rank: int, remedied: bool) -> tuple[str, list[Tensor]]:
    """Two pipelines of two stages, stages of one number on ranks that train them together."""
    pairs = dist.get_world_size() // 2
    number, pipeline = rank // pairs, rank % pairs
    groups = [dist.new_group([stage * pairs + each for each in range(pairs)]) for stage in range(2)]
    config: DistributedConfig | bool | None = None
    if remedied:
        config = DistributedConfig(strategy=Sharded(), group=groups[number]) if pairs > 1 else False
    bare = stage(number)
    part = bare if pairs == 1 else DistributedDataParallel(bare, process_group=groups[number])
    optimizer = KFACOptimizer(part, **OPTIONS, kl_clip=None, distributed=config)
    message = "nothing"
    for step in range(3 if remedied else 1):
        optimizer.zero_grad()
        through(part, number, (pipeline, pairs + pipeline), batch(pipeline, step))
        message = told(lambda: optimizer, optimizer.step)
    return message, whole(bare)


def test_pipeline_stages_are_told_what_to_do(two_ranks: Ranks) -> None:
    for message, _ in two_ranks.run(of_stages, False):
        assert re.match(r"kfac_optim: .*pipeline.*distributed=False.*DistributedConfig\(group=", message), message
        assert "Build the same model" not in message


@pytest.mark.parametrize("pairs", [1, 2])
def test_pipeline_stages_train_as_they_are_told(pairs: int, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue("two_ranks" if pairs == 1 else "four_ranks")
    answers = ranks.run(of_stages, True)
    assert {message for message, _ in answers} == {"nothing"}
    expected = alone(pairs, kl_clip=None)
    halves = expected[:2], expected[2:]
    for rank, (_, params) in enumerate(answers):
        compare([params], halves[rank // pairs])


# -- tensor parallelism ----------------------------------------------------------------------------------------------


COLUMNS_AND_ROWS = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def parallel(how: str) -> nn.Module:
    model, ranks = net(), dist.get_world_size()
    if how == "columns":  # laid out as fully_shard has rows
        one = init_device_mesh("cpu", (ranks,))
        return parallelize_module(model, one, {"0": ColwiseParallel(output_layouts=Replicate())})
    if how == "tensor":
        return parallelize_module(model, init_device_mesh("cpu", (ranks,)), COLUMNS_AND_ROWS)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], COLUMNS_AND_ROWS)
    if how == "tensor beside copies":
        return model
    return DistributedDataParallel(model, device_mesh=mesh["dp"])


def of_parallel(_: int, how: str, own: bool) -> tuple[list[str], list[Tensor] | None]:
    """What is told until what was told is done, and what is trained then; all ranks share one batch."""
    choices: dict[str, Any] = {"distributed": False} if own else {}
    messages: list[str] = []
    model = parallel(how)
    for _ in range(3):
        optimizer: list[KFACOptimizer] = []
        message = told(lambda: optimizer.append(KFACOptimizer(model, **OPTIONS, **choices)))  # noqa: B023
        if message == "nothing":
            train(model, optimizer[0])
            return messages, whole(model)
        messages.append(message)
        if skipped := re.search(r"skip_layers=(\[.*?\])", message):
            choices["skip_layers"] = literal_eval(skipped[1])
        elif "group=mesh.get_group()" in message:
            mesh = next(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
            choices["distributed"] = DistributedConfig(group=mesh.get_group())
    return messages, None


# Six rows of layer 0 are no even shards on four ranks; who averages over copies of the shards is not known.
PARALLEL = {
    "columns": (r"kfac_optim: the parameters of '0' are .*tensor parallelism.*even.*skip_layers=\['0'\]\.$", ["0"]),
    "tensor beside copies": (r"kfac_optim: Ranks \[0, 1, 2, 3\] .*'0', '2' lie in shards on ranks .*get_group\(\)", []),
}


@pytest.mark.parametrize("how", PARALLEL)
def test_other_layouts_are_refused_once_and_train_as_they_are_told(four_ranks: Ranks, how: str) -> None:
    words, skipped = PARALLEL[how]
    answers = four_ranks.run(quietly, of_parallel, how, False)
    for messages, _ in answers:
        assert len(messages) == 1
        assert re.match(words, messages[0]), messages
    compare([params for _, params in answers if params], alone(skip_layers=skipped))


def test_one_process_alone_is_told_of_layers_to_skip(two_ranks: Ranks) -> None:
    answers = two_ranks.run(quietly, of_parallel, "tensor", True)
    for messages, _ in answers:
        assert len(messages) == 1
        assert re.match(r"kfac_optim: the parameters of '0' are sharded, and no process alone", messages[0])
    compare([params for _, params in answers if params], alone(skip_layers=["0", "2"]))


def of_plain_pieces(_: int) -> str:
    """DistributedDataParallel with a mesh puts plain tensors, each rank's own, in the place of DTensors."""
    return told(lambda: KFACOptimizer(parallel("tensor and DDP"), lr=0.1))


def test_pieces_that_look_like_whole_parameters_are_refused(four_ranks: Ranks) -> None:
    for message in four_ranks.run(quietly, of_plain_pieces):
        assert re.match(r"kfac_optim: the parameters of '0', '2' are .*tensor parallelism.*skip_layers=", message)


def of_layouts(_: int) -> list[str]:
    """What is told of layers that are cut, or not, in ways that neither fully_shard nor tensor parallelism has."""
    line, plane = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    corner = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))["b", "c"]
    config = DistributedConfig(strategy=Sharded())
    some, apart, convolution, crossed = net(), net(), nn.Sequential(nn.Conv1d(2, 4, 1)), net()
    fully_shard(some[0], mesh=line)
    fully_shard(apart, mesh=corner)
    convolution[0].weight = nn.Parameter(distribute_tensor(convolution[0].weight, line, [Shard(1)]))
    crossed[0].weight = nn.Parameter(distribute_tensor(crossed[0].weight, plane, [Replicate(), Shard(1)]))
    models = some, apart, convolution, crossed
    return [told(lambda: KFACOptimizer(model, lr=0.1, distributed=config)) for model in models]  # noqa: B023


def test_layers_that_are_cut_in_other_ways_are_refused_with_what_to_do(two_ranks: Ranks) -> None:
    for some, apart, convolution, crossed in two_ranks.run(quietly, of_layouts):
        assert "the parameters of '2', '4' are not sharded, while those of other layers are. Wrap these" in some
        assert re.search(r"'0', '2', '4' lie in shards on ranks \[[01]\].*pass DistributedConfig\(group=dist", apart)
        for message in (convolution, crossed):
            assert re.search(
                r"the parameters of '0' are laid out over ranks as tensor par.*skip_layers=\['0'\]", message
            )


def of_sharded_beside_pieces(_: int) -> str:
    config = DistributedConfig(strategy=Sharded())
    return told(lambda: KFACOptimizer(parallel("tensor"), lr=0.1, skip_layers=["0", "2"], distributed=config))


def test_owners_of_whole_parameters_are_refused_where_some_are_in_pieces(two_ranks: Ranks) -> None:
    for message in two_ranks.run(quietly, of_sharded_beside_pieces):
        assert re.match(r"kfac_optim: Sharded\(\) gathers whole parameters.*Use Replicated\(\)", message), message
