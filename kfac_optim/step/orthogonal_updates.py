"""Updates with orthogonal matrices, at the rates of AdamW: Muon's step, taken from preconditioned momentum."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, SECOND_MOMENT
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.root import InverseRoot
from kfac_optim.linalg.orthogonal import orthogonalised
from kfac_optim.specs import Kept, Structure
from kfac_optim.step.step_size import Direction, Group, PlainSteps, Proposal, Sized, StepSize, refuse_sparse
from kfac_optim.utils.validation import check_number

# Elements of a matrix from which on a launch takes no longer than its products.
_SMALL = 2**18


@dataclass(frozen=True)
class OrthogonalUpdates(StepSize):
    """Makes the momentum of each layer orthogonal (Jordan et al. 2024, "Muon"), and each update of equal size.

    The momentum is the mean `M ← μ M + (1 - μ) Δ` of the preconditioned gradients. As a matrix `[out, in]`, with the
    bias as its last column, its singular values are brought near 1 (`linalg.orthogonal.orthogonalised`), and it is
    multiplied by `rms √max(out, in)`: then its root mean square is about `rms` (Liu et al. 2025, arXiv 2502.16982,
    §2.2). AdamW's updates have about that size, so that its rates, schedules and decoupled weight decay carry over.
    Norm layers, and all parameters that belong to no layer, take AdamW's step, with the momentum for β₁. With
    `l2_in_curvature` weight decay is part of every gradient, and not decoupled.

    It is for training on mini-batches, where a step of the full inverse is noisy: classifiers, language models,
    regressions. On deep autoencoders with large batches the full inverse goes further, with the loss named. What it
    goes with:

        optimizer = KFACOptimizer(
            model,
            lr=0.01,
            momentum=0.9,
            nesterov=True,
            inverse=InverseRoot(),
            structure=(Structure.DENSE, Structure.IDENTITY),
            step_size=OrthogonalUpdates(),
            skip_layers=["head"],
        )

    Leave the output layer to AdamW by `skip_layers`, as Muon's recipe does (Jordan et al. 2024). There is no trust
    region: `kl_clip` is not looked at. Rates of 0.003 to 0.03 suit the small models of the benchmarks. As with Muon a
    layer whose gradient has become zero goes on along its momentum, at its full size.

    Args:
        rms: the root mean square of a layer's update at a rate of 1, above 0; where the momentum has not the full rank
            of the matrix it is less.
        beta2: the decay of Adam's average of squared gradients, from 0 to less than 1.
        eps: what is added to its root, above 0.

    Raises:
        TypeError: an argument is no number.
        ValueError: it is out of range.
    """

    rms: float = 0.2
    beta2: float = 0.999
    eps: float = 1e-8

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = InverseRoot()
    usual_structure: ClassVar[tuple[Kept, Kept] | None] = (Structure.DENSE, Structure.IDENTITY)
    takes_shards = False
    directs_all = True
    plain = PlainSteps(layer="Muon", rest="AdamW")

    def __post_init__(self) -> None:
        check_number("rms of OrthogonalUpdates", self.rms, above=0)
        check_number("beta2 of OrthogonalUpdates", self.beta2, at_least=0, at_most=1)
        if self.beta2 == 1:
            raise ValueError("kfac_optim: beta2 of OrthogonalUpdates must be below 1, got 1.")
        check_number("eps of OrthogonalUpdates", self.eps, above=0)

    def check(self, groups: Sequence[Group]) -> None:
        for i, group in enumerate(groups):
            if group["dampening"] != 0 or group["momentum"] >= 1:
                raise ValueError(
                    "kfac_optim: OrthogonalUpdates takes the momentum for a mean of gradients, which needs momentum "
                    f"below 1 and dampening 0, got momentum={group['momentum']!r} and dampening={group['dampening']!r} "
                    f"in param group {i}."
                )
            refuse_sparse(group, i, "OrthogonalUpdates")
            for param in group["params"]:
                if param.grad is not None and param.is_complex():
                    raise RuntimeError(
                        f"kfac_optim: a parameter {list(param.shape)} of param group {i} is complex, and "
                        "OrthogonalUpdates takes real ones. Keep it as torch.view_as_real of the complex one, or pass "
                        "step_size=AdaptiveTrustRegion()."
                    )

    def size(self, proposal: Proposal) -> Sized:
        direction = proposal.direction()
        group_of = {param: group for group in proposal.groups for param in group["params"] if param.grad is not None}
        here = set(proposal.executor.gradients.owned(list(group_of)))
        trained = {param: group for param, group in group_of.items() if param in here}
        layers = [block for block in proposal.graded if any(p.dim() > 1 and p in trained for p in block.params)]
        updates = self._of_layers(proposal, layers, trained, direction)
        for param, group in trained.items():
            if param not in updates:
                updates[param] = self._of_adam(proposal, param, group)
        return Sized(updates, lambda _: {"momentum": 0.0, "nesterov": False}, {})

    def _of_layers(
        self,
        proposal: Proposal,
        layers: Sequence[KFACBlock],
        trained: Mapping[nn.Parameter, Group],
        direction: Direction,
    ) -> Direction:
        """Return the updates of layers, and take their directions into the momentum.

        Args:
            proposal: the step.
            layers: blocks with a matrix.
            trained: the parameters that are updated here, with their param groups.
            direction: what `proposal.direction` gave.
        """
        means = {
            param: take_into_mean(proposal, param, trained[param], direction.get(param))
            for block in layers
            for param in block.params
            if param in trained
        }
        return self._orthogonal(layers, means)

    def _orthogonal(self, layers: Sequence[KFACBlock], means: Direction) -> Direction:
        """Return orthogonal updates of layers, of their means by parameter."""
        matrices = []
        for block in layers:
            parts = [means.get(param, torch.zeros_like(param)).to(block.wide_dtype) for param in block.params]
            matrices.append(block.adapter.pack(block.spec, parts))
        updates: Direction = {}
        for block, whole in zip(layers, self.of_matched_size(matrices), strict=True):
            for param, part in zip(block.params, block.adapter.unpack(block.spec, whole), strict=True):
                if param in means:
                    updates[param] = torch.empty_like(param).copy_(part.reshape(param.shape))
        return updates

    def of_matched_size(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthogonal factors of matrices `[groups, out, in]`, of a root mean square of `rms` at full rank.

        Small matrices of one shape go through one batch of products.
        """
        found = list(matrices)
        alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, matrix in enumerate(matrices):
            alone = number if matrix.numel() > _SMALL else None
            alike[matrix.shape[-2:], matrix.dtype, matrix.device, alone].append(number)
        for numbers in alike.values():
            together = orthogonalised(torch.cat([matrices[number] for number in numbers]))
            together *= self.rms * max(together.shape[-2:]) ** 0.5
            parts = torch.split(together, [len(matrices[number]) for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part
        return found

    def _of_adam(self, proposal: Proposal, param: nn.Parameter, group: Group) -> Tensor:
        """Return the update of AdamW at a rate of 1, without the decay (Kingma & Ba 2015, algorithm 1)."""
        gradient, held = regularised(param, group).to(param.dtype), proposal.state[param]
        if SECOND_MOMENT not in held:  # what momentum there is was made by another rule
            held[ADAM_STEPS] = _no_steps(param)
            held[SECOND_MOMENT], held[MOMENTUM] = torch.zeros_like(param), torch.zeros_like(param)
        new = {
            # At a momentum of 0 as well, which may be raised later.
            MOMENTUM: _kept(held, MOMENTUM, param).lerp(gradient, 1 - group["momentum"]),
            SECOND_MOMENT: _kept(held, SECOND_MOMENT, param).lerp(gradient.square(), 1 - self.beta2),
            ADAM_STEPS: held[ADAM_STEPS] + 1,
        }
        for key, tensor in new.items():
            held[key] = if_taken(proposal, tensor, held[key])
        # In float64, as 1 - β₂ᵗ is a small difference at first, and at least in float32, where eps is not zero.
        taken, wide = new[ADAM_STEPS].double(), torch.promote_types(param.dtype, torch.float32)
        root = (new[SECOND_MOMENT].to(wide) / (1 - self.beta2**taken).to(wide)).sqrt()
        correction: Tensor = 1 - group["momentum"] ** taken
        update: Tensor = new[MOMENTUM].to(wide) / correction.to(wide) / (root + self.eps)
        return update.to(param.dtype)


def take_into_mean(proposal: Proposal, param: nn.Parameter, group: Group, direction: Tensor | None) -> Tensor:
    """Take the direction of a layer's parameter into its momentum, and return what the update is made of.

    Args:
        proposal: the step.
        param: the parameter.
        group: its param group.
        direction: the preconditioned gradient; None where the layer has no inverse, and the gradient stands for it.
    """
    momentum, held = group["momentum"], proposal.state[param]
    new = (regularised(param, group) if direction is None else direction).to(param.dtype)
    if momentum == 0:
        held.pop(MOMENTUM, None)  # it would be stale where the momentum is raised again
        return new
    if ADAM_STEPS not in held or MOMENTUM not in held:
        # Torch's momentum is a sum, and perhaps of the negative. The count, which stays 0 here, marks a mean.
        held[MOMENTUM], held[ADAM_STEPS] = torch.zeros_like(param), _no_steps(param)
    before = _kept(held, MOMENTUM, param)
    mean = before.lerp(new, 1 - momentum)
    held[MOMENTUM] = if_taken(proposal, mean, before)
    return mean.lerp(new, 1 - momentum) if group["nesterov"] else mean


def _kept(held: Mapping[str, Tensor], key: str, param: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's state, in the dtype of the parameter, which may have been changed."""
    return held[key].to(param.dtype)


def _no_steps(param: nn.Parameter) -> Tensor:
    """Return the count of a mean that nothing was taken into, `[]`, in the dtype that torch's Adam has it in."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def if_taken(proposal: Proposal, new: Tensor, before: Tensor) -> Tensor:
    """Return what is to be kept of a step that is perhaps not taken."""
    return new if proposal.finite is None else torch.where(proposal.finite, new, before.to(new.dtype))
