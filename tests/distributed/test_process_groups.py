"""Which ranks train together, and process groups of our own: shared, kept, and none more than are needed."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import Mixed, build, close, examples, share, squares
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded, StatisticsWorkers, statistics_workers
from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.communication.process_groups import own_groups, timeout_of, world
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.utils.autograd import in_backward

PAIRS = [0, 1], [2, 3]
NUMBERS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 2}

each_strategy = pytest.mark.parametrize("strategy", [Replicated(), Replicated(0.5), Sharded()], ids=str)


def pair_of(rank: int) -> dist.ProcessGroup:
    """The group of a pair of ranks; all of them come here together."""
    return [dist.new_group(ranks) for ranks in PAIRS][rank // 2]


def train(
    model: nn.Module, optimizer: KFACOptimizer, pair: int, rank: int | None, steps: Sequence[int] = range(5)
) -> None:
    """Each pair has examples of its own; `rank` is that within the pair, and None has those of both."""
    for step in steps:
        x, y = examples(step, micro=pair)
        if rank is not None:
            x, y = share((x, y), [6, 6], rank)
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        optimizer.step()


def one_process_of(pair: int, net: Callable[[], nn.Module] = Mixed) -> list[Tensor]:
    model = build(net)
    train(model, KFACOptimizer(model, **NUMBERS), pair, None)
    return [param.detach() for param in model.parameters()]


def check_pairs(found: Sequence[Sequence[Tensor]], net: Callable[[], nn.Module] = Mixed) -> None:
    for pair, (first, second) in enumerate(PAIRS):
        assert all(map(torch.equal, found[first], found[second])), "the ranks of a pair have drifted apart"
        for number, (ours, alone) in enumerate(zip(found[first], one_process_of(pair, net), strict=True)):
            close(ours, alone, f"parameter {number} of pair {pair}", 1e-12)


# -- the group of what wraps the model ---------------------------------------------------------------------------


def on_pairs(rank: int, strategy: Strategy, given: str) -> list[Tensor]:
    pair = pair_of(rank)
    bare = build(Mixed)
    config = DistributedConfig(strategy=strategy)
    before = KFACOptimizer(bare, **NUMBERS, distributed=config) if given == "bare" else None
    model = DistributedDataParallel(bare, process_group=pair)
    params = model if given == "model" else model.parameters()
    optimizer = before or KFACOptimizer(params, **NUMBERS, distributed=config)
    train(model, optimizer, rank // 2, rank % 2)
    return [param.detach() for param in bare.parameters()]


@each_strategy
@pytest.mark.parametrize("given", ["model", "parameters", "bare"])
def test_two_pairs_of_ranks_train_two_models_wrapped_by_ddp(four_ranks: Ranks, given: str, strategy: Strategy) -> None:
    check_pairs(four_ranks.run(on_pairs, strategy, given))


def sharded_on_pairs(rank: int, given: str) -> list[Tensor]:
    pair = pair_of(rank)
    model = build(Mixed)
    mesh = DeviceMesh.from_group(pair, "cpu")
    for layer in (model.first, model.hidden, model.last, model):
        fully_shard(layer, mesh=mesh)
    optimizer = KFACOptimizer(model if given == "model" else model.parameters(), **NUMBERS)
    train(model, optimizer, rank // 2, rank % 2)
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("given", ["model", "parameters"])
def test_two_pairs_of_ranks_train_two_models_sharded_by_fsdp2(four_ranks: Ranks, given: str) -> None:
    check_pairs(four_ranks.run(sharded_on_pairs, given))


def alone(rank: int) -> list[Tensor]:
    bare = build(Mixed)
    model = DistributedDataParallel(bare, process_group=[dist.new_group([each]) for each in range(2)][rank])
    train(model, KFACOptimizer(model, **NUMBERS), rank, None)
    return [param.detach() for param in bare.parameters()]


def test_a_wrapper_of_a_single_rank_makes_it_train_alone(two_ranks: Ranks) -> None:
    for rank, params in enumerate(two_ranks.run(alone)):
        for ours, expected in zip(params, one_process_of(rank), strict=True):
            close(ours, expected, f"rank {rank}", 1e-12)


def turned(rank: int) -> list[Tensor]:
    """In a group whose order of ranks is not that of their numbers."""
    group = dist.new_group([1, 0], sort_ranks=False)
    bare = build(Mixed)
    model = DistributedDataParallel(bare, process_group=group)
    train(model, KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=Sharded())), 0, rank)
    return [param.detach() for param in bare.parameters()]


def test_ranks_may_have_another_order_in_their_group(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(turned)
    for one, other, expected in zip(first, second, one_process_of(0), strict=True):
        assert torch.equal(one, other)
        close(one, expected, "a parameter", 1e-12)


def of_another_group(rank: int, given: str) -> str:
    config = DistributedConfig(group=dist.new_group([0, 1, 2, 3]))
    model = DistributedDataParallel(build(Mixed), process_group=pair_of(rank))
    try:
        optimizer = KFACOptimizer(model if given == "model" else model.parameters(), **NUMBERS, distributed=config)
        train(model, optimizer, 0, rank % 2)
    except RuntimeError as error:
        return str(error)
    return ""


def of_another_mesh(rank: int) -> str:
    config = DistributedConfig(group=dist.new_group([0, 1, 2, 3]))
    model = nn.Sequential(nn.Linear(4, 2))
    fully_shard(model, mesh=DeviceMesh.from_group(pair_of(rank), "cpu"))
    try:
        KFACOptimizer(model, **NUMBERS, distributed=config)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_another_group_than_that_of_the_mesh_is_refused(four_ranks: Ranks) -> None:
    for rank, message in enumerate(four_ranks.run(of_another_mesh)):
        assert f"lie in shards on ranks {PAIRS[rank // 2]}. Have these train together: leave group" in message


@pytest.mark.parametrize("given", ["model", "parameters"])
def test_another_group_than_that_of_the_wrapper_is_refused(four_ranks: Ranks, given: str) -> None:
    for rank, message in enumerate(four_ranks.run(of_another_group, given)):
        assert message == (
            f"kfac_optim: the model is wrapped by DistributedDataParallel on the ranks {PAIRS[rank // 2]}, but its "
            "DistributedConfig(group=...) names the ranks [0, 1, 2, 3]. Leave group out, then it is that of the "
            "wrapper; or wrap the model on the same ranks."
        )


def wrapped_on_others_later(rank: int) -> str:
    bare = build(Mixed)
    optimizer = KFACOptimizer(bare, **NUMBERS, distributed=DistributedConfig(strategy=Sharded()))
    train(bare, optimizer, 0, rank % 2, range(1))
    model = DistributedDataParallel(bare, process_group=pair_of(rank))
    try:
        train(model, optimizer, 0, rank % 2, range(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_wrapper_on_other_ranks_than_have_trained_is_refused(four_ranks: Ranks) -> None:
    for message in four_ranks.run(wrapped_on_others_later):
        assert "has begun to train it on the ranks [0, 1, 2, 3]. Wrap the model before the first step" in message


def on_a_destroyed_group(rank: int) -> tuple[list[str], list[Tensor]]:
    """What is said of such a group, and by an optimizer that is still there; then it is released."""
    bare, group, said = build(Mixed), dist.new_group([0, 1]), []
    model = DistributedDataParallel(bare, process_group=group)
    old = KFACOptimizer(model, **NUMBERS)
    train(model, old, 0, rank, range(1))
    dist.destroy_process_group(group)
    for arguments in ({"group": group}, {"group": dist.group.WORLD, "pipeline": group}):
        try:
            DistributedConfig(**arguments)
        except RuntimeError as error:
            said.append(str(error))
    bare.load_state_dict(build(Mixed).state_dict())
    model = DistributedDataParallel(bare)
    for _ in range(2):
        try:
            train(model, KFACOptimizer(model, **NUMBERS), 0, rank)
            break
        except RuntimeError as error:
            said.append(str(error))
        old.remove_hooks()
    return said, [param.detach() for param in bare.parameters()]


def test_a_destroyed_group_is_refused_by_name_and_the_remedy_works(two_ranks: Ranks) -> None:
    for said, params in two_ranks.run(on_a_destroyed_group):
        assert len(said) == 3
        for message in said:
            assert "was destroyed. Call remove_hooks() on the optimizer that was built on it" in message
        for ours, expected in zip(params, one_process_of(0), strict=True):
            close(ours, expected, "a parameter", 1e-12)


# -- groups of our own -------------------------------------------------------------------------------------------


def open_things() -> tuple[int, int, int]:
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(dist.distributed_c10d._world.pg_map),
    )


def one_after_the_other(rank: int, strategy: Strategy, count: int) -> tuple[object, object]:
    before: object = None
    for number in range(count):
        model = DistributedDataParallel(build(Mixed))
        optimizer = KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(strategy=strategy))
        train(model, optimizer, 0, rank, range(2))
        del model, optimizer
        if number == 1:
            before = open_things()
    return before, open_things()


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_optimizers_that_come_and_go_leave_no_file_thread_or_group_behind(
    two_ranks: Ranks, strategy: Strategy, count: int
) -> None:
    for before, after in two_ranks.run(one_after_the_other, strategy, count):
        assert before == after


def never_stepped(_: int) -> tuple[object, object]:
    before = open_things()
    optimizers = [KFACOptimizer(build(Mixed), **NUMBERS) for _ in range(3)]
    return before, (open_things(), len(optimizers))[0]


def test_an_optimizer_that_takes_no_step_makes_no_group(two_ranks: Ranks) -> None:
    for before, after in two_ranks.run(never_stepped):
        assert before == after


def let_go_at_other_times(rank: int) -> tuple[list[Tensor], int]:
    """Rank 0 keeps an old optimizer; rank 1 has sent sums of another in a backward whose step never came."""
    kept = []
    for number in range(3):
        model = DistributedDataParallel(build(Mixed))
        optimizer = KFACOptimizer(model, **{**NUMBERS, "inverse_update_period": 1})
        train(model, optimizer, 0, rank, range(2))
        if number == 0 and rank == 0:
            kept.append(optimizer)
        if number == 1:
            if rank == 0:
                optimizer.remove_hooks()
            x, y = share(examples(2), [6, 6], rank)
            squares(model(x), y).mean().backward()
        del model, optimizer
    groups = own_groups(dist.group.WORLD, timeout_of(dist.group.WORLD, torch.device("cpu")))
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    train(model, KFACOptimizer(model, **NUMBERS), 0, rank)
    return [param.detach() for param in bare.parameters()], len(groups._lent)


def test_ranks_may_let_go_of_optimizers_at_other_times() -> None:
    ranks = Ranks(2)
    try:
        (first, lent), (second, _) = ranks.run(let_go_at_other_times)
    finally:
        ranks.stop()
    assert lent == 3, "one that a rank keeps, one with a collective that one rank alone has launched, one to go on"
    for one, other, expected in zip(first, second, one_process_of(0), strict=True):
        assert torch.equal(one, other)
        close(one, expected, "a parameter", 1e-12)


def sums_in_another_order(rank: int | None) -> list[Tensor]:
    """Two optimizers, through whose models one backward goes, in another order on each rank."""
    bare = [build(Mixed), build(Mixed)]
    models: list[nn.Module] = list(bare)
    if rank is not None:  # DDP sends in the order of backwards as well
        models = [DistributedDataParallel(each, process_group=dist.new_group()) for each in bare]
    optimizers = [KFACOptimizer(model, **{**NUMBERS, "inverse_update_period": 1}) for model in models]
    for step in range(5):
        # A backward goes the way back. DDP itself needs one order until it has rebuilt its buckets.
        order = (1, 0) if rank == 1 and step > 1 else (0, 1)
        losses = []
        for number in order:
            x, y = examples(step, number)
            if rank is not None:
                x, y = share((x, y), [6, 6], rank)
            optimizers[number].zero_grad()
            losses.append(squares(models[number](x), y).mean())
        sum(losses, torch.zeros(())).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach() for each in bare for param in each.parameters()]


def test_two_optimizers_may_send_sums_in_another_order_on_each_rank(two_ranks: Ranks) -> None:
    for params in two_ranks.run(sums_in_another_order):
        for ours, expected in zip(params, sums_in_another_order(None), strict=True):
            close(ours, expected, "a parameter", 1e-12)


def launched_in_backward(rank: int) -> tuple[list[str], list[tuple[bool, str]]]:
    """Buckets of sums in the order of their launches, and where and when all-to-alls were launched."""
    model = DistributedDataParallel(build(Mixed))
    trace: list[str] = []
    config = DistributedConfig(strategy=Sharded(), observe=lambda launch: trace.append(launch.name), bucket_bytes=300)
    optimizer = KFACOptimizer(model, **{**NUMBERS, "inverse_update_period": 1}, distributed=config)
    train(model, optimizer, 0, rank, range(2))
    trace.clear()
    ranks, seen = optimizer._executor.ranks, []
    groups = {ranks.main.group: "main", ranks.early.group: "sums", model.process_group: "gradients"}
    launch = dist.all_to_all_single

    def look(*args: object, group: dist.ProcessGroup, **options: object) -> object:
        seen.append((in_backward(), groups[group]))
        return launch(*args, group=group, **options)

    with mock.patch.object(dist, "all_to_all_single", look):
        train(model, optimizer, 0, rank, range(2, 3))
    return [name for name in trace if "sums" in name], seen


def test_what_is_sent_in_backward_goes_on_two_groups_in_one_order_on_each(two_ranks: Ranks) -> None:
    (first, launches), (second, _) = two_ranks.run(launched_in_backward)
    assert first == second == sorted(first)
    assert len(first) > 1
    assert {where for when, where in launches if when} == {"sums", "gradients"}
    assert {where for when, where in launches if not when} == {"main"}


# -- orders ------------------------------------------------------------------------------------------------------


def leaders_have_one_more(rank: int) -> list[Tensor]:
    """One of each pair is in a group of the user's, that the other is not in."""
    dist.new_group([0, 2])
    bare = build(Mixed)
    model = DistributedDataParallel(bare, process_group=pair_of(rank))
    train(model, KFACOptimizer(model, **NUMBERS), rank // 2, rank % 2)
    return [param.detach() for param in bare.parameters()]


def test_ranks_may_be_in_different_numbers_of_other_groups(four_ranks: Ranks) -> None:
    check_pairs(four_ranks.run(leaders_have_one_more))


def a_group_after_ours(rank: int) -> float:
    """Return how many ranks meet in a group of the user's, made after a group of ours for which some made others."""
    dist.new_group([0, 2])
    own_groups(pair_of(rank), timedelta(seconds=29))  # that no other test has
    ones = torch.ones(())
    dist.all_reduce(ones, group=dist.new_group(timeout=timedelta(seconds=20)))
    return float(ones)


def test_the_user_may_make_groups_of_all_ranks_after_ours(four_ranks: Ranks) -> None:
    assert four_ranks.run(a_group_after_ours) == [4.0] * 4


def workers_beside_leaders(_: int) -> float:
    """Return how many ranks have this one's role, by a sum over its group, where some are in a group more."""
    dist.new_group([0, 2])
    statistics_workers._ROLES.pop(world(), None)  # as in a world that has just been formed
    ones = torch.ones(())
    dist.all_reduce(ones, group=StatisticsWorkers(2).role().group)
    return float(ones)


def test_statistics_workers_may_be_in_different_numbers_of_other_groups(four_ranks: Ranks) -> None:
    assert four_ranks.run(workers_beside_leaders) == [2.0] * 4


def alone_at_a_step(rank: int) -> tuple[str, list[Tensor]]:
    """Step in a pair of its own, to which one rank does not come at first; then all do, and train another model."""
    model = build(Small)
    config = DistributedConfig(strategy=Sharded(), group=pair_of(rank), timeout=timedelta(seconds=2))
    optimizer, message = KFACOptimizer(model, **NUMBERS, distributed=config), ""
    try:
        if rank != 1:
            train(model, optimizer, rank // 2, rank % 2, range(1))
    except CollectiveError as error:
        message = str(error)
    dist.barrier()
    again = build(Mixed)
    train(again, KFACOptimizer(again, **NUMBERS, distributed=config), rank // 2, rank % 2)
    return message, [param.detach() for param in again.parameters()]


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_first_step_is_named(four_ranks: Ranks) -> None:
    answers = four_ranks.run(alone_at_a_step)
    first, *others = [message for message, _ in answers]
    check_pairs([params for _, params in answers])
    assert "a process group of the ranks [0, 1] is made, and rank 1 did not come within 2 s" in first
    assert not any(others)


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2))


def built_in_another_order(rank: int) -> list[Tensor]:
    nets: list[type[nn.Module]] = [Mixed, Small]
    config = DistributedConfig(strategy=Sharded())
    built = {}
    for net in reversed(nets) if rank == 1 else nets:
        model = build(net)
        built[net] = model, KFACOptimizer(model, **NUMBERS, distributed=config)
    for net in nets:
        train(*built[net], 0, rank)
    return [param.detach() for param in built[Mixed][0].parameters()]


def test_ranks_may_build_optimizers_in_another_order(two_ranks: Ranks) -> None:
    for params in two_ranks.run(built_in_another_order):
        for ours, expected in zip(params, one_process_of(0), strict=True):
            close(ours, expected, "a parameter", 1e-12)


def stepped_in_another_order(rank: int, steps: int) -> str:
    config = DistributedConfig(strategy=Sharded())
    built = [(model, KFACOptimizer(model, **NUMBERS, distributed=config)) for model in (build(Mixed), build(Small))]
    for model, optimizer in built:
        train(model, optimizer, 0, rank, range(steps))
    try:
        for model, optimizer in reversed(built) if rank == 1 else built:
            train(model, optimizer, 0, rank, range(1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("steps", "words"), [(0, "layer 'first': weight+bias 1×6×5"), (2, "layer")])
def test_ranks_that_step_optimizers_in_another_order_are_told(two_ranks: Ranks, steps: int, words: str) -> None:
    for message in two_ranks.run(stepped_in_another_order, steps):
        assert "disagree" in message
        assert words in message


# -- time --------------------------------------------------------------------------------------------------------


def timeouts(rank: int) -> list[timedelta]:
    group = dist.new_group(timeout=timedelta(seconds=47))
    wrapped = DistributedDataParallel(build(Mixed), process_group=group)
    found = []
    for model, config in (
        (wrapped, None),
        (build(Mixed), DistributedConfig(strategy=Sharded(), group=group)),
        (build(Mixed), DistributedConfig(strategy=Sharded(), timeout=timedelta(seconds=31))),
    ):
        optimizer = KFACOptimizer(model, **NUMBERS, distributed=config)
        train(model, optimizer, 0, rank, range(1))
        found.append(optimizer._executor.ranks.main.timeout)
    return found


def test_collectives_may_take_as_long_as_in_the_group_that_trains(two_ranks: Ranks) -> None:
    for found in two_ranks.run(timeouts):
        assert found == [timedelta(seconds=seconds) for seconds in (47, 47, 31)]


class Once(Mixed):
    """One of its layers runs on some ranks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(4, 4)
        self.runs = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rare(x) if self.runs else x)  # type: ignore[no-any-return]


def evaluates_between(rank: int) -> bool:
    """Both take longer to the step than a time-out, and the sums of rank 0 are not complete before."""
    seconds = 5.0
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model = DistributedDataParallel(build(Once), process_group=group, find_unused_parameters=True)
    optimizer = KFACOptimizer(model, **{**NUMBERS, "inverse_update_period": 1})
    train(model, optimizer, 0, rank, range(1))
    model.module.runs = rank == 1
    x, y = share(examples(1), [6, 6], rank)
    optimizer.zero_grad()
    squares(model(x), y).mean().backward()
    time.sleep(seconds + 0.5)  # while sums of rank 1 are under way
    optimizer.step()
    return True


@pytest.mark.slow
def test_a_rank_may_be_longer_on_its_way_from_backward_to_step_than_it_is_waited_for(two_ranks: Ranks) -> None:
    assert two_ranks.run(evaluates_between) == [True, True]
