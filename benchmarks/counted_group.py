"""One rank of many, whose messages are counted: the real code of ``kfac_optim.distributed`` on a faked process group.

The group is torch's fake one, of any number of ranks; every collective is taken note of as it is handed to
``torch.distributed``, and answered at once as ranks would that say the same as this one: sums are P times what it gave,
and what others send is left as it was allocated. Tensors lie on the meta device, so that 7B parameters need no memory;
every storage that is made while a phase runs is followed all the same, which tells what buffers it holds at its peak.

What is run: the communication hook's code, driven by buckets like DDP's (DDP's own backward does not work on a faked
group), the vote, the sums that bound a step, gathering the parameters, and at a refresh the sums of factors, reported
as backward does, and their results. What is not: the model, preconditioning and refreshing, which send nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import Model
from kfac_optim import Cholesky, KFACOptimizer
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.distributed import CostModel, Covered, DistributedConfig, Exchange, Message, Plan, Strategy
from kfac_optim.distributed.communication import consensus
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.gradients.ddp import OwnersHook
from kfac_optim.distributed.gradients.sharded_gradients import ShardedGradients
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.statistics.exchange import StatisticsExchange

# DDP's: the first bucket is small, so that something is sent early.
_FIRST, _CAP = 2**20, 25 * 2**20


@dataclass
class Phase:
    """Counts what one phase of a step sends and holds.

    Attributes:
        launches: the launches as they were told of, in order.
        sent: bytes handed to ``torch.distributed`` for other ranks.
        received: bytes that others hand over.
        buffers: bytes of storages at the peak that are gone when the phase ends.
    """

    launches: list[Message] = field(default_factory=list)
    sent: float = 0.0
    received: float = 0.0
    buffers: int = 0


@dataclass
class Counted:
    """Holds what was counted on one rank in one step that refreshes.

    Attributes:
        plan: the plan that the rank goes by.
        rank: the rank's number.
        rows: parameters in each bucket of the wrapper, as owner and elements.
        largest_bucket: the bytes of the largest bucket.
        phases: the phases by name: gradients, agreement, scalars, sums, results, parameters.
    """

    plan: Plan
    rank: int
    rows: list[list[tuple[int, int]]]
    largest_bucket: int
    phases: dict[str, Phase]


def count(
    model: Model,
    ranks: int,
    rank: int,
    strategy: Strategy,
    cost: CostModel,
    *,
    exchange: Exchange,
    periods: tuple[int, int],
) -> Counted:
    """Run one rank's part of a step that refreshes, and count it. There must be no process group."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        return _Run(model, strategy, cost, exchange, periods).step()
    finally:
        dist.destroy_process_group()


def module_of(model: Model) -> nn.Module:
    """Return a module on the meta device with these layer shapes; a convolution is a linear layer over its patches."""
    whole = nn.Module()
    with torch.device("meta"):
        for each in model:
            assert isinstance(each, Covered), "the shapes have no other parameters"
            spec = each.spec
            made: nn.Module
            bias = "bias" in spec.params
            if spec.groups > 1:
                made = nn.LayerNorm(spec.groups, bias=bias)
            elif each.rows:
                made = nn.Linear(spec.in_dim - bias, spec.out_dim, bias=bias)
            else:
                made = nn.Embedding(spec.in_dim, spec.out_dim)
            whole.add_module(each.name.replace(".", "/"), made)
    return whole


