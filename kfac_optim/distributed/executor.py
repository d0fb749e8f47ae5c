"""K-FAC on the ranks of a process group: the executor that joins plan, statistics and gradients."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.checkpoint import KEY
from kfac_optim.blocks.preconditioning import has_gradient
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import Ballot, largest, vote
from kfac_optim.distributed.communication.process_groups import (
    GroupLoan,
    OwnGroups,
    own_groups,
    ranks_of,
    timeout_of,
    world,
)
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.factors.exchange import StatisticsExchange
from kfac_optim.distributed.factors.overlap import EarlyReports, Terms
from kfac_optim.distributed.gradients.averaging import AveragingCheck
from kfac_optim.distributed.gradients.ddp import Wrappers
from kfac_optim.distributed.gradients.edits import EditWatch
from kfac_optim.distributed.gradients.flow import GradientFlow, ReplicatedGradients, ShardedGradients, sum_scalars
from kfac_optim.distributed.gradients.fsdp import rows_of
from kfac_optim.distributed.gradients.gradient_rows import RowGradients
from kfac_optim.distributed.gradients.sharding import check_sharding, group_of_rows
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.plan import TOLD_COUNTERS, Plan, PlanOptions, differences, remedy, vote_marks
from kfac_optim.distributed.planning.planner import Covered, Uncovered, make_plan
from kfac_optim.distributed.planning.strategies import Auto, FullySharded, Sharded, Strategy
from kfac_optim.distributed.state_redistribution import Holdings
from kfac_optim.specs import LayerSpec
from kfac_optim.step.execution import Agreement, Names, Parts, SingleDevice, check_rank
from kfac_optim.utils.text import without_addresses

# What a vote knows of a block on one rank; what a higher number says includes what a lower one does.
_UNUSED, _HAS_GRADIENT, _HAS_STATISTICS, _UNACCOUNTED = range(4)


class DistributedExecutor(SingleDevice):
    """See `DistributedConfig`.

    Args:
        config: the user's choices, the same on all ranks.
        terms: of the loss, as they would be if the step came now; None where they are not known.
        arguments: of the optimizer, by name, as they are now: they must be the same on all ranks.
        tensors: those arguments that are tensors, likewise; to ask synchronises.
        state: the optimizer's, for momentum buffers.
        scalars: `StepSize.scalars`.
        totals: `StepSize.totals`.
        keeps_direction: `StepSize.keeps_direction`.

    Attributes:
        plan: who does what; None before the first step.
    """

    several = True

    def __init__(
        self,
        config: DistributedConfig,
        terms: Callable[[], Terms | None],
        arguments: Callable[[], Mapping[str, str]],
        tensors: Callable[[], Mapping[str, str]],
        state: Callable[[], MutableMapping[Any, Any]],
        scalars: Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]],
        totals: Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]],
        keeps_direction: Callable[[Sequence[Mapping[str, Any]]], bool],
    ) -> None:
        super().__init__()
        self.plan: Plan | None = None
        self.config = config
        self._terms = terms
        self._arguments, self._tensors = arguments, tensors
        self._state = state
        self._scalars, self._totals, self._keeps_direction = scalars, totals, keeps_direction
        # The group that trains, as far as it is known: the user's, or that of what wraps the model.
        self._group = config.group
        self.worker = dist.get_rank(config.group)
        self._wrappers = Wrappers(to_owners=_may_shard(config.strategy), observe=config.observe)
        # Made at the first step, where all ranks come in the same order: groups of our own, and what launches on them
        # in the main line of the program, and in backward.
        self._own: OwnGroups | None = None
        self._main: Communicator | None = None
        self._early: Communicator | None = None
        self._loan: GroupLoan | None = None
        self._exchange: StatisticsExchange | None = None
        self._holdings: Holdings | None = None
        self._flow: GradientFlow | None = None
        self._reports: EarlyReports | None = None
        # What was found fit to train.
        self._checked: tuple[int | str, ...] = ()
        # What there is to plan, and a number that tells it; the number of what was planned.
        self._seen: tuple[Any, ...] = ()
        self._blocks: Sequence[KFACBlock] = ()
        self._params: dict[str, Sequence[nn.Parameter]] = {}
        self._model: list[Covered | Uncovered] = []
        self._number = self._agreed = 0
        # States of blocks as they were placed, to see when a block starts anew; and what was planned of them.
        self._states: dict[KFACBlock, Any] = {}
        self._specs: dict[KFACBlock, LayerSpec] = {}
        # Checkpoints that were loaded; of the last, until the ranks have told each other what they have of it, blocks
        # that this rank has no statistics of. Names of those that no rank has any of.
        self._loads = 0
        self._loaded = "none"
        self._lost: dict[KFACBlock, Missing] | None = None
        self._restarted: list[str] = []
        # Of the step to come: blocks that it refreshes, those whose sums are merged, and buckets that go again.
        self._due: tuple[KFACBlock, ...] | None = None
        self._merged: set[KFACBlock] = set()
        self._again: tuple[bool, ...] = ()
        self._averaging = AveragingCheck(None)
        self._edits = EditWatch()
        # Whole states for checkpoints, until the next step.
        self._complete: dict[KFACBlock, Any] = {}
        self._borrowed: list[nn.Parameter] = []
        self._consolidated = False

    def attach(self, model: nn.Module | None) -> None:
        super().attach(model)
        if (wrapper := self._wrappers.find(model)) is not None:
            self._listen_to(wrapper, may_have_a_hook=False)

    def begin_forward(self, model: nn.Module) -> int:
        if (wrapper := self._wrappers.begin_forward(model)) is not None:
            self._listen_to(wrapper, may_have_a_hook=True)
        return self.worker

    def close(self) -> None:
        self._reports = None  # a backward that is still to come sends nothing
        if self._loan is not None:
            self._loan.give_back()

    @property
    def sees_all_gradients(self) -> bool:
        return not _may_shard(self.config.strategy if self.plan is None else self.plan.strategy)

    # -- a step ------------------------------------------------------------------------------------------------

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        self._wrappers.refuse_join()
        if self._group is None and (group := group_of_rows(params, self._shards)) is not None:
            self._train_on(group, "fully_shard")
        covered = [name for block in blocks for name in block.param_names]
        looked_at: tuple[int | str, ...] = (*map(id, params), *covered)
        if looked_at == self._checked:
            return
        check_sharding(blocks, self._shards, self._training_group)
        in_parts, of_layers = _any_sharded(params), [param for block in blocks for param in block.params]
        if isinstance(self.config.strategy, FullySharded) and params and not in_parts:
            raise RuntimeError(
                "kfac_optim: FullySharded() is for parameters that fully_shard has sharded, and none is. Shard the "
                "model before the optimizer is built, or use Replicated() or Sharded()."
            )
        if _may_shard(self.config.strategy) and in_parts and of_layers and not _any_sharded(of_layers):
            raise RuntimeError(
                "kfac_optim: Sharded() gathers whole parameters after each step, and some are in parts on several "
                "ranks, though none that K-FAC preconditions. Use Replicated()."
            )
        self._checked = looked_at
        if _may_shard(self.config.strategy):
            self._edits.follow(params)

    def emitted(self, block: KFACBlock) -> None:
        # A forward may have shown another use of its weight since the plan was made.
        if self._reports is not None and self._lost is None and self._specs.get(block) == block.spec:
            self._reports.emitted(block, self._coming_refresh)

    def prepare(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names) -> None:
        self._give_back()
        self._describe(blocks, params, names)
        self._vote(finite=True, summed=1, norm=None, counted=None, edited=False)

    def agree(
        self,
        blocks: Sequence[KFACBlock],
        params: Sequence[nn.Parameter],
        names: Names,
        *,
        finite: bool,
        summed: float,
        counted: int | None,
        rescaled: bool,
    ) -> Agreement:
        self._give_back()
        self._describe(blocks, params, names)
        # Else it is the training loop that has to make `.grad` the mean.
        norm = self._averaging.norm(params) if finite and not isinstance(self._strategy(), Sharded) else None
        # Of gradients that are written to together one cannot tell how often a scaler does.
        wrapper = self._wrappers.latest
        views = wrapper is not None and wrapper.gradient_as_bucket_view
        edited = self._edits.finds_edit(expected=int(rescaled)) and not (rescaled and views)
        verdict = self._vote(finite=finite, summed=summed, norm=norm, counted=counted, edited=edited)
        assert self.plan is not None, "the vote is about it"
        if verdict.finite and verdict.norm is not None and not isinstance(self.plan.strategy, Sharded):
            self._averaging.check(verdict.norm, params, names())
        restarted, self._restarted = self._restarted, []
        found = verdict.marks[: len(blocks)]
        self._again = tuple(map(bool, verdict.marks[len(blocks) :]))
        if verdict.finite:
            self.flow.reduce()
        else:
            self._abandon_round()
            self.flow.forget()
            self._wrappers.stepped()
        return Agreement(
            verdict.finite,
            verdict.summed,
            sampled={block for block, mark in zip(blocks, found, strict=True) if mark >= _HAS_STATISTICS},
            graded={block for block, mark in zip(blocks, found, strict=True) if mark >= _HAS_GRADIENT},
            unaccounted={block for block, mark in zip(blocks, found, strict=True) if mark >= _UNACCOUNTED},
            terms=verdict.terms,
            edited=verdict.edited and isinstance(self.plan.strategy, Sharded),
            restarted=tuple(restarted),
        )

    def gradients_dropped(self) -> None:
        self._wrappers.forget()
        self._edits.forget()
        if self._flow is not None:
            self._flow.forget()

    def settle(self) -> None:
        if coming := self._coming_refresh():
            self.exchange.merge(coming, self._again)
        self._end_round()

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        # Those of which it was known before are merged already.
        if rest := [block for block in blocks if block not in self._merged]:
            self.exchange.merge(rest)

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        exchange = self.exchange
        here = [block for block in blocks if exchange.owns(block)]
        exchange.mark_elsewhere(here)
        super().solve(here)

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        self.exchange.share(blocks)

    def has_statistics(self, block: KFACBlock) -> bool:
        return self.exchange.status[block.name].held

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        if self._exchange is None:
            return super().counters(block)
        own = {key: value for key, value in super().counters(block).items() if key not in TOLD_COUNTERS}
        told = self._exchange.status.get(block.name)
        return own if told is None else {**own, **told.counters}

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        status = self.exchange.status
        return [(status[block.name].refused, status[block.name].failed) for block in blocks]

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        return self.flow.gradients(blocks)

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        return self.flow.precondition(blocks, grads)

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        return self.flow.direction(blocks, covered)

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return self.flow.owned(params)

    def publish(self, params: Sequence[nn.Parameter]) -> None:
        self.flow.publish()
        self._wrappers.stepped()

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        return self.flow.all_reduce_scalars(values)

    def average(self, values: Tensor) -> Tensor:
        return self.add_up(values) / self.main.world_size

    def keeps(self, block: KFACBlock) -> bool:
        return self.exchange.owns_all(block)

    def add_up(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self.main)

    def clip_grad_norm_(
        self, params: Sequence[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        self.flow.reduce()
        grads = [param.grad for param in self.flow.owned(params) if param.grad is not None]
        norm = self.flow.norm(grads, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"kfac_optim: the total norm of order {norm_type} of the gradients is {float(norm)} and cannot be "
                "clipped; pass error_if_nonfinite=False to scale them all the same."
            )
        owned = self.flow.owned(params)
        for sharded in (False, True):  # torch does not take both at once
            nn.utils.clip_grads_with_norm_([p for p in owned if isinstance(p, DTensor) is sharded], max_norm, norm)
        self._edits.note()
        return norm

    # -- the plan ----------------------------------------------------------------------------------------------

    @property
    def main(self) -> Communicator:
        """Give the communicator of the main line of the program."""
        assert self._main is not None, "no step was begun"
        return self._main

    @property
    def exchange(self) -> StatisticsExchange:
        assert self._exchange is not None, "no step without a plan"
        return self._exchange

    @property
    def holdings(self) -> Holdings:
        assert self._holdings is not None, "no step without a plan"
        return self._holdings

    @property
    def flow(self) -> GradientFlow:
        assert self._flow is not None, "no step without a plan"
        return self._flow

    @property
    def _training_group(self) -> dist.ProcessGroup:
        """All ranks there are, where neither the user nor a wrapper has told of another group."""
        return world() if self._group is None else self._group

    def _listen_to(self, wrapper: DistributedDataParallel, *, may_have_a_hook: bool) -> None:
        """Train as a wrapper of the model does that is not known yet; see `Wrappers.add`."""
        self._train_on(wrapper.process_group, "DistributedDataParallel")
        self._wrappers.add(wrapper, may_have_a_hook=may_have_a_hook)
        self._averaging = AveragingCheck(wrapper)

    def _train_on(self, group: dist.ProcessGroup, whose: str) -> None:
        """Train on the ranks on which the model is wrapped; refuse others than those that are known already."""
        wrapped, known = ranks_of(group), ranks_of(self._training_group)
        if self._group is not None and wrapped != known:
            told = self.config.group is not None
            reason = "its DistributedConfig(group=...) names" if told else "its optimizer has begun to train it on"
            advice = (
                "Leave group out, then it is that of the wrapper; or wrap the model on the same ranks"
                if told
                else "Wrap the model before the first step, always on the same ranks; or build another optimizer"
            )
            raise RuntimeError(
                f"kfac_optim: the model is wrapped by {whose} on the ranks {wrapped}, but {reason} the ranks {known}. "
                f"{advice}."
            )
        self._group, self.worker = group, dist.get_rank(group)

    def _describe(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names) -> None:
        """Take notice of what is to be planned, where that has changed."""
        seen = (
            self._loads,
            [(block, block.spec, block.inverse) for block in blocks],
            [(id(param), param.requires_grad, param.dtype, param.device) for param in params],
        )
        if seen == self._seen:
            return
        self._coming_refresh()  # of the blocks that there were, as ranks whose backward has asked for it know it
        devices = {param.device for param in params}
        if len(devices) > 1:
            raise RuntimeError(
                f"kfac_optim: parameters lie on {', '.join(sorted(map(str, devices)))}; several processes train models "
                "on one device each. Place the model on one, or pass distributed=False."
            )
        # A rank that has no parameter tells the others so.
        (device,) = devices or {_device_of(self._training_group)}
        if self._own is None:
            self._group = self._training_group
            timeout = self.config.timeout or timeout_of(self._group, device)
            self._own = own_groups(self._group, timeout)
            self._main = Communicator(self._own.main, device, timeout, self.config.observe)
        for communicator in (self._main, self._early):
            if communicator is not None:
                communicator.device = device  # blocks follow theirs as well
        self._seen, self._blocks = seen, list(blocks)
        self._model, self._params = _layout(blocks, params, names())
        if self._lost is not None:
            told = [self._lost[block].clock if block in self._lost else block.clock for block in blocks]
            clocks = sorted({(clock.step, clock.refreshed_at, clock.folds, clock.damping) for clock in told})
            self._loaded = f"{self._loads}, the last with clocks (step, last refresh, statistics, damping) {clocks}"
        config = replace(self.config, group=None)
        dtypes = sorted({str(param.dtype) for param in params})
        self._number = _hash([repr(config), self._loaded, *dtypes, *map(repr, self._model)])

    def _vote(self, *, finite: bool, summed: float, norm: float | None, counted: int | None, edited: bool) -> Ballot:
        """What all ranks say, when all have planned the same."""
        arguments = self._arguments()
        # Looking at tensors synchronises, as taking statistics does.
        looks = any(block.has_pending() for block in self._blocks)
        known = Ballot(
            finite,
            summed,
            model=0,
            numbers=_hash_of(arguments),
            norm=norm,
            edited=edited,
            terms=None if counted is None else (counted, counted),
            tensors=_hash_of(self._tensors()) if looks else None,
            marks=(),
        )
        while (verdict := vote(self.main, self._ballot(known))).model != self._agreed:
            if verdict.numbers < 0:
                break
            if verdict.model < 0:
                self._explain_disagreement()
            self._adopt_plan()
        if verdict.numbers < 0 or verdict.tensors == -1:
            self.main.check_agreement({**arguments, **self._tensors()}, differences, remedy)
        return verdict

    def _ballot(self, known: Ballot) -> Ballot:
        """What this rank says of the blocks, beside what is known of the step."""
        if self._number != self._agreed:  # as many marks as others may give
            return known._replace(model=self._number, marks=(0,) * self._marks())
        self._place_anew()
        marks = list(map(_mark, self._blocks))
        stale = [0] * (self._marks() - len(marks))
        if self._reports is not None and (coming := self._coming_refresh()):
            reducer = self.exchange.reducer(coming)
            self._reports.review(reducer)
            for index, flag in enumerate(reducer.stale_flags()):
                stale[index] = int(flag)
        return known._replace(model=self._number, marks=(*marks, *stale))

    def _marks(self) -> int:
        plan = self.plan
        return vote_marks(0, 0) if plan is None else vote_marks(len(plan.layers), len(plan.buckets_of(Payload.SUMS)))

    def _explain_disagreement(self) -> NoReturn:
        plan = self._make_plan()
        self.main.check_agreement(plan.agreement() | {"checkpoints loaded": self._loaded}, differences, remedy)
        raise RuntimeError(
            "kfac_optim: the ranks disagree about what they train, although their plans are equal. Build the same "
            "model, with the same arguments of KFACOptimizer, on every rank."
        )

    def _make_plan(self) -> Plan:
        groups = [block.group for block in self._blocks]
        covered = {id(group): group for block in self._blocks for group in block.groups}.values()
        dtypes = [param.dtype for held in self._params.values() for param in held]
        factor_dtypes = [block.dtype for block in self._blocks]
        options = PlanOptions(
            factor_update_period=groups[0]["factor_update_period"] if groups else 1,
            inverse_update_period=groups[0]["inverse_update_period"] if groups else 1,
            bucket_bytes=self.config.bucket_bytes,
            parameter_dtype=reduce(torch.promote_types, dtypes, torch.bfloat16) if dtypes else torch.float32,
            factor_dtype=reduce(torch.promote_types, factor_dtypes) if factor_dtypes else torch.float32,
            sums_dtype=self.config.sums_dtype,
            momentum=any(group["momentum"] != 0 for group in groups) or self._keeps_direction(list(covered)),
            # Of each group a product of gradient and direction, and of all together the squares of both.
            scalars=(len(covered) + 2, *self._scalars(list(covered))),
            totals=self._totals(list(covered)),
        )
        return make_plan(self._model, self.main.world_size, self._strategy(), self.config.cost, options)

    def _strategy(self) -> Strategy | Auto:
        """Choose the strategy; gradients and momentum of parameters that FSDP2 has sharded are FSDP2's business."""
        wished = self.config.strategy
        of_layers = [param for block in self._blocks for param in block.params]
        if not _any_sharded(of_layers or [param for held in self._params.values() for param in held]):
            return wished
        return FullySharded() if isinstance(wished, Auto) else FullySharded(wished.placement, wished.statistics)

    def _adopt_plan(self) -> None:
        """Plan anew, on all ranks alike, and bring everything to its new place."""
        self._abandon_round()
        old, loaded = self.plan, self._lost is not None
        plan = self._make_plan()
        self.main.check_agreement(plan.agreement(), differences, remedy)
        main = self.main
        if self.config.overlap:
            self._prepare_overlap()
        exchange = StatisticsExchange(plan, self._early or main, main)
        earlier = {} if self._holdings is None else self._holdings.updaters
        holdings = Holdings(plan, self._params, main, exchange, self._state, earlier)
        states: dict[KFACBlock, Any] = {}
        momentum: dict[nn.Parameter, Tensor] = {}
        if old is not None:
            self.flow.restore()
            if not loaded:
                known = [block for block in self._blocks if self._specs.get(block) == block.spec]
                states, momentum = self.holdings.handed_over(known, holdings)
                for block in self._blocks:
                    block.drop_refresh()  # begun by those that owned it
        self.plan, self._agreed = plan, self._number
        self._exchange, self._holdings = exchange, holdings
        sharded = ShardedGradients(plan, main, self._params) if isinstance(plan.strategy, Sharded) else None
        self._wrappers.use(sharded)
        if sharded is not None:
            self._flow = sharded
        elif isinstance(plan.strategy, FullySharded):
            self._flow = RowGradients(plan, main)
        else:
            self._flow = ReplicatedGradients(plan, main)
        self._reports = None
        if self._early is not None and exchange.merges:
            self._reports = EarlyReports(exchange, self._wrappers.synchronise, self._terms)
        self._states.clear()
        self._specs = {block: block.spec for block in self._blocks}
        if self._lost is not None:
            self._restarted += holdings.recover(self._blocks, self._lost)
            self._lost = None
        self._place_anew()
        for block, tensors in states.items():
            block.inverse.load(block.state, tensors)
        for block in self._blocks:
            for _, factor in self.exchange.slots(block, block.state):
                factor.elsewhere = None  # it may be kept here now
        for param, buffer in momentum.items():
            self._state()[param]["momentum_buffer"] = buffer
        holdings.let_go()
        if loaded or old is not None:
            self.exchange.forget_others(self._blocks)
        ready = [block for block in self._blocks if block.is_ready]
        if ready and (loaded or old is not None):
            self.exchange.share(ready)

    def _prepare_overlap(self) -> None:
        """Have a group for what is sent in backward, on all ranks as soon as any of them knows of a wrapper."""
        if self._early is not None:
            return
        main, own = self.main, self._own
        assert own is not None
        (wrapped,) = largest(main, [int(self._wrappers.latest is not None)], "overlap", ())
        if wrapped:
            self._loan = own.borrow(lambda numbers: largest(main, numbers, "overlap", ()))
            observe = self._loan.counting(self.config.observe)
            self._early = Communicator(self._loan.group, main.device, main.timeout, observe)

    def _place_anew(self) -> None:
        """Lay out the memory of states that are new."""
        for block in self._blocks:
            if self._states.get(block) is not block.state:
                self.exchange.place(block)
                self._states[block] = block.state

    # -- the sums of the coming step ---------------------------------------------------------------------------

    def _coming_refresh(self) -> Sequence[KFACBlock]:
        """Blocks that the coming step refreshes, and perhaps a few that it does not: the same on all ranks."""
        if self._due is None:
            self._due = tuple(
                block
                for block in self._blocks
                if block in self._states and block.under_way is None and block.refresh_due(ahead=True)
            )
        return self._due if self._exchange is not None and self._exchange.merges else ()

    def _end_round(self) -> None:
        self._merged = set(self._coming_refresh())
        self._due = None
        if self._reports is not None:
            self._reports.end()

    def _abandon_round(self) -> None:
        """Throw away what was launched; all ranks together."""
        if self._reports is not None and (coming := self._coming_refresh()):
            self.exchange.abandon(coming)
        self._end_round()
        self._merged.clear()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        self._coming_refresh()  # as it is known to all ranks still, for what may be under way
        self._loads += 1
        self._lost = dict(missing)
        self._complete, self._borrowed, self._consolidated = {}, [], False  # of a state that is no more

    def tensors(self, block: KFACBlock) -> Any | None:
        if block in self._complete:
            return self._complete[block]
        exchange = self._exchange
        if exchange is None or self._lost is not None or block not in self._states or exchange.owns_all(block):
            return None if self._lost is not None and block in self._lost else super().tensors(block)
        if block.clock.folds == 0 and exchange.home(block) == self.main.rank:
            # Whole, as there is nothing in it: what `torch.distributed.checkpoint` reads another state into.
            return block.inverse.tensors(block.blank_state())
        return None

    def lacks(self, *, factors: bool) -> str | None:
        plan = self.plan
        measured = any(block.clock.folds for block in self._blocks)
        if plan is None or plan.ranks == 1 or self._consolidated or self._lost is not None or not measured:
            return None
        missing = ["what other ranks have measured since the last refresh"] if factors else []
        momentum = any(group["momentum"] != 0 for block in self._blocks for group in block.groups)
        if isinstance(plan.strategy, Sharded) and momentum:
            missing.append("the momentum of parameters that other ranks update")
        return " and ".join(missing) or None

    def consolidate(
        self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Names, to: int | None
    ) -> None:
        check_rank(to, dist.get_world_size(self._training_group))
        if self.plan is None and self._lost is None:
            return  # nothing was learned
        self.prepare(blocks, params, names)
        self._consolidated = True
        self._abandon_round()
        self.exchange.merge(self._blocks)
        self._complete = self.holdings.gathered(
            {block: [self.exchange.home(block) if to is None else to] for block in self._blocks}
        )
        if to is not None:
            updaters = self.holdings.updaters
            moves = {param: [to] for param, updater in updaters.items() if updater not in (None, to)}
            borrowed = self.holdings.momentum_at(moves)
            self._borrowed = list(borrowed)
            for param, buffer in borrowed.items():
                self._state()[param]["momentum_buffer"] = buffer

    def _give_back(self) -> None:
        """Let go of what was brought here for a checkpoint, which may be in use still: dicts are left as they are."""
        state = self._state()
        if self._complete:
            for param in list(state):
                if isinstance(state[param], dict):
                    state[param] = {name: value for name, value in state[param].items() if name != KEY}
        for param in self._borrowed:
            state[param] = {name: value for name, value in state[param].items() if name != "momentum_buffer"}
        self._complete, self._borrowed, self._consolidated = {}, [], False

    def owners(self, block: KFACBlock) -> Sequence[int]:
        return (0,) if self._exchange is None or block not in self._states else self.exchange.owners(block)


