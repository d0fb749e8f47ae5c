"""K-FAC on the ranks of a process group: the executor, which has its parts work together in one order on all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import has_gradient, is_used
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.distributed.communication.consensus import Ballot
from kfac_optim.distributed.communication.process_groups import ranks_of
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.gradients.averaging import AveragingCheck
from kfac_optim.distributed.gradients.ddp import OwnersHook
from kfac_optim.distributed.gradients.edits import EditWatch, LateGradients
from kfac_optim.distributed.gradients.flow import GradientFlow, ReplicatedGradients, sum_scalars
from kfac_optim.distributed.gradients.gradient_rows import RowGradients
from kfac_optim.distributed.gradients.grid import mesh_of
from kfac_optim.distributed.gradients.joining import Joining
from kfac_optim.distributed.gradients.sharded_gradients import (
    ShardedGradients,
    refuse_added,
    refuse_complex,
    refuse_sparse,
)
from kfac_optim.distributed.gradients.sharding import check_sharding, group_of_rows, ranks_alike, share_of_mean
from kfac_optim.distributed.gradients.wrappers import Wrappers
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.plan_agreement import PlanAgreement
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.strategies import Auto, Exchange, FullySharded, Sharded, Strategy
from kfac_optim.distributed.refusals import refuse_coarse_sketches, refuse_wrapper
from kfac_optim.distributed.state_transfer import StateTransfer
from kfac_optim.distributed.statistics.exchange import StatisticsExchange
from kfac_optim.distributed.statistics.overlap import EarlyReports
from kfac_optim.distributed.statistics.shared_statistics import SharedStatistics
from kfac_optim.distributed.training_group import TrainingGroup
from kfac_optim.factors.second_moments import on_host
from kfac_optim.step.execution import Agreement, Executor, Trained, check_rank
from kfac_optim.step.roles import LossShare
from kfac_optim.utils.sharded_params import Shards, is_sharded

# A mark says in a vote what one rank knows of a block; a higher number includes what the lower ones say.
_UNUSED, _HAS_GRADIENT, _IS_USED, _HAS_STATISTICS, _JOINS_USES, _IS_PARTIAL, _UNACCOUNTED = range(7)


class DistributedExecutor(Executor):
    """Carries out the steps of `DistributedConfig`.

    Args:
        config: the user's choices, the same on all ranks.
        optimizer: what is to be known of the optimizer.
    """

    several = True

    def __init__(self, config: DistributedConfig, optimizer: OptimizerView) -> None:
        super().__init__()
        self.config = config
        self._optimizer = optimizer
        self.ranks = TrainingGroup(config)
        self.agreement = PlanAgreement(config, self.ranks, optimizer)
        self.gradients: GradientFlow = GradientFlow()
        self.states: StateTransfer = StateTransfer(self.ranks, optimizer.state)
        self._wrappers = Wrappers(to_owners=_may_shard(config.strategy), observe=config.observe)
        directly = config.exchange is Exchange.DIRECT
        self.joining = Joining(self._wrappers, to_owners=_may_shard(config.strategy), directly=directly)
        self._averaging = AveragingCheck(None)
        self._edits, self._late = EditWatch(), LateGradients()
        self._checked: tuple[int | str, ...] = ()  # what was found fit to train
        self._alike: list[int] = []
        self._looked_at: nn.Module | None = None
        self._share_of_mean = 1.0

    @property
    def plan(self) -> Plan | None:
        """Return which rank does what; None before the first step."""
        return self.agreement.plan

    @property
    def planned(self) -> SharedStatistics | None:
        """Return `statistics` as soon as there is a plan; None before."""
        return self.statistics if isinstance(self.statistics, SharedStatistics) else None

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """Return the wrapper of the model whose forward was the last; None where none is known."""
        return self._wrappers.latest

    @property
    def worker(self) -> int:  # type: ignore[override]
        return self.ranks.rank

    @property
    def source(self) -> int:
        if not self._alike:
            return self.worker
        everyone, first = ranks_of(self.ranks.group), self._alike[0]
        return everyone.index(first) if first in everyone else self.worker

    @property
    def sees_all_gradients(self) -> bool:  # type: ignore[override]
        return not _may_shard(self.config.strategy if self.plan is None else self.plan.strategy)

    # -- the model and its wrappers ------------------------------------------------------------------------------

    def attach(self, model: nn.Module | None) -> None:
        super().attach(model)
        self._look_at(model)
        if (wrapper := self._wrappers.find(model)) is not None:
            self._listen_to(wrapper, may_have_a_hook=False)

    def begin_forward(self, model: nn.Module) -> int:
        self._look_at(model)
        self.gradients.begin_forward()
        self._late.begin_forward()
        if (wrapper := self._wrappers.begin_forward(model)) is not None:
            self._listen_to(wrapper, may_have_a_hook=True)
        return self.source

    def close(self) -> None:
        self._wrappers.release()
        if self.planned is not None:
            self.planned.close()
        self.ranks.close()

    def release(self) -> None:
        self._wrappers.release()
        self.gradients.dropped()

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        echoes = self.source != self.worker
        for block in blocks:
            block.counted_elsewhere(echoes)
        self.joining.check()
        if self.wrapper is not None:
            refuse_wrapper(self.wrapper, self.config)  # again, as a communication hook may have come since
        if not self.ranks.is_known and (group := group_of_rows(params, self._shards)) is not None:
            self.ranks.train_on(group, "fully_shard")
        self._share_of_mean = share_of_mean(blocks, self._shards)
        if _may_shard(self.config.strategy):
            self._edits.follow(params)  # the one that was watched may be frozen now
        covered = [name for block in blocks for name in block.param_names]
        looked_at: tuple[int | str, ...] = (*map(id, params), *covered)
        if looked_at == self._checked:
            return
        check_sharding(blocks, params, self._shards, self.ranks.group)
        refuse_coarse_sketches(blocks, self.config)
        in_parts, of_layers = any(map(is_sharded, params)), [param for block in blocks for param in block.params]
        if isinstance(self.config.strategy, FullySharded) and params and not in_parts:
            raise RuntimeError(
                "kfac_optim: FullySharded() is for parameters that fully_shard has sharded, and none is. Shard the "
                "model before the optimizer is built, or use Replicated() or Sharded()."
            )
        if _may_shard(self.config.strategy) and in_parts and of_layers and not any(map(is_sharded, of_layers)):
            raise RuntimeError(
                "kfac_optim: Sharded() gathers whole parameters after each step. Some parameters are in parts on "
                "several ranks, and no layer that K-FAC preconditions is. Use Replicated()."
            )
        self._checked = looked_at

    def _look_at(self, model: nn.Module | None) -> None:
        """Find the ranks that see the same examples, and parameters in shards, once for each model."""
        if model is not None and model is not self._looked_at:
            self._looked_at, self._alike, self._shards = model, ranks_alike(model), Shards(model)

    def _listen_to(self, wrapper: DistributedDataParallel, *, may_have_a_hook: bool) -> None:
        """Train as a wrapper of the model does that is not known yet; see `Wrappers.add`."""
        refuse_wrapper(wrapper, self.config)
        self.ranks.train_on(wrapper.process_group, "DistributedDataParallel")
        self._wrappers.add(wrapper, may_have_a_hook=may_have_a_hook)
        self._averaging = AveragingCheck(wrapper)

    def _serves_another(self) -> bool:
        """Return whether the wrapper brings gradients to the owners of another optimizer."""
        wrapper = None if _may_shard(self.config.strategy) else self.wrapper
        hook = None if wrapper is None else OwnersHook.of(wrapper)
        return hook is not None and hook.is_in_use

    # -- a step ------------------------------------------------------------------------------------------------

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        self._describe(trained)
        blocks, params = trained.blocks, trained.params
        # Under Sharded() `.grad` differs between ranks; otherwise the training loop has to make it the mean.
        # A rank that has run out of examples gets the mean of others only after the vote.
        compares = finite and not isinstance(self.agreement.strategy(), Sharded) and not self.joining.has_run_out
        reduces = self._wrappers.take_reduces()
        if has_owners := isinstance(self.gradients, ShardedGradients):
            norm = self.gradients.kept.norm_of_added() if finite else None
        else:
            norm = self._averaging.norm(params, reduces=reduces) if compares else None
        # Where gradients are views of what a wrapper sends, a scaler's division looks like any other edit.
        wrapper = self._wrappers.latest
        views = wrapper is not None and wrapper.gradient_as_bucket_view
        in_place = self._edits.finds_edit(expected=int(rescaled)) and not (rescaled and views)
        call = self._late.named("step()")
        if sums := self._optimizer.sums_loss:
            counted = self._summed_here(summed)
        verdict = self._vote(finite=finite, norm=norm, counted=counted, edited=in_place, call=call)
        assert self.plan is not None, "the vote makes a plan"
        assert self.planned is not None, "the vote makes a plan"
        sharded = isinstance(self.plan.strategy, Sharded)
        self._late.refuse()
        if sharded:
            refuse_sparse(trained)
        if verdict.finite and verdict.norm is not None:
            if has_owners:
                refuse_added(verdict.norm)
            elif not sharded:
                self._averaging.check(verdict.norm, params, trained.names(), serves_another=self._serves_another())
        found, again = verdict.marks[: len(blocks)], verdict.marks[len(blocks) :]
        self.planned.resend(list(map(bool, again)))
        # From here on all ranks do the same, as `finite` is what all of them have found together.
        self.joining.give_gradients(self.ranks.main, params, whole=not sharded, scaled=rescaled)
        if verdict.finite and not sharded and not has_owners:
            self._averaging.count(params, reduces=reduces or self.joining.has_run_out)
        if verdict.finite:
            self.gradients.reduce()
        else:
            self.planned.abandon()
            self.gradients.forget()
            self._late.end()
        graded, used, sampled, unaccounted = (
            {block for block, mark in zip(blocks, found, strict=True) if mark >= least}
            for least in (_HAS_GRADIENT, _IS_USED, _HAS_STATISTICS, _UNACCOUNTED)
        )
        in_place, restarted = verdict.edited and sharded, self.states.take_restarted()
        terms = verdict.terms
        if sums:
            summed = self._mean_of_terms(counted, *terms) if verdict.finite and terms is not None else 0
            terms = None
        return Agreement(verdict.finite, summed, sampled, graded, unaccounted, terms, in_place, restarted, used)

    def _summed_here(self, summed: float) -> int | None:
        """Return the terms of a summed loss on this rank; None where it has counted none and others may say how many.

        A rank that has run out of examples has none.
        """
        return int(summed) if summed or self.joining.adds_nothing else None

    def _mean_of_terms(self, counted: int | None, least: int, most: int) -> float:
        """Return the terms of the summed loss whose gradients are those of this step; a collective if ranks differ.

        Args:
            counted: the terms counted on this rank; None if it has counted none, which is taken for as many as the
                others have.
            least: the least that a rank has counted.
            most: the most that a rank has counted.
        """
        mean = float(most)
        if least < most:
            main = self.ranks.main
            mine = torch.tensor([counted or 0, counted is not None], dtype=torch.float64, device=main.device)
            total, ranks = sum_scalars(mine, main).tolist()
            mean = total / ranks
        return mean / self._share_of_mean

    def loss_shares(self, sampled: Sequence[KFACBlock], count: LossCount) -> tuple[list[LossShare], bool]:
        """Tell what loss the statistics are of: the one whose mean over ranks is minimised, whatever FSDP2 divides by.

        If a rank's own loss is a mean, that loss is a mean over as many terms: ranks may add shares of a mean over all
        examples. If it is a sum, its terms weigh as in a mean over `share_of_mean` terms, a number that may be below 1.
        """
        if self._optimizer.sums_loss:
            count = count._replace(averaged=self._share_of_mean)
        return [LossShare(sampled, count, self._share_of_mean)], bool(sampled)

    def gradients_dropped(self) -> None:
        self._edits.forget()
        self._late.end()
        self.gradients.dropped()

    def publish(self) -> None:
        self.gradients.publish()
        self._late.end()

    def clip_grad_norm_(
        self, trained: Trained, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        if self.joining.is_on:
            if _may_shard(self.config.strategy):  # so that nobody has the norm of all gradients
                remedy = "Use DistributedConfig(strategy=Replicated()), or leave clipping out."
                self.joining.refuse("clip_grad_norm_() under Sharded()", remedy)
            # Every rank with examples has the mean of all gradients.
            return super().clip_grad_norm_(trained, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        norm = self.stages.norm(self.grad_norm(trained, norm_type), norm_type)
        self.clip(trained, max_norm, norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return norm

    def grad_norm(self, trained: Trained, norm_type: float) -> Tensor:
        """Return the norm of all gradients together, `[]`, once they are the mean; a collective."""
        self._describe(trained)
        self._vote(call=self._late.named("clip_grad_norm_()"))
        self._late.refuse()
        self.gradients.reduce()
        if isinstance(self.gradients, ShardedGradients):
            self._late.begin(trained.params)
        owned = self.gradients.owned(trained.params)
        return self.gradients.norm([param.grad for param in owned if param.grad is not None], norm_type)

    def _scale_gradients(self, params: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        owned = self.gradients.owned(params)
        for mesh in {mesh_of(param) for param in owned}:  # torch takes those of one mesh at once
            super()._scale_gradients([p for p in owned if mesh_of(p) == mesh], max_norm, norm)
        self._edits.note()

    def consolidate(self, trained: Trained, to: int | None) -> None:
        self.joining.refuse("consolidate_state_dict()", "Call it after the `with` block.")
        check_rank(to, ranks_of(self.ranks.group))
        if self.plan is None and not self.states.waits_for_loaded:
            return  # nothing was learned
        self._describe(trained)
        self._vote(call=f"consolidate_state_dict(to={to})")
        self.states.consolidate(to)

    def mean_over_examples(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self.ranks.main) / self.ranks.main.world_size

    # -- the plan ----------------------------------------------------------------------------------------------

    def _describe(self, trained: Trained) -> None:
        """Take notice of what is to be planned, if it has changed."""
        self.states.give_back()
        loaded = self.states.loaded(trained.blocks)
        if self.agreement.has_changed(trained, loaded):
            self.ranks.open(trained.params)
            self.agreement.describe(trained, loaded)
            if self.planned is not None:
                self.planned.follow(self.agreement.blocks)

    def _vote(self, **known: Any) -> Ballot:
        """Return what all ranks say, once all of them go by the same plan."""
        while True:
            verdict = self.agreement.vote(self._marks, **known)
            if not self.agreement.is_settled(verdict):
                self._adopt_plan()
            elif not self._join(verdict):
                return verdict

    def _join(self, verdict: Ballot) -> bool:
        """Make statistics of all uses together where some rank does; whether ranks must vote again, as all then know.

        A rank whose own loss holds no derivatives of the model drops what it has measured otherwise in this step.
        """
        assert self.planned is not None, "there is a plan that all ranks agree on"
        marked = list(zip(self.agreement.blocks, verdict.marks, strict=False))  # marks of buckets follow
        for block, mark in marked:
            if mark == _IS_PARTIAL:
                block.note_partial()
        return self.planned.join([block.name for block, mark in marked if mark in (_JOINS_USES, _IS_PARTIAL)])

    def _marks(self) -> list[int]:
        """Return what this rank says of each block, and of each bucket that it has sent early."""
        assert self.planned is not None, "there is a plan that all ranks agree on"
        self.planned.place_new()
        return [*map(_mark, self.agreement.blocks), *map(int, self.planned.stale_flags())]

    def _adopt_plan(self) -> None:
        """Go by a new plan, on all ranks alike, and bring everything to its new place.

        Every line here is reached by all ranks at the same time: the vote has said so. What was sent early under the
        old plan is thrown away first, as its buckets are not those of the new one.
        """
        if self.planned is not None:
            self.planned.abandon()
        plan = self.agreement.make_plan()
        if isinstance(plan.strategy, Sharded):
            refuse_complex(self.agreement.params)
        if self.config.overlap:
            self.ranks.open_early(wrapped=self._wrappers.latest is not None)
        if isinstance(plan.strategy, Sharded) and plan.by_segments(Payload.GRADIENTS):
            self.ranks.open_delivery()
        main, early = self.ranks.main, self.ranks.early
        exchange = StatisticsExchange(plan, early or main, main)
        reports = None
        if early is not None and exchange.merges:
            reports = EarlyReports(exchange, self._wrappers.synchronise, self._optimizer.terms)
        self.gradients.restore()  # while the old owners still are known
        self.gradients = self._flow_of(plan)
        statistics = self._statistics_of(exchange, reports)
        self.states.adopt(plan, self.agreement.params, statistics)
        self.statistics = statistics
        self.agreement.adopt(plan)

    def _statistics_of(self, exchange: StatisticsExchange, reports: EarlyReports | None) -> SharedStatistics:
        return SharedStatistics(exchange, reports, self.agreement.blocks)

    def _flow_of(self, plan: Plan) -> GradientFlow:
        main = self.ranks.main
        if isinstance(plan.strategy, Sharded):
            sharded = ShardedGradients(plan, main, self.agreement.params, self.ranks.delivery)
            self._wrappers.use(sharded)
            return sharded
        self._wrappers.use(None)
        if isinstance(plan.strategy, FullySharded):
            assert self.agreement.grid is not None, "what is planned was described"
            return RowGradients(plan, main, self.agreement.grid)
        return ReplicatedGradients(plan, main, self.agreement.params)


def _mark(block: KFACBlock) -> int:
    """Return what this rank says of a block in a vote."""
    if block.check.differs:
        return _UNACCOUNTED
    if block.is_partial:
        return _IS_PARTIAL
    if block.has_pending():
        return _HAS_STATISTICS if block.joint is None else _JOINS_USES
    if not has_gradient(block):
        return _UNUSED
    # Looking at gradients synchronises with accelerators. It is asked for of blocks that have no inverse yet, and on
    # the host of those whose statistics have not come (`turns`).
    looks = not block.is_ready or (on_host(block.params[0]) and block.is_overdue())
    return _IS_USED if looks and is_used(block) else _HAS_GRADIENT


def _may_shard(strategy: Strategy | Auto) -> bool:
    return strategy.may_shard if isinstance(strategy, Auto) else isinstance(strategy, Sharded)
