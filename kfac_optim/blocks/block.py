"""A block is what is preconditioned as one: a layer's gradient matrix, its adapter, its inverse and its clock."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kfac_optim.capture.gradient_check import GradientCheck
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.block_diagonal import matrix_by_blocks, matrix_of_layer
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.subsampling import Draw, Subsample
from kfac_optim.inverses.base import Inverse
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.specs import Cost, LayerSpec
from kfac_optim.utils.hooks import Handle
from kfac_optim.utils.sharded_params import Shards

# The averages change fastest while they are young: an inverse is out of date once they have grown by this factor.
_GROWTH_BEFORE_REFRESH = 1.5
# And once λ is so many times as large as at the refresh, or so small a part of it: each factor has a share of √λ.
_DAMPING_BEFORE_REFRESH = 2.0


@dataclass
class Clock:
    """When a block did what, in optimizer steps since it was built; -1 is never."""

    step: int = 0
    """The current step."""
    folds: int = 0
    """Statistics steps so far."""
    folded_at: int = -1
    refreshed_at: int = -1
    folds_at_refresh: int = 0
    damping: float = 0.0
    """`λ` of the last refresh, also one that failed."""
    outdated: bool = False
    """Whether a refresh is due whatever the periods."""
    summed_terms: float = 1
    """`LossCount.summed` of the last statistics."""
    loss_unit: float = 1
    """What the param group's `λ` is multiplied by, as of the last statistics (`StepSize.loss_unit`)."""


