"""The length of a step by a search for the lowest loss of the step's own examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfac_optim.blocks.preconditioning import acceleration, regularised
from kfac_optim.step.scalars import scalar_beside
from kfac_optim.step.scaling import penalty, scale_all
from kfac_optim.step.step_size import ClosureLoss, Direction, Group, Proposal, Sized, StepSize, refuse_sparse, require
from kfac_optim.utils.validation import check_flag, check_integer, check_number

# The place of the last number of halvings in what is remembered: another step size that goes on from a checkpoint reads
# there whether a trust region held the last step, and a number in the place of the region's size would be one.
_HALVINGS = 2

# The part of the last step's length along which the acceleration is seen.
_SEEN = 0.1

# The largest `t‖a‖ / ‖Δ‖`. The GNU Scientific Library has the same number, and refuses steps that bend more.
_MOST_BENT = 0.75


@dataclass(frozen=True)
class LineSearch(StepSize):
    """Takes steps of the length that lowers the loss most, of the lengths `longest · 2⁻ᵏ`.

    The search begins at the length of the last step and goes to twice or half of it as long as the loss falls: about
    three evaluations of `step(closure)`, of which none runs its backward: a closure that needs gradients of its own, as
    for an attack on the inputs, takes them by `autograd.grad`. A step that lowers the loss at no length is not taken.
    It is for deterministic batches, where the loss of the step's examples says what a step does: with `SampleSpace`, or
    other inverses on full batches. On small batches it fits the batch.

    Where the inverse knows the residuals of the step (`SampleSpace()` of all layers jointly), the step of length `t` is
    `-tΔ + ½t²a` with the geodesic acceleration `a` (Transtrum & Sethna 2012, arXiv 1207.4999): it bends as the
    residuals ask for, which is seen in one evaluation more, at a tenth of the last length. On physics-informed networks
    in float64 errors end a hundredth as large as by straight steps; in float32, where rounding hides how residuals
    bend, there is little to gain. A step bends by three quarters of its length at most.

    `lr` of the param groups multiplies the direction, so that a common one only moves the grid; where rates differ, the
    acceleration of each group goes by its share of the largest, so that a group at 0 stands still. Momentum, and weight
    decay that is not `l2_in_curvature`, must be 0; `kl_clip` has no effect. Parameters that no layer covers go along
    their gradient.

    Attributes:
        longest: the longest step, as a multiple of the direction.
        halvings: how often the longest may be halved.
        geodesic: whether steps bend where the inverse knows how.

    Raises:
        TypeError: an attribute is no number.
        ValueError: an attribute is out of range.
    """

    longest: float = 1.0
    halvings: int = 30
    geodesic: bool = True

    needs_closure = True

    takes_shards = False

    def __post_init__(self) -> None:
        check_number("longest of LineSearch", self.longest, above=0)
        check_integer("halvings of LineSearch", self.halvings)
        check_flag("geodesic of LineSearch", self.geodesic, optional=False)

    def check(self, groups: Sequence[Group]) -> None:
        wanted = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
        remedy = " SampleSpace(momentum=...) has a momentum of its own."
        require(groups, wanted, "LineSearch looks along one direction and descends", remedy)
        for i, group in enumerate(groups):
            refuse_sparse(group, i, "LineSearch")
            if bool(group["weight_decay"] != 0) and not group["l2_in_curvature"]:
                raise ValueError(
                    f"kfac_optim: weight_decay={group['weight_decay']!r} of param group {i} is no part of the loss "
                    "that LineSearch lowers. Pass l2_in_curvature=True, which makes it one, or weight_decay=0."
                )

    def size(self, proposal: Proposal) -> Sized:
        loss = proposal.closure
        assert loss is not None, "LineSearch.needs_closure has the optimizer ask for one"
        direction = {
            param: regularised(param, group).to(param.dtype, copy=True)  # `grad_dtype` may be another
            for group in proposal.groups
            for param in group["params"]
            if param.grad is not None
        } | proposal.direction()
        for group in proposal.groups:
            scaled = [direction[param] for param in group["params"] if param in direction]
            if scaled:
                scale_all(scaled, scalar_beside(group["lr"], scaled[0]))

        start = min(max(int(proposal.memory[_HALVINGS]), 0), self.halvings)
        bend = self._acceleration(proposal, loss, direction, _SEEN * self.longest * 2.0**-start)
        velocity, acceleration = _norm([direction[param] for param in bend]), _norm(list(bend.values()))

        def step_of(length: float) -> Direction:
            bent = length / 2
            if length * acceleration > _MOST_BENT * velocity:
                bent = _MOST_BENT * velocity / acceleration / 2
            straight = {param: part for param, part in direction.items() if param not in bend}
            return straight | {param: direction[param] - bent * part for param, part in bend.items()}

        def loss_of(halvings: int) -> float:
            length = self.longest * 2.0**-halvings
            there = _moved(step_of(length), length)
            found = loss.reevaluation.loss_at(there) + penalty(proposal.groups, there)
            return found if math.isfinite(found) else math.inf

        before = loss.before + penalty(proposal.groups, {param: param for param in direction})
        halvings, lowest = self._search(loss_of, start, before)
        falls = lowest < before
        length = self.longest * 2.0**-halvings if falls else 0.0
        memory = proposal.memory.clone()
        memory[_HALVINGS] = halvings if falls else 0
        like = next(iter(direction.values()))
        return Sized(
            step_of(length),
            {"step_length": torch.tensor(length, dtype=torch.float64, device=like.device)},
            memory,
            sgd=lambda _: {"lr": length, "momentum": 0.0, "weight_decay": 0.0},
        )

    def _acceleration(
        self, proposal: Proposal, loss: ClosureLoss, direction: Direction, length: float
    ) -> Mapping[nn.Parameter, Tensor]:
        """Return the geodesic acceleration of a step against `direction`, where it is known."""
        blocks = [block for block in proposal.blocks if block.inverse.takes_rows]
        rates = {
            param: abs(float(group["lr"]))
            for block in blocks
            for param, group in zip(block.params, block.groups, strict=True)
            if param in direction
        }
        if not self.geodesic or loss.changes is None or not any(bool(direction[param].any()) for param in rates):
            return {}  # a step that goes nowhere, as at rates of 0 or on an empty batch, does not bend
        there = _moved({param: direction[param] for param in rates}, length)
        change = loss.changes(lambda: loss.reevaluation.loss_at(there))
        velocities = [
            [-direction[param] if param in direction else torch.zeros_like(param) for param in block.params]
            for block in blocks
        ]
        found = acceleration(blocks, velocities, change, length)
        if found is None or not all(bool(part.isfinite().all()) for parts in found for part in parts):
            return {}
        bends = {
            param: part.to(param.dtype)
            for block, parts in zip(blocks, found, strict=True)
            for param, part in zip(block.params, parts, strict=True)
        }
        # The rates are in the velocities already, of which the acceleration is made: a common one must not come again.
        largest = max(rates.values())
        return {param: bends[param] * (rate / largest) for param, rate in rates.items()}

    def _search(self, loss_of: Callable[[int], float], start: int, before: float) -> tuple[int, float]:
        """Return how often the longest step is halved for the lowest loss, and that loss.

        Steps that are far too long may have any loss, so that those are halved until it falls at all.
        """
        here, lowest = start, loss_of(start)
        while not lowest < before and here < self.halvings:
            here += 1
            lowest = loss_of(here)
        for turn in (1,) if here > start else (-1, 1):
            moved = False
            while 0 <= here + turn <= self.halvings and (found := loss_of(here + turn)) < lowest:
                here, lowest, moved = here + turn, found, True
            if moved:
                break
        return here, lowest


def _moved(step: Direction, length: float) -> Direction:
    return {param: param.detach() - length * part for param, part in step.items()}


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
