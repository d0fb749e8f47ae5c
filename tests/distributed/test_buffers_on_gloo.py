"""What a rank holds on gloo is what its own code holds, though the process group lets go of nothing."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.counted_group import Storages
from kfac_optim import Cholesky, KFACOptimizer, Subsample
from kfac_optim.distributed import DistributedConfig, Exchange, Sharded
from kfac_optim.distributed.planning.buckets import Payload

COLLECTIVES = ("all_to_all_single", "all_gather", "all_gather_single", "all_reduce")
PHASES = ("gradients", "sums", "parameters")


@contextmanager
def nothing_let_go_of() -> Iterator[list[weakref.ref[torch.UntypedStorage]]]:
    """Keep every message of this rank, with its tensors, as gloo's thread does for a moment; gives their memory."""
    memory: list[weakref.ref[torch.UntypedStorage]] = []
    messages: list[Any] = []

    def keeping(launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any, **options: Any) -> Any:
            tensors = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, Tensor)]
            memory.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
            messages.append(launch(*args, **options))
            return messages[-1]

        return launched

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, keeping(getattr(dist, name))))
        yield memory
    messages.clear()


def optimizer_of(model: nn.Module, **config: Any) -> KFACOptimizer:
    return KFACOptimizer(
        model,
        lr=0.01,
        momentum=0.9,
        factor_update_period=1,
        inverse_update_period=1,
        inverse=Cholesky(),
        subsample=Subsample(),
        distributed=DistributedConfig(Sharded(), **config),
    )


def peaks(_: int) -> tuple[dict[str, list[int]], int]:
    """Bytes of buffers at the peak of each phase, at every step; and those of the largest bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(512, 512), nn.Tanh())))
    optimizer = optimizer_of(model, exchange=Exchange.SEGMENTS, overlap=False, bucket_bytes=2**22)
    found: dict[str, list[int]] = {phase: [] for phase in PHASES}
    inputs = torch.randn(16, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def measured(run: Callable[..., Any], phase: str) -> Callable[..., None]:
        def phase_of(*args: Any) -> None:
            with Storages() as storages, nothing_let_go_of():  # type: ignore[no-untyped-call]
                run(*args)
            found[phase].append(storages.peak())

        return phase_of

    step()
    executor: Any = optimizer._executor
    for phase, owner, name in zip(
        PHASES, (executor.gradients, executor.planned.exchange, executor), ("reduce", "merge", "publish"), strict=True
    ):
        setattr(owner, name, measured(getattr(owner, name), phase))
    for _ in range(3):
        step()
    plan = executor.plan
    return found, max(bucket.size for payload in Payload for bucket in plan.buckets_of(payload))


@pytest.mark.slow
@pytest.mark.parametrize("several", ["two_ranks", "four_ranks", "eight_ranks"])
def test_by_segments_gloo_ranks_hold_the_largest_bucket_twice_at_most(
    request: pytest.FixtureRequest, several: str
) -> None:
    ranks: Ranks = request.getfixturevalue(several)
    rounding = ranks.world_size * torch.float32.itemsize  # segments have one length
    for found, largest in ranks.run(peaks, timeout=300):
        for phase in PHASES:
            assert len(found[phase]) == 3
            assert 0 < max(found[phase]) <= 2 * largest + rounding, phase


def held_after_a_step(_: int, exchange: Exchange) -> tuple[int, int]:
    """Messages' tensors in a step, and how many of them have memory afterwards that is not the model's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
    # What is sent in another dtype is no bucket of the wrapper.
    optimizer = optimizer_of(model, exchange=exchange, gradient_dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()

    step()
    step()
    with nothing_let_go_of() as memory:
        step()
        ours = {param.untyped_storage().data_ptr() for param in model.parameters()}
        left = [storage for each in memory if (storage := each()) is not None and storage.data_ptr() not in ours]
    return len(memory), len(left)


@pytest.mark.parametrize("exchange", Exchange)
def test_the_memory_of_messages_is_free_when_they_have_ended(two_ranks: Ranks, exchange: Exchange) -> None:
    for tensors, left in two_ranks.run(held_after_a_step, exchange):
        assert tensors > 0
        assert left == 0