class Missing(NamedTuple):
    """What a checkpoint tells of a block that it holds no statistics for."""

    clock: Clock
    """With them."""
    elsewhere: bool
    """Whether another process had them when it was saved."""


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One module that uses a block's parameters.

    Attributes:
        module: the module.
        adapter: of its family.
        spec: the matrix as this module sees it.
        opposed: whether that is the transpose of the block's.
    """

    module: nn.Module
    adapter: LayerAdapter[Any]
    spec: LayerSpec
    opposed: bool = False


class RefreshUnderWay(NamedTuple):
    """A refresh that was begun at one step and is taken over at a later one."""

    shadow: "KFACBlock"
    """A copy of the block as it was at the first step, which is refreshed in its place."""
    done: Future[None]
    """Done when the shadow is refreshed; one for all blocks that were begun together."""


@dataclass(eq=False)
class KFACBlock:
    """One gradient matrix `[groups, out, in]` of one module, or of several that share its parameters.

    Attributes:
        name: fully qualified name of the (first) module; with a suffix where a module has several blocks.
        param_names: fully qualified names of `params`.
        spec: shapes and choices.
        uses: every module that uses these parameters; the first one's adapter packs the matrix.
        params: the parameters, in the order of `spec.params`.
        inverse: representation of the inverse curvature.
        groups: the optimizer's param group of each parameter; the first one's damping, decay and periods are
            the block's.
        factor_dtype: of the factors; None is the parameter's, but at least float32.
        subsample: which rows make the statistics.
        notes: choices made for the user, for `summary()`.
        clock: what was done when.
        measured_here: whether this process takes its statistics.
        phase: when refreshes are due, as a part of the period, in [0, 1).
        state: of `inverse`.
        under_way: the refresh that is, if any; a new state has none.
        check: whether the captured calls account for the gradient; begins anew with the state.
        strikes: steps in which they did not, on any process.
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
    phase: Fraction = Fraction(0)
    state: Any = field(init=False)
    under_way: RefreshUnderWay | None = field(init=False)
    check: GradientCheck = field(init=False)
    strikes: int = 0
    _layers_seen: tuple[Any, ...] = field(init=False, default=())
    """What the check has seen of the modules."""
    _home: tuple[torch.dtype, torch.device] = field(init=False)
    """Where the state was made, to be compared with where the model is."""

    def __post_init__(self) -> None:
        self.state = self._new_state()

    @property
    def group(self) -> dict[str, Any]:
        return self.groups[0]

    @property
    def damping(self) -> float:
        """`λ` of the inverse in the unit of the loss, and the weight decay that is part of the curvature: `λ + η`."""
        own: float | None = self.group["preconditioner_damping"]
        return float((self.group["damping"] if own is None else own) * self.clock.loss_unit + l2(self.group))

    @property
    def cost(self) -> Cost:
        """Give the cost of one refresh, and of applying it."""
        return self.inverse.flops(self.spec.by_blocks())

    @property
    def adapter(self) -> LayerAdapter[Any]:
        return self.uses[0].adapter

    @property
    def dtype(self) -> torch.dtype:
        """Give the dtype of the factors."""
        return self.factor_dtype or torch.promote_types(self.params[0].dtype, torch.float32)

    @property
    def is_ready(self) -> bool:
        """Whether there is an inverse to precondition with."""
        return self.clock.refreshed_at >= 0

    def is_refused(self) -> bool:
        """Whether a module was parametrized or pruned since: its trained tensor is then no longer the one it uses."""
        return any(is_parametrized(use.module) or use.adapter.refusal(use.module) is not None for use in self.uses)

    def wants_statistics(self) -> bool:
        """Whether the current step is one of statistics: by period, or because nothing is known yet."""
        return not self.is_ready or self.clock.step % self._period("factor_update_period") == 0

    def _period(self, name: str) -> int:
        """A period of the param group. What is none is refused by `step()`, with its name, and not within a forward."""
        period = self.group[name]
        return int(period) if isinstance(period, Integral) and int(period) > 0 else 1

    def takes_statistics(self) -> bool:
        """Whether this process takes them at the current step."""
        return self.measured_here and self.wants_statistics()

    def awaits_gradient(self, shards: Shards) -> bool:
        """Tell whether calls are to be compared with what backward adds to `.grad`, and listen to that from now on.

        They are at first, and again once a module runs otherwise.
        """
        layers = tuple(
            (use.module.training, type(use.module).forward, vars(use.module).get("forward")) for use in self.uses
        )
        if layers != self._layers_seen:
            self._layers_seen = layers
            self.check.is_done = False
        if not self.check.is_done:
            self.check.begin([shards.in_use(param) for param in self.params], self.wide_dtype)
        return not self.check.is_done

    def verify(
        self, call: LayerCall | None, statistics: Callable[[LayerCall], LayerStatistics], *, opposed: bool
    ) -> None:
        """Take one call into the check, as `StatisticsSink.verify` has it."""
        if call is None:
            self.check.spoil()
        else:
            stats = statistics(call)
            stats.opposed = opposed
            self.check.capture(stats, call)

    def accumulate(self, stats: LayerStatistics) -> None:
        self.follow()
        if not self.subsample.takes_all:
            stats.subsample(Draw(self.subsample, self.clock.step, self.name))
        self.inverse.accumulate(self.state, stats)

    def discard(self) -> None:
        """Forget the sums of this step."""
        self.inverse.discard(self.state)
        self.check.reset()

    def restart(self) -> None:
        """Forget all statistics; the step count goes on."""
        self.clock = Clock(step=self.clock.step)
        self.state = self._new_state()

    def follow(self) -> None:
        """Take the state along where the model was moved to another device or dtype."""
        if self._home != (self.dtype, self.params[0].device):
            tensors = self.inverse.tensors(self.state)
            self.state = self._new_state()
            self.inverse.load(self.state, tensors)

    def revise(self, spec: LayerSpec) -> None:
        """Take on what a forward has shown of the layer; where that is new, statistics start anew."""
        if spec != self.spec:
            check = self.check
            self.spec = spec
            self.restart()
            self.check = check  # which may be listening, to the same matrix

    def has_pending(self) -> bool:
        """Whether this step gave statistics."""
        return self.inverse.has_pending(self.state)

    def fold(self, count: LossCount, gradient_scale: float | Tensor) -> None:
        """Take this step's sums into the averages; without any, those of other processes are more than ours."""
        clock = self.clock
        if self.has_pending():
            self.inverse.fold(self.state, self._here(count.averaged), self._decay(), self._here(gradient_scale))
        else:
            # These terms of the loss have no gradient here, which is a sample of zeros.
            self.inverse.age(self.state, self._decay(), self._here(count.averaged))
        clock.folded_at = clock.step
        clock.summed_terms = count.summed or clock.summed_terms
        clock.folds += 1

    def folded_ahead(self, count: LossCount, gradient_scale: float | Tensor) -> Any:
        """A copy of the state, as `fold` would leave it; what `refresh` computed is not copied."""
        parts = self.inverse.parts(self.spec.by_blocks())
        results = (result.tensor for part in parts for result in self.inverse.results(self.state, part.name))
        ahead = copy.deepcopy(self.state, {id(tensor): tensor for tensor in results})
        self.inverse.fold(ahead, self._here(count.averaged), self._decay(), self._here(gradient_scale))
        return ahead

    def refresh_due(self, *, ahead: bool = False) -> bool:
        """Tell whether a refresh is due: by period, for a λ that moved far, at folds 1, 2, 3, 5, … of young averages.

        Args:
            ahead: whether the statistics of this step are still to be folded.
        """
        clock = self.clock
        if ahead and self.wants_statistics():
            clock = replace(clock, folds=clock.folds + 1, folded_at=clock.step)
        if clock.folds == 0:
            return False
        # λ may still be set after backward, where others of several processes look ahead later.
        if clock.outdated or (not ahead and self._outruns_inverse()):
            return True
        outgrown = clock.folds >= _GROWTH_BEFORE_REFRESH * clock.folds_at_refresh
        fresh = clock.folded_at == clock.step
        period, phase = self._period("inverse_update_period"), self.phase
        # To multiply a Fraction takes as long as all else here.
        return (fresh and outgrown) or clock.step % period == phase.numerator * period // phase.denominator

    def let_pass(self, steps: int) -> None:
        """Let steps pass in which the layer was out of sight; a refresh that fell due then is due now."""
        begin = self.clock.step
        for step in range(begin, begin + min(steps, self.group["inverse_update_period"])):
            self.clock.step = step
            self.clock.outdated |= self.refresh_due()
        self.clock.step = begin + steps

    def mark_refreshed(self) -> None:
        """Note the refresh."""
        self.clock.refreshed_at = self.clock.step
        self.clock.folds_at_refresh = self.clock.folds
        self.clock.damping = self.damping
        self.clock.outdated = False

    def _outruns_inverse(self) -> bool:
        """Whether λ, adapted, scheduled or set, is far from that of an inverse that was damped by its refresh."""
        if self.inverse.follows_damping or not self.is_ready:
            return False
        then = self.clock.damping
        return not then / _DAMPING_BEFORE_REFRESH < self.damping < then * _DAMPING_BEFORE_REFRESH

    def shadow(self, spare: "KFACBlock | None" = None) -> "KFACBlock":
        """A copy of state, clock and numbers of the groups as they are now, made in `spare` where that fits."""
        fits = spare is not None and (spare.spec, spare._home) == (self.spec, self._home)
        copy = spare if spare is not None and fits else replace(self)
        copy.clock = replace(self.clock, damping=self.damping)
        copy.groups = tuple(dict(group) for group in self.groups)
        copy.inverse.load(copy.state, self.inverse.tensors(self.state))
        return copy

    def adopt(self, shadow: "KFACBlock") -> None:
        """Take over the inverse that `shadow`, a copy of this block at an earlier step, was given since."""
        self.inverse.adopt(self.state, shadow.state)
        self.under_way = None
        self.clock.refreshed_at = shadow.clock.step
        self.clock.folds_at_refresh = shadow.clock.folds
        self.clock.damping = shadow.clock.damping

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters has."""
        return any(param.grad is not None for param in self.params)

    def gradients(self) -> list[Tensor]:
        """`∇h` of each parameter, not to be changed: `.grad` itself where nothing is added; zeros where it has none."""
        return [
            torch.zeros_like(param) if param.grad is None else regularised(param, group)
            for param, group in zip(self.params, self.groups, strict=True)
        ]

    @property
    def wide_dtype(self) -> torch.dtype:
        """Give the dtype of preconditioned gradients until they are cast to the parameters': at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Tensors shaped like the parameters as one matrix `[groups, out, in]`, as inverses see it.

        That is by `spec.by_blocks()`. It may share memory with a lone tensor.

        Args:
            tensors: one for each parameter.
            dtype: of the matrix; None is `wide_dtype`.
        """
        dtype = dtype or self.wide_dtype
        packed = self.adapter.pack(self.spec, [tensor.to(dtype) for tensor in tensors])
        return matrix_by_blocks(packed, self.spec)

    def precondition(self, grads: Sequence[Tensor]) -> Tensor:
        """The preconditioned `gradients()`, laid out as `matrix()`, in the dtype in which the inverse is applied."""
        matrix = self.matrix(grads, self.inverse.applied_dtype(self.state))
        return self.inverse.apply(self.state, matrix, self.damping)

    def split(self, matrix: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The parts of what `precondition` gave that belong to each parameter, in `wide_dtype`.

        Args:
            matrix: not used by others: a part may share its memory.
            like: the shape and memory layout of each part; what is to be multiplied element by element should be alike.
        """
        parts = self.adapter.unpack(self.spec, matrix_of_layer(matrix, self.spec))
        dtype = self.wide_dtype
        return [laid_out(part.reshape(each.shape), each, dtype) for part, each in zip(parts, like, strict=True)]

    def _here(self, number: float | Tensor) -> float | Tensor:
        """What the user stated may lie on another device of the model."""
        return number.to(self.params[0].device) if isinstance(number, Tensor) else number

    def _decay(self) -> float:
        """Give the decay of the averages since the last fold."""
        elapsed = self.clock.step - self.clock.folded_at if self.clock.folds else 0
        decay: float = self.group["factor_decay"] ** elapsed
        return decay

    def blank_state(self) -> Any:
        """A state that has seen nothing."""
        return self.inverse.init(self.spec.by_blocks(), dtype=self.dtype, device=self.params[0].device)

    def _new_state(self) -> Any:
        self._home = self.dtype, self.params[0].device
        self.under_way = None
        self.check = GradientCheck(self.spec, partial(self.adapter.pack, self.spec))
        return self.blank_state()


