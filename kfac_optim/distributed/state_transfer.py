"""States on many ranks: brought to new owners when the plan changes, and made whole for checkpoints."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.preconditioning import says_something
from kfac_optim.blocks.state_keys import MOMENTUM, SECOND_MOMENT
from kfac_optim.distributed.communication.consensus import largest
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.strategies import Sharded
from kfac_optim.distributed.state_redistribution import Buffer, Holdings
from kfac_optim.distributed.statistics.shared_statistics import SharedStatistics
from kfac_optim.distributed.training_group import TrainingGroup
from kfac_optim.step.roles import WholeStates


class StateTransfer(WholeStates):
    """Brings statistics, inverses, momentum and the like to the ranks that a plan, or a checkpoint, needs them on.

    Args:
        ranks: the ranks that train.
        state: returns the optimizer's state, for momentum buffers.
    """

    def __init__(self, ranks: TrainingGroup, state: Callable[[], MutableMapping[Any, Any]]) -> None:
        self._ranks = ranks
        self._state = state
        self._plan: Plan | None = None
        self._statistics: SharedStatistics | None = None
        self._holdings: Holdings | None = None
        # How many checkpoints were loaded; blocks that this rank has no statistics of in the last, until all ranks have
        # told each other what they have of it; and names of blocks that no rank has statistics of.
        self._loads = 0
        self._loaded = "none"
        self._lost: dict[KFACBlock, Missing] | None = None
        self._restarted: list[str] = []
        # What was brought here for a checkpoint, until the next step.
        self._complete: dict[KFACBlock, Any] = {}
        self._borrowed: list[Buffer] = []
        self._consolidated = False

    @property
    def updaters(self) -> Mapping[nn.Parameter, int | None]:
        """Return the rank that updates each parameter, and holds its momentum; None where all ranks do."""
        return {} if self._holdings is None else self._holdings.updaters

    @property
    def waits_for_loaded(self) -> bool:
        """Return whether a checkpoint was loaded whose parts are not with their owners yet."""
        return self._lost is not None

    def loaded(self, blocks: Sequence[KFACBlock]) -> str:
        """Describe the checkpoints that were loaded, in words that are the same on ranks which have loaded the same."""
        if self._lost is not None:
            told = [self._lost[block].clock if block in self._lost else block.clock for block in blocks]
            clocks = sorted({(clock.step, clock.refreshed_at, clock.folds, clock.damping) for clock in told})
            self._loaded = f"{self._loads}, the last with clocks (step, last refresh, statistics, damping) {clocks}"
        return self._loaded

    def take_restarted(self) -> tuple[str, ...]:
        """Return names of blocks whose statistics a checkpoint has but no rank has loaded; each name only once."""
        restarted, self._restarted = self._restarted, []
        return tuple(restarted)

    def adopt(self, plan: Plan, params: Mapping[str, Sequence[nn.Parameter]], statistics: SharedStatistics) -> None:
        """Bring everything to where a new plan has it; a collective.

        After a checkpoint was loaded the owners get what some rank has of it. Otherwise the old owners hand over to the
        new ones: each block is made whole on one rank, and sent on. That comes before the new plan lays out memory, as
        this gives up what a rank does not need any more.

        Args:
            plan: the new plan.
            params: the parameters of each piece of it, by name.
            statistics: carries out its refreshes.
        """
        main, blocks = self._ranks.main, statistics.blocks
        holdings = Holdings(plan, params, main, statistics.exchange, self._state, self.updaters)
        is_first, was_loaded = self._statistics is None, self._lost is not None
        states: dict[KFACBlock, Any] = {}
        buffers: dict[Buffer, Tensor] = {}
        if self._holdings is not None and self._statistics is not None and not was_loaded:
            states, buffers = self._holdings.handed_over(self._statistics.planned_as_it_is(), holdings)
            for block in blocks:
                block.under_way = None  # the old owners have begun it
        earlier = self._plan
        self._plan, self._holdings, self._statistics = plan, holdings, statistics
        if self._lost is not None:
            self._restarted += holdings.recover(blocks, self._lost)
            self._lost = None
        elif earlier is not None:
            planned = {layer.name for layer in earlier.layers}
            self._restart_parted([block for block in blocks if block.name not in planned])
        statistics.place_new()
        for block, tensors in states.items():
            block.state.load(tensors)
        for block in blocks:
            for _, factor in statistics.exchange.slots(block, block.state):
                factor.elsewhere = None  # its average may be kept here now
        for (param, key), tensor in buffers.items():
            self._state()[param][key] = tensor
        holdings.let_go()
        if was_loaded or not is_first:
            statistics.exchange.forget_others(blocks)
            if ready := [block for block in blocks if block.is_ready]:
                statistics.share(ready)

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        if self._statistics is not None:
            self._statistics.hold_off()
        self._loads += 1
        self._lost = dict(missing)
        self._complete, self._borrowed, self._consolidated = {}, [], False  # they belong to a state that is gone

    def late(self, block: KFACBlock, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._lost is not None:
            self._lost |= checkpoint.missing([block], [state])
        elif state["spread"]:  # ranks have told each other what they have: too late for one to have it alone
            self._restarted.append(block.name)
            return {key: value for key, value in state.items() if key not in ("inverse", "under_way")}
        return state

    def _restart_parted(self, blocks: Sequence[KFACBlock]) -> None:
        """Have blocks begin again that some ranks alone have an inverse of, as their checkpoints were not of one rank.

        What `late` has seen here does not tell: a checkpoint of a rank that had all is like that of a single process.
        """
        if not blocks:
            return
        words = [int(ready) for block in blocks for ready in (block.is_ready, not block.is_ready)]
        told = largest(self._ranks.main, words, "shown late", [block.name for block in blocks])
        for block, some, lacking in zip(blocks, told[::2], told[1::2], strict=True):
            if some and lacking:
                if block.is_ready:
                    block.restart()
                    block.discard()  # it may be measured by the inverse that is gone
                if block.name not in self._restarted:
                    self._restarted.append(block.name)

    def tensors(self, block: KFACBlock) -> Any | None:
        if block in self._complete:
            return self._complete[block]
        if self._lost is not None:
            return None if block in self._lost else super().tensors(block)
        statistics = self._statistics
        if statistics is None or not statistics.is_placed(block) or statistics.keeps(block):
            return super().tensors(block)
        if block.clock.folds == 0 and statistics.exchange.home(block) == self._ranks.rank:
            # Nothing was measured, so it is whole: `torch.distributed.checkpoint` reads another state into it.
            return block.blank_state().tensors()
        return None

    def lacks(self, *, factors: bool) -> str | None:
        plan, statistics = self._plan, self._statistics
        if plan is None or statistics is None or plan.ranks == 1 or self._consolidated or self._lost is not None:
            return None
        measured = any(block.clock.folds for block in statistics.blocks)
        missing = ["what other ranks have measured since the last refresh"] if factors and measured else []
        if isinstance(plan.strategy, Sharded) and (
            (measured and _keeps_momentum(statistics)) or self._has_momentum(statistics)
        ):
            missing.append("the momentum of parameters that other ranks update")
        return " and ".join(missing) or None

    def _has_momentum(self, statistics: SharedStatistics) -> bool:
        """Return whether steps have left momentum here of what belongs to no layer, or averages of Adam."""
        covered = {param for block in statistics.blocks for param in block.params}  # which may have kept directions
        held = {param: each for param, each in self._state().items() if isinstance(each, dict)}
        momenta = [each.get(MOMENTUM) for param, each in held.items() if param not in covered]
        return any(map(says_something, (*momenta, *(each.get(SECOND_MOMENT) for each in held.values()))))

    def consolidate(self, to: int | None) -> None:
        """Bring whole states to rank `to`, or to one owner of each block; a collective, after a vote."""
        statistics, holdings = self._statistics, self._holdings
        assert statistics is not None, "the vote makes a plan"
        assert holdings is not None, "the vote makes a plan"
        self._consolidated = True
        statistics.abandon()
        exchange = statistics.exchange
        exchange.merge(statistics.blocks)
        self._complete = holdings.gathered(
            {block: [exchange.home(block) if to is None else to] for block in statistics.blocks}
        )
        if to is not None:
            moves = {param: [to] for param, updater in holdings.updaters.items() if updater not in (None, to)}
            borrowed = holdings.buffers_at(moves)
            self._borrowed = list(borrowed)
            for (param, key), tensor in borrowed.items():
                self._state()[param][key] = tensor

    def give_back(self) -> None:
        """Let go of what was brought here for a checkpoint.

        The checkpoint may still hold the very dicts, so they are replaced and not changed.
        """
        state = self._state()
        if self._complete:
            for param in list(state):
                if isinstance(state[param], dict):
                    state[param] = {name: value for name, value in state[param].items() if name != checkpoint.KEY}
        for param, key in self._borrowed:
            state[param] = {name: value for name, value in state[param].items() if name != key}
        self._complete, self._borrowed, self._consolidated = {}, [], False


def _keeps_momentum(statistics: SharedStatistics) -> bool:
    return any(group["momentum"] != 0 for block in statistics.blocks for group in block.groups)
