"""A block is what is preconditioned as one: a layer's gradient matrix, its adapter, its inverse and its clock."""

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kfac_optim.blocks.clock import Clock, period_of
from kfac_optim.capture.gradient_check import GradientCheck
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.factors.example_rows import ExampleRows, JointStatistics, RowsByTerm
from kfac_optim.factors.layer_statistics import FewRows, LayerStatistics, UnitRows
from kfac_optim.factors.small_calls import takes_few_rows
from kfac_optim.factors.subsampling import Draw, Subsample
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.state import InverseState
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.precision import at_least_float32
from kfac_optim.utils.sharded_params import Shards

SILENT_STEPS = 3
"""The number of steps in which a layer without an inverse is looked at in any case; then the period decides."""


# Periods through which a layer that missed its turn is looked at in each step.
_PATIENCE = 10


class Missing(NamedTuple):
    """Says what a checkpoint knows of a block that it holds no statistics for."""

    clock: Clock
    """The clock that the block had when the checkpoint was saved."""
    elsewhere: bool
    """Whether another process had statistics of the block when the checkpoint was saved."""


@dataclass(frozen=True, slots=True)
class LayerUse:
    """Stands for one module that uses a block's parameters.

    Attributes:
        module: the module.
        adapter: the adapter of its family.
        spec: the matrix as this module sees it.
        opposed: whether that is the transpose of the block's.
    """

    module: nn.Module
    adapter: LayerAdapter[Any]
    spec: LayerSpec
    opposed: bool = False

    def is_refused(self) -> bool:
        """Return whether the module was parametrized or pruned since, and so no longer uses the trained tensor."""
        unexpected = "parametrizations" in self.module._modules and not self.adapter.expects_parametrized
        if (unexpected and is_parametrized(self.module)) or self.adapter.refusal(self.module) is not None:
            return True
        # A pruned bias is trained as `bias_orig` and masked where it is used. Of weights `adapter.refusal` says so.
        return any(f"{name}_orig" in self.module._parameters for name in self.spec.params)


class RefreshUnderWay(NamedTuple):
    """Stands for a refresh that was begun at one step and is taken over at a later one."""

    shadow: "KFACBlock"
    """A copy of the block as it was at the first step, which is refreshed in its place."""
    done: Future[None]
    """Done when the shadow is refreshed; one for all blocks that were begun together."""


