"""Each layer takes Muon's step, or that of the natural gradient where it is far steeper on what comes next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.preconditioning import apart, to_matrix, to_params
from kfac_optim.blocks.state_keys import PREFERENCE
from kfac_optim.factors.second_moments import on_host
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.deflation import DeflatedState
from kfac_optim.inverses.damped.powers import InverseAndRoot
from kfac_optim.linalg.orthogonal import orthogonal_factors
from kfac_optim.linalg.products import frobenius_norm
from kfac_optim.specs import BlockDiagonal
from kfac_optim.step.adamw import adamw_updates, gradient_here, if_taken, mean_before, take_into_means
from kfac_optim.step.roles import Parts
from kfac_optim.step.scalars import Scalar
from kfac_optim.step.step_size import Direction, Group, PlainSteps, Proposal, Sized, StepSize, refuse_sparse
from kfac_optim.utils.streams import brought
from kfac_optim.utils.validation import check_number

_PERIOD = 5  # steps between two comparisons
_STEEPER = 2.0  # times, at least, that the natural gradient has to be as steep as the orthogonal update
_WEIGHT = 0.2  # what the last comparison counts for, of their average


@dataclass(frozen=True)
class SelectedUpdates(StepSize):
    """Takes, in each layer, the better of two updates of one size, about AdamW's.

    Both are made of the momentum `M ← μ M + (1 - μ) ∇` of the layer's gradients, as a matrix `[out, in]` with the bias
    as its last column, and of factors damped relative to their mean eigenvalues (`InverseAndRoot`):

    - the orthogonal factor of `M (A + ε n_A I)^-½`, its singular values brought near 1 (Jordan et al. 2024, "Muon"; see
      `linalg.orthogonal`), which suits gradients that are mostly noise;
    - `(G + ε n_G I)⁻¹ M (A + ε n_A I)⁻¹`, the natural gradient, which suits those that are mostly signal.

    Each is scaled to a root mean square of `rms` (Liu et al. 2025, arXiv 2502.16982, §2.2). AdamW's updates have about
    that size, so that its schedules and decoupled weight decay carry over, and its rate is where to begin.

    The next gradient tells which is better. At the first steps, and then at every fifth, both updates are made of the
    momentum before the new gradient, whose examples they have not seen, and the slopes of the loss along both,
    `⟨∇, update⟩`, are compared. The layer takes the natural gradient if it has lately been more than twice as steep on
    average: it goes far along a few directions, and the loss may turn there. So the choice needs no unit of the loss
    and no other pass. `metrics()["natural_updates"]` is the share of layers that prefer the natural gradient.

    Norm layers, of which no statistics are taken then, and all parameters that belong to no layer take AdamW's step,
    with the momentum for β₁. Leave the output layer to AdamW by `skip_layers`, as Muon's recipe does. With
    `l2_in_curvature` weight decay is part of every gradient, and not decoupled. There is no trust region: `kl_clip` is
    not looked at. As with Muon a layer whose gradient has become zero goes on along its momentum, at its full size; in
    float16 it does so for ever, as a mean stops decaying at 2e-7 there. Where a layer is to rest, leave it out of the
    loss, so that its gradient is None. Use it like this:

        optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, nesterov=True, step_size=SelectedUpdates(),
                                  skip_layers=["head"])

    Rates of 0.003 to 0.03 suit the small models of the benchmarks. Name the loss (`estimate=MonteCarlo(criterion)`)
    where errors are large and of many sizes, as in regressions.

    Args:
        rms: the root mean square of a layer's update at a rate of 1, above 0; of an orthogonal one where the momentum
            has the full rank of the matrix, and else less.
        beta2: the decay of Adam's average of squared gradients, from 0 to less than 1.
        eps: what is added to its root, above 0; in float16 at least 0.008 (with this `beta2`), below which averages of
            squares vanish there.

    Raises:
        TypeError: an argument is no number.
        ValueError: it is out of range.
    """

    rms: float = 0.2
    beta2: float = 0.999
    eps: float = 1e-8

    usual_inverse: ClassVar[Inverse[Any] | InverseRule] = InverseAndRoot()
    preconditions = False
    directs_all = True
    matrices_only = True
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
                    f"dampening={group['dampening']!r} in param group {i}. Pass momentum=0.9, dampening=0."
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
        natural = torch.stack([brought(preference, known[0].device) for preference in known]) > 0
        return {"natural_updates": natural.double().mean()}

    def size(self, proposal: Proposal) -> Sized:
        group_of = {param: group for group in proposal.groups for param in group["params"] if param.grad is not None}
        trained = {param: group_of[param] for param in proposal.executor.gradients.owned(list(group_of))}
        layers = [block for block in proposal.graded if any(p.dim() > 1 and p in trained for p in block.params)]
        updates = self._of_layers(proposal, layers, trained)
        others = {param: group for param, group in trained.items() if param not in updates}
        updates |= adamw_updates(proposal, others, beta2=self.beta2, eps=self.eps)
        return Sized(updates, {}, sgd=lambda _: {"momentum": 0.0, "nesterov": False})

    def _of_layers(
        self, proposal: Proposal, blocks: Sequence[KFACBlock], trained: Mapping[nn.Parameter, Group]
    ) -> Direction:
        """Return the updates of layers, and take their gradients into the momentum.

        Args:
            proposal: the step.
            blocks: the blocks of the layers, which have a matrix.
            trained: the parameters that are updated here, with their param groups.
        """
        ready, gradients = set(proposal.covered), proposal.executor.gradients
        groups = {param: trained[param] for block in blocks for param in block.params if param in trained}
        before = {param: mean_before(proposal, param) for param in groups}
        compared: list[KFACBlock] = []
        for block in blocks:
            # At once, so that all checkpoints have it: `torch.distributed.checkpoint` reads what both sides have.
            proposal.state[block.params[0]].setdefault(PREFERENCE, _preference(proposal, block))
            known = all(before[param] is not None for param in block.params if param in groups)
            if block in ready and _is_time(block) and known:
                compared.append(block)
        if compared:
            self._compare(proposal, compared, before, groups)
        here = gradients.whole(blocks, take_into_means(proposal, groups, before))
        goes_alone = gradients.stacks.goes_alone
        bundles = [
            _Bundle([block], to_matrix(block, parts), parts, None, goes_alone(block.params[0]))
            for block, parts in here
            if block not in ready
        ]
        bundles += _bundles(proposal, [(block, parts) for block, parts in here if block in ready])
        made: dict[KFACBlock, Parts] = {}
        for bundle, update in zip(bundles, self._updates(proposal, bundles), strict=True):
            made |= zip(bundle.blocks, bundle.parts(update), strict=True)
        return gradients.updates(made, blocks)

    def _compare(
        self,
        proposal: Proposal,
        blocks: Sequence[KFACBlock],
        before: Mapping[nn.Parameter, Tensor | None],
        groups: Mapping[nn.Parameter, Group],
    ) -> None:
        """Take into each layer's preference how steep the new gradient is along both updates.

        Args:
            proposal: the step.
            blocks: the layers, which have an inverse.
            before: the momentum before the new gradient.
            groups: the parameters that are updated here, with their param groups.
        """
        flow = proposal.executor.gradients
        params = [param for block in blocks for param in block.params if param in groups]
        latest = {param: gradient_here(param, groups[param]) for param in params}
        earlier = {param: mean for param in params if (mean := before[param]) is not None}
        gradients = _bundles(proposal, flow.whole(blocks, latest))
        bundles = _bundles(proposal, flow.whole(blocks, earlier))
        preferences: dict[KFACBlock, Tensor] = {}
        both = self._candidates(bundles, [[None] * len(bundle.blocks) for bundle in bundles])
        for bundle, gradient, updates in zip(bundles, gradients, both, strict=True):
            shape = len(bundle.blocks), -1
            slopes = [(gradient.matrix * each).reshape(shape).sum(1) for each in updates if each is not None]
            orthogonal, natural = _STEEPER * slopes[0], slopes[1]
            size = orthogonal.abs() + natural.abs()
            found = torch.where(size > 0, (natural - orthogonal) / size, 0.0).nan_to_num(nan=0.0)
            held = bundle.preferences(proposal)
            new = if_taken(proposal, held.lerp(found.to(held), _WEIGHT), held)
            preferences |= zip(bundle.blocks, new.unbind(), strict=True)
        for block, preference in zip(blocks, flow.as_makers_have(blocks, preferences), strict=True):
            proposal.state[block.params[0]][PREFERENCE] = preference.to(block.params[0].dtype).clone()

    def _updates(self, proposal: Proposal, bundles: "Sequence[_Bundle]") -> list[Tensor]:
        """Return the updates that layers prefer, in the shapes of the matrices of their bundles."""
        prefers = [bundle.preferences(proposal) > 0 for bundle in bundles]
        # The host would wait for what an accelerator holds: there both are made.
        wanted = [each.tolist() if on_host(each) else [None] * len(each) for each in prefers]
        found = []
        for chosen, (orthogonal, natural) in zip(prefers, self._candidates(bundles, wanted), strict=True):
            if orthogonal is not None and natural is not None:
                found.append(torch.where(chosen.view(-1, 1, 1), natural, orthogonal))
            else:
                found += [update for update in (orthogonal, natural) if update is not None]
        return found

    def _candidates(
        self, bundles: "Sequence[_Bundle]", natural: Sequence[Sequence[bool | None]]
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the orthogonal and the natural updates of each bundle.

        Args:
            bundles: the bundles. Where one has no inverse, its orthogonal update is that of the momentum as it is, and
                the only one.
            natural: what each layer needs: True for the natural update, False for the orthogonal one, None for both. An
                update that no layer of the bundle needs is None; rows of layers that do not need it may hold anything.
        """
        roots: dict[int, Tensor] = {}
        rows: dict[int, list[int]] = {}
        naturals: dict[int, Tensor] = {}
        for number, (bundle, wanted) in enumerate(zip(bundles, natural, strict=True)):
            if bundle.state is None:
                roots[number] = bundle.matrix
                continue
            inverse = bundle.blocks[0].inverse
            assert isinstance(inverse, InverseAndRoot), "refused otherwise"
            if not all(wanted):
                root = inverse.apply_root(bundle.state, bundle.matrix)
                rows[number] = [row for row, each in enumerate(wanted) if not each]
                roots[number] = root if len(rows[number]) == len(wanted) else root[rows[number]]
            if any(each is not False for each in wanted):
                naturals[number] = self._sized(inverse.apply(bundle.state, bundle.matrix, 0.0))
        orthogonal: dict[int, Tensor] = {}
        alone = [place for place, number in enumerate(roots) if bundles[number].alone]
        for number, factor in zip(roots, orthogonal_factors(list(roots.values()), alone), strict=True):
            sized = factor * (self.rms * max(factor.shape[-2:]) ** 0.5)
            if len(sized) < len(bundles[number].matrix):
                whole = torch.zeros_like(bundles[number].matrix)
                whole[rows[number]] = sized
                sized = whole
            orthogonal[number] = sized
        return [(orthogonal.get(number), naturals.get(number)) for number in range(len(bundles))]

    def _sized(self, matrix: Tensor) -> Tensor:
        """Scale matrices `[n, out, in]` to the root mean square of all updates; zeros stay zeros."""
        matrix = matrix.nan_to_num()  # where both factors are nearly zero, their inverses may overflow together
        sized: Tensor = matrix / frobenius_norm(matrix) * (self.rms * matrix[0].numel() ** 0.5)
        return sized


