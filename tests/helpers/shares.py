"""Several ranks that share one block, in one process, beside the one process that sees all of their samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers.states import CPU, OwnStatistics
from kfac_optim import Inverse, LayerSpec
from kfac_optim.factors.factor import Elsewhere
from kfac_optim.inverses.state import Result
from kfac_optim.linalg.triangles import pack_triangle, unpack_triangle
from kfac_optim.specs import FactorShape
from kfac_optim.utils.tensor_storage import drop

DECAY = 0.7


class Sample(NamedTuple):
    """Rows of some examples; gradients are of single terms, of which the loss takes the mean."""

    a: Tensor
    gradients: Tensor
    opposed: bool = False
    groups: Tensor | None = None
    """Which groups have these rows, `[groups]` bool; None is all."""

    @property
    def examples(self) -> int:
        return self.a.shape[1]


class RoutedStatistics(OwnStatistics):
    """Rows that some groups have."""

    def __init__(self, a: Tensor, g: Tensor, groups: Tensor) -> None:
        of_groups = groups.view(-1, 1, 1, 1)
        super().__init__(a * of_groups, g * of_groups)
        self.routed = groups

    @property
    def count(self) -> Tensor:  # type: ignore[override]
        return self.a.shape[1] * self.a.shape[2] * self.routed


def sample(
    spec: LayerSpec, examples: int, positions: int = 2, *, opposed: bool = False, groups: Sequence[bool] | None = None
) -> Sample:
    """Random rows, along each axis of another length, so that eigenvalues lie apart."""
    a, g = (
        torch.randn(shape.groups, examples, positions, shape.dim) * torch.arange(1, shape.dim + 1).sqrt()
        for shape in _sides(spec.transposed() if opposed else spec)
    )
    return Sample(a, g, opposed, None if groups is None else torch.tensor(groups))


def tell(states: Sequence[Any], terms: Sequence[float]) -> None:
    """Tell each rank what all have counted in this step."""
    everywhere = sum(state.counts(each, 1.0) for state, each in zip(states, terms, strict=True))
    for state in states:
        state.tell(everywhere)


def _sides(spec: LayerSpec) -> tuple[FactorShape, FactorShape]:
    a, g = spec.factors()
    return a, g


@dataclass
class Ranks:
    """One state for each rank, and `joint`, that of a single process.

    Attributes:
        inverse: the representation.
        spec: of the block, by blocks.
        size: number of ranks.
        owners: the rank that refreshes each part, by its name.
        workers: ranks that precondition.
        payload: dtype of what is sent.
        tells: whether ranks tell each other what they have counted, before they fold.
    """

    inverse: Inverse[Any]
    spec: LayerSpec
    size: int
    owners: dict[str, int]
    workers: set[int]
    dtype: torch.dtype = torch.float64
    payload: torch.dtype = torch.float64
    tells: bool = False
    states: list[Any] = field(init=False)
    joint: Any = field(init=False)

    def __post_init__(self) -> None:
        self.states = [self._new() for _ in range(self.size)]
        for rank in range(self.size):
            self._drop_unused(rank)
        self.joint = self._new()

    def _new(self) -> Any:
        return self.inverse.init(self.spec, dtype=self.dtype, device=CPU)

    @property
    def parts(self) -> list[str]:
        return [part.name for part in self.inverse.parts(self.spec)]

    def appliers(self) -> set[int]:
        """Ranks that have all results."""
        return self.workers | set(self.owners.values())

    def fold(self, samples: Sequence[Sequence[Sample]], elsewhere: Sequence[int] | None = None) -> None:
        """A statistics step: of each rank its samples, and of one process those of all.

        Args:
            samples: of each rank, that reach the layer.
            elsewhere: how many examples of each rank do not.
        """
        elsewhere = elsewhere or [0] * self.size
        counts = [
            self._accumulate(state, own, unseen)
            for state, own, unseen in zip(self.states, samples, elsewhere, strict=True)
        ]
        if self.tells:
            tell(self.states, counts)
        everything = [each for own in samples for each in own]
        counts.append(self._accumulate(self.joint, everything, sum(elsewhere)))
        for state, terms in zip([*self.states, self.joint], counts, strict=True):
            if state.has_pending():
                state.fold(terms, DECAY)
            else:
                state.age(DECAY, terms)

    def _accumulate(self, state: Any, samples: Sequence[Sample], unseen: int) -> int:
        """The terms of its loss."""
        terms = unseen + sum(each.examples for each in samples)
        for a, gradients, opposed, groups in samples:
            a, gradients = a.to(self.dtype), gradients.to(self.dtype) / terms
            state.accumulate(
                OwnStatistics(a, gradients, opposed=opposed)
                if groups is None
                else RoutedStatistics(a, gradients, groups)
            )
        return terms

    def refresh(self, damping: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Merge, refresh and share; the refresh is of copies, taken over after `meanwhile`, where that is given."""
        self.merge()
        todo = [self.joint, *(self.states[rank] for rank in sorted(set(self.owners.values())))]
        solved = todo if meanwhile is None else [self._copy(state) for state in todo]
        for state in solved:  # dampings and states of one rank only ever meet
            self.inverse.refresh([state], [damping])
        if meanwhile is not None:
            meanwhile()
            for state, shadow in zip(todo, solved, strict=True):
                state.adopt(shadow)
        self.share()

    def merge(self) -> None:
        for part, owner in self.owners.items():
            averages = [state.averages(part) for state in self.states]
            others = []
            for index, own in enumerate(averages[owner]):
                # Numbers of ranks without mass are never sent.
                sent = [each[index] for each in averages if each[index] is not own]
                weighed = (torch.where(each.mass > 0, each.packed * each.mass, 0.0) for each in sent)
                total = sum(weighed, 0 * own.packed * own.mass)
                others.append((total, sum(each.mass for each in sent)))
            self.states[owner].merge(part, others)
            for rank, each in enumerate(averages):
                for factor in each:
                    if rank != owner:
                        factor.forget()
        for part, owner in self.owners.items():
            for other in set(self.owners.values()) - {owner}:
                (factor,) = self.states[owner].averages(part)
                (told,) = self.states[other].averages(part)
                told.elsewhere = Elsewhere(factor.trace(), factor.mass.amax())

    def share(self) -> None:
        for part, owner in self.owners.items():
            results = self.states[owner].results(part)
            sent = {index: self._sent(result) for index, result in enumerate(results)}
            measuring = {index: sent[index] for index, result in enumerate(results) if result.measuring}
            for rank, state in enumerate(self.states):
                state.take(part, sent if rank in self.appliers() else measuring)
            for tensor in sent.values():
                tensor.zero_()  # as a buffer that is used again

    def _sent(self, result: Result) -> Tensor:
        tensor = result.tensor.clone()
        if result.symmetric:
            tensor = unpack_triangle(pack_triangle(tensor), tensor.shape[-1])
        return tensor.to(self.payload)

    def _drop_unused(self, rank: int) -> None:
        """Give back the memory of what a rank needs neither to refresh, nor to precondition, nor to measure."""
        if rank not in self.appliers():
            for part in self.parts:
                for result in self.states[rank].results(part):
                    if not result.measuring:
                        drop(result.tensor)

    def _copy(self, state: Any) -> Any:
        copy = self._new()
        copy.load(state.tensors())
        if state is not self.joint:
            for part in self.parts:
                pairs = zip(copy.averages(part), state.averages(part), strict=True)
                for ours, theirs in pairs:
                    ours.elsewhere = theirs.elsewhere
        return copy

    def reload(self) -> None:
        """What each rank saved is loaded into states that were just made."""
        saved = [_copied(state.tensors()) for state in self.states]
        for rank, tensors in enumerate(saved):
            self.states[rank] = self._new()
            self._drop_unused(rank)
            self.states[rank].load(tensors)

    def directions(self, grad: Tensor, damping: float) -> list[Tensor]:
        """Of each rank that has all results."""
        return [self.inverse.apply(self.states[rank], grad, damping) for rank in sorted(self.appliers())]


def _copied(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.clone()
    return {name: _copied(each) for name, each in tensors.items()}