def _mark(block: KFACBlock) -> int:
    """What this rank says of a block in a vote."""
    if block.check.differs:
        return _UNACCOUNTED
    if block.has_pending():
        return _HAS_STATISTICS
    return _HAS_GRADIENT if has_gradient(block) else _UNUSED


def _may_shard(strategy: Strategy | Auto) -> bool:
    return strategy.may_shard if isinstance(strategy, Auto) else isinstance(strategy, Sharded)


def _any_sharded(params: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(param, DTensor) for param in params)


def _hash(lines: Iterable[str]) -> int:
    """Below `2**62`, and not 0."""
    digest = hashlib.sha256(without_addresses("\n".join(lines)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2 | 1


def _hash_of(arguments: Mapping[str, str]) -> int:
    return _hash(f"{name}: {value}" for name, value in arguments.items())


def _layout(
    blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]
) -> tuple[list[Covered | Uncovered], dict[str, Sequence[nn.Parameter]]]:
    """What there is to plan, in the order of the model as far as that is known, and the parameters of each piece."""
    block_of = {param: block for block in blocks for param in block.params}
    order = {param: number for number, param in enumerate(names)}
    model: dict[str, Covered | Uncovered] = {}
    held: dict[str, Sequence[nn.Parameter]] = {}
    for number, param in enumerate(sorted(params, key=lambda each: order.get(each, len(order)))):
        block = block_of.get(param)
        if block is not None:
            model[block.name] = Covered(
                replace(block.spec, name=block.name), block.inverse, shards=_shards(block.params, block.param_names)
            )
            held[block.name] = block.params
        elif param.requires_grad:
            name = names.get(param, f"parameter {number}")
            model[name] = Uncovered(name, param.numel())
            held[name] = (param,)
    return list(model.values()), held


def _shards(params: Sequence[nn.Parameter], names: Sequence[str]) -> tuple[int, ...]:
    """Elements that each rank holds, where parameters are sharded."""
    sharded = [rows_of(p, name) for p, name in zip(params, names, strict=True) if isinstance(p, DTensor)]
    return tuple(sum(held.elements for held in of_rank) for of_rank in zip(*sharded, strict=True))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Give the device on which tensors can be sent."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or "gloo" in dist.get_backend(group) else accelerator
