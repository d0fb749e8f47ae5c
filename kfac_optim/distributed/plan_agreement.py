"""One plan on all ranks: what this rank trains, the vote on it before every step, and the plan that follows.

[Note: why ranks vote] A collective is matched between ranks by its place in the order of launches. Ranks that plan
differently would hang, or take each other's numbers for their own. So every step begins with one small all-reduce, of a
size that no plan changes: each rank says, by a number, what it would plan and which arguments it has. Only when all say
the same is anything else launched. When they differ from what was agreed before, in the same way on all ranks, all of
them plan again at this very place. All branches that lead to a collective depend on the verdict alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.distributed.choice import plain
from kfac_optim.distributed.communication.consensus import Ballot, vote
from kfac_optim.distributed.communication.process_groups import ranks_of
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.gradients.grid import Grid, grid_of
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.plan import Plan, differences, remedy
from kfac_optim.distributed.planning.plan_options import PlanOptions, vote_marks
from kfac_optim.distributed.planning.planned_model import Covered, Uncovered
from kfac_optim.distributed.planning.planner import make_plan
from kfac_optim.distributed.planning.strategies import Auto, FullySharded, Sharded, Strategy
from kfac_optim.distributed.training_group import TrainingGroup
from kfac_optim.step.execution import Trained
from kfac_optim.utils.sharded_params import is_sharded
from kfac_optim.utils.text import without_addresses

# What may differ while plans are equal; the others are this rank's own.
_TOLD = [each for each in fields(DistributedConfig) if each.repr and each.name not in ("group", "pipeline")]


class PlanAgreement:
    """Has all ranks go by the same plan; see [Note: why ranks vote].

    Args:
        config: the user's choices, the same on all ranks.
        ranks: the ranks that train.
        optimizer: tells the arguments that must be the same on all ranks, and the step size, which says what is summed.

    Attributes:
        plan: the plan that all ranks go by; None before the first step.
        blocks: the blocks that were described last.
        params: the parameters of each covered layer and each other parameter, by its name in the plan.
        grid: the ranks that train, and which of them hold what; None before anything was described.
    """

    def __init__(self, config: DistributedConfig, ranks: TrainingGroup, optimizer: OptimizerView) -> None:
        self._config: DistributedConfig = plain(config)
        self._ranks = ranks
        self._optimizer = optimizer
        self.plan: Plan | None = None
        self.blocks: Sequence[KFACBlock] = ()
        self.params: dict[str, Sequence[nn.Parameter]] = {}
        self.grid: Grid | None = None
        self._model: list[Covered | Uncovered] = []
        self._loaded = ""
        self._seen: tuple[Any, ...] = ()
        # Numbers that stand for what was described, and for what the plan was made of.
        self._number = self._agreed = 0
        self._call = ""

    def has_changed(self, trained: Trained, loaded: str) -> bool:
        """Return whether `describe` would tell of another model than the last time."""
        return _seen(trained, loaded) != self._seen

    def describe(self, trained: Trained, loaded: str) -> None:
        """Describe what is to be planned.

        Args:
            trained: what the optimizer trains.
            loaded: describes the checkpoints that were loaded.
        """
        self._seen, self._loaded, self.blocks = _seen(trained, loaded), loaded, list(trained.blocks)
        self.grid = grid_of(trained.params, ranks_of(self._ranks.group))
        self._model, self.params = _layout(trained, self.grid)
        config = replace(self._config, group=None, pipeline=None)
        dtypes = sorted({str(param.dtype) for param in trained.params})
        self._number = _hash([repr(config), loaded, *dtypes, *map(repr, self._model)])

    def vote(
        self,
        marks: Callable[[], Sequence[int]],
        *,
        finite: bool = True,
        norm: float | None = None,
        counted: int | None = None,
        edited: bool = False,
        progress: int = 0,
        call: str = "step()",
    ) -> Ballot:
        """Hold a vote; a collective.

        Args:
            marks: returns what this rank says of blocks and buckets; asked only if this rank knows the agreed plan.
            finite: whether gradients are finite here.
            norm: the norm of gradients that should be equal on all ranks; None where they are not compared.
            counted: terms of the loss that this rank has counted, whether their mean or their sum is taken.
            edited: whether gradients were changed in place here, after backward.
            progress: how far statistics workers are, as this rank sees it (`serving.rounds.Progress`).
            call: what the vote is for, as the user has called it.

        Returns:
            What comes of it; the last of the marks is `progress`.
        """
        # To look at tensors synchronises with the device, as taking statistics does: so it is done at such steps alone.
        looks = any(block.has_pending() or (block.echoes and block.wants_statistics()) for block in self.blocks)
        self._call = call
        own = marks() if self._number == self._agreed else ()
        plan = self.plan
        size = vote_marks(0, 0) if plan is None else vote_marks(len(plan.layers), len(plan.buckets_of(Payload.SUMS)))
        ballot = Ballot(
            finite,
            model=self._number,
            numbers=_hash_of(self._arguments()),
            norm=norm,
            edited=edited,
            terms=None if counted is None else (counted, counted),
            tensors=_hash_of(self._optimizer.tensors()) if looks else None,
            # As many as the others give, which may know of another plan.
            marks=(*own, *[0] * (size - len(own) - 1), progress),
        )
        return vote(self._ranks.main, ballot)

    def is_settled(self, verdict: Ballot) -> bool:
        """Return whether all ranks go by the agreed plan; if not, all of them must make a new one.

        Raises:
            RuntimeError: the ranks have different arguments, or train different models.
        """
        settled = verdict.model == self._agreed
        if verdict.numbers < 0 or (settled and verdict.tensors == -1):
            self._ranks.main.check_agreement({**self._arguments(), **self._optimizer.tensors()}, differences, remedy)
        if not settled and verdict.model < 0:
            config = {f"DistributedConfig.{each.name}": repr(getattr(self._config, each.name)) for each in _TOLD}
            told = self._new_plan().agreement() | {"checkpoints loaded": self._loaded} | config
            self._ranks.main.check_agreement(told, differences, remedy)
            raise RuntimeError(
                "kfac_optim: the ranks disagree about what they train, although their plans are equal. Build the same "
                "model, with the same arguments of KFACOptimizer, on every rank."
            )
        return settled

    def _arguments(self) -> dict[str, str]:
        return {"call": self._call, **self._optimizer.arguments()}

    def make_plan(self) -> Plan:
        """Plan what was described, and compare the plans of all ranks; a collective.

        Raises:
            RuntimeError: the plans differ.
        """
        plan = self._new_plan()
        self._ranks.main.check_agreement(plan.agreement(), differences, remedy)
        return plan

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from now on, which was made of what was described last."""
        self.plan, self._agreed = plan, self._number

    def strategy(self) -> Strategy | Auto:
        """Return the strategy of what was described: FSDP2 also keeps the gradients of what it shards."""
        wished = self._config.strategy
        of_layers = [param for block in self.blocks for param in block.params]
        if not any(map(is_sharded, of_layers or [param for held in self.params.values() for param in held])):
            return wished
        return FullySharded() if isinstance(wished, Auto) else FullySharded(wished.placement, wished.statistics)

    def _new_plan(self) -> Plan:
        groups = [block.group for block in self.blocks]
        covered = list({id(group): group for block in self.blocks for group in block.groups}.values())
        # Complex parameters are left to SGD, and are no part of a message.
        dtypes = [param.dtype for held in self.params.values() for param in held if not param.is_complex()]
        factor_dtypes = [block.dtype for block in self.blocks]
        size, strategy = self._optimizer.step_size, self.strategy()
        options = PlanOptions(
            factor_update_period=groups[0]["factor_update_period"] if groups else 1,
            inverse_update_period=groups[0]["inverse_update_period"] if groups else 1,
            bucket_bytes=self._config.bucket_bytes,
            parameter_dtype=reduce(torch.promote_types, dtypes, torch.bfloat16) if dtypes else torch.float32,
            factor_dtype=reduce(torch.promote_types, factor_dtypes) if factor_dtypes else torch.float32,
            sums_dtype=self._config.sums_dtype,
            gradient_dtype=self._config.gradient_dtype if isinstance(strategy, Sharded) else None,
            momentum=any(group["momentum"] != 0 for group in groups) or size.keeps_direction(covered),
            # Each group has a product of gradient and direction, and all together have the squares of both.
            scalars=(len(covered) + 2, *size.scalars(covered)),
            exchange=self._config.exchange,
        )
        return make_plan(self._model, self._ranks.main.world_size, strategy, self._config.cost, options)


