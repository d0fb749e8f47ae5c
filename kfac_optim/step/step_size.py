"""How far a step goes along the preconditioned gradient: what a step size is given, and what it returns.

`AdaptiveTrustRegion`, the default, and `TrustRegion` leave learning rate and momentum to the user and bound the step
that they make. `SelectedUpdates` leaves them to the user as well, and makes steps of AdamW's size.
`QuadraticModel` computes both at every step, and `LineSearch` finds the length of a step by the loss. A trust region is
for mini-batches, where what a step does to the loss of one batch says little, and wherever a schedule of learning rates
is known to work; selected updates are for classifiers and language models; `QuadraticModel`,
together with `LevenbergMarquardt` damping, is for full or very large batches, where no rate and no schedule has to be
found; and `LineSearch` is for batches that stay the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.fisher.objective import Objective
from kfac_optim.inverses.auto import AutoInverse
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.step.execution import Executor
from kfac_optim.step.reevaluation import Reevaluation
from kfac_optim.step.roles import Parts
from kfac_optim.step.scalars import Scalar
from kfac_optim.utils.joined_tensors import Joins

Group = Mapping[str, Any]
Direction = dict[nn.Parameter, Tensor]


class ClosureLoss(NamedTuple):
    """Knows the loss of a step's examples."""

    before: float
    """The loss where the step begins."""
    reevaluation: Reevaluation
    """Evaluates it at other parameters."""
    changes: Callable[[Callable[[], object]], Mapping[tuple[int, int], Tensor]] | None = None
    """Returns how residuals change where a function evaluates it, for `Inverse.acceleration`; None is unknown."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Holds the preconditioned gradient, before anything is said of its length.

    Attributes:
        groups: the optimizer's param groups.
        state: the optimizer's state, for momentum buffers.
        graded: blocks that have a gradient on some rank.
        covered: those of them whose gradients are preconditioned, by whatever worker.
        blocks: the covered ones whose direction is known here.
        parts: what preconditioning made of it.
        products: `Δᵀ∇` over the parameters of each param group that has any, of all workers.
        kl_clip: the `kl_clip` that all groups agree on.
        count: terms of the loss.
        executor: the executor, which does the work.
        objective: the loss of this step, where it is known.
        memory: what the step size remembers of earlier steps, `[4]` (see `StepSize`), not to be changed.
        joins: joins gradients, some of which the products have joined already.
        closure: the loss before the step, and what it is at other parameters; where a step size needs it.
        finite: `[]` bool, whether the step will be taken, where only the device knows: if not, nothing may change that
            outlives the step. None: it will be.
    """

    groups: Sequence[dict[str, Any]]
    state: MutableMapping[Tensor, Any]
    graded: Sequence[KFACBlock]
    covered: Sequence[KFACBlock]
    blocks: Sequence[KFACBlock]
    parts: Sequence[Parts]
    products: Sequence[tuple[Group, Scalar]]
    kl_clip: float | None
    count: LossCount
    executor: Executor
    objective: Objective | None
    memory: Tensor
    joins: Joins
    finite: Tensor | None = None
    closure: ClosureLoss | None = None

    def direction(self) -> Direction:
        """Return the preconditioned gradient of each parameter that is updated here."""
        return self.executor.gradients.direction(dict(zip(self.blocks, self.parts, strict=True)), self.covered)

    def momentum(self, param: nn.Parameter) -> Tensor | None:
        """Give the momentum of earlier steps."""
        held = self.state.get(param)
        return None if held is None else held.get("momentum_buffer")


@dataclass(frozen=True, slots=True)
class Sized:
    """Holds the step that is to be taken.

    Attributes:
        direction: replaces the gradient; parameters without a direction keep theirs.
        measures: numbers for `metrics()`, by name.
        memory: what is remembered from now on, `[4]`; None is what was.
        sgd: returns the numbers of torch's SGD that replace those of a param group.
    """

    direction: Direction
    measures: Mapping[str, Scalar]
    memory: Tensor | None = None
    sgd: Callable[[Group], Mapping[str, Any]] = lambda _: {}


class PlainSteps(NamedTuple):
    """Names the steps that go without preconditioning, for the user."""

    layer: str = "SGD"
    """The step of a layer that has no inverse yet, or is refused one."""
    rest: str = "SGD"
    """The step of a parameter that belongs to no layer of a known kind."""


PLAIN_SGD = PlainSteps()
"""The plain steps of all step sizes but those that say otherwise."""