@dataclass(eq=False)
class KFACBlock:
    """Preconditions one gradient matrix `[groups, out, in]` of one module, or of several that share its parameters.

    Attributes:
        name: fully qualified name of the (first) module; with a suffix where a module has several blocks.
        param_names: fully qualified names of `params`.
        spec: shapes and choices.
        uses: every module that uses these parameters; the first one's adapter packs the matrix.
        params: the parameters, in the order of `spec.params`.
        inverse: representation of the inverse curvature.
        groups: the optimizer's param group of each parameter; the first one's damping, decay and periods are
            the block's.
        factor_dtype: the dtype of the factors; None is the parameter's, but at least float32.
        subsample: which rows make the statistics.
        notes: choices made for the user, for `summary()`.
        clock: what was done when.
        measured_here: whether this process takes its statistics.
        echoes: whether an earlier rank sees the same examples and takes their statistics, which would count twice.
        phase: when refreshes are due, as a part of the period, in [0, 1).
        state: the state of `inverse`.
        waiting: rows of this step whose moments are computed with those of other blocks, by `folding.sum_rows`.
        under_way: the refresh that is under way, if any; a new state has none. Setting it to None drops the refresh.
        check: whether the captured calls account for the gradient; begins again with the state.
        strikes: steps in which the captured calls did not account for the gradient, on any process.
        silent: the number of steps, since the loss last used the layer, in which statistics were wanted outside the
            period and did not come.
        began: the step at which it was built.
        waits_for_period: whether the first statistics too come by period, as those of all other blocks.
        follows_uses: whether derivatives of the products with the weight are noted as well.
        joint: rows of this step, where statistics are made of all uses of the matrix together; None where each call
            gives statistics by itself.
    """

    name: str
    param_names: tuple[str, ...]
    spec: LayerSpec
    uses: tuple[LayerUse, ...]
    params: tuple[nn.Parameter, ...]
    inverse: Inverse[Any]
    factor_dtype: torch.dtype | None
    groups: tuple[dict[str, Any], ...]
    subsample: Subsample = field(default_factory=Subsample)
    notes: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)
    measured_here: bool = True
    echoes: bool = False
    phase: Fraction = Fraction(0)
    state: InverseState = field(init=False)
    waiting: list[FewRows | UnitRows] = field(init=False)
    _may_wait: bool = field(init=False)
    under_way: RefreshUnderWay | None = field(init=False)
    check: GradientCheck = field(init=False)
    strikes: int = 0
    silent: int = 0
    began: int = 0
    waits_for_period: bool = False
    follows_uses: bool = False
    joint: RowsByTerm | None = None
    _without: int | None = field(init=False, default=None)
    """The step in which the uses were joined too late for its statistics to be whole."""
    _partial_at: int | None = field(init=False, default=None)
    """The step in which they were joined too late, where its statistics are the first ones."""
    _layers_seen: tuple[Any, ...] = field(init=False, default=())
    """What the check has seen of the modules."""
    home: tuple[torch.dtype, torch.device] = field(init=False)
    """The place where the state was made, to be compared with where the model is."""

    def __post_init__(self) -> None:
        self.state = self._new_state()

    @property
    def group(self) -> dict[str, Any]:
        return self.groups[0]

    @property
    def damping(self) -> float:
        """Return `λ + η`: `λ` in the unit of the loss, and the weight decay that is part of the curvature."""
        own: float | None = self.group["preconditioner_damping"]
        return float((self.group["damping"] if own is None else own) * self.clock.loss_unit + l2(self.group))

    @property
    def adapter(self) -> LayerAdapter[Any]:
        """Return the adapter that packs the parameters into one matrix."""
        return self.uses[0].adapter

    @property
    def dtype(self) -> torch.dtype:
        """Give the dtype of the factors."""
        return self.factor_dtype or at_least_float32(self.params[0].dtype)

    @property
    def is_ready(self) -> bool:
        """Return whether there is an inverse to precondition with."""
        return self.clock.refreshed_at >= 0

    def is_refused(self) -> bool:
        """Return whether a module that uses the parameters was parametrized or pruned since."""
        return any(map(LayerUse.is_refused, self.uses))

    def wants_statistics(self) -> bool:
        """Return whether the current step is one of statistics: by period, or because nothing is known yet.

        A layer that was not used when its turn came, as one of several heads, is looked at from its next use on, until
        it gives statistics. No layer is looked at in each step for ever.
        """
        if self.inverse.takes_rows or (not self.is_ready and self.silent < SILENT_STEPS and not self.waits_for_period):
            return True
        return self.clock.statistics_due(period_of(self.group, "factor_update_period"))

    def note_missed(self) -> None:
        """Have the layer give statistics when it is next used."""
        self.clock.missed, self.silent = True, 0

    def wait_on(self) -> None:
        """Wait on for statistics that were missed, unless they were waited for through many periods."""
        self.silent += 1
        self.clock.missed = self.silent < _PATIENCE * period_of(self.group, "factor_update_period")

    def has_waited(self) -> bool:
        """Return whether, with this step, this process has waited in vain for statistics long enough to say so.

        A layer that has a frozen part gives none, and is not waited for.
        """
        patience = max(SILENT_STEPS, period_of(self.group, "factor_update_period"))
        return self.measured_here and self.silent + 1 == patience and all(param.requires_grad for param in self.params)

    def is_overdue(self) -> bool:
        """Return whether statistics were due, at this step or an earlier one, and have not come since.

        All processes agree on it, whichever of them takes the statistics.
        """
        return self.clock.is_overdue(period_of(self.group, "factor_update_period")) and not self.waits_for_period

    def takes_statistics(self) -> bool:
        """Return whether this process takes statistics at the current step."""
        return self.measured_here and self.wants_statistics()

    def awaits_gradient(self, shards: Shards) -> bool:
        """Tell whether calls are to be compared with what backward adds to `.grad`, and listen to that from now on.

        Calls are compared at first, and again once a module's mode or forward has changed.
        """
        self.follow()  # or the first call to give statistics would, in the middle of a backward
        layers = tuple(
            (use.module.training, type(use.module).forward, vars(use.module).get("forward")) for use in self.uses
        )
        if layers != self._layers_seen:
            self._layers_seen = layers
            self.check.is_done = False
        if not self.check.is_done:
            self.check.begin([shards.in_use(param) for param in self.params], self.wide_dtype)
        return not self.check.is_done

    @property
    def joins_uses(self) -> bool:
        """Return whether statistics are made of the rows of all uses together."""
        return self.joint is not None or self.inverse.takes_rows

    @property
    def counts_together(self) -> bool:
        """Return whether its sample of a step is known by the rows of all ranks alone, whatever the loss is made of."""
        return self.inverse.keeps_terms or (self.spec.own_rows and self.adapter.routes_rows)

    def counts(self, count: LossCount, gradient_scale: float | Tensor) -> Tensor | None:
        """Return `InverseState.counts` of this step, as `fold` would take it."""
        return self.state.counts(*self._of_loss(count, gradient_scale))

    def join_uses(self) -> None:
        """Make statistics of all uses of the matrix together from now on.

        Where this step has given some already, as an earlier backward does, these are lost. If the layer has others to
        go on with, all of the step are left out; if not, the rest counts until the next step is measured.
        """
        if not self.joins_uses:
            is_late = self.has_pending()
            self.discard()
            self.revise(replace(self.spec, opposed=False))  # rows of the transpose are turned to those of the matrix
            self.joint = RowsByTerm(self.name)
            if is_late and self.clock.folds > 0:
                self._without = self.clock.step
            elif is_late:
                self.note_partial()

    @property
    def is_partial(self) -> bool:
        """Return whether the statistics of this step are the first ones, and lack some uses."""
        return self._partial_at == self.clock.step

    def note_partial(self) -> None:
        """Have the statistics of this step count until the next step is measured, if they are the first ones."""
        if self.clock.folds == 0:
            self._partial_at = self.clock.step

    def counted_elsewhere(self, echoes: bool) -> None:
        """Take no statistics from now on if an earlier rank takes them, and drop those of this step."""
        if echoes and not self.echoes:
            self._drop_sums()
        self.echoes = echoes

    def accumulate(self, stats: LayerStatistics) -> None:
        self.follow()
        if self.echoes:
            return
        if self.joint is not None:
            if self._without != self.clock.step:
                self.joint.add(stats)
            return
        if self.inverse.takes_rows:
            self.state.accumulate(stats)
            return
        if not self.subsample.takes_all:
            stats.subsample(Draw(self.subsample, self.clock.step))
        few = stats.few_rows() if self._may_wait else None
        if few is None:
            self.state.accumulate(stats)
        else:
            self.waiting.append(few)

    def discard(self) -> None:
        """Forget the sums of this step."""
        self._drop_sums()
        self.check.reset()

    def _drop_sums(self) -> None:
        self.state.discard()
        self.waiting.clear()
        if self.joint is not None:
            self.joint.clear()

    def restart(self, *, step: int | None = None) -> None:
        """Forget all statistics.

        Args:
            step: the step at which the clock stands now; None lets it go on.
        """
        self.clock = Clock(step=self.clock.step if step is None else step)
        self.silent, self._without, self._partial_at = 0, None, None
        if self.joint is not None:
            self.joint.clear()
        self.state = self._new_state()

    def load(self, clock: Clock, tensors: Mapping[str, Any]) -> None:
        """Go on from the clock and state of a checkpoint; a refresh that is under way here is dropped."""
        self.clock, self._without, self._partial_at = clock, None, None
        self.follow()
        self.discard()
        self.state.load(tensors)
        self.under_way = None

    def follow(self) -> None:
        """Take the state along where the model was moved to another device or dtype."""
        dtype, device = self.home
        if device != self.params[0].device or dtype != self.dtype:
            tensors = self.state.tensors()
            self.check.reset()
            if self.under_way is not None:  # on the old device, or of the old dtype
                self.clock.call_for_refresh()
            self.state = self._new_state()
            self.state.load(tensors)

    def revise(self, spec: LayerSpec) -> None:
        """Take on what a forward has shown of the layer; where that is new, statistics start from zero."""
        if spec != self.spec:
            check = self.check
            self.spec = spec
            self.restart()
            self.check = check  # which may be listening, to the same matrix

    def has_pending(self) -> bool:
        """Return whether this step gave statistics."""
        joined = self.joint is not None and self.joint.are_used
        return joined or bool(self.waiting) or self.state.has_pending()

    def settle(self) -> None:
        """Make statistics of the rows of this step, where they are of all uses together."""
        if not self.joint:
            return
        by_term: defaultdict[int, list[ExampleRows]] = defaultdict(list)
        for (term, _), rows in self.joint.terms.items():
            by_term[term if self.inverse.keeps_terms else 0].append(rows)
        for term, of_term in by_term.items():
            if all(rows.used is False for rows in of_term):  # the loss did not use the layer: the zeros are no sample
                continue
            self.state.accumulate(JointStatistics(self.spec, of_term, self.dtype, term))
        self.joint.clear()

    def fold(self, count: LossCount, gradient_scale: float | Tensor) -> None:
        """Take this step's sums into the averages.

        Without sums of its own, a process still lets its averages age, if it keeps any: others have more than it has.

        Args:
            count: the terms of the loss.
            gradient_scale: what output gradients are multiplied by.
        """
        if self.has_pending():
            self.fold_into(self.state, count, gradient_scale)
        elif self.measured_here:
            # These terms of the loss have no gradient here, which is a sample of zeros; or another process counts them.
            self.state.age(self.decay(), 0 if self.echoes else on_device_of(self.params[0], count.averaged))
        self.clock.note_fold(count)

    def fold_into(self, state: InverseState, count: LossCount, gradient_scale: float | Tensor) -> None:
        """Take the sums of a state, this block's or a copy of it, into the averages of that state."""
        averaged, scale = self._of_loss(count, gradient_scale)
        state.fold(averaged, self.decay(), scale)

    def _of_loss(self, count: LossCount, gradient_scale: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        return on_device_of(self.params[0], count.averaged), on_device_of(self.params[0], gradient_scale)

    def decay(self) -> float:
        """Return the decay of the averages since the last fold, 0 if that was of partial statistics."""
        if self._partial_at == self.clock.folded_at:
            return 0.0
        decay: float = self.group["factor_decay"] ** self.clock.since_fold()
        return decay

    def refresh_due(self, *, ahead: bool = False) -> bool:
        """Return whether a refresh is due: by the clock, or because `λ` has moved far since the last one.

        Args:
            ahead: whether the statistics of this step are still to be folded.
        """
        clock = self.clock.after_fold() if ahead and self.wants_statistics() else self.clock
        # λ may still be set after backward, so that processes which look ahead at other times would disagree on it.
        follows = ahead or self.inverse.follows_damping or not self.is_ready
        if clock.folds and not follows and clock.has_outrun(self.damping):
            return True
        return clock.refresh_due(period_of(self.group, "inverse_update_period"), self.phase)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Give the dtype of preconditioned gradients until they are cast to the parameters': at least float32."""
        return at_least_float32(self.dtype)

    def blank_state(self) -> InverseState:
        """Return a state that has seen nothing."""
        state: InverseState = self.inverse.init(self.spec.by_blocks(), dtype=self.dtype, device=self.params[0].device)
        return state

    def _new_state(self) -> Any:
        self.home = self.dtype, self.params[0].device
        self.under_way = None
        self.check = GradientCheck(self.spec, partial(self.adapter.pack, self.spec))
        self.waiting = []
        state = self.blank_state()
        self._may_wait = takes_few_rows(state.to_fold())
        return state


def on_device_of(param: nn.Parameter, number: float | Tensor) -> float | Tensor:
    """Return a number of terms on a parameter's device: the user may have stated it on another device of the model."""
    return number.to(param.device) if isinstance(number, Tensor) else number


def l2(group: Mapping[str, Any]) -> float:
    """Return `η`, the weight decay of a param group that is part of the curvature."""
    return float(group["weight_decay"]) if group["l2_in_curvature"] else 0.0