class _Run:
    """Has one optimizer on the faked group, ready to step."""

    def __init__(
        self, model: Model, strategy: Strategy, cost: CostModel, exchange: Exchange, periods: tuple[int, int]
    ) -> None:
        self._module = module_of(model)
        self._trace: list[Message] = []
        self._calls: list[tuple[float, float]] = []
        self._optimizer = KFACOptimizer(
            self._module,
            lr=0.1,
            momentum=0.9,
            factor_update_period=periods[0],
            inverse_update_period=periods[1],
            inverse=Cholesky(),
            distributed=DistributedConfig(
                strategy, cost=cost, exchange=exchange, observe=self._trace.append, timeout=timedelta(1)
            ),
        )

    def step(self) -> Counted:
        executor = self._optimizer._executor
        assert isinstance(executor, DistributedExecutor)
        params = [param for param in self._module.parameters() if param.requires_grad]
        for param in params:
            param.grad = torch.empty_like(param)
        with self._answered():
            agree = functools.partial(
                executor.agree,
                self._optimizer._trained(),
                finite=True,
                summed=1,
                counted=None,
                rescaled=False,
            )
            agree()  # makes the plan
            executor.publish()
            executor.gradients_dropped()
            flow, plan = executor.gradients, executor.plan
            assert plan is not None
            assert isinstance(flow, ShardedGradients)
            wrapper: Any = _Wrapper()
            hook = OwnersHook(wrapper)
            hook.flow, hook.observe = flow, self._trace.append
            buckets = _buckets(params)
            assert executor.planned is not None
            blocks = executor.planned.blocks
            exchange = executor.planned.exchange
            phases: dict[str, Callable[[], object]] = {
                "gradients": lambda: [future.wait() for future in [hook._reduce(None, each) for each in buckets]],
                "agreement": agree,
                "sums": functools.partial(_sum, exchange, blocks),
                "results": lambda: exchange.share(blocks),
                "scalars": lambda: [
                    flow.sum_over_updaters(torch.empty(number, device="meta")) for number in plan.options.scalars
                ],
                "parameters": executor.publish,
            }
            found = {name: self._counted(run) for name, run in phases.items()}
        rows = [[(flow.owner_of[param], param.numel()) for param in bucket.parameters()] for bucket in buckets]
        ours = [bucket.size for payload in Payload for bucket in plan.buckets_of(payload)]
        largest = max(*ours, *(bucket.buffer().nbytes for bucket in buckets))
        return Counted(plan, dist.get_rank(), rows, largest, found)

    def _counted(self, run: Callable[[], object]) -> Phase:
        self._trace.clear()
        self._calls.clear()
        with Storages() as storages:  # type: ignore[no-untyped-call]
            run()
        sent, received = (sum(each) for each in zip(*self._calls, strict=True)) if self._calls else (0.0, 0.0)
        return Phase(list(self._trace), sent, received, storages.peak())

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Answer every collective at once, and note what it was given."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def exchange(out: Tensor, given: Tensor, from_: list[int], to: list[int], **_: Any) -> _Done:
            self._calls.append(((sum(to) - to[rank]) * given.itemsize, (sum(from_) - from_[rank]) * out.itemsize))
            return _Done(out)

        def gather(out: Tensor, given: Tensor, **_: Any) -> _Done:
            self._calls.append((given.nbytes * (ranks - 1), out.nbytes - given.nbytes))
            return _Done(out)

        def reduce(values: Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> _Done:
            moved = 2 * (ranks - 1) * values.nbytes / ranks
            self._calls.append((moved, moved))
            if op == dist.ReduceOp.SUM:
                values.mul_(ranks)
            return _Done(values)

        def numbers(_: StatisticsExchange, blocks: Sequence[Any]) -> dict[Any, Any]:
            # Counters of a refresh, which the meta device cannot tell.
            return {block: (0.0, 0.0, dict.fromkeys(block.state.counters(), 0.0)) for block in blocks}

        # What ranks vote on is known to the host alone, so that it does not go to the meta device.
        on_host = SimpleNamespace(
            tensor=lambda words, dtype, **_: torch.tensor(words, dtype=dtype), int64=torch.int64, Tensor=Tensor
        )
        with ExitStack() as stack:
            for target, name, answer in (
                (dist, "all_to_all_single", exchange),
                (dist, "all_gather_single", gather),
                (dist, "all_reduce", reduce),
                (consensus, "torch", on_host),
                (Communicator, "check_agreement", lambda *_: None),
                (StatisticsExchange, "_numbers", numbers),
                (KFACBlock, "is_ready", True),
            ):
                stack.enter_context(mock.patch.object(target, name, answer))
            yield


def _sum(exchange: StatisticsExchange, blocks: Sequence[KFACBlock]) -> None:
    """Report factors to be summed as backward would, which sends the first of them, and merge the sums."""
    reducer = exchange.reducer(blocks)
    for block in reversed(blocks):
        for name, factor in exchange.slots(block, block.state):
            reducer.ready(name, factor.packed, factor.mass)
    exchange.merge(blocks)


class _Done:
    """Stands for a collective that has ended."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class _Wrapper:
    """Has what the hook asks of DDP."""

    gradient_as_bucket_view = False
    _comm_hooks = ()
    _join_config = SimpleNamespace(enable=False)

    def __init__(self) -> None:
        self.process_group = dist.group.WORLD

    def register_forward_pre_hook(self, hook: object) -> None:
        pass

    def register_comm_hook(self, state: object, hook: object) -> None:
        pass


class _Bucket:
    """Has what the hook asks of ``GradBucket``."""

    def __init__(self, number: int, params: Sequence[nn.Parameter], *, last: bool) -> None:
        self._number, self._params, self._last = number, list(params), last
        sizes = [param.numel() for param in params]
        self._buffer = torch.empty(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        parts = torch.split(self._buffer, sizes)
        self._gradients = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._params

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def is_last(self) -> bool:
        return self._last


def _buckets(params: Sequence[nn.Parameter]) -> list[Any]:
    """Return buckets as DDP has them from the second step on: in the order of backward, each closed once it is full."""
    filled: list[list[nn.Parameter]] = [[]]
    size, limit = 0, _FIRST
    for param in reversed(params):
        filled[-1].append(param)
        size += param.nbytes
        if size >= limit:
            filled.append([])
            size, limit = 0, _CAP
    filled = [each for each in filled if each]
    return [_Bucket(number, each, last=number == len(filled) - 1) for number, each in enumerate(filled)]


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that is made, of the meta device too, until it is gone."""

    def __enter__(self) -> Storages:
        self._clock = 0
        self._made: dict[int, tuple[int, int]] = {}  # of each storage when it came, and its bytes
        self._gone: dict[int, int] = {}
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            storage = each.untyped_storage()
            if id(storage) not in given and storage not in self._known:
                self._clock += 1
                number = self._clock
                self._known[storage] = number
                self._made[number] = (self._clock, storage.nbytes())
                weakref.finalize(storage, self._note_gone, number)
        return result

    def _note_gone(self, number: int) -> None:
        self._clock += 1
        self._gone[number] = self._clock

    def peak(self) -> int:
        """Return the bytes at the peak, of storages that are gone by now."""
        events = [(when, size) for number, (when, size) in self._made.items() if number in self._gone]
        events += [(when, -self._made[number][1]) for number, when in self._gone.items()]
        held = most = 0
        for _, size in sorted(events):
            held += size
            most = max(most, held)
        return most


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor))
