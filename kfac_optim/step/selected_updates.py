"""Each layer takes Muon's step or that of the natural gradient, whichever goes further downhill on what comes next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.preconditioning import regularised, to_matrix, to_params
from kfac_optim.blocks.state_keys import PREFERENCE
from kfac_optim.factors.second_moments import on_host
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.deflation import DeflatedState
from kfac_optim.inverses.damped.powers import InverseAndRoot
from kfac_optim.linalg.orthogonal import orthogonal_factors
from kfac_optim.specs import BlockDiagonal
from kfac_optim.step.adamw import adamw_update, if_taken, mean_before, take_into_mean
from kfac_optim.step.scalars import Scalar
from kfac_optim.step.step_size import Direction, Group, PlainSteps, Proposal, Sized, StepSize, refuse_sparse
from kfac_optim.utils.validation import check_number

_PERIOD = 5  # steps between two comparisons
_WEIGHT = 0.2  # what the last comparison counts for, of their average


@dataclass(frozen=True)
class SelectedUpdates(StepSize):
    """Takes, in each layer, the better of two updates of one size, at the rates of AdamW.

    Both are made of the momentum `M ← μ M + (1 - μ) ∇` of the layer's gradients, as a matrix `[out, in]` with the bias
    as its last column, and of factors damped relative to their mean eigenvalues (`InverseAndRoot`):

    - the orthogonal factor of `M (A + ε n_A I)^-½`, its singular values brought near 1 (Jordan et al. 2024, "Muon"; see
      `linalg.orthogonal`), which suits gradients that are mostly noise;
    - `(G + ε n_G I)⁻¹ M (A + ε n_A I)⁻¹`, the natural gradient, which suits those that are mostly signal.

    Each is scaled to a root mean square of `rms` (Liu et al. 2025, arXiv 2502.16982, §2.2). AdamW's updates have about
    that size, so that its rates, schedules and decoupled weight decay carry over.

    Which is better the next gradient tells. At the first steps, and then at every fifth, both are made of the momentum
    as it was before the new gradient, of examples that it has not seen, and the slopes of the loss along both are
    compared, `⟨∇, update⟩`; the layer takes that update which was steeper on the average of late. So the choice needs
    no unit of the loss and no other pass. `metrics()["natural_updates"]` is the share of layers that prefer the natural
    gradient.

    Norm layers, and all parameters that belong to no layer, take AdamW's step, with the momentum for β₁. Leave the
    output layer to AdamW by `skip_layers`, as Muon's recipe does. With `l2_in_curvature` weight decay is part of every
    gradient, and not decoupled. There is no trust region: `kl_clip` is not looked at. As with Muon a layer whose
    gradient has become zero goes on along its momentum, at its full size. What it goes with:

        optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, nesterov=True, step_size=SelectedUpdates(),
                                  skip_layers=["head"])

    Rates of 0.003 to 0.03 suit the small models of the benchmarks. Name the loss (`estimate=MonteCarlo(criterion)`)
    where errors are large and of many sizes, as in regressions.

    Args:
        rms: the root mean square of a layer's update at a rate of 1, above 0; of an orthogonal one where the momentum
            has the full rank of the matrix, and else less.
        beta2: the decay of Adam's average of squared gradients, from 0 to less than 1.
        eps: what is added to its root, above 0.

    Raises:
        TypeError: an argument is no number.
        ValueError: it is out of range.
    """

    rms: float = 0.2
    beta2: float = 0.999
    eps: float = 1e-8

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = InverseAndRoot()
    preconditions = False
    takes_shards = False
    directs_all = True
    plain = PlainSteps(layer="Muon", rest="AdamW")

    def __post_init__(self) -> None:
        check_number("rms of SelectedUpdates", self.rms, above=0)
        check_number("beta2 of SelectedUpdates", self.beta2, at_least=0, at_most=1)
        if self.beta2 == 1:
            raise ValueError("kfac_optim: beta2 of SelectedUpdates must be below 1, got 1.")
        check_number("eps of SelectedUpdates", self.eps, above=0)

    def check(self, groups: Sequence[Group]) -> None:
        for i, group in enumerate(groups):
            if group["dampening"] != 0 or not 0 < group["momentum"] < 1:
                raise ValueError(
                    "kfac_optim: SelectedUpdates makes its updates of a mean of gradients, which needs momentum "
                    f"above 0 and below 1 and dampening 0, got momentum={group['momentum']!r} and "
                    f"dampening={group['dampening']!r} in param group {i}. Pass momentum=0.9."
                )
            refuse_sparse(group, i, "SelectedUpdates")
            for param in group["params"]:
                if param.grad is not None and param.is_complex():
                    raise RuntimeError(
                        f"kfac_optim: a parameter {list(param.shape)} of param group {i} is complex, and "
                        "SelectedUpdates takes real ones. Keep it as torch.view_as_real of the complex one, or pass "
                        "step_size=AdaptiveTrustRegion()."
                    )

    def check_layers(self, options: BlockOptions) -> None:
        for inverse in (options.inverse.default, *options.inverse.by_pattern.values()):
            if not isinstance(inverse, InverseAndRoot):
                raise ValueError(
                    f"kfac_optim: SelectedUpdates chooses between two powers of the factors, which inverse={inverse!r} "
                    "does not keep. Leave inverse out, or pass InverseAndRoot(...)."
                )
        for kept in (options.structure.default, *options.structure.by_pattern.values()):
            if any(isinstance(side, BlockDiagonal) for side in kept):
                raise ValueError(
                    f"kfac_optim: SelectedUpdates makes matrices orthogonal as a whole, and structure={kept!r} cuts "
                    "them into blocks. Leave structure out: wide factors are sketched."
                )

    def report(self, state: Mapping[Any, Any], blocks: Sequence[KFACBlock]) -> dict[str, Scalar]:
        held = [state[block.params[0]].get(PREFERENCE) for block in blocks if block.params[0] in state]
        known = [preference for preference in held if preference is not None]
        if not known:
            return {}
        natural = torch.stack([preference.to(known[0].device, non_blocking=True) for preference in known]) > 0
        return {"natural_updates": natural.double().mean()}

    def size(self, proposal: Proposal) -> Sized:
        group_of = {param: group for group in proposal.groups for param in group["params"] if param.grad is not None}
        trained = {param: group_of[param] for param in proposal.executor.gradients.owned(list(group_of))}
        layers = [block for block in proposal.graded if any(p.dim() > 1 and p in trained for p in block.params)]
        updates = self._of_layers(proposal, layers, trained)
        for param, group in trained.items():
            if param not in updates:
                updates[param] = adamw_update(proposal, param, group, beta2=self.beta2, eps=self.eps)
        return Sized(updates, lambda _: {"momentum": 0.0, "nesterov": False}, {})

    def _of_layers(
        self, proposal: Proposal, blocks: Sequence[KFACBlock], trained: Mapping[nn.Parameter, Group]
    ) -> Direction:
        """Return the updates of layers, and take their gradients into the momentum.

        Args:
            proposal: the step.
            blocks: with a matrix.
            trained: the parameters that are updated here, with their param groups.
        """
        ready, layers = set(proposal.covered), []
        compared: list[tuple[_Layer, Tensor]] = []
        for block in blocks:
            # At once, so that all checkpoints have it: `torch.distributed.checkpoint` reads what both sides have.
            proposal.state[block.params[0]].setdefault(PREFERENCE, _preference(proposal, block))
            mine = {param: trained[param] for param in block.params if param in trained}
            before = {param: mean_before(proposal, param) for param in mine}
            if block in ready and _is_time(block) and all(mean is not None for mean in before.values()):
                gradients = {param: regularised(param, group) for param, group in mine.items()}
                compared.append((_Layer(block, _matrix(block, before)), _matrix(block, gradients)))
            means = {param: take_into_mean(proposal, param, group) for param, group in mine.items()}
            layers.append(_Layer(block, _matrix(block, means), block in ready))
        self._compare(proposal, compared)
        updates: Direction = {}
        for layer, update in zip(layers, self._updates(proposal, layers), strict=True):
            params = layer.block.params
            for param, part in zip(params, to_params(layer.block, update, params), strict=True):
                if param in trained:
                    updates[param] = part.to(param.dtype)
        return updates

    def _compare(self, proposal: Proposal, compared: "Sequence[tuple[_Layer, Tensor]]") -> None:
        """Take into each layer's preference which of both updates the new gradient is steeper along.

        Args:
            proposal: the step.
            compared: layers with the momentum before the new gradient, and the new gradient `[groups, out, in]`.
        """
        both = self._candidates(proposal, [layer for layer, _ in compared], [None] * len(compared))
        for (layer, gradient), updates in zip(compared, both, strict=True):
            slopes = torch.stack([(gradient * update).sum() for update in updates if update is not None])
            size = slopes.abs().sum()
            found = torch.where(size > 0, (slopes[1] - slopes[0]) / size, 0.0).nan_to_num(nan=0.0)
            held = _preference(proposal, layer.block)
            new = held.lerp(found.to(held), _WEIGHT)
            proposal.state[layer.block.params[0]][PREFERENCE] = if_taken(proposal, new, held)

    def _updates(self, proposal: Proposal, layers: "Sequence[_Layer]") -> list[Tensor]:
        """Return of each layer the update that it prefers, `[groups, out, in]`."""
        preferences = [_preference(proposal, layer.block) > 0 for layer in layers]
        # The host would wait for what an accelerator holds: there both are made.
        wanted = [
            bool(each) if on_host(each) and layer.is_ready else None
            for each, layer in zip(preferences, layers, strict=True)
        ]
        found = []
        for prefers, (orthogonal, natural) in zip(preferences, self._candidates(proposal, layers, wanted), strict=True):
            if orthogonal is not None and natural is not None:
                found.append(torch.where(prefers, natural, orthogonal))
            else:
                found += [update for update in (orthogonal, natural) if update is not None]
        return found

    def _candidates(
        self, proposal: Proposal, layers: "Sequence[_Layer]", natural: Sequence[bool | None]
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the orthogonal and the natural update of each layer.

        Args:
            proposal: the step.
            layers: where one has no inverse, its orthogonal update is that of the momentum as it is, and the only one.
            natural: which of both is wanted of each; None is both. The other is None.
        """
        roots = {number: layer.matrix for number, layer in enumerate(layers) if not layer.is_ready}
        naturals: dict[int, Tensor] = {}
        ready = [number for number, layer in enumerate(layers) if layer.is_ready]
        blocks, matrices = [layers[number].block for number in ready], [layers[number].matrix for number in ready]
        for indices, state, matrix in proposal.executor.gradients.stacks.alike(blocks, matrices):
            inverse, sizes = blocks[indices[0]].inverse, [len(matrices[index]) for index in indices]
            assert isinstance(inverse, InverseAndRoot), "refused otherwise"
            assert isinstance(state, DeflatedState)
            numbers = [ready[index] for index in indices]
            if not all(natural[number] for number in numbers):
                parts = torch.split(inverse.apply_root(state, matrix), sizes)
                roots |= {n: part for n, part in zip(numbers, parts, strict=True) if not natural[n]}
            if any(natural[number] is not False for number in numbers):
                parts = torch.split(self._sized(inverse.apply(state, matrix, 0.0)), sizes)
                naturals |= {n: part for n, part in zip(numbers, parts, strict=True) if natural[n] is not False}
        factors = orthogonal_factors(list(roots.values()))
        orthogonal = {
            n: each * (self.rms * max(each.shape[-2:]) ** 0.5) for n, each in zip(roots, factors, strict=True)
        }
        return [(orthogonal.get(number), naturals.get(number)) for number in range(len(layers))]

    def _sized(self, matrix: Tensor) -> Tensor:
        """Scale matrices `[n, out, in]` to the root mean square of all updates; zeros stay zeros."""
        # Numbers whose squares vanish, or overflow, in float32 are brought near 1 before they are squared.
        largest = matrix.abs().amax((-2, -1), keepdim=True)
        matrix = matrix / torch.where(largest > 0, largest, 1)
        size = matrix.square().mean((-2, -1), keepdim=True).sqrt()
        return matrix * (self.rms / torch.where(size > 0, size, 1))


class _Layer(NamedTuple):
    block: KFACBlock
    matrix: Tensor
    """What the update is made of, `[groups, out, in]`."""
    is_ready: bool = True
    """Whether there is an inverse."""


def _is_time(block: KFACBlock) -> bool:
    """Return whether both updates are compared at this step: every few steps, and at each of the first."""
    step = block.clock.step
    return step < _PERIOD or step % _PERIOD == 0


def _matrix(block: KFACBlock, tensors: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
    """Return one matrix of tensors by parameter, zeros where a parameter has none."""
    found = (tensors.get(param) for param in block.params)
    return to_matrix(
        block,
        [torch.zeros_like(param) if each is None else each for param, each in zip(block.params, found, strict=True)],
    )


def _preference(proposal: Proposal, block: KFACBlock) -> Tensor:
    """Return what the comparisons of late say, `[]`: above 0 the natural gradient was steeper."""
    param = block.params[0]
    held: Tensor | None = proposal.state[param].get(PREFERENCE)
    # In the dtype of the parameter, which loading a checkpoint would cast it to.
    return torch.zeros((), dtype=param.dtype, device=param.device) if held is None else held.to(param.dtype)