def _seen(trained: Trained, loaded: str) -> tuple[Any, ...]:
    """Return what a description depends on."""
    return (
        loaded,
        [(block, block.spec, block.inverse) for block in trained.blocks],
        [(id(param), param.requires_grad, param.dtype, param.device) for param in trained.params],
    )


def _layout(trained: Trained, grid: Grid) -> tuple[list[Covered | Uncovered], dict[str, Sequence[nn.Parameter]]]:
    """Return what is to be planned, in the order of the model if it is known, and the parameters of each piece."""
    names = trained.names()
    block_of = {param: block for block in trained.blocks for param in block.params}
    order = {param: number for number, param in enumerate(names)}
    model: dict[str, Covered | Uncovered] = {}
    held: dict[str, Sequence[nn.Parameter]] = {}
    taken = {block.name for block in trained.blocks}
    params = dict.fromkeys(trained.params)  # torch takes one that is listed twice, with a warning
    for number, param in enumerate(sorted(params, key=lambda each: order.get(each, len(order)))):
        block = block_of.get(param)
        if block is not None:
            model[block.name] = Covered(
                replace(block.spec, name=block.name), block.inverse, shards=_shards(block, grid)
            )
            held[block.name] = block.params
        elif param.requires_grad:
            name = names.get(param, f"parameter {number}")
            if name in taken:  # names of what the model does not hold are the user's, who may give one twice
                name = f"{name} (parameter {number})"
            taken.add(name)
            model[name] = Uncovered(name, param.numel())
            held[name] = (param,)
    return [plain(each) for each in model.values()], held


def _shards(block: KFACBlock, grid: Grid) -> tuple[int, ...]:
    """Return the elements that each rank holds, if any of the parameters is sharded."""
    if not any(map(is_sharded, block.params)):
        return ()
    held = [0] * grid.count
    for param, name in zip(block.params, block.param_names, strict=True):
        for part in grid.parts(param, name):
            for rank in part.holders:
                held[rank] += part.elements
    return tuple(held)


def _hash(lines: Iterable[str]) -> int:
    """Return a number below `2**62` that is not 0."""
    digest = hashlib.sha256(without_addresses("\n".join(lines)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2 | 1


def _hash_of(arguments: Mapping[str, str]) -> int:
    return _hash(f"{name}: {value}" for name, value in arguments.items())
