"""How far a step goes along the preconditioned gradient.

`TrustRegion`, the default, leaves learning rate and momentum to the user and bounds what they make. `QuadraticModel`
computes both anew at every step. When to use which: `TrustRegion` for mini-batches, where what a step does to the loss
of one batch says little, and wherever a schedule of learning rates is known to work; `QuadraticModel`, together with
`LevenbergMarquardt` damping, for full or very large batches, where no rate and no schedule has to be found.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import (
    KFACBlock,
    l2,
)
from kfac_optim.blocks.preconditioning import regularised, to_matrix
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.fisher.gauss_newton import Objective
from kfac_optim.linalg.products import sandwich
from kfac_optim.step.execution import Executor, Parts
from kfac_optim.step.quadratic import change, minimum
from kfac_optim.step.trust_region import (
    inner_product,
    momentum_scale,
    trust_region_scale,
)
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.validation import check_flag

Group = Mapping[str, Any]
Direction = dict[nn.Parameter, Tensor]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The preconditioned gradient, before anything is said of its length.

    Attributes:
        groups: the optimizer's param groups.
        state: the optimizer's state, for momentum buffers.
        covered: blocks whose gradients are preconditioned, by whatever worker.
        blocks: those of them whose direction is known here.
        grads: the gradient of each, not to be changed.
        parts: what preconditioning made of it.
        products: `Δᵀ∇` over the parameters of each param group that has any, `[]`, of all workers.
        kl_clip: that all groups agree on.
        count: terms of the loss.
        executor: who does the work.
        objective: the loss of this step, where it is known.
        memory: what the step size remembers of earlier steps, `[4]` (see `StepSize`), not to be changed.
        finite: `[]` bool, whether the step will be taken, where only the device knows: if not, nothing may change that
            outlives the step. None is yes.
    """

    groups: Sequence[dict[str, Any]]
    state: MutableMapping[Tensor, Any]
    covered: Sequence[KFACBlock]
    blocks: Sequence[KFACBlock]
    grads: Sequence[Parts]
    parts: Sequence[Parts]
    products: Sequence[tuple[Group, Tensor]]
    kl_clip: float | None
    count: LossCount
    executor: Executor
    objective: Objective | None
    memory: Tensor
    finite: Tensor | None = None

    def direction(self) -> Direction:
        """What preconditioning made of each gradient of the parameters that are updated here."""
        return self.executor.direction(dict(zip(self.blocks, self.parts, strict=True)), self.covered)

    def momentum(self, param: nn.Parameter) -> Tensor | None:
        """Give the momentum of earlier steps."""
        buffer: Tensor | None = self.state[param].get("momentum_buffer") if param in self.state else None
        return buffer


@dataclass(frozen=True, slots=True)
class Sized:
    """The step that is to be taken.

    Attributes:
        direction: in the place of the gradient; parameters that have none keep theirs.
        sgd: numbers of torch's SGD in the place of those of each param group.
        measures: for `metrics()`, each `[]`.
        memory: what is remembered from now on, `[4]`; None is what was.
    """

    direction: Direction
    sgd: Callable[[Group], Mapping[str, Any]]
    measures: Mapping[str, Tensor]
    memory: Tensor | None = None


