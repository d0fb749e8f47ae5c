"""The ranks that train beside statistics workers: they take no statistics and refresh nothing."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor, nn

from kfac_optim.blocks.block import SILENT_STEPS, KFACBlock, Missing
from kfac_optim.blocks.clock import Clock, period_of
from kfac_optim.distributed.communication.consensus import Ballot
from kfac_optim.distributed.communication.process_groups import device_of, ranks_of, timeout_of
from kfac_optim.distributed.communication.transfer import leaves, nested
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.planning.plan_options import TOLD_COUNTERS
from kfac_optim.distributed.serving.messages import BlockAnswer, Kind, results_of, with_shown
from kfac_optim.distributed.serving.rounds import Progress, Rounds
from kfac_optim.distributed.state_transfer import StateTransfer
from kfac_optim.distributed.statistics.exchange import StatisticsExchange, Status
from kfac_optim.distributed.statistics.overlap import EarlyReports
from kfac_optim.distributed.statistics.shared_statistics import SharedStatistics
from kfac_optim.distributed.statistics_workers import Role, StatisticsWorkers
from kfac_optim.distributed.training_group import TrainingGroup
from kfac_optim.step.execution import Agreement, Trained, check_rank
from kfac_optim.step.refresher import Refresher
from kfac_optim.utils.sharded_params import is_sharded


class ServedStatistics(SharedStatistics):
    """Has no statistics here: inverses come from the workers, and all ranks that train hold them.

    Args:
        exchange: sends and receives under the plan.
        blocks: all blocks of the plan.
        workers: the ranks of the workers.
    """

    def __init__(self, exchange: StatisticsExchange, blocks: Sequence[KFACBlock], workers: Sequence[int]) -> None:
        super().__init__(exchange, None, blocks)
        self._workers = workers

    def coming(self) -> Sequence[KFACBlock]:
        return ()

    def place_new(self) -> None:
        super().place_new()
        for block in self.blocks:
            block.measured_here = False

    def keeps(self, block: KFACBlock) -> bool:
        return False

    def owners(self, block: KFACBlock) -> Sequence[int]:
        return self._workers


class ServedStates(StateTransfer):
    """Knows what checkpoints hold on ranks that train.

    Args:
        ranks: the ranks that train.
        state: returns the optimizer's state, for momentum buffers.
        rounds: gives orders; one that is under way is of no use once a checkpoint is loaded.
    """

    def __init__(self, ranks: TrainingGroup, state: Callable[[], MutableMapping[Any, Any]], rounds: Rounds) -> None:
        super().__init__(ranks, state)
        self._rounds = rounds

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        super().loading(missing)
        self._rounds.make_void()

    def lacks(self, *, factors: bool) -> str | None:
        statistics = self._statistics
        if not factors or statistics is None or self._consolidated or self._lost is not None:
            return None
        if not any(block.clock.folds for block in statistics.blocks):
            return None
        return f"the statistics, which the statistics workers {'had' if self._rounds.ended else 'keep'}"

    @property
    def remedy(self) -> str:
        if self._rounds.ended:
            return (
                "Now that the workers are dismissed, no call brings the statistics back. Another time call "
                "optimizer.consolidate_state_dict() and state_dict() before dismiss_workers()."
            )
        return "Call optimizer.consolidate_state_dict() on all ranks that train right before state_dict()."

    def hold(self, states: Mapping[KFACBlock, Any]) -> None:
        """Have checkpoints hold these states until the next step."""
        self._complete, self._consolidated = dict(states), True


class TrainingExecutor(DistributedExecutor):
    """Carries out steps with the inverses that statistics workers send.

    A round begins within a step whose number says so, where the engine folds and refreshes on one process; blocks'
    clocks go on as if that had been done here. The answer is taken over as a later step begins. So what
    `Background(max_staleness=..., deterministic=...)` does in a thread is done here on other ranks.

    Args:
        config: the user's choices, with the group of the ranks that train; `timeout` is that of messages too.
        optimizer: what is to be known of the optimizer.
        choice: the user's choice of workers.
        role: the role of this rank.
    """

    def __init__(
        self, config: DistributedConfig, optimizer: OptimizerView, *, choice: StatisticsWorkers, role: Role
    ) -> None:
        super().__init__(config, optimizer)
        self._choice, self._role = choice, role
        self.rounds = Rounds(role, timeout_of_lines(config, role))
        self.states = ServedStates(self.ranks, optimizer.state, self.rounds)
        self._model: nn.Module | None = None
        self._progress = Progress.ARRIVED  # of the rank that is least far
        self._begins = False
        self._last_round = -1  # its step, before the present one
        self._tries = 0
        self._unaccounted: set[str] = set()

    def attach(self, model: nn.Module | None) -> None:
        super().attach(model)
        self._model = model

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        if any(map(is_sharded, params)):
            raise NotImplementedError(
                f"kfac_optim: {self._choice!r} needs whole parameters on the ranks that train, and some are sharded, "
                "by fully_shard or tensor parallelism. Use DistributedDataParallel, or leave workers out."
            )
        super().check(blocks, params)
        for block in blocks:
            if block.measured_here:  # it is new, and the forward that has shown it may have measured it
                block.measured_here = False
                block.discard()

    def close(self) -> None:
        self.rounds.close()
        super().close()

    # -- a step ------------------------------------------------------------------------------------------------

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        agreement = super().agree(trained, finite=finite, summed=summed, counted=counted, rescaled=rescaled)
        if not agreement.finite:
            return agreement
        step = step_of(trained.blocks)
        since = self.rounds.under_way_since
        if since is not None and self._progress is Progress.FAILED:
            self.rounds.fail()
        arrived = self._progress is Progress.ARRIVED and not self._choice.deterministic
        if since is not None and (arrived or step - since >= self._choice.max_staleness):
            self._take_over()
        unaccounted = {block for block in trained.blocks if block.name in self._unaccounted}
        self._unaccounted.clear()
        self._last_round = max((block.clock.folded_at for block in trained.blocks), default=-1)
        # The workers have found out already what this step concludes of such layers.
        self._begins = not unaccounted and self._is_due(trained.blocks, step)
        sampled = set(trained.blocks) if self._begins else set()
        return agreement._replace(sampled=sampled, unaccounted=unaccounted)

    def begin(self, blocks: Sequence[KFACBlock]) -> None:
        """Begin a round, if this is the step for it; clocks and dampings are those of this step."""
        if not self._begins:
            return
        self._begins = False
        assert self._model is not None, "blocks are of a model"
        step = step_of(blocks)
        due = [block for block in blocks if block.refresh_due() or _has_passed(block, self._last_round, step)]
        self.rounds.begin(Kind.MEASURE, step, blocks, due, self._model)
        is_first = self._tries < SILENT_STEPS and not any(block.is_ready for block in blocks)
        self._tries += is_first
        if is_first or self._choice.max_staleness == 0:
            self._take_over()

    def consolidate(self, trained: Trained, to: int | None) -> None:
        """Have the workers send what they keep, and hold it; what is under way is taken over before."""
        self.joining.refuse("consolidate_state_dict()", "Call it after the `with` block.")
        check_rank(to, ranks_of(self.ranks.group))
        if self.plan is None and not self.states.waits_for_loaded:
            return  # nothing was learned
        self._describe(trained)
        self._vote(call=f"consolidate_state_dict(to={to})")
        assert self.planned is not None, "the vote makes a plan"
        assert isinstance(self.states, ServedStates)
        if self.rounds.under_way_since is not None:
            self._take_over()
        # Those that a worker has struck out it may not know any more.
        blocks = [block for block in trained.blocks if block.name not in self._unaccounted]
        if self.rounds.ended or not any(block.clock.folds for block in blocks):
            return
        templates = {block: block.state.tensors() for block in blocks}
        self.rounds.begin(Kind.STATES, step_of(blocks), blocks, blocks, None, templates)
        tensors = self.rounds.finish().tensors
        if tensors is None:
            raise RuntimeError(
                "kfac_optim: the statistics workers know other layers than the ranks that train, or more of them, so "
                "that no checkpoint can be made now. Call consolidate_state_dict() after the next step."
            )
        coming, states = iter(tensors), {}
        for block, template in templates.items():
            found = [(path, next(coming)) for path, _ in leaves(template)]
            if self.worker == (self.planned.exchange.home(block) if to is None else to):
                device = block.params[0].device
                states[block] = nested((path, tensor.to(device, copy=True)) for path, tensor in found)
        self.states.hold(states)

    def dismiss(self) -> None:
        """Have the workers return, and go on with the inverses as they are."""
        self.rounds.end()

    def _vote(self, **known: Any) -> Ballot:
        ballot = super()._vote(progress=self.rounds.progress(), **known)
        self._progress = Progress(ballot.marks[-1])
        return ballot

    def _statistics_of(self, exchange: StatisticsExchange, reports: EarlyReports | None) -> SharedStatistics:
        return ServedStatistics(exchange, self.agreement.blocks, self._role.workers)

    def _is_due(self, blocks: Sequence[KFACBlock], step: int) -> bool:
        """Return whether a round begins at this step."""
        if not blocks or self.rounds.ended or self.rounds.under_way_since is not None:
            return False
        period = min(period_of(block.group, "factor_update_period") for block in blocks)
        waits = self._tries < SILENT_STEPS and not any(block.is_ready for block in blocks)
        return waits or step // period > self._last_round // period

    def _take_over(self) -> None:
        """Take the answer over, on all ranks that train at the same place in the program."""
        answer = self.rounds.finish()
        if answer.void:
            return
        for block, told in answer.numbers.items():
            if told.unaccounted:
                self._unaccounted.add(block.name)
            elif (spec := with_shown(block.spec, told)) != block.spec:
                clock = block.clock
                block.revise(spec)
                block.clock = replace(clock, refreshed_at=-1)  # until a result comes there is no inverse
        asked = [(block, then) for block, then in answer.asked if not answer.numbers[block].unaccounted]
        if answer.tensors is None and asked:  # of layers that are known better now, or not of all
            again, step = [block for block, _ in asked], max(clock.step for _, clock in asked)
            self.rounds.begin(Kind.RESULTS, step, list(answer.numbers), again, None)
            tensors = self.rounds.finish().tensors
        elif answer.tensors is not None:
            asked, tensors = answer.asked, answer.tensors
        else:
            return
        if tensors is not None:
            self._adopt_results(answer.numbers, asked, tensors)

    def _adopt_results(
        self,
        numbers: Mapping[KFACBlock, BlockAnswer],
        asked: Sequence[tuple[KFACBlock, Clock]],
        tensors: Sequence[Tensor],
    ) -> None:
        assert self.planned is not None, "there is a plan that all ranks agree on"
        coming = iter(tensors)
        for block, then in asked:
            told, own = numbers[block], block.state.counters()
            received: dict[str, dict[int, Tensor]] = {}
            for part, number, result in results_of(block):
                received.setdefault(part, {})[number] = result.unpacked(next(coming))
            counters = {key: each for key, each in zip(TOLD_COUNTERS, told.counters, strict=True) if key in own}
            status = Status(bool(told.held), int(told.refused), int(told.failed), counters)
            self.planned.exchange.status[block.name] = status
            if told.refreshed and told.held and not told.unaccounted:
                for part, numbered in received.items():
                    block.state.take(part, numbered)
                block.clock.note_adoption(then)


class RoundRefresher(Refresher):
    """Begins rounds in the place of refreshes."""

    def __init__(self, executor: TrainingExecutor) -> None:
        super().__init__(executor)
        self._training = executor

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        self._training.begin(blocks)
        return ()

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        return ()


def timeout_of_lines(config: DistributedConfig, role: Role) -> timedelta:
    """Return the time-out of messages: the user's, or that of the ranks that train."""
    return config.timeout or timeout_of(role.group, device_of(role.group))


def step_of(blocks: Sequence[KFACBlock]) -> int:
    """Return the number of the present step."""
    return max((block.clock.step for block in blocks), default=0)


def _has_passed(block: KFACBlock, before: int, step: int) -> bool:
    """Return whether a refresh was due by period since the last round."""
    period = period_of(block.group, "inverse_update_period")
    at = block.phase.numerator * period // block.phase.denominator
    return (step - at) // period > (before - at) // period