class StepSize(ABC):
    """Decides how far a step goes. The object holds choices only.

    What must be known of earlier steps are four numbers on the device, part of checkpoints and zero at first. For trust
    regions they are the logarithm of what multiplies the region; the slope of the loss along the last step at its
    start; whether the region held that step; and the share of recent steps that it made too short. `LineSearch` keeps
    its number of halvings in the third.
    """

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = AutoInverse()
    """The representation of inverses where the user names none."""

    preconditions = True
    """Whether the gradients are to be preconditioned before `size` is asked, which otherwise has them as they are."""

    needs_objective = False
    """Whether it asks for the curvature of the loss, so that the loss must be named and forwards be kept."""

    needs_closure = False
    """Whether it evaluates the loss of the step's examples at other parameters, by the closure of the step."""

    bounds_steps = False
    """Whether it bounds the steps by `kl_clip`, which those of exact curvature are left out of."""

    directs_all = False
    """Whether it gives a direction to all parameters, and not to those of covered blocks alone."""

    matrices_only = False
    """Whether it works on matrices alone, so that layers that have none, as norms, need no statistics."""

    plain = PLAIN_SGD
    """What is done with gradients that are not preconditioned."""

    takes_shards = True
    """Whether the part of momentum and sharded parameters that one process has is enough."""

    def check(self, groups: Sequence[Group]) -> None:  # noqa: B027 (most have nothing to say)
        """Raise ValueError where the numbers of the param groups do not go with it, RuntimeError for gradients."""

    def check_layers(self, options: BlockOptions) -> None:  # noqa: B027 (as above)
        """Raise ValueError where the choices about layers do not go with it."""

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Return the length of each sum over workers that `size` asks the executor for in one step, in order.

        Args:
            groups: the param groups that have covered parameters.
        """
        return ()

    def keeps_direction(self, groups: Sequence[Group]) -> bool:
        """Return whether the direction of a step is kept if there is no momentum.

        Args:
            groups: the param groups that have covered parameters, as in `scalars`.
        """
        return False

    def loss_unit(self, memory: Tensor) -> float:
        """Return what the damping is multiplied by. The host may wait for it: it is asked at steps with statistics.

        Args:
            memory: what is remembered, `[4]`.
        """
        return 1.0

    def advice(self, scale: float) -> str:
        """Say what to do where nearly all recent steps were made too short, as the fourth number remembers.

        Args:
            scale: how long the last step was, of what the learning rate makes it.
        """
        return ""

    def report(self, state: Mapping[Any, Any], blocks: Sequence[KFACBlock]) -> dict[str, Scalar]:
        """Return what it has to say in `metrics()` beside the measures of the last step; the host waits for nothing.

        Args:
            state: the optimizer's state, by parameter.
            blocks: the optimizer's blocks.
        """
        return {}

    @abstractmethod
    def size(self, proposal: Proposal) -> Sized:
        """Return the step; tensors of the proposal, momentum included, may be changed in place."""


def require(groups: Sequence[Group], wanted: Mapping[str, object], why: str, remedy: str = "") -> None:
    """Raise ValueError where numbers of the param groups are not those that a step size needs.

    Args:
        groups: the param groups.
        wanted: the numbers by name.
        why: what the step size does, which begins the message.
        remedy: what to do, which ends the message.
    """
    for i, group in enumerate(groups):
        for name, value in wanted.items():
            if group[name] != value:
                raise ValueError(
                    f"kfac_optim: {why}: {name} of param group {i} must be {value}, got {group[name]!r}.{remedy}"
                )


def refuse_sparse(group: Group, number: int, step_size: str) -> None:
    """Raise RuntimeError where a parameter of a param group has a sparse gradient, and a step size needs dense ones."""
    for param in group["params"]:
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise RuntimeError(
                f"kfac_optim: a parameter {list(param.shape)} of param group {number} has a {param.grad.layout} "
                f"gradient; {step_size} needs dense ones. Pass sparse=False to the layer."
            )


def refuse_complex(group: Group, number: int, choice: str) -> None:
    """Raise RuntimeError where a choice needs real parameters, and a param group has a complex one with a gradient."""
    for param in group["params"]:
        if param.grad is not None and param.is_complex():
            raise RuntimeError(
                f"kfac_optim: a parameter {list(param.shape)} of param group {number} is {param.dtype}; {choice} has a "
                "model of the loss in real numbers alone. Keep its real and imaginary parts as parameters, or drop "
                f"{choice}."
            )
