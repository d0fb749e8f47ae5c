"""Updates with orthogonal matrices, at the rates of AdamW: Muon's step, taken from preconditioned momentum."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, SECOND_MOMENT
from kfac_optim.linalg.orthogonal import orthogonalised
from kfac_optim.step.step_size import Direction, Group, PlainSteps, Proposal, Sized, StepSize
from kfac_optim.utils.validation import check_number


@dataclass(frozen=True)
class OrthogonalUpdates(StepSize):
    """Makes the momentum of each layer orthogonal (Jordan et al. 2024, "Muon"), and each update of equal size.

    The momentum is the mean `M ← μ M + (1 - μ) Δ` of the preconditioned gradients. As a matrix `[out, in]`, with the
    bias as its last column, its singular values are brought near 1 (`linalg.orthogonal.orthogonalised`), and it is
    scaled to a root mean square of `rms`. AdamW's updates have about that size, so that its rates, schedules and weight
    decay carry over (Liu et al. 2025, arXiv 2502.16982, §2.2): a layer goes `lr · rms` in the root mean square, and
    `weight_decay` is decoupled. All parameters that belong to no layer take AdamW's step, with the momentum for β₁.

    It is for classifiers and language models that are trained on mini-batches, where a step of the full inverse is
    noisy. Where batches are large and the loss is that of an autoencoder or a regression, the defaults go further:

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

    Leave the output layer of a language model to AdamW by `skip_layers`, as all users of Muon do. There is no trust
    region: `kl_clip` is not looked at. Rates are those of AdamW, 0.003 to 0.03 for small models.

    Args:
        rms: the root mean square of a layer's update at a rate of 1, above 0.
        beta2: the decay of Adam's average of squared gradients, from 0 to less than 1.
        eps: what is added to its root, above 0.

    Raises:
        TypeError: an argument is no number.
        ValueError: it is out of range.
    """

    rms: float = 0.2
    beta2: float = 0.999
    eps: float = 1e-8

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
            for param in group["params"]:
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"kfac_optim: a parameter {list(param.shape)} of param group {i} has a {param.grad.layout} "
                        "gradient; OrthogonalUpdates needs dense ones. Pass sparse=False to the layer."
                    )

    def size(self, proposal: Proposal) -> Sized:
        direction = proposal.direction()
        group_of = {param: group for group in proposal.groups for param in group["params"] if param.grad is not None}
        here = set(proposal.executor.gradients.owned(list(group_of)))
        trained = {param: group for param, group in group_of.items() if param in here}
        layers = [block for block in proposal.graded if not here.isdisjoint(block.params)]
        alone = set(trained).difference(*(block.params for block in layers))
        means = {
            param: _mean(proposal, param, group, direction[param] if param in direction else regularised(param, group))
            for param, group in trained.items()
            if param not in alone
        }
        updates = self._of_layers(layers, means)
        for param in alone:
            updates[param] = self._of_adam(proposal, param, trained[param])
        return Sized(updates, lambda _: {"momentum": 0.0, "nesterov": False}, {})

    def _of_layers(self, layers: Iterable[KFACBlock], means: Direction) -> Direction:
        """Return the updates of layers; those whose matrices have one shape go through one batch of products."""
        alike: defaultdict[tuple[object, ...], list[_Layer]] = defaultdict(list)
        for block in layers:
            parts = [means.get(param, torch.zeros_like(param)).to(block.wide_dtype) for param in block.params]
            matrix = block.adapter.pack(block.spec, parts)
            alike[matrix.shape[-2:], matrix.dtype, matrix.device].append(_Layer(block, matrix))
        updates: Direction = {}
        for equal in alike.values():
            together = orthogonalised(torch.cat([layer.matrix for layer in equal]))
            for layer, whole in zip(equal, torch.split(together, [len(layer.matrix) for layer in equal]), strict=True):
                size = whole.square().mean().sqrt()
                scaled = whole * (self.rms / torch.where(size > 0, size, 1))
                unpacked = layer.block.adapter.unpack(layer.block.spec, scaled)
                for param, part in zip(layer.block.params, unpacked, strict=True):
                    if param in means:
                        updates[param] = torch.empty_like(param).copy_(part.reshape(param.shape))
        return updates

    def _of_adam(self, proposal: Proposal, param: nn.Parameter, group: Group) -> Tensor:
        """Return the update of AdamW at a rate of 1, without the decay (Kingma & Ba 2015, algorithm 1)."""
        assert param.grad is not None
        gradient, held = regularised(param, group), proposal.state[param]
        # Adam's mean is corrected for its start at zero, and Nesterov's is not that mean.
        mean = _mean(proposal, param, {**group, "nesterov": False}, gradient)
        squares = held.get(SECOND_MOMENT)
        squares = torch.zeros_like(param) if squares is None else squares
        steps = held.get(ADAM_STEPS, torch.zeros((), device=param.device))
        held[SECOND_MOMENT] = _if_taken(proposal, squares.lerp(gradient.square(), 1 - self.beta2), squares)
        held[ADAM_STEPS] = _if_taken(proposal, steps + 1, steps)
        # In float64, as 1 - β₂ᵗ is a small difference at first.
        taken = held[ADAM_STEPS].double()
        root = (held[SECOND_MOMENT] / (1 - self.beta2**taken).to(param.dtype)).sqrt()
        correction: Tensor = 1 - group["momentum"] ** taken
        update: Tensor = mean / correction.to(param.dtype) / (root + self.eps)
        return update


class _Layer(NamedTuple):
    block: KFACBlock
    matrix: Tensor
    """The momentum, `[groups, out, in]`."""


def _mean(proposal: Proposal, param: nn.Parameter, group: Group, new: Tensor) -> Tensor:
    """Take a direction into the momentum; what the update is made of, Nesterov's look ahead included."""
    momentum = group["momentum"]
    if momentum == 0:
        return new
    buffer = proposal.momentum(param)
    before = torch.zeros_like(param) if buffer is None else buffer
    mean = before.lerp(new, 1 - momentum)
    proposal.state[param][MOMENTUM] = _if_taken(proposal, mean, before)
    return mean.lerp(new, 1 - momentum) if group["nesterov"] else mean


def _if_taken(proposal: Proposal, new: Tensor, before: Tensor) -> Tensor:
    """Return what is to be kept of a step that is perhaps not taken."""
    return new if proposal.finite is None else torch.where(proposal.finite, new, before)
