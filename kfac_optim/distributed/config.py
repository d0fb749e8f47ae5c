"""How several processes train one model: the user's choices, as one value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.communication.process_groups import ranks_of
from kfac_optim.distributed.experts import Experts
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.strategies import Auto, Exchange, Replicated, Sharded, Strategy, check_strategy
from kfac_optim.distributed.statistics_workers import StatisticsWorkers
from kfac_optim.utils.validation import check_dtype, check_flag, check_integer, check_kind

# What plans reckon with where nobody says otherwise: a recent accelerator, in a node or on a fast network. Of two
# strategies it is mostly the ratio of the rates that decides.
_COST = CostModel(flop_rate=1e14, bandwidth=2e10, latency=2e-5, solver_rate=2e12)


@dataclass(frozen=True)
class DistributedConfig:
    """Says what the ranks of a process group share, and how. It must be equal on all of them, but for `observe`.

    Args:
        strategy: which ranks precondition and update what: `Replicated(...)`, the default, `Sharded(...)`, or
            `Auto(...)`. With parameters that FSDP2 has sharded it only says which ranks precondition; the rest is
            FSDP2's.
        group: the group of the ranks that train one model on different examples; None is that of
            `DistributedDataParallel`, or of the mesh of `fully_shard`, and all ranks where nothing is wrapped. Name
            them where tensor parallelism alone cuts the model, over some of the ranks.
        pipeline: the ranks that hold the other stages of the same model, as `torch.distributed.pipelining` runs them,
            each with an optimizer for its stage: one trust region then bounds the steps of all, and the last of these
            ranks, which has the last stage, tells the others the terms of the loss. Name in `group` the
            ranks that train the same stage on other examples, even if it is this rank alone: both are groups of a
            `DeviceMesh`, as `init_device_mesh("cuda", (replicas, stages), mesh_dim_names=("data", "stages"))` has them.
        experts: the layers of a mixture of experts that each rank has of its own, `Experts(["*.experts"])`, while
            `strategy` is how the ranks share the others; None: there are no experts. One trust region bounds the steps
            of all.
        timeout: how long a collective may take before it is an error; None is as long as in that group.
        overlap: whether sums of statistics are sent while backward goes on, where it is known to be the last before a
            step, as under DDP.
        bucket_bytes: the most that is sent at once; a tensor that is larger goes alone.
        sums_dtype: the dtype in which statistics are sent; None is that of the factors. They are summed in float32 at
            least. Sketches of wide factors are refused in less than float32.
        gradient_dtype: the dtype in which gradients are sent to owners under `Sharded`; None is their own. They are
            summed in float32 at least, whatever it is: bfloat16 halves what float32 sends, and rounds each rank's
            gradient once; by segments the mean as well.
        cost: rates of the machines, by which `Auto` chooses and plans predict.
        exchange: the way between all ranks and owners, directly or by segments; None is the one that is predicted to be
            quicker for the slowest rank. What only some ranks need goes directly whatever is said here.
        workers: ranks that measure and refresh while the others train; `Replicated()` only. None: all ranks train.
        observe: called with the `Message` of each collective after this rank has launched it, in their order, also
            from hooks within backward: `observe=trace.append` shows what is sent when. All-reduces of DDP's own are not
            among them.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number out of range.
        RuntimeError: a group that was destroyed.
    """

    strategy: Strategy | Auto = field(default_factory=Replicated)
    group: dist.ProcessGroup | None = None
    # Of other ranks another group, though they train the same stage.
    pipeline: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    experts: Experts | None = None
    timeout: timedelta | None = None
    overlap: bool = True
    bucket_bytes: int = 25 * 2**20
    sums_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    cost: CostModel = field(default=_COST)
    exchange: Exchange | None = None
    workers: StatisticsWorkers | None = None
    # Not shown, for ranks compare what is.
    observe: Callable[[Message], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Auto):
            check_strategy("strategy of DistributedConfig", self.strategy)
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if self.group is not None and self.group is not outside:
            check_kind("group of DistributedConfig (of a mesh it is mesh.get_group())", self.group, dist.ProcessGroup)
            ranks_of(self.group)
        if self.timeout is not None:
            check_kind("timeout of DistributedConfig", self.timeout, timedelta)
            if self.timeout <= timedelta(0):
                raise ValueError(f"kfac_optim: timeout of DistributedConfig must be above 0, got {self.timeout}.")
        check_flag("overlap of DistributedConfig", self.overlap, optional=False)
        check_integer("bucket_bytes of DistributedConfig", self.bucket_bytes)
        check_dtype("sums_dtype of DistributedConfig", self.sums_dtype)
        check_dtype("gradient_dtype of DistributedConfig", self.gradient_dtype)
        if self.gradient_dtype is not None and not isinstance(self.strategy, Sharded):
            raise ValueError(
                f"kfac_optim: gradient_dtype={self.gradient_dtype} is of gradients that go to owners, and under "
                f"{self.strategy} the training loop brings them together: compress them there, as by "
                "register_comm_hook(None, bf16_compress_hook) of DistributedDataParallel, or use strategy=Sharded()."
            )
        check_kind("cost of DistributedConfig", self.cost, CostModel)
        if self.exchange is not None:
            check_kind("exchange of DistributedConfig", self.exchange, Exchange)
        if self.pipeline is not None:
            check_kind("pipeline of DistributedConfig", self.pipeline, dist.ProcessGroup)
            ranks_of(self.pipeline)
            if self.group is None:
                raise ValueError(
                    "kfac_optim: a DistributedConfig with a pipeline must name in group the ranks that train this "
                    "stage on other examples. Take both groups from one DeviceMesh of replicas and stages: "
                    'group=mesh.get_group("data"), pipeline=mesh.get_group("stages").'
                )
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.workers is not None:
            self._check_workers(self.workers)
        if self.observe is not None and not callable(self.observe):
            raise TypeError(
                f"kfac_optim: observe of DistributedConfig must be a function of a Message, or None, got "
                f"{self.observe!r}."
            )

    def _check_experts(self, experts: Experts) -> None:
        check_kind("experts of DistributedConfig", experts, Experts)
        other = "workers" if self.workers is not None else "pipeline" if self.pipeline is not None else None
        if other is not None:
            raise ValueError(
                f"kfac_optim: DistributedConfig has {experts} and {other}, which do not go together. Leave {other} "
                f"out; or leave experts out, have {list(experts.layers)} skipped by skip_layers, and train their "
                "parameters by an optimizer of their own."
            )

    def _check_workers(self, workers: StatisticsWorkers) -> None:
        check_kind("workers of DistributedConfig", workers, StatisticsWorkers)
        if self.strategy != Replicated():
            raise ValueError(
                f"kfac_optim: with {workers} the ranks that train hold all inverses, which is strategy=Replicated(); "
                f"got {self.strategy}. Leave strategy out, or workers."
            )
        if self.group is not None:
            raise ValueError(
                f"kfac_optim: {workers} divides all ranks into those that train and workers, and group= names some. "
                "Leave group out, and wrap the model on role().group."
            )
