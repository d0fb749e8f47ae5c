"""The trust region of Ba, Grosse & Martens (2017, §5): a bound on each step that stays as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kfac_optim.step.scalars import scalars_beside, vector
from kfac_optim.step.scaling import lengths, momenta, scale_all, scale_momentum, slopes, summed_terms
from kfac_optim.step.step_size import Group, Proposal, Sized, StepSize
from kfac_optim.step.trust_region import momentum_scale, shortened, trust_region_scale


@dataclass(frozen=True)
class TrustRegion(StepSize):
    """Takes the user's learning rate and momentum, bounded by `kl_clip` (Ba, Grosse & Martens 2017, §5).

    The bound is in units of the loss and stays as it is: `kl_clip` must suit the loss.

    The bound is on what this step adds, `lr² Δᵀ F Δ ≤ κ`, and on the fall of the loss that it promises, `lr Δᵀ∇ ≤ √κ`,
    which binds first where `Δᵀ∇` is above 1; old momentum is left alone while it goes downhill.
    """

    bounds_steps = True

    def scalars(self, groups: Sequence[Group]) -> tuple[int, ...]:
        return () if all(group["kl_clip"] is None for group in groups) else (1,)

    def advice(self, scale: float) -> str:
        return (
            "Training may be slow where the loss is large. Raise kl_clip tenfold and look at "
            "metrics()['trust_region_scale'], or leave step_size at its default, which finds how far steps may go."
        )

    def size(self, proposal: Proposal) -> Sized:
        if proposal.kl_clip is None:
            return Sized(proposal.direction(), {"trust_region_scale": 1.0, "momentum_scale": 1.0})
        summed = summed_terms(proposal)
        earlier = [each for each in momenta(proposal) if each.group["momentum"] != 0]
        promises = proposal.executor.gradients.sum_over_updaters(slopes(proposal, earlier)[1:])
        decrease, quadratic, promised = proposal.executor.stages.sums(lengths(proposal.products), promises)
        scale = trust_region_scale(quadratic, decrease, summed, proposal.kl_clip)
        held = momentum_scale(promised, summed, proposal.kl_clip)
        scale_all(chain.from_iterable(proposal.parts), scale)
        scale_momentum(proposal, earlier, held)
        *unused, share = scalars_beside(proposal.memory, decrease)
        return Sized(
            proposal.direction(),
            {"trust_region_scale": scale, "momentum_scale": held, "kl_clip": proposal.kl_clip},
            vector([*unused, shortened(share, scale < 1)], proposal.memory),
        )
