"""Learning rate and momentum that minimise the quadratic model of the loss (Martens & Grosse 2015, §7)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kfac_optim.blocks.block import l2
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.cholesky import Cholesky
from kfac_optim.step.quadratic import change, minimum
from kfac_optim.step.scalars import chosen, scalar_beside
from kfac_optim.step.scaling import scale_all
from kfac_optim.step.step_size import (
    Direction,
    Group,
    Proposal,
    Sized,
    StepSize,
    refuse_complex,
    refuse_sparse,
    require,
)
from kfac_optim.step.trust_region import inner_product


@dataclass(frozen=True)
class QuadraticModel(StepSize):
    """Finds the learning rate and momentum that minimise the exact quadratic model (Martens & Grosse 2015, §7).

    The step is `δ = -α Δ + β δ₋₁`, with `Δ` the preconditioned gradient and `δ₋₁` the step before; `α` and `β` minimise
    `∇hᵀδ + ½ δᵀ (C + (λ + η) I) δ`. `C` is the Gauss-Newton matrix of this step's examples, not its Kronecker
    approximation: `α` thus mends what the factors get wrong of its scale. It costs two Jacobian-vector products (about
    four forwards) a step, and the examples are held until the step. What the criterion that `estimate` names reads is
    where `C` is taken, each call weighed as the loss weighs it: if that is no output of the model, such as a residual
    that holds derivatives, it is differentiated a second time, and its graph is held until the step.

    Call that very criterion for all of the loss. Where the loop calls another object or a function, `C` is that of the
    plain mean, or sum: of `10 * F.mse_loss(…)` it lacks the 10, and `α` comes out 10 times too long, unless
    `set_loss_terms(terms / 10)` states it. Where the criterion reads a part of what the model returned, and something
    else reads the rest, the rest has no part in `C` unless you `observe` it: steps become too long, up to divergence.

    For full or very large batches. On small ones `α` fits the batch, not the data: it comes out too large.

    Of the param groups, `lr` multiplies `Δ`, so that a common one has no effect and groups may differ, and a group at 0
    stands still; `momentum` above 0 says that `β` is wanted; `damping` is `λ`, and `l2_in_curvature` makes
    `weight_decay` `η`. The model takes the place of the trust region: `kl_clip` has no effect. Parameters that no layer
    covers go along their gradient, by `α`.

    Where no `inverse` is named, factors are whole (`Cholesky()`): adapted damping falls low, and sketches leave out of
    wide factors what only larger damping would hide.

    It needs `step(closure)`, or a step after an ordinary backward; and `estimate=` an estimate that names the loss, as
    `MonteCarlo(criterion)` does. Forwards run again with the random numbers they drew, so that dropout is allowed.
    """

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = Cholesky()
    needs_objective = True

    takes_shards = False

    def check(self, groups: Sequence[Group]) -> None:
        wanted = {"dampening": 0, "nesterov": False, "maximize": False}
        require(groups, wanted, "QuadraticModel decides on momentum itself and descends")
        for i, group in enumerate(groups):
            refuse_sparse(group, i, "QuadraticModel")
            refuse_complex(group, i, "QuadraticModel")
            if bool(group["weight_decay"] != 0) and not group["l2_in_curvature"]:
                raise ValueError(
                    f"kfac_optim: weight_decay={group['weight_decay']!r} of param group {i} is no part of the loss "
                    "that QuadraticModel minimises; pass l2_in_curvature=True, or weight_decay=0."
                )

    def size(self, proposal: Proposal) -> Sized:
        objective = proposal.objective
        assert objective is not None
        gradient = {
            param: regularised(param, group).to(param.dtype)  # `grad_dtype` may be another
            for group in proposal.groups
            for param in group["params"]
            if param.grad is not None
        }
        direction = {param: grad.clone() for param, grad in gradient.items()} | proposal.direction()
        before: Direction = {}
        for group in proposal.groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                lr = scalar_beside(group["lr"], direction[param])
                direction[param].mul_(lr)
                buffer = proposal.momentum(param)
                if buffer is not None and group["momentum"] > 0:
                    if buffer.dtype != param.dtype:  # the model was cast since the last step
                        buffer = proposal.state[param]["momentum_buffer"] = buffer.to(param.dtype)
                    # `β` must not move a group that is to stand still, and a rate on an accelerator is not waited for.
                    scale_all([buffer], chosen(lr != 0, 1.0, 0.0))
                    before[param] = buffer
        device = next(iter(gradient)).device
        # With v₀ = -Δ and v₁ = -buffer: torch's buffer after a step of rate 1 and momentum 1 is -δ.
        ways = [direction, before] if before else [direction]
        slope = -torch.stack([_dot(way, gradient, device) for way in ways])
        curved = objective.curvature({param: param.detach() for param in gradient}, ways, proposal.count)
        curved = proposal.executor.mean_over_examples(curved)
        curved = curved.to(slope.dtype) + _ridge(proposal.groups, ways, slope, l2)
        damped = curved + _ridge(proposal.groups, ways, slope, lambda group: group["damping"])
        weights = minimum(damped, slope)
        scale_all(list(direction.values()), weights[0])
        if before:
            scale_all(list(before.values()), weights[1])
        return Sized(
            direction,
            {
                "learning_rate": weights[0],
                "momentum": weights[1] if before else torch.zeros_like(weights[0]),
                "predicted_change": change(curved, slope, weights),
            },
            sgd=lambda group: {"lr": 1.0, "momentum": 1.0 if group["momentum"] > 0 else 0.0, "weight_decay": 0.0},
        )


def _ridge(
    groups: Iterable[Group], ways: Sequence[Direction], like: Tensor, weight: Callable[[Group], float]
) -> Tensor:
    """Return `VᵀDV` with `D` the weight of each param group on its diagonal, `[k, k]`, in the dtype of `like`."""
    total = torch.zeros(len(ways), len(ways), device=like.device, dtype=like.dtype)
    for group in groups:
        if (factor := weight(group)) == 0:
            continue
        parts = [{param: way[param] for param in group["params"] if param in way} for way in ways]
        gram = [[_dot(left, right, like.device) for right in parts] for left in parts]
        total = total + factor * torch.stack([torch.stack(row) for row in gram]).to(like.dtype)
    return total


def _dot(left: Direction, right: Direction, device: torch.device) -> Tensor:
    """Return the inner product over the parameters that both have."""
    shared = [param for param in left if param in right]
    return inner_product([left[param] for param in shared], [right[param] for param in shared], device)