class StepSize(ABC):
    """Decides how far a step goes. The object holds choices only.

    What must be known of earlier steps are four numbers on the device, part of checkpoints and zero at first: the
    logarithm of what multiplies the trust region; the slope of the loss along the last step at its start; whether the
    region held that step; and the share of steps of late that it made too short.
    """

    needs_objective = False
    """Whether it asks for the curvature of the loss, so that the loss must be named and forwards be kept."""

    @property
    def takes_shards(self) -> bool:
        """Whether it can do with the part of momentum and parameters that one process has of those in shards."""
        return True

    def check(self, groups: Sequence[Group]) -> None:  # noqa: B027 (most have nothing to say)
        """Raise ValueError where the numbers of the param groups do not go with it, RuntimeError for gradients."""

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """How many numbers `size` has `Executor.all_reduce_scalars` sum, at each time that it does so in one step.

        Args:
            groups: the param groups that have covered parameters.
        """
        return ()

    def totals(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Give what `scalars` gives, for the sums that `Executor.add_up` takes."""
        return ()

    def keeps_direction(self, groups: Sequence[Group]) -> bool:
        """Whether the direction of a step is kept where there is no momentum.

        Args:
            groups: as of `scalars`.
        """
        return False

    def loss_unit(self, memory: Tensor) -> float:
        """What the damping is to be multiplied by. The host may wait for it: asked at steps with statistics.

        Args:
            memory: what is remembered, `[4]`.
        """
        return 1.0

    def advice(self, scale: float) -> str:
        """Say what to do where nearly all steps of late were made too short, as the fourth number remembers.

        Args:
            scale: how long the last step was, of what the learning rate makes it.
        """
        return ""

    @abstractmethod
    def size(self, proposal: Proposal) -> Sized:
        """The step; tensors of the proposal, momentum included, may be changed in place."""


@dataclass(frozen=True)
class TrustRegion(StepSize):
    """The user's learning rate and momentum, bounded by `kl_clip` (Ba, Grosse & Martens 2017, §5; `trust_region.py`).

    The bound is in units of the loss and stays as it is: `kl_clip` must suit the loss.

    Before momentum the bound is on what this step adds, `lr² Δᵀ F Δ ≤ κ`, as in the paper; old momentum is left alone
    while it goes downhill. After momentum it is on the whole step `s`, momentum included: `sᵀ F s ≤ κ`, with `F` the
    undamped factors, at the cost of two matrix products for each layer and step; momentum and preconditioned gradient
    are then scaled by the same number. That holds steps within `κ` for good, where momentum 0.9 may otherwise make
    them ten times as long. On several processes `F` has the examples of all until the last refresh, and since then
    those of one. `Placement.FACTORS`, `Auto` and FSDP2 do not go with it: no process may have all that is needed.

    Args:
        after_momentum: what is bounded.
    """

    after_momentum: bool = False

    def __post_init__(self) -> None:
        check_flag("after_momentum of TrustRegion", self.after_momentum, optional=False)

    @property
    def takes_shards(self) -> bool:
        return not self.after_momentum

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return () if self.after_momentum or all(group["kl_clip"] is None for group in groups) else (1,)

    def totals(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return (2,) if self.after_momentum and any(group["kl_clip"] is not None for group in groups) else ()

    def advice(self, scale: float) -> str:
        return (
            "Training may be slow where the loss is large. Raise kl_clip tenfold and look at "
            "metrics()['trust_region_scale'], or leave step_size at its default, which finds how far steps may go."
        )

    def size(self, proposal: Proposal) -> Sized:
        bound = self._bound_step if self.after_momentum else self._bound_gradient
        scale, held = bound(proposal)
        measures = {"trust_region_scale": scale, "momentum_scale": held}
        if proposal.kl_clip is None:
            return Sized(proposal.direction(), lambda _: {}, measures)
        measures["kl_clip"] = torch.full_like(scale, proposal.kl_clip)
        memory = proposal.memory.to(scale.device, non_blocking=True)
        share = shortened(memory[3], scale < 1)
        return Sized(proposal.direction(), lambda _: {}, measures, torch.cat([memory[:3], share.reshape(1)]))

    def _bound_gradient(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(proposal.products[0][1])
        if proposal.kl_clip is None:
            return one, one
        decrease, quadratic = lengths(proposal.products)
        summed = summed_terms(proposal)
        scale = trust_region_scale(quadratic, decrease, summed, proposal.kl_clip)
        buffers = _buffers(proposal)
        promised = proposal.executor.all_reduce_scalars(_promised(buffers, one.device).reshape(1))[0]
        held = momentum_scale(promised, summed, proposal.kl_clip)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, [(group, buffer) for group, buffer, _ in buffers], held)
        return scale, held

    def _bound_step(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(proposal.products[0][1])
        if proposal.kl_clip is None:
            return one, one
        executor = proposal.executor
        steps, curved, grads = [], [], []
        for block, grad, parts in zip(proposal.blocks, proposal.grads, proposal.parts, strict=True):
            if executor.keeps(block):  # each block counts once
                steps.append(to_matrix(block, _whole_step(proposal, block, parts)))
                curved.append(_times_factors(block, steps[-1]))
                grads.append(to_matrix(block, grad))
        sums = torch.stack([inner_product(steps, curved, one.device), inner_product(steps, grads, one.device)])
        quadratic, decrease = executor.add_up(sums).unbind()
        summed = summed_terms(proposal)
        scale = trust_region_scale(quadratic, decrease, summed, proposal.kl_clip)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, [(group, buffer) for group, buffer, _ in _buffers(proposal)], scale)
        return scale, scale


@dataclass(frozen=True)
class QuadraticModel(StepSize):
    """Learning rate and momentum that minimise the exact quadratic model of the loss (Martens & Grosse 2015, §7).

    The step is `δ = -α Δ + β δ₋₁`, with `Δ` the preconditioned gradient and `δ₋₁` the step before; `α` and `β` minimise
    `∇hᵀδ + ½ δᵀ (C + (λ + η) I) δ`. `C` is the Gauss-Newton matrix of this step's examples, not its Kronecker
    approximation: `α` thus mends what the factors get wrong of its scale. It costs two Jacobian-vector products (about
    four forwards) a step, and the examples are held until the step.

    For full or very large batches. On small ones `α` fits the batch, not the data: it comes out too large.

    Of the param groups, `lr` multiplies `Δ`, so that a common one has no effect and groups may differ; `momentum` above
    0 says that `β` is wanted; `damping` is `λ`, and `l2_in_curvature` makes `weight_decay` `η`. The model takes the
    place of the trust region: `kl_clip` is not looked at. Parameters that no layer covers go along their gradient, by
    `α`.

    It needs `step(closure)`, or a step after an ordinary backward; and `estimate=` an estimate that names the loss, as
    `MonteCarlo(criterion)` does. Forwards run again with the random numbers they drew, so that dropout is allowed.
    """

    needs_objective = True

    @property
    def takes_shards(self) -> bool:
        return False

    def check(self, groups: Sequence[Group]) -> None:
        for i, group in enumerate(groups):
            for name, wanted in (("dampening", 0), ("nesterov", False), ("maximize", False)):
                if group[name] != wanted:
                    raise ValueError(
                        f"kfac_optim: QuadraticModel decides on momentum itself and descends: {name} of param group "
                        f"{i} must be {wanted}, got {group[name]!r}."
                    )
            for param in group["params"]:
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"kfac_optim: a parameter {list(param.shape)} of param group {i} has a {param.grad.layout} "
                        "gradient; QuadraticModel needs dense ones. Pass sparse=False to the layer."
                    )
            if _nonzero(group["weight_decay"]) and not group["l2_in_curvature"]:
                raise ValueError(
                    f"kfac_optim: weight_decay={group['weight_decay']!r} of param group {i} is no part of the loss "
                    "that QuadraticModel minimises; pass l2_in_curvature=True, or weight_decay=0."
                )

    def size(self, proposal: Proposal) -> Sized:
        objective = proposal.objective
        assert objective is not None
        gradient = _regularised_gradient(proposal.groups)
        direction = {param: grad.clone() for param, grad in gradient.items()} | proposal.direction()
        before: Direction = {}
        for group in proposal.groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                direction[param].mul_(scalar(group["lr"], param.device))
                buffer = proposal.momentum(param)
                if buffer is not None and group["momentum"] > 0:
                    before[param] = buffer
        device = next(iter(gradient)).device
        # With v₀ = -Δ and v₁ = -buffer: torch's buffer after a step of rate 1 and momentum 1 is -δ.
        ways = [direction, before] if before else [direction]
        slope = -torch.stack([_dot(way, gradient, device) for way in ways])
        curved = objective.curvature({param: param.detach() for param in gradient}, ways, proposal.count)
        curved = proposal.executor.average(curved)
        curved = curved.to(slope.dtype) + _ridge(proposal.groups, ways, slope, l2)
        damped = curved + _ridge(proposal.groups, ways, slope, lambda group: group["damping"])
        weights = minimum(damped, slope)
        scale_all(list(direction.values()), weights[0])
        if before:
            scale_all(list(before.values()), weights[1])
        return Sized(
            direction,
            lambda group: {
                "lr": 1.0,
                "momentum": 1.0 if group["momentum"] > 0 else 0.0,
                "weight_decay": 0.0,
            },
            {
                "learning_rate": weights[0],
                "momentum": weights[1] if before else torch.zeros_like(weights[0]),
                "predicted_change": change(curved, slope, weights),
            },
        )


def _regularised_gradient(groups: Iterable[Group]) -> Direction:
    return {param: regularised(param, group) for group in groups for param in group["params"] if param.grad is not None}


def _ridge(
    groups: Iterable[Group], ways: Sequence[Direction], like: Tensor, weight: Callable[[Group], float]
) -> Tensor:
    """`VᵀDV` with `D` the weight of each param group on its diagonal, `[k, k]`, of the dtype and device of `like`."""
    total = torch.zeros(len(ways), len(ways), device=like.device, dtype=like.dtype)
    for group in groups:
        if (factor := weight(group)) == 0:
            continue
        parts = [{param: way[param] for param in group["params"] if param in way} for way in ways]
        gram = [[_dot(left, right, like.device) for right in parts] for left in parts]
        total = total + factor * torch.stack([torch.stack(row) for row in gram]).to(like.dtype)
    return total


def _dot(left: Direction, right: Direction, device: torch.device) -> Tensor:
    """Over the parameters that both have."""
    shared = [param for param in left if param in right]
    return inner_product([left[param] for param in shared], [right[param] for param in shared], device)


def summed_terms(proposal: Proposal) -> float:
    """The terms of the step's summed loss; of the last statistics where none were seen in this step."""
    return proposal.count.summed or max(block.clock.summed_terms for block in proposal.covered)


def _buffers(proposal: Proposal) -> list[tuple[Group, Tensor, Tensor]]:
    """Momentum of the parameters that are updated here and covered, with its param group and `∇h`.

    Of each the part that is here.
    """
    return [
        (group, local(buffer), local(regularised(param, group)))
        for param, group in covered_here(proposal)
        if param.grad is not None and group["momentum"] != 0 and (buffer := proposal.momentum(param)) is not None
    ]


def covered_here(proposal: Proposal) -> list[tuple[nn.Parameter, Group]]:
    """The covered parameters that are updated here, in whole or in part, with their param groups."""
    here = set(proposal.executor.owned([param for block in proposal.covered for param in block.params]))
    pairs = [pair for block in proposal.covered for pair in zip(block.params, block.groups, strict=True)]
    return [(param, group) for param, group in pairs if param in here]


def lengths(products: Sequence[tuple[Group, Tensor]]) -> tuple[Tensor, Tensor]:
    """`Σ lr Δᵀ∇` and `Σ lr² Δᵀ∇`, each `[]`, of the products of a proposal."""
    rates = [(scalar(group["lr"], product.device), product) for group, product in products]
    decrease = torch.stack([rate * product for rate, product in rates]).sum()
    return decrease, torch.stack([rate**2 * product for rate, product in rates]).sum()


def shortened(share: Tensor, short: Tensor) -> Tensor:
    """Bring the share of too short steps up to date: an average in which 98 of them in a row make 0.95.

    Args:
        share: until the last step, `[]`.
        short: whether this step was, `[]` bool.
    """
    return share + 0.03 * (short.to(share.dtype) - share)


def _promised(buffers: Sequence[tuple[Group, Tensor, Tensor]], device: torch.device) -> Tensor:
    """The decrease `Σ lr μ bᵀ∇` that momentum `b` promises, `[]`."""
    decrease = torch.zeros((), device=device)
    for group, lefts, rights in by_group(buffers):
        sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
        rate = sign * group["momentum"] * scalar(group["lr"], device)
        decrease = decrease + inner_product(lefts, rights, device) * rate
    return decrease


def _whole_step(proposal: Proposal, block: KFACBlock, parts: Parts) -> Parts:
    """What torch's SGD is about to take from the parameters, but for weight decay."""
    steps = []
    for param, group, part in zip(block.params, block.groups, parts, strict=True):
        mu, buffer = group["momentum"], proposal.momentum(param)
        step = part * (1 + mu if group["nesterov"] else 1)
        if mu != 0 and buffer is not None:
            added = 1 - group["dampening"]
            sign = -1 if group["maximize"] else 1  # torch's buffers then hold the negative
            carried = sign * mu * buffer.to(part.dtype)
            step = part + mu * (carried + part) if group["nesterov"] else added * part + carried
        steps.append(step * scalar(group["lr"], step.device) * (param.grad is not None))
    return steps


def _times_factors(block: KFACBlock, matrix: Tensor) -> Tensor:
    """`G S A`, with the averages as they are.

    To unpack these at every step takes `in² + out²` writes, few beside the products.
    """
    a, g = (None if factor is None else factor.to(matrix.dtype) for factor in block.inverse.factors(block.state))
    return sandwich(g, matrix, a)


def by_group(
    pairs: Iterable[tuple[Group, Tensor, Tensor]],
) -> Iterable[tuple[Group, list[Tensor], list[Tensor]]]:
    """Each param group, whose numbers multiply all its products, and the two sides of its pairs."""
    found: dict[int, tuple[Group, list[Tensor], list[Tensor]]] = {}
    for group, left, right in pairs:
        _, lefts, rights = found.setdefault(id(group), (group, [], []))
        lefts.append(left)
        rights.append(right)
    return found.values()


def scale_momentum(proposal: Proposal, buffers: Iterable[tuple[Group, Tensor]], factor: Tensor) -> None:
    """Scale momentum for good, and so not where the step will not be taken."""
    if proposal.finite is not None:
        factor = torch.where(proposal.finite, factor, 1.0)
    scale_all([buffer for group, buffer in buffers if group["momentum"] != 0], factor)


def scale_all(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all by one number, wherever they are."""
    if factor.device.type == "cpu" and float(factor) == 1.0:  # which the host knows without waiting
        return
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device].append(tensor)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device, non_blocking=True))


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A number as it is, a tensor of one element as one of none on the device."""
    return value.reshape(()).to(device) if isinstance(value, Tensor) else value


def _nonzero(weight_decay: float | Tensor) -> bool:
    return bool(weight_decay != 0)
