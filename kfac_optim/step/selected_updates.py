"""Each layer takes Muon's step or that of the natural gradient, whichever goes further downhill on what comes next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.preconditioning import to_matrix, to_params
from kfac_optim.blocks.state_keys import ADAM_STEPS, MOMENTUM, PREFERENCE
from kfac_optim.factors.second_moments import on_host
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.deflation import DeflatedState
from kfac_optim.inverses.damped.powers import InverseAndRoot
from kfac_optim.specs import BlockDiagonal, Kept
from kfac_optim.step.orthogonal_updates import OrthogonalUpdates, if_taken, take_into_mean
from kfac_optim.step.step_size import Direction, Group, Proposal

_PERIOD = 5  # steps between two comparisons
_WEIGHT = 0.2  # what the last comparison counts for, of their average


@dataclass(frozen=True)
class SelectedUpdates(OrthogonalUpdates):
    """Takes, in each layer, the better of two updates of one size, at the rates of AdamW.

    Both are made of the momentum `M ← μ M + (1 - μ) ∇` of the layer's gradients `[out, in]`, with factors damped
    relative to their mean eigenvalues (`InverseAndRoot`), and both have the root mean square `rms`:

    - the orthogonal factor of `M (A + ε n_A I)^-½`, as `OrthogonalUpdates` has it, which suits gradients that are
      mostly noise;
    - `(G + ε n_G I)⁻¹ M (A + ε n_A I)⁻¹`, the natural gradient, which suits those that are mostly signal.

    Which is better the next gradient tells. At the first steps, and then at every fifth, both are made of the momentum
    as it was before the new gradient, of examples that it has not seen, and the slopes of the loss along both are
    compared, `⟨∇, update⟩`; the layer takes that update which was steeper on the average of late. So the choice needs
    no unit of the loss and no other pass. `metrics()["natural_updates"]` is the share of layers that prefer the natural
    gradient.

    All else is as with `OrthogonalUpdates`: norm layers, and all parameters that belong to no layer, take AdamW's step;
    leave the output layer to AdamW by `skip_layers`; weight decay is decoupled; there is no trust region. What it goes
    with:

        optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, nesterov=True, step_size=SelectedUpdates(),
                                  skip_layers=["head"])

    Rates of 0.003 to 0.03 suit the small models of the benchmarks. Name the loss (`estimate=MonteCarlo(criterion)`)
    where errors are large and of many sizes, as in autoencoders and regressions.
    """

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = InverseAndRoot()
    usual_structure: ClassVar[tuple[Kept, Kept] | None] = None
    preconditions = False

    def check(self, groups: Sequence[Group]) -> None:
        super().check(groups)
        for i, group in enumerate(groups):
            if group["momentum"] == 0:
                raise ValueError(
                    "kfac_optim: SelectedUpdates compares two updates that are made of the momentum, which has to be "
                    f"above 0, got momentum={group['momentum']!r} in param group {i}. Pass momentum=0.9."
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

    def report(self, state: Mapping[Any, Any], blocks: Sequence[KFACBlock]) -> dict[str, float]:
        held = [state[block.params[0]].get(PREFERENCE) for block in blocks if block.params[0] in state]
        natural = [bool(preference > 0) for preference in held if preference is not None]
        return {"natural_updates": sum(natural) / len(natural)} if natural else {}

    def _of_layers(
        self,
        proposal: Proposal,
        layers: Sequence[KFACBlock],
        trained: Mapping[nn.Parameter, Group],
        direction: Direction,
    ) -> Direction:
        ready = set(proposal.covered)
        chosen: list[_Layer] = []
        compared: list[tuple[_Layer, Tensor]] = []
        plain: Direction = {}
        for block in layers:
            mine = [param for param in block.params if param in trained]
            # Torch's momentum, of another rule, is a sum; the count marks a mean.
            averaged = all({MOMENTUM, ADAM_STEPS} <= proposal.state[param].keys() for param in mine)
            compares = block in ready and averaged and _is_time(block)
            before = {param: proposal.state[param][MOMENTUM] for param in mine} if compares else {}
            means = {param: take_into_mean(proposal, param, trained[param], direction.get(param)) for param in mine}
            if block not in ready:
                plain |= means
                continue
            chosen.append(_Layer(block, _matrix(block, means)))
            if compares:
                compared.append((_Layer(block, _matrix(block, before)), _matrix(block, direction)))
        self._compare(proposal, compared)
        updates = self._orthogonal([block for block in layers if block not in ready], plain)
        for layer, update in zip(chosen, self._updates(proposal, chosen), strict=True):
            block = layer.block
            for param, part in zip(block.params, to_params(block, update, block.params), strict=True):
                if param in trained:
                    updates[param] = part.to(param.dtype)
        return updates

    def _compare(self, proposal: Proposal, compared: "Sequence[tuple[_Layer, Tensor]]") -> None:
        """Take into each layer's preference which of both updates the new gradient is steeper along.

        Args:
            proposal: the step.
            compared: layers with the momentum before the new gradient, and the new gradient `[groups, out, in]`.
        """
        before = [layer for layer, _ in compared]
        for (layer, gradient), orthogonal, natural in zip(
            compared, self._orthogonal_of(before), map(self._natural_of, before), strict=True
        ):
            slopes = torch.stack([(gradient * update).sum() for update in (orthogonal, natural)])
            size = slopes.abs().sum()
            found = torch.where(size > 0, (slopes[1] - slopes[0]) / size, 0.0).nan_to_num(nan=0.0)
            held = _preference(proposal, layer.block)
            proposal.state[layer.block.params[0]][PREFERENCE] = if_taken(
                proposal, held.lerp(found.to(held), _WEIGHT), held
            )

    def _updates(self, proposal: Proposal, layers: "Sequence[_Layer]") -> list[Tensor]:
        """Return of each layer the update that it prefers, `[groups, out, in]`."""
        preferences = [_preference(proposal, layer.block) > 0 for layer in layers]
        if all(map(on_host, preferences)):  # then only one update is made of each
            natural = {layer.block for layer, prefers in zip(layers, preferences, strict=True) if prefers}
            rest = iter(self._orthogonal_of([layer for layer in layers if layer.block not in natural]))
            return [self._natural_of(layer) if layer.block in natural else next(rest) for layer in layers]
        # The host would wait for the preference.
        both = zip(preferences, map(self._natural_of, layers), self._orthogonal_of(layers), strict=True)
        return [torch.where(prefers, natural, orthogonal) for prefers, natural, orthogonal in both]

    def _orthogonal_of(self, layers: "Sequence[_Layer]") -> list[Tensor]:
        """Return the orthogonal update of each layer."""
        return self.of_matched_size([_whitened(layer) for layer in layers])

    def _natural_of(self, layer: "_Layer") -> Tensor:
        """Return the natural gradient of a layer in the size of all updates."""
        block = layer.block
        found = block.inverse.apply(block.state, layer.matrix, block.damping)
        # Numbers whose squares vanish, or overflow, in float32 are brought near 1 before they are squared.
        largest = found.abs().amax((-2, -1), keepdim=True)
        found = found / torch.where(largest > 0, largest, 1)
        size = found.square().mean((-2, -1), keepdim=True).sqrt()
        return found * (self.rms / torch.where(size > 0, size, 1))


class _Layer(NamedTuple):
    block: KFACBlock
    matrix: Tensor
    """What the update is made of, `[groups, out, in]`."""


def _is_time(block: KFACBlock) -> bool:
    """Return whether both updates are compared at this step: every few steps, and at each of the first."""
    step = block.clock.step
    return step < _PERIOD or step % _PERIOD == 0


def _whitened(layer: _Layer) -> Tensor:
    inverse, state = layer.block.inverse, layer.block.state
    assert isinstance(inverse, InverseAndRoot), "refused otherwise"
    assert isinstance(state, DeflatedState)
    return inverse.apply_root(state, layer.matrix)


def _matrix(block: KFACBlock, tensors: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Return one matrix of tensors by parameter, zeros where a parameter has none."""
    return to_matrix(block, [tensors.get(param, torch.zeros_like(param)) for param in block.params])


def _preference(proposal: Proposal, block: KFACBlock) -> Tensor:
    """Return what the comparisons of late say, `[]`: above 0 the natural gradient was steeper."""
    param = block.params[0]
    held: Tensor | None = proposal.state[param].get(PREFERENCE)
    # In the dtype of the parameter, which loading a checkpoint would cast it to.
    return torch.zeros((), dtype=param.dtype, device=param.device) if held is None else held.to(param.dtype)
