"""The preconditioned gradients of one step, and what is measured of them."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.blocks.block import SILENT_STEPS, KFACBlock
from kfac_optim.blocks.preconditioning import is_used
from kfac_optim.step.execution import Agreement, Executor
from kfac_optim.step.roles import Parts
from kfac_optim.step.scalars import Scalar, scalars, total
from kfac_optim.step.scaling import by_group
from kfac_optim.step.step_size import Group, StepSize
from kfac_optim.step.trust_region import inner_product, square_sum
from kfac_optim.utils.autograd import profiled
from kfac_optim.utils.joined_tensors import Joins, joined


class Directions(NamedTuple):
    """Holds the preconditioned gradients of one step.

    Attributes:
        graded: blocks that have a gradient on some rank.
        covered: those of them whose gradients are preconditioned, by whatever worker.
        blocks: the covered ones whose direction is known here.
        grads: the gradients of these.
        parts: their directions.
        unpreconditioned: names of blocks whose gradient goes to SGD as it is, as in `StepRecord`.
    """

    graded: Sequence[KFACBlock]
    covered: Sequence[KFACBlock]
    blocks: Sequence[KFACBlock]
    grads: Sequence[Parts]
    parts: Sequence[Parts]
    unpreconditioned: tuple[str, ...]

    def of(self, blocks: Collection[KFACBlock]) -> "Directions":
        """Return those of some of the blocks."""
        graded, covered = ([block for block in each if block in blocks] for each in (self.graded, self.covered))
        here = [i for i, block in enumerate(self.blocks) if block in blocks]
        known, grads, parts = (
            [self.blocks[i] for i in here],
            [self.grads[i] for i in here],
            [self.parts[i] for i in here],
        )
        return Directions(graded, covered, known, grads, parts, self.unpreconditioned)


def precondition(
    blocks: Sequence[KFACBlock], agreement: Agreement, executor: Executor, step_size: StepSize
) -> Directions:
    """Return the preconditioned gradients; none where the step size preconditions itself."""
    with profiled("kfac.precondition"):
        graded = [block for block in blocks if block in agreement.graded]
        covered, unpreconditioned = _covered(graded, agreement)
        here = executor.gradients.gradients(covered) if step_size.preconditions else []
        active, grads = [block for block, _ in here], [parts for _, parts in here]
        parts = executor.gradients.precondition(active, grads) if here else []
    return Directions(graded, covered, active, grads, parts, tuple(unpreconditioned))


def measure(
    groups: Sequence[Group],
    directions: Directions,
    device: torch.device,
    joins: Joins,
    executor: Executor,
    step_size: StepSize,
) -> tuple[list[tuple[Group, Scalar]], dict[str, Scalar]]:
    """Return `Δᵀ∇` of each param group and the measures of a `StepRecord`; both are empty without a direction.

    Args:
        groups: all param groups.
        directions: the directions of this step. They are set to zero where their square overflows on the host.
        device: the device on which sums are made if no block has a direction.
        joins: joins gradients.
        executor: sums over ranks.
        step_size: says whether gradients are preconditioned before it is asked.
    """
    covered, apart = directions.covered, executor.gradients.apart
    if not (step_size.preconditions and (covered or apart)):
        return [], {}
    # Of every group that has covered blocks, also where these are preconditioned by other workers.
    summed = groups if apart else [group for block in covered for group in block.groups]
    device = covered[0].params[0].device if covered else device
    products, measures = _products(summed, device, directions, executor, joins)
    square = measures["direction_square"]
    if not isinstance(square, Tensor) and not math.isfinite(square):
        for part in (each for of_block in directions.parts for each in of_block):
            part.zero_()
        products = [(group, 0.0) for group, _ in products]
    return products, measures


def _covered(graded: Sequence[KFACBlock], agreement: Agreement) -> tuple[list[KFACBlock], list[str]]:
    """Return the blocks that are preconditioned, and the names of those whose gradient has no inverse to meet."""
    covered: list[KFACBlock] = []
    unpreconditioned: list[str] = []
    for block in graded:
        refused = block.is_refused() or block in agreement.unaccounted
        if block.is_ready and not refused:
            covered.append(block)
        # Without statistics because the loss did not use it: nothing to precondition, nothing to report.
        # Looking synchronises, for blocks that have no inverse yet.
        elif refused or (is_used(block) if agreement.used is None else block in agreement.used):
            if block.silent < SILENT_STEPS:
                unpreconditioned.append(block.name)
            block.silent = 0  # the loss uses it after all
            if not refused and block.is_overdue():
                block.note_missed()
    return covered, unpreconditioned


def _products(
    summed: Iterable[Group], device: torch.device, directions: Directions, executor: Executor, joins: Joins
) -> tuple[list[tuple[Group, Scalar]], dict[str, Scalar]]:
    """Return `Δᵀ∇` of each param group, as weight and bias may be of several, and the measures of a `StepRecord`.

    Args:
        summed: the param groups, the same on all ranks that sum; some may come more than once.
        device: the device on which sums are made.
        directions: those that are known here.
        executor: sums over ranks.
        joins: joins gradients.
    """
    groups: dict[int, Group] = {id(group): group for group in summed}
    pairs = (
        pair
        for block, left, right in zip(directions.blocks, directions.parts, directions.grads, strict=True)
        if executor.gradients.makes_for_sums(block)
        for pair in zip(block.groups, left, right, strict=True)
    )
    found: dict[int, Tensor] = {}
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    for group, left, right in by_group(pairs):
        left, right = joined(left), joins.of(right)
        found[id(group)] = inner_product(left, right, device)
        lefts += left
        rights += right
    sums = [found[key] if key in found else inner_product([], [], device) for key in groups]
    sums += [square_sum(lefts, device), square_sum(rights, device)]
    *by_groups, direction_square, gradient_square = scalars(executor.gradients.sum_over_updaters(torch.stack(sums)))
    products = list(zip(groups.values(), by_groups, strict=True))
    squares = {"direction_square": direction_square, "gradient_square": gradient_square}
    return products, {"inner": total(by_groups), **squares}