class _Bundle(NamedTuple):
    """Holds layers whose updates are made in one batch."""

    blocks: Sequence[KFACBlock]
    """One, or several of equal shape."""
    matrix: Tensor
    """What the updates are made of: `[groups, out, in]` of one layer, `[blocks, out, in]` of several."""
    like: Parts
    """Tensors in the shapes of the parameters of one layer."""
    state: DeflatedState[Any] | None
    """The inverses; None of a layer that has none yet."""
    alone: bool
    """Whether its update is made apart from all others, see `Stacks.goes_alone`."""

    def parts(self, update: Tensor) -> Iterable[Sequence[Tensor]]:
        """Return the parts of an update, shaped as `matrix`, that belong to each parameter of each layer."""
        if len(self.blocks) > 1:
            return zip(*apart(update, self.like), strict=True)
        return [to_params(self.blocks[0], update, self.like)]

    def preferences(self, proposal: Proposal) -> Tensor:
        """Return those of all its layers, `[blocks]`; see `_preference`."""
        return torch.stack([_preference(proposal, block) for block in self.blocks])


def _bundles(proposal: Proposal, layers: Sequence[tuple[KFACBlock, Parts]]) -> list[_Bundle]:
    """Put layers that have an inverse in bundles, the same ones whatever the tensors hold.

    Args:
        proposal: the step.
        layers: the layers, each with what its update is made of, a tensor for each parameter.
    """
    found = []
    blocks, parts = [block for block, _ in layers], [of_layer for _, of_layer in layers]
    stacks = proposal.executor.gradients.stacks
    for members, state, matrix in stacks.alike(blocks, parts):
        assert isinstance(state, DeflatedState)
        bundled = [blocks[index] for index in members]
        alone = stacks.goes_alone(bundled[0].params[0])
        found.append(_Bundle(bundled, matrix, parts[members[0]], state, alone))
    return found


def _is_time(block: KFACBlock) -> bool:
    """Return whether both updates are compared at this step: every few of the layer's steps, and at each of the first.

    Steps without a gradient do not count, or a layer that is used in turn with others would perhaps never be compared.
    """
    graded = block.clock.graded
    return graded < _PERIOD or graded % _PERIOD == 0


def _preference(proposal: Proposal, block: KFACBlock) -> Tensor:
    """Return what recent comparisons say, `[]`: above 0 the natural gradient was steep enough."""
    param = block.params[0]
    held: Tensor | None = proposal.state[param].get(PREFERENCE)
    # In the dtype of the parameter, which loading a checkpoint would cast it to.
    return torch.zeros((), dtype=param.dtype, device=param.device) if held is None else held.to(param.dtype)