def laid_out(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in the memory layout of `like`, of its shape, and in `dtype`; itself where it is so already."""
    if tensor.dtype == dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=dtype).copy_(tensor)


def l2(group: Mapping[str, Any]) -> float:
    """`η`, the weight decay of a param group that is part of the curvature."""
    return float(group["weight_decay"]) if group["l2_in_curvature"] else 0.0


def regularised(param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """`∇h`: the gradient, with that of `½ η ‖θ‖²` where weight decay is part of the curvature."""
    assert param.grad is not None
    eta = l2(group)
    return param.grad.add(param.detach(), alpha=-eta if group["maximize"] else eta) if eta else param.grad


Attachment = tuple[KFACBlock, LayerUse]
"""A block, and how one module uses it."""


def by_module(blocks: Iterable[KFACBlock]) -> dict[nn.Module, tuple[Attachment, ...]]:
    """The blocks that each module's calls give statistics to."""
    found: defaultdict[nn.Module, tuple[Attachment, ...]] = defaultdict(tuple)
    for block in blocks:
        for use in block.uses:
            found[use.module] += ((block, use),)
    return dict(found)


def attach(
    module: nn.Module,
    attachments: Sequence[Attachment],
    window: CaptureWindow,
    emitted: Callable[[KFACBlock], None],
) -> Handle:
    """Hook `module` into `window` for all its blocks; `emitted` is told of each that took statistics."""
    _, use = attachments[0]
    specs = [use.spec for _, use in attachments]
    return use.adapter.capture(module, specs, window, Sink(attachments, emitted))


def deliver(stats: LayerStatistics, block: KFACBlock, *, opposed: bool, emitted: Callable[[KFACBlock], None]) -> bool:
    """Take the statistics of one call into `block`; whether further backwards through it need its input again."""
    stats.opposed = opposed
    block.accumulate(stats)
    emitted(block)
    return stats.keeps_input


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes the statistics of one module into its blocks, in the order of the adapter's specs."""

    attachments: Sequence[Attachment]
    emitted: Callable[[KFACBlock], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.attachments[0][0].dtype

    def wanted(self) -> bool:
        return any(block.takes_statistics() for block, _ in self.attachments)

    def emit(self, index: int, stats: LayerStatistics) -> bool:
        block, use = self.attachments[index]
        return deliver(stats, block, opposed=use.opposed, emitted=self.emitted)

    def awaits_gradient(self, index: int, shards: Shards) -> bool:
        block, _ = self.attachments[index]
        return block.awaits_gradient(shards)

    def verify(self, index: int, call: LayerCall | None, statistics: Callable[[LayerCall], LayerStatistics]) -> None:
        block, use = self.attachments[index]
        block.verify(call, statistics, opposed=use.opposed)

    def discard(self) -> None:
        for block, _ in self.attachments:
            block.discard()

    def separate_inputs(self, index: int) -> None:
        block, _ = self.attachments[index]
        block.revise(replace(block.spec, shared_input=False))
